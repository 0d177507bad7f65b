"""Attention behind one FlashAttention-shaped interface, and the kernels that run on every device.

    kernel.dense(q, k, v, window, scale)             # (B, T, H, D), (B, T, K, D): causal, `window` tokens back
    kernel.packed(q, k, v, bounds, window, scale)    # the same, but each document sees only itself
    kernel.cached(q, k, v, lengths, window, scale)   # few new queries (B, Tq, H, D) behind a cache (B, S, K, D)
    kernel.one_query(q, k, v, held, scale)           # one (B, 1, H, D); row b sees its first held[b] keys

`window` counts the token itself: 1 sees only itself, T or more sees everything. Queries are aligned to the last key.
A kernel that was asked for and cannot run is an error; nothing falls back silently. `bounds` says where documents end:

    bounds = documents(kernel, lengths, tokens, dtype).bounds    # nn/attention.py, once per batch (B, T)

The file of a chip offers its own kernels, `attention_kernels()`, which may build on these; nn/attention.py chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

HIDDEN = -1e30  # the score of a key that is not seen, where an infinity would count as overflow

Ints = NDArray[np.int32]


class Attention(Protocol):
    """One kernel."""

    name: str
    slices: bool  # `cached` reads a slice of a longer cache in place; otherwise give it whole rows
    lengths_on_host: bool  # decoding says on the host how many keys each row holds: `one_query` instead of `cached`
    by_position: bool  # `cached` is told how many tokens a row has had, even where a ring holds the last of them only
    compiles_packed: bool  # `bounds` of every batch look alike to a compiler, so that `packed` is compiled only once
    triton: bool  # a decoding step may be our own Triton kernels instead (engine/gpt_step.py)
    packaged: int  # largest head_dim for which an optional package reads rows of training; 0: none does

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        """The reason why this kernel cannot run, or None. `decodes`: it has to read caches too."""

    @property
    def overlaps(self) -> bool:
        """Each of those kernels may begin while the one before it runs."""

    def notice(self, head_dim: int) -> str | None:
        """A sentence for the user about the optional package; None where none is installed."""

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        """Make masks for rows of this length, which must not be made inside a compiled or captured region."""

    def bounds(self, lengths: Ints, rows: int, per_document: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        """Convert the lengths of documents, which fill `rows` rows, to the form that `packed` takes. `per_document`: a
        call per document costs less here than masked rows."""

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor: ...
    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor: ...
    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor: ...
    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor: ...


class Reference:
    """Every score at once, softmax in float32: the definition the other kernels are tested against."""

    name = "reference"
    slices = True
    lengths_on_host = False
    by_position = False
    compiles_packed = True
    triton = False
    packaged = 0

    @property
    def overlaps(self) -> bool:
        return False

    def notice(self, head_dim: int) -> str | None:
        return None

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        return None

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        """Nothing to make."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        group = q.size(-2) // k.size(-2)
        k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, number: Tensor | None, window: int, scale: float) -> Tensor:
        """Over whole rows; where the tokens have the number of their document (B, T), only within that."""
        mask = visible(q.size(1), k.size(1), window, q.device)
        return self._attend(q, k, v, mask if number is None else mask & same(number, number), scale)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        return self._rows(q, k, v, None, window, scale)

    def bounds(self, lengths: Ints, rows: int, per_document: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        if per_document:
            return tuple(lengths.tolist())
        return upload(torch.from_numpy(np.arange(len(lengths), dtype=np.int32).repeat(lengths).reshape(rows, -1)))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        if isinstance(bounds, Tensor):
            return self._rows(q, k, v, bounds, window, scale)
        parts = zip(*(x.flatten(0, 1).split(bounds) for x in (q, k, v)))
        return torch.cat([self.dense(a[None], b[None], c[None], window, scale)[0] for a, b, c in parts]).view(q.shape)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor:
        return self.cached(q, k, v, torch.tensor(held, device=q.device), k.size(1), scale)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        return self._attend(q, k, v, cache_mask(q.size(1), k.size(1), lengths, window), scale)


class Sdpa(Reference):
    """torch's scaled_dot_product_attention; windows are cut into blocks, so that no full T × T mask ever exists."""

    name = "sdpa"

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, number: Tensor | None, window: int, scale: float) -> Tensor:
        length = q.size(1)
        if length != k.size(1):
            return self._call(q, k, v, visible(length, k.size(1), window, q.device), scale)
        if number is None and window >= length:
            return self._call(q, k, v, None, scale)
        parts = []
        for start in range(0, length, window):  # a block of queries sees its own keys and the block before
            stop, left = min(start + window, length), max(0, start - window + 1)
            mask = visible(stop - start, stop - left, window, q.device)
            if number is not None:
                mask = mask & same(number[:, start:stop], number[:, left:stop])
            parts.append(self._call(q[:, start:stop], k[:, left:stop], v[:, left:stop], mask, scale))
        return torch.cat(parts, dim=1)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        return self._call(q, k, v, cache_mask(q.size(1), k.size(1), lengths, window), scale)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        grouped = q.size(2) != k.size(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return y.transpose(1, 2)


class Eager(Sdpa):
    """Products in the compute dtype, softmax in float32, hidden keys at a finite number: for chips that saturate."""

    name = "eager"

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if mask is None:
            mask = visible(q.size(1), k.size(1), k.size(1), q.device)
        q = (q * scale).unflatten(2, (k.size(2), -1)).permute(0, 2, 3, 1, 4)  # (B, K, H/K, Tq, D)
        k, v = k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)  # (B, K, 1, T, D)
        hidden = ~(mask if mask.dim() == 2 else mask.unsqueeze(1))
        scores = (q @ k.mT).float().masked_fill(hidden, HIDDEN)
        y = scores.softmax(dim=-1).to(v.dtype) @ v
        return y.permute(0, 3, 1, 2, 4).flatten(2, 3)


REFERENCE = Reference()
GENERIC: tuple[Attention, ...] = (Sdpa(), Eager(), REFERENCE)  # best first


# Masks of attention, bool, True where a query sees a key.


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


# Whether a kernel decodes rightly on the device that is there: `decode_fault(kernel, plain, "npu", dtype, head_dim)`.
#
# A fused kernel can be wrong on one chip or driver without an error: one report has masks that are ignored from the
# 513th key on (vllm-ascend issue 15503). So such a kernel is compared with plain attention, in its `refusal`,
# before it decodes for the first time: four rows around those lengths, and a few queries behind a cache.

LENGTHS = (1, 511, 513, 2048)  # keys that the rows hold, of 2,048 places
QUERIES = 16  # behind a cache of twice as many keys
TOLERANCE = 0.05  # of outputs around 1: bfloat16 rounds by 0.004, a key too many moves them by far more


@cache
def decode_fault(
    kernel: Attention, plain: Attention, device_type: str, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Compare the kernel with plain attention: the fault, or None."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device_type, dtype)

    rows, scale, longest = len(LENGTHS), head_dim**-0.5, max(LENGTHS)
    q, k, v = drawn(rows, 1, 2, head_dim), drawn(rows, longest, 1, head_dim), drawn(rows, longest, 1, head_dim)
    for row, length in enumerate(LENGTHS):
        v[row, length:] = 8.0  # a key that must not be seen shows
    results, right = (one.one_query(q, k, v, LENGTHS, scale).float() for one in (kernel, plain))
    errors = (results - right).abs().amax(dim=(1, 2, 3)).tolist()
    for length, error in zip(LENGTHS, errors):
        if not error <= TOLERANCE:
            return f"it is wrong on this device with {length} keys, by {error:.2g}"
    q, k, v = drawn(2, QUERIES, 2, head_dim), drawn(2, 2 * QUERIES, 1, head_dim), drawn(2, 2 * QUERIES, 1, head_dim)
    held = torch.tensor([2 * QUERIES, QUERIES + 3], device=device_type)
    results, right = (one.cached(q, k, v, held, QUERIES, scale).float() for one in (kernel, plain))
    error = float((results - right).abs().max())
    return (
        None
        if error <= TOLERANCE
        else f"it is wrong on this device with {QUERIES} queries behind a cache, by {error:.2g}"
    )
