"""Random calls of FlashAttention's functions on any device, against a definition in float64, as their
documentation says it. Used by test_flash_functions.py and, on cannsim, by its NPU twin."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ascendchat.compat import flash

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEADS = ((4, 4), (4, 2), (4, 1))
WINDOWS = ((-1, -1), (-1, -1), (2, 0), (3, 1), (0, 0), (-1, 2), (2, -1), (50, 50))


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: (Tq, H, D) and (Tk, K, D) to (Tq, H, D) and the logsumexp (H, Tq)."""
    queries, heads, dim = q.shape
    k, v = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (k, v))
    distance = torch.arange(len(k) - queries, len(k))[:, None] - torch.arange(len(k))
    left, right = window_size
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= -distance <= right
    scores = torch.einsum("qhd,khd->hqk", q, k) * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance.abs()
    blind = ~seen.any(dim=1)[:, None]  # queries that see nothing get zeros
    weights = scores.masked_fill(~(seen | blind), float("-inf")).softmax(dim=-1) * ~blind
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.masked_fill(blind[:, 0], float("inf"))


class Draw(random.Random):
    """What a seed makes of shapes and options."""

    def __init__(self, seed: int, dtype: torch.dtype, dim: int = 16) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.dim = dtype, dim
        self.heads, self.kv_heads = self.choice(HEADS)

    def normal(self, *shape: int) -> Tensor:
        """In float64, but with the digits of the dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype).double()

    def options(self, batch: int, *, changes_scores: bool = True) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": self.random() < 0.6, "window_size": self.choice(WINDOWS)}
        if self.random() < 0.3:
            options["softmax_scale"] = 0.3
        if changes_scores and self.random() < 0.25:
            options["softcap"] = 1.5
        if changes_scores and self.random() < 0.25:
            size = (self.heads,) if self.random() < 0.5 else (batch, self.heads)
            options["alibi_slopes"] = torch.rand(*size, generator=self.generator)
        return options


def of_row(options: dict[str, Any], b: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.dim() == 1 else {**options, "alibi_slopes": slopes[b]}


def moved(options: dict[str, Any], place: str) -> dict[str, Any]:
    return {name: x.to(place) if isinstance(x, Tensor) else x for name, x in options.items()}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1) -> None:
    assert found.shape == expected.shape
    tolerance = TOLERANCE[dtype]
    limits = {"rtol": tolerance, "atol": times * tolerance}
    torch.testing.assert_close(
        found.detach().cpu().double(), expected.detach(), **limits, equal_nan=bool(expected.isnan().any())
    )


def gradients(found: Tensor, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    given = torch.autograd.grad((found * weight).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(given, inputs)]


def compare(place: str, dtype: torch.dtype, exact: list[Tensor], expected: Any, call: Any) -> None:
    """Results, logsumexp and gradients; `call` gets q, k and v on the device."""
    out, lse = expected
    there = [x.detach().to(place, dtype).requires_grad_() for x in exact]
    found, sums, dropped = call(there, True)
    assert (found.dtype, sums.dtype, dropped.numel()) == (dtype, torch.promote_types(dtype, torch.float32), 0)
    close(found, out, dtype)
    close(sums, lse, torch.float32, times=5)
    assert not sums.requires_grad
    found = call(there, False)
    close(found, out, dtype)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(dtype)
    given, wanted = gradients(found, there, weight.to(place)), gradients(out, exact, weight.double())
    for one, other in zip(given, wanted):
        error = (one.detach().cpu().double() - other).norm() / other.norm().clamp_min(1.0)
        assert error <= TOLERANCE[dtype]


def check_rows(place: str, seed: int, dtype: torch.dtype, *, changes_scores: bool = True) -> None:
    """flash_attn_func, with its relatives that take packed tensors."""
    draw = Draw(seed, dtype)
    batch, queries, keys = draw.randint(1, 3), draw.randint(1, 9), draw.choice((0, 1, 3, 6, 9))
    options = draw.options(batch, changes_scores=changes_scores)
    exact = [
        draw.normal(batch, n, heads, 16).requires_grad_()
        for n, heads in ((queries, draw.heads), (keys, draw.kv_heads), (keys, draw.kv_heads))
    ]
    each = [definition(*(x[b] for x in exact), **of_row(options, b)) for b in range(batch)]
    expected = [torch.stack(both) for both in zip(*each)]
    packed = draw.random() < 0.3

    def call(tensors: list[Tensor], more: bool) -> Any:
        q, k, v = tensors
        known = moved(options, place) | {"return_attn_probs": more}
        if packed:
            return flash.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **known)
        return flash.flash_attn_func(q, k, v, **known)

    compare(place, dtype, exact, expected, call)


def check_sequences(place: str, seed: int, dtype: torch.dtype, *, changes_scores: bool = True) -> None:
    """flash_attn_varlen_func: also sequences without queries or keys, padding behind the last, and pages."""
    draw = Draw(seed, dtype)
    batch = draw.randint(1, 4)
    lengths = [(draw.choice((0, 1, 4, 7)), draw.choice((0, 1, 4, 9))) for _ in range(batch)]
    paged = draw.random() < 0.25
    options = draw.options(batch, changes_scores=changes_scores)
    padding = draw.choice((0, 0, 3)) if place != "cuda" else 0  # undefined there, as in flash-attn
    bounds = [[sum(both[side] for both in lengths[:b]) for b in range(batch + 1)] for side in (0, 1)]
    sizes = ((bounds[0][-1] + padding, draw.heads), (bounds[1][-1], draw.kv_heads), (bounds[1][-1], draw.kv_heads))
    exact = [draw.normal(total, heads, 16).requires_grad_() for total, heads in sizes]
    cut = [[slice(a, b) for a, b in pairwise(ends)] for ends in bounds]
    each = [
        definition(exact[0][a], exact[1][c], exact[2][c], **of_row(options, b)) for b, (a, c) in enumerate(zip(*cut))
    ]
    rest = torch.full((draw.heads, padding), float("inf"), dtype=torch.float64)
    expected = (
        torch.cat([*(o for o, _ in each), exact[0][bounds[0][-1] :] * 0]),
        torch.cat([*(s for _, s in each), rest], 1),
    )
    cumulative = [torch.tensor(ends, dtype=torch.int32).to(place) for ends in bounds]
    table = torch.tensor(draw.sample(range(3 * batch), 3 * batch)).view(batch, 3) if paged else None

    def call(tensors: list[Tensor], more: bool) -> Any:
        q, k, v = tensors
        known = moved(options, place) | {"return_attn_probs": more}
        if table is not None:
            k, v = (as_pages(x, bounds[1], table, 4) for x in (k, v))
            known["block_table"] = table.int().to(place)
        longest = [max(both[side] for both in lengths) for side in (0, 1)]
        return flash.flash_attn_varlen_func(q, k, v, *cumulative, *longest, **known)

    compare(place, dtype, exact, expected, call)


def as_pages(x: Tensor, bounds: list[int], table: Tensor, size: int) -> Tensor:
    """Sequences end to end (N, K, D) as pages (pages, size, K, D), in the order of the table (B, pages)."""
    pages = [x.new_full((size, *x.shape[1:]), float("nan"))] * table.numel()
    for b, line in enumerate(table.tolist()):
        own = x[bounds[b] : bounds[b + 1]]
        for number, page in enumerate(line):
            part = own[number * size : (number + 1) * size]
            pages[page] = torch.cat([part, x.new_zeros(size - len(part), *x.shape[1:])])
    return torch.stack(pages)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """(T, H, D) rotated as complex numbers, by angles (T, R / 2)."""
    half = angles.size(1)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    spun = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    out = x.clone()
    out[..., first], out[..., second] = spun.real, spun.imag
    return out


def check_cache(place: str, seed: int, dtype: torch.dtype, *, changes_scores: bool = True, page: int = 4) -> None:
    """flash_attn_with_kvcache: the result, and what stands in the cache afterwards."""
    draw = Draw(seed, dtype)
    batch, room, paged = draw.randint(1, 3), 16, draw.random() < 0.4
    pages = -(-room // page)
    queries, new = draw.choice((1, 1, 2, 4)), draw.choice((None, 1, 2, 4))
    options = draw.options(batch, changes_scores=changes_scores)
    lengths = [draw.choice((0, 1, 5, 12)) for _ in range(batch)]
    leftpad = [draw.randint(0, length) for length in lengths] if not paged and draw.random() < 0.3 else [0] * batch
    rows = draw.sample(range(5), batch) if not paged and draw.random() < 0.4 else None
    kept = [draw.normal(5, room, draw.kv_heads, 16) for _ in "kv"]  # what each row holds, by row of the cache
    for x in kept:  # what nobody wrote may be anything
        for b, row in enumerate(rows or range(batch)):
            x[row, : leftpad[b]] = x[row, lengths[b] :] = float("nan")
    logical = kept if rows is None else [x[rows] for x in kept]
    q = draw.normal(batch, queries, draw.heads, 16)
    added = [draw.normal(batch, new or 0, draw.kv_heads, 16) for _ in "kv"]
    angles, interleaved = torch.rand(64, 4, generator=draw.generator).double() * 6, draw.random() < 0.5
    rotary = new is not None and draw.random() < 0.5
    still = not options["causal"] and options["window_size"] == (-1, -1)

    outs, sums, after = [], [], [[], []]
    for b in range(batch):
        first = lengths[b] - leftpad[b]
        query, key = q[b], added[0][b]
        if rotary:
            at = torch.arange(queries) * (not still) + first
            query, key = (
                turned(query, angles[at], interleaved),
                turned(key, angles[first : first + len(key)], interleaved),
            )
            query, key = (x.to(dtype).double() for x in (query, key))
        for held, old, fresh in zip(after, logical, (key, added[1][b])):
            held.append(torch.cat([old[b, : lengths[b]], fresh]))
        out, lse = definition(query, *(held[b][leftpad[b] :] for held in after), **of_row(options, b))
        outs.append(out)
        sums.append(lse)

    given: dict[str, Any] = moved(options, place) | {"rotary_interleaved": interleaved}
    same = len(set(lengths)) == 1
    given["cache_seqlens"] = lengths[0] if same else torch.tensor(lengths, dtype=torch.int32).to(place)
    if new is not None:
        given |= {"k": added[0].to(place, dtype), "v": added[1].to(place, dtype)}
    if rotary:
        given |= {"rotary_cos": angles.cos().to(place, dtype), "rotary_sin": angles.sin().to(place, dtype)}
    if rows is not None:
        given["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32).to(place)
    if any(leftpad):
        given["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32).to(place)
    table = torch.tensor(draw.sample(range(batch * pages + 2), batch * pages)).view(batch, pages) if paged else None
    caches = [x.to(place, dtype) for x in kept]
    if table is not None:
        given["block_table"] = table.int().to(place)
        caches = [torch.full((batch * pages + 2, page, draw.kv_heads, 16), 7.0).to(place, dtype) for _ in "kv"]
        for cache, x in zip(caches, kept):
            filled = torch.nn.functional.pad(x[:batch], (0, 0, 0, 0, 0, pages * page - room), value=float("nan"))
            cache[table.to(place)] = filled.unflatten(1, (pages, page)).to(place, dtype)
    before = [cache.clone() for cache in caches]

    times = 8 if rotary else 1  # angles and products are rounded there
    found, lse = flash.flash_attn_with_kvcache(q.to(place, dtype), *caches, **given, return_softmax_lse=True)
    close(found, torch.stack(outs), dtype, times)
    close(lse, torch.stack(sums), torch.float32 if not rotary else dtype, times)
    again = [cache.clone() for cache in before]
    found = flash.flash_attn_with_kvcache(q.to(place, dtype), *again, **given)
    close(found, torch.stack(outs), dtype, times)
    for old, cache, held in zip(before, caches, after):
        expected = old.cpu().double()
        for b, x in enumerate(held):
            row = b if rows is None else rows[b]
            for position in range(lengths[b], len(x)):
                if table is None:
                    expected[row, position] = x[position]
                else:
                    expected[table[b, position // page], position % page] = x[position]
        close(cache, expected, dtype, times)
