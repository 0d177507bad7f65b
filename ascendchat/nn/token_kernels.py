"""Triton kernels of a decoding step, and parts of such: token_step.py puts them together, and says what each is for.
CUDA only; row_kernels.py has the matrix products of few rows.

Shapes: B rows, C width, H query heads, K key-value heads, D channels per head. Sums and the residual stream are
float32, weights and cache have the model's dtype. `pdl`: the kernel may be started while the one before it still runs;
it reads its weights first, and waits before it reads anything that a kernel has written.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """How much of the value embedding each key-value head of row r takes."""
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
):
    """The first embedding (B, C) of a row, the token that it reads and its position."""
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
def _shifted(new, old, share, at, inside):  # type: ignore[no-untyped-def]
    """Channels of the new token's projection with its share of the token before."""
    own, before = vector(new, at, inside), vector(old, at, inside)
    return own + before * tl.load(share + at, mask=inside, other=0.0).to(new.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(new, old, share, cos, sin, at, c, inside, dim: tl.constexpr, eps: tl.constexpr):  # type: ignore[no-untyped-def]
    """A query or key head that begins at channel `at`: shifted, normalised, rotated."""
    x = _shifted(new, old, share, at + c, inside)
    swapped = _shifted(new, old, share, at + (c + dim // 2) % dim, inside)
    return (x * cos + swapped * sin) * tl.rsqrt(tl.sum(x * x, axis=0) / dim + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    new,
    old,
    kept,
    share,
    cos,
    sin,
    at,
    keys,
    values,
    added,
    h,
    c,
    inside,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    eps: tl.constexpr,
):
    """The new key and value of a head, into the cache (at `at`); their projections into `kept`, for the next token."""
    k, v = (heads + h // group) * dim, (heads + heads // group + h // group) * dim
    tl.store(kept + h * dim + c, tl.load(new + h * dim + c, mask=inside), mask=inside)
    key = _turned(new, old, share, cos, sin, k, c, inside, dim, eps).to(keys.dtype.element_ty)
    value = (_shifted(new, old, share, v + c, inside) + added).to(values.dtype.element_ty)
    if h % group == 0:
        tl.store(kept + k + c, tl.load(new + k + c, mask=inside), mask=inside)
        tl.store(kept + v + c, tl.load(new + v + c, mask=inside), mask=inside)
        tl.store(keys + at + c, key, mask=inside)
        tl.store(values + at + c, value, mask=inside)
    return key.to(tl.float32), value.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    qkv,
    raw,
    share,
    cos,
    sin,
    gates,
    table,
    tokens,
    slots,
    positions,
    keys,
    values,
    out,  # (B, H, parts, D): weighted sums of values; with one part the attention itself, (B, H, D)
    totals,  # (B, H, parts): of the weights
    places,
    marks,
    part_keys,
    scale: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    embeds: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    eps: tl.constexpr,
    pdl: tl.constexpr,
):
    """One head of one row over a part of the keys. The first part also has the new key, and writes into the cache.

    Queries and keys are normalised, so no score is above `scale * dim`: that is the zero of all exponents, and neither
    parts nor keys need to know of each other's largest score.
    """
    r, h, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, width)
    inside = c < dim
    wait(pdl)
    slot, position = tl.load(slots + r), tl.load(positions + r)
    kv_heads: tl.constexpr = heads // group
    kv, every = h // group, (heads + 2 * kv_heads) * dim
    new, old = qkv + r * every, raw + (slot * marks + (position + 1) % 2) * every
    cosine, sine = vector(cos + position * dim, c, inside), vector(sin + position * dim, c, inside)
    query = _turned(new, old, share, cosine, sine, h * dim, c, inside, dim, eps) * scale
    bound: tl.constexpr = scale * dim
    place = (position % places).to(tl.int32)
    seen = tl.minimum(position, places).to(tl.int32)  # all keys before this one, or a whole ring
    row = (r.to(tl.int64) * places * kv_heads + kv) * dim
    row_keys, row_values = keys + row, values + row
    weights, sums = tl.zeros((block,), tl.float32), tl.zeros((block, width), tl.float32)
    for begin in tl.range(part * part_keys, tl.minimum((part + 1) * part_keys, seen), block, num_stages=stages):
        i = begin + tl.arange(0, block)
        there = (i < seen) & (i != place)  # the oldest of a full ring lies where the new one goes
        at, shown = i[:, None] * (kv_heads * dim) + c[None, :], there[:, None] & inside[None, :]
        cached = tl.load(row_keys + at, mask=shown, other=0.0).to(tl.float32)
        content = tl.load(row_values + at, mask=shown, other=0.0).to(tl.float32)
        scores = tl.sum(cached * query[None, :], axis=1)
        weight = tl.where(there, tl.exp(scores - bound), 0.0)
        weights += weight
        sums += content * weight[:, None]
    total, found = tl.sum(weights, axis=0), tl.sum(sums, axis=0)
    if part == 0:
        kept, added = raw + (slot * marks + position % 2) * every, tl.zeros((width,), tl.float32)
        if embeds:
            embedded = vector(table + (tl.load(tokens + r) * kv_heads + kv) * dim, c, inside)
            added += tl.load(gates + r * kv_heads + kv) * embedded
        at = ((slot * places + place) * kv_heads + kv) * dim
        key, value = _keep(
            new, old, kept, share, cosine, sine, at, keys, values, added, h, c, inside, heads, group, dim, eps
        )
        own = tl.exp(tl.sum(query * key, axis=0) - bound)
        total += own
        found += own * value
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


@triton.jit  # type: ignore[untyped-decorator]
def cap(x, count, softcap: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bound of the logits, in place."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + i, capped(tl.load(x + i, mask=i < count, other=0.0), softcap), mask=i < count)
