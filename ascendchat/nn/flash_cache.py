"""flash_attn_with_kvcache of flash-attn 2: writes new keys and values into a cache, rotated or not, and attends. See
compat/flash.py. The cache is rows (B, S, K, D), or pages (pages, size, K, D) in the order of a block_table (B, pages per row).

On NPUs the lengths are needed on the host: pass cache_seqlens as a number or a CPU tensor where you have it; a tensor
on the device is read once, and again when it has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ascendchat.config import UserError
from ascendchat.nn import flash_plain as plain
from ascendchat.nn.attention import causal_mask
from ascendchat.nn.flash_attend import FINITE, NPU, TORCH, Found, kernel_for, make_rule, on_host, say
from ascendchat.nn.flash_plain import Rule

TRITON = find_spec("triton") is not None  # not on Windows


def read_pages(k: Tensor, v: Tensor, table: Tensor, lengths: Any) -> tuple[Tensor, Tensor]:
    """Pages (pages, size, K, D) as sequences of these lengths, end to end: (N, K, D)."""
    size, starts = k.size(1), np.cumsum(lengths) - lengths
    place = torch.from_numpy(np.arange(lengths.sum()) - starts.repeat(lengths)).to(table.device)
    row = torch.from_numpy(np.arange(len(lengths)).repeat(lengths)).to(table.device)
    slot = table[row, place // size].long() * size + place % size
    return k.flatten(0, 1)[slot], v.flatten(0, 1)[slot]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first channels of x (B, T, H, D), as many as two times the width of cos and sin (S, R / 2), by the angles at
    its positions (B, T). Pairs are neighbours if interleaved, else half the rotated width apart."""
    width = 2 * cos.size(-1)
    high = torch.promote_types(x.dtype, torch.float32)
    c, s = (angles[positions].to(high).unsqueeze(2) for angles in (cos, sin))  # (B, T, 1, R / 2)
    part = x[..., :width].to(high)
    one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = one * c - other * s, one * s + other * c
    both = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([both.to(x.dtype), x[..., width:]], -1)


def _places(cache: Tensor, rows: Tensor, positions: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The index of these positions (B, T) of these rows (B,) in a cache; in one of pages, of the lines of the table."""
    if table is None:
        return rows[:, None], positions
    size = cache.size(1)
    return table.long().gather(1, positions // size), positions % size


def _refuse(
    k: Tensor | None, v: Tensor | None, seqlens: Any, rows: Any, leftpad: Any, table: Any, cos: Any, sin: Any
) -> None:
    """Combinations that flash-attn refuses too."""
    if (k is None) != (v is None):
        raise UserError("k, v: give both or none")
    if k is not None and seqlens is None:
        raise UserError("cache_seqlens: needed with k and v, to say where they go in the cache")
    if (cos is None) != (sin is None) or (cos is not None and k is None):
        raise UserError("rotary_cos, rotary_sin: give both, and k and v with them")
    for name, given in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
        if table is not None and given is not None:
            raise UserError(f"{name}: not with block_table; put the pages of a row into its line of the table")


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Found:
    """Queries (B, Tq, H, D) behind a cache; k and v (B, T, K, D) are first written at cache_seqlens, in place. There is
    no gradient. `num_splits` is about speed alone, and not used here. The logsumexp is (B, H, Tq)."""
    _refuse(k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, rotary_cos, rotary_sin)
    rule = make_rule(q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, alibi_slopes)
    rule = rule._replace(lse=return_softmax_lse)
    batch, device, room = q.size(0), q.device, k_cache.size(1)
    if block_table is not None:
        room *= block_table.size(1)
    elif cache_batch_idx is None and k_cache.size(0) < batch:
        raise UserError(f"k_cache: {k_cache.size(0)} rows are fewer than the {batch} of q; name them: cache_batch_idx")
    given: int | Tensor = room if cache_seqlens is None else cache_seqlens
    starts = torch.full((batch,), given, device=device) if isinstance(given, int) else given.to(device).long()
    on_cpu = isinstance(given, int) or given.device.type == "cpu"
    known = [int(given)] * batch if isinstance(given, int) else on_host(given) if on_cpu else None
    rows = torch.arange(batch, device=device) if cache_batch_idx is None else cache_batch_idx.long()
    new = 0 if k is None else k.size(1)
    if known is None and kernel_for(q, rule) == NPU:
        known = on_host(given)  # type: ignore[arg-type]
    if known is not None and max(known, default=0) + new > room:
        raise UserError(f"cache_seqlens: {max(known)} and {new} new tokens do not fit into a cache of {room}")
    if k is not None and v is not None:
        positions = starts[:, None] + torch.arange(new, device=device)
        if rotary_cos is not None and rotary_sin is not None:
            first = starts[:, None] - (0 if cache_leftpad is None else cache_leftpad[:, None])
            steps = torch.arange(max(new, q.size(1)), device=device)
            k = rotate(k, rotary_cos, rotary_sin, first + steps[:new], rotary_interleaved)
            moves = rule.left >= 0 or rule.right >= 0  # else all queries stand at the first new place
            at = first + (steps[: q.size(1)] if moves else steps[: q.size(1)] * 0)
            q = rotate(q, rotary_cos, rotary_sin, at, rotary_interleaved)
        where = _places(k_cache, rows, positions, block_table)
        k_cache[where], v_cache[where] = k.to(k_cache.dtype), v.to(v_cache.dtype)
    held = None if known is None else [length + new for length in known]
    cached = Cached(k_cache, v_cache, starts, new, held, rows, cache_batch_idx is None, cache_leftpad, block_table)
    out, lse = _attend(q, cached, rule)
    return (out, lse) if lse is not None else out


class Cached(NamedTuple):
    """What the queries find."""

    k: Tensor  # (rows, S, K, D), or (pages, size, K, D)
    v: Tensor
    starts: Tensor  # (B,) keys that were in each row
    new: int  # and that were added
    held: list[int] | None  # keys in each row, where the host knows it
    rows: Tensor  # (B,) of the cache
    in_order: bool  # they are the first ones
    leftpad: Tensor | None  # (B,) where the keys begin
    table: Tensor | None

    @property
    def room(self) -> int:
        return self.k.size(1) * (1 if self.table is None else self.table.size(1))

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of these positions (B, T) of each row."""
        where = _places(self.k, self.rows, positions, self.table)
        return self.k[where], self.v[where]

    def contents(self, length: int) -> tuple[Tensor, Tensor]:
        """(B, length, K, D) twice, a copy only of pages and of picked rows."""
        if self.in_order and self.table is None:
            return self.k[: len(self.rows), :length], self.v[: len(self.rows), :length]
        return self.read(torch.arange(length, device=self.k.device).expand(len(self.rows), -1))


def _attend(q: Tensor, cached: Cached, rule: Rule) -> tuple[Tensor, Tensor | None]:
    name, queries = kernel_for(q, rule), q.size(1)
    rule = rule.for_lengths(queries, cached.room)
    if q.numel() == 0:
        return q.clone(), q.new_zeros(q.size(0), q.size(2), queries, dtype=torch.float32) if rule.lse else None
    if name == NPU:
        found = _attend_npu(q, cached, rule)
        if found is not None:
            return found
        name = FINITE[0]
    longest = cached.room if cached.held is None else max(1, *cached.held)
    k, v = cached.contents(longest)
    totals, leftpad = cached.starts + cached.new, cached.leftpad
    free = rule.left < 0 and rule.right < 0 and leftpad is None
    dense = all(x.stride() == k.stride() and x.stride(2) == x.size(3) and x.stride(3) == 1 for x in (k, v))
    if name == TORCH and TRITON and queries == 1 and free and dense and not rule.lse:
        from ascendchat.nn.triton_decoding import one_query

        return one_query(q, k, v, totals, rule.scale).masked_fill((totals == 0)[:, None, None, None], 0), None
    whole = leftpad is None and cached.held is not None and min(cached.held) == longest
    return plain.cached(q, k, v, totals, leftpad, rule, whole=whole, formula=name in FINITE)


def _attend_npu(q: Tensor, cached: Cached, rule: Rule) -> tuple[Tensor, Tensor | None] | None:
    """By the incremental kernel, or None where it has no way. It wants rows that begin at 0, and takes no window for
    one query: then the keys in sight are copied."""
    from ascendchat.device import npu_attention

    queries, held, k, v, table = q.size(1), cached.held, cached.k, cached.v, cached.table
    assert held is not None, "known for NPUs"
    if not npu_attention.can_cache(q, k.size(2)):
        say(f"flash_attn_with_kvcache: the NPU's kernel takes no {q.dtype} with head_dim {q.size(3)}; plain operations")
        return None
    first = [0] * len(held) if cached.leftpad is None else on_host(cached.leftpad)
    if queries == 1 and rule.left >= 0:
        first = [max(start, total - 1 - rule.left) for start, total in zip(first, held)]
        rule = rule._replace(left=-1)
    lengths = [max(total - start, 0) for start, total in zip(first, held)]
    if any(first):
        positions = torch.tensor(first, device=q.device)[:, None] + torch.arange(max(1, *lengths), device=q.device)
        k, v = cached.read(positions.clamp(max=cached.room - 1))
        table = None
    elif table is None or not npu_attention.can_page(queries, k.size(1)):
        in_place = cached.in_order and table is None  # a slice of it would be copied
        k, v = cached.contents(k.size(1) if in_place else max(1, *lengths))
        table = None
    pages = None if table is None else table.int()
    limits = (rule.left, rule.right, rule.scale, rule.lse)
    out, lse = npu_attention.cached(q, k, v, causal_mask(q.device), [max(n, 1) for n in lengths], pages, *limits)
    none = [[i < plain.blind(rule, queries, total) for i in range(queries)] for total in lengths]
    if any(map(any, none)):
        where = torch.tensor(none, device=q.device)  # (B, Tq)
        out = out.masked_fill(where[:, :, None, None], 0)
        lse = None if lse is None else lse.masked_fill(where[:, None], float("inf"))
    return out, lse
