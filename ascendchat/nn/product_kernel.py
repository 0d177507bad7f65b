"""A matrix product of a decoding step with more than a few rows, as a Triton kernel: what stands behind it fuses, and
it fetches its weights while the kernel before it still runs. CUDA only; engine/gpt_step.py says where it stands.

    product(x, weight, out, blocks)              # (B, K) times weight (N, K), or (K, N)
    product(sums, weight, out, blocks, totals=t) # attention from its parts, as token_kernels.attend leaves them
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascendchat.nn.token_kernels import fetch_ahead, wait


class Blocks(NamedTuple):
    """How the product is cut."""

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
