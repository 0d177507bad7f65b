"""Documents -> token shards: `ascendchat data prepare --source A.jsonl.xz B/ --tokenizer DIR --out DIR`.

A source file is read in parts of 16 Mi characters; each part is encoded by one process and becomes one shard per
split (corpus.py describes the format of a shard). manifest.json comes last. A run that was killed continues where it
was and ends with the same bytes; a run with nothing to do does nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascendchat.chips import cpu_count
from ascendchat.config.data import DataPrepareConfig
from ascendchat.data.corpus import FORMAT, TOKEN_DTYPES
from ascendchat.data.fetch.folder import validation_files
from ascendchat.data.mixture import MIXTURE, write_mixture
from ascendchat.data.object_store import block_checksums
from ascendchat.data.read import ReadCounts, file_documents, format_of, source_files
from ascendchat.data.verify import MANIFEST
from ascendchat.errors import UserError, home
from ascendchat.files import check_folder, sha256, write_atomic

if TYPE_CHECKING:
    from ascendchat.data.tokenizer.tokenizer import Tokenizer


# The files that `ascendchat data prepare` writes: one part of a source -> one shard per split and a record of it.
#
# The files of a part are written under other names and renamed; then `progress/SOURCE-PART.json` records them. When all
# parts of a source are there, `progress/SOURCE.json` says how many. Names and bytes depend only on the source's
# content, the tokenizer and the settings, so a part that has its record is never made again.

DEFAULT_PART_CHARS = 16 << 20  # characters of text per shard


@dataclass(frozen=True)
class _SourceFile:
    """One file to prepare, or the embedded corpus."""

    path: str  # a file, or "toyworld/train", "toyworld/validation"
    content: str  # sha256 of its bytes
    key: str  # hash of content, tokenizer and settings: the name of its shards
    field: str
    val_fraction: float  # 1.0: all of it is for validation
    part: int  # characters of text per shard


def is_validation(text: bytes, fraction: float) -> bool:
    """True if a document belongs to the validation split."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") < fraction * 2.0**64


def split_into_parts(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Group documents into parts of at least `size` characters (the last may have fewer)."""
    part, characters = [], 0
    for text in texts:
        part.append(text)
        characters += len(text)
        if characters >= size:
            yield part
            part, characters = [], 0
    if part:
        yield part


def _write(path: Path, data: bytes) -> dict[str, Any]:
    write_atomic(path, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_shard(folder: Path, name: str, tokens: np.ndarray, lengths: Sequence[int], bos: int) -> dict[str, Any]:
    """Write one shard; returns the manifest's entries for its two files. `tokens` begins each document with bos."""
    closed = np.append(tokens, tokens.dtype.type(bos)).tobytes()
    return {
        f"{name}.tokens": {**_write(folder / f"{name}.tokens", closed), "blocks": block_checksums(closed)},
        f"{name}.lengths": _write(folder / f"{name}.lengths", np.asarray(lengths, dtype="<u4").tobytes()),
    }


def encode_part(tokenizer: Tokenizer, out: Path, source: _SourceFile, number: int, texts: list[str]) -> dict[str, Any]:
    """Encode the documents of one part, write its shards and then its record."""
    dtype = TOKEN_DTYPES[dtype_for(tokenizer.vocab_size)]
    tokens: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    text_bytes = {"train": 0, "val": 0}
    for text in texts:
        raw = text.encode()
        split = "val" if is_validation(raw, source.val_fraction) else "train"
        tokens[split].append(np.array([tokenizer.bos, *tokenizer.encode(text)], dtype=dtype))
        text_bytes[split] += len(raw)
    record: dict[str, Any] = {"splits": {}, "files": {}}
    for split, pieces in tokens.items():
        if pieces:
            name = f"{split}-{source.key}-{number:05d}"
            lengths = [len(piece) for piece in pieces]
            record["files"].update(write_shard(out, name, np.concatenate(pieces), lengths, tokenizer.bos))
            counts = {"documents": len(pieces), "tokens": sum(lengths), "text_bytes": text_bytes[split]}
            record["splits"][split] = {"part": name, **counts}
    write_atomic(record_path(out, source, number), json.dumps(record))
    return record


def dtype_for(vocab_size: int) -> str:
    """Name of the smallest dtype that holds every token id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def record_path(out: Path, source: _SourceFile, number: int | None = None) -> Path:
    return out / "progress" / (f"{source.key}.json" if number is None else f"{source.key}-{number:05d}.json")


def load_record(out: Path, path: Path) -> dict[str, Any] | None:
    """Load a record, if its files are all there with the right size; None makes the part be written again."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        right = all((out / name).stat().st_size == about["bytes"] for name, about in record.get("files", {}).items())
    except (OSError, ValueError):
        return None
    return record if right else None


def record_finished(out: Path, source: _SourceFile, parts: int, counts: ReadCounts) -> None:
    write_atomic(record_path(out, source), json.dumps({"parts": parts, **asdict(counts)}))


def finished_records(out: Path, source: _SourceFile) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Load the records of a source and of its parts, if all are there."""
    done = load_record(out, record_path(out, source))
    if done is None:
        return None
    parts = [load_record(out, record_path(out, source, number)) for number in range(done["parts"])]
    return None if None in parts else (done, [part for part in parts if part is not None])


TOYWORLD = "toyworld"
DEFAULT_VAL_FRACTION = 0.01  # of the documents
# Names of our files, finished or left half-written: shards, and records in progress/.
SHARD = re.compile(r"\.?(train|val)-[0-9a-f]{16}-\d{5,}\.(tokens|lengths)(\.\d+\.tmp)?")
RECORD = re.compile(r"\.?([0-9a-f]{16}(-\d{5,})?|sources)\.json(\.\d+\.tmp)?")


def _read(source: _SourceFile, counts: ReadCounts) -> Iterator[str]:
    if source.path.startswith(TOYWORLD + "/"):
        from ascendchat.data import toyworld

        for text in toyworld.documents(source.path.split("/")[1]):
            counts.documents += 1
            yield text
    else:
        yield from file_documents(Path(source.path), source.field, counts)


# In a worker: the tokenizer is loaded once, and the process ends when its parent has ended.
_worker: dict[str, Any] = {}


def _start_worker(tokenizer: str, out: str) -> None:
    from ascendchat.data.tokenizer.tokenizer import Tokenizer

    _worker.update(tokenizer=Tokenizer.load(tokenizer), out=Path(out))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_part(source: _SourceFile, number: int, texts: list[str]) -> None:
    encode_part(_worker["tokenizer"], _worker["out"], source, number, texts)


def _work_source(source: _SourceFile) -> None:
    """Prepare a whole file in one worker: read, encode, record."""
    counts, number = ReadCounts(), -1
    for number, texts in enumerate(split_into_parts(_read(source, counts), source.part)):
        if load_record(_worker["out"], record_path(_worker["out"], source, number)) is None:
            _work_part(source, number, texts)
    record_finished(_worker["out"], source, number + 1, counts)


def encode_all(sources: Sequence[_SourceFile], out: Path, tokenizer: str, workers: int) -> None:
    """Encode what is not done yet. Many files: a worker takes a file. Few: this process reads, workers take parts."""
    pending = [source for source in sources if finished_records(out, source) is None]
    if not pending:
        return
    spawn = multiprocessing.get_context("spawn")  # a forked child inherits locks and threads
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(tokenizer, str(out)))
    started = time.monotonic()
    by_file = len(pending) >= 4 * workers
    try:
        done = _files(pool, pending) if by_file else _parts(pool, pending, out, workers)
        for count, source in enumerate(done, 1):
            print(f"{source.path}: done ({count} of {len(pending)}), {time.monotonic() - started:.0f} s", flush=True)
    except BrokenProcessPool:
        raise UserError(
            "a worker was killed, most likely for lack of memory; run the same command again with fewer --workers: "
            "what is done is kept"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _files(pool: ProcessPoolExecutor, pending: Sequence[_SourceFile]) -> Iterator[_SourceFile]:
    """Hand whole files to the workers; yields each source when it is done."""
    running = {pool.submit(_work_source, source): source for source in pending}
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            future.result()
            yield running.pop(future)


def _parts(pool: ProcessPoolExecutor, pending: Sequence[_SourceFile], out: Path, workers: int) -> Iterator[_SourceFile]:
    """Read the files here, one after the other, and hand their parts to the workers; yields each source when it is
    done. At most two parts more than there are workers are held in memory."""
    running: dict[Future[None], _SourceFile] = {}
    unread = {source.key for source in pending}

    def settle(limit: int) -> None:
        while len(running) > limit:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                del running[future]

    finished: dict[str, tuple[_SourceFile, int, ReadCounts]] = {}
    for source in pending:
        counts, number = ReadCounts(), -1
        for number, texts in enumerate(split_into_parts(_read(source, counts), source.part)):
            if load_record(out, record_path(out, source, number)) is None:
                settle(workers)
                running[pool.submit(_work_part, source, number, texts)] = source
        unread.discard(source.key)
        finished[source.key] = (source, number + 1, counts)
        if not unread:
            settle(0)
        busy = {source.key for source in running.values()}
        for key in [key for key in finished if key not in busy]:
            finished_source, parts, counts_of_one = finished.pop(key)
            record_finished(out, finished_source, parts, counts_of_one)
            yield finished_source


def _identity(path: Path, cache: dict[str, Any]) -> str:
    """sha256 of a source file; cached by path, size and time of change, so that a second run need not read it."""
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    cached = cache.get(str(path.resolve()))
    if cached is None or cached["stamp"] != stamp:
        cache[str(path.resolve())] = {"stamp": stamp, "sha256": sha256(path)}
    return str(cache[str(path.resolve())]["sha256"])


def _key(*facts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *facts]).encode()).hexdigest()[:16]


def find_sources(
    names: Sequence[str],
    field: str,
    val_fraction: float | None,
    part: int,
    tokenizer: str,
    out: Path,
    leave_out: Sequence[Path] = (),
) -> list[_SourceFile]:
    """List the files behind the names a user gave; `tokenizer` is its fingerprint, `leave_out` folders are not
    searched. A set's own validation file is not trained on: it validates, unless nothing here does (`val_fraction`
    is 0)."""
    checksums_path = out / "progress" / "sources.json"
    checksums: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        checksums = json.loads(checksums_path.read_text(encoding="utf-8"))
    sources: list[_SourceFile] = []
    for name in names:
        if name == TOYWORLD:  # it has its own splits
            share = DEFAULT_VAL_FRACTION if val_fraction is None else val_fraction
            splits = [("train", 0.0)] * (share < 1) + [("validation", 1.0)] * (share > 0)
            for split, fraction in splits:
                content = _toyworld_content(split)
                key = _key(content, fraction, part, tokenizer)
                sources.append(_SourceFile(f"{TOYWORLD}/{split}", content, key, field, fraction, part))
            continue
        fetched = home() / "data" / name.replace("/", "--")  # as data fetch names it
        path = fetched if not Path(name).exists() and fetched.is_dir() else Path(name)
        files = source_files([path], leave_out)
        held_out = set() if path in files else validation_files(files)  # a file named by the user is trained on
        default = 0.0 if held_out else DEFAULT_VAL_FRACTION
        for file in files:
            share = 1.0 if file in held_out else default if val_fraction is None else val_fraction
            if file in held_out:
                print(f"{file} is for validation only: {'left out' if val_fraction == 0 else 'not trained on'}")
            if file in held_out and val_fraction == 0:
                continue
            content = _identity(file, checksums)
            key = _key(content, format_of(file.name), field, share, part, tokenizer)
            sources.append(_SourceFile(str(file), content, key, field, share, part))
    write_atomic(checksums_path, json.dumps(checksums))
    return sources


def _without_copies(sources: Sequence[_SourceFile], names: Sequence[str]) -> list[_SourceFile]:
    """Drop sources with the same content as another; one that validates stays rather than one that trains. Two that the
    user named are an error; others (empty parts of a folder, say) are dropped with a line."""
    times_named = Counter(str(Path(name)) for name in names)
    first_with: dict[str, _SourceFile] = {}
    kept_numbers, copies = set[int](), list[_SourceFile]()
    for number, source in sorted(enumerate(sources), key=lambda entry: entry[1].val_fraction < 1):
        other = first_with.setdefault(source.content, source)
        if other is source:
            kept_numbers.add(number)
            continue
        paths = [TOYWORLD if path.startswith(TOYWORLD + "/") else path for path in (source.path, other.path)]
        if all(times_named[path] >= paths.count(path) for path in paths):
            raise UserError(
                f"{source.path} and {other.path} have the same content; name it once (a source that shall "
                "count more gets a greater weight: --weights)"
            )
        copies.append(source)
    if copies:
        first, more = copies[0], f" and {len(copies) - 1} more" if len(copies) > 1 else ""
        print(f"left out: {first.path} (the same content as {first_with[first.content].path}){more}")
    return [source for number, source in enumerate(sources) if number in kept_numbers]


def _toyworld_content(split: str) -> str:
    from ascendchat.data import toyworld

    digest = hashlib.sha256()
    for text in toyworld.documents(split):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def build_manifest(sources: Sequence[_SourceFile], out: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Build the manifest of a folder whose sources are all finished."""
    splits: dict[str, Any] = {
        name: {"documents": 0, "tokens": 0, "text_bytes": 0, "parts": []} for name in ("train", "val")
    }
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "dtype": dtype_for(tokenizer.vocab_size),
        "splits": splits,
        "sources": [],
        "files": {},
    }
    for source in sources:
        records = finished_records(out, source)
        if records is None:
            raise UserError(f"files of {source.path} vanished from {out} while it was written; run the command again")
        done, parts = records
        manifest["sources"].append({"name": Path(source.path).name, "key": source.key, **done})
        for part in parts:
            manifest["files"].update(part["files"])
            for name, about in part["splits"].items():
                splits[name]["parts"].append(about["part"])
                for total in ("documents", "tokens", "text_bytes"):
                    splits[name][total] += about[total]
    return manifest


def _tidy(out: Path, sources: Sequence[_SourceFile], manifest: dict[str, Any]) -> None:
    """Remove shards and records that the new manifest does not name: earlier sources, tokenizers or settings. Only
    files with the names that we give are touched."""
    current_keys = {"sources", *(source.key for source in sources)}
    for path in out.iterdir():
        if SHARD.fullmatch(path.name) and path.name not in manifest["files"] and path.is_file():
            path.unlink()
    for path in (out / "progress").iterdir():
        stale = path.name.endswith(".tmp") or re.split(r"[-.]", path.name)[0] not in current_keys
        if stale and RECORD.fullmatch(path.name) and path.is_file():
            path.unlink()


def _name_dropped(out: Path, before: str, manifest: dict[str, Any]) -> None:
    """Print the sources of the old manifest that the new one does not have; their shards will be removed."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        names = {source["name"] for source in json.loads(before)["sources"]}
        for name in sorted(names - {source["name"] for source in manifest["sources"]}):
            print(f"{name} is no longer part of {out}: it was not named this time")


def _refuse_foreign(out: Path) -> None:
    """Refuse a folder where our manifest or records would replace files that are not ours."""
    required_keys = {MANIFEST: "splits", MIXTURE: "corpora", "progress/sources.json": None}
    foreign = [out / "progress"] if (out / "progress").is_file() else []
    for name, required in required_keys.items():
        with contextlib.suppress(OSError, ValueError):  # none, or a damaged one, which is made anew
            content = json.loads((out / name).read_text(encoding="utf-8"))
            ours = isinstance(content, dict) and (required is None or required in content)
            if ours and required is None:
                ours = all(
                    isinstance(about, dict) and {"stamp", "sha256"} <= about.keys() for about in content.values()
                )
            if not ours:
                foreign.append(out / name)
    if foreign:
        raise UserError(
            f"{foreign[0]} was not written by `ascendchat data prepare`; choose another folder with --out, or move it"
        )


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock the folder: only one `data prepare` writes into it at a time."""
    check_folder(out)
    _refuse_foreign(out)
    (out / "progress").mkdir(parents=True, exist_ok=True)
    with (out / "progress" / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another `ascendchat data prepare` is writing into {out}; wait for it to end") from None
        yield


def prepare(
    given: Sequence[str],
    tokenizer: str | Path,
    out: Path,
    *,
    field: str = "text",
    val_fraction: float | None = None,
    val_given: Sequence[str] = (),
    workers: int | None = None,
    part: int = DEFAULT_PART_CHARS,
    leave_out: Sequence[Path] = (),
) -> dict[str, Any]:
    """Prepare sources into one folder; returns its manifest. The folder then holds these sources and no others. Our own
    output is not read where it lies below a source: `out`, the tokenizer and the folders in `leave_out`."""
    from ascendchat.data.tokenizer.tokenizer import Tokenizer

    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: at least one process is needed")
    loaded = Tokenizer.load(tokenizer)
    workers = workers or cpu_count()
    skip = (out, Path(tokenizer), *leave_out)
    with _alone(out):
        fraction = 0.0 if val_given else val_fraction
        sources = find_sources([*given], field, fraction, part, loaded.fingerprint, out, skip)
        sources += find_sources([*val_given], field, 1.0, part, loaded.fingerprint, out, skip) if val_given else []
        sources = _without_copies(sources, [*given, *val_given])
        encode_all(sources, out, str(tokenizer), workers)
        manifest = build_manifest(sources, out, loaded)
        text = json.dumps(manifest, indent=1)
        path = out / MANIFEST
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if before != text:
            _name_dropped(out, before, manifest)
            write_atomic(path, text)
        _tidy(out, sources, manifest)
    return manifest


def run(config: DataPrepareConfig) -> int:
    """Run `ascendchat data prepare`."""
    sources = [*config.source, *config.paths]
    if config.out and any(
        Path(name).is_dir() and Path(name).resolve() == Path(config.out).resolve() for name in sources
    ):
        raise UserError(f"{config.out} is a source and --out at once; give the output a folder of its own")
    if not sources:
        raise UserError("name what to prepare: ascendchat data prepare --source FILES --tokenizer DIR --out DIR")
    if config.weights and len(config.weights) != len(sources):
        raise UserError(f"{len(config.weights)} weights for {len(sources)} sources; give one per source")
    tokenizer = Path(config.tokenizer) if config.tokenizer else home() / "tokenizer"
    out = Path(config.out) if config.out else home() / "data" / "prepared"
    if not config.weights:
        _report(out, prepare(sources, tokenizer, out, **_settings(config, out, first=True)))
        (out / MIXTURE).unlink(missing_ok=True)
        return 0
    _refuse_foreign(out)
    corpora = []
    for number, (name, weight) in enumerate(zip(sources, config.weights)):
        folder = f"{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', Path(name).name).strip('-') or 'source'}"
        _report(out / folder, prepare([name], tokenizer, out / folder, **_settings(config, out, first=number == 0)))
        corpora.append((folder, weight))
    write_mixture(out, corpora)
    return 0


def _settings(config: DataPrepareConfig, out: Path, first: bool) -> dict[str, Any]:
    """Keyword arguments of `prepare`. With weights, validation files belong to the first corpus only."""
    return {
        "field": config.field,
        "val_fraction": 0.0 if config.val_source else config.val_fraction,
        "val_given": config.val_source if first else (),
        "workers": config.workers,
        "leave_out": [out],
    }


def _report(out: Path, manifest: dict[str, Any]) -> None:
    print(f"{out}: vocabulary {manifest['vocab_size']}, {manifest['dtype']}")
    for name, about in manifest["splits"].items():
        ratio = about["text_bytes"] / max(1, about["tokens"] - about["documents"])
        print(
            f"  {name:<5} {about['documents']:,} documents, {about['tokens']:,} tokens (every one is used), "
            f"{about['text_bytes']:,} bytes of text, {ratio:.2f} bytes per token"
        )
    for source in manifest["sources"]:
        if source["empty"] or source["broken"]:
            example = f", the first: {source['example']}" if source["broken"] else ""
            print(
                f"  {source['name']}: left out {source['empty']} empty and {source['broken']} unreadable rows{example}"
            )
