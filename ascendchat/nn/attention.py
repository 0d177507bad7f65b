"""Chooses the attention kernel once, by name, among those that the device offers and the generic ones; says why.

    kernel, why = choose("npu", torch.bfloat16, head_dim=128)   # or name="reference"
    kernel.dense(q, k, v, window, scale)                        # device/attention.py has the interface

A kernel that was asked for and cannot run is an error; nothing falls back silently.
"""

from __future__ import annotations

from functools import cache

import torch

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
    "kernels",
    "same",
    "visible",
]

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
