"""Rows of the files that hold conversations and evaluation sets: json, jsonl, csv, tsv, txt, parquet and arrow.

    for where, row in entries(Path("chats.jsonl.xz")): ...     # ("line 1", {"messages": [...]})

`ascendchat sft --data FILE` reads through here (formats.py says what the rows become), `ascendchat eval chat
--source DIR` too. Documents for `ascendchat data prepare` are read by data/read.py.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from ascendchat.data import read
from ascendchat.data.read import BETWEEN, BINARY, LINES, cells, format_of, record_batches, table_lines, unpack
from ascendchat.errors import UserError
from ascendchat.runs.console import inert

TableRow = dict[str, Any]
TABLE_TYPES = (".parquet", *LINES, ".json", ".tsv", ".csv", ".txt", ".arrow")  # those of text may be packed: .gz ...
CALLS = "tool_calls", "function_call"  # of a message, as OpenAI writes them today and wrote them before
SPEAKER, TEXTS = ("role", "from"), ("content", "value")  # of a message: null in place of its text is no text
THOUGHTS = "reasoning_content", "reasoning", "thinking"  # of a message: what the assistant thinks before it speaks
NAMES = frozenset("prompt completion query response question answer instruction input output chosen rejected".split())
# What is read of a message, or says which call a result belongs to
OF_MESSAGE = {
    "from",
    "value",
    "role",
    "content",
    *CALLS,
    *THOUGHTS,
    "weight",
    "loss",
    "train",
    "training",
    "name",
    "tool_call_id",
}
# A bracket of JSON, or a text, since one in a text is none; a text without an end goes on to that of the file
BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
WRAPPERS = "data", "instances", "examples", "rows"  # names of all rows of a file
SHOWN_UNREAD = 3  # rows that could not be read, named
OF_ANOTHER_FORM = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what such a row raises
Row = TypeVar("Row")


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of a file; in place of a row that is not UTF-8 or not JSON, the ValueError that says so."""
    with path.open("rb") as file:
        yield from entries_in(file, path.name)


def entries_in(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    """The same of an open file, whose name tells its format."""
    kind, packing = format_of(name)
    if kind in BINARY:
        every = (row for batch in record_batches(file, name) for row in cells(batch))
        yield from ((f"row {number}", without_union(row)) for number, row in enumerate(every, 1))
        return
    with closing(unpack(file, packing)) as raw:
        if kind == ".csv":
            yield from _csv(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""), name)
        elif kind == ".tsv":
            yield from _tsv(raw)
        elif kind == ".txt":
            yield from ((where, decoded(line, _text)) for where, line in _lines(raw))
        else:
            yield from _json(raw, kind)


def without_union(row: Any) -> Any:
    """The row of a table without the nulls that stand in its structs only since those of other rows have such a field:
    in one column all structs have the same. A null of the author's own cannot be told from them."""
    if not isinstance(row, dict):
        return row
    return {name: _without_nulls(value) if isinstance(value, (dict, list)) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = () if value.keys().isdisjoint(SPEAKER) else TEXTS  # elsewhere, as in arguments, they are names like others
    held = ((name, inner) for name, inner in value.items() if inner is not None or name in kept)
    return {name: _without_nulls(inner) for name, inner in held}


def _lines(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Lines with something in them; they end at \\n only, for a text may hold other line breaks."""
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield f"line {number}", line


def decoded(line: bytes, make: Callable[[str], Any]) -> Any:
    """The row in a line, or what is wrong with it."""
    try:
        return make(line.decode().rstrip("\r\n"))
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg}: column {error.colno}")
    except (ValueError, RecursionError) as error:
        return error


def _cells(text: str) -> TableRow:
    return {"cells": text.split("\t")}


def _tsv(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Rows under the names in the first line, if two of them are those of columns; else cells without a name."""
    header: list[str] = []
    for number, (where, line) in enumerate(_lines(file)):
        row = decoded(line, _cells)
        if number == 0 and isinstance(row, dict) and len(NAMES.intersection(row["cells"])) > 1:
            header = row["cells"]
        elif not header or isinstance(row, Exception):
            yield where, row
        elif len(row["cells"]) == len(header):
            yield where, dict(zip(header, row["cells"]))
        else:
            yield where, ValueError(f"{len(row['cells'])} columns instead of {len(header)}")


def _text(text: str) -> TableRow:
    return {"text": text}


def _csv(text: IO[str], name: str) -> Iterator[tuple[str, Any]]:
    """Rows under the names in the first line."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    table = csv.reader(text, strict=True)
    header: list[str] = []
    for row in filter(None, table_lines(table, name)):
        where = f"line {table.line_num}"
        if not header:
            header = row
        elif len(row) == len(header):
            yield where, dict(zip(header, row))
        else:
            yield where, ValueError(f"{len(row)} columns instead of {len(header)}")


def _json(file: IO[bytes], kind: str) -> Iterator[tuple[str, Any]]:
    """JSON by lines; or, where the first is not a whole value, values over several lines, in lists or not. The rows of
    a list are rows of the file; a list of messages is one row, a conversation, as nanochat writes them."""
    lines, first = _lines(file), True
    head = list(itertools.islice(lines, 2))
    lines = itertools.chain(head, lines)
    for where, line in lines:
        row, bare = decoded(line, json.loads), line.strip()
        row = (len(head) == 1 and wrapped(row)) or row
        if first and isinstance(row, Exception) and (bare == b"{" or bare[:1] == b"["):
            behind, more = next(lines, ("", b""))
            after = decoded(more, json.loads) if kind in LINES and bare != b"[" else None
            if not isinstance(after, (list, dict)):
                yield from values((line + more + file.read()).decode())
                return
            yield where, row  # a row of its own that is cut: the next line is whole
            where, row = behind, after
        if not isinstance(row, list) or is_talk(row) or (not row and kind != ".json"):
            yield where, as_row(row)
        else:
            for number, inner in enumerate(row, 1):
                yield f"row {number}" if first else f"{where}, row {number}", as_row(inner)
        first = False


def wrapped(value: Any) -> list[Any] | None:
    """The rows of an object that holds them under a name of its own: {"version": 1, "data": [{...}, ...]}. It must be
    alone in its file: objects beside each other are rows, whatever their columns are called."""
    if not isinstance(value, dict) or not value.keys().isdisjoint((*NAMES, "messages", "conversations", "text")):
        return None  # a row itself
    rows = next((value[name] for name in WRAPPERS if isinstance(value.get(name), list)), None)
    return rows if rows and all(isinstance(row, (dict, list)) for row in rows) and not is_talk(rows) else None


def is_talk(value: Any) -> bool:
    """Whether this is a list of messages: told by its first one."""
    return isinstance(value, list) and bool(value) and is_message(value[0])


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and (
        {"from", "value"} <= value.keys() or ("role" in value and not value.keys().isdisjoint(("content", *CALLS)))
    )


def as_row(value: Any) -> Any:
    """A list that stands where a row belongs is a conversation."""
    return {"messages": value} if isinstance(value, list) else value


def values(text: str) -> Iterator[tuple[str, Any]]:
    """JSON values one after the other, those of a list each for itself. Where one is broken the rest cannot be found;
    one that is nested too deep is passed over."""
    decoder, number, at, inside = json.JSONDecoder(), 0, 0, False
    talk: list[Any] | None = None  # the list that we are in, if it is one conversation
    while True:
        at = cast(re.Match[str], BETWEEN.match(text, at)).end()
        if text[at : at + 1] == ("]" if inside else "["):
            if talk:
                number += 1
                yield f"row {number}", as_row(talk)
            inside, at, talk = not inside, at + 1, [] if not inside else None
            continue
        if at == len(text) and not inside:
            return
        try:
            row, at = decoder.raw_decode(text, at)
        except RecursionError as error:
            row, at = error, end_of(text, at)
        if talk is not None and (talk or is_message(row)):
            talk.append(row)
            continue
        talk = None
        alone = not (inside or number) and cast(re.Match[str], BETWEEN.match(text, at)).end() == len(text)
        for inner in (alone and wrapped(row)) or [row]:
            number += 1
            yield f"row {number}", as_row(inner)


def end_of(text: str, at: int) -> int:
    """Where the JSON list or object that begins at `at` ends."""
    depth = 0
    for bracket in BRACKET.finditer(text, at):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0)
        if not depth:
            return bracket.end()
    raise ValueError("the file ends in the middle of a row")


def why_unread(error: Exception) -> str:
    """What is wrong with a row, in words."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return f"the column {error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())


@dataclass
class Allowance:
    """Rows that may still be read, of all files of a data set together."""

    left: int

    def take(self, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """So many rows of a file at most."""
        while self.left > 0 and (row := next(rows, None)):
            self.left -= 1
            yield row


class Watched(TableRow):
    """A row that knows which of its columns were read."""

    def __init__(self, row: TableRow) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of every dict."""
        self.read.add(name)
        return super().get(name, default)

    def unused(self) -> Iterator[str]:
        """The columns that hold something and were not read, and so of the messages in the others."""
        for name, value in self.items():
            if value in (None, "", [], {}):
                continue
            if name not in self.read:
                yield str(name)
            elif is_talk(value):
                parts = (part for entry in value if isinstance(entry, dict) for part in entry.items())
                yield from (f"{name}.{key}" for key, held in parts if key not in OF_MESSAGE and held)


def unused_line(name: str, unused: Iterable[str]) -> str:
    """One line for the log."""
    return f"{name}: columns that are not used: {inert(', '.join(unused))}"


@dataclass
class _Unread:
    """The rows of a file that could not be read."""

    name: str  # of the file
    rows: int = 0  # all of them
    count: int = 0
    first: list[str] = field(default_factory=list)  # where the first ones are, and what is wrong with each

    def add(self, where: str, why: str) -> None:
        """Count one."""
        self.count += 1
        if len(self.first) < SHOWN_UNREAD:
            self.first.append(f"{where}: {why}")

    @property
    def too_many(self) -> bool:
        """Whether the file is not what it seems to be."""
        return read.too_many(self.count, self.rows)

    def line(self) -> str:
        """One line for the log."""
        return f"{self.name}: {self.count} of {self.rows} rows cannot be read: {inert('; '.join(self.first))}"


def check_table(path: str | Path) -> Path:
    """The path, if it is a file of conversations by its name."""
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"{path} is not a file; name a json, jsonl, csv, tsv, txt, parquet or arrow file of conversations"
        )
    if format_of(path.name)[0] not in TABLE_TYPES:
        raise UserError(
            f"{path.name}: conversations are read from {' '.join(TABLE_TYPES)} files; convert it to .jsonl, with one "
            'line for each conversation, like {"prompt": "Who are you?", "completion": "A small assistant."}'
        )
    return path


def read_rows(
    path: Path,
    read_row: Callable[[TableRow], Row],
    *,
    limit: Allowance | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Row]:
    """What `read_row` makes of each row of a table; rows that it cannot read are counted and left out. A UserError of
    it means columns that it does not know: those of another row may be known."""
    unread, read_any, unknown = _Unread(path.name), False, None
    try:
        for where, row in limit.take(entries(path)) if limit else entries(path):
            unread.rows += 1
            try:
                if isinstance(row, Exception):
                    raise row
                if not isinstance(row, dict):
                    raise ValueError(f"it is {type(row).__name__}, not an object with named columns")
                found = read_row(row)
            except UserError as error:
                unknown = unknown or error
                unread.add(where, f"it has the columns {', '.join(row) or '(none)'}")
            except OF_ANOTHER_FORM as error:
                unread.add(where, why_unread(error))
                read_any = read_any or isinstance(row, dict)
            else:
                read_any = True
                yield found
            if unread.count > 1000 and unread.too_many:
                break  # no need to read the wrong thing to its end
    except (ValueError, *read.UNREADABLE) as error:  # of the file, not of a row
        raise UserError(
            f"{path.name} cannot be read beyond row {unread.rows}: {read.reason(error)}; fetch or write it again"
        ) from error
    if not unread.rows:
        raise UserError(f"{path.name} is empty; name a file with at least one row")
    if not read_any and unknown is not None:
        raise unknown
    if unread.too_many:
        raise UserError(f"{unread.line()}; more than 1 % is too much: mend these rows or take them out")
    if unread.count:
        say(f"{unread.line()}; left out")
