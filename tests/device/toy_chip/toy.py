"""A chip of a new kind, as somebody would add it: the file that its row names. It computes with tensors of the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ascendchat.chips import detected
from ascendchat.device import DeviceOptions
from ascendchat.device.attention import Attention, Reference, cache_mask, same, visible
from ascendchat.device.cpu import CPU

used: set[str] = set()


def note(method: str) -> None:
    """Append what this process uses to the file that the test reads."""
    if method not in used:
        used.add(method)
        with open(os.environ["TOY_USED"], "a", encoding="utf-8") as file:
            file.write(f"{os.environ['TOY_COMMAND']} {method}\n")


class ToyAttention(Reference):
    """Products one query head at a time."""

    name = "toy"

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        return None if head_dim <= 64 else f"head_dim {head_dim} is above 64"

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        note("dense")
        return by_head(q, k, v, visible(q.size(1), k.size(1), window, q.device), scale)

    def bounds(self, lengths: Any, rows: int, per_document: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        return super().bounds(lengths, rows, False, upload)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        note("packed")
        mask = visible(q.size(1), k.size(1), window, q.device) & same(bounds, bounds)[:, 0]
        return by_head(q, k, v, mask, scale)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        note("cached")
        return by_head(q, k, v, cache_mask(q.size(1), k.size(1), lengths, window)[:, 0], scale)


def by_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(B, T, H, D) against (B, S, K, D); mask (T, S) or (B, T, S)."""
    group, heads = q.size(2) // k.size(2), []
    for h in range(q.size(2)):
        scores = (q[:, :, h] @ k[:, :, h // group].mT).float() * scale  # (B, T, S)
        heads.append(scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(v.dtype) @ v[:, :, h // group])
    return torch.stack(heads, dim=2)


def why_unusable(asked: bool) -> str | None:
    """It is there where a test says so."""
    return None if os.environ.get("TOY_CARDS") else "no toy can be used: none is plugged in; use --device-type cpu"


def names() -> list[str]:
    return ["Toy X1"] * int(os.environ.get("TOY_CARDS", "0"))


def open_device(options: DeviceOptions) -> Toy:
    return Toy(options)


def attention_kernels() -> Sequence[Attention]:
    return (ToyAttention(),)


class Toy(CPU):
    """What differs from a CPU."""

    type = "toy"

    def __init__(self, options: DeviceOptions) -> None:
        super().__init__(options)
        self.chip = detected("Toy X1", "toy", 4 << 30)

    def count(self) -> int:
        return len(names())
