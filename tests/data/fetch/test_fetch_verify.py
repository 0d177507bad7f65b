"""`ascendchat data verify` finds what differs from the manifests and names the command that mends it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import DATA, FAST, Server, serve

from ascendchat.config import parse
from ascendchat.config.data import DataVerifyConfig
from ascendchat.data.fetch import fetch
from ascendchat.data.verify import read_manifest, run, stored_folders, verify_folders
from ascendchat.errors import UserError, home


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that is both hubs."""
    yield from serve(monkeypatch)


def make(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    entries = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"files": entries}))
    return folder


def verify_command(*argv: str) -> int:
    return run(parse(DataVerifyConfig, list(argv)))


def test_everything_stored_is_compared_and_damage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    make(home() / "data" / "prepared", a=b"1234", b=b"5678", c=b"9")
    make(home() / "tokenizer", json=b"{}")
    make(home() / "runs" / "x" / "base" / "step_000001", model=b"weights")
    make(home() / "runs" / "x" / "base" / "step_000002.tmp", model=b"unfinished")
    assert verify_command() == 0
    assert capsys.readouterr().out.count(" ok\n") == 3
    (home() / "data" / "prepared" / "a").write_bytes(b"1235")
    (home() / "data" / "prepared" / "b").write_bytes(b"567")
    (home() / "data" / "prepared" / "c").unlink()
    (home() / "tokenizer" / "manifest.json").write_text("{")
    assert verify_command() == 1
    out = capsys.readouterr().out
    for line in ("a: checksum differs", "b: 3 bytes, expected 4", "c: missing", "the manifest cannot be read"):
        assert line in out
    assert "ascendchat data prepare" in out
    assert "ascendchat tokenizer train" in out
    assert "step_000001" in out
    assert verify_command("prepared") == 1
    assert verify_command("runs") == 0
    with pytest.raises(UserError, match=r"nothing is stored under the name 'prepard'.*prepared"):
        verify_command("prepard")


def test_what_links_reach_is_compared_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data may lie on another disk."""
    make(tmp_path / "disk" / "gsm8k", a=b"1234")
    home().mkdir(parents=True, exist_ok=True)
    (home() / "data").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "round").symlink_to(home())
    assert verify_command() == 0
    assert capsys.readouterr().out.count(" ok\n") == 1
    (tmp_path / "disk" / "gsm8k" / "a").write_bytes(b"12345")
    assert verify_command() == 1


def test_the_remedy_for_a_fetched_set_mends_it(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.hugging_face("o/n", {"a.bin": DATA, "b.bin": b"2"})
    folder = fetch("o/n", shards=1, policy=FAST)
    (folder / "a.bin").write_bytes(b"x" + DATA[1:])
    assert verify_command("o/n", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    fault = report["folders"][0]["faults"][0]
    assert (fault["file"], fault["what"]) == (str(folder / "a.bin"), "checksum differs")
    assert fault["fix"] == "ascendchat data fetch o/n --shards 1"
    fetch("o/n", shards=1, check=True, policy=FAST)  # what that command runs
    assert verify_command("o/n") == 0
    assert (folder / "a.bin").read_bytes() == DATA


def test_after_the_deadline_only_sizes_are_compared() -> None:
    folder = make(home() / "data" / "x", a=b"1234", b=b"56")
    (folder / "a").write_bytes(b"4321")
    (folder / "b").write_bytes(b"")
    late = verify_folders([folder], deadline=time.monotonic() - 1)[0]
    assert [f.file.name for f in late.faults] == ["b"]
    assert (late.files, late.hashed) == (2, 0)
    assert [f.file.name for f in verify_folders([folder])[0].faults] == ["a", "b"]


def test_a_manifest_of_another_shape_is_an_error_not_a_crash(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) == {}
    for text in ("[]", "3", '{"files": [1]}', '{"files": {"a": {"bytes": 1}}}', "{}", '{"files": {"a": 5}}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError):
            read_manifest(tmp_path)
        assert len(verify_folders([tmp_path])[0].faults) == 1
    assert list(stored_folders(tmp_path)) == [tmp_path]
