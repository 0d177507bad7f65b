"""The key-value cache: one slot per running request, one pair of tensors per layer; a windowed layer is a ring.

A layer that sees W tokens keeps W places per slot: position p lies at p % W, so the token that leaves the window is the
one overwritten. Keys are already rotated when they arrive, so their order in the ring does not matter. A layer that
sees everything keeps `context` places, where the ring never turns. `ascendchat plan --goal inference` counts the same
elements (Shape.kv_elements).

Beside them lie the queries, keys and values of the last two tokens of a slot, as they come out of the projection: the
model mixes each token's with those of the token before (nn/gpt.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascendchat.nn.gpt import shifted
from ascendchat.plan.shape import Shape


class Cache:
    """keys[layer], values[layer]: (slots, places of that layer, K, D); newest[layer]: (slots, 2, H + 2K, D)."""

    def __init__(self, shape: Shape, slots: int, context: int, dtype: torch.dtype, place: torch.device) -> None:
        self.places = shape.windows(context)
        sizes = [(slots, places, shape.kv_heads, shape.head_dim) for places in self.places]
        self.keys = [torch.zeros(size, dtype=dtype, device=place) for size in sizes]
        self.values = [torch.zeros(size, dtype=dtype, device=place) for size in sizes]
        both = (slots, 2, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        self.newest = [torch.zeros(both, dtype=dtype, device=place) for _ in sizes]

    @property
    def bytes(self) -> int:
        """Memory of the whole cache."""
        return sum(tensor.numel() * tensor.element_size() for tensor in [*self.keys, *self.values, *self.newest])

    def put_prompts(self, layer: int, slots: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Keys and values (R, T, K, D) of whole prompts, of which row i has lengths[i] tokens, into slots (R,)."""
        places = self.places[layer]
        for cache, new in ((self.keys[layer], k), (self.values[layer], v)):
            if new.size(1) <= places:  # the ring has not turned; what stands behind a short prompt is never seen
                cache[:, : new.size(1)].index_copy_(0, slots, new)
            else:
                last = lengths[:, None] - 1
                place = torch.arange(places, device=new.device)
                newest = (last - (last - place) % places).clamp(min=0)  # (R, places): the position that lies there
                rows = torch.arange(new.size(0), device=new.device)[:, None]
                cache.index_copy_(0, slots, new[rows, newest])

    def put_tokens(self, layer: int, rows: Tensor, position: Tensor, k: Tensor, v: Tensor) -> None:
        """One new token per slot: k, v (B, 1, K, D) of slots 0 to B - 1 at `position` (B,)."""
        place = position % self.places[layer]
        self.keys[layer].index_put_((rows, place), k[:, 0])
        self.values[layer].index_put_((rows, place), v[:, 0])

    def shift_prompts(self, layer: int, slots: Tensor, lengths: Tensor, qkv: Tensor, share: Tensor) -> Tensor:
        """gpt.Shift over whole prompts (R, T, H + 2K, D), of which the last token of each is kept."""
        rows = torch.arange(qkv.size(0), device=qkv.device)
        self.newest[layer].index_put_((slots, (lengths - 1) % 2), qkv[rows, lengths - 1])
        return shifted(layer, qkv, share)

    def shift_tokens(self, layer: int, rows: Tensor, position: Tensor, qkv: Tensor, share: Tensor) -> Tensor:
        """gpt.Shift of one new token per slot (B, 1, H + 2K, D). Two places in turn: a step that is run twice, as while
        a graph is recorded, gives the same."""
        newest = self.newest[layer]
        newest.index_put_((rows, position % 2), qkv[:, 0])
        return torch.addcmul(qkv, newest[rows, (position + 1) % 2][:, None], share.to(qkv.dtype))
