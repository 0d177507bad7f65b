"""Bits per byte of a text: validation of `ascendchat base`, `mid` and `sft`, and `ascendchat eval base`.

The nats of all text tokens, in bits, over the bytes of their text: comparable between tokenizers. Special tokens count
in neither sum.
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

ROWS_AT_ONCE = 128  # rows submitted to the scorer at a time

Pair = tuple[np.ndarray, np.ndarray]  # inputs (T,), targets (T,), IGNORE where nothing is scored


@dataclass(frozen=True)
class Bits:
    """Bits per byte, and the sums that it is made of."""

    bits_per_byte: float
    nats: float
    bytes: int
    tokens: int
    seconds: float


def bits_per_byte(scorer: Scorer, rows: Iterable[Pair], token_bytes: np.ndarray) -> Bits:
    """Score rows; with several ranks each scores its share. `token_bytes[id]`: length of a token, 0 for specials."""
    began, world = time.perf_counter(), collectives.world()
    nats, size, tokens = 0.0, 0, 0

    def add(batch: Sequence[Pair], pending: Pending) -> None:
        nonlocal nats, size, tokens
        for (_, targets), result in zip(batch, pending()):
            scores = result[0].nats.astype(np.float64)
            ids = targets[: len(scores)]
            lengths = np.where(ids == IGNORE, 0, token_bytes[np.maximum(ids, 0)])
            nats += float(scores[lengths > 0].sum())
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
    """The row up to its last scored target. A target before it is the next input, scored or not."""
    scored = np.flatnonzero(targets != IGNORE)
    end = int(scored[-1]) + 1 if len(scored) else 0
    return Example([np.append(inputs[:end], targets[end - 1 : end])], [1])


def corpus_bits(scorer: Scorer, corpus: Corpus, seq_len: int, max_tokens: int, token_bytes: np.ndarray) -> Bits:
    """Bits per byte of a split, or of whole rows of its first `max_tokens` tokens (0: all)."""
    rows = evaluation_rows(corpus, seq_len)
    cut = 0 < max_tokens < corpus.tokens
    return bits_per_byte(scorer, itertools.islice(rows, max(1, max_tokens // seq_len)) if cut else rows, token_bytes)
