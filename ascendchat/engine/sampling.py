"""Sampling maths as pure functions over a batch in which every row has its own settings.

    chosen, logprob = sample(logits, settings, position, Mode(Draw.FILTERED))

No generator is kept: the noise of a row is a hash of (its seed, the position, the token; `uniform`), so a row draws
the same noise whatever stands beside it in the batch, on every device, and inside a captured graph. Choosing is an
argmax of logit / temperature + Gumbel noise, which is exactly a draw from the softmax. No torch.where with a number in
it: that copies the number to the device, which a graph under recording does not allow. No masked_fill of 64-bit
integers: the AICPU computes it on Ascend A2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ascendchat.engine.request import MAX_TOPS, Sampling

MIN_TEMPERATURE = 1e-6  # below it is greedy: a logit divided by less may be infinite, and then all are alike
MASK = 0xFFFFFFFF  # 32 bits
MAX_EXACT = 2**24  # whole numbers up to here are exact in float32; no vocabulary is larger


class Draw(IntEnum):
    """The ways to draw a token, each with what the ones before it do."""

    GREEDY = 0
    RANDOM = 1  # at a temperature
    PROCESSED = 2  # and reports the log-probability of the draw, as RL at another temperature than 1 wants it
    FILTERED = 3  # by top-k, top-p, min-p, for which logits are sorted: what `serve` does by default


class Mode(NamedTuple):
    """The work of a decoding step: the most that one of its rows needs. Each is a captured graph of its own, and a row
    gets the same token and log-probability in every mode that does what it needs."""

    draw: Draw = Draw.GREEDY
    tables: bool = False  # penalties, biases, token masks and likeliest tokens, which are all rare, come together

    @classmethod
    def union(cls, modes: Iterable[Mode]) -> Mode:
        """The mode that does what all of these do."""
        draws, tables = zip(*modes)
        return cls(max(draws), any(tables))


class SamplingSettings(NamedTuple):
    """Per row (B,): what request.Sampling says, on the device."""

    temperature: Tensor  # float32; 0 is greedy
    top_k: Tensor  # int64; 0 keeps all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    penalty: Tensor  # float32
    seed: Tensor  # (B, KEYS) float32: seed_keys
    presence: Tensor  # float32
    frequency: Tensor  # float32
    processed: Tensor  # bool

    def rows(self, which: Tensor | slice) -> SamplingSettings:
        """Some of the rows."""
        return SamplingSettings(*[tensor[which] for tensor in self])


class Tables(NamedTuple):
    """Per row and token (B, V), where Mode.tables. Rows without a penalty, bias or mask are changed by none of them."""

    seen: Tensor  # bool: tokens of prompt and answer, for the repetition penalty
    barred: Tensor  # bool: the token mask; what must not be chosen
    bias: Tensor  # float32: what is added to each logit
    counts: Tensor  # float32: how often the model has chosen each token, for presence and frequency penalties

    @classmethod
    def zeros(cls, rows: int, vocab: int, device: torch.device) -> Tables:
        """Tables of rows that have no history."""
        dtypes = torch.bool, torch.bool, torch.float32, torch.float32
        return cls(*(torch.zeros(rows, vocab, dtype=dtype, device=device) for dtype in dtypes))

    def rows(self, which: Tensor | slice) -> Tables:
        """Some of the rows."""
        return Tables(*[tensor[which] for tensor in self])


SettingsRow = tuple[float, int, float, float, float, tuple[float, ...], float, float, bool]


def settings_row(sampling: Sampling) -> SettingsRow:
    """The SamplingSettings of one request."""
    s = sampling
    filters = s.temperature, s.top_k, s.top_p, s.min_p
    penalties = s.presence_penalty, s.frequency_penalty
    return *filters, s.repetition_penalty, seed_keys(s.seed), *penalties, s.processed_logprobs


def settings_columns(samplings: Sequence[Sampling]) -> list[list[float]]:
    """The settings rows of some requests as plain numbers, (R, 8 + KEYS), exact in float32."""
    rows = []
    for sampling in samplings:
        temperature, top_k, top_p, min_p, penalty, seed, *rest = settings_row(sampling)
        rows.append([temperature, min(top_k, MAX_EXACT), top_p, min_p, penalty, *seed, *rest])
    return rows


def mode_of(sampling: Sampling) -> Mode:
    """The smallest mode that does what one request asks for."""
    s = sampling
    penalties = s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty
    tables = penalties or s.allowed_tokens or s.grammar is not None or s.logit_bias or s.top_logprobs
    draw = Draw.GREEDY
    if s.temperature > 0:
        filtered = s.top_k > 0 or s.top_p < 1 or s.min_p > 0
        draw = Draw.FILTERED if filtered else Draw.PROCESSED if s.processed_logprobs else Draw.RANDOM
    elif s.processed_logprobs and tables:
        draw = Draw.PROCESSED  # else the model's own distribution is that of the draw
    return Mode(draw, bool(tables))


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens of `seen` (B, V) less likely: logits shrink by the factor, or grow more negative."""
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def adjust(logits: Tensor, bias: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Add `bias` (B, V), and take off penalties for tokens that were chosen `counts` (B, V) times, as OpenAI's API."""
    chosen = (counts > 0).to(logits.dtype)
    return logits + bias - counts * frequency[:, None] - chosen * presence[:, None]


def keep(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """(B, V) bool: tokens that top-k, then top-p among those, then min-p leave. Never none; ties at the border stay.

    All three keep a beginning of the tokens in order of likelihood, so a row is described by how many that are.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    rank = torch.arange(logits.size(-1), device=logits.device)
    inside = (rank < top_k[:, None]) | (top_k <= 0)[:, None] | (rank == 0)
    share = torch.softmax(ordered.masked_fill(~inside, float("-inf")), dim=-1)
    before = share.cumsum(dim=-1) - share  # share of the tokens in front of this one
    inside &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    inside &= share >= min_p[:, None] * share[:, :1]
    last = inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return logits >= ordered.gather(-1, last)


def likeliest(scores: Tensor) -> Tensor:
    """argmax of every row (B, V) float32, the first of equals, as a maximum of integers made of score and column.

    A compiler cuts a maximum into parts and spreads them over the device; an argmax it leaves to one block per row,
    which for a single row took 24 of 500 µs on an H200.
    """
    bits = scores.view(torch.int32)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
    last = scores.size(-1) - 1
    column = torch.arange(last + 1, device=scores.device)
    return last - (((rising << 32) | (last - column)).amax(dim=-1) & MASK)


def likeliest_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log probabilities (B, MAX_TOPS) of the likeliest tokens, or of all where the vocabulary is smaller."""
    values, ids = logits.topk(min(MAX_TOPS, logits.size(-1)), dim=-1)
    return ids, values - torch.logsumexp(logits, dim=-1, keepdim=True)


def ranked(report: Sequence[float], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens with their log probabilities, from what the device reported of one row: ids, then
    log probabilities. Equals come in the order of their ids."""
    half = len(report) // 2
    pairs = zip(map(int, report[:half]), report[half:])
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]


def normaliser(logits: Tensor) -> Tensor:
    """(B, V) -> (B,)."""
    return torch.logsumexp(logits, dim=-1)


def sample(
    logits: Tensor,
    settings: SamplingSettings,
    position: Tensor,
    mode: Mode,
    tables: Tables | None = None,
    *,
    blocks: Tensor | None = None,
    logsumexp: Callable[[Tensor], Tensor] = normaliser,
) -> tuple[Tensor, Tensor]:
    """The chosen token of every row (B,) and its log-probability (B,) float32.

    logits (B, V) float32; `position` (B,) of the token whose successor is chosen; `tables` where the mode
    has some; `blocks`: `columns`, if they are there already. The log-probability is the model's own: before penalties,
    bias, mask, temperature and filters; or after all of these, where settings.processed.
    """
    scores, processed = logits, mode.draw >= Draw.PROCESSED
    if mode.tables:
        assert tables is not None
        scores = penalise(scores, tables.seen, settings.penalty)
        scores = adjust(scores, tables.bias, tables.counts, settings.presence, settings.frequency)
        scores = scores.masked_fill(tables.barred, float("-inf"))
    drawn = scores  # what the token is drawn from, before the noise
    if mode.draw > Draw.GREEDY:
        greedy = settings.temperature < MIN_TEMPERATURE
        scaled = scores / settings.temperature.masked_fill(greedy, 1.0)[:, None]
        blocks = columns(logits.size(-1), logits.device) if blocks is None else blocks
        noise = -torch.log(-torch.log(uniform(settings.seed, position, blocks)))
        if mode.draw == Draw.FILTERED:
            inside = keep(scaled, settings.top_k, settings.top_p, settings.min_p)
            scaled = scaled.masked_fill(~inside, float("-inf"))
        if processed:
            drawn = torch.where(greedy[:, None], scores, scaled)
        scores = torch.where(greedy[:, None], scores, scaled + noise)
    alone = scores.size(0) == 1 and torch.compiler.is_compiling()
    chosen = likeliest(scores) if alone else scores.argmax(dim=-1)
    reported = torch.where(settings.processed[:, None], drawn, logits) if processed else logits
    picked = reported.gather(-1, chosen[:, None]).squeeze(-1)
    return chosen, picked - logsumexp(reported)


# The noise of sampling: numbers in (0, 1) that are a pure function of a row's seed, the position and the token.
#
#     keys = seed_keys(seed)                                     # on the host, once per request
#     uniform(keys (B, KEYS), position (B,), columns(vocab))     # (B, vocab) float32
#
# A block cipher in float32: every product, sum and floor here is exact, so that CPU, GPU and NPU give the same bits, in
# eager, compiled and captured code. No shifts and no integers: on Ascend A2 a shift is computed by the AICPU, and in
# torch_npu up to 2.9.0 by an operator that no graph can capture; on older chips nothing on 64-bit integers is fast.
#
# A block is two numbers, `left` and `right`, odd multiples of 2^-13 and 2^-12 in (0, 1): 12 and 11 bits. Half a round
# adds to one of them the middle bits of the other's product with a key, and drops what is 1 or more (a Feistel
# network). The keys of the vocabulary's blocks are the position's block, enciphered three times under the keys of the
# seed.

LEFT, RIGHT = 2.0**-12, 2.0**-11  # the step between two neighbours
ROUNDS, LANES = 5, 3  # halves of rounds, the first of which changes `left`; blocks of a position
KEYS = ROUNDS * LANES
WIDE, NARROW = 2.0**6, 2.0**7  # of the product of two odd integers, 24 bits, the lowest 6 are dropped
NOISE_MASK = (1 << 64) - 1


def scrambled(x: int) -> int:
    """A bijection of 64-bit numbers in which every input bit moves about half of the output bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & NOISE_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & NOISE_MASK
    return x ^ (x >> 31)


def seed_keys(seed: int) -> tuple[float, ...]:
    """(KEYS,) of any integer; neighbouring seeds, and the same with another sign, have nothing in common."""
    bits, folded = seed & ((1 << 128) - 1), 0x9E3779B97F4A7C15
    for part in (bits & NOISE_MASK, bits >> 64):
        folded = scrambled(folded ^ part)
    words = [scrambled((folded + number * 0x9E3779B97F4A7C15) & NOISE_MASK) for number in range(1, KEYS + 1)]
    wide = [number // LANES % 2 == 0 for number in range(KEYS)]  # odd integers of 12 bits, or of 11
    return tuple((word >> 52 | 1) * WIDE if wide else (word >> 53 | 1) * NARROW for word, wide in zip(words, wide))


def columns(count: int, device: torch.device | str = "cpu") -> Tensor:
    """(2, count) float32: the block of every token; made once, it stays on the device."""
    number = np.arange(count, dtype=np.int64)
    for factor in (0x5BD1E5, 0x2C1B3D, 0x297A2D):  # three times: a bijection of 23 bits that leaves no pattern
        number = (number * factor + 0x1234567) & (2**23 - 1)
        number ^= number >> 11
    both = np.stack(((number >> 11) * LEFT + LEFT / 2, (number & 2047) * RIGHT + RIGHT / 2))
    return torch.from_numpy(both.astype(np.float32)).to(device)


def mixed(changed: Tensor, other: Tensor, key: Tensor, step: float) -> Tensor:
    """Half a round. Sums have at most 18 bits before the comma and behind it together, products 24."""
    total = torch.add(changed, torch.floor(other * key), alpha=step)
    return total - torch.floor(total)


def enciphered(left: Tensor, right: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A block under the keys of ROUNDS halves, which may be broadcast over it."""
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = mixed(left, right, key, LEFT)
        else:
            right = mixed(right, left, key, RIGHT)
    return left, right


def uniform(keys: Tensor, position: Tensor, blocks: Tensor) -> Tensor:
    """(B, V) float32 in (0, 1), from seed_keys (B, KEYS), position (B,) and columns(V): multiples of 2^-23 and a half,
    which are exact, and never 0 or 1."""
    place = position.int().float()[:, None]  # (B, 1); positions are far below 2^23
    high = torch.floor(place * RIGHT)
    left, right = high * LEFT + LEFT / 2, (place - high * 2048.0) * RIGHT + RIGHT / 2
    left, right = enciphered(left, right, keys.unflatten(1, (ROUNDS, LANES)).unbind(1))  # (B, LANES)
    wide = (right * (WIDE * 4096.0)).unbind(1)  # odd integers of 12 bits
    narrow = ((torch.floor(left * 1024.0) * 2.0 + 1.0) * NARROW).unbind(1)  # of 11 bits
    under = tuple(key[:, None] for key in (wide[0], narrow[0], wide[1], narrow[1], wide[2]))
    left, right = enciphered(blocks[0], blocks[1], under)  # (B, V)
    return torch.add(left - LEFT / 2, right, alpha=LEFT)
