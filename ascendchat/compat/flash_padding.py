"""The functions of flash_attn.bert_padding: padded rows to sequences end to end and back. See flash.py."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of (N, ...) at these indices (M,)."""
    return input.index_select(0, indices.long())


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) of zeros, with these values (M, ...) at these indices (M,)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Of rows (B, T, ...) the tokens where the mask (B, T) is true, or where `unused_mask` says that they keep their
    place: tokens (N, ...), their indices in B · T, bounds (B + 1,) int32, the longest length, and the lengths that the
    mask alone has."""
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    bounds[1:] = lengths.cumsum(0)
    used = attention_mask.bool().sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, bounds, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The way back: (N, ...) to (batch, seqlen, ...), with zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
