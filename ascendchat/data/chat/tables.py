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
from ascendchat.data.read import BETWEEN, BINARY, JSON_LINES, cells, format_of, record_batches, table_lines, unpack
from ascendchat.errors import UserError
from ascendchat.runs.console import inert

TableRow = dict[str, Any]
TABLE_TYPES = (".parquet", *JSON_LINES, ".json", ".tsv", ".csv", ".txt", ".arrow")  # text types may be compressed
# Keys of a message
CALLS = "tool_calls", "function_call"  # as OpenAI writes them today and wrote them before
SPEAKER, TEXTS = ("role", "from"), ("content", "value")  # a null text is an empty one
THOUGHTS = "reasoning_content", "reasoning", "thinking"  # of the assistant, before it speaks
NAMES = frozenset("prompt completion query response question answer instruction input output chosen rejected".split())
# Keys that the readers use
MESSAGE_FIELDS = {
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
# A bracket of JSON, or a whole string, so that brackets inside strings are skipped; an unclosed string ends the file
BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
WRAPPERS = "data", "instances", "examples", "rows"  # names of all rows of a file
MAX_SHOWN_SKIPPED = 3  # skipped rows that a message names
ROW_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # raised by a row of another form
Row = TypeVar("Row")


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) of a file; a row that is not UTF-8 or not JSON is replaced by the ValueError that says so."""
    with path.open("rb") as file:
        yield from entries_in(file, path.name)


def entries_in(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) of an open file, whose name tells its format."""
    kind, packing = format_of(name)
    if kind in BINARY:
        rows = (row for batch in record_batches(file, name) for row in cells(batch))
        yield from ((f"row {number}", without_union(row)) for number, row in enumerate(rows, 1))
        return
    with closing(unpack(file, packing)) as raw:
        if kind == ".csv":
            yield from _csv(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""), name)
        elif kind == ".tsv":
            yield from _tsv(raw)
        elif kind == ".txt":
            yield from ((where, decode_line(line, _text)) for where, line in _lines(raw))
        else:
            yield from _json(raw, kind)


def without_union(row: Any) -> Any:
    """Drop the nulls that stand in a row's structs only because other rows have such a field: all structs of one
    column have the same fields. A null that the author wrote cannot be told from them."""
    if not isinstance(row, dict):
        return row
    return {name: _without_nulls(value) if isinstance(value, (dict, list)) else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    text_keys = () if value.keys().isdisjoint(SPEAKER) else TEXTS  # in arguments of a call, names like others
    fields = ((name, inner) for name, inner in value.items() if inner is not None or name in text_keys)
    return {name: _without_nulls(inner) for name, inner in fields}


def _lines(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield non-empty lines; they end at \\n only, for a text may hold other line breaks."""
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield f"line {number}", line


def decode_line(line: bytes, make: Callable[[str], Any]) -> Any:
    """Decode the row in a line; an error is returned in its place."""
    try:
        return make(line.decode().rstrip("\r\n"))
    except json.JSONDecodeError as error:
        return ValueError(f"{error.msg}: column {error.colno}")
    except (ValueError, RecursionError) as error:
        return error


def _cells(text: str) -> TableRow:
    return {"cells": text.split("\t")}


def _tsv(file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield rows under the names in the first line, if two of them are known columns; else cells without a name."""
    header: list[str] = []
    for number, (where, line) in enumerate(_lines(file)):
        row = decode_line(line, _cells)
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
    """Yield rows under the names in the first line."""
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
    """Decode JSON by lines; or, if the first line is not a complete value, values over several lines, in lists or
    not. The rows of a list are rows of the file; a list of messages is one row, a conversation, as nanochat
    writes them."""
    lines, first = _lines(file), True
    head = list(itertools.islice(lines, 2))
    lines = itertools.chain(head, lines)
    for where, line in lines:
        row, stripped = decode_line(line, json.loads), line.strip()
        row = (len(head) == 1 and unwrap_rows(row)) or row
        if first and isinstance(row, Exception) and (stripped == b"{" or stripped[:1] == b"["):
            next_where, next_line = next(lines, ("", b""))
            after = decode_line(next_line, json.loads) if kind in JSON_LINES and stripped != b"[" else None
            if not isinstance(after, (list, dict)):
                yield from values((line + next_line + file.read()).decode())
                return
            yield where, row  # a row of its own that is cut: the next line is whole
            where, row = next_where, after
        if not isinstance(row, list) or is_talk(row) or (not row and kind != ".json"):
            yield where, as_row(row)
        else:
            for number, inner in enumerate(row, 1):
                yield f"row {number}" if first else f"{where}, row {number}", as_row(inner)
        first = False


def unwrap_rows(value: Any) -> list[Any] | None:
    """The rows of an object that holds them under a name of its own: {"version": 1, "data": [{...}, ...]}. It must be
    alone in its file: objects beside each other are rows, whatever their columns are called."""
    if not isinstance(value, dict) or not value.keys().isdisjoint((*NAMES, "messages", "conversations", "text")):
        return None  # a row itself
    rows = next((value[name] for name in WRAPPERS if isinstance(value.get(name), list)), None)
    return rows if rows and all(isinstance(row, (dict, list)) for row in rows) and not is_talk(rows) else None


def is_talk(value: Any) -> bool:
    """True for a list of messages, judged by its first one."""
    return isinstance(value, list) and bool(value) and is_message(value[0])


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and (
        {"from", "value"} <= value.keys() or ("role" in value and not value.keys().isdisjoint(("content", *CALLS)))
    )


def as_row(value: Any) -> Any:
    """Wrap a list that stands in place of a row: it is a conversation."""
    return {"messages": value} if isinstance(value, list) else value


def values(text: str) -> Iterator[tuple[str, Any]]:
    """Decode JSON values one after the other, the items of a list one by one. After a broken value the rest cannot
    be found; one that is nested too deep is skipped."""
    decoder, number, at, inside = json.JSONDecoder(), 0, 0, False
    conversation: list[Any] | None = None  # the list that we are in, if it is one conversation
    while True:
        at = cast(re.Match[str], BETWEEN.match(text, at)).end()
        if text[at : at + 1] == ("]" if inside else "["):
            if conversation:
                number += 1
                yield f"row {number}", as_row(conversation)
            inside, at, conversation = not inside, at + 1, [] if not inside else None
            continue
        if at == len(text) and not inside:
            return
        try:
            row, at = decoder.raw_decode(text, at)
        except RecursionError as error:
            row, at = error, end_of_value(text, at)
        if conversation is not None and (conversation or is_message(row)):
            conversation.append(row)
            continue
        conversation = None
        alone = not (inside or number) and cast(re.Match[str], BETWEEN.match(text, at)).end() == len(text)
        for inner in (alone and unwrap_rows(row)) or [row]:
            number += 1
            yield f"row {number}", as_row(inner)


def end_of_value(text: str, at: int) -> int:
    """Index behind the JSON list or object that begins at `at`."""
    depth = 0
    for bracket in BRACKET.finditer(text, at):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0)
        if not depth:
            return bracket.end()
    raise ValueError("the file ends in the middle of a row")


def describe_error(error: Exception) -> str:
    """Tell what is wrong with a row, in words."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return f"the column {error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())


@dataclass
class RowBudget:
    """Number of rows that may still be read, of all files of a data set together."""

    left: int

    def take(self, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield rows of a file until the budget is used up."""
        while self.left > 0 and (row := next(rows, None)):
            self.left -= 1
            yield row


class TrackedRow(TableRow):
    """A row that records which of its columns were read."""

    def __init__(self, row: TableRow) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Get a column, and record that it was read."""
        self.read.add(name)
        return super().get(name, default)

    def unused(self) -> Iterator[str]:
        """Yield the columns that hold something and were not read, also those of messages in the others."""
        for name, value in self.items():
            if value in (None, "", [], {}):
                continue
            if name not in self.read:
                yield str(name)
            elif is_talk(value):
                parts = (part for entry in value if isinstance(entry, dict) for part in entry.items())
                yield from (f"{name}.{key}" for key, content in parts if key not in MESSAGE_FIELDS and content)


def unused_line(name: str, unused: Iterable[str]) -> str:
    """Format one line for the log."""
    return f"{name}: columns that are not used: {inert(', '.join(unused))}"


@dataclass
class _SkippedRows:
    """The rows of a file that could not be read."""

    name: str  # of the file
    rows: int = 0  # all of them
    count: int = 0
    first: list[str] = field(default_factory=list)  # where the first ones are, and what is wrong with each

    def add(self, where: str, why: str) -> None:
        """Count one."""
        self.count += 1
        if len(self.first) < MAX_SHOWN_SKIPPED:
            self.first.append(f"{where}: {why}")

    @property
    def too_many(self) -> bool:
        """True if the file is not what it seems to be."""
        return read.too_many(self.count, self.rows)

    def line(self) -> str:
        """Format one line for the log."""
        return f"{self.name}: {self.count} of {self.rows} rows cannot be read: {inert('; '.join(self.first))}"


def check_table(path: str | Path) -> Path:
    """Return the path, if its name is that of a file of conversations."""
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
    limit: RowBudget | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Yield the result of `read_row` for each row of a table; rows that it cannot read are counted and left out. It
    raises a UserError for unknown columns: those of another row may be known."""
    skipped, read_any, unknown_columns = _SkippedRows(path.name), False, None
    try:
        for where, row in limit.take(entries(path)) if limit else entries(path):
            skipped.rows += 1
            try:
                if isinstance(row, Exception):
                    raise row
                if not isinstance(row, dict):
                    raise ValueError(f"it is {type(row).__name__}, not an object with named columns")
                parsed = read_row(row)
            except UserError as error:
                unknown_columns = unknown_columns or error
                skipped.add(where, f"it has the columns {', '.join(row) or '(none)'}")
            except ROW_ERRORS as error:
                skipped.add(where, describe_error(error))
                read_any = read_any or isinstance(row, dict)
            else:
                read_any = True
                yield parsed
            if skipped.count > 1000 and skipped.too_many:
                break  # no need to read the wrong thing to its end
    except (ValueError, *read.UNREADABLE) as error:  # of the file, not of a row
        raise UserError(
            f"{path.name} cannot be read beyond row {skipped.rows}: {read.reason(error)}; fetch or write it again"
        ) from error
    if not skipped.rows:
        raise UserError(f"{path.name} is empty; name a file with at least one row")
    if not read_any and unknown_columns is not None:
        raise unknown_columns
    if skipped.too_many:
        raise UserError(f"{skipped.line()}; more than 1 % is too much: mend these rows or take them out")
    if skipped.count:
        say(f"{skipped.line()}; left out")
