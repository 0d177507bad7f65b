"""The choice of the next token as two Triton kernels: greedy, or at a temperature without filters. CUDA only.

    report = choose(logits, read, settings, blocks, state, softcap=15.0, random=True)  # (2, B)

The first kernel looks at a block of the vocabulary of a row: its likeliest token, with the noise of sampling.py, and
its part of the normaliser; the second joins the blocks and notes the new token. sampling.sample computes the same, in
twenty passes over the logits where nothing is compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascendchat.engine import sampling
from ascendchat.engine.sampling import MIN_TEMPERATURE, SamplingSettings
from ascendchat.nn.triton_decoding import capped, wait

FEW = 16  # rows
BLOCK, WARPS, MANY_BLOCK, MANY_WARPS = 256, 2, 2048, 4  # tokens of a program, with few rows and many

LEFT, RIGHT, WIDE, NARROW = (tl.constexpr(x) for x in (sampling.LEFT, sampling.RIGHT, sampling.WIDE, sampling.NARROW))
ROUNDS, LANES, KEYS = (tl.constexpr(x) for x in (sampling.ROUNDS, sampling.LANES, sampling.KEYS))
COLDEST = tl.constexpr(MIN_TEMPERATURE)


class State(NamedTuple):
    """Tensors of engine/decode.py that a step changes, (slots,) int64."""

    token: Tensor
    previous: Tensor
    override: Tensor
    length: Tensor
    advance: Tensor  # (): 0 while a graph is recorded, and nothing changes


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(changed, other, key, step: tl.constexpr):  # type: ignore[no-untyped-def]
    total = changed + tl.floor(other * key) * step
    return total - tl.floor(total)


@triton.jit  # type: ignore[untyped-decorator]
def _lane(keys, position, lane: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of the position under the keys of the seed: two keys for the vocabulary's blocks."""
    place = position.to(tl.float32)
    high = tl.floor(place * RIGHT)
    left, right = high * LEFT + LEFT / 2, (place - high * 2048.0) * RIGHT + RIGHT / 2
    for number in tl.static_range(ROUNDS):
        key = tl.load(keys + number * LANES + lane)
        if number % 2 == 0:
            left = _mixed(left, right, key, LEFT)
        else:
            right = _mixed(right, left, key, RIGHT)
    return right * (WIDE * 4096.0), (tl.floor(left * 1024.0) * 2.0 + 1.0) * NARROW


@triton.jit  # type: ignore[untyped-decorator]
def _uniform(keys, position, left, right):  # type: ignore[no-untyped-def]
    """sampling.uniform of some tokens of a row."""
    wide0, narrow0 = _lane(keys, position, 0)
    wide1, narrow1 = _lane(keys, position, 1)
    wide2, _ = _lane(keys, position, 2)
    left = _mixed(left, right, wide0, LEFT)
    right = _mixed(right, left, narrow0, RIGHT)
    left = _mixed(left, right, wide1, LEFT)
    right = _mixed(right, left, narrow1, RIGHT)
    left = _mixed(left, right, wide2, LEFT)
    return (left - LEFT / 2) + right * LEFT


@triton.jit  # type: ignore[untyped-decorator]
def _look(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    seed,
    length,
    blocks,
    best,
    column,
    most,
    total,
    vocab,
    softcap: tl.constexpr,
    random: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """The likeliest token of a block of the vocabulary, and the block's part of the normaliser.

    The noise depends on nothing that this step has computed: it is drawn while the kernel before still runs.
    """
    r, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i = part * block + tl.arange(0, block)
    inside = i < vocab
    divisor, noisy = tl.full((), 1.0, tl.float32), tl.zeros((block,), tl.float32)
    if random:
        heat = tl.load(temperature + r)
        if heat >= COLDEST:
            divisor = heat
            left = tl.load(blocks + i, mask=inside, other=0.5)
            right = tl.load(blocks + vocab + i, mask=inside, other=0.5)
            noisy = -tl.log(-tl.log(_uniform(seed + r * KEYS, tl.load(length + r), left, right)))
    wait(pdl)
    raw = capped(tl.load(logits + r.to(tl.int64) * vocab + i, mask=inside, other=0.0), softcap)
    raw = tl.where(inside, raw, -float("inf"))
    scores = tl.where(inside, raw / divisor + noisy, -float("inf"))  # noise behind the last token may be a NaN
    largest, at = tl.max(scores, axis=0, return_indices=True)
    peak = tl.max(raw, axis=0)
    mine = r * parts + part
    tl.store(best + mine, largest)
    tl.store(column + mine, tl.minimum(part * block + at, vocab - 1))  # a place without a token may beat a NaN
    tl.store(most + mine, peak)
    tl.store(total + mine, tl.sum(tl.exp(raw - peak), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _note(  # type: ignore[no-untyped-def]
    logits,
    best,
    column,
    most,
    total,
    read,
    token,
    previous,
    override,
    length,
    advance,
    report,
    rows,
    vocab,
    softcap: tl.constexpr,
    parts: tl.constexpr,
    width: tl.constexpr,
    pdl: tl.constexpr,
):
    """The likeliest of all blocks, with its log probability; the row goes on with it."""
    r, i = tl.program_id(0), tl.arange(0, width)
    inside, mine = i < parts, r * parts + i
    wait(pdl)
    _, at = tl.max(tl.load(best + mine, mask=inside, other=-float("inf")), axis=0, return_indices=True)
    chosen = tl.load(column + r * parts + tl.minimum(at, parts - 1)).to(tl.int64)
    peaks = tl.load(most + mine, mask=inside, other=-float("inf"))
    peak = tl.max(peaks, axis=0)
    every = tl.sum(tl.load(total + mine, mask=inside, other=0.0) * tl.exp(peaks - peak), axis=0)
    logprob = capped(tl.load(logits + r.to(tl.int64) * vocab + chosen), softcap) - peak - tl.log(every)
    tl.store(report + r, chosen.to(tl.float32))
    tl.store(report + rows + r, logprob)
    if tl.load(advance) > 0:
        tl.store(previous + r, tl.load(read + r))
        tl.store(token + r, chosen)
        tl.store(override + r, tl.full((), -1, tl.int64))
        tl.store(length + r, tl.load(length + r) + 1)


def choose(
    logits: Tensor,
    read: Tensor,
    settings: SamplingSettings,
    blocks: Tensor,
    state: State,
    *,
    softcap: float,
    random: bool,
    overlaps: bool = False,
) -> Tensor:
    """logits (B, V) float32, before their bound `softcap`; `read` (B,): the tokens of this step, whose places are
    `state.length`; `blocks`: sampling.columns; `overlaps`: see TokenStep. (2, B) float32."""
    rows, vocab = logits.shape
    block, warps = (BLOCK, WARPS) if rows <= FEW else (MANY_BLOCK, MANY_WARPS)
    parts = triton.cdiv(vocab, block)
    best, most, total = (torch.empty(rows, parts, device=logits.device) for _ in range(3))
    column = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    partial: tuple[Any, ...] = best, column, most, total
    inputs = logits, settings.temperature, settings.seed, state.length, blocks
    options: dict[str, Any] = {"softcap": softcap, "pdl": overlaps, **({"launch_pdl": True} if overlaps else {})}
    _look[rows, parts](*inputs, *partial, vocab, random=random, block=block, num_warps=warps, **options)
    report = torch.empty(2, rows, device=logits.device)
    width = triton.next_power_of_2(parts)
    _note[(rows,)](logits, *partial, read, *state, report, rows, vocab, parts=parts, width=width, **options)
    return report
