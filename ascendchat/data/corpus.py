"""Prepared text on disk, and the rows that training takes from it: `ascendchat base --data DIR`.

A folder written by `ascendchat data prepare` holds, per split and part, NAME.tokens (token ids, little-endian uint16
or uint32; every document begins with bos, and one more bos ends the file, so that the last token too has its target)
and NAME.lengths (uint32, tokens per document), and manifest.json with totals, sizes and sha256 of all files.

Over one epoch every token of the corpus is an input exactly once; its target is the next token of its document, or bos
after the document's last token (so a model learns to stop). Only the one row per epoch that cannot be full is padded:
bos as input, IGNORE as target. This file packs documents into rows, `mixture.py` takes batches from rows.
Documents are read at random: keep the folder on a local disk, or smaller than the memory of the machine; of a folder
in an object store (object_store.py) a rank reads the blocks that its own rows need.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendchat.data.mixture import parse_mixture
from ascendchat.data.object_store import Store, is_remote, read_remote
from ascendchat.data.verify import MANIFEST
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE

FORMAT = 1  # of the folder
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file as a read-only array. A plain ndarray over the mapping: slices of np.memmap are ten times slower."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def read_corpus_manifest(folder: str | Path) -> dict[str, Any]:
    """Read manifest.json of a prepared folder or address; the error gives the command that makes one."""
    remote = is_remote(folder)
    path = f"{folder}/{MANIFEST}" if remote else Path(folder) / MANIFEST
    try:
        text = read_remote(str(folder), MANIFEST) if remote else Path(path).read_bytes()
        if text is None:
            raise UserError(f"{folder} holds no prepared text (no {MANIFEST}); copy there what `data prepare` wrote")
        manifest = json.loads(text)
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


def is_prepared(folder: str | Path) -> bool:
    """True for a folder that `ascendchat data prepare` wrote, and for any address of an object store."""
    return is_remote(folder) or any(Path(folder).glob("*.tokens"))


def has_documents(manifest: dict[str, Any], split: str) -> bool:
    """True if a prepared folder has this split."""
    return bool(manifest["splits"].get(split, {}).get("parts"))


class Corpus:
    """One split of a prepared folder, memory-mapped, or of one in an object store, read by blocks."""

    name: str  # the folder or address as it was given: Path would take a slash from s3://
    tokens: int  # bos included
    documents: int
    text_bytes: int  # UTF-8 bytes of the text, the denominator of bits per byte
    tokenizer: str  # fingerprint of the tokenizer that made the tokens
    fingerprint: str  # of the tokens themselves
    token_dtype: np.dtype[Any]
    bos: int
    vocab_size: int

    def __init__(self, name: str, split: str, manifest: dict[str, Any], store: Store | None = None) -> None:
        about, folder = manifest["splits"][split], Path(name)
        self.name, self.folder, self.split, self._store = name, folder, split, store
        self.tokens, self.documents, self.text_bytes = about["tokens"], about["documents"], about["text_bytes"]
        self.tokenizer, self.bos, self.vocab_size = manifest["tokenizer"], manifest["bos"], manifest["vocab_size"]
        self.token_dtype = TOKEN_DTYPES[manifest["dtype"]]
        self._parts = [folder / name for name in about["parts"]]
        checksums = [manifest["files"][f"{name}.tokens"]["sha256"] for name in about["parts"]]
        self.fingerprint = hashlib.sha256("\n".join([manifest["dtype"], *checksums]).encode()).hexdigest()[:16]

    @classmethod
    def open(cls, folder: str | Path, split: str = "train") -> Corpus:
        """Open a prepared folder. Sizes are compared with the manifest; `ascendchat data verify` compares checksums."""
        manifest = read_corpus_manifest(folder)
        if not has_documents(manifest, split):
            available = ", ".join(name for name in manifest["splits"] if has_documents(manifest, name)) or "none"
            remedy = "prepare it again with --val-source FILE or a larger --val-fraction"
            raise UserError(f"{folder} has no {split} documents (it has: {available}); {remedy}")
        if is_remote(folder):
            return cls(str(folder), split, manifest, Store(str(folder), manifest["files"]))
        _check_sizes(Path(folder), manifest, split)
        return cls(str(folder), split, manifest)

    def _array(self, part: Path, kind: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Read one small file of a part whole."""
        name = f"{part.name}.{kind}"
        return self._store.whole(name, dtype) if self._store else _map(part.with_name(name), dtype)

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, bos included, in stored order."""
        parts = [self._array(part, "lengths", np.dtype("<u4")) for part in self._parts]
        lengths = np.concatenate(parts).astype(np.int64)
        if len(lengths) != self.documents or int(lengths.sum()) != self.tokens:
            raise UserError(f"{self.name}: documents and manifest disagree; run: ascendchat data prepare again")
        return lengths

    @functools.cached_property
    def _shards(self) -> tuple[list[Any], NDArray[np.int64]]:
        """The token files, and the position of each one's first token; the last entry is the total."""
        names, store = [f"{part.name}.tokens" for part in self._parts], self._store
        if store:
            arrays: list[Any] = [store.array(name, self.token_dtype) for name in names]
        else:
            arrays = [_map(part.with_name(name), self.token_dtype) for part, name in zip(self._parts, names)]
        sizes = np.array([len(array) - 1 for array in arrays], dtype=np.int64)  # without the closing bos
        return arrays, np.concatenate([[0], np.cumsum(sizes)])

    def gather(self, position: NDArray[np.int64], length: NDArray[np.int64], inputs: Any, targets: Any) -> None:
        """Copy segments one after the other into flat arrays. A segment is `length` tokens from `position` on, or
        padding."""
        arrays, begins = self._shards
        shard = np.searchsorted(begins, position, side="right") - 1  # -1 for padding
        offset = position - begins[shard]
        segments = list(zip(shard.tolist(), offset.tolist(), length.tolist()))  # Python numbers index faster
        if self._store:
            self._store.fetch((arrays[s], o, o + n + 1) for s, o, n in segments if s >= 0)
        at = 0
        for s, o, n in segments:
            to = at + n
            if s < 0:
                inputs[at:to], targets[at:to] = self.bos, IGNORE
            else:
                array, end = arrays[s], o + n
                inputs[at:to] = array[o:end]
                targets[at:to] = array[o + 1 : end + 1]
            at = to

    def stream(self, size: int = 1 << 20) -> Iterator[NDArray[Any]]:
        """Yield all tokens in stored order, in pieces."""
        for array in self._shards[0]:
            for begin in range(0, len(array) - 1, size):
                yield array[begin : min(begin + size, len(array) - 1)]


def _check_sizes(folder: Path, manifest: dict[str, Any], split: str) -> None:
    """Compare the files of a split with the manifest; UserError names the first that is wrong."""
    for name in (name for name in manifest["files"] if name.startswith(f"{split}-")):
        path, expected = folder / name, manifest["files"][name]
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            wrong = "is missing" if size is None else f"has {size} bytes instead of {expected['bytes']}"
            raise UserError(
                f"{path} {wrong}; delete it and run the same `ascendchat data prepare` again: only that part is made "
                "anew"
            )


def open_corpora(data: Sequence[str | Path], split: str = "train", needed: bool = True) -> list[tuple[Corpus, float]]:
    """Open the corpora of a mixture of text, with their weights: without weights, each counts by its tokens.

    With needed=False, corpora without documents of this split are left out.
    """
    entries = parse_mixture(data)
    if not entries:
        raise UserError("no data given; prepare some with: ascendchat data prepare --help")
    opened = [
        (Corpus.open(folder, split), weight)
        for folder, weight in entries
        if needed or has_documents(read_corpus_manifest(folder), split)
    ]
    if len({corpus.tokenizer for corpus, _ in opened}) > 1:
        raise UserError(f"{', '.join(map(str, data))} were prepared with different tokenizers; prepare them with one")
    return [(corpus, float(corpus.tokens) if weight is None else weight) for corpus, weight in opened]


class TextRows:
    """The rows of every epoch of one corpus; a mixture.RowSource."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.per_epoch = rows_of(corpus.tokens, seq_len)
        self._packings: dict[int, _Packing] = {}

    @property
    def identity(self) -> bytes:
        return self.corpus.fingerprint.encode()

    def packing(self, epoch: int) -> _Packing:
        """Pack an epoch; the last two are cached, because a batch may lie on both sides of an epoch's end."""
        packing = self._packings.get(epoch)
        if packing is None:
            packing = pack_documents(self.corpus.lengths, self.seq_len, self.seed, epoch)
            self._packings = {**dict(list(self._packings.items())[-1:]), epoch: packing}
        return packing

    def fill(
        self, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        lengths, counts, done = [], [], 0
        while done < len(inputs):
            epoch, row = divmod(number + done, self.per_epoch)
            packing = self.packing(epoch)
            end = min(row + len(inputs) - done, self.per_epoch)
            edges = packing.first[row : end + 1]
            segments, out = slice(edges[0], edges[-1]), slice(done, done + end - row)
            length = packing.length[segments]
            self.corpus.gather(packing.position[segments], length, inputs[out].reshape(-1), targets[out].reshape(-1))
            lengths.append(length)
            counts.append(np.diff(edges))
            done += end - row
        return np.concatenate(lengths), np.concatenate(counts)

    def targets(self, start: int, stop: int) -> int:
        """Number of targets in these rows: all positions but the padding, which is in one row of each epoch."""
        padding = self.per_epoch * self.seq_len - self.corpus.tokens
        total = (stop - start) * self.seq_len
        if not padding or start == stop:
            return total
        for epoch in range(start // self.per_epoch, (stop - 1) // self.per_epoch + 1):
            total -= padding * (start <= epoch * self.per_epoch + self.packing(epoch).padded_row < stop)
        return total


def evaluation_rows(corpus: Corpus, seq_len: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield all documents in stored order, concatenated, in rows (T,): (inputs, targets).

    Every token of text is a target exactly once. Targets that are bos, and the padding of the last row, are IGNORE:
    bits per byte = sum of the losses / ln 2 / corpus.text_bytes, and bos has no bytes.
    """
    buffer = np.zeros(0, dtype=np.int64)
    for piece in corpus.stream():
        buffer = np.concatenate([buffer, piece.astype(np.int64)])
        rows = (len(buffer) - 1) // seq_len  # a row needs one token more than it has inputs
        for begin in range(0, rows * seq_len, seq_len):
            row = buffer[begin : begin + seq_len + 1]
            yield row[:-1].copy(), np.where(row[1:] == corpus.bos, IGNORE, row[1:])
        buffer = buffer[rows * seq_len :]
    if len(buffer) > 1:
        inputs, targets = np.full(seq_len, corpus.bos), np.full(seq_len, IGNORE)
        inputs[: len(buffer)] = buffer
        targets[: len(buffer) - 1] = np.where(buffer[1:] == corpus.bos, IGNORE, buffer[1:])
        yield inputs, targets


# Packing: the documents of one epoch in rows, every token exactly once; rows begin with a document where that costs
# nothing. Used by the loader of every training command (`ascendchat base --data DIR`).
#
# A row is T input tokens, made of segments: pieces of documents, never crossing one. The packing of an epoch:
# 1. documents are put in random order;
# 2. a document of T tokens or more fills whole rows from its start; the rest (fewer than T tokens) is a fragment.
#    From the second epoch on a random beginning is first cut off, and packed like a short document: so its rows begin
#    elsewhere every time, and a model that reads a text again sees it with another context;
# 3. shorter documents stay whole: a row takes them in order while they fit, then fragments close the gap to exactly T;
#    a fragment is cut wherever the row ends, and goes on in the next gap. If the fragments do not suffice, the short
#    documents of the first few rows become fragments too;
# 4. fragments that are left make rows of their own; only the last of them can lack tokens, and gets padding;
# 5. rows are put in random order.
# A row ends inside a document at most once, exactly as when documents are simply concatenated, so no more context is
# lost than by concatenation, and all rows of kinds 2 (the first of a document) and 3 begin with a document.

Int64s = NDArray[np.int64]
PADDING = -1  # the position of a segment that is no text
CUTS_COUNTER = 2**192  # Philox counter from which cuts are drawn: permutations with the same key begin at 0


@dataclass(frozen=True)
class _Packing:
    """The rows of one epoch. Row r holds the segments first[r] .. first[r + 1]."""

    first: Int64s  # (rows + 1,)
    position: Int64s  # (segments,) place of the segment's first token in the corpus, or PADDING
    length: Int64s  # (segments,) tokens; those of a row sum to T

    @functools.cached_property
    def padded_row(self) -> int:
        """Number of the row that holds the padding; -1 without any."""
        segments = np.flatnonzero(self.position == PADDING)
        return int(np.searchsorted(self.first, segments[0], side="right")) - 1 if len(segments) else -1


def rows_of(tokens: int, seq_len: int) -> int:
    """Rows per epoch, the same for every epoch."""
    return -(-tokens // seq_len)


def shuffled(n: int, seed: int, epoch: int, salt: int) -> Int64s:
    """A random permutation of n. Raw Philox output and a stable sort: the same on every version of NumPy."""
    bits = np.random.Philox(key=np.array([np.uint64(seed % 2**64), np.uint64(epoch * 2 + salt)], dtype=np.uint64))
    return np.argsort(bits.random_raw(n), kind="stable")


def cut_long_documents(lengths: Int64s, seq_len: int, seed: int, epoch: int) -> Int64s:
    """Lengths of the pieces to pack: from the second epoch on, long documents are cut once, at a random place."""
    if epoch == 0:
        return lengths
    bits = np.random.Philox(
        key=np.array([np.uint64(seed % 2**64), np.uint64(epoch)], dtype=np.uint64), counter=CUTS_COUNTER
    )
    cut = 1 + (bits.random_raw(len(lengths)) % np.uint64(max(1, seq_len - 1))).astype(np.int64)
    cut = np.where(lengths > seq_len, cut, 0)
    pieces = np.stack((cut, lengths - cut), axis=1).reshape(-1)
    return pieces[pieces > 0]


def _pack(lengths: Int64s, fragment_tokens: int, seq_len: int) -> tuple[int, Int64s, Int64s]:
    """Pack short documents: (how many of the first become fragments, first document of each row, gap at each row's
    end)."""
    ends = np.cumsum(lengths)
    # after[i]: the first document that no longer fits in a row which begins with document i
    after = np.searchsorted(ends, ends - lengths + seq_len, side="right").astype(np.int64)  # (documents,)
    jump = memoryview(after.data)  # indexes faster than an array
    first, at, total = [], 0, len(lengths)
    while at < total:
        first.append(at)
        at = jump[at]
    starts = np.array([*first, total], dtype=np.int64)
    before = np.concatenate([[0], ends])[starts]  # tokens of all documents before each row
    gaps = seq_len - np.diff(before)  # (rows,) tokens that fragments must fill
    # Giving up the first r rows adds their tokens to the fragments and leaves the gaps of the others: take the least r.
    need = np.append(np.cumsum(gaps[::-1])[::-1], 0)
    r = int(np.argmax(fragment_tokens + before >= need))
    return int(starts[r]), starts[r:-1], gaps[r:]


def pack_documents(lengths: Int64s, seq_len: int, seed: int, epoch: int) -> _Packing:
    """Pack the rows of one epoch: a pure function of the documents' lengths in stored order, seq_len, seed and
    epoch."""
    lengths = cut_long_documents(np.asarray(lengths, dtype=np.int64), seq_len, seed, epoch)
    order = shuffled(len(lengths), seed, epoch, 0)
    position = (np.cumsum(lengths) - lengths)[order]  # (documents,) of the first token, in the corpus
    length = lengths[order]

    full, rest = length // seq_len, length % seq_len  # (documents,) rows that each fills, tokens left over
    full_rows = int(full.sum())
    nth = np.arange(full_rows) - np.repeat(np.cumsum(full) - full, full)  # 0, 1, 2 ... within its document
    full_position = np.repeat(position, full) + nth * seq_len

    short = np.flatnonzero((full == 0) & (rest > 0))
    tails = np.flatnonzero((full > 0) & (rest > 0))
    skipped, starts, gaps = _pack(length[short], int(rest[tails].sum()), seq_len)
    whole_short = short[skipped:]
    whole_short_row = np.searchsorted(starts, np.arange(skipped, len(short)), side="right") - 1

    fragments = np.concatenate([tails, short[:skipped]])
    fragment_position = position[fragments] + full[fragments] * seq_len
    fragment_ends = np.cumsum(rest[fragments])
    fragment_tokens = int(fragment_ends[-1]) if len(fragments) else 0
    gap_tokens = int(gaps.sum())
    fragment_rows = rows_of(fragment_tokens - gap_tokens, seq_len)
    own_ends = gap_tokens + seq_len * np.arange(1, fragment_rows + 1)
    row_ends = np.concatenate([np.cumsum(gaps), own_ends]).astype(np.int64)
    # Cut the stream of fragments wherever a fragment or a row's share of the stream ends.
    cuts = np.unique(np.concatenate([[0], fragment_ends, row_ends[row_ends < fragment_tokens]])).astype(np.int64)
    left, piece = cuts[:-1], np.diff(cuts)  # (pieces,) start in the stream of fragments, tokens
    fragment = np.searchsorted(fragment_ends, left, side="right")
    into_fragment = left - (fragment_ends - rest[fragments])[fragment]
    piece_row = np.searchsorted(row_ends, left, side="right")

    rows = full_rows + len(starts) + fragment_rows
    missing = -(fragment_tokens - gap_tokens) % seq_len  # tokens, in the last row of fragments
    padding = np.full(min(missing, 1), missing)
    row = np.concatenate(
        [np.arange(full_rows), full_rows + whole_short_row, full_rows + piece_row, np.full(len(padding), rows - 1)]
    )
    new_row = np.empty(rows, dtype=np.int64)
    new_row[shuffled(rows, seed, epoch, 1)] = np.arange(rows)
    row = new_row[row]
    by_row = np.argsort(row, kind="stable")  # within a row: whole documents first, then fragments
    first = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=first[1:])
    lengths = np.concatenate([np.full(full_rows, seq_len), rest[whole_short], piece, padding])
    return _Packing(
        first=first,
        position=np.concatenate(
            [
                full_position,
                position[whole_short],
                fragment_position[fragment] + into_fragment,
                np.full(len(padding), PADDING),
            ]
        )[by_row],
        length=lengths[by_row].astype(np.int64),
    )
