"""Damaged, encrypted and absurd files are answered with a sentence that names them, whoever reads them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from ascendchat.config import UserError
from ascendchat.data.conversations import conversations
from ascendchat.data.read import read_documents
from ascendchat.eval.bundle import load_bundle
from ascendchat.tasks.files import SPLIT, set_rows

ROWS = [{"text": f"document {i}", "question": f"q{i}", "answer": "B"} for i in range(2000)]
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


PACKED: dict[str, Callable[[], bytes]] = {
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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", PACKED)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    path = tmp_path / "set" / f"test.{kind}"
    path.parent.mkdir()
    path.write_bytes(PACKED[kind]())
    assert len(list(read_documents([path]))) == len(ROWS)
    assert len(list(set_rows("set", PATTERN, SPLIT["test"], str(path.parent)))) == len(ROWS)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for read in (lambda: read_documents([path]), lambda: set_rows("set", PATTERN, SPLIT["test"], str(path.parent))):
        words = said(read)
        assert path.name in words or (damage == "empty" and words == "0 rows")  # some formats allow an empty file
    if kind != "zip":
        with pytest.raises(UserError, match=path.name):
            list(conversations(path))


@pytest.mark.parametrize("how", ["encrypted", "method"])
def test_a_zip_that_python_cannot_open_is_named_with_the_reason(tmp_path: Path, how: str) -> None:
    path = tmp_path / "set" / "test.zip"
    path.parent.mkdir()
    content = bytearray(packed_zip(encrypted=how == "encrypted"))
    if how == "method":  # 97: a compression that Python does not know
        content[8] = content[content.rindex(b"PK\x01\x02") + 10] = 97
    path.write_bytes(content)
    says = r"test\.zip.*encrypted.*unpack it" if how == "encrypted" else r"test\.zip.*compression"
    with pytest.raises(UserError, match=says):
        list(read_documents([path]))
    with pytest.raises(UserError, match=says):
        list(set_rows("set", PATTERN, SPLIT["test"], str(path.parent)))


def test_an_encrypted_bundle_is_named_with_the_reason(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("eval_meta_data.csv", "a")
        archive.writestr("core.yaml", "icl_tasks: []")
    content = raw.getvalue().replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    (tmp_path / "bundle.zip").write_bytes(content.replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01"))
    with pytest.raises(UserError, match="encrypted"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize("row", [DEEP, '{"messages": ' + DEEP + "}", '{"text": "a", "x": ' + DEEP + "}"])
def test_json_nested_beyond_reason_is_named(tmp_path: Path, kind: str, row: str) -> None:
    path = tmp_path / "set" / f"test.{kind}"
    path.parent.mkdir()
    path.write_text(f"[{row}]" if kind == "json" else row)
    with pytest.raises(UserError, match=rf"test\.{kind}.*nested"):
        list(read_documents([path]))
    with pytest.raises(UserError, match=rf"test\.{kind}.*nested"):
        list(conversations(path))
    with pytest.raises(UserError, match=rf"test\.{kind}.*nested"):
        list(set_rows("set", PATTERN, SPLIT["test"], str(path.parent)))


def test_a_csv_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set" / "test.csv"
    path.parent.mkdir()
    path.write_bytes(b"text,A,B\na\r\rb\x00,c\n" + b'"' + b"x" * 200_000)
    for read in (lambda: read_documents([path]), lambda: set_rows("set", PATTERN, SPLIT["test"], str(path.parent))):
        said(read)  # a table or a sentence, no traceback
