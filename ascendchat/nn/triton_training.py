"""Queries, keys and values of a layer out of one product: shift, norm and rotation as one Triton kernel each way.

    q, k, v = heads(qkv, share, (cos, sin), 6)        # qkv (B, T, H + 2K, D) with K = 6, share (H + 2K, D)
    q, k, v = heads(qkv, share, (cos, sin), 6, continues_document)   # none where that (B, T) is 0

gpt.py computes the same in plain torch: every head takes its share of the previous token's, then queries and keys are
RMS-normalised and rotated. For CUDA. The gradient of a token needs that of the next one, behind a norm: a compiler
writes all of them down and reads them twice, and once more for the shares. Here a program walks backwards over its
tokens and has the next one's at hand. On an H200, depth 12, 32 rows of 2048, --fp8: 0.6 ms a layer instead of 1.4.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascendchat.nn.model import NORM_EPS

FORWARD = {"block": 8, "num_warps": 2}  # the fastest of those tried: docs/log.md
BACKWARD = {"block": 2, "walk": 64, "num_warps": 1}


@triton.jit  # type: ignore[untyped-decorator]
def _load(base, at, half: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    """The two halves of a head, which a rotation mixes, in float32."""
    a = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + at + half, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit  # type: ignore[untyped-decorator]
def _unit(a, b, half: tl.constexpr, eps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Halves of size 1, and the factor that made them so."""
    factor = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
    return a * factor, b * factor, factor


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    qkv,
    share,
    cos,
    sin,
    continues_document,  # not read unless `packed`
    out,
    tokens,
    length,
    every: tl.constexpr,
    first: tl.constexpr,
    mine: tl.constexpr,
    half: tl.constexpr,
    width: tl.constexpr,
    packed: tl.constexpr,
    turned: tl.constexpr,
    eps: tl.constexpr,
    block: tl.constexpr,
):
    """Heads `first` to `first + mine` of all `every`: a program per head and `block` tokens, heads first. One axis for
    both: CUDA has room for 65,535 programs only on the others."""
    head, c = tl.program_id(0) % mine, tl.arange(0, width)
    n = tl.program_id(0) // mine * block + tl.arange(0, block)
    place, row = n % length, n.to(tl.int64)[:, None]
    here = (n < tokens)[:, None] & (c < half)[None, :]
    at = (row * every + first + head) * (2 * half) + c[None, :]
    a, b = _load(qkv, at, half, here)
    takes = place > 0
    if packed:
        takes = tl.load(continues_document + n, mask=n < tokens, other=0.0) > 0
    last_a, last_b = _load(qkv, at - every * 2 * half, half, here & takes[:, None])
    share_a, share_b = _load(share, (first + head) * (2 * half) + c, half, c < half)
    a, b = a + share_a[None, :] * last_a, b + share_b[None, :] * last_b
    if turned:
        a, b, _ = _unit(a, b, half, eps)
        angle = place[:, None] * (2 * half) + half + c[None, :]  # the first half says the same, but for the sign
        x = tl.load(cos + angle, mask=here, other=0.0).to(tl.float32)
        y = tl.load(sin + angle, mask=here, other=0.0).to(tl.float32)
        a, b = a * x - b * y, b * x + a * y
    to = (row * mine + head) * (2 * half) + c[None, :]
    tl.store(out + to, a.to(out.dtype.element_ty), mask=here)
    tl.store(out + to + half, b.to(out.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    grad,
    sums,
    qkv,
    share,
    cos,
    sin,
    continues_document,  # not read unless `packed`
    out,
    tokens,
    length,
    every: tl.constexpr,
    first: tl.constexpr,
    mine: tl.constexpr,
    half: tl.constexpr,
    width: tl.constexpr,
    packed: tl.constexpr,
    turned: tl.constexpr,
    eps: tl.constexpr,
    block: tl.constexpr,
    walk: tl.constexpr,
):
    """A program per `block` heads walks over `walk` tokens, the last one first, and leaves its part of the shares'
    gradient in `sums`. It begins one token behind its own, whose gradient it needs but does not write."""
    groups: tl.constexpr = (mine + block - 1) // block
    part, c = tl.program_id(0) // groups, tl.arange(0, width)
    head = tl.program_id(0) % groups * block + tl.arange(0, block)
    real = (head < mine)[:, None] & (c < half)[None, :]
    of_qkv, of_grad = (first + head)[:, None] * (2 * half) + c[None, :], head[:, None] * (2 * half) + c[None, :]
    share_a, share_b = _load(share, of_qkv, half, real)
    sum_a, sum_b = tl.zeros((block, width), tl.float32), tl.zeros((block, width), tl.float32)
    next_a, next_b = tl.zeros((block, width), tl.float32), tl.zeros((block, width), tl.float32)
    end = part * walk + walk
    a, b = _load(qkv, end.to(tl.int64) * (every * 2 * half) + of_qkv, half, real & (end < tokens))
    for i in range(walk + 1):
        n = end - i
        row, place, here = n.to(tl.int64), n % length, real & (n < tokens)
        ga, gb = _load(grad, row * (mine * 2 * half) + of_grad, half, here)
        before = real & (n > 0) & (n <= tokens)
        before_a, before_b = _load(qkv, (row - 1) * (every * 2 * half) + of_qkv, half, before)
        takes = tl.where(place > 0, 1.0, 0.0)
        if packed:
            takes = tl.load(continues_document + n, mask=n < tokens, other=0.0).to(tl.float32)
        last_a, last_b = before_a * takes, before_b * takes
        if turned:
            a, b, factor = _unit(a + share_a * last_a, b + share_b * last_b, half, eps)
            angle = place * (2 * half) + half + c
            x = tl.load(cos + angle, mask=c < half, other=0.0).to(tl.float32)[None, :]
            y = tl.load(sin + angle, mask=c < half, other=0.0).to(tl.float32)[None, :]
            ga, gb = ga * x + gb * y, gb * x - ga * y
            along = ((tl.sum(ga * a, axis=1) + tl.sum(gb * b, axis=1)) / (2 * half))[:, None]
            ga, gb = factor * (ga - a * along), factor * (gb - b * along)
        if i > 0:
            to = row * (every * 2 * half) + of_qkv
            tl.store(out + to, (ga + share_a * next_a).to(out.dtype.element_ty), mask=here)
            tl.store(out + to + half, (gb + share_b * next_b).to(out.dtype.element_ty), mask=here)
            sum_a += ga * last_a
            sum_b += gb * last_b
        next_a, next_b = ga * takes, gb * takes
        a, b = before_a, before_b
    to = part.to(tl.int64) * (every * 2 * half) + of_qkv
    tl.store(sums + to, sum_a, mask=real)
    tl.store(sums + to + half, sum_b, mask=real)


def _arguments(
    qkv: Tensor, share: Tensor, cos: Tensor, sin: Tensor, continues_document: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]:
    """Arguments of both kernels: tables, sizes, and the constants of a head."""
    rows, length, every, dim = qkv.shape
    tables = (share.to(qkv.dtype), cos, sin, cos if continues_document is None else continues_document)
    return (
        tables,
        (rows * length, length, every),
        (dim // 2, triton.next_power_of_2(dim // 2), continues_document is not None),
    )


class _Heads(torch.autograd.Function):
    """Keeps the product and nothing else for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, share: Tensor, cos: Tensor, sin: Tensor, continues_document: Tensor | None, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, every, dim = qkv.shape
        ctx.save_for_backward(qkv, share, cos, sin, continues_document)
        q, k, v = [qkv.new_empty(rows, length, count, dim) for count in (every - 2 * kv_heads, kv_heads, kv_heads)]
        tables, sizes, shape = _arguments(qkv, share, cos, sin, continues_document)
        programs, first = triton.cdiv(rows * length, FORWARD["block"]), 0
        for out, turned in ((q, True), (k, True), (v, False)):
            mine = out.size(2)
            _forward[(programs * mine,)](qkv, *tables, out, *sizes, first, mine, *shape, turned, NORM_EPS, **FORWARD)
            first += mine
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, share, cos, sin, continues_document = ctx.saved_tensors
        rows, length, every, dim = qkv.shape
        out = torch.empty_like(qkv)
        tables, sizes, shape = _arguments(qkv, share, cos, sin, continues_document)
        programs, first = triton.cdiv(rows * length, BACKWARD["walk"]), 0
        sums = torch.empty(programs, every, dim, dtype=torch.float32, device=qkv.device)
        for grad, turned in zip(grads, (True, True, False), strict=True):
            mine = grad.size(2)
            _backward[(programs * triton.cdiv(mine, BACKWARD["block"]),)](
                grad.contiguous(), sums, qkv, *tables, out, *sizes, first, mine, *shape, turned, NORM_EPS, **BACKWARD
            )
            first += mine
        return out, sums.sum(dim=0), None, None, None, None


def heads(
    qkv: Tensor, share: Tensor, rope: tuple[Tensor, Tensor], kv_heads: int, continues_document: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, T, H, D), k and v (B, T, K, D); D is even, and the rotary tables hold T places."""
    return _Heads.apply(qkv.contiguous(), share, *rope, continues_document, kv_heads)  # type: ignore[no-any-return, no-untyped-call]
