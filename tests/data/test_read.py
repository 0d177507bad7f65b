"""Documents come out of every format whole and in order; what cannot be read is counted, and too much of it stops."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from ascendchat.data.read import TXT_DOCUMENT_CHARS, ReadCounts, file_documents, files_in, read_documents, source_files
from ascendchat.errors import UserError

TEXTS = ["One.", "二号文件。\nsecond line", 'three, with "quotes" and \ttab', "四 emoji 🌍", "x" * 70_000]
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.compress(data[:50]) + zstandard.compress(data[50:]),  # two frames
}


def as_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)).encode()


def as_table(texts: list[str], delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([["id", "text"], *enumerate(texts)])
    return out.getvalue().encode()


def as_parquet(texts: list[str | None], row_group: int = 2) -> bytes:
    out = io.BytesIO()
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "id": list(range(len(texts)))})
    pyarrow.parquet.write_table(table, out, row_group_size=row_group)
    return out.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


WRITE = {
    ".jsonl": as_lines(TEXTS),
    ".ndjson": b"\xef\xbb\xbf" + as_lines(TEXTS).replace(b"\n", b"\n\n"),  # a byte order mark, empty lines
    ".json": json.dumps([{"text": t} for t in TEXTS], indent=1).encode(),
    ".csv": as_table(TEXTS, ","),
    ".tsv": as_table(TEXTS, "\t"),
    ".txt": "\n<|endoftext|>\n".join(TEXTS).encode(),
}


@pytest.mark.parametrize("kind", WRITE)
def test_every_format_and_compression_gives_the_documents_in_order(kind: str, tmp_path: Path) -> None:
    for packing in PACK if kind in (".jsonl", ".csv") else ("", ".gz"):
        path = write(tmp_path / f"a{kind}{packing}", PACK[packing](WRITE[kind]))
        tally = ReadCounts()
        assert list(file_documents(path, "text", tally)) == TEXTS
        assert tally == ReadCounts(documents=len(TEXTS))


def test_parquet_is_read_over_all_row_groups_and_null_counts_as_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", as_parquet([*TEXTS[:3], None, *TEXTS[3:]]))
    tally = ReadCounts()
    assert list(file_documents(path, "text", tally)) == TEXTS
    assert (tally.documents, tally.empty, tally.broken) == (len(TEXTS), 1, 0)


def test_arrow_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [*TEXTS[:3], None, *TEXTS[3:]]})
    for name, begin in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with begin(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        tally = ReadCounts()
        assert list(file_documents(tmp_path / name, "text", tally)) == TEXTS
        assert (tally.documents, tally.empty, tally.broken) == (len(TEXTS), 1, 0)
        with pytest.raises(UserError, match=r"'words'.*choose from: text"):
            list(file_documents(tmp_path / name, "words", ReadCounts()))


def test_arrow_files_beside_others_are_their_copies(tmp_path: Path) -> None:
    """As `datasets` keeps them."""
    for name in ("a.jsonl", "cache.arrow"):
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in source_files([tmp_path])] == ["a.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    assert [p.name for p in source_files([tmp_path])] == ["cache.arrow"]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    """As in a copy of a hub's cache without its blobs."""
    write(tmp_path / "a.txt", b"text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"b\.txt is a link to nothing; copy the file"):
        source_files([tmp_path])
    (tmp_path / "b.txt").rename(tmp_path / ".b.txt")
    assert [path.name for path in source_files([tmp_path])] == ["a.txt"]


def test_a_link_to_nothing_beside_the_data_is_passed_over(tmp_path: Path) -> None:
    """Its name says that it holds no rows; one without an ending may be a file of any kind, or a folder."""
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "test.jsonl", b'{"text": "a"}')
    for name in ("README.md", "model.safetensors"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
    assert [path.name for path in source_files([tmp_path])] == ["test.jsonl"]
    assert [path.name for path in files_in(tmp_path)] == ["test.jsonl"]
    for name in ("more", "b.jsonl.gz", "b.zip", "0000.PARQUET"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
        with pytest.raises(UserError, match=f"{name} is a link to nothing"):
            source_files([tmp_path])
        (tmp_path / name).unlink()


def test_a_folder_that_datasets_has_saved_is_read(tmp_path: Path) -> None:
    """A DatasetDict, with what was computed from it beside its rows."""
    write(tmp_path / "dataset_dict.json", b'{"splits": ["train"]}')
    (tmp_path / "train").mkdir()
    for name in ("data-00000-of-00001.arrow", "cache-0123456789abcdef.arrow"):
        table = pyarrow.table({"text": TEXTS})
        with pyarrow.ipc.new_stream(str(tmp_path / "train" / name), table.schema) as writer:
            writer.write_table(table)
    write(tmp_path / "train" / "dataset_info.json", b'{"citation": "", "features": {"text": {}}}')
    write(tmp_path / "train" / "state.json", b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    assert list(read_documents([tmp_path])) == list(read_documents([tmp_path / "train"])) == TEXTS


def test_a_zip_gives_the_documents_of_all_members_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/2.parquet", as_parquet(["two", "three"]))
        archive.writestr("a/1.jsonl.gz", gzip.compress(as_lines(["one"])))
        archive.writestr("README.md", "not text for training")
        archive.writestr("c.txt", "four")
    assert list(read_documents([tmp_path])) == ["one", "two", "three", "four"]
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("README.md", "nothing else")
    with pytest.raises(UserError, match=r"b\.zip holds no file of a known format: \.parquet"):
        list(read_documents([tmp_path / "b.zip"]))


@pytest.mark.parametrize(
    "content", ['["a", "b"]', '"a"\n"b"\n', '{"text": "a"}\n{"text": "b", "n": 12}', '["a" , "b"]  ']
)
def test_a_json_file_may_hold_a_list_or_values_one_after_the_other(content: str, tmp_path: Path) -> None:
    assert list(read_documents([write(tmp_path / "a.json", content.encode())])) == ["a", "b"]


@pytest.mark.parametrize(
    "content",
    [
        '["a"] ["b", "c"]\n["d"]',
        '["a", "b"]\n"c"\n"d"',
        '"a" ["b", {"text": "c"}], [] [ ] {"text": "d"}',
        '[]["a","b","c","d"]',
    ],
)
def test_lists_one_after_the_other_in_a_json_file_are_read_to_its_end(content: str, tmp_path: Path) -> None:
    tally = ReadCounts()
    path = write(tmp_path / "a.json", content.encode())
    assert list(file_documents(path, "text", tally)) == ["a", "b", "c", "d"]
    assert tally == ReadCounts(documents=4)


@pytest.mark.parametrize("rest", ["\0\0", "]", "[", '["c"', "garbage", '["c"]]'])
def test_what_stands_behind_a_json_list_and_is_none_is_damage(rest: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.json is not valid JSON after [23] rows"):
        list(read_documents([write(tmp_path / "a.json", b'["a", "b"] ' + rest.encode())]))


@pytest.mark.parametrize("kind", [".csv", ".tsv"])
def test_a_quote_that_is_not_closed_does_not_swallow_the_rest_of_a_table(kind: str, tmp_path: Path) -> None:
    rows = ["text", '"fine"', '"unclosed', *(f"row {i}" for i in range(200))]
    later = [*rows[:100], '"text" behind a quote', *rows[100:]]
    for lines in (rows, later):
        with pytest.raises(UserError, match=rf"a\{kind}: the row that begins in line 3 .*quote"):
            list(read_documents([write(tmp_path / f"a{kind}", "\n".join(lines).encode())]))


def test_a_json_list_larger_than_the_read_buffer_is_complete(tmp_path: Path) -> None:
    texts = [f"{i} " + 'é\\"' * (i % 7 * 5000) for i in range(60)]
    path = write(tmp_path / "a.json", json.dumps([{"text": t} for t in texts]).encode())
    assert list(read_documents([path])) == texts


def test_a_large_text_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {i} " + "word " * 5000 for i in range(120)]  # about 3 MB
    found = list(read_documents([write(tmp_path / "a.txt", "\n\n".join(paragraphs).encode())]))
    assert 2 <= len(found) <= 4
    assert max(map(len, found)) < TXT_DOCUMENT_CHARS + 60_000
    assert "\n\n".join(found).split("\n\n") == paragraphs


def test_folders_patterns_and_files_are_expanded_in_a_fixed_order_without_repeats(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ["b.txt", "a.jsonl", "sub/c.parquet", ".hidden.txt", "notes.md", "manifest.json"]:
        (tmp_path / name).write_bytes(b"x")
    assert [p.name for p in source_files([tmp_path])] == ["a.jsonl", "b.txt", "c.parquet"]
    assert [p.name for p in source_files([tmp_path / "b.txt", tmp_path])] == ["b.txt", "a.jsonl", "c.parquet"]
    assert [p.name for p in source_files([str(tmp_path / "**" / "*.p*")])] == ["c.parquet"]
    with pytest.raises(UserError, match="no file or folder"):
        source_files([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match=r"notes\.md has no known format"):
        source_files([tmp_path / "notes.md"])
    write(tmp_path / "a.parquet.gz", b"")
    with pytest.raises(UserError, match=r"a\.parquet\.gz has no known format"):
        source_files([tmp_path / "a.parquet.gz"])


def test_broken_lines_are_counted_and_named_when_few(tmp_path: Path) -> None:
    lines = as_lines([f"text {i}" for i in range(1000)]).splitlines(keepends=True)
    lines[499] = b'{"text": "cut off\n'
    lines[700] = b'{"text": "half \\ud800 of a character"}\n'
    lines[800] = b'{"text": "not UTF-8: \xff"}\n'
    lines[900] = b'{"title": "no text here"}\n'
    lines[901] = b'{"text": 7}\n'
    lines[902] = b'{"text": ""}\n'
    tally = ReadCounts()
    assert len(list(file_documents(write(tmp_path / "a.jsonl", b"".join(lines)), "text", tally))) == 994
    assert (tally.documents, tally.empty, tally.broken) == (994, 1, 5)
    assert tally.example.startswith("line 500 of a.jsonl")


def test_one_broken_row_does_not_refuse_a_small_file_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule of conversations: not unless it is half of the file."""
    lines = as_lines(["one", "two", "three"]) + b'{"text": "half \\ud800 of a character"}\n'
    path = write(tmp_path / "a.jsonl", lines)
    assert list(file_documents(path, "text", ReadCounts())) == ["one", "two", "three"]
    assert list(read_documents([path])) == ["one", "two", "three"]  # as `tokenizer train` reads
    assert capsys.readouterr().err == (
        f"{path}: 1 of 4 rows cannot be read, the first is line 4 of a.jsonl: half a character (a lone surrogate); "
        "left out\n"
    )
    with pytest.raises(UserError, match="1 of 2 rows cannot be read"):
        list(read_documents([write(tmp_path / "b.jsonl", as_lines(["one"]) + b"{broken")]))


def test_more_than_one_percent_of_broken_lines_is_an_error_that_names_the_first(tmp_path: Path) -> None:
    lines = as_lines([f"text {i}" for i in range(100)]).splitlines(keepends=True)
    lines[3] = lines[50] = b"{broken\n"
    with pytest.raises(UserError, match=r"2 of 100 rows cannot be read, the first is line 4 of a\.jsonl"):
        list(read_documents([write(tmp_path / "a.jsonl", b"".join(lines))]))
    with pytest.raises(UserError, match="1001 of 1001 rows"):  # and is not read to its end
        list(read_documents([write(tmp_path / "b.json", json.dumps([{"text": 7}] * 2000).encode())]))


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_wrong_field_names_the_nearest_one(kind: str, tmp_path: Path) -> None:
    data = as_parquet(list(TEXTS)) if kind == ".parquet" else WRITE[kind]
    with pytest.raises(UserError, match=r"'texts'.*(did you mean text|choose from: .*text).*--field"):
        list(file_documents(write(tmp_path / f"a{kind}", data), "texts", ReadCounts()))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.parquet", b"PAR1 nothing of the kind", "no parquet file"),
        ("a.zip", b"PK nothing", "damaged"),
        ("a.txt", b"latin \xe9t\xe9", "not UTF-8"),
        ("a.json", b'[{"text": "a"}, {"text": ', "not valid JSON after 1 rows"),
        ("a.json", b'["a", "b"', "not valid JSON after 2 rows"),
        (
            "a.txt.gz",
            gzip.compress(b"text", mtime=0)[:-9],  # its bytes are part of the name of the test
            "damaged or incomplete .*Compressed file ended before",
        ),
    ],
)
def test_damage_is_an_error_with_the_files_name(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        list(read_documents([write(tmp_path / name, data)]))
    assert name in str(caught.value)


def test_a_file_whose_library_is_missing_is_a_sentence_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, library in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(UserError, match=f"{name} needs {library} .*pip install {library}$"):
            list(file_documents(tmp_path / name, "text", ReadCounts()))
