"""Whether a kernel decodes rightly on the device that is there: `decode_fault(kernel, plain, "npu", dtype, head_dim)`.

A fused kernel can be wrong on one chip or driver without an error: one report has masks that are ignored from the 513th
key on (vllm-ascend issue 15503). So a kernel that asks for it is compared with plain attention before it decodes for
the first time: four rows around those lengths, and a few queries behind a cache. attention.py calls it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ascendchat.nn.attention import Attention

LENGTHS = (1, 511, 513, 2048)  # keys that the rows hold, of 2,048 places
QUERIES = 16  # behind a cache of twice as many keys
TOLERANCE = 0.05  # of outputs around 1: bfloat16 rounds by 0.004, a key too many moves them by far more


@cache
def decode_fault(
    kernel: Attention, plain: Attention, device_type: str, dtype: torch.dtype, head_dim: int
) -> str | None:
    """What is wrong with the kernel, or None."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device_type, dtype)

    rows, scale, longest = len(LENGTHS), head_dim**-0.5, max(LENGTHS)
    q, k, v = drawn(rows, 1, 2, head_dim), drawn(rows, longest, 1, head_dim), drawn(rows, longest, 1, head_dim)
    for row, length in enumerate(LENGTHS):
        v[row, length:] = 8.0  # a key that must not be seen shows
    found, right = (one.one_query(q, k, v, LENGTHS, scale).float() for one in (kernel, plain))
    errors = (found - right).abs().amax(dim=(1, 2, 3)).tolist()
    for length, error in zip(LENGTHS, errors):
        if not error <= TOLERANCE:
            return f"it is wrong on this device with {length} keys, by {error:.2g}"
    q, k, v = drawn(2, QUERIES, 2, head_dim), drawn(2, 2 * QUERIES, 1, head_dim), drawn(2, 2 * QUERIES, 1, head_dim)
    held = torch.tensor([2 * QUERIES, QUERIES + 3], device=device_type)
    found, right = (one.cached(q, k, v, held, QUERIES, scale).float() for one in (kernel, plain))
    error = float((found - right).abs().max())
    return (
        None
        if error <= TOLERANCE
        else f"it is wrong on this device with {QUERIES} queries behind a cache, by {error:.2g}"
    )
