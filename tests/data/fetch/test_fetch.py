"""`ascendchat data fetch` from servers that misbehave: files end bit-correct, or an error names file and remedy."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_server import CHUNK, DATA, FAST, HASTY, Server, noise, serve

from ascendchat.data.fetch import Policy, fetch, folder_of
from ascendchat.data.fetch import command as fetching
from ascendchat.data.fetch.download import Downloader, FileDownload, PartFile, RemoteFile, Restarted, range_answer
from ascendchat.data.fetch.http import Web, retry_after
from ascendchat.errors import UserError, home


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that misbehaves on demand."""
    yield from serve(monkeypatch)


def clean(folder: Path, names: list[str]) -> bool:
    """Nothing is in the folder but these files and our own two."""
    have = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return have == {*names, "manifest.json", ".lock"}


FAULTS = (
    "good, truncate truncate truncate, truncate 500 truncate 503, 502 504, stall truncate, long-length, short-length, "
    "429:1, redirect:/other.bin, wrong-range, whole truncate whole, html, chunked"
)


@pytest.mark.parametrize("faults", FAULTS.split(", "))
def test_a_file_ends_bit_correct_whatever_the_server_does(server: Server, faults: str) -> None:
    server.add("/other.bin", b"PK" + DATA)
    url = server.add("/a.zip", b"PK" + DATA, *faults.replace("good", "").split())
    folder = fetch(url, policy=HASTY if "stall" in faults else FAST, workers=3)
    assert (folder / "a.zip").read_bytes() == b"PK" + DATA
    assert clean(folder, ["a.zip"])
    entry = json.loads((folder / "manifest.json").read_text())["files"]["a.zip"]
    assert entry["bytes"] == len(DATA) + 2
    assert entry["sha256"] == hashlib.sha256(b"PK" + DATA).hexdigest()


def test_servers_without_ranges_lengths_or_validators_are_good_enough(server: Server) -> None:
    for always in ("whole", "chunked", "no-tag", "wrong-range"):
        folder = fetch(server.add(f"/{always}.bin", DATA, "truncate", always=always), policy=FAST, workers=4)
        assert (folder / f"{always}.bin").read_bytes() == DATA


@pytest.mark.parametrize(
    ("always", "says"),
    [
        ("500", "answered 500"),
        ("truncate", "gave up"),
        ("stall", "ReadTimeout"),
        ("drip", "bytes in"),
        ("403", "HF_TOKEN"),
        ("404", "no such file"),
        ("html", "web page"),
        ("redirect:/a.parquet", "TooManyRedirects"),
    ],
)
def test_a_server_that_never_recovers_gives_an_error_with_file_and_remedy(
    server: Server, always: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.add("/a.parquet", noise(1, 400), always=always)
    seconds = {"stall": 0.1, "drip": 1.0}.get(always, 30.0)  # whoever drips sends a byte every 50 ms
    attempts = 1 if always == "drip" else 2  # some bytes are progress: it would be asked twenty times
    policy = Policy(chunk=CHUNK, attempts=attempts, backoff=0.01, max_backoff=0.02, timeout=seconds, min_rate=1000)
    with pytest.raises(UserError, match=says) as caught:
        fetch(url, policy=policy)
    assert "a.parquet" in str(caught.value)
    assert "ascendchat data fetch" in str(caught.value)
    assert not (folder_of(url) / "a.parquet").exists()
    assert {part.name for part in folder_of(url).glob("a.parquet*") if not part.stat().st_size} == set()
    assert says in capsys.readouterr().err


def test_a_flipped_bit_is_found_by_the_checksum_of_the_hub_and_fetched_again(server: Server) -> None:
    server.hugging_face("o/n", {"x.parquet": DATA, "README.md": b"hello"}, small=("README.md",))
    server.files["/cdn/o/n/x.parquet"].faults = ["", "flip"]
    server.files["/cdn/o/n/README.md"].faults = ["flip"]
    folder = fetch("o/n", policy=FAST)
    assert (folder / "x.parquet").read_bytes() == DATA
    assert (folder / "README.md").read_bytes() == b"hello"


def test_a_file_that_is_always_corrupt_is_named_and_never_visible(server: Server) -> None:
    server.hugging_face("o/n", {"good.bin": DATA, "x.bin": DATA})
    server.files["/cdn/o/n/x.bin"].always = "flip"
    with pytest.raises(UserError, match=r"x\.bin: the file received is corrupt \(sha256 .*--source DIR"):
        fetch("o/n", policy=FAST)
    assert not (home() / "data" / "o--n" / "x.bin").exists()


def test_a_file_that_changes_half_way_is_never_mixed(server: Server) -> None:
    new = noise(2, len(DATA))
    url = server.add("/a.bin", DATA, "", "", "change", changed=new)
    folder = fetch(url, policy=FAST, workers=2)
    assert (folder / "a.bin").read_bytes() == new
    assert any(asked.headers.get("if-range") for asked in server.asked)


def test_a_change_between_two_runs_starts_the_file_anew(server: Server) -> None:
    url = server.add("/a.bin", DATA, "", "", "404")
    with pytest.raises(UserError):
        fetch(url, policy=FAST, workers=1)
    part = folder_of(url) / "a.bin.part"
    assert part.read_bytes()[:CHUNK] == DATA[:CHUNK]
    server.files["/a.bin"].content = new = noise(3, len(DATA))
    assert (fetch(url, policy=FAST, workers=1) / "a.bin").read_bytes() == new


def test_an_interrupted_file_continues_with_the_missing_bytes_only(server: Server) -> None:
    url = server.add("/a.bin", DATA, *[""] * 4, "404")
    with pytest.raises(UserError):
        fetch(url, policy=FAST, workers=1)
    assert server.sent() == 4 * CHUNK
    assert (fetch(url, policy=FAST, workers=3) / "a.bin").read_bytes() == DATA
    assert server.sent() == len(DATA)


def test_bytes_of_a_part_file_that_rotted_are_fetched_again(server: Server) -> None:
    url = server.add("/a.bin", DATA, *[""] * 4, "404")
    with pytest.raises(UserError):
        fetch(url, policy=FAST, workers=1)
    part = folder_of(url) / "a.bin.part"
    content = bytearray(part.read_bytes())
    content[CHUNK + 5] ^= 1
    part.write_bytes(content)
    assert (fetch(url, policy=FAST) / "a.bin").read_bytes() == DATA
    assert server.sent() == len(DATA) + CHUNK  # the one range whose CRC was wrong


def test_a_part_without_validator_or_checksum_is_not_trusted_by_the_next_run(server: Server) -> None:
    url = server.add("/a.bin", DATA, "no-tag", "no-tag", "404", always="no-tag")
    with pytest.raises(UserError):
        fetch(url, policy=FAST, workers=1)
    server.files["/a.bin"].content = new = noise(4, len(DATA))
    assert (fetch(url, policy=FAST, workers=1) / "a.bin").read_bytes() == new


def test_what_is_there_is_not_asked_for_again_and_damage_is_mended(server: Server) -> None:
    url = server.add("/a.bin", DATA)
    assert (fetch(server.add("/none.bin", b""), policy=FAST) / "none.bin").read_bytes() == b""
    folder = fetch(url, policy=FAST)
    asked = len(server.asked)
    assert fetch(url, policy=FAST) == folder
    assert len(server.asked) == asked
    assert fetch(url, policy=FAST, check=True) == folder  # asks whether it changed, and takes no content
    deadline = time.monotonic() + 30
    while not server.asked[asked].sent and time.monotonic() < deadline:  # counted behind the sending
        time.sleep(0.01)
    assert [a.sent for a in server.asked[asked:]] == [1]
    content = bytearray(DATA)
    content[17] ^= 1
    (folder / "a.bin").write_bytes(content)  # same size: only the checksum knows
    assert (fetch(url, policy=FAST, check=True) / "a.bin").read_bytes() == DATA
    (folder / "a.bin").write_bytes(DATA[:-1])  # another size is seen without hashing
    assert (fetch(url, policy=FAST) / "a.bin").read_bytes() == DATA


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hugging_face("o/n", {"x.bin": DATA})
    usage = fetching.shutil.disk_usage(home())
    monkeypatch.setattr(
        fetching.shutil, "disk_usage", lambda _: usage._replace(free=fetching.MIN_FREE_BYTES + len(DATA) - 1)
    )
    with pytest.raises(UserError, match=r"needs 640\.1 KiB .*--out"):
        fetch("o/n", policy=FAST)
    assert server.sent() == 0
    monkeypatch.setattr(
        fetching.shutil, "disk_usage", lambda _: usage._replace(free=fetching.MIN_FREE_BYTES + len(DATA))
    )
    assert (fetch("o/n", policy=FAST) / "x.bin").read_bytes() == DATA


def test_the_timeout_variable_of_the_hub_is_respected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "0.2")
    url = server.add("/a.bin", DATA, "stall")
    slow = Policy(chunk=CHUNK, backoff=0.01, timeout=600)
    assert (fetch(url, policy=slow, workers=1) / "a.bin").read_bytes() == DATA
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "soon")
    with pytest.raises(UserError, match="HF_HUB_DOWNLOAD_TIMEOUT"):
        fetch(server.add("/b.bin", DATA))


def test_headers_are_read_as_the_standard_says() -> None:
    ranges = {"bytes 0-99/1000": (0, 1000), "bytes 5-9/*": (5, None), "items 0-1/2": None}
    assert [range_answer(header) for header in ranges] == [*ranges.values()]
    assert [retry_after(header) for header in ("7", "Wed, 21 Oct 2015 07:28:00 GMT", "soon")] == [7, 0, 0]


def test_a_torn_journal_line_is_not_believed(tmp_path: Path) -> None:
    part = PartFile(tmp_path / "f")
    part.open("sha", "u")
    part.begin(300, "sha", "u", "")
    part.write(0, b"a" * 100)
    part.flush()
    part.commit(0, 100, zlib.crc32(b"a" * 100))
    part.close()
    with part.journal.open("a") as journal:
        journal.write("100 200 12")  # killed in the middle of a line
    again = PartFile(tmp_path / "f")
    again.open("sha", "u")
    assert again.gaps(150) == [(100, 250), (250, 300)]
    again.close()
    other = PartFile(tmp_path / "f")
    other.open("another", "u")
    assert other.size is None
    other.close()


def test_a_late_answer_to_an_abandoned_attempt_decides_nothing_about_the_new_one(tmp_path: Path) -> None:
    job = FileDownload(RemoteFile("f", "u"), tmp_path)
    job.part.open("", "u")
    job.generation, job.state = 1, "opening"  # restarted by another thread while this answer was on its way
    old = SimpleNamespace(status_code=206, headers={"content-range": "bytes 0-9/10", "etag": '"old"'})
    with Web(FAST) as web:
        engine = Downloader([job], web, lambda *_: None)
        with pytest.raises(Restarted):
            engine._accept(job, 0, old, 0)
        assert (job.part.size, job.part.tag, job.state) == (None, "", "opening")
        engine._accept(job, 1, old, 0)
        assert (job.part.size, job.part.tag, job.state) == (10, '"old"', "ready")
    job.part.close()
