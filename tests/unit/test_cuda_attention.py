"""Rows of training by flash-attn-4: the operators around it pass the right windows and gradients.

The package itself needs a Hopper chip: without one a stand-in computes what its documentation says, in plain torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ascendchat.device import cuda_attention, pick
from ascendchat.nn.attention import Flash, Reference
from ascendchat.nn.gpt import GPT
from ascendchat.plan.shape import Shape
from ascendchat.train.learner import Learner


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """What one test knew of the package is nothing to the next."""
    known = cuda_attention._package, cuda_attention.fault
    yield
    for ask in known:
        ask.cache_clear()


HOPPER = torch.cuda.is_available() and cuda_attention.usable(torch.device("cuda"))


def scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int | None, right: int | None) -> Tensor:
    """As flash-attn-4 defines them: a query sees `left` keys before its own and `right` behind it, None: all."""
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
    found = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    distance = torch.arange(q.size(1))[:, None] - torch.arange(k.size(1))[None]
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= -distance > right
    return found.masked_fill(hidden, float("-inf"))


def by_document(bounds: Tensor, longest: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each document as a row of its own."""
    ends = bounds.tolist()
    assert ends[0] == 0
    assert all(0 <= b - a <= longest for a, b in itertools.pairwise(ends))
    return [tuple(x[a:b].unsqueeze(0) for x in tensors) for a, b in itertools.pairwise(ends) if b > a]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    return_lse: bool,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, None, None, None]:
    assert return_lse
    if cu_seqlens_q is not None:
        assert cu_seqlens_k is cu_seqlens_q
        assert max_seqlen_k == max_seqlen_q
        seen = {"causal": causal, "window_size_left": window_size_left, "window_size_right": window_size_right}
        parts = [
            forward(*part, softmax_scale=softmax_scale, return_lse=True, **seen)  # type: ignore[arg-type]
            for part in by_document(cu_seqlens_q, max_seqlen_q, q, k, v)
        ]
        y, logsumexp = torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], dim=-1)
        return y, logsumexp, None, None, None
    found = scores(q, k, softmax_scale, causal, window_size_left, window_size_right)
    v = v.repeat_interleave(q.size(2) // v.size(2), dim=2)
    y = torch.einsum("bhqk,bkhd->bqhd", found.softmax(dim=-1), v)
    return y.contiguous(), found.logsumexp(dim=-1), None, None, None


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
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, ...]:
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    if cu_seqlens_q is not None:
        assert cu_seqlens_k is cu_seqlens_q
        assert max_seqlen_k == max_seqlen_q
        seen = {"causal": causal, "window_size_left": window_size_left, "window_size_right": window_size_right}
        parts = [
            backward(*part, rest.transpose(1, 2), scale, deterministic=deterministic, **seen)  # type: ignore[arg-type]
            for *part, rest in by_document(cu_seqlens_q, max_seqlen_q, q, k, v, y, grad, lse.t())
        ]
        return tuple(torch.cat([part[i][0] for part in parts]) for i in range(3))
    group, sizes = q.size(2) // k.size(2), (*k.shape[:2], k.size(2), -1, k.size(3))
    share = (scores(q, k, scale, causal, window_size_left, window_size_right) - lse.unsqueeze(-1)).exp()
    of_share = torch.einsum("bqhd,bkhd->bhqk", grad, v.repeat_interleave(group, dim=2))
    of_scores = share * (of_share - (grad * y).sum(dim=-1).transpose(1, 2).unsqueeze(-1)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", of_scores, k.repeat_interleave(group, dim=2))
    dk = torch.einsum("bhqk,bqhd->bkhd", of_scores, q).reshape(sizes).sum(dim=3)
    dv = torch.einsum("bhqk,bqhd->bkhd", share, grad).reshape(sizes).sum(dim=3)
    return tuple(torch.empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv)))  # with strides as the package


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules like those of the package."""
    cuda_attention._package.cache_clear()
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
    monkeypatch.setattr(cuda_attention, "usable", lambda device: True)
    kernel = Flash()
    kernel.prepare(64, [64], torch.device("cpu"))
    return kernel


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("window", "kv_heads"), [(64, 4), (64, 2), (17, 4), (1, 1)])
def test_rows_and_windows_equal_the_reference(packaged: Flash, window: int, kv_heads: int, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    there = [
        torch.randn(2, 64, heads, 16, generator=generator, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    ]
    grad = torch.randn(2, 64, 4, 16, generator=generator)

    def attend(*tensors: Tensor) -> Tensor:
        return packaged.dense(*tensors, window, 0.2) * 1.0

    torch.compiler.reset()
    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    found, wanted = run(*there), Reference().dense(*there, window, 0.2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    both = (torch.autograd.grad(y, there, grad) for y in (found, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("window", "kv_heads"), [(64, 4), (17, 2), (1, 1)])
def test_documents_equal_the_reference(packaged: Flash, window: int, kv_heads: int, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    there = [
        torch.randn(2, 64, heads, 16, generator=generator, requires_grad=True) for heads in (4, kv_heads, kv_heads)
    ]
    grad, lengths = torch.randn(2, 64, 4, 16, generator=generator), np.array([1, 40, 23, 64], np.int32)
    known = packaged.bounds(lengths, 2, False, lambda x: x)
    assert len(known) > len(lengths) + 1  # documents without tokens among them
    exact = Reference()

    def attend(*tensors: Tensor) -> Tensor:
        return packaged.packed(*tensors, known, window, 0.2) * 1.0

    torch.compiler.reset()
    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    found = run(*there)
    wanted = exact.packed(*there, exact.bounds(lengths, 2, False, lambda x: x), window, 0.2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    both = (torch.autograd.grad(y, there, grad) for y in (found, wanted))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_only_training_of_small_heads_asks_the_package(packaged: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    attend = cuda_attention.attend
    monkeypatch.setattr(cuda_attention, "attend", lambda *known: asked.append(known[0].shape) or attend(*known))
    for channels in (16, 256):
        there = [torch.randn(1, 64, 2, channels, requires_grad=True) for _ in "qkv"]
        packaged.dense(*there, 64, 0.2)
    assert asked == [(1, 64, 2, 16)]


def test_where_compiled_kernels_lie_is_asked_once(packaged: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a file to see whether the folder may be used."""
    asked: list[str] = []
    monkeypatch.setattr(cuda_attention, "keep", lambda variable, part: asked.append(part))
    for _ in range(3):
        packaged.dense(*(torch.randn(1, 64, 2, 16) for _ in "qkv"), 64, 0.2)
    assert asked == ["flash-attn-4"]


@pytest.mark.parametrize(("head_dim", "found"), [(64, ["attention"]), (256, [])])
def test_a_run_records_what_the_package_computes(packaged: Flash, head_dim: int, found: list[str]) -> None:
    shape = Shape.from_depth(1, dim=256, head_dim=head_dim, vocab=64, seq_len=64)
    device = pick("cpu")
    assert Learner(GPT(shape), packaged, device, device.bind(0)).packaged == found


def test_without_the_package_or_a_chip_for_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cuda_attention.usable(torch.device("cpu"))
    monkeypatch.setattr(cuda_attention, "installed", lambda: True)
    monkeypatch.setattr(cuda_attention, "fault", lambda: None)
    for capability, usable in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert cuda_attention.usable(torch.device("cuda")) == usable
    monkeypatch.setattr(cuda_attention, "installed", lambda: False)
    assert not cuda_attention.usable(torch.device("cuda"))


def test_gradients_have_the_strides_that_a_compiler_is_told(packaged: Flash) -> None:
    """A model of Hugging Face turns heads and tokens; the package gives the gradients the strides of what it got."""
    there = [torch.randn(2, 4, 64, 16).transpose(1, 2) for _ in "qkv"]
    y, logsumexp = cuda_attention._forward(*there, None, 64, 17, 0.2)
    arguments = (torch.randn_like(y), *there, None, y, logsumexp, 64, 17, 0.2)
    torch.library.opcheck(cuda_attention._backward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_package_that_cannot_be_called_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capability = torch.device("cuda"), [(9, 0)]
    monkeypatch.setattr(cuda_attention, "installed", lambda: True)
    monkeypatch.setattr(cuda_attention, "version", lambda name: "4.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])

    def said(head_dim: int = 128) -> str | None:
        cuda_attention._package.cache_clear()
        cuda_attention.fault.cache_clear()
        found = cuda_attention.notice(cuda, head_dim)
        assert (found == "rows of training are read by the package flash-attn-4") == (
            cuda_attention.usable(cuda) and head_dim <= 128
        )
        return found

    unused = "the package flash-attn-4 4.1 is not used: "
    interface = stand_in(monkeypatch)
    assert said() == "rows of training are read by the package flash-attn-4"
    assert said(256) == unused + "a head of 256 channels is above 128"
    capability[0] = (8, 9)
    assert said() == unused + "it is for compute capability 9.0 and newer, this is 8.9"
    capability[0] = (12, 0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert said() == unused + "its gradient is not deterministic on this chip"
    capability[0] = (10, 0)
    taken = ", ".join(sorted(cuda_attention.SEEN | cuda_attention.DOCUMENTS))
    interface._flash_attn_bwd = eval(f"lambda q, {taken}: None")
    assert said() == unused + "_flash_attn_bwd takes no deterministic"
    del interface._flash_attn_fwd
    assert (said() or "").startswith(unused + "AttributeError: ")
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    assert (said() or "").startswith(unused + "ModuleNotFoundError: ")
    monkeypatch.setattr(cuda_attention, "installed", lambda: False)
    assert said() is None


@pytest.mark.skipif(not HOPPER, reason="needs flash-attn-4 and a chip of compute capability 9.0")
@pytest.mark.parametrize("window", [512, 100, 1])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 6, 128), (8, 2, 64)])
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
