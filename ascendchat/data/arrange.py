"""Lays the documents of one epoch out in rows: every token exactly once, rows begin with a document where that is free.

Used by the loader of every training command (`ascendchat base --data DIR`); nothing to call by hand.

A row is T input tokens, made of segments: pieces of documents, never crossing one. The layout of an epoch:
1. documents are put in random order;
2. a document of T tokens or more fills whole rows from its start; what is left over (fewer than T tokens) is filler.
   From the second epoch on it first gives up a random beginning, which is laid out like a short document: so its rows
   begin elsewhere every time, and a model that reads a text again sees it with another context;
3. shorter documents stay whole: a row takes them in order while they fit, then filler closes the gap to exactly T;
   filler is cut wherever the row ends, and goes on in the next gap. If the left-overs do not suffice, the short
   documents of the first few rows become filler too;
4. filler that is left makes rows of its own; only the last of them can lack tokens, and gets padding;
5. rows are put in random order.
A row ends inside a document at most once, exactly as when documents are simply concatenated, so no more context is lost
than by concatenation, and all rows of kinds 2 (the first of a document) and 3 begin with a document.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
PADDING = -1  # the position of a segment that is no text
CUTS = 2**192  # where the random numbers of the cuts begin, far from those of the orders


@dataclass(frozen=True)
class Layout:
    """The rows of one epoch. Row r holds the segments first[r] .. first[r + 1]."""

    first: Int64s  # (rows + 1,)
    position: Int64s  # (segments,) place of the segment's first token in the corpus, or PADDING
    length: Int64s  # (segments,) tokens; those of a row sum to T

    @functools.cached_property
    def padded_row(self) -> int:
        """The row that holds the padding; -1 without any."""
        segments = np.flatnonzero(self.position == PADDING)
        return int(np.searchsorted(self.first, segments[0], side="right")) - 1 if len(segments) else -1


def rows_of(tokens: int, seq_len: int) -> int:
    """Rows per epoch, the same for every epoch."""
    return -(-tokens // seq_len)


def shuffled(n: int, seed: int, epoch: int, salt: int) -> Int64s:
    """A random order of n things. Raw Philox output and a stable sort: the same on every version of NumPy."""
    bits = np.random.Philox(key=np.array([np.uint64(seed % 2**64), np.uint64(epoch * 2 + salt)], dtype=np.uint64))
    return np.argsort(bits.random_raw(n), kind="stable")


def cut_anew(lengths: Int64s, seq_len: int, seed: int, epoch: int) -> Int64s:
    """The pieces to lay out: from the second epoch on, long documents are cut once, at a place of this epoch."""
    if epoch == 0:
        return lengths
    bits = np.random.Philox(key=np.array([np.uint64(seed % 2**64), np.uint64(epoch)], dtype=np.uint64), counter=CUTS)
    cut = 1 + (bits.random_raw(len(lengths)) % np.uint64(max(1, seq_len - 1))).astype(np.int64)
    cut = np.where(lengths > seq_len, cut, 0)
    pieces = np.stack((cut, lengths - cut), axis=1).reshape(-1)
    return pieces[pieces > 0]


def _pack(lengths: Int64s, spare: int, seq_len: int) -> tuple[int, Int64s, Int64s]:
    """How many of the first documents become filler, and the rows of the others: their first documents, their gaps."""
    ends = np.cumsum(lengths)
    # after[i]: the first document that no longer fits in a row which begins with document i
    after = np.searchsorted(ends, ends - lengths + seq_len, side="right").astype(np.int64)
    jump = memoryview(after.data)  # indexes faster than an array
    first, at, total = [], 0, len(lengths)
    while at < total:
        first.append(at)
        at = jump[at]
    starts = np.array([*first, total], dtype=np.int64)
    before = np.concatenate([[0], ends])[starts]  # tokens of all documents before each row
    gaps = seq_len - np.diff(before)
    # Giving up the first r rows adds their tokens to the filler and leaves the gaps of the others: take the least r.
    need = np.append(np.cumsum(gaps[::-1])[::-1], 0)
    r = int(np.argmax(spare + before >= need))
    return int(starts[r]), starts[r:-1], gaps[r:]


def arrange(lengths: Int64s, seq_len: int, seed: int, epoch: int) -> Layout:
    """The rows of one epoch, a pure function of the documents' lengths (in stored order), seq_len, seed and epoch."""
    lengths = cut_anew(np.asarray(lengths, dtype=np.int64), seq_len, seed, epoch)
    order = shuffled(len(lengths), seed, epoch, 0)
    position = (np.cumsum(lengths) - lengths)[order]
    length = lengths[order]

    whole, rest = length // seq_len, length % seq_len
    full_rows = int(whole.sum())
    nth = np.arange(full_rows) - np.repeat(np.cumsum(whole) - whole, whole)  # 0, 1, 2 ... within its document
    full_position = np.repeat(position, whole) + nth * seq_len

    short = np.flatnonzero((whole == 0) & (rest > 0))
    tails = np.flatnonzero((whole > 0) & (rest > 0))
    given_up, starts, gaps = _pack(length[short], int(rest[tails].sum()), seq_len)
    kept = short[given_up:]
    kept_row = np.searchsorted(starts, np.arange(given_up, len(short)), side="right") - 1

    filler = np.concatenate([tails, short[:given_up]])
    filler_position = position[filler] + whole[filler] * seq_len
    filler_ends = np.cumsum(rest[filler])
    amount = int(filler_ends[-1]) if len(filler) else 0
    needed = int(gaps.sum())
    own_rows = rows_of(amount - needed, seq_len)
    row_ends = np.concatenate([np.cumsum(gaps), needed + seq_len * np.arange(1, own_rows + 1)]).astype(np.int64)
    # Cut the stream of filler wherever an item or a row's share of it ends.
    cuts = np.unique(np.concatenate([[0], filler_ends, row_ends[row_ends < amount]])).astype(np.int64)
    left, piece = cuts[:-1], np.diff(cuts)
    item = np.searchsorted(filler_ends, left, side="right")
    into_item = left - (filler_ends - rest[filler])[item]
    piece_row = np.searchsorted(row_ends, left, side="right")

    rows = full_rows + len(starts) + own_rows
    missing = -(amount - needed) % seq_len  # in the last row of filler
    padding = np.full(min(missing, 1), missing)
    row = np.concatenate(
        [np.arange(full_rows), full_rows + kept_row, full_rows + piece_row, np.full(len(padding), rows - 1)]
    )
    place = np.empty(rows, dtype=np.int64)
    place[shuffled(rows, seed, epoch, 1)] = np.arange(rows)
    row = place[row]
    by_row = np.argsort(row, kind="stable")  # within a row: whole documents first, then filler
    first = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=first[1:])
    return Layout(
        first=first,
        position=np.concatenate(
            [full_position, position[kept], filler_position[item] + into_item, np.full(len(padding), PADDING)]
        )[by_row],
        length=np.concatenate([np.full(full_rows, seq_len), rest[kept], piece, padding])[by_row].astype(np.int64),
    )
