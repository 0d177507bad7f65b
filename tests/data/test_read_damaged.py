"""Damaged, encrypted and absurd files are answered with a sentence that names them, whoever reads them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from ascendchat.data.chat.formats import conversations
from ascendchat.data.read import read_documents
from ascendchat.errors import UserError
from ascendchat.eval.core_benchmark import load_bundle
from ascendchat.tasks.eval_files import SPLIT, set_rows

ROWS = [{"text": f"document {i}", "question": f"q{i}", "answer": "B"} for i in range(500)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PATTERN = r"(^|/)set[^/]*/"
DEEP = "[" * 100_000 + "]" * 100_000


def packed_zip(data: bytes = LINES, encrypted: bool = False, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A .zip with one file; `encrypted` sets the flag that says so in both of its headers."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", method) as archive:
        archive.writestr("set/test.jsonl", data)
    content = bytearray(raw.getvalue())
    if encrypted:
        content[6] |= 1
        content[content.rindex(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def parquet() -> bytes:
    raw = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), raw)
    return raw.getvalue()


COMPRESSIONS: dict[str, Callable[[], bytes]] = {
    "jsonl.gz": lambda: gzip.compress(LINES),
    "jsonl.bz2": lambda: bz2.compress(LINES),
    "jsonl.xz": lambda: lzma.compress(LINES),
    "jsonl.zst": lambda: zstandard.compress(LINES),
    "parquet": parquet,
    "zip": packed_zip,
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:200] + bytes(255 - byte for byte in content[200:500]) + content[500:],
    "not it": lambda content: b"not such a file at all " * 30,
    "empty": lambda content: b"",
}


def said(read: Callable[[], Iterable[object]]) -> str:
    """The words of the UserError; else how many rows were read. Any other error is raised."""
    try:
        return f"{len(list(read()))} rows"
    except UserError as error:
        return str(error)


def rows_of(path: Path) -> Iterator[object]:
    """As the examinations read them."""
    return set_rows("set", PATTERN, SPLIT["test"], str(path.parent), dict)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a set with a split `test`."""
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_damaged_file_is_named(folder: Path, kind: str) -> None:
    path = folder / f"test.{kind}"
    whole = COMPRESSIONS[kind]()
    path.write_bytes(whole)
    assert len(list(read_documents([path]))) == len(list(rows_of(path))) == len(ROWS)
    for name, damage in DAMAGES.items():
        path.write_bytes(damage(whole))
        for words in (said(lambda: read_documents([path])), said(lambda: rows_of(path))):
            empty = name == "empty" and (words == "0 rows" or "hold no rows" in words)  # some formats allow that
            assert path.name in words or empty
        if kind != "zip":
            with pytest.raises(UserError, match=path.name):
                list(conversations(path))


def test_a_zip_that_python_cannot_open_is_named_with_the_reason(folder: Path) -> None:
    unknown = bytearray(packed_zip())
    unknown[8] = unknown[unknown.rindex(b"PK\x01\x02") + 10] = 97  # a compression that Python does not know
    for content, says in ((packed_zip(encrypted=True), "encrypted.*unpack it"), (unknown, "compression")):
        path = folder / "test.zip"
        path.write_bytes(content)
        for read in (lambda: read_documents([path]), lambda: rows_of(path)):  # noqa: B023 (called at once)
            assert re.search(rf"test\.zip.*{says}", said(read))


def test_an_encrypted_bundle_is_named_with_the_reason(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("eval_meta_data.csv", "a")
        archive.writestr("core.yaml", "icl_tasks: []")
    content = raw.getvalue().replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    (tmp_path / "bundle.zip").write_bytes(content.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01"))
    with pytest.raises(UserError, match="encrypted"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("row", [DEEP, '{"text": "a", "x": ' + DEEP + "}"], ids=["list", "row"])
def test_json_nested_beyond_reason_is_named(folder: Path, row: str) -> None:
    for kind, text in (("json", f"[{row}]"), ("jsonl", row)):
        path = folder / f"test.{kind}"
        path.write_text(text)
        for read in (lambda: read_documents([path]), lambda: conversations(path), lambda: rows_of(path)):  # noqa: B023
            assert re.search(rf"test\.{kind}.*nested", said(read))
        path.unlink()


def test_a_csv_that_is_none_is_a_table_or_a_sentence(folder: Path) -> None:
    path = folder / "test.csv"
    path.write_bytes(b"text,A,B\na\r\rb\x00,c\n" + b'"' + b"x" * 200_000)
    for read in (lambda: read_documents([path]), lambda: rows_of(path)):
        said(read)  # no traceback
