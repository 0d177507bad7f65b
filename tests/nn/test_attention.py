"""Every attention kernel that runs here computes what the definition says."""

from __future__ import annotations

import math
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ascendchat.chips import KINDS
from ascendchat.device import cuda_attention, npu_attention
from ascendchat.device.cuda_attention import Flash, decode_by_products, window_blocks, window_mask_mod
from ascendchat.device.npu_attention import NpuFusion
from ascendchat.errors import UserError
from ascendchat.nn import attention
from ascendchat.nn.attention import Eager, Reference, Sdpa, cache_mask, choose, decode_fault, kernels, visible

EXACT = pytest.mark.parametrize("kernel", [Reference(), Sdpa(), Eager()], ids=lambda k: k.name)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """One query at a time, in float64."""
    batch, length, heads, _ = q.shape
    group, shift = heads // k.size(2), k.size(1) - length
    out = torch.empty_like(q)
    for b in range(batch):
        for t in range(length):
            low, high = max(0, t + shift - window + 1), t + shift + 1
            for h in range(heads):
                scores = k[b, low:high, h // group] @ q[b, t, h] * scale
                out[b, t, h] = scores.softmax(0) @ v[b, low:high, h // group]
    return out


@EXACT
@pytest.mark.parametrize(
    ("length", "keys", "window", "heads", "kv_heads"),
    [(9, 9, 4, 4, 2), (10, 10, 1, 4, 4), (7, 7, 100, 4, 1), (3, 9, 4, 4, 2), (5, 5, 5, 16, 8)],
)
def test_dense_and_its_gradients_equal_the_definition(
    kernel: attention.Attention, length: int, keys: int, window: int, heads: int, kv_heads: int
) -> None:
    sizes = (2, length, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)
    exact = [draw(*size, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]
    there = [x.detach().float().requires_grad_() for x in exact]
    grad, scale = draw(*sizes[0], seed=9), 1.44 / math.sqrt(8)
    expected, found = definition(*exact, window, scale), kernel.dense(*there, window, scale)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    mine, theirs = torch.autograd.grad(found, there, grad.float()), torch.autograd.grad(expected, exact, grad)
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


@EXACT
@pytest.mark.parametrize("window", [1, 4, 10])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_equals_separate_documents(kernel: attention.Attention, window: int, masked: bool) -> None:
    lengths = np.array([3, 1, 6, 2, 8], np.int32)  # two rows
    q, k, v = (draw(2, 10, heads, 8, seed=s).float() for s, heads in enumerate((4, 2, 2)))
    bounds = kernel.bounds(lengths, 2, not masked, lambda made: made)
    found = kernel.packed(q, k, v, bounds, window, 0.3).flatten(0, 1)
    start = 0
    for length in lengths.tolist():
        part = slice(start, start + length)
        own = (x.flatten(0, 1)[None, part].double() for x in (q, k, v))
        torch.testing.assert_close(found[part].double(), definition(*own, window, 0.3)[0], atol=2e-6, rtol=1e-5)
        start += length


HELD = torch.tensor([12, 5, 2])


def behind(queries: int, window: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Queries, keys and values of three rows that hold HELD of 12 places, and what comes out by the definition."""
    sizes = ((3, queries, 4, 8), (3, 12, 2, 8), (3, 12, 2, 8))
    q, k, v = (draw(*size, seed=seed) for seed, size in enumerate(sizes))
    rows = [definition(q[b, None], k[b, None, :n], v[b, None, :n], window, 0.3) for b, n in enumerate(HELD.tolist())]
    return (q.float(), k.float(), v.float()), torch.cat(rows)


@EXACT
def test_cached_rows_of_different_lengths_equal_dense_attention(kernel: attention.Attention) -> None:
    there, expected = behind(2, 4)
    torch.testing.assert_close(kernel.cached(*there, HELD, 4, 0.3).double(), expected, atol=2e-6, rtol=1e-5)
    there, expected = behind(1, 12)
    torch.testing.assert_close(kernel.one_query(*there, HELD.tolist(), 0.3).double(), expected, atol=2e-6, rtol=1e-5)


def test_a_gpu_decodes_by_the_kernel_for_its_rows_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for few rows, products for many that are compiled, plain attention for windows and without Triton."""
    kernel, called, compiling = Flash(), [], [True]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling[0])
    stand_in: Any = SimpleNamespace(one_query=lambda *known: called.append("one_query"))
    monkeypatch.setitem(sys.modules, "ascendchat.device.triton_attention", stand_in)
    monkeypatch.setattr("ascendchat.device.cuda_attention.decode_by_products", lambda *known: called.append("products"))
    kernel.triton = True
    for rows, compiles, expected in ((8, True, "one_query"), (9, True, "products"), (9, False, "one_query")):
        compiling[0] = compiles
        q, k = torch.zeros(rows, 1, 4, 8), torch.zeros(rows, 12, 2, 8)
        kernel.cached(q, k, k, torch.full((rows,), 12), 12, 0.3)
        assert called.pop() == expected
    for queries, window, triton, compiles in ((1, 4, True, False), (2, 12, True, True), (1, 12, False, False)):
        kernel.triton, compiling[0] = triton, compiles
        there, values = behind(queries, window)
        torch.testing.assert_close(kernel.cached(*there, HELD, window, 0.3).double(), values, atol=2e-6, rtol=1e-5)
    assert not called
    torch.testing.assert_close(decode_by_products(*there, HELD, 0.3).double(), values, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [4, 6])
def test_windows_of_a_compiled_model_on_a_gpu_go_to_flex_attention(length: int) -> None:
    """Also of rows with as many tokens as heads, of which one is easily taken for the other."""
    kernel = Flash()
    kernel.blocks[length, 2] = window_blocks(length, 2, torch.device("cpu"))
    q, k, v = (draw(2, length, heads, 16, seed=s).float() for s, heads in enumerate((4, 2, 2)))
    torch.compiler.reset()
    attend = torch.compile(lambda *there: kernel.dense(*there, 2, 0.3), backend="eager", fullgraph=True)
    torch.testing.assert_close(attend(q, k, v), Reference().dense(q, k, v, 2, 0.3), atol=1e-5, rtol=1e-4)


def test_masks_count_the_token_itself() -> None:
    assert visible(3, 3, 1, torch.device("cpu")).tolist() == torch.eye(3, dtype=torch.bool).tolist()
    assert visible(2, 4, 2, torch.device("cpu")).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert cache_mask(1, 4, torch.tensor([2]), 9).tolist() == [[[[True, True, False, False]]]]


def test_a_kernel_that_decodes_wrongly_is_found_before_it_is_used() -> None:
    class Unmasked(Reference):
        """From 513 keys on it sees all of them."""

        def one_query(self, q: Any, k: Any, v: Any, held: Any, scale: float) -> torch.Tensor:
            return super().one_query(q, k, v, [2048 if count >= 513 else count for count in held], scale)

    class Late(Reference):
        """Behind a cache its queries see one key too few."""

        def cached(self, q: Any, k: Any, v: Any, lengths: Any, window: int, scale: float) -> torch.Tensor:
            return super().cached(q, k, v, lengths - int(q.size(1) > 1), window, scale)

    faults = [decode_fault(kernel, Reference(), "cpu", torch.float32, 16) for kernel in (Sdpa(), Unmasked(), Late())]
    assert faults[0] is None
    assert "with 513 keys, by " in (faults[1] or "")
    assert "with 16 queries behind a cache, by " in (faults[2] or "")


def test_the_best_kernel_that_can_run_is_chosen_or_exactly_the_one_asked_for() -> None:
    offered = {kind: list(kernels(kind)) for kind in (*KINDS, "meta")}
    own = {"npu": ["npu_fusion"], "cuda": ["flash"]}
    assert offered == {kind: [*own.get(kind, []), "sdpa", "eager", "reference"] for kind in offered}
    kernel, reason = choose("cpu", torch.float32, 64)
    assert (kernel.name, reason) == ("sdpa", "attention: sdpa")
    assert choose("cpu", torch.float32, 64, "eager")[1] == "attention: eager (asked for)"
    for place, name, said in (
        ("cpu", "flash", "there is no attention kernel 'flash'; choose from: sdpa, eager, reference"),
        ("cuda", "flash", "not float32"),
        ("cpu", "flsh", "there is no attention kernel 'flsh'"),
    ):
        with pytest.raises(UserError, match=said):
            choose(place, torch.float32, 64, name)


@pytest.mark.parametrize(
    ("bf16", "dtype", "head_dim", "decodes", "said"),
    [
        (False, torch.float16, 64, False, "Ascend910A has no fused training attention"),
        (True, torch.bfloat16, 768, False, None),
        (True, torch.bfloat16, 769, False, "head_dim 769 is above 768"),
        (True, torch.float32, 64, False, None),
        (True, torch.float32, 64, True, "it reads caches in bfloat16 or float16, not float32"),
        (True, torch.bfloat16, 512, True, None),
        (True, torch.bfloat16, 528, True, "a multiple of 16 up to 512, not 528"),
        (True, torch.bfloat16, 24, True, "a multiple of 16 up to 512, not 24"),
    ],
)
def test_the_fused_kernel_of_an_npu_says_what_it_cannot(
    bf16: bool, dtype: torch.dtype, head_dim: int, decodes: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu = SimpleNamespace(is_bf16_supported=lambda: bf16, get_device_name=lambda: "Ascend910A")
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(npu_attention, "decode_fault", lambda *known: None)
    found = NpuFusion().refusal("npu", dtype, head_dim, decodes)
    assert found is None if said is None else said in (found or "")


@pytest.mark.parametrize(
    ("card", "capability", "head_dim", "refused"),
    [
        ("Tesla T4", (7, 5), 64, "it needs compute capability 8.0, Tesla T4 has 7.5"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 256, None),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 264, "head_dim 264 is not a multiple of 8 up to 256"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 60, "head_dim 60 is not a multiple of 8 up to 256"),
    ],
)
def test_cards_and_heads_that_the_flash_kernel_is_not_for_get_another(
    monkeypatch: pytest.MonkeyPatch, card: str, capability: tuple[int, int], head_dim: int, refused: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    kernel, reason = choose("cuda", torch.float16, head_dim)
    assert kernel.name == ("sdpa" if refused else "flash")
    assert refused is None or f"flash ({refused})" in reason


@pytest.mark.parametrize(("capability", "triton"), [((8, 0), "3.4"), ((9, 0), "3.3"), ((9, 0), "3.4")])
def test_kernels_overlap_where_the_card_and_triton_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str
) -> None:
    """torch 2.6 and 2.7 bring a Triton that does not know the option: every step of decoding would end in an error."""
    known = {"triton"} | ({"triton.language.extra.cuda.gdc"} if triton == "3.4" else set())
    monkeypatch.setattr(cuda_attention, "find_spec", lambda name: name if name in known else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert Flash().overlaps == (capability >= (9, 0) and triton == "3.4")


def test_the_eager_kernel_makes_no_infinity() -> None:
    """Chips that saturate report one as overflow."""
    made: list[torch.Tensor] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            made.extend(x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    for kernel, finite in ((Eager(), True), (Reference(), False)):
        made.clear()
        q, k, v = (draw(2, 9, 4, 8, seed=s).half().requires_grad_() for s in range(3))
        with Watch():
            kernel.dense(q, k, v, 4, 0.3).sum().backward()
            kernel.packed(q, k, v, torch.tensor([[0] * 9, [1] * 5 + [2] * 4]), 4, 0.3).sum().backward()
            kernel.cached(q[:, :2], k, v, torch.tensor([9, 4]), 9, 0.3)
        assert all(x.isfinite().all() for x in made) == finite


@pytest.mark.parametrize("length", [129, 700])
@pytest.mark.parametrize("window", [1, 127, 128, 129, 257])
def test_blocks_of_a_window_are_those_that_torch_finds_in_the_whole_mask(length: int, window: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    cpu = torch.device("cpu")
    expected, found = (
        vars(made)
        for made in (
            create_block_mask(partial(window_mask_mod, window), None, None, length, length, cpu),
            window_blocks(length, window, cpu),
        )
    )
    assert found.keys() == expected.keys()
    for name in found.keys() - {"mask_mod"}:
        if isinstance(expected[name], torch.Tensor):
            assert found[name].stride() == expected[name].stride()
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
        else:
            assert found[name] == expected[name]
    long = window_blocks(2**20, 1024, torch.device("meta"))  # the mask of every token would be 1 TB
    assert sum(x.numel() * x.element_size() for x in vars(long).values() if isinstance(x, torch.Tensor)) < 2**31


def test_prompts_are_read_without_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of an operator imports it, which takes seconds; only who learns or compiles needs the operator."""
    calls: list[tuple[Any, ...]] = []
    for name in ("_run", "_flash"):
        monkeypatch.setattr(
            cuda_attention, name, lambda *known, name=name: (calls.append((name, *known[5:])), known)[1]
        )
    q = torch.zeros(1, 8, 2, 16)
    cuda_attention.flash(q, q, q, None, 8, 4, 0.5)
    with torch.no_grad():
        cuda_attention.flash(q.requires_grad_(), q, q, None, 8, 8, 0.5)
    cuda_attention.flash(q, q, q, None, 8, 4, 0.5)
    limited = (8, 8, 3, 0, 0.5)
    assert calls == [("_run", *limited), ("_run", 8, 8, -1, 0, 0.5), ("_flash", *limited)]
