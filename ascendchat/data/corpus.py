"""Prepared text on disk, and the batches that training takes from it: `ascendchat base --data DIR`.

A folder written by `ascendchat data prepare` holds, per split and part, NAME.tokens (token ids, little-endian uint16
or uint32; every document begins with bos, and one more bos ends the file, so that the last token too has its target)
and NAME.lengths (uint32, tokens per document), and manifest.json with totals, sizes and sha256 of all files.

The global batch of step s is a pure function of (data, seed, s): ranks take slices of it, and a resumed run, on any
number of devices, needs nothing but the step. Over one epoch every token of the corpus is an input exactly once; its
target is the next token of its document, or bos after the document's last token (so a model learns to stop). Only the
one row per epoch that cannot be full is padded: bos as input, IGNORE as target. `arrange.py` says how rows are made.
Documents are read at random: keep the folder on a local disk, or smaller than the memory of the machine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendchat.config import UserError
from ascendchat.data.arrange import Layout, arrange, rows_of
from ascendchat.data.prefetch import MicroBatch, Prefetcher
from ascendchat.files import sha256

__all__ = ["IGNORE", "Batch", "Batches", "Corpus", "MicroBatch", "Prefetcher", "evaluation_rows", "open_mixture"]

IGNORE = -1  # a target that counts in no loss
FORMAT = 1  # of the folder
MANIFEST, MIXTURE = "manifest.json", "mixture.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The file as a read-only array. A plain ndarray over the mapping: slices of np.memmap are ten times slower."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """manifest.json of a prepared folder, or the command that makes one."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"{folder} holds no prepared text (no {MANIFEST}); "
            f"make it with: ascendchat data prepare --source FILES --tokenizer DIR --out {folder}"
        ) from None
    except ValueError:
        raise UserError(f"{path} is damaged; run the same `ascendchat data prepare` again, it is made anew") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path} has another format than {FORMAT}; prepare the text again into a new folder")
    return manifest


def has_documents(manifest: dict[str, Any], split: str) -> bool:
    """Whether a prepared folder has this split."""
    return bool(manifest["splits"].get(split, {}).get("parts"))


class Corpus:
    """One split of a prepared folder, memory-mapped."""

    tokens: int  # bos included
    documents: int
    text_bytes: int  # UTF-8 bytes of the text, the denominator of bits per byte
    tokenizer: str  # fingerprint of the tokenizer that made the tokens
    fingerprint: str  # of the tokens themselves
    token_dtype: np.dtype[Any]
    bos: int
    vocab_size: int

    def __init__(self, folder: Path, split: str, manifest: dict[str, Any]) -> None:
        about = manifest["splits"][split]
        self.folder, self.split = folder, split
        self.tokens, self.documents, self.text_bytes = about["tokens"], about["documents"], about["text_bytes"]
        self.tokenizer, self.bos, self.vocab_size = manifest["tokenizer"], manifest["bos"], manifest["vocab_size"]
        self.token_dtype = DTYPES[manifest["dtype"]]
        self._parts = [folder / name for name in about["parts"]]
        checksums = [manifest["files"][f"{name}.tokens"]["sha256"] for name in about["parts"]]
        self.fingerprint = hashlib.sha256("\n".join([manifest["dtype"], *checksums]).encode()).hexdigest()[:16]

    @classmethod
    def open(cls, folder: str | Path, split: str = "train", verify: bool = False) -> Corpus:
        """Open a prepared folder. Sizes are always compared with the manifest; checksums with verify=True."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        if not has_documents(manifest, split):
            have = ", ".join(name for name in manifest["splits"] if has_documents(manifest, name)) or "none"
            remedy = "prepare it again with --val-source FILE or a larger --val-fraction"
            raise UserError(f"{folder} has no {split} documents (it has: {have}); {remedy}")
        check(folder, manifest, split, checksums=verify)
        return cls(folder, split, manifest)

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, bos included, in stored order."""
        parts = [_map(part.with_name(part.name + ".lengths"), np.dtype("<u4")) for part in self._parts]
        lengths = np.concatenate(parts).astype(np.int64)
        if len(lengths) != self.documents or int(lengths.sum()) != self.tokens:
            raise UserError(f"{self.folder}: documents and manifest disagree; run: ascendchat data prepare again")
        return lengths

    @functools.cached_property
    def _shards(self) -> tuple[list[NDArray[Any]], NDArray[np.int64]]:
        """The token files, and the position of each one's first token; the last entry is the total."""
        arrays = [_map(part.with_name(part.name + ".tokens"), self.token_dtype) for part in self._parts]
        sizes = np.array([len(array) - 1 for array in arrays], dtype=np.int64)  # without the closing bos
        return arrays, np.concatenate([[0], np.cumsum(sizes)])

    def gather(self, position: NDArray[np.int64], length: NDArray[np.int64], inputs: Any, targets: Any) -> None:
        """Copy segments (see arrange.py) one after the other into flat arrays."""
        arrays, begins = self._shards
        shard = np.searchsorted(begins, position, side="right") - 1  # -1 for padding
        offset = position - begins[shard]
        at = 0
        for s, o, n in zip(shard.tolist(), offset.tolist(), length.tolist()):
            to = at + n
            if s < 0:
                inputs[at:to], targets[at:to] = self.bos, IGNORE
            else:
                array, end = arrays[s], o + n
                inputs[at:to] = array[o:end]
                targets[at:to] = array[o + 1 : end + 1]
            at = to

    def stream(self, size: int = 1 << 20) -> Iterator[NDArray[Any]]:
        """All tokens in stored order, in pieces."""
        for array in self._shards[0]:
            for begin in range(0, len(array) - 1, size):
                yield array[begin : min(begin + size, len(array) - 1)]

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document, bos included."""
        arrays, begins = self._shards
        position = int(self.lengths[:index].sum())
        shard = int(np.searchsorted(begins, position, side="right")) - 1
        offset = position - int(begins[shard])
        return arrays[shard][offset : offset + int(self.lengths[index])]


def check(folder: Path, manifest: dict[str, Any], split: str | None = None, *, checksums: bool) -> None:
    """Compare the files of a folder (or of one split) with its manifest; UserError names the first that is wrong."""
    for name, expected in manifest["files"].items():
        if split is not None and not name.startswith(f"{split}-"):
            continue
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        wrong = "is missing" if size is None else f"has {size} bytes instead of {expected['bytes']}"
        if size == expected["bytes"]:
            if not checksums or sha256(path) == expected["sha256"]:
                continue
            wrong = "is damaged (its checksum differs)"
        raise UserError(
            f"{path} {wrong}; delete it and run the same `ascendchat data prepare` again: only that part is made anew"
        )


def open_mixture(
    data: Sequence[str | Path], split: str = "train", verify: bool = False, needed: bool = True
) -> list[tuple[Corpus, float]]:
    """Corpora and weights from `DIR`, `DIR=WEIGHT`, or a folder that `data prepare --weights` wrote.

    A weight is a share of the training tokens, relative to the other weights; without weights, corpora count by size.
    With needed=False, corpora without documents of this split are left out.
    """
    listed: list[tuple[Path, float | None]] = []
    for entry in data:
        name, weight = named(str(entry))
        mixture = Path(name) / MIXTURE
        if not mixture.is_file():
            listed.append((Path(name), weight))
            continue
        parts = json.loads(mixture.read_text(encoding="utf-8"))["corpora"]
        total = sum(one["weight"] for one in parts)
        for one in parts:
            listed.append((Path(name) / one["folder"], one["weight"] * (weight or 1.0) / (total if weight else 1.0)))
    if not listed:
        raise UserError("no data given; prepare some with: ascendchat data prepare --help")
    found = [
        (Corpus.open(folder, split, verify), weight)
        for folder, weight in listed
        if needed or has_documents(read_manifest(folder), split)
    ]
    if len({corpus.tokenizer for corpus, _ in found}) > 1:
        raise UserError(f"{', '.join(map(str, data))} were prepared with different tokenizers; prepare them with one")
    if len({weight is None for _, weight in found}) > 1:
        raise UserError("give every corpus a weight, or none: --data DIR_A=0.7,DIR_B=0.3")
    return [(corpus, float(corpus.tokens) if weight is None else weight) for corpus, weight in found]


def named(entry: str) -> tuple[str, float | None]:
    """`NAME` or `NAME=WEIGHT`; the name of a file that is there may itself contain `=`."""
    name, equals, text = entry.rpartition("=")
    return (name, _weight(text, entry)) if equals and not Path(entry).exists() else (entry, None)


def absolute(data: Sequence[str]) -> tuple[str, ...]:
    """A mixture whose files and folders are found from any directory; other names stay as they are."""
    found = []
    for entry in data:
        name, weight = named(entry)
        place = str(Path(name).absolute()) if Path(name).exists() else name
        found.append(place if weight is None else f"{place}={weight:g}")
    return tuple(found)


def _weight(text: str, entry: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise UserError(f"{entry}: {text!r} is not a weight; write DIR=0.7") from None
    if not 0 < weight < float("inf"):
        raise UserError(f"{entry}: a weight must be greater than 0")
    return weight


@dataclass(frozen=True)
class Batch:
    """Rows of one global batch, on the host."""

    inputs: NDArray[np.int64]  # (n, T)
    targets: NDArray[np.int64]  # (n, T), IGNORE where there is nothing to learn
    lengths: NDArray[np.int32]  # tokens of each segment, row after row; they sum to n * T: packed attention uses them


class Rows:
    """The rows of every epoch of one corpus: a pure function of (data, seed)."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.per_epoch = rows_of(corpus.tokens, seq_len)
        self._layouts: dict[int, Layout] = {}

    def layout(self, epoch: int) -> Layout:
        """The layout of an epoch; the last two are kept, because a batch may lie on both sides of an epoch's end."""
        layout = self._layouts.get(epoch)
        if layout is None:
            layout = arrange(self.corpus.lengths, self.seq_len, self.seed, epoch)
            self._layouts = {**dict(list(self._layouts.items())[-1:]), epoch: layout}
        return layout

    def fill(self, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> tuple[Any, Any]:
        """Write rows `number`, `number` + 1 ... into two arrays (n, T); rows 0 .. per_epoch - 1 are epoch 0, and so on.
        Returns the lengths of all segments, and how many of them each row has."""
        lengths, counts, done = [], [], 0
        while done < len(inputs):
            epoch, row = divmod(number + done, self.per_epoch)
            layout = self.layout(epoch)
            end = min(row + len(inputs) - done, self.per_epoch)
            edges = layout.first[row : end + 1]
            segments, out = slice(edges[0], edges[-1]), slice(done, done + end - row)
            length = layout.length[segments]
            self.corpus.gather(layout.position[segments], length, inputs[out].reshape(-1), targets[out].reshape(-1))
            lengths.append(length)
            counts.append(np.diff(edges))
            done += end - row
        return np.concatenate(lengths), np.concatenate(counts)

    def targets(self, start: int, stop: int) -> int:
        """How many targets the rows start .. stop - 1 of the run have: all places but the padding, which stands in one
        row of each epoch."""
        padding = self.per_epoch * self.seq_len - self.corpus.tokens
        total = (stop - start) * self.seq_len
        if not padding or start == stop:
            return total
        for epoch in range(start // self.per_epoch, (stop - 1) // self.per_epoch + 1):
            total -= padding * (start <= epoch * self.per_epoch + self.layout(epoch).padded_row < stop)
        return total


class Batches:
    """Global batches of a weighted mixture: row g of the run belongs to one corpus, chosen evenly by weight."""

    def __init__(self, corpora: Sequence[tuple[Corpus, float]], seq_len: int, rows_per_step: int, seed: int) -> None:
        if seq_len < 1 or rows_per_step < 1:
            raise ValueError("seq_len and rows_per_step must be at least 1")
        self.seq_len, self.rows_per_step, self.seed = seq_len, rows_per_step, seed
        self.rows = [Rows(corpus, seq_len, seed) for corpus, _ in corpora]
        # _share[i]: what corpus i takes of the rows that the corpora before it left; exact, so exact for any step.
        left, self._share = sum(Fraction(weight) for _, weight in corpora), []
        for _, weight in corpora:
            self._share.append(Fraction(weight) / left)
            left -= Fraction(weight)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that draw as many rows as all corpora hold together (rounded up)."""
        return -(-sum(rows.per_epoch for rows in self.rows) // self.rows_per_step)

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows of the run come from each corpus."""
        counts = []
        for share in self._share:
            taken = rows * share.numerator // share.denominator
            counts.append(taken)
            rows -= taken
        return counts

    def targets(self, step: int) -> int:
        """How many targets the global batch of a step has; padding and what is not learnt have none."""
        begin = step * self.rows_per_step
        spans = zip(self.rows, self.counts(begin), self.counts(begin + self.rows_per_step))
        return sum(rows.targets(start, stop) for rows, start, stop in spans)

    def epochs(self, step: int) -> list[float]:
        """How often each corpus has been read before this step."""
        return [n / rows.per_epoch for n, rows in zip(self.counts(step * self.rows_per_step), self.rows)]

    def locate(self, number: int) -> tuple[int, int]:
        """Row `number` of the run -> (which corpus, which of its rows)."""
        for which, share in enumerate(self._share):
            taken = number * share.numerator // share.denominator
            if (number + 1) * share.numerator // share.denominator > taken:
                return which, taken
            number -= taken
        raise AssertionError("the last corpus takes every row that is left")

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Rows [start, stop) of the global batch of a step."""
        stop = self.rows_per_step if stop is None else stop
        if not 0 <= start <= stop <= self.rows_per_step:
            raise ValueError(f"rows {start}..{stop} are not within a batch of {self.rows_per_step}")
        inputs = np.empty((stop - start, self.seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        begin = step * self.rows_per_step
        places = [self.locate(number) for number in range(begin + start, begin + stop)]
        which = np.array([corpus for corpus, _ in places], dtype=np.int64)
        lengths, row_of = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for corpus in np.unique(which).tolist():
            mine = np.flatnonzero(which == corpus)  # consecutive rows of that corpus
            part = np.empty((2, len(mine), self.seq_len), dtype=np.int64)
            its_lengths, counts = self.rows[corpus].fill(places[mine[0]][1], part[0], part[1])
            inputs[mine], targets[mine] = part
            lengths.append(its_lengths)
            row_of.append(np.repeat(mine, counts))
        by_row = np.argsort(np.concatenate(row_of), kind="stable")
        return Batch(inputs, targets, np.concatenate(lengths)[by_row].astype(np.int32))


def evaluation_rows(corpus: Corpus, seq_len: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """All documents in stored order, concatenated, in rows (T,): (inputs, targets).

    Every token of text is a target exactly once. Targets that are bos, and the padding of the last row, are IGNORE:
    bits per byte = sum of the losses / ln 2 / corpus.text_bytes, and bos has no bytes.
    """
    held = np.zeros(0, dtype=np.int64)
    for piece in corpus.stream():
        held = np.concatenate([held, piece.astype(np.int64)])
        rows = (len(held) - 1) // seq_len  # a row needs one token more than it has inputs
        for begin in range(0, rows * seq_len, seq_len):
            row = held[begin : begin + seq_len + 1]
            yield row[:-1].copy(), np.where(row[1:] == corpus.bos, IGNORE, row[1:])
        held = held[rows * seq_len :]
    if len(held) > 1:
        inputs, targets = np.full(seq_len, corpus.bos), np.full(seq_len, IGNORE)
        inputs[: len(held)] = held
        targets[: len(held) - 1] = np.where(held[1:] == corpus.bos, IGNORE, held[1:])
        yield inputs, targets
