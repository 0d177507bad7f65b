"""Bits per byte of a text: validation of `ascendchat base`, `mid` and `sft`, and `ascendchat eval base`.

They do not depend on the tokenizer: the nats of all text tokens, in bits, over the bytes they stand for. Special tokens
count in neither sum.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ascendchat.data.corpus import Corpus, evaluation_rows
from ascendchat.eval.scorer import Example, Pending, Scorer
from ascendchat.nn import IGNORE
from ascendchat.parallel import collectives

ROWS_AT_ONCE = 128  # rows handed to the scorer together

Pair = tuple[np.ndarray, np.ndarray]  # inputs (T,), targets (T,), IGNORE where nothing is scored


@dataclass(frozen=True)
class Bits:
    """Bits per byte, and the sums behind it."""

    bits_per_byte: float
    nats: float
    bytes: int
    tokens: int
    seconds: float


def bits_per_byte(scorer: Scorer, rows: Iterable[Pair], token_bytes: np.ndarray) -> Bits:
    """`token_bytes[id]` is the length of a token, 0 for specials. With several ranks each scores its share."""
    began, world = time.perf_counter(), collectives.world()
    nats, size, tokens = 0.0, 0, 0

    def add(batch: Sequence[Pair], pending: Pending) -> None:
        nonlocal nats, size, tokens
        for (_, targets), result in zip(batch, pending()):
            scored = result[0].nats.astype(np.float64)
            wanted = targets[: len(scored)]
            lengths = np.where(wanted == IGNORE, 0, token_bytes[np.maximum(wanted, 0)])
            nats += float(scored[lengths > 0].sum())
            size += int(lengths.sum())
            tokens += int((lengths > 0).sum())

    mine = itertools.islice(rows, world.rank, None, world.size)
    before: tuple[Sequence[Pair], Pending] | None = None
    while batch := list(itertools.islice(mine, ROWS_AT_ONCE)):
        current = batch, scorer.submit([_example(*pair) for pair in batch])
        if before:
            add(*before)  # while the device works on the current one
        before = current
    if before:
        add(*before)
    sums = collectives.gather_objects((nats, size, tokens))
    nats, size, tokens = (sum(part[i] for part in sums) for i in range(3))
    bits = nats / (math.log(2) * size) if size else math.nan
    return Bits(bits, nats, size, tokens, time.perf_counter() - began)


def _example(inputs: np.ndarray, targets: np.ndarray) -> Example:
    """The row as far as something is scored. A target in the middle is the next input, scored or not."""
    scored = np.flatnonzero(targets != IGNORE)
    end = int(scored[-1]) + 1 if len(scored) else 0
    return Example([np.append(inputs[:end], targets[end - 1 : end])], [1])


def corpus_bits(scorer: Scorer, corpus: Corpus, seq_len: int, most: int, token_bytes: np.ndarray) -> Bits:
    """Over a split, or over whole rows of its first `most` tokens (0: all)."""
    rows = evaluation_rows(corpus, seq_len)
    cut = 0 < most < corpus.tokens
    return bits_per_byte(scorer, itertools.islice(rows, max(1, most // seq_len)) if cut else rows, token_bytes)
