"""Documents from files of any usual format: `ascendchat data prepare --source FILES`, `ascendchat tokenizer train`.

parquet, arrow    the column `field`, row group by row group
jsonl, ndjson     one JSON object a line with `field`, or one JSON string a line
json              a list of such objects or strings; several lists, objects or strings one after the other too
csv, tsv          the column `field`; the first line names the columns
txt               the whole file is one document; a line `<|endoftext|>` begins a new one, and so does the first blank
                  line after each MiB, so that a file of any size fits in memory
zip               every file in it that has one of these formats
All but parquet, arrow and zip may be compressed: .gz .bz2 .xz .zst. Text is UTF-8.

Nothing disappears silently: rows that cannot be read, and rows without text, are counted in ReadCounts, and more than
1 % unreadable rows in a file is an error that names the first of them.
"""

from __future__ import annotations

import bz2
import csv
import fnmatch
import glob
import gzip
import importlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ascendchat.data.surrogates import LONE_SURROGATE, has_lone_surrogate
from ascendchat.errors import UserError, nearest

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
JSON_LINES = (".jsonl", ".ndjson")
BINARY = (".parquet", ".arrow")  # compressed inside
SUFFIXES = (*BINARY, *JSON_LINES, ".json", ".csv", ".tsv", ".txt")
SEPARATOR = "<|endoftext|>"
TXT_DOCUMENT_CHARS = 1 << 20  # characters after which a blank line of a .txt ends the document
MAX_BROKEN_SHARE = 0.01  # of the rows of a file
# Files that describe the data of their folder, and hold no rows: of `data fetch`, LLaMA-Factory and `datasets`
METADATA_FILES = "manifest.json", "dataset_info.json", "state.json", "dataset_dict.json"
# Exceptions of damaged files; RuntimeError: an encrypted zip, JSON nested too deeply, an unknown compression.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, csv.Error, RuntimeError)
BETWEEN = re.compile(r"[ \t\r\n,]*")  # between two JSON values


@dataclass
class ReadCounts:
    """Number of documents, empty rows and unreadable rows of one file."""

    documents: int = 0
    empty: int = 0  # rows whose text is empty or null
    broken: int = 0  # rows that could not be read
    example: str = ""  # the first broken row: where, and what is wrong

    def fail(self, where: str, why: str) -> None:
        """Count an unreadable row."""
        self.broken += 1
        self.example = self.example or f"{where}: {why}"

    def check(self, name: str) -> None:
        """Raise if too many rows are unreadable: the file is not what it seems to be."""
        if too_many(self.broken, self.rows):
            raise UserError(
                f"{name}: {self.broken} of {self.rows} rows cannot be read, the first is {self.example}; "
                "fetch or write the file again, or remove these rows"
            )

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.documents + self.empty + self.broken


def too_many(broken: int, rows: int) -> bool:
    """True if a file is not what it seems to be: more than one row and more than 1 %, or half of a tiny file."""
    return broken > max(1, MAX_BROKEN_SHARE * rows) or 2 * broken >= max(1, rows)


def format_of(name: str) -> tuple[str, str]:
    """(format, compression) by the endings of a file's name; ("", "") for a file this module does not read."""
    stem, last = os.path.splitext(name.lower())
    packing = last if last in COMPRESSIONS else ""
    kind = os.path.splitext(stem)[1] if packing else last
    if kind == ".zip" and not packing:
        return ".zip", ""
    return (kind, packing) if kind in SUFFIXES and not (kind in BINARY and packing) else ("", "")


def may_be_data(path: Path) -> bool:
    """True if the name is that of a file with rows; without an ending also of a folder of such."""
    return not path.suffix or bool(format_of(path.name)[0])


def files_in(folder: Path, needed: Callable[[Path], bool] = may_be_data) -> list[Path]:
    """List the files below a folder, in a fixed order: those of linked folders too, but nothing hidden. A folder that
    links reach again is read once; a broken link is an error where its file is `needed`, for it would be missing
    silently."""
    paths, visited = list[Path](), set[str]()
    for folder_path, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(folder_path)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += (Path(folder_path, name) for name in names if not name.startswith("."))
    if broken := next((path for path in paths if path.is_symlink() and not path.exists() and needed(path)), None):
        raise UserError(f"{broken} is a link to nothing; copy the file that it names (cp -L), or remove the link")
    return sorted(path for path in paths if path.is_file())


def row_files(folder: Path) -> list[Path]:
    """List the files below a folder that may hold rows. Results that `datasets` computed from a saved set (map, filter)
    lie beside it as cache-*.arrow and repeat its rows: they are left out."""
    files = files_in(folder)
    return [p for p in files if p.name not in METADATA_FILES and not fnmatch.fnmatch(p.name, "cache-*.arrow")]


def source_files(paths: Sequence[str | Path], leave_out: Sequence[Path] = ()) -> list[Path]:
    """Resolve files, folders (searched to any depth) and patterns with * to files, in a fixed order, each once. Folders
    in `leave_out` are not searched: the output of a command is not one of its sources."""
    paths_by_target: dict[Path, Path] = {}  # resolved path -> path as it was given
    excluded = {folder.resolve() for folder in leave_out}
    for name in paths:
        path = Path(name)
        if path.is_dir():
            matches = [p for p in row_files(path) if format_of(p.name)[0]]
            if any(format_of(p.name)[0] != ".arrow" for p in matches):  # else they are copies that `datasets` keeps
                matches = [p for p in matches if format_of(p.name)[0] != ".arrow"]
            missing = f"the folder {path} holds no file of a known format"
        elif path.exists():
            matches = [path]
            missing = ""
        else:
            matches = [p for p in map(Path, sorted(glob.glob(str(name), recursive=True))) if p.is_file()]
            missing = f"there is no file or folder {name}"
        if missing and excluded:
            matches = [p for p in matches if not excluded.intersection(p.resolve().parents)]
        if not matches:
            raise UserError(f"{missing}; formats: {' '.join(SUFFIXES)} .zip, compressed or not")
        for match in matches:
            paths_by_target.setdefault(match.resolve(), match)
    unknown = [path for path in paths_by_target.values() if not format_of(path.name)[0]]
    if unknown:
        raise UserError(f"{unknown[0]} has no known format; formats: {' '.join(SUFFIXES)} .zip, compressed or not")
    return list(paths_by_target.values())


def read_documents(paths: Sequence[str | Path], leave_out: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the texts of all documents, file after file, without empty ones. Unreadable ones are reported in a line."""
    for path in source_files(paths, leave_out):
        counts = ReadCounts()
        yield from file_documents(path, "text", counts)
        if counts.broken:
            rows = f"{counts.broken} of {counts.rows} rows cannot be read, the first is {counts.example}"
            print(f"{path}: {rows}; left out", file=sys.stderr, flush=True)


def file_documents(path: Path, field: str, counts: ReadCounts) -> Iterator[str]:
    """Yield the texts of one file's documents. The counts are complete, and checked, once the iterator has ended."""
    try:
        if format_of(path.name)[0] == ".zip":
            yield from _checked(_zip(path, field, counts), str(path), counts)
            return
        with path.open("rb") as file:
            yield from _checked(_values(file, path.name, field, counts), str(path), counts)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({_short(error)}); convert it first, for example with iconv") from None
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def reason(error: BaseException) -> str:
    """The reason why a file could not be read, in a few words."""
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    if isinstance(error, RuntimeError) and "encrypted" in str(error):
        return "it is encrypted: unpack it with its password first"
    return _short(error)


def unreadable(path: object, error: BaseException, again: str = "fetch it again") -> UserError:
    """Build the error for a file whose reading ended with one of UNREADABLE."""
    if isinstance(error, (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)):
        return UserError(f"{path} is damaged or incomplete ({reason(error)}); {again}")
    remedy = "mend or remove that row" if isinstance(error, RecursionError) else again
    return UserError(
        f"{path} cannot be read ({reason(error)})" + ("" if "encrypted" in reason(error) else f"; {remedy}")
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _checked(values: Iterator[tuple[str, Any]], name: str, counts: ReadCounts) -> Iterator[str]:
    """(where, text) -> text; anything that is no text, or cannot be written as UTF-8, is counted."""
    for where, text in values:
        if text is None or text == "":
            counts.empty += 1
        elif isinstance(text, ValueError):
            counts.fail(where, reason(text))
        elif not isinstance(text, str):
            counts.fail(where, f"{type(text).__name__} instead of text")
        elif has_lone_surrogate(text):
            counts.fail(where, LONE_SURROGATE)
        else:
            counts.documents += 1
            yield text
        if counts.broken > 1000:
            counts.check(name)  # no need to read terabytes of the wrong thing to the end
    counts.check(name)


def _values(file: IO[bytes], name: str, field: str, counts: ReadCounts) -> Iterator[tuple[str, Any]]:
    """Yield (where, value of the field) of every row of an open file."""
    kind, packing = format_of(name)
    if kind in BINARY:
        yield from _columns(file, name, field)
        return
    raw = unpack(file, packing)
    if kind in JSON_LINES:
        yield from _jsonl(raw, name, field, counts)
    elif kind == ".json":
        yield from _json(io.TextIOWrapper(raw, encoding="utf-8-sig"), name, field, counts)
    elif kind == ".txt":
        yield from _txt(io.TextIOWrapper(raw, encoding="utf-8-sig"), name)
    else:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        yield from _csv(text, "\t" if kind == ".tsv" else ",", name, field, counts)


def need(module: str, name: str) -> Any:
    """Import a library that only some files need; the error gives the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(f"reading {name} needs {package} ({error}): pip install {package}") from None


def unpack(file: IO[bytes], packing: str) -> IO[bytes]:
    """Open the decompressed stream of an open file; packing is "", ".gz", ".bz2", ".xz" or ".zst"."""
    if packing == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if packing == ".bz2":
        return cast(IO[bytes], bz2.BZ2File(file))
    if packing == ".xz":
        return cast(IO[bytes], lzma.LZMAFile(file))
    if packing == ".zst":
        return cast(IO[bytes], io.BufferedReader(_Zstd(file), 1 << 20))
    return file


class _Zstd(io.RawIOBase):
    """Decompresses zstd frames one after the other. The library's own reader takes a truncated file for a whole one."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.held, self.rest = (
            file,
            b"",
            b"",
        )  # decompressed bytes not yet read, compressed ones of the next frame
        self.frame: Any = None  # decompressor of an unfinished frame
        self.zstandard = need("zstandard", getattr(file, "name", ".zst"))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.held:
            packed = self.rest or self.file.read(1 << 17)
            if not packed:
                if self.frame is not None:
                    raise EOFError("the file ends in the middle")
                return 0
            self.frame = self.frame or self.zstandard.ZstdDecompressor().decompressobj()
            try:
                self.held, self.rest = self.frame.decompress(packed), b""
            except self.zstandard.ZstdError as error:
                raise EOFError(str(error)) from None
            if self.frame.eof:
                self.frame, self.rest = None, self.frame.unused_data
        count = min(len(buffer), len(self.held))
        buffer[:count] = self.held[:count]
        self.held = self.held[count:]
        return count


def _pick(row: Any, field: str, name: str, first: bool) -> Any:
    """The text of a row. A first row without the field means a wrong field name; a later one is a broken row."""
    if isinstance(row, str):
        return row
    if isinstance(row, dict) and field in row:
        return row[field]
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} instead of an object or a text")
    if first:
        raise UserError(f"{name} has no field {field!r}: {nearest(field, [str(key) for key in row])}; use --field NAME")
    raise ValueError(f"no field {field!r}")


def _jsonl(raw: IO[bytes], name: str, field: str, counts: ReadCounts) -> Iterator[tuple[str, Any]]:
    first = True
    for number, line in enumerate(raw, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        where = f"line {number} of {name}"
        try:
            value = _pick(json.loads(line), field, name, first)
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or without the field
            counts.fail(where, reason(error))
            continue
        first = False
        yield where, value


def _json(text: IO[str], name: str, field: str, counts: ReadCounts) -> Iterator[tuple[str, Any]]:
    """Decode values one after the other, inside [ ] or not, as they arrive: the file may be larger than memory."""
    decoder, buffer, at, size, number = json.JSONDecoder(), "", 0, 1 << 16, 0
    ended, listed = False, False
    while True:
        at = cast(re.Match[str], BETWEEN.match(buffer, at)).end()
        if buffer[at : at + 1] == ("]" if listed else "["):
            listed, at = not listed, at + 1
            continue
        try:
            row, end = decoder.raw_decode(buffer, at)
            if end == len(buffer) and not ended:
                raise ValueError  # a number could go on
        except RecursionError as error:
            raise unreadable(f"row {number + 1} of {name}", error) from None
        except ValueError as error:
            if not ended:
                more = text.read(size)
                buffer, at, size, ended = buffer[at:] + more, 0, min(2 * size, 64 << 20), not more
                continue
            if at < len(buffer) or listed:
                raise UserError(f"{name} is not valid JSON after {number} rows ({_short(error)})") from None
            return
        at, number, size = end, number + 1, 1 << 16
        where = f"row {number} of {name}"
        try:
            value = _pick(row, field, name, number == 1)
        except ValueError as error:
            counts.fail(where, _short(error))
            continue
        yield where, value


def _txt(text: IO[str], name: str) -> Iterator[tuple[str, Any]]:
    lines: list[str] = []
    size = number = 0
    while line := text.readline(TXT_DOCUMENT_CHARS):
        bare = line.strip()
        if bare == SEPARATOR or (size >= TXT_DOCUMENT_CHARS and not bare):
            number += 1
            yield f"document {number} of {name}", "".join(lines).strip("\n")
            lines, size = [], 0
            continue
        lines.append(line)
        size += len(line)
    yield f"document {number + 1} of {name}", "".join(lines).strip("\n")


def table_lines(rows: Any, name: str) -> Iterator[list[str]]:
    """Yield the rows of a strict csv.reader. After a quote that is not closed the next row cannot be found."""
    begins = 1
    try:
        for row in rows:
            yield row
            begins = rows.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{name}: the row that begins in line {begins} has a quote that is not closed, or text behind a closing "
            f"quote ({error}); close it, write quotes in a text twice, or write the file as .jsonl"
        ) from None


def _csv(text: IO[str], delimiter: str, name: str, field: str, counts: ReadCounts) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    header = next(table_lines(rows, name), [])
    if header and field not in header:
        raise UserError(f"{name} has no column {field!r}: {nearest(field, header)}; use --field NAME")
    column = header.index(field) if header else 0
    for row in table_lines(rows, name):
        where = f"line {rows.line_num} of {name}"
        if len(row) == len(header):
            yield where, row[column]
        elif row:
            counts.fail(where, f"{len(row)} columns instead of {len(header)}")


def record_batches(file: Any, name: str, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the record batches of an open parquet or arrow file: these columns, which it must have, or all."""
    if format_of(name)[0] == ".parquet":
        table = need("pyarrow.parquet", name).ParquetFile(file)
        names = table.schema_arrow.names
        batches = table.iter_batches(batch_size=1024, columns=columns, use_threads=False)
    else:  # of `datasets`: a stream; of others also with a directory at its end
        ipc = need("pyarrow.ipc", name)
        begins = file.read(6) == b"ARROW1"
        file.seek(0)
        table = ipc.open_file(file) if begins else ipc.open_stream(file)
        names = table.schema.names
        batches = (table.get_batch(number) for number in range(table.num_record_batches)) if begins else table
    for column in columns or ():
        if column not in names:
            raise UserError(f"{name} has no column {column!r}: {nearest(column, names)}; use --field NAME")
    yield from batches


def cells(part: Any) -> list[Any]:
    """The values of a column, or the rows of a batch; a value whose text is not UTF-8 is replaced by the error."""
    try:
        return list(part.to_pylist())
    except UnicodeDecodeError as error:
        return [error] if len(part) == 1 else [cells(part.slice(at, 1))[0] for at in range(len(part))]


def _columns(file: IO[bytes], name: str, field: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        for batch in record_batches(file, name, [field]):
            for value in cells(batch.column(field)):
                number += 1
                yield f"row {number} of {name}", value
    except need("pyarrow", name).ArrowException as error:
        kind = format_of(name)[0].removeprefix(".")
        raise UserError(f"{name} is damaged or no {kind} file ({_short(error)}); fetch it again") from None


def _zip(path: Path, field: str, counts: ReadCounts) -> Iterator[tuple[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        names = sorted(n for n in archive.namelist() if not n.endswith("/") and "__MACOSX" not in n)
        readable = [n for n in names if format_of(n)[0] not in ("", ".zip")]
        if not readable:
            raise UserError(f"{path} holds no file of a known format: {' '.join(SUFFIXES)}")
        for name in readable:
            with archive.open(name) as member, tempfile.TemporaryFile() as seekable:
                file: IO[bytes] = member
                if format_of(name)[0] in BINARY:  # its directory is at the end: it must be seekable
                    shutil.copyfileobj(member, seekable)
                    seekable.seek(0)
                    file = cast(IO[bytes], seekable)
                yield from _values(file, f"{path.name}:{name}", field, counts)
