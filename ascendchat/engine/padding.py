"""Rows of tokens on their way to the device, for `ascendchat chat` and the `eval` commands.

stack(rows, padded_length(longest)) -> one array;  to_device(array, place, pin) -> a tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Row = Sequence[int] | np.ndarray


def padded_length(length: int) -> int:
    """Round up by at most an eighth, in steps of 16 or more: few distinct shapes, and little padding."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def stack(rows: Sequence[Row], width: int) -> np.ndarray:
    """(rows, width) int64, zeros behind each row."""
    out = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def to_device(values: Any, place: torch.device, pin: bool, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host values to the device; with pinned memory (`pin`) the host does not wait for the copy."""
    tensor = torch.as_tensor(np.asarray(values)).to(dtype)
    return (tensor.pin_memory() if pin else tensor).to(place, non_blocking=pin)


def to_device_at_once(*arrays: Any, place: torch.device, pin: bool) -> list[Tensor]:
    """Whole numbers of any shapes to the device in one copy, int64."""
    integers = [np.asarray(array, dtype=np.int64) for array in arrays]
    flat = to_device(np.concatenate([array.ravel() for array in integers]), place, pin)
    parts = flat.split([array.size for array in integers])
    return [part.view(array.shape) for part, array in zip(parts, integers)]
