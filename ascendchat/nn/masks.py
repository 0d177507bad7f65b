"""Masks of attention, bool, True where a query sees a key."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys) bool, True where a query sees a key; the last query is aligned to the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def cache_mask(queries: int, keys: int, lengths: Tensor, window: int) -> Tensor:
    """(B, 1, queries, keys) bool: row b holds `lengths[b]` keys, and its queries are the last of them."""
    position = lengths[:, None] - queries + torch.arange(queries, device=lengths.device)  # (B, queries)
    distance = position[:, :, None] - torch.arange(keys, device=lengths.device)
    return ((distance >= 0) & (distance < window))[:, None]


def same(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, 1, queries, keys) bool from the numbers of their documents (B, queries) and (B, keys)."""
    return queries[:, None, :, None] == keys[:, None, None, :]


def inside(window: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether a query sees a key, as FlexAttention asks."""
    return (query >= key) & (query - key < window)


def window_blocks(length: int, window: int, device: torch.device, size: int = 128) -> Any:
    """The block mask of FlexAttention for rows of `length` that see `window` tokens back. `create_block_mask` finds the
    same, but makes the mask of every token first: 34 GB of whole numbers for rows of 65,536."""
    from torch.nn.attention.flex_attention import BlockMask

    number = torch.arange(-(-length // size), device=device)
    apart = (number[:, None] - number) * size  # from the first token of a block of queries back to that of its keys
    seen = (apart >= 0) & (apart - size + 1 < window)
    whole = (apart > 0) & (apart + size - 1 < window) & ((number[:, None] + 1) * size <= length)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """How many of each row, and which; the others follow."""
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(dim=-1, dtype=torch.int32)[None, None], order.int()[None, None]

    some, full = listed(seen & ~whole), listed(whole)
    rule = partial(inside, window)
    return BlockMask.from_kv_blocks(*some, *full, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(length, length))
