"""Rows of evaluation sets: fetched from a hub or a mirror, or in a folder of the user, packed or not.

    set_rows("mmlu", r"(^|/)mmlu[^/]*/", SPLIT["test"], "", make)          # what `ascendchat data fetch mmlu` stored
    set_rows("mmlu", r"(^|/)mmlu[^/]*/", SPLIT["test"], "DIR", make)       # `ascendchat eval chat --source DIR`

Files are recognised by their names: below the folder, and inside its .zip archives, those that match the patterns of
the set and of the split. Tables are csv (with or without a header), json, jsonl or parquet. A row that `make` cannot
read is an error that names it: without it the score would be another one.
"""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from ascendchat.data.chat.tables import ROW_ERRORS, Row, TableRow, describe_error, entries_in
from ascendchat.data.fetch import fetch
from ascendchat.data.read import UNREADABLE, files_in, format_of, table_lines, unpack, unreadable
from ascendchat.errors import UserError
from ascendchat.runs.console import inert

# Pattern of a split as a word of a path: test/x.csv, x_test.csv, test-00000-of-00001.parquet, test.jsonl.xz
SPLIT = {
    split: rf"(?:^|[/._-])(?:{words})(?=[/._-])"
    for split, words in {"train": "train", "val": "val|validation", "dev": "dev", "test": "test"}.items()
}
TABLES = (".parquet", ".jsonl", ".json", ".csv")  # the first of these that a folder has is read, never two
COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst", "")
# In a clone of a hub these hold the set; beside them lie its subjects once more, or another wording.
PREFERRED_FOLDERS = ("all/", "main/")


class NoFiles(UserError):
    """A set is not in the folder."""


class _TableFile(NamedTuple):
    """One table: its name from the folder on, the file, and the member if the file is an archive."""

    name: str
    path: Path
    member: str = ""


def files_below(root: Path) -> Iterator[_TableFile]:
    """Yield every file below a folder, also of linked folders, and every member of its archives; but nothing hidden."""
    for path in files_in(root):
        name = f"{root.name}/{path.relative_to(root).as_posix()}".lower()
        if path.suffix.lower() != ".zip":
            yield _TableFile(name, path)
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                members = sorted(archive.namelist())
        except UNREADABLE as error:
            raise unreadable(path, error, "fetch or copy it again") from None
        for member in members:
            if not member.endswith("/") and not re.search(r"(^|/)(\.|__MACOSX/)", member):
                yield _TableFile(f"{name}/{member.lower()}", path, member)


def kind_of(name: str) -> int | None:
    """Index of a file's format in TABLES."""
    ends = [tuple(table + packing for packing in COMPRESSIONS) for table in TABLES]
    return next((i for i, end in enumerate(ends) if name.endswith(end)), None)


def belongs(name: str, base: int, split: str) -> bool:
    """True if a file is of a split: by its name behind the set's, else by the folders before it, but not by the
    folder that the user gave, whose name may be anything."""
    file_part, before = name[base:], name[:base].partition("/")[2]
    says = any(re.search(pattern, file_part) for pattern in SPLIT.values())
    return re.search(split, file_part if says else f"/{before}/{file_part}") is not None


def tables(set_name: str, pattern: str, split: str, source: str) -> list[_TableFile]:
    """List the files of a split. A set that is there twice, in two folders, formats or parts, is read once."""
    root = Path(source).expanduser() if source else fetch(set_name)
    if not root.is_dir():
        raise NoFiles(f"--source {root} is not a folder; give the one that holds the evaluation sets")
    groups: dict[tuple[bool, int, str], list[_TableFile]] = {}
    for table in files_below(root):
        base, kind = re.search(pattern, table.name), kind_of(table.name)
        if base and kind is not None and belongs(table.name, base.start(), split):
            groups.setdefault((bool(table.member), kind, table.name[: base.end()]), []).append(table)
    if not groups:
        raise NoFiles(
            f"no files of {set_name} in {root}; get them: ascendchat data fetch {set_name}, or give their folder: "
            "--source DIR"
        )
    first = min(groups)
    below = {
        folder: [f for f in groups[first] if f.name[len(first[2]) :].startswith(folder)] for folder in PREFERRED_FOLDERS
    }
    return next((chosen for chosen in below.values() if chosen), groups[first])


def set_rows(set_name: str, pattern: str, split: str, source: str, make: Callable[[TableRow], Row]) -> Iterator[Row]:
    """Yield `make(row)` of all rows of a split, file after file in the order of their names."""
    empty = True
    for table in tables(set_name, pattern, split, source):
        try:
            for where, row in _entries(table):
                empty = False
                yield _make_row(row, make, f"{table.path.name}{table.member and ':'}{table.member}, {where}", set_name)
        except (*UNREADABLE, ValueError) as error:
            raise unreadable(table.path, error, f"fetch it again: ascendchat data fetch {set_name}") from None
    if empty:
        raise UserError(f"the files of {set_name} hold no rows; fetch them again: ascendchat data fetch {set_name}")


def _make_row(row: Any, make: Callable[[TableRow], Row], where: str, set_name: str) -> Row:
    try:
        if isinstance(row, Exception):
            raise row
        if not isinstance(row, dict):
            raise ValueError(f"it is {type(row).__name__}, not an object with named columns")
        return make(row)
    except ROW_ERRORS as error:
        raise UserError(
            f"{set_name}: {inert(where)} is no question: {describe_error(error)}; mend or remove this row, or fetch "
            f"the set again: ascendchat data fetch {set_name}"
        ) from None


def _entries(table: _TableFile) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) of a table."""
    name = table.member or table.path.name
    with _opened(table) as file:
        kind, packing = format_of(name)
        if kind == ".csv":
            yield from _csv(io.TextIOWrapper(unpack(file, packing), encoding="utf-8-sig", newline=""), name)
        else:
            yield from entries_in(file, name)


def _opened(table: _TableFile) -> IO[bytes]:
    if not table.member:
        return table.path.open("rb")
    with zipfile.ZipFile(table.path) as archive:
        return io.BytesIO(archive.read(table.member))


def _csv(text: IO[str], name: str) -> Iterator[tuple[str, Any]]:
    """Parse a csv file: with a header, if one of its cells is A; else question, A, B, C, D, answer."""
    lines = csv.reader(text, strict=True)
    header: list[str] = []
    for cells in filter(None, table_lines(lines, name)):
        where = f"line {lines.line_num}"
        if not header and "A" in cells and "B" in cells:
            header = cells
            continue
        header = header or ["question", *"ABCDEFGHIJ"[: len(cells) - 2], "answer"]
        if len(cells) == len(header):
            yield where, dict(zip(header, cells))
        else:
            yield where, ValueError(f"{len(cells)} columns instead of {len(header)}")
