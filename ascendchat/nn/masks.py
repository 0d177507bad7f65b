"""Masks of attention, bool, True where a query sees a key, but for the last one."""

from __future__ import annotations

from functools import cache

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


@cache
def causal_mask(device: torch.device) -> Tensor:
    """The one 2048×2048 mask that the NPU's compressed sparse modes read, True = hidden; whatever the row length."""
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), diagonal=1)
