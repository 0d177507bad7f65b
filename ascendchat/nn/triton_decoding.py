"""Triton kernels of a decoding step, CUDA only: norms, products, rows of one token; engine/gpt_step.py has the step."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton kernels of a decoding step with few rows: a matrix product is a sum over the weights, and fuses with what
# stands before and behind it. CUDA only; the rest of a step, and what the names mean, is in triton_decoding.py.


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


# A matrix product of a decoding step with more than a few rows, as a Triton kernel: what stands behind it fuses, and
# it fetches its weights while the kernel before it still runs. CUDA only; engine/gpt_step.py says where it stands.
#
#     product(x, weight, out, blocks)              # (B, K) times weight (N, K), or (K, N)
#     product(sums, weight, out, blocks, totals=t) # attention from its parts, as token_kernels.attend leaves them


class Blocks(NamedTuple):
    """Tiling of a product."""

    wide: int  # outputs of a program
    parts: int  # of the inner dimension, each a program's; whoever reads the result adds them
    deep: int = 64  # of the inner dimension at once
    stages: int = 4  # so many of these are under way, if the chip has room
    warps: int = 4
    tall: int = 64  # rows of a program, also where there are fewer: on an H200 products of fewer are slower


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    totals,
    weight,
    out,
    rows,
    outputs,
    inner: tl.constexpr,
    cuts: tl.constexpr,  # 0: x is (B, K); else (B, H, cuts, D), to be joined with `totals` (B, H, cuts)
    head_dim: tl.constexpr,
    turned: tl.constexpr,  # weight is (K, N)
    squares: tl.constexpr,  # ReLU² of it
    tall: tl.constexpr,
    wide: tl.constexpr,
    deep: tl.constexpr,
    parts: tl.constexpr,
    each: tl.constexpr,  # of the inner dimension that a part has
    room: tl.constexpr,  # the next power of two
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    m, n = tl.program_id(0) * tall + tl.arange(0, tall), tl.program_id(1) * wide + tl.arange(0, wide)
    part = tl.program_id(2)
    begin, real, shown = part * each, m < rows, n < outputs
    size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    if pdl:
        mine = tl.program_id(0) == 0  # the others need the same weights
        if turned:
            line = tl.arange(0, room)
            fits = mine & (line < each) & (begin + line < inner) & (tl.program_id(1) * wide + wide <= outputs)
            start = weight + (begin + line).to(tl.int64) * outputs + tl.program_id(1) * wide
            fetch_ahead(start, tl.where(fits, wide * size, 0))
        else:
            long = tl.maximum(tl.minimum(each, inner - begin), 0) * size
            fetch_ahead(weight + n.to(tl.int64) * inner + begin, tl.where(shown & mine, long, 0))
    wait(pdl)
    total = tl.zeros((tall, wide), tl.float32)
    for first in tl.range(0, each, deep, num_stages=stages):
        k = begin + first + tl.arange(0, deep)
        if inner % (deep * parts) == 0:
            read, held = real[:, None], shown[None, :]
        else:
            read, held = real[:, None] & (k < inner)[None, :], shown[None, :] & (k < inner)[:, None]
        if cuts > 0:  # a block lies within one head
            at = (m * (inner // head_dim) + (begin + first) // head_dim) * cuts
            within = (begin + first) % head_dim + tl.arange(0, deep)
            found, mass = tl.zeros((tall, deep), tl.float32), tl.zeros((tall,), tl.float32)
            for cut in tl.static_range(cuts):
                found += tl.load(x + (at + cut)[:, None] * head_dim + within[None, :], mask=read, other=0.0)
                mass += tl.load(totals + at + cut, mask=real & (begin + first < inner), other=1.0)
            a = (found / mass[:, None]).to(weight.dtype.element_ty)
        else:
            a = tl.load(x + m[:, None] * inner + k[None, :], mask=read, other=0.0)
        if turned:
            b = tl.load(weight + k[:, None] * outputs + n[None, :], mask=held, other=0.0)
        else:
            b = tl.load(weight + n[None, :] * inner + k[:, None], mask=held, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if squares:
        total = tl.maximum(total, 0.0)
        total = total * total
    to = out + (part * rows + m).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=real[:, None] & shown[None, :])


@cache
def shared_memory(place: torch.device) -> int:
    """Bytes of shared memory that a program may have. On a CPU, whose tensors have no number: the interpreter."""
    if place.index is None:
        return 1 << 30
    known: int = triton.runtime.driver.active.utils.get_device_properties(place.index)["max_shared_mem"]
    return known


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    blocks: Blocks,
    *,
    totals: Tensor | None = None,
    turned: bool = False,
    squares: bool = False,
    pdl: bool = False,
) -> None:
    """x (B, K) times `weight`, (N or more, K) or `turned` (K, N), into `out` (parts, B, N), to be added up. With
    `totals` (B, H, cuts), x is (B, H, cuts, D): sums over parts of the keys. D is then a multiple of blocks.deep."""
    rows, inner, outputs = x.size(0), weight.size(0 if turned else 1), out.size(-1)
    tall, wide, deep = blocks.tall, blocks.wide, blocks.deep
    if totals is not None:  # joining is not the matrix units' work: no more rows than there are
        tall = min(tall, max(16, triton.next_power_of_2(rows)))
    stage = (tall + wide) * deep * weight.element_size()
    if totals is not None:  # the parts wait there too, before they are joined
        stage += tall * deep * totals.size(-1) * x.element_size()
    stages = max(1, min(blocks.stages, shared_memory(x.device) // stage))
    each = triton.cdiv(inner, blocks.parts * deep) * deep
    options: dict[str, Any] = {"num_warps": blocks.warps, **({"launch_pdl": True} if pdl else {})}
    _product[triton.cdiv(rows, tall), triton.cdiv(outputs, wide), blocks.parts](
        *(x, x if totals is None else totals, weight, out, rows, outputs),
        inner=inner,
        cuts=0 if totals is None else totals.size(-1),
        head_dim=x.size(-1),
        turned=turned,
        squares=squares,
        tall=tall,
        wide=wide,
        deep=deep,
        parts=blocks.parts,
        each=each,
        room=triton.next_power_of_2(each),
        stages=stages,
        pdl=pdl,
        **options,
    )


# Triton kernels of a decoding step, and parts of such: engine/gpt_step.py puts them together, and says what each is
# for. CUDA only; triton_decoding.py has the matrix products of few rows.
#
# Shapes: B rows, C width, H query heads, K key-value heads, D channels per head. Sums and the residual stream are
# float32, weights and cache have the model's dtype. `pdl`: the kernel may be started while the one before it still
# runs; it reads its weights first, and waits before it reads anything that a kernel has written.


@triton.jit  # type: ignore[untyped-decorator]
def wait(pdl: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next kernel may start; this one goes on when the one before is over."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def rounded(pointer, like):  # type: ignore[no-untyped-def]
    """A float32 number as the model's dtype has it."""
    return tl.load(pointer).to(like.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def vector(pointer, c, inside):  # type: ignore[no-untyped-def]
    """Channels c in float32, zeros outside."""
    return tl.load(pointer + c, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def unit_of(x, dim: tl.constexpr, eps: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMS norm of a vector that is padded with zeros."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)


@triton.jit  # type: ignore[untyped-decorator]
def gates_of(gates, r, gate, unit, c, kv_heads: tl.constexpr, gated: tl.constexpr, gate_range: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gate of the value embedding for each key-value head of row r."""
    for h in tl.static_range(kv_heads):
        weight = vector(gate + h * gated, c, c < gated)
        tl.store(gates + r * kv_heads + h, gate_range * tl.sigmoid(tl.sum(weight * unit, axis=0)))


@triton.jit  # type: ignore[untyped-decorator]
def embed(  # type: ignore[no-untyped-def]
    token,
    override,
    previous,
    length,
    table,
    smear,
    gate,
    tokens,
    positions,
    first,
    last,
    dim: tl.constexpr,
    width: tl.constexpr,
    gated: tl.constexpr,
    eps: tl.constexpr,
    pdl: tl.constexpr,
):
    """The first embedding (B, C) of a row, the token that it reads and its position."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
    r, c = tl.program_id(0), tl.arange(0, width)
    inside = c < dim
    forced = tl.load(override + r)
    chosen = tl.where(forced >= 0, forced, tl.load(token + r))
    tl.store(tokens + r, chosen)
    tl.store(positions + r, tl.minimum(tl.load(length + r), last))
    own = unit_of(vector(table + chosen * dim, c, inside), dim, eps)
    before = unit_of(vector(table + tl.load(previous + r) * dim, c, inside), dim, eps)
    share = rounded(smear, table) * tl.sigmoid(tl.sum(own * vector(gate, c, c < gated), axis=0))
    tl.store(first + r * dim + c, own + share * before, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def summed(x, parts, r, c, inside, rows, dim: tl.constexpr, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """Channels c of the stream of row r: what was there, and `count` parts (rows, C) that were added."""
    total = vector(x + r * dim, c, inside)
    for part in tl.static_range(count):
        total += vector(parts + (part * rows + r) * dim, c, inside)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def norm(  # type: ignore[no-untyped-def]
    x,
    added,
    first,
    residual,
    scale,
    backout,
    middle,
    gate,
    gates,
    stream,
    out,
    layer,
    rows,
    dim: tl.constexpr,
    width: tl.constexpr,
    kind: tl.constexpr,  # "mixed": the weighted stream that enters a layer; "plain"; "last": behind all layers
    count: tl.constexpr,
    keeps: tl.constexpr,  # this is the middle of the network
    kv_heads: tl.constexpr,  # of the gates, 0: none
    gated: tl.constexpr,
    gate_range: tl.constexpr,
    eps: tl.constexpr,
    pdl: tl.constexpr,
):
    """The stream of a row and its norm."""
    r, c = tl.program_id(0), tl.arange(0, width)
    inside, at = c < dim, r * dim
    wait(pdl)
    s = summed(x, added, r, c, inside, rows, dim, count)
    if keeps:
        tl.store(middle + at + c, s, mask=inside)
    if kind == "mixed":
        s = s * rounded(residual + layer, out) + vector(first + at, c, inside) * rounded(scale + layer, out)
    elif kind == "last":
        half = s if keeps else vector(middle + at, c, inside)
        s -= rounded(backout, out) * half
    unit = unit_of(s, dim, eps)
    tl.store(stream + at + c, s, mask=inside)
    tl.store(out + at + c, unit.to(out.dtype.element_ty), mask=inside)
    if kv_heads:
        gates_of(gates, r, gate, unit, c, kv_heads, gated, gate_range)


@triton.jit  # type: ignore[untyped-decorator]
def square(x, count, block: tl.constexpr, pdl: tl.constexpr):  # type: ignore[no-untyped-def]
    """ReLU² in place."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    wait(pdl)
    value = tl.maximum(tl.load(x + i, mask=i < count, other=0.0).to(tl.float32), 0.0)
    tl.store(x + i, (value * value).to(x.dtype.element_ty), mask=i < count)


@triton.jit  # type: ignore[untyped-decorator]
def fetch_ahead(pointers, size):  # type: ignore[no-untyped-def]
    """Bring so many bytes at each of these pointers into the second-level cache, without waiting for them. Multiples of
    16; 0: none. Needs compute capability 9.0, as `pdl` does."""
    tl.inline_asm_elementwise(
        "{.reg .pred some; setp.ne.u32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
        "=r,l,r",
        [pointers, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _before(old, share, like, at, inside):  # type: ignore[no-untyped-def]
    """Token shift: the share that channels `at` take of the previous token."""
    return vector(old, at, inside) * vector(share, at, inside).to(like.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(x, swapped, cos, sin, dim: tl.constexpr, eps: tl.constexpr):  # type: ignore[no-untyped-def]
    """A query or key head, and the same with its halves swapped: normalised, rotated."""
    return (x * cos + swapped * sin) * tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    qkv,
    raw,
    share,
    cos,
    sin,
    gates,
    table,
    token,
    override,
    slots,
    lengths,
    keys,
    values,
    out,  # (B, H, parts, D): weighted sums of values; with one part the attention itself, (B, H, D)
    totals,  # (B, H, parts): of the weights
    places,
    marks,
    last,
    scale: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    embeds: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    ahead: tl.constexpr,  # keys to fetch before the wait, besides the first block
    eps: tl.constexpr,
    pdl: tl.constexpr,
):
    """One head of one row over a part of the keys. The first part also has the new key, and writes into the cache.

    Queries and keys are normalised, so no score is above `scale * dim`: that is the zero of all exponents, and neither
    parts nor keys need to know of each other's largest score. All but the new token's projection was there before this
    step began, and is read before the wait: so the state of the rows is read from where the last step left it.
    """
    r, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, width)
    inside, turn = c < dim, (c + dim // 2) % dim
    slot, position = tl.load(slots + r), tl.minimum(tl.load(lengths + r), last)
    kv_heads: tl.constexpr = heads // group
    kv, every, step = h // group, (heads + 2 * kv_heads) * dim, kv_heads * dim
    place = (position % places).to(tl.int32)
    seen = tl.minimum(position, places).to(tl.int32)  # all keys before this one, or a whole ring
    row = (r.to(tl.int64) * places * kv_heads + kv) * dim
    row_keys, row_values = keys + row, values + row
    part_keys = tl.cdiv(tl.cdiv(seen, parts), block) * block
    begin, end = part * part_keys, tl.minimum((part + 1) * part_keys, seen)
    i = begin + tl.arange(0, block)
    there = (i < end) & (i != place)  # the oldest of a full ring lies where the new one goes
    at, shown = i[:, None] * step + c[None, :], there[:, None] & inside[None, :]
    cached, content = tl.load(row_keys + at, mask=shown, other=0.0), tl.load(row_values + at, mask=shown, other=0.0)
    if pdl and ahead > 0:
        more = begin + block + tl.arange(0, ahead)
        size = tl.where(more < end, dim * (keys.dtype.element_ty.primitive_bitwidth // 8), 0)
        fetch_ahead(row_keys + more * step, size)
        fetch_ahead(row_values + more * step, size)
    cosine, sine = vector(cos + position * dim, c, inside), vector(sin + position * dim, c, inside)
    old = raw + (slot * marks + (position + 1) % 2) * every
    q, k, v = h * dim, (heads + kv) * dim, (heads + kv_heads + kv) * dim
    writes = inside & (part == 0)
    q_before, q_turn = _before(old, share, qkv, q + c, inside), _before(old, share, qkv, q + turn, inside)
    k_before, k_turn = _before(old, share, qkv, k + c, writes), _before(old, share, qkv, k + turn, writes)
    v_before = _before(old, share, qkv, v + c, writes)
    embedded = tl.zeros((width,), tl.float32)
    if embeds:
        forced = tl.load(override + r)
        chosen = tl.where(forced >= 0, forced, tl.load(token + r))
        embedded = vector(table + (chosen * kv_heads + kv) * dim, c, writes)
    wait(pdl)
    new, bound = qkv + r * every, scale * dim
    own, swapped = vector(new + q, c, inside), vector(new + q, turn, inside)
    query = _turned(own + q_before, swapped + q_turn, cosine, sine, dim, eps) * scale
    weights = tl.where(there, tl.exp(tl.sum(cached.to(tl.float32) * query[None, :], axis=1) - bound), 0.0)
    sums = content.to(tl.float32) * weights[:, None]
    for first in tl.range(begin + block, end, block, num_stages=stages):
        j = first + tl.arange(0, block)
        valid, from_j = (j < end) & (j != place), j[:, None] * step + c[None, :]
        next_keys = tl.load(row_keys + from_j, mask=valid[:, None] & inside[None, :], other=0.0)
        next_values = tl.load(row_values + from_j, mask=valid[:, None] & inside[None, :], other=0.0)
        scores = tl.sum(next_keys.to(tl.float32) * query[None, :], axis=1)
        weight = tl.where(valid, tl.exp(scores - bound), 0.0)
        weights += weight
        sums += next_values.to(tl.float32) * weight[:, None]
    total, found = tl.sum(weights, axis=0), tl.sum(sums, axis=0)
    if part == 0:
        kept, goes = raw + (slot * marks + position % 2) * every, ((slot * places + place) * kv_heads + kv) * dim
        new_k, new_v = vector(new + k, c, inside), vector(new + v, c, inside)
        key = _turned(new_k + k_before, vector(new + k, turn, inside) + k_turn, cosine, sine, dim, eps)
        plain = new_v + v_before
        if embeds:
            plain += tl.load(gates + r * kv_heads + kv) * embedded
        key_kept, value_kept = key.to(keys.dtype.element_ty), plain.to(values.dtype.element_ty)
        tl.store(kept + q + c, own.to(raw.dtype.element_ty), mask=inside)
        if h % group == 0:
            tl.store(kept + k + c, new_k.to(raw.dtype.element_ty), mask=inside)
            tl.store(kept + v + c, new_v.to(raw.dtype.element_ty), mask=inside)
            tl.store(keys + goes + c, key_kept, mask=inside)
            tl.store(values + goes + c, value_kept, mask=inside)
        mass = tl.exp(tl.sum(query * key_kept.to(tl.float32), axis=0) - bound)
        total += mass
        found += mass * value_kept.to(tl.float32)
    mine = (r * heads + h) * parts + part
    if parts == 1:
        tl.store(out + mine * dim + c, (found / total).to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + mine * dim + c, found, mask=inside)
        tl.store(totals + mine, total)


@triton.jit  # type: ignore[untyped-decorator]
def capped(x, softcap: tl.constexpr):  # type: ignore[no-untyped-def]
    """softcap * tanh(x / softcap)."""
    return softcap * (2.0 * tl.sigmoid(x * (2.0 / softcap)) - 1.0)
