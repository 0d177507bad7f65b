"""Rows of training by flash-attn-4: the operators around it pass the right windows and gradients.

The package itself needs a Hopper chip: without one a stand-in computes what its documentation says, in plain torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ascendchat.device import cuda_attention, pick
from ascendchat.device.cuda_attention import Flash
from ascendchat.nn.attention import Reference
from ascendchat.nn.gpt import GPT
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import TrainModel


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """What one test knew of the package is nothing to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_attention, "PACKAGE", replace(cuda_attention.PACKAGE))
        yield


HOPPER = torch.cuda.is_available() and cuda_attention.package_refusal(torch.device("cuda")) is None


def seen(q: Tensor, k: Tensor, known: dict[str, Any]) -> Tensor:
    """(T, S) bool, as flash-attn-4 says: `left` keys before a query's own and `right` behind it, None: all."""
    places = torch.arange(q.size(1))
    distance = places[:, None] - places[None]
    left, right = known.get("window_size_left"), 0 if known.get("causal") else known.get("window_size_right")
    found = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        found &= distance <= left
    if right is not None:
        found &= -distance <= right
    bounds = known.get("cu_seqlens_q")
    if bounds is not None:
        assert known["cu_seqlens_k"] is bounds
        assert bounds[0] == 0
        assert int(bounds.diff().max()) <= known["max_seqlen_q"] == known["max_seqlen_k"]
        document = torch.bucketize(places, bounds[1:], right=True)
        found &= document[:, None] == document[None]
    return found


def scores(q: Tensor, k: Tensor, scale: float, known: dict[str, Any]) -> Tensor:
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
    found = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return found.masked_fill(~seen(q, k, known), float("-inf"))


def forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, return_lse: bool, **known: Any) -> Any:
    """Rows (B, T, H, D), or documents end to end (T, H, D)."""
    assert return_lse
    packed = "cu_seqlens_q" in known
    q, k, v = (x[None] if packed else x for x in (q, k, v))
    found = scores(q, k, softmax_scale, known)
    y = torch.einsum("bhqk,bkhd->bqhd", found.softmax(dim=-1), v.repeat_interleave(q.size(2) // v.size(2), dim=2))
    y, logsumexp = y.contiguous(), found.logsumexp(dim=-1)
    return (y[0], logsumexp[0], None, None, None) if packed else (y, logsumexp, None, None, None)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    grad: Tensor,
    lse: Tensor,
    scale: float,
    *,
    deterministic: bool,
    **known: Any,
) -> tuple[Tensor, ...]:
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    given = q, k, v
    q, k, v, y, grad, lse = (x[None] if "cu_seqlens_q" in known else x for x in (q, k, v, y, grad, lse))
    group, sizes = q.size(2) // k.size(2), (*k.shape[:2], k.size(2), -1, k.size(3))
    share = (scores(q, k, scale, known) - lse.unsqueeze(-1)).exp()
    of_share = torch.einsum("bqhd,bkhd->bhqk", grad, v.repeat_interleave(group, dim=2))
    of_scores = share * (of_share - (grad * y).sum(dim=-1).transpose(1, 2).unsqueeze(-1)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", of_scores, k.repeat_interleave(group, dim=2))
    dk = torch.einsum("bhqk,bqhd->bkhd", of_scores, q).reshape(sizes).sum(dim=3)
    dv = torch.einsum("bhqk,bqhd->bkhd", share, grad).reshape(sizes).sum(dim=3)
    return tuple(torch.empty_like(x).copy_(dx.view(x.shape)) for x, dx in zip(given, (dq, dk, dv)))  # with its strides


# By these names the package takes what a query sees; who calls it asks for them first.
SEES = "causal window_size_left window_size_right cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
for function, own in ((forward, "softmax_scale return_lse"), (backward, "deterministic")):
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in f"{own} {SEES}".split()]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules like those of the package."""
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    modules: list[Any] = [ModuleType(name) for name in names]
    for name, module in zip(names, modules):
        monkeypatch.setitem(sys.modules, name, module)
    modules[0].cute, modules[1].interface = modules[1:]
    modules[2]._flash_attn_fwd, modules[2]._flash_attn_bwd = forward, backward
    return modules[2]


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> Flash:
    """The kernel as it is on a chip that has the package."""
    stand_in(monkeypatch)
    monkeypatch.setattr(cuda_attention, "package_refusal", lambda device: None)
    kernel = Flash()
    kernel.prepare(64, [64], torch.device("cpu"))
    return kernel


@pytest.mark.parametrize(
    ("window", "kv_heads", "packed", "compiled"),
    [(64, 4, False, False), (17, 2, False, True), (1, 1, True, False), (17, 2, True, True)],
)
def test_rows_and_documents_equal_the_reference(
    packaged: Flash, window: int, kv_heads: int, packed: bool, compiled: bool
) -> None:
    generator, exact = torch.Generator().manual_seed(0), Reference()
    sizes = [(2, 64, heads, 16) for heads in (4, kv_heads, kv_heads)]
    there = [torch.randn(size, generator=generator, requires_grad=True) for size in sizes]
    grad, lengths = torch.randn(2, 64, 4, 16, generator=generator), np.array([1, 40, 23, 64], np.int32)
    known, numbers = (kernel.bounds(lengths, 2, False, lambda x: x) for kernel in (packaged, exact))
    assert len(known) > len(lengths) + 1  # documents without tokens among them

    def attend(*tensors: Tensor) -> Tensor:
        if packed:
            return packaged.packed(*tensors, known, window, 0.2) * 1.0
        return packaged.dense(*tensors, window, 0.2) * 1.0

    torch.compiler.reset()
    found = (torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend)(*there)
    wanted = exact.packed(*there, numbers, window, 0.2) if packed else exact.dense(*there, window, 0.2)
    both = ((y, *torch.autograd.grad(y, there, grad)) for y in (found, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_training_of_small_heads_asks_the_package(packaged: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    attend = cuda_attention.attend
    monkeypatch.setattr(cuda_attention, "attend", lambda *known: asked.append(known[0].shape) or attend(*known))
    for channels in (128, 256):
        there = [torch.randn(1, 64, 2, channels, requires_grad=True) for _ in "qkv"]
        packaged.dense(*there, 64, 0.2)
    assert asked == [(1, 64, 2, 128)]


@pytest.mark.parametrize(("head_dim", "found"), [(64, ["attention"]), (256, [])])
def test_a_run_records_what_the_package_computes(packaged: Flash, head_dim: int, found: list[str]) -> None:
    shape, device = Shape.from_depth(1, dim=256, head_dim=head_dim, vocab=64, seq_len=64), pick("cpu")
    assert TrainModel(GPT(shape), packaged, device, device.bind(0)).packaged == found


def test_gradients_have_the_strides_that_a_compiler_is_told(packaged: Flash) -> None:
    """A model of Hugging Face turns heads and tokens; the package gives the gradients the strides of what it got."""
    there = [torch.randn(2, 4, 64, 16).transpose(1, 2) for _ in "qkv"]
    y, logsumexp = cuda_attention._package_forward(*there, None, 64, 17, 0.2)
    arguments = (torch.randn_like(y), *there, None, y, logsumexp, 64, 17, 0.2)
    torch.library.opcheck(cuda_attention._package_backward, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("capability", "head_dim", "backward", "said"),
    [
        ((9, 0), 128, backward, "used"),
        ((10, 0), 256, backward, "a head of 256 channels is above 128"),
        ((8, 9), 128, backward, "it is for compute capability 9.0 and newer, this is 8.9"),
        ((12, 0), 128, backward, "its gradient is not deterministic on this chip"),
        ((9, 0), 128, eval(f"lambda q, {SEES.replace(' ', ', ')}: None"), "_flash_attn_bwd takes no deterministic"),
    ],
)
def test_the_package_is_asked_only_where_it_can_run_and_else_it_is_said_why_not(
    capability: tuple[int, int], head_dim: int, backward: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, package = torch.device("cuda"), cuda_attention.PACKAGE
    package.version = "4.1"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    stand_in(monkeypatch)._flash_attn_bwd = backward
    found = Flash().notice(head_dim) or ""
    if said == "used":
        assert found == "rows of training are read by the package flash-attn-4"
    else:
        assert found == f"the package flash-attn-4 4.1 is not used: {said}"
    assert (cuda_attention.package_refusal(cuda) is None) == (said == "used" or head_dim > 128)
    assert cuda_attention.package_refusal(torch.device("cpu"))
    monkeypatch.setattr(cuda_attention, "PACKAGE", replace(package))
    cuda_attention.PACKAGE.version = "4.1"
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    assert cuda_attention.package_refusal(cuda), "it cannot be imported"
    cuda_attention.PACKAGE.version = ""
    assert Flash().notice(head_dim) is None


@pytest.mark.skipif(not HOPPER, reason="needs flash-attn-4 and a chip of compute capability 9.0")
@pytest.mark.parametrize(("window", "heads", "kv_heads", "dim"), [(512, 6, 6, 128), (100, 8, 2, 64)])
def test_the_real_package_equals_the_reference(window: int, heads: int, kv_heads: int, dim: int) -> None:
    kernel, place = Flash(), torch.device("cuda")
    kernel.prepare(512, [window], place)
    sizes = [(2, 512, count, dim) for count in (heads, kv_heads, kv_heads)]
    there = [torch.randn(size, device=place, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    exact = [x.detach().float().requires_grad_() for x in there]
    grad = torch.randn_like(there[0])
    lengths, plain = np.array([1, 300, 211, 512], np.int32), Reference()
    known = [by.bounds(lengths, 2, False, lambda x: x.to(place)) for by in (kernel, plain)]
    pairs = [
        (kernel.dense(*there, window, 0.2), plain.dense(*exact, window, 0.2)),
        (kernel.packed(*there, known[0], window, 0.2), plain.packed(*exact, known[1], window, 0.2)),
    ]
    for found, wanted in pairs:
        both = torch.autograd.grad(found, there, grad), torch.autograd.grad(wanted, exact, grad.float())
        for one, other in zip((found, *both[0]), (wanted, *both[1]), strict=True):
            assert (one.float() - other).norm() <= 0.02 * other.norm().clamp_min(1.0)
