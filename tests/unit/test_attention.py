"""Every attention kernel that runs here computes what the definition says."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from ascendchat.config import UserError
from ascendchat.nn import attention
from ascendchat.nn.attention import KERNELS, Eager, Flash, Reference, Sdpa, choose, visible
from ascendchat.nn.masks import cache_mask, inside, window_blocks


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


@pytest.mark.parametrize("kernel", [Reference(), Sdpa(), Eager()], ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("length", "keys", "window"), [(9, 9, 9), (9, 9, 4), (10, 10, 1), (7, 7, 100), (3, 9, 4), (1, 6, 6)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_dense_equals_the_definition(
    kernel: attention.Attention, length: int, keys: int, window: int, heads: int, kv_heads: int
) -> None:
    q, k, v = draw(2, length, heads, 8), draw(2, keys, kv_heads, 8, seed=1), draw(2, keys, kv_heads, 8, seed=2)
    scale = 1.44 / math.sqrt(8)
    expected = definition(q, k, v, window, scale)
    found = kernel.dense(q.float(), k.float(), v.float(), window, scale)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", [Sdpa(), Eager()], ids=lambda k: k.name)
@pytest.mark.parametrize("window", [3, 5, 16])
def test_gradients_of_the_sliced_window_equal_the_reference(kernel: attention.Attention, window: int) -> None:
    inputs = [draw(2, 16, 4, 8, seed=s).float().requires_grad_() for s in range(3)]
    grad = draw(2, 16, 4, 8, seed=9).float()
    found = torch.autograd.grad(kernel.dense(*inputs, window, 0.3), inputs, grad)
    expected = torch.autograd.grad(Reference().dense(*inputs, window, 0.3), inputs, grad)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", [Reference(), Sdpa(), Eager()], ids=lambda k: k.name)
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


@pytest.mark.parametrize("kernel", [Reference(), Sdpa(), Eager()], ids=lambda k: k.name)
def test_cached_rows_of_different_lengths_equal_dense_attention(kernel: attention.Attention) -> None:
    k, v, q = draw(3, 12, 2, 8).float(), draw(3, 12, 2, 8, seed=1).float(), draw(3, 2, 4, 8, seed=2).float()
    lengths = torch.tensor([12, 5, 2])
    found = kernel.cached(q, k, v, lengths, 4, 0.3)
    for row, length in enumerate(lengths.tolist()):
        own = (q[row, None].double(), k[row, None, :length].double(), v[row, None, :length].double())
        torch.testing.assert_close(found[row, None].double(), definition(*own, 4, 0.3), atol=2e-6, rtol=1e-5)


def test_masks_count_the_token_itself() -> None:
    assert visible(3, 3, 1, torch.device("cpu")).tolist() == torch.eye(3, dtype=torch.bool).tolist()
    assert visible(2, 4, 2, torch.device("cpu")).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert cache_mask(1, 4, torch.tensor([2]), 9).tolist() == [[[[True, True, False, False]]]]


def test_the_choice_names_the_kernel_and_why_the_better_ones_were_refused() -> None:
    kernel, reason = choose("cpu", torch.float32, 64)
    assert kernel.name == "sdpa"
    assert "npu_fusion (it needs an Ascend NPU" in reason
    assert "flash (it needs a CUDA device" in reason


def test_a_kernel_that_was_asked_for_and_cannot_run_is_an_error() -> None:
    with pytest.raises(UserError, match="flash cannot run: it needs a CUDA device, this is cpu"):
        choose("cpu", torch.float32, 64, "flash")
    with pytest.raises(UserError, match="float32"):
        choose("cuda", torch.float32, 64, "flash")
    with pytest.raises(UserError, match="there is no attention kernel 'flsh'"):
        choose("cpu", torch.float32, 64, "flsh")
    assert list(KERNELS) == ["npu_fusion", "flash", "sdpa", "eager", "reference"]


@pytest.mark.parametrize(
    ("card", "capability", "chosen"),
    [
        ("Tesla T4", (7, 5), "sdpa"),
        ("Tesla V100-SXM2-32GB", (7, 0), "sdpa"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "flash"),
    ],
)
def test_cards_older_than_ampere_have_no_flash_kernel(
    monkeypatch: pytest.MonkeyPatch, card: str, capability: tuple[int, int], chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    kernel, reason = choose("cuda", torch.float16, 64)
    assert kernel.name == chosen
    if chosen == "sdpa":
        assert f"flash (it needs compute capability 8.0, {card} has {capability[0]}.{capability[1]})" in reason
        with pytest.raises(UserError, match=r"flash cannot run: it needs compute capability 8\.0"):
            choose("cuda", torch.float16, 64, "flash")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("triton", ["3.3", "3.4"])
def test_kernels_overlap_where_the_card_and_triton_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str
) -> None:
    """torch 2.6 and 2.7 bring a Triton that does not know the option: every step of decoding would end in an error."""
    known = {"triton"} | ({"triton.language.extra.cuda.gdc"} if triton == "3.4" else set())
    monkeypatch.setattr(attention, "find_spec", lambda name: name if name in known else None)
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


@pytest.mark.parametrize("length", [129, 256, 700])
@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 130, 256, 257, 511])
def test_blocks_of_a_window_are_those_that_torch_finds_in_the_whole_mask(length: int, window: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    cpu = torch.device("cpu")
    expected, found = (
        vars(made)
        for made in (
            create_block_mask(partial(inside, window), None, None, length, length, cpu),
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


def test_blocks_of_long_rows_take_little_memory() -> None:
    """The mask of every token would be 1 TB."""
    blocks = window_blocks(2**20, 1024, torch.device("meta"))
    assert sum(x.numel() * x.element_size() for x in vars(blocks).values() if isinstance(x, torch.Tensor)) < 2**31


@pytest.mark.slow
def test_prompts_are_read_without_torchs_compiler() -> None:
    """Importing it takes seconds. Without CUDA a stand-in is called where torch's kernel would be."""
    program = """if True:
        import sys, torch
        from ascendchat.nn import flash_kernel

        calls = []
        flash_kernel._run = lambda *known: (calls.append(known[5:]), known[0])[1:] * 2
        q = torch.zeros(1, 8, 2, 16)
        with torch.no_grad():
            flash_kernel.flash(q, q, q, None, 8, 4, 0.5)
        assert calls == [(8, 8, 3, 0, 0.5)], calls
        assert "torch._dynamo" not in sys.modules
        try:
            flash_kernel.flash(q.requires_grad_(), q, q, None, 8, 4, 0.5)
        except (NotImplementedError, RuntimeError):
            pass  # the operator, and no kernel of it for a CPU
        assert len(calls) == 1
    """
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)
