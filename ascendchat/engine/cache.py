"""The key-value cache: one slot per running request, one pair of tensors per layer; a windowed layer is a ring.

A layer that sees W tokens keeps W places per slot: position p lies at p % W, so the token that leaves the window is the
one overwritten. Keys are already rotated when they arrive, so their order in the ring does not matter. A layer that
sees everything keeps `context` places, where the ring never turns. `ascendchat plan --goal inference` counts the same
elements (Shape.slot_elements).

Beside them lie the queries, keys and values of some tokens of a slot, as they come out of the projection: the model
mixes each token's with those of the token before (nn/gpt.py). Decoding needs those of the last two tokens; the others
are kept by prefill, so that another prompt can go on there (prefix.py says at which places).

There is a slot more than rows: what must not be kept, of idle rows and of padding, is written there.

Keys and values may be kept in 8 bits (EIGHT_BITS), half of what decoding reads: the keys of our models are normalised,
values of moderate size, so neither needs a scale. What is read of them is widened again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ascendchat.config.generate import KvCacheDtype
from ascendchat.device import Device
from ascendchat.engine.prefix import FIRST_BLOCK, SECOND_LAST, block_place, borders
from ascendchat.errors import UserError
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import shifted
from ascendchat.nn.model import Attend, Shift, Sizes
from ascendchat.sizes.shape import PREFIX_BLOCK

EIGHT_BITS = torch.float8_e4m3fn
MAX_EIGHT_BITS = torch.finfo(EIGHT_BITS).max  # beyond it the format has no infinity but NaN


def kv_cache_dtype(asked: KvCacheDtype, device: Device) -> torch.dtype | None:
    """The dtype that --kv-cache-dtype asks for; None: the model's own."""
    if asked == "auto":
        return None
    if not device.fp8_kv_cache:
        raise UserError(
            f"--kv-cache-dtype fp8 is for CUDA chips from Ada and Hopper on, not {device.chip.name}; drop it"
        )
    return EIGHT_BITS


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values to the dtype of the cache."""
    return x if x.dtype == dtype else x.clamp(-MAX_EIGHT_BITS, MAX_EIGHT_BITS).to(dtype)


class Narrowed:
    """A kernel that sees keys and values rounded as in a cache of this dtype: `eval base` measures what that costs."""

    def __init__(self, kernel: Attention, dtype: torch.dtype) -> None:
        self.kernel, self.dtype = kernel, dtype
        self.name = f"{kernel.name}, keys and values as {str(dtype).removeprefix('torch.')}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def _kept(self, x: Tensor) -> Tensor:
        return narrowed(x, self.dtype).to(x.dtype)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return self.kernel.dense(q, self._kept(k), self._kept(v), *rest)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return self.kernel.packed(q, self._kept(k), self._kept(v), *rest)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return self.kernel.cached(q, self._kept(k), self._kept(v), *rest)


def movable(x: Tensor) -> Tensor:
    """View numbers of 8 bits as bytes, for operators that only move them: few know the float type."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


class KeptTokens(NamedTuple):
    """Tokens of a pass that go into `raw`: from column `column` of row i into slot `slot`, place `place`; (R, M)."""

    slot: Tensor
    place: Tensor
    column: Tensor


class _Places(NamedTuple):
    """The places of new tokens (R, T), and of those before them, in a layer."""

    slot: Tensor  # (R, T): slot that each new token goes to
    place: Tensor  # (R, T): and its place there
    old: Tensor  # (R, S): place of the tokens in the order of their positions, while they are old ones
    new: Tensor  # (R, S): columns of the others
    is_old: Tensor  # (R, S, 1, 1) bool
    lengths: Tensor  # (R,) tokens of a row, old and new, padding included


class Suffixes:
    """The rows of a pass that goes on behind what slots (R,) hold: row i has counts[i] of `width` new tokens, from
    position starts[i] on. `dump`: the slot for what must not be kept."""

    def __init__(self, slots: Tensor, starts: Tensor, counts: Tensor, furthest: int, width: int, dump: int) -> None:
        self.slots, self.starts, self.counts = slots, starts, counts
        self.furthest, self.width, self.dump = furthest, width, dump  # furthest: the largest of starts
        self.rows = torch.arange(len(slots), device=slots.device)[:, None]
        self._places: dict[int, _Places] = {}

    @property
    def positions(self) -> Tensor:
        """Positions (R, T) of the new tokens, padding included."""
        return self.starts[:, None] + torch.arange(self.width, device=self.slots.device)

    def places(self, ring: int) -> _Places:
        """The places in a layer that has `ring` of them. A ring of which a part is overwritten by new tokens keeps the
        last of them."""
        if ring not in self._places:
            column = torch.arange(self.width, device=self.slots.device)
            count = self.counts[:, None]
            stays = (column < count) & (column >= count - ring)
            slot = self.slots[:, None].expand_as(stays).masked_fill(~stays, self.dump)
            seen = self.starts.clamp(max=ring - 1)[:, None]  # old tokens that the first new one sees
            order = torch.arange(min(self.furthest, ring - 1) + self.width, device=self.slots.device)
            old = (self.starts[:, None] - seen + order) % ring
            new = (order - seen).clamp(min=0, max=self.width - 1)
            is_old = (order < seen)[:, :, None, None]
            lengths = seen[:, 0] + self.width
            self._places[ring] = _Places(slot, self.positions % ring, old, new, is_old, lengths)
        return self._places[ring]


def blank(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros: on the host as the operating system hands them out when they are first touched: most of a cache never
    is, and to write all of it took 0.25 s before the first token at depth 12."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(pages, dtype=dtype).view(size)


class KVCache:
    """The KV cache. keys[layer], values[layer]: (slots + 1, places of that layer, K, D); raw[layer]: (slots + 1, M, H +
    2K, D), none for a model that does not mix each token with the one before."""

    def __init__(
        self,
        shape: Sizes,
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        mixes: bool = True,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`cache_dtype`: the dtype of keys and values, if it is another."""
        self.places, self.dump, self.dtype = shape.windows(context), slots, cache_dtype or dtype
        sizes = [(slots + 1, places, shape.kv_heads, shape.head_dim) for places in self.places]
        self.keys = [blank(size, self.dtype, device) for size in sizes]
        self.values = [blank(size, self.dtype, device) for size in sizes]
        kept_tokens = FIRST_BLOCK + context // PREFIX_BLOCK
        both = (slots + 1, kept_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        self.raw = [blank(both, dtype, device) for _ in sizes if mixes]

    @property
    def bytes(self) -> int:
        """Memory of the whole cache."""
        return sum(tensor.numel() * tensor.element_size() for tensor in [*self.keys, *self.values, *self.raw])

    # ---- the three kinds of passes: how a layer attends and shifts, for LanguageModel.extend ---------

    def prompt_pass(
        self, kernel: Attention, scale: float, slots: Tensor, lengths: Tensor, kept_tokens: KeptTokens
    ) -> tuple[Attend, Shift]:
        """Read prompts from their beginning on, (R, T), of which row i has lengths[i] tokens, into slots (R,)."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.put_prompts(layer, slots, k, v, lengths)
            return kernel.dense(q, k, v, self.places[layer], scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            self._keep(layer, kept_tokens, qkv)
            return shifted(layer, qkv, share)

        return attend, shift

    def suffix_pass(
        self, kernel: Attention, scale: float, suffixes: Suffixes, kept_tokens: KeptTokens
    ) -> tuple[Attend, Shift]:
        """Read prompts behind what their slots hold, (R, T)."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values, lengths = self.put_suffixes(layer, suffixes, k, v)
            return kernel.cached(q, keys, values, lengths, self.places[layer], scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            return self.shift_suffixes(layer, suffixes, kept_tokens, qkv, share)

        return attend, shift

    def token_pass(
        self,
        kernel: Attention,
        scale: float,
        slots: Tensor,
        position: Tensor,
        span: int,
        lengths: Callable[[int], list[int]] | None,
    ) -> tuple[Attend, Shift]:
        """Read one new token (B, 1) per row, at `position` (B,), written to `slots` (B,); no row sees more than `span`
        keys. `lengths`: of the rows in a layer with so many places, for kernels that want them on the host."""
        count = len(position)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.put_tokens(layer, slots, position, k, v)
            places = self.places[layer]
            reach = min(span, places)
            keys = self.keys[layer][:count, :reach].to(q.dtype)
            values = self.values[layer][:count, :reach].to(q.dtype)
            if lengths is not None:
                return kernel.one_query(q, keys, values, lengths(places), scale)
            seen = position + 1
            if not kernel.by_position:
                seen = seen.clamp(max=places)  # a full ring is seen whole
            return kernel.cached(q, keys, values, seen, places, scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            return self.shift_tokens(layer, slots, position, qkv, share)

        return attend, shift

    # ---- whole prompts ---------------------------------------------------------------------------

    def put_prompts(self, layer: int, slots: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Write keys and values (R, T, K, D) of whole prompts into slots (R,); row i has lengths[i] tokens."""
        places = self.places[layer]
        for cache, new in self._both(layer, k, v):
            if new.size(1) <= places:  # the ring has not turned; what stands behind a short prompt is never seen
                cache[:, : new.size(1)].index_copy_(0, slots, new)
            else:
                last = lengths[:, None] - 1
                place = torch.arange(places, device=new.device)
                newest = (last - (last - place) % places).clamp(min=0)  # (R, places): the position that lies there
                rows = torch.arange(new.size(0), device=new.device)[:, None]
                cache.index_copy_(0, slots, new[rows, newest])

    def _both(self, layer: int, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The cache of a layer's keys and values, each with the new ones to be written, in its dtype."""
        both = (self.keys[layer], k), (self.values[layer], v)
        return [(movable(cache), movable(narrowed(new, self.dtype))) for cache, new in both]

    def _keep(self, layer: int, kept_tokens: KeptTokens, qkv: Tensor) -> None:
        rows = torch.arange(qkv.size(0), device=qkv.device)[:, None]
        self.raw[layer].index_put_((kept_tokens.slot, kept_tokens.place), qkv[rows, kept_tokens.column])

    def kept_tokens(self, slots: Sequence[int], starts: Sequence[int], ends: Sequence[int], first: int) -> np.ndarray:
        """The KeptTokens of a pass over positions starts[i] to ends[i] - 1, (3, R, M) int64. `first`: the column of
        position start; 0, or 1 where the token before stands in front."""
        rows = []
        for slot, start, end in zip(slots, starts, ends):
            tokens = [(slot, (end - 1) % 2, end - 1), (slot, SECOND_LAST, max(end - 2, start - first))]
            tokens += [(slot, block_place(border), border - 1) for border in borders(start, end)]
            rows.append([(slot, place, position - start + first) for slot, place, position in tokens])
        most = max(map(len, rows))
        filled = [row + [(self.dump, 0, 0)] * (most - len(row)) for row in rows]
        return np.asarray(filled, dtype=np.int64).transpose(2, 0, 1)

    # ---- prompts that go on ----------------------------------------------------------------------

    def put_suffixes(self, layer: int, suffixes: Suffixes, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values (R, T, K, D) of new tokens; all that these see, in order, (R, S, K, D), and lengths
        (R,): as Attention.cached wants them, if the padding counts as tokens."""
        where = suffixes.places(self.places[layer])
        both = []
        for (cache, written), new in zip(self._both(layer, k, v), (k, v)):
            old = cache[suffixes.slots[:, None], where.old]  # a copy, so that writing does not change it
            old = old.view(self.dtype).to(new.dtype)
            both.append(torch.where(where.is_old, old, new[suffixes.rows, where.new]))
            cache.index_put_((where.slot, where.place), written)
        return both[0], both[1], where.lengths

    def shift_suffixes(
        self, layer: int, suffixes: Suffixes, kept_tokens: KeptTokens, qkv: Tensor, share: Tensor
    ) -> Tensor:
        """The Shift of new tokens (R, T, H + 2K, D), the first of which follow the newest of their slots."""
        starts = suffixes.starts
        before = self.raw[layer][suffixes.slots, (starts - 1) % 2].masked_fill((starts == 0)[:, None, None], 0.0)
        whole = torch.cat((before[:, None], qkv), dim=1)
        self._keep(layer, kept_tokens, whole)
        return torch.addcmul(qkv, whole[:, :-1], share.to(qkv.dtype))

    def copy(self, source: Tensor, target: Tensor, moves: Tensor, ends: Tensor, places: Tensor, longest: int) -> None:
        """Copy the contents of slots `source` (R,) into slots `target`, of the pairs numbered in `moves` up to the
        first `longest` positions; pairs that are no moves have equal slots. Row i can then go on at ends[i]: at place
        places[i] of the source's raw tokens is the one before. Everything is read before anything is written."""
        from_slot, to_slot = source[moves], target[moves]
        rows = torch.arange(len(source), device=source.device)
        for cache in [*self.keys, *self.values] if len(moves) else []:
            part = movable(cache)[:, :longest]
            part.index_copy_(0, to_slot, part.index_select(0, from_slot))
        for raw in self.raw:
            tokens = raw.index_select(0, source)
            tokens.index_put_((rows, (ends - 1) % 2), tokens[rows, places])
            raw.index_copy_(0, target, tokens)

    # ---- the next token of every row -------------------------------------------------------------

    def put_tokens(self, layer: int, rows: Tensor, position: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one new token per row: k, v (B, 1, K, D) of rows that write to the slots `rows` (B,), at `position`
        (B,)."""
        place = position % self.places[layer]
        for cache, new in self._both(layer, k[:, 0], v[:, 0]):
            cache.index_put_((rows, place), new)

    def shift_tokens(self, layer: int, rows: Tensor, position: Tensor, qkv: Tensor, share: Tensor) -> Tensor:
        """The Shift of one new token per row (B, 1, H + 2K, D). Two places in turn: a step that is run twice, as while
        a graph is recorded, gives the same."""
        raw = self.raw[layer]
        raw.index_put_((rows, position % 2), qkv[:, 0])
        return torch.addcmul(qkv, raw[rows, (position + 1) % 2][:, None], share.to(qkv.dtype))
