"""Attention of one new query per row as a Triton kernel, for the kernel `flash` of cuda_attention.py.

    one_query(q, k, v, lengths, scale)        # (B, 1, H, D) behind (B, S, K, D), of which row b holds lengths[b] keys

A program per row and head walks over the keys its row holds, and no further, with a running softmax in float32. A
matrix unit would multiply 63 rows of nothing; the time is that of reading keys and values. On an H200 at batch 1 the
same attention left to the compiler took six launches a layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_AT_ONCE, WARPS = 128, 8


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    lengths,
    out,
    row,
    place,
    scale: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    b, h = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + b).to(tl.int32)
    c = tl.arange(0, width)
    mine = (b * heads + h) * dim + c
    query = tl.load(q + mine, mask=c < dim, other=0.0).to(tl.float32)
    start = b.to(tl.int64) * row + (h // group) * dim
    most = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    found = tl.zeros((width,), tl.float32)
    for first in range(0, length, block):
        i = first + tl.arange(0, block)
        there = (i < length)[:, None] & (c < dim)[None, :]
        at = start + i[:, None] * place + c[None, :]
        keys = tl.load(k + at, mask=there, other=0.0).to(tl.float32)
        values = tl.load(v + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.where(i < length, tl.sum(keys * query[None, :], axis=1) * scale, -float("inf"))
        larger = tl.maximum(most, tl.max(scores, axis=0))
        weights, kept = tl.exp(scores - larger), tl.exp(most - larger)
        total = total * kept + tl.sum(weights, axis=0)
        found = found * kept + tl.sum(values * weights[:, None], axis=0)
        most = larger
    tl.store(out + mine, (found / total).to(out.dtype.element_ty), mask=c < dim)


def one_query(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """k and v may be slices of a longer cache; they have the same strides, and every row holds at least one key."""
    rows, _, heads, dim = q.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    sizes = (heads, heads // k.size(2), dim, triton.next_power_of_2(dim), KEYS_AT_ONCE)
    _attend[rows, heads](q, k, v, lengths, out, k.stride(0), k.stride(1), scale, *sizes, num_warps=WARPS)
    return out
