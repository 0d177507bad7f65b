"""FlashAttention's functions on the simulated NPU equal their definition in float64, gradients too, by fused ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flash_cases import check_cache, check_rows, check_sequences, definition

import cannsim
from ascendchat.compat import flash
from ascendchat.errors import UserError
from ascendchat.nn import flash_attend

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:.*with memory for all scores")


@pytest.fixture(autouse=True)
def _count_from_here() -> None:
    """Launches are those of the test."""
    cannsim.reset()


def launched(word: str) -> int:
    return sum(count for name, count in cannsim.launches().items() if word in name)


@DTYPES
def test_rows_and_sequences_run_the_fused_kernels_and_their_gradients(dtype: torch.dtype) -> None:
    for seed in range(30, 33):
        check_rows("npu", seed, dtype, changes_scores=False)
        check_sequences("npu", seed, dtype, changes_scores=False)
    for name in ("ScoreGrad", "VarLenScore", "UnpaddingScoreGrad"):
        assert launched(f"FlashAttention{name}") > 0, cannsim.launches()
    assert launched("Softmax") == 0


@pytest.mark.parametrize("most", [1024, 2])
def test_the_logsumexp_of_sequences_is_that_of_their_own_rows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, sequence by sequence: one of a single token, one that is empty, 3 heads."""
    monkeypatch.setattr("ascendchat.device.npu_attention.MAX_SEQUENCES", most)  # also in several calls
    lengths, g = [3, 0, 5, 1, 4], torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(13, heads, 16, generator=g).half() for heads in (3, 1, 1))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    there = [x.npu() for x in (q, k, v)]
    out, lse, _ = flash.flash_attn_varlen_func(
        *there, bounds.npu(), bounds.npu(), 5, 5, causal=True, return_attn_probs=True
    )
    assert lse.shape == (3, 13)
    for a, b in zip(bounds.tolist(), bounds[1:].tolist()):
        expected, sums = definition(*(x[a:b].double() for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[a:b].cpu().double(), expected, rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(lse[:, a:b].cpu().double(), sums, rtol=1e-3, atol=1e-3)
    assert launched("FlashAttentionVarLenScore") == (1 if most == 1024 else 3)
    assert launched("Softmax") == 0


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, -1), (0, 0), (2, 0), (0, 2), (-1, 2), (2, -1)], ids=str)
def test_each_kind_of_window_equals_the_definition(window: tuple[int, int]) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    found = flash.flash_attn_func(q.npu(), k.npu(), v.npu(), window_size=window)
    assert launched("FlashAttentionScore") == 1
    expected, _ = definition(*(x[0].double() for x in (q, k, v)), window_size=window)
    torch.testing.assert_close(found[0].cpu().double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "page"), [(torch.float16, 4), (torch.bfloat16, 16), (torch.float16, 128)], ids=str)
def test_queries_behind_a_cache_run_the_incremental_kernel(dtype: torch.dtype, page: int) -> None:
    for seed in range(50, 55):
        check_cache("npu", seed + page, dtype, changes_scores=False, page=page)
    assert launched("FusedInferAttentionScore") == 10
    assert launched("Softmax") == 0


def test_softcap_and_alibi_are_computed_by_plain_operations() -> None:
    for seed in range(2):
        check_rows("npu", seed, torch.float32)
        check_sequences("npu", seed, torch.float16)
        check_cache("npu", seed, torch.float32)
    assert launched("Softmax") > 0


def test_pages_are_read_where_they_lie() -> None:
    """One query and several, without a copy of the cache."""
    g = torch.Generator().manual_seed(0)
    for queries, page in ((1, 16), (3, 128)):
        cache = torch.randn(6, page, 2, 16, generator=g).half()
        table, lengths = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32), [page + 3, 5]
        q = torch.randn(2, queries, 4, 16, generator=g).half()
        cannsim.reset()
        known = {"cache_seqlens": torch.tensor(lengths), "block_table": table.npu(), "causal": True}
        found = flash.flash_attn_with_kvcache(q.npu(), cache.npu(), cache.npu(), **known)
        assert (launched("FusedInferAttentionScore"), launched("Index")) == (1, 0)
        for b, length in enumerate(lengths):
            keys = cache[table[b].long()].flatten(0, 1)[:length].double()
            expected, _ = definition(q[b].double(), keys, keys, causal=True)
            torch.testing.assert_close(found[b].cpu().double(), expected, rtol=4e-3, atol=4e-3)


def test_a_step_of_decoding_copies_no_cache() -> None:
    q, k = torch.randn(2, 1, 4, 16).half().npu(), torch.randn(2, 1, 2, 16).half().npu()
    caches = [torch.randn(2, 64, 2, 16).half().npu() for _ in "kv"]
    flash.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=5, causal=True)
    cannsim.reset()
    flash.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=6, causal=True)
    assert (launched("FusedInferAttentionScore"), launched("IndexPut")) == (1, 2)
    assert sum(cannsim.launches().values()) <= 7, "the others make indices"


def test_more_sequences_than_one_call_takes_become_several() -> None:
    lengths = [1] * 1030 + [3]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    exact = [torch.randn(int(bounds[-1]), heads, 16).double().requires_grad_() for heads in (2, 1, 1)]
    there = [x.detach().float().npu().requires_grad_() for x in exact]
    found = flash.flash_attn_varlen_func(*there, bounds.npu(), bounds.npu(), 3, 3, causal=True)
    assert launched("FlashAttentionVarLenScore") == 2
    ones, last = exact[2][:1030].expand(-1, 2, -1), definition(*(x[1030:] for x in exact), causal=True)[0]
    expected = torch.cat([ones, last])
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    found.sum().backward()
    for one, other in zip(there, torch.autograd.grad(expected.sum(), exact)):
        torch.testing.assert_close(one.grad.cpu().double(), other, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, v = torch.zeros(1, 64, 1, 64).npu(), torch.eye(64)[None, :, None].npu().requires_grad_()
    out = flash.flash_attn_func(q, q, v, dropout_p=0.25)
    torch.testing.assert_close(out.detach().cpu().unique(), torch.tensor([0.0, 1 / 64 / 0.75]))
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.03
    assert launched("FlashAttentionScore") == 1


def test_gradients_that_must_repeat_need_the_switch_of_torch() -> None:
    q = torch.zeros(1, 4, 2, 16).npu()
    flash.flash_attn_func(q, q, q, deterministic=True)
    with pytest.raises(UserError, match=r"^deterministic: call torch\.use_deterministic_algorithms"):
        flash.flash_attn_func(q.requires_grad_(), q, q, deterministic=True)


def test_bounds_are_read_from_the_device_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    plain = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        nonlocal reads
        reads += tensor.device.type == "npu"
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32).npu()
    assert [flash_attend.on_host(bounds) for _ in range(3)] == [[0, 3, 5]] * 3
    assert reads == 1
    bounds[1] = 2
    assert (flash_attend.on_host(bounds), reads) == ([0, 2, 5], 2)


@pytest.fixture
def _installed() -> Iterator[None]:
    """Our functions under the names of flash-attn, until the test is over."""
    with pytest.warns() if "transformers" in sys.modules else pytest.MonkeyPatch.context():
        flash.install()
    yield
    flash.uninstall()


@pytest.mark.usefixtures("_installed")
def test_transformers_windows_and_packed_rows_are_those_of_its_eager_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own functions for NPUs would attend without a window."""
    transformers = pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as theirs

    monkeypatch.setattr(theirs, "_loaded_implementation", None)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    tokens = torch.randint(0, 40, (1, 14), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in (9, 5)])[None]
    found = {}
    for name, place in (("eager", "cpu"), ("flash_attention_2", "npu")):
        torch.manual_seed(0)
        config = transformers.MistralConfig(**sizes, **heads, attn_implementation=name)
        model = transformers.MistralForCausalLM(config).eval().to(place)
        with torch.no_grad():
            if name == "eager":
                found[name] = torch.cat([model(part).logits for part in tokens.split((9, 5), 1)], 1)
            else:
                found[name] = model(tokens.npu(), position_ids=positions.npu(), use_cache=False).logits.cpu()
    assert launched("FlashAttentionVarLenScore") == 2
    torch.testing.assert_close(found["flash_attention_2"], found["eager"], rtol=1e-3, atol=1e-4)


OLD = """
import torch
from ascendchat.device import pick
from flash_cases import check_cache, check_rows, check_sequences
pick("npu").bind(0)
for seed in range(2):
    for check in (check_rows, check_sequences, check_cache):
        check("npu", seed, torch.float16)
"""


def test_a_chip_without_the_fused_kernels_computes_the_same(on_npu: Callable[..., list[Any]]) -> None:
    on_npu(OLD, chip="Ascend910A")
