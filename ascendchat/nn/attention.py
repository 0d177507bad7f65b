"""Chooses the attention kernel once, by name, among those that the device offers and the generic ones; says why.

    kernel, why = choose("npu", torch.bfloat16, head_dim=128)   # or name="reference"
    kernel.dense(q, k, v, window, scale)                        # device/attention.py has the interface

A kernel that was asked for and cannot run is an error; nothing falls back silently.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.device import attention_kernels
from ascendchat.device.attention import (
    GENERIC,
    REFERENCE,
    Attention,
    Eager,
    Ints,
    Reference,
    Sdpa,
    cache_mask,
    decode_fault,
    same,
    visible,
)
from ascendchat.errors import UserError
from ascendchat.nn.model import Attend, Documents, LanguageModel

__all__ = [
    "KERNELS",
    "REFERENCE",
    "Attention",
    "Eager",
    "Ints",
    "Reference",
    "Sdpa",
    "cache_mask",
    "choose",
    "decode_fault",
    "dense",
    "documents",
    "kernels",
    "same",
    "visible",
]

PER_DOCUMENT = 8192  # on a CPU, row length × mean document length from which a call per document pays: docs/log.md
KERNELS: dict[str, Attention] = {kernel.name: kernel for kernel in GENERIC}


@cache
def kernels(device_type: str) -> dict[str, Attention]:
    """Kernels for a type of device by name, best first: those of the device, then the generic ones."""
    own = {kernel.name: kernel for kernel in attention_kernels(device_type)}
    return own | {name: kernel for name, kernel in KERNELS.items() if name not in own}


def choose(
    device_type: str, dtype: torch.dtype, head_dim: int, name: str | None = None, *, decodes: bool = False
) -> tuple[Attention, str]:
    """The kernel and the sentence that says why it was chosen; the best that can run, or exactly the one asked for."""
    offered = kernels(device_type)
    if name is not None:
        if name not in offered:
            raise UserError(f"there is no attention kernel {name!r}; choose from: {', '.join(offered)}")
        reason = offered[name].refusal(device_type, dtype, head_dim, decodes)
        if reason:
            raise UserError(f"attention kernel {name} cannot run: {reason}; leave --attention out to let it be chosen")
        return offered[name], f"attention: {name} (asked for)"
    refused: list[str] = []
    for kernel in offered.values():
        reason = kernel.refusal(device_type, dtype, head_dim, decodes)
        if reason is None:
            why = f"; not {', '.join(refused)}" if refused else ""
            return kernel, f"attention: {kernel.name}{why}"
        refused.append(f"{kernel.name} ({reason})")
    raise AssertionError("the reference runs everywhere")


def dense(model: LanguageModel, kernel: Attention, seq_len: int | None = None) -> Attend:
    """Causal attention over whole rows, or within the documents of a batch; each layer with its window."""
    windows, scale = model.shape.windows(seq_len), model.scale
    kernel.prepare(seq_len or model.shape.seq_len, windows, model.head.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, bounds: Any = None) -> Tensor:
        if bounds is None:
            return kernel.dense(q, k, v, windows[layer], scale)
        return kernel.packed(q, k, v, bounds, windows[layer], scale)

    return attend


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
    """Borders of the documents in a batch `tokens` (B, T), from their lengths, row after row.

    Made on the host once per batch, for all layers, and uploaded without waiting where memory can be pinned.
    `restarts`: the model counts positions from the beginning of each document.
    """

    def upload(made: Tensor) -> Tensor:
        return (made.pin_memory() if pin else made).to(tokens.device, non_blocking=pin)

    lengths = np.asarray(lengths, np.int32)
    continues_document = torch.ones(tokens.numel(), dtype=dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    continues_document[torch.from_numpy(starts)] = 0
    positions = torch.from_numpy(np.arange(tokens.numel()) - starts.repeat(lengths)) if restarts else None
    work = tokens.size(1) * tokens.numel() / len(lengths)  # a mask costs by the row, a call by the document
    per_document = tokens.device.type == "cpu" and not compiled and work >= PER_DOCUMENT
    bounds = kernel.bounds(lengths, len(tokens), per_document, upload)
    within = None if positions is None else upload(positions.view(tokens.shape))
    return Documents(upload(continues_document.view(tokens.shape)), bounds, within)
