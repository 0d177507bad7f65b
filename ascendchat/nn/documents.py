"""Where the documents of a batch lie, for models and kernels whose tokens keep to their own.

known = documents(kernel, lengths, tokens, dtype)      # once per batch (B, T), for all layers
model(tokens, dense(model, kernel), documents=known)   # gpt.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ascendchat.nn.attention import Attention, Ints

ONE_BY_ONE = 8192  # on a CPU, row length × mean document length from which a call per document pays: docs/log.md


class Documents(NamedTuple):
    """Where the documents of a batch (B, T) begin and end. Every row begins one; padding is one of its own."""

    follows: Tensor  # (B, T) in the compute dtype: 1 where the token before is of the same document, else 0
    bounds: Any  # as the kernel's `packed` wants it
    positions: Tensor | None = None  # (B, T) within the document, for models that count from there


def documents(
    kernel: Attention,
    lengths: Ints,
    tokens: Tensor,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    pin: bool = False,
    restarts: bool = False,
) -> Documents:
    """What a model and its kernel need of a batch `tokens` (B, T) whose documents have these lengths, row after row.
    Made on the host once per batch and uploaded without waiting, where memory can be pinned. `restarts`: the model
    counts positions from the beginning of each document."""

    def upload(made: Tensor) -> Tensor:
        return (made.pin_memory() if pin else made).to(tokens.device, non_blocking=pin)

    lengths = np.asarray(lengths, np.int32)
    follows = torch.ones(tokens.numel(), dtype=dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    follows[torch.from_numpy(starts)] = 0
    positions = torch.from_numpy(np.arange(tokens.numel()) - starts.repeat(lengths)) if restarts else None
    work = tokens.size(1) * tokens.numel() / len(lengths)  # a mask costs by the row, a call by the document
    one_by_one = tokens.device.type == "cpu" and not compiled and work >= ONE_BY_ONE
    known = kernel.bounds(lengths, len(tokens), one_by_one, upload)
    within = None if positions is None else upload(positions.view(tokens.shape))
    return Documents(upload(follows.view(tokens.shape)), known, within)
