"""Masks of attention, bool, True where a query sees a key."""

from __future__ import annotations

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
