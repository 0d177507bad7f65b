"""FlashAttention's functions equal their definition in float64, with gradients.

pytest tests/compat/test_flash_functions.py            # on the CPU
pytest tests/compat/test_flash_functions.py -k cuda    # on a CUDA device
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_cases import check_cache, check_rows, check_sequences, definition, turned
from torch._subclasses.fake_tensor import FakeTensorMode

from ascendchat.compat import flash
from ascendchat.errors import UserError
from ascendchat.nn import flash_attend

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]
CASES = [(torch.float32, range(16)), (torch.float16, range(16, 22)), (torch.bfloat16, range(22, 28))]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "seeds"), CASES, ids=str)
@pytest.mark.parametrize("check", [check_rows, check_sequences, check_cache], ids=lambda check: check.__name__)
def test_random_calls_equal_the_definition(
    check: Callable[..., None], place: str, dtype: torch.dtype, seeds: range
) -> None:
    for seed in seeds:
        check(place, seed, dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, -1)}], ids=str)
def test_queries_without_limits_are_all_rotated_by_the_first_angle(place: str, options: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 16, generator=g).double() for n in (3, 3, 3))
    caches, angles = torch.randn(2, 1, 12, 2, 16, generator=g).double(), torch.rand(20, 8, generator=g).double() * 6
    at = torch.tensor([5, 5, 5] if not options else [5, 6, 7])
    turned_q, turned_k = turned(q[0], angles[at], False), turned(k[0], angles[5:8], False)
    keys, values = (torch.cat([cache[0, :5], x]) for cache, x in zip(caches, (turned_k, v[0])))
    expected, _ = definition(turned_q, keys, values, **options)
    there = [x.float().to(place) for x in (q, caches[0], caches[1], k, v, angles.cos(), angles.sin())]
    found = flash.flash_attn_with_kvcache(*there, cache_seqlens=5, rotary_interleaved=False, **options)
    torch.testing.assert_close(found[0].cpu().double(), expected, rtol=1e-5, atol=5e-5)


WINDOW = "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"
ROWS = f"dropout_p=0.0, {WINDOW}, alibi_slopes=None, deterministic=False, return_attn_probs=False"
BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
CACHE = "k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None"
CACHE += f", cache_leftpad=None, block_table=None, {WINDOW}"
SIGNATURES = {  # of flash-attn 2.8
    "flash_attn_func": f"(q, k, v, {ROWS})",
    "flash_attn_kvpacked_func": f"(q, kv, {ROWS})",
    "flash_attn_qkvpacked_func": f"(qkv, {ROWS})",
    "flash_attn_varlen_func": f"(q, k, v, {BOUNDS}, {ROWS}, block_table=None)",
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {BOUNDS}, {ROWS})",
    "flash_attn_varlen_qkvpacked_func": f"(qkv, cu_seqlens, max_seqlen, {ROWS})",
    "flash_attn_with_kvcache": f"(q, k_cache, v_cache, {CACHE}, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False)",
}


def test_arguments_are_the_published_ones_in_their_order() -> None:
    for name, published in SIGNATURES.items():
        own = inspect.signature(getattr(flash, name))
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in own.parameters.values()]
        assert str(own.replace(parameters=bare, return_annotation=own.empty)) == published, name


@pytest.mark.parametrize("place", PLACES)
def test_tensors_packed_together_give_the_same(place: str) -> None:
    qkv = torch.randn(2, 6, 3, 4, 16, generator=torch.Generator().manual_seed(0)).to(place).requires_grad_()
    known = {"causal": True, "window_size": (3, 0), "softmax_scale": 0.3}
    expected = flash.flash_attn_func(*qkv.unbind(2), **known)
    torch.testing.assert_close(flash.flash_attn_qkvpacked_func(qkv, **known), expected)
    bounds, flat = torch.tensor([0, 6, 12], dtype=torch.int32).to(place), qkv.flatten(0, 1)
    found = flash.flash_attn_varlen_qkvpacked_func(flat, bounds, 6, **known)
    torch.testing.assert_close(found, expected.flatten(0, 1))
    found = flash.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], bounds, bounds, 6, 6, **known)
    torch.testing.assert_close(found, expected.flatten(0, 1))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_dropout_keeps_the_mean_and_the_gradient_has_the_same_pattern(place: str, softcap: float) -> None:
    """Of equal scores and the identity as values, the result is the dropped probabilities."""
    torch.manual_seed(0)
    q = torch.zeros(1, 64, 1, 64, device=place)
    v = torch.eye(64, device=place)[None, :, None].clone().requires_grad_()
    out = flash.flash_attn_func(q, q, v, dropout_p=0.25, softcap=softcap)
    kept = out.detach()[out.detach() != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 64 / 0.75))
    assert abs(1 - kept.numel() / out.numel() - 0.25) < 0.03
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(gradient[0, :, 0].sum(1), out[0, :, 0].sum(0) * 64)


def pair(heads: int = 4, dim: int = 8, length: int = 5) -> torch.Tensor:
    return torch.zeros(2, length, heads, dim)


def rows(q: torch.Tensor, k: torch.Tensor, *rest: Any, **known: Any) -> None:
    flash.flash_attn_func(q, k, k, *rest, **known)


def ends(*bounds: list[int]) -> None:
    flash.flash_attn_varlen_func(*[pair()[0]] * 3, *map(torch.tensor, bounds), 6, 5)


def cache(keys: torch.Tensor, **known: Any) -> None:
    flash.flash_attn_with_kvcache(pair(), keys, keys, **known)


REFUSED: dict[str, Callable[[], None]] = {
    "k, v": lambda: rows(pair(), pair(3)),
    "q, k, v": lambda: rows(pair(dim=16), pair()),
    "dropout_p": lambda: rows(pair(), pair(), 1.0),
    "return_attn_probs": lambda: rows(pair(), pair(), 0.1, return_attn_probs=True),
    "alibi_slopes": lambda: rows(pair(), pair(), alibi_slopes=torch.zeros(3)),
    "cu_seqlens_q": lambda: ends([0, 6], [0, 5]),
    "cu_seqlens_k": lambda: ends([0, 5], [0, 3, 5]),
    "k, v: give both": lambda: cache(pair(), k=pair(), cache_seqlens=0),
    "cache_seqlens: needed": lambda: cache(pair(), k=pair(), v=pair()),
    "cache_seqlens: 3": lambda: cache(pair(), k=pair(), v=pair(), cache_seqlens=3),
    "rotary_cos": lambda: cache(pair(), rotary_cos=pair()[0, 0], rotary_sin=pair()[0, 0]),
    "k_cache": lambda: cache(pair()[:1]),
    "cache_batch_idx": lambda: cache(pair(), cache_batch_idx=torch.zeros(2), block_table=torch.zeros(2, 1)),
    "cache_leftpad": lambda: cache(pair(), cache_leftpad=torch.zeros(2), block_table=torch.zeros(2, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_the_name_of_the_argument(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}"):
        REFUSED[name]()


def test_a_cache_that_is_full_is_not_written_to() -> None:
    cache = pair()
    with pytest.raises(UserError, match="do not fit"):
        flash.flash_attn_with_kvcache(
            pair(), cache, cache, k=pair() + 1, v=pair() + 1, cache_seqlens=torch.tensor([0, 1], dtype=torch.int32)
        )
    assert not cache.any()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (60, 70)])
def test_nothing_of_the_size_of_all_scores_is_made(window: tuple[int, int]) -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                largest = max(largest, found.untyped_storage().nbytes())
            return found

    x = torch.randn(1, 1024, 2, 32)
    with Watch(), torch.no_grad():
        flash.flash_attn_func(x, x, x, causal=window[1] == 0, window_size=window)
    assert 0 < largest <= x.nbytes


@pytest.mark.parametrize("place", PLACES)
def test_windows_over_several_blocks_equal_all_scores_at_once(place: str) -> None:
    q = torch.randn(1, 300, 2, 16).to(place)
    k = torch.randn(1, 350, 1, 16).to(place)
    for left, right in ((5, 0), (40, 100), (0, 149)):
        places = torch.arange(350, device=place)
        distance = places[50:, None] - places
        seen = (distance <= left) & (distance >= -right)
        scores = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()) / 4
        expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ k[:, None, :, 0].double()
        found, lse, _ = flash.flash_attn_func(q, k, k, window_size=(left, right), return_attn_probs=True)
        for each in (found, flash.flash_attn_func(q, k, k, window_size=(left, right))):
            torch.testing.assert_close(each.double(), expected.transpose(1, 2), rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(
            lse.double(), scores.masked_fill(~seen, float("-inf")).logsumexp(-1), rtol=1e-5, atol=5e-5
        )


def test_padding_is_taken_out_and_put_back() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    tokens, indices, bounds, longest, used = flash.unpad_input(x, mask)
    assert (indices.tolist(), bounds.tolist(), longest, used.tolist()) == ([0, 1, 5, 6, 7], [0, 2, 5, 5], 3, [2, 3, 0])
    assert bounds.dtype == torch.int32
    torch.testing.assert_close(tokens, x[mask.bool()])
    back = flash.pad_input(tokens, indices, 3, 4)
    torch.testing.assert_close(back, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(back.sum(), x)
    torch.testing.assert_close(gradient, mask[..., None, None].expand(x.shape).float())
    kept = flash.unpad_input(x, mask, torch.tensor([[0, 0, 1, 0]] * 3))
    assert (kept[2].tolist(), kept[4].tolist()) == ([0, 3, 6, 7], [2, 3, 0])


def test_rows_compile_as_one_graph() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return flash.flash_attn_func(x, x, x, causal=True, window_size=(3, 0))

    x = torch.randn(2, 8, 4, 16)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(x), call(x))


@pytest.mark.parametrize("options", [{}, {"window_size": (3, 1)}], ids=str)
def test_the_way_to_the_flash_kernel_of_torch_has_the_right_shapes(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a CUDA device, on tensors that have shapes only."""
    monkeypatch.setattr(flash_attend, "kernel_name", lambda *_: "flash")
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(2, 7, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        bounds = [torch.empty(3, dtype=torch.int32) for _ in "qk"]
        rows = flash.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        ends = flash.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *bounds, 5, 7, return_attn_probs=True, **options
        )
        assert [tuple(x.shape) for x in rows] == [(2, 5, 4, 16), (2, 4, 5), (0,)]
        assert [tuple(x.shape) for x in ends] == [(10, 4, 16), (4, 10), (0,)]
        (rows[0].sum() + ends[0].sum()).backward()
        assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]
