"""The one mixture: `--data NAME=WEIGHT,...` of every training command, and the global batches that it gives.

    entries = parse_mixture(("wiki=0.7", "chats.jsonl=0.3"))      # names and weights
    batches = MixtureLoader([(rows, weight), ...], rows_per_step)       # each `rows` is a RowSource
    batches.batch(step, start, stop)                              # rows start .. stop - 1 of the global batch of a step

Text (corpus.TextRows) and packed conversations (chat/rows.ChatRows) are sources of rows; tasks/chat_mixture.py opens
the mixtures of `mid` and `sft`. A weight is a share of the rows of the run, relative to the other weights.

The global batch of step s is a pure function of (data, seed, s): ranks take slices of it, and a resumed run, on any
number of devices, needs nothing but the step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ascendchat.errors import UserError
from ascendchat.files import write_atomic

MIXTURE = "mixture.json"  # in the folder that `data prepare --weights` wrote: its corpora and their weights


class _Entry(NamedTuple):
    """One entry of --data."""

    name: str  # a file, a folder, or the name of a data set
    weight: float | None  # None: it counts by its size


def parse_entry(text: str, *, signed: bool = False) -> _Entry:
    """Parse `NAME` or `NAME=WEIGHT`; the name of an existing file may itself contain `=`. A `signed` weight may be
    negative, as that of a penalty."""
    name, equals, number = text.rpartition("=")
    if not equals or Path(text).exists():
        return _Entry(text, None)
    try:
        weight = float(number)
    except ValueError:
        raise UserError(f"{text}: {number!r} is not a weight; write {name}=0.7") from None
    if not 0 < (abs(weight) if signed else weight) < float("inf"):
        raise UserError(f"{text}: a weight must be {'other' if signed else 'greater'} than 0")
    return _Entry(name, weight)


def parse_mixture(data: Sequence[str | Path]) -> list[_Entry]:
    """Parse all entries, weighted or not. A folder that `data prepare --weights` wrote stands for its corpora."""
    entries: list[_Entry] = []
    for text in data:
        name, weight = parse_entry(str(text))
        manifest = Path(name) / MIXTURE
        if not manifest.is_file():
            entries.append(_Entry(name, weight))
            continue
        corpora = json.loads(manifest.read_text(encoding="utf-8"))["corpora"]
        total = sum(corpus["weight"] for corpus in corpora)
        for corpus in corpora:
            share = corpus["weight"] if weight is None else corpus["weight"] * weight / total
            entries.append(_Entry(str(Path(name) / corpus["folder"]), float(share)))
    if len({weight is None for _, weight in entries}) > 1:
        raise UserError("give every entry of --data a weight, or none: --data chats.jsonl=0.7,corpus=0.3")
    return entries


def write_mixture(folder: Path, corpora: Sequence[tuple[str, float]]) -> None:
    """Make `folder` a mixture of these folders below it; `parse_mixture` reads it."""
    listed = [{"folder": name, "weight": weight} for name, weight in corpora]
    write_atomic(folder / MIXTURE, json.dumps({"corpora": listed}, indent=1))


def entry_text(name: str, weight: float | None) -> str:
    """Write an entry of --data; its weight is read back as it was."""
    if weight is None:
        return name
    short = f"{weight:g}"
    return f"{name}={short if float(short) == weight else repr(weight)}"


def absolute(data: Sequence[str]) -> tuple[str, ...]:
    """Make the paths of files and folders absolute, so that they are found from any directory; other names stay."""
    entries = []
    for name, weight in map(parse_entry, data):
        name = str(Path(name).absolute()) if Path(name).exists() else name
        entries.append(entry_text(name, weight))
    return tuple(entries)


def is_held_out(content: bytes, fraction: float) -> bool:
    """True for the share of a source that is held out for validation: decided by a hash of the row's own content, so
    that it depends neither on the order nor on the other rows. Must never change: a resumed run would train on what
    it was validated on. (Of text, `data prepare` sets documents aside when it writes the folder:
    prepare.is_validation.)"""
    return int(hashlib.sha256(content).hexdigest()[:8], 16) < fraction * 2**32


class RowSource(Protocol):
    """A source of rows of `seq_len` tokens. Its rows 0 .. per_epoch - 1 are epoch 0, the next `per_epoch` are epoch 1,
    and so on: a pure function of (data, seed)."""

    seq_len: int
    per_epoch: int

    @property
    def identity(self) -> bytes | memoryview:
        """Bytes that stand for the content of this source in the fingerprint of a mixture."""

    def fill(
        self, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Write rows `number`, `number` + 1 ... into two arrays (n, T); targets are IGNORE where nothing is learnt.
        Returns the lengths of all segments, which sum to T in each row, and the number of segments of each row."""

    def targets(self, start: int, stop: int) -> int:
        """Number of targets in the rows start .. stop - 1 that are not IGNORE."""


WeightedRows = tuple[RowSource, float]


def fingerprint(sources: Sequence[WeightedRows]) -> str:
    """Hash of the content of all sources. The weights are not in it: a checkpoint keeps them beside it."""
    digest = hashlib.sha256()
    for rows, _ in sources:
        digest.update(rows.identity)
    return digest.hexdigest()[:16]


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Share that each source takes of the rows left over by the sources before it; exact, so exact for any step."""
    remaining, parts = sum(map(Fraction, weights)), []
    for weight in map(Fraction, weights):
        parts.append(weight / remaining)
        remaining -= weight
    return parts


@dataclass(frozen=True)
class Batch:
    """Rows of one global batch, on the host."""

    inputs: NDArray[np.int64]  # (n, T)
    targets: NDArray[np.int64]  # (n, T), IGNORE where there is nothing to learn
    lengths: NDArray[np.int32]  # tokens of each segment, row after row; they sum to n * T: packed attention uses them


def locate(shares: Sequence[Fraction], number: int) -> tuple[int, int]:
    """Find row `number` of a mixture: (index of the source, row of that source)."""
    for which, share in enumerate(shares):
        before = number * share.numerator // share.denominator  # rows of this source among the first `number`
        if (number + 1) * share.numerator // share.denominator > before:
            return which, before
        number -= before  # row number among those that this source leaves over
    raise AssertionError("the last source takes every row that is left")


class MixtureLoader:
    """Global batches of a weighted mixture: row g of the run belongs to one source, chosen evenly by weight."""

    def __init__(self, sources: Sequence[WeightedRows], rows_per_step: int) -> None:
        self.rows, self.rows_per_step = [rows for rows, _ in sources], rows_per_step
        if rows_per_step < 1 or len({rows.seq_len for rows in self.rows}) != 1:
            raise ValueError("a mixture needs sources with rows of one length, and steps of at least one row")
        self.seq_len = self.rows[0].seq_len
        self._shares = shares([weight for _, weight in sources])

    def counts(self, rows: int) -> list[int]:
        """Number of the first `rows` rows of the run that come from each source."""
        counts = []
        for share in self._shares:
            count = rows * share.numerator // share.denominator
            counts.append(count)
            rows -= count
        return counts

    def targets(self, step: int) -> int:
        """Number of targets in the global batch of a step; padding and what is not learnt have none."""
        begin = step * self.rows_per_step
        spans = zip(self.rows, self.counts(begin), self.counts(begin + self.rows_per_step))
        return sum(rows.targets(start, stop) for rows, start, stop in spans)

    def locate(self, number: int) -> tuple[int, int]:
        """Find row `number` of the run: (index of the source, row of that source)."""
        return locate(self._shares, number)

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Gather rows [start, stop) of the global batch of a step."""
        stop = self.rows_per_step if stop is None else stop
        if not 0 <= start <= stop <= self.rows_per_step:
            raise ValueError(f"rows {start}..{stop} are not within a batch of {self.rows_per_step}")
        inputs = np.empty((stop - start, self.seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        begin = step * self.rows_per_step
        places = [self.locate(number) for number in range(begin + start, begin + stop)]
        which = np.array([source for source, _ in places], dtype=np.int64)  # (n,) source of each row
        lengths, row_of = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for source in np.unique(which).tolist():
            at = np.flatnonzero(which == source)  # rows of this batch; consecutive rows of that source
            part = np.empty((2, len(at), self.seq_len), dtype=np.int64)  # inputs, targets
            part_lengths, counts = self.rows[source].fill(places[at[0]][1], part[0], part[1])
            inputs[at], targets[at] = part
            lengths.append(part_lengths)
            row_of.append(np.repeat(at, counts))  # row of each segment
        by_row = np.argsort(np.concatenate(row_of), kind="stable")  # stable: segments of a row keep their order
        return Batch(inputs, targets, np.concatenate(lengths)[by_row].astype(np.int32))
