"""Rows of evaluation sets, wherever they are: fetched from a hub or a mirror, or in a folder of yours, packed or not.

    set_rows("mmlu", r"(^|/)mmlu[^/]*/", SPLIT["test"], source="")         # what `ascendchat data fetch mmlu` stored
    set_rows("mmlu", r"(^|/)mmlu[^/]*/", SPLIT["test"], source="DIR")      # `ascendchat eval chat --source DIR`

Files are told by their names: below the folder, and inside its .zip archives, those that match the set's pattern and
the split's. Tables are csv (with or without a header), json, jsonl or parquet.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ascendchat.config import UserError
from ascendchat.data.fetch import fetch
from ascendchat.data.read import UNREADABLE, table_lines, unreadable
from ascendchat.data.tables import TableRow, open_text, table_rows

# A word of a path: test/x.csv, x_test.csv, test-00000-of-00001.parquet, test.jsonl.xz
SPLIT = {
    split: rf"(?:^|[/._-])(?:{words})(?=[/._-])"
    for split, words in {"train": "train", "val": "val|validation", "dev": "dev", "test": "test"}.items()
}
TABLES = (".parquet", ".jsonl", ".json", ".csv")  # the first of these that a folder has is read, never two
PACKINGS = (".gz", ".xz", ".bz2", ".zst", "")
WHOLE = ("all/", "main/")  # in a clone of a hub: the set; beside it lie its subjects once more, or another wording


class Table(NamedTuple):
    """One table: its name from the folder on, the file, and the member if the file is an archive."""

    name: str
    path: Path
    member: str = ""


def files_below(root: Path) -> Iterator[Table]:
    """Every file below a folder, and every member of its archives."""
    for path in sorted(root.rglob("*")):
        name = f"{root.name}/{path.relative_to(root).as_posix()}".lower()
        if not path.is_file():
            continue
        if path.suffix.lower() != ".zip":
            yield Table(name, path)
            continue
        try:
            with zipfile.ZipFile(path) as archive:
                members = sorted(archive.namelist())
        except UNREADABLE as error:
            raise unreadable(path, error, "fetch or copy it again") from None
        yield from (Table(f"{name}/{member.lower()}", path, member) for member in members if not member.endswith("/"))


def kind_of(name: str) -> int | None:
    """The place of a file's format in TABLES."""
    ends = [tuple(table + packing for packing in PACKINGS) for table in TABLES]
    return next((i for i, end in enumerate(ends) if name.endswith(end)), None)


def belongs(name: str, base: int, split: str) -> bool:
    """Whether a file is of a split: by what its name says behind the set's, else by the folders before it, but not by
    the folder that was given, whose name is none of ours."""
    own, before = name[base:], name[:base].partition("/")[2]
    says = any(re.search(pattern, own) for pattern in SPLIT.values())
    return re.search(split, own if says else f"/{before}/{own}") is not None


def tables(set_name: str, pattern: str, split: str, source: str) -> list[Table]:
    """The files of a split. A set that lies there twice, in two places, formats or parts, is read once."""
    root = Path(source).expanduser() if source else fetch(set_name)
    if not root.is_dir():
        raise UserError(f"--source {root} is not a folder; give the one that holds the evaluation sets")
    groups: dict[tuple[bool, int, str], list[Table]] = {}
    for table in files_below(root):
        base, kind = re.search(pattern, table.name), kind_of(table.name)
        if base and kind is not None and belongs(table.name, base.start(), split):
            groups.setdefault((bool(table.member), kind, table.name[: base.end()]), []).append(table)
    if not groups:
        raise UserError(
            f"no files of {set_name} in {root}; get them: ascendchat data fetch {set_name}, or give their folder: "
            "--source DIR"
        )
    first = min(groups)
    below = {folder: [f for f in groups[first] if f.name[len(first[2]) :].startswith(folder)] for folder in WHOLE}
    return next((whole for whole in below.values() if whole), groups[first])


def set_rows(set_name: str, pattern: str, split: str, source: str = "") -> Iterator[TableRow]:
    """All rows of a split, file after file in the order of their names."""
    for table in tables(set_name, pattern, split, source):
        try:
            yield from _read(table)
        except (*UNREADABLE, ValueError, KeyError) as error:
            raise unreadable(table.path, error, f"fetch it again: ascendchat data fetch {set_name}") from None


def _read(table: Table) -> Iterator[TableRow]:
    if ".csv" in table.name[-8:]:
        text = io.StringIO(_text(table), newline="")
        yield from _csv(text, table.name)
    elif not table.member:
        yield from table_rows(table.path)
    else:
        for line in _text(table).split("\n"):
            if line.strip():
                yield json.loads(line)


def _text(table: Table) -> str:
    if table.member:
        with zipfile.ZipFile(table.path) as archive:
            return archive.read(table.member).decode("utf-8-sig")
    with open_text(table.path) as file:
        return file.read()


def _csv(text: io.StringIO, name: str) -> Iterator[TableRow]:
    """With a header, if one of its cells is A; else question, A, B, C, D, answer."""
    table = table_lines(csv.reader(text, strict=True), name)
    first = next(table, None)
    if first is None:
        return
    if "A" in first and "B" in first:
        header = first
    else:
        header = ["question", *"ABCDEFGHIJ"[: len(first) - 2], "answer"]
        yield dict(zip(header, first))
    for cells in table:
        if cells:
            yield dict(zip(header, cells))
