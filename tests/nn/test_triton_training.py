"""The kernels of nn/triton_training.py equal the model's own shift, norm and rotation, one by one in float64.

They need Triton, and a CUDA device or its interpreter, which takes minutes:
TRITON_INTERPRET=1 pytest tests/nn/test_triton_training.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from ascendchat.nn.gpt import PlainOps, rope_tables, shifted

pytest.importorskip("triton", reason="Triton is not installed: it comes with a CUDA build of torch")

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not CUDA and not INTERPRETED:
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
PLACE = torch.device("cuda" if CUDA else "cpu")
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def per_document(
    qkv: Tensor, share: Tensor, rope: tuple[Tensor, Tensor], kv_heads: int, follows: Tensor | None
) -> tuple[Tensor, ...]:
    ops, query_heads = PlainOps(), qkv.size(2) - 2 * kv_heads
    qk, v = shifted(0, qkv, share, follows).split((query_heads + kv_heads, kv_heads), dim=2)
    q, k = ops.rotary(ops.rms_norm(qk), *rope).split((query_heads, kv_heads), dim=2)
    return q, k, v


def error(found: Tensor, wanted: Tensor) -> float:
    return float(((found.double() - wanted).norm() / wanted.norm()).detach())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_cuda)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 40, 4, 2, 16), (1, 300, 3, 1, 8), (2, 33, 2, 1, 24), (1, 1, 2, 2, 16)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_the_kernels_equal_the_formula_and_its_gradient(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, packed: bool
) -> None:
    from ascendchat.nn.triton_training import heads

    rows, length, query_heads, kv_heads, dim = sizes
    torch.manual_seed(0)
    qkv = torch.randn(rows, length, query_heads + 2 * kv_heads, dim).to(PLACE, dtype).requires_grad_()
    share = torch.randn(query_heads + 2 * kv_heads, dim).to(dtype).float().to(PLACE).requires_grad_()
    cos, sin = (table.to(PLACE, dtype) for table in rope_tables(length, dim))
    follows = (torch.rand(rows, length) > 0.3).to(PLACE, dtype) if packed else None
    if follows is not None:
        follows[:, 0] = 0  # a document begins with its row
    found = heads(qkv, share, (cos, sin), kv_heads, follows)
    grads = [torch.randn_like(part) for part in found]
    found += torch.autograd.grad(found, (qkv, share), grads)

    exact, exact_share = qkv.detach().double().requires_grad_(), share.detach().double().requires_grad_()
    follows = None if follows is None else follows.double()
    wanted = per_document(exact, exact_share, (cos.double(), sin.double()), kv_heads, follows)
    wanted += torch.autograd.grad(wanted, (exact, exact_share), [grad.double() for grad in grads])
    for name, one, other in zip(("q", "k", "v", "qkv's", "share's"), found, wanted, strict=True):
        if length == 1 and name == "share's":
            assert not one.any()  # no token has one before it
        else:
            assert error(one, other) < (1e-6 if dtype == torch.float32 else 3e-3), name


@needs_cuda
def test_a_micro_batch_of_a_million_tokens_fits_one_launch() -> None:
    from ascendchat.nn.triton_training import heads

    qkv = torch.randn(512, 2048, 3, 16, device=PLACE, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (table.to(PLACE, torch.bfloat16) for table in rope_tables(2048, 16))
    share = torch.zeros(3, 16, device=PLACE, requires_grad=True)
    q, _, v = heads(qkv, share, (cos, sin), 1)
    (q.float().sum() + v.float().sum()).backward()
    torch.testing.assert_close(v, qkv[:, :, 2:].detach())
    assert float(qkv.grad[-1, -1, 2].min()) == 1.0  # of the very last token
