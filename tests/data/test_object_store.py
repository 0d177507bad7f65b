"""Prepared text in an object store, read by blocks. python -m pytest tests/data/test_object_store.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from test_corpus import numbered, store

from ascendchat.data import object_store
from ascendchat.data.corpus import Corpus, TextRows, open_corpora
from ascendchat.data.object_store import BlockCache, Store
from ascendchat.errors import UserError
from ascendchat.files import check_folder

URL = "memory://bucket/words"


class Bucket:
    """A prepared folder, here and in fsspec's store in memory, whose reads are written down."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fs = fsspec.filesystem("memory")
        documents = numbered([30, 5, 70, 12, 44, 9, 61, 28] * 3)
        self.local = store(folder / "words", [documents[:12], documents[12:]], "uint32")
        for path in self.local.iterdir():
            self.fs.pipe_file(f"/bucket/words/{path.name}", path.read_bytes())
        self.reads: list[tuple[str, int | None, int | None]] = []
        read = type(self.fs).cat_file

        def noted(fs: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
            self.reads.append((path.rsplit("/", 1)[-1], start, end))
            return bytes(read(fs, path, start=start, end=end, **more))

        monkeypatch.setattr(type(self.fs), "cat_file", noted)

    def blocks(self) -> list[tuple[str, int | None, int | None]]:
        return [entry for entry in self.reads if entry[0].endswith(".tokens")]

    def change(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"/bucket/words/{name}", data)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A store with one prepared folder, read by blocks of 64 tokens."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(object_store, "BLOCK_BYTES", 256)  # 64 tokens
    found = Bucket(tmp_path, monkeypatch)
    yield found
    found.fs.rm("/bucket", recursive=True)


def rows(corpus: Corpus, first: int, count: int) -> tuple[list[int], list[int]]:
    inputs, targets = np.zeros((count, 32), dtype=np.int64), np.zeros((count, 32), dtype=np.int64)
    TextRows(corpus, 32, seed=0).fill(first, inputs, targets)
    return inputs.ravel().tolist(), targets.ravel().tolist()


def tokens_file(bucket: Bucket) -> str:
    return next(path.name for path in sorted(bucket.local.glob("*.tokens")))


def test_rows_are_those_of_the_same_folder_on_a_disk(bucket: Bucket) -> None:
    remote, local = Corpus.open(URL), Corpus.open(bucket.local)
    assert remote.fingerprint == local.fingerprint, "a run may go on from either"
    assert rows(remote, 0, 26) == rows(local, 0, 26)
    assert np.concatenate(list(remote.stream())).tolist() == np.concatenate(list(local.stream())).tolist()


def test_a_rank_reads_only_the_blocks_of_its_own_rows(bucket: Bucket) -> None:
    corpus = Corpus.open(URL)
    rows(corpus, 0, 1)
    few = bucket.blocks()
    assert 0 < len(few) < 8, few
    assert all(end - start <= 256 for _, start, end in few if start is not None and end is not None)
    assert len(set(few)) == len(few), "no block twice"
    rows(corpus, 0, 26)
    whole = sum((path.stat().st_size + 255) // 256 for path in bucket.local.glob("*.tokens"))
    assert len(bucket.blocks()) == whole > 2 * len(few)


def test_what_was_read_once_comes_from_the_local_cache(bucket: Bucket, tmp_path: Path) -> None:
    first = rows(Corpus.open(URL), 0, 26)
    bucket.reads.clear()
    assert rows(Corpus.open(URL), 0, 26) == first
    assert [name for name, _, _ in bucket.reads] == ["manifest.json"]
    for path in (tmp_path / "home" / "data" / ".blocks").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    assert rows(Corpus.open(URL), 0, 26) == first, "a damaged block of the cache is read again"


def test_what_cannot_be_kept_in_the_cache_does_not_stop_training(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(tmp_path / "small", 1024)
    files = json.loads((bucket.local / "manifest.json").read_text())["files"]
    for path in sorted(bucket.local.glob("*.tokens")):
        assert Store(URL, files, cache).read(path.name, 0, path.stat().st_size) == path.read_bytes()
    assert 0 < sum(path.stat().st_size for path in cache.folder.iterdir()) <= 1024

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert rows(Corpus.open(URL), 0, 26) == rows(Corpus.open(bucket.local), 0, 26)


def test_a_damaged_file_of_the_store_is_named(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tokens_file(bucket)
    data = bytearray((bucket.local / name).read_bytes())
    data[300] ^= 1
    bucket.change(name, bytes(data))
    with pytest.raises(UserError, match=rf"{name} is damaged: bytes 256 to 512"):
        rows(Corpus.open(URL), 0, 26)
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path / "elsewhere"))  # where nothing is cached
    bucket.change(name, (bucket.local / name).read_bytes()[:-300])
    with pytest.raises(UserError, match=rf"{name} is damaged"):
        rows(Corpus.open(URL), 0, 26)
    manifest = json.loads((bucket.local / "manifest.json").read_text())
    manifest["splits"]["train"]["documents"] += 1
    bucket.change("manifest.json", json.dumps(manifest).encode())
    with pytest.raises(UserError, match=f"^{URL}: documents and manifest disagree"):  # the address as it was given
        _ = Corpus.open(URL).lengths


def test_a_folder_without_checksums_of_blocks_is_read_file_by_file(bucket: Bucket) -> None:
    manifest = json.loads((bucket.local / "manifest.json").read_text())
    for about in manifest["files"].values():
        about.pop("blocks", None)
    bucket.change("manifest.json", json.dumps(manifest).encode())
    assert rows(Corpus.open(URL), 0, 26) == rows(Corpus.open(bucket.local), 0, 26)
    assert len(bucket.blocks()) == 2, "two shards"


def test_a_wrong_limit_of_the_cache_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("many", "-1", "0", "nan"):
        monkeypatch.setenv("ASCENDCHAT_DATA_CACHE_GB", text)
        with pytest.raises(UserError, match="is not a size"):
            Corpus.open(URL)


def test_a_read_that_fails_is_tried_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError("reset by peer")] * 2)
    read = type(bucket.fs).cat_file

    def flaky(*given: Any, **more: Any) -> bytes:
        for error in failures:
            raise error
        return bytes(read(*given, **more))

    monkeypatch.setattr(type(bucket.fs), "cat_file", flaky)
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
    assert Corpus.open(URL).documents == 24


def test_a_wrong_address_is_answered_in_one_sentence(bucket: Bucket) -> None:
    with pytest.raises(UserError, match="holds no prepared text"):
        open_corpora(["memory://bucket/nothing"])
    with pytest.raises(UserError, match="cannot be read: Protocol not known"):
        open_corpora(["nowhere://x/y"])
    (remote, share), _ = open_corpora([f"{URL}=0.25", f"{bucket.local}=0.75"])
    assert (share, remote.tokens) == (0.25, Corpus.open(bucket.local).tokens)


def test_an_error_that_only_the_store_knows_is_a_sentence(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        """As botocore raises it: no OSError."""

    def refuse(*_: Any, **__: Any) -> bytes:
        raise NoCredentialsError("Unable to locate credentials")

    monkeypatch.setattr(type(bucket.fs), "cat_file", refuse)
    with pytest.raises(UserError, match="cannot be read: Unable to locate credentials; check the address"):
        open_corpora([URL])


def test_a_password_in_an_address_is_refused_and_not_shown(bucket: Bucket) -> None:
    with pytest.raises(UserError, match=r"^s3://\*\*\*@bucket/words has a password") as caught:
        open_corpora(["s3://me:s3cret@bucket/words"])
    assert "s3cret" not in str(caught.value)


def test_the_cache_leaves_half_of_the_disk_free(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(tmp_path / "blocks", 1e9)
    used = 0

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=2048 - sum(path.stat().st_size for path in cache.folder.iterdir()))

    monkeypatch.setattr(object_store.shutil, "disk_usage", usage)
    for number in range(40):
        cache.put(f"block-{number}", bytes(100))
        used = max(used, sum(path.stat().st_size for path in cache.folder.iterdir()))
    assert 0 < used <= 1024


def test_an_address_is_no_folder_to_write_into() -> None:
    with pytest.raises(UserError, match=r"^s3://bucket/words is an address"):
        check_folder(Path("s3://bucket/words"))  # as `data prepare --out` and `tokenizer train --out` do
