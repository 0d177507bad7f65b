"""Triton kernels of a decoding step with few rows: a matrix product is a sum over the weights, and fuses with what
stands before and behind it. CUDA only; the rest of a step, and what the names mean, is in token_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ascendchat.nn.token_kernels import gates_of, rounded, summed, unit_of, vector, wait


@triton.jit  # type: ignore[untyped-decorator]
def project(  # type: ignore[no-untyped-def]
    x,
    parts,
    first,
    residual,
    scale,
    middle,
    gate,
    gates,
    weight,
    out,
    layer,
    outputs,
    rows: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    count: tl.constexpr,
    tile: tl.constexpr,
    kind: tl.constexpr,  # "mixed", "plain" as for `norm`, then ReLU²; "ready": x is the norm, of the model's dtype
    keeps: tl.constexpr,
    kv_heads: tl.constexpr,
    gated: tl.constexpr,
    gate_range: tl.constexpr,
    eps: tl.constexpr,
    pdl: tl.constexpr,
):
    """The norm of the stream times `weight` (outputs, C): projections, ReLU² of `up`, logits."""
    c, own = tl.arange(0, width), tl.program_id(0) == 0
    inside = c < dim
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    held = tl.load(weight + n[:, None] * dim + c[None, :], mask=(n < outputs)[:, None] & inside[None, :], other=0.0)
    wait(pdl)
    for r in tl.static_range(rows):
        s = summed(x, parts, r, c, inside, rows, dim, count)
        if kind == "mixed":
            if keeps and own:
                tl.store(middle + r * dim + c, s, mask=inside)
            s = s * rounded(residual + layer, weight)
            s += vector(first + r * dim, c, inside) * rounded(scale + layer, weight)
        unit = s if kind == "ready" else unit_of(s, dim, eps)
        if kv_heads > 0 and own:
            gates_of(gates, r, gate, unit, c, kv_heads, gated, gate_range)
        found = tl.sum(held.to(tl.float32) * unit[None, :], axis=1)
        if kind == "plain":
            found = tl.maximum(found, 0.0)
            found = found * found
        tl.store(out + r * outputs + n, found.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit  # type: ignore[untyped-decorator]
def joined(  # type: ignore[no-untyped-def]
    sums,
    totals,
    weight,
    x,
    parts,
    first,
    residual,
    scale,
    out,
    layer,
    rows: tl.constexpr,
    dim: tl.constexpr,
    count: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    cuts: tl.constexpr,
    tile: tl.constexpr,
    pdl: tl.constexpr,
):
    """The stream that entered the layer, plus attention joined from its parts times `weight` (C, H * D)."""
    c, n = tl.arange(0, width), tl.program_id(0) * tile + tl.arange(0, tile)
    full: tl.constexpr = heads * head_dim
    inside, mine = c < full, n < dim
    held = tl.load(weight + n[:, None] * full + c[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
    wait(pdl)
    for r in tl.static_range(rows):
        at = (r * heads + c // head_dim) * cuts
        total, found = tl.zeros((width,), tl.float32), tl.zeros((width,), tl.float32)
        for cut in tl.static_range(cuts):
            total += tl.load(totals + at + cut, mask=inside, other=1.0)
            found += tl.load(sums + (at + cut) * head_dim + c % head_dim, mask=inside, other=0.0)
        y = tl.where(inside, found / total, 0.0)
        s = summed(x, parts, r, n, mine, rows, dim, count) * rounded(residual + layer, weight)
        s += vector(first + r * dim, n, mine) * rounded(scale + layer, weight)
        tl.store(out + r * dim + n, s + tl.sum(held.to(tl.float32) * y[None, :], axis=1), mask=mine)


@triton.jit  # type: ignore[untyped-decorator]
def down(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    parts,
    rows: tl.constexpr,
    inner: tl.constexpr,
    dim: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    pdl: tl.constexpr,
):
    """hidden (B, inner) times `weight` (inner, C): the part (B, C) of `tall` rows of it."""
    n, part = tl.program_id(0) * wide + tl.arange(0, wide), tl.program_id(1)
    m, mine = part * tall + tl.arange(0, tall), n < dim
    held = tl.load(weight + m[:, None] * dim + n[None, :], mask=(m < inner)[:, None] & mine[None, :], other=0.0)
    wait(pdl)
    for r in tl.static_range(rows):
        h = vector(hidden + r * inner, m, m < inner)
        tl.store(parts + (part * rows + r) * dim + n, tl.sum(held.to(tl.float32) * h[:, None], axis=0), mask=mine)
