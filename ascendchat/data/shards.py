"""The files that `ascendchat data prepare` writes: one part of a source -> one shard per split and a record of it.

The files of a part are written under other names and renamed; then `progress/SOURCE-PART.json` records them. When all
parts of a source are there, `progress/SOURCE.json` says how many. Names and bytes depend only on the source's content,
the tokenizer and the settings, so a part that has its record is never made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascendchat.data.corpus import TOKEN_DTYPES
from ascendchat.data.object_store import block_sums
from ascendchat.data.read import Tally
from ascendchat.files import write_atomic

if TYPE_CHECKING:
    from ascendchat.data.tokenizer.tokenizer import Tokenizer

PART = 16 << 20  # characters of text per shard


@dataclass(frozen=True)
class SourceFile:
    """One file to prepare, or the embedded corpus."""

    path: str  # a file, or "toyworld/train", "toyworld/validation"
    content: str  # sha256 of its bytes
    key: str  # hash of content, tokenizer and settings: the name of its shards
    field: str
    val_fraction: float  # 1.0: all of it is for validation
    part: int  # characters of text per shard


def is_validation(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation split."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") < fraction * 2.0**64


def split_into_parts(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Groups of documents of at least `size` characters (the last may have fewer)."""
    held, characters = [], 0
    for text in texts:
        held.append(text)
        characters += len(text)
        if characters >= size:
            yield held
            held, characters = [], 0
    if held:
        yield held


def _write(path: Path, data: bytes) -> dict[str, Any]:
    write_atomic(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_shard(folder: Path, name: str, tokens: np.ndarray, lengths: Sequence[int], bos: int) -> dict[str, Any]:
    """Write one shard; returns what the manifest says of its two files. `tokens` begins each document with bos."""
    closed = np.append(tokens, tokens.dtype.type(bos)).tobytes()
    return {
        f"{name}.tokens": {**_write(folder / f"{name}.tokens", closed), "blocks": block_sums(closed)},
        f"{name}.lengths": _write(folder / f"{name}.lengths", np.asarray(lengths, dtype="<u4").tobytes()),
    }


def encode_part(tokenizer: Tokenizer, out: Path, source: SourceFile, number: int, texts: list[str]) -> dict[str, Any]:
    """Encode the documents of one part, write its shards and then its record."""
    dtype = TOKEN_DTYPES[dtype_for(tokenizer.vocab_size)]
    held: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    text_bytes = {"train": 0, "val": 0}
    for text in texts:
        raw = text.encode()
        split = "val" if is_validation(raw, source.val_fraction) else "train"
        held[split].append(np.array([tokenizer.bos, *tokenizer.encode(text)], dtype=dtype))
        text_bytes[split] += len(raw)
    record: dict[str, Any] = {"splits": {}, "files": {}}
    for split, pieces in held.items():
        if pieces:
            name = f"{split}-{source.key}-{number:05d}"
            lengths = [len(piece) for piece in pieces]
            record["files"].update(write_shard(out, name, np.concatenate(pieces), lengths, tokenizer.bos))
            counts = {"documents": len(pieces), "tokens": sum(lengths), "text_bytes": text_bytes[split]}
            record["splits"][split] = {"part": name, **counts}
    write_atomic(record_path(out, source, number), json.dumps(record))
    return record


def dtype_for(vocab_size: int) -> str:
    """The smallest type that holds every token id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def record_path(out: Path, source: SourceFile, number: int | None = None) -> Path:
    return out / "progress" / (f"{source.key}.json" if number is None else f"{source.key}-{number:05d}.json")


def load_record(out: Path, path: Path) -> dict[str, Any] | None:
    """A record whose files are all there with the right size; otherwise the part is made again."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        right = all((out / name).stat().st_size == about["bytes"] for name, about in record.get("files", {}).items())
    except (OSError, ValueError):
        return None
    return record if right else None


def record_finished(out: Path, source: SourceFile, parts: int, tally: Tally) -> None:
    write_atomic(record_path(out, source), json.dumps({"parts": parts, **asdict(tally)}))


def finished_records(out: Path, source: SourceFile) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The records of a source and of its parts if all are there."""
    done = load_record(out, record_path(out, source))
    if done is None:
        return None
    parts = [load_record(out, record_path(out, source, number)) for number in range(done["parts"])]
    return None if None in parts else (done, [part for part in parts if part is not None])
