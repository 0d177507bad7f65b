"""What `ascendchat data fetch` reports as verified is what was asked for; no secret of a URL is printed or stored."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import DATA, FAST, Server, serve

from ascendchat.config import parse
from ascendchat.config.data import DataFetchConfig
from ascendchat.data.fetch import command as fetching
from ascendchat.data.fetch import fetch, folder_of, request, run
from ascendchat.data.fetch.http import redact, url_hash
from ascendchat.data.fetch.sources import SETS, DataSource
from ascendchat.errors import UserError, home
from ascendchat.tasks.by_name import load


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that is both hubs, for commands that wait no longer than the tests."""
    monkeypatch.setattr(fetching, "Policy", lambda: FAST)
    yield from serve(monkeypatch)


def command(*argv: str) -> int:
    return run(parse(DataFetchConfig, list(argv)))


def test_two_urls_with_equal_file_names_are_two_sets(server: Server) -> None:
    one, two = server.add("/one/a.bin", b"first"), server.add("/two/a.bin", b"other")
    first, second = fetch(one, policy=FAST, check=True), fetch(two, policy=FAST, check=True)
    assert (second / "a.bin").read_bytes() == b"other"
    assert (first / "a.bin").read_bytes() == b"first"
    assert fetch(one) == first == folder_of(one)  # without asking the server again
    assert fetch(server.add("/gsm8k.jsonl", b"{}"), policy=FAST) != folder_of("gsm8k")
    for name in ("manifest.json", ".lock"):
        with pytest.raises(UserError, match="names no file that can be stored"):
            command(server.add(f"/{name}", b"x"))


def test_the_queries_of_a_url_choose_its_file_but_not_signatures(server: Server) -> None:
    for key in ("train", "test"):
        server.add(f"/get/a.bin?key={key}", key.encode())
    folders = [fetch(f"{server.url}/get/a.bin?key={key}", policy=FAST) for key in ("train", "test")]
    assert [(folder / "a.bin").read_bytes() for folder in folders] == [b"train", b"test"]
    base = "https://u:p@host/a.zip?part=2"
    assert {url_hash(base + more) for more in ("&X-Amz-Signature=ab&X-Amz-Date=1", "&X-Amz-Signature=cd", "")} == {
        url_hash(base)
    }
    assert url_hash("https://host/a.zip?tokenizer=x") != url_hash("https://host/a.zip?tokenizer=y")


def test_a_url_whose_content_changed_is_fetched_again(server: Server) -> None:
    for name, always in (("/a.bin", ""), ("/b.bin", "no-tag")):
        url = server.add(name, b"before", always=always)
        assert command(url) == 0
        server.files[name].content = b"after!"  # the same size: only the validator of the server knows
        assert command(url) == 0
        assert (folder_of(url) / name[1:]).read_bytes() == b"after!"


def test_what_the_server_can_no_longer_confirm_is_not_called_verified(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.add("/a.bin", DATA)
    assert command(url) == 0
    server.files["/a.bin"].always = "404"
    capsys.readouterr()
    assert command(url) == 0
    out = capsys.readouterr()
    assert "verified" not in out.out
    assert "unchanged since they were fetched" in out.out
    assert "404" in out.err
    (folder_of(url) / "a.bin").write_bytes(DATA[::-1])
    with pytest.raises(UserError, match="could not be fetched"):
        command(url)


def test_a_whole_repository_is_fetched_after_single_files_of_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.hugging_face("o/n", {"a.txt": b"a", "b.txt": b"b"})
    assert command("https://huggingface.co/datasets/o/n/resolve/main/a.txt") == 0
    assert "1 files" in capsys.readouterr().out
    with pytest.raises(UserError, match="offline"):
        fetch("o/n", offline=True)
    assert command("o/n") == 0
    assert "2 files" in capsys.readouterr().out
    assert (folder_of("o/n") / "b.txt").read_bytes() == b"b"


def test_a_file_that_changed_on_its_hub_is_fetched_again_from_the_hub_that_is_asked_for(server: Server) -> None:
    server.hugging_face("o/n", {"a.txt": b"before"})
    folder = fetch("o/n", policy=FAST)
    server.hugging_face("o/n", {"a.txt": b"after!", "only.txt": b"1"})
    server.modelscope("o/n", {"a.txt": b"scope!"})
    assert (fetch("o/n", policy=FAST) / "a.txt").read_bytes() == b"before"  # training does not change under way
    for hub, content in (("hf", b"after!"), ("modelscope", b"scope!")):
        assert command("o/n", "--source", hub) == 0
        assert (folder / "a.txt").read_bytes() == content
    assert (fetch("o/n", source="hf", policy=FAST) / "a.txt").read_bytes() == b"after!"


def test_two_folders_with_equal_names_are_two_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for disk, text in (("one", b"first"), ("two", b"other")):
        (tmp_path / disk / "notes").mkdir(parents=True)
        (tmp_path / disk / "notes" / "a.txt").write_bytes(text)
    (tmp_path / "one" / "notes" / "b.txt").write_bytes(b"only here")
    for disk, text in (("one", b"first"), ("two", b"other"), ("one", b"first")):
        for _ in range(2):
            folder = fetch("notes", source=str(tmp_path / disk))
            assert (folder / "a.txt").read_bytes() == text
    capsys.readouterr()
    assert command("notes", "--source", str(tmp_path / "two")) == 0
    out = capsys.readouterr().out
    assert "notes: 1 files, 5 bytes, verified" in out
    assert "1 more files there were fetched by other commands" in out
    (tmp_path / "two" / "notes" / "a.txt").write_bytes(b"newer")
    assert command("notes", "--source", str(tmp_path / "two")) == 0
    assert (folder / "a.txt").read_bytes() == b"newer"


BEGINS = {".parquet": b"PAR1 PAR1", ".zip": b"PK", ".gz": b"\x1f\x8b"}  # what tells a file of this kind from a web page


def published(source: DataSource) -> list[str]:
    """Names as a set is published under, by its patterns."""
    if source.hub == "http":
        return [source.where.rpartition("/")[2]]
    return [pattern.replace("*", "a.jsonl" if pattern == "*" else "a") for pattern in source.files.split(",")]


@pytest.mark.parametrize("place", ["in a folder of the repository's name", "in the folder itself"])
def test_every_named_set_is_found_under_its_published_names(tmp_path: Path, place: str) -> None:
    missed = []
    for dataset in SETS.values():
        for number, source in enumerate(dataset.sources):
            root = tmp_path / f"{dataset.name}-{number}"
            inside = root / source.where.rpartition("/")[2] if "folder of" in place and source.hub != "http" else root
            names = published(source)
            for name in names:
                (inside / name).parent.mkdir(parents=True, exist_ok=True)
                (inside / name).write_bytes(BEGINS.get(Path(name).suffix, b'{"text": "a"}\n'))
            (root / "README.md").write_text("of somebody")
            try:
                folder = fetch(dataset.name, source=str(root), out=str(tmp_path / "out" / root.name))
            except UserError as error:
                missed.append(f"{root.name}: {error}")
                continue
            found = {
                p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.name not in (".lock", "manifest.json")
            }
            rest = {name for name in found - set(names) if (folder / name).is_file()}
            if not set(names) <= found or rest - ({"README.md"} if source.files == "*" else set()):
                missed.append(f"{root.name}: {found}")
    assert not missed


def test_the_identity_file_is_read_from_a_folder_under_its_published_name(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model."}]
    (tmp_path / "identity_conversations.jsonl").write_text(f"{json.dumps(talk)}\n" * 3, encoding="utf-8")
    assert list(load("identity", source=str(tmp_path))) == [talk] * 3
    fetch("identity", source=str(tmp_path))
    assert list(load("identity")) == [talk] * 3


def test_secrets_of_a_url_are_neither_printed_nor_stored(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets = ("bobby", "pa55word", "s1gnature", "hf_abcdefghij", "AKIA123")
    server.add("/a.bin", DATA, "", "", "404")
    plain = server.url.replace("http://", "http://bobby:pa55word@")
    url = f"{plain}/a.bin?X-Amz-Signature=s1gnature&part=2&t=hf_abcdefghij&accessKeyId=AKIA123"
    with pytest.raises(UserError) as caught:
        fetch(url, policy=FAST, workers=1)
    said = str(caught.value)
    half = [path.read_bytes() for path in home().rglob("*") if path.is_file()]  # the part file and its journal
    assert command(url) == 0
    with pytest.raises(UserError) as wrong:
        command(url.replace("a.bin", "missing.bin"))
    with pytest.raises(UserError) as malformed:
        fetch(url.replace(":pa55word", ":pa/55word"))
    with pytest.raises(UserError) as unknown:
        fetch(url.replace("http://", "ftp://"))
    stored = [path.read_bytes() for path in home().rglob("*") if path.is_file()] + half
    said += str(wrong.value) + str(malformed.value) + str(unknown.value) + "".join(capsys.readouterr()) + caplog.text
    assert server.asked[0].headers["authorization"].startswith("Basic ")  # the server did get them
    for secret in (*secrets, "55word"):
        assert secret not in said
        assert secret not in "".join(str(path) for path in home().rglob("*"))
        assert not any(secret.encode() in content for content in stored)
    assert "part=2" in said
    server.hugging_face("o/n", {"a.txt": b"a"})
    monkeypatch.setenv("HF_ENDPOINT", plain)  # a mirror with a password
    assert "pa55word" not in (fetch("o/n", policy=FAST) / "manifest.json").read_text()


def test_only_secrets_are_hidden() -> None:
    plain = "see https://h/a?page=2&tokenizer=gpt2&version=1.0"
    assert redact(plain) == plain
    assert redact("x https://me@h/a y b@c") == "x https://***@h/a y b@c"
    for name in ("token", "access_token", "apiKey", "SIG", "X-Amz-Credential", "auth", "my-secret", "AWSAccessKeyId"):
        assert redact(f"https://h/a?{name}=v") == f"https://h/a?{name}=***"


def test_the_advice_does_not_repeat_a_mirror_that_was_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = server.url.replace("127.0.0.1", "localhost")
    monkeypatch.setattr(request, "HUGGING_FACE", server.url)
    monkeypatch.setattr(request, "MIRROR", mirror)
    for chosen in ("", mirror, server.url):
        monkeypatch.setenv("HF_ENDPOINT", chosen)
        with pytest.raises(UserError, match="behind a proxy set HTTPS_PROXY") as caught:
            fetch("o/n", policy=FAST)
        assert (f"HF_ENDPOINT={mirror} ascendchat data fetch o/n" in str(caught.value)) == (chosen == server.url)
    monkeypatch.setenv("HTTPS_PROXY", "http://bobby:pa55word@127.0.0.1:1")
    with pytest.raises(UserError, match="HTTPS_PROXY is set: check that this proxy works") as caught:
        fetch("o/n", policy=FAST)
    assert "pa55word" not in str(caught.value)


def test_a_name_that_fails_does_not_keep_the_others_back(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    good, last = server.add("/good.bin", DATA), server.add("/last.bin", DATA)
    with pytest.raises(UserError, match=r"2 of 4 could not be fetched: climbmux, http.*/gone\.bin;"):
        command("climbmux", good, f"{server.url}/gone.bin", last)
    out = capsys.readouterr()
    assert out.out.count("verified") == 2
    assert "did you mean climbmix" in out.err
    assert "404" in out.err
