"""Many processes fetch once; a process killed with SIGKILL leaves what the next one can trust."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import CHUNK, FAST, Server, noise, serve

from ascendchat.config import home
from ascendchat.data.fetch import fetch, folder_of
from ascendchat.data.fetch import lock as locking
from ascendchat.data.fetch.lock import DownloadProgress, Lock
from ascendchat.data.fetch.partfile import PartFile

WORKERS = 4
fork = multiprocessing.get_context("fork")  # cheap, and nothing here touches a device


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    yield from serve(monkeypatch)


def start(url: str, **options: object) -> multiprocessing.process.BaseProcess:
    process = fork.Process(target=fetch, args=(url,), kwargs={"workers": WORKERS, "policy": FAST, **options})
    process.start()
    return process


def test_eight_processes_together_download_each_byte_once(server: Server) -> None:
    files = {f"data/{i}.bin": noise(i, 3 * CHUNK + i) for i in range(3)}
    server.hugging_face("o/n", files)
    server.rate = 2e6
    processes = [start("o/n") for _ in range(8)]
    for process in processes:
        process.join(120)
    assert [p.exitcode for p in processes] == [0] * 8
    folder = home() / "data" / "o--n"
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert server.sent() == sum(map(len, files.values()))
    assert sum("/tree/" in a.path for a in server.asked) == 1


def test_those_who_wait_are_told_who_downloads(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Lock(home() / "data" / "x", "x") as held:
        held.note(", 40 %")
        other = Lock(home() / "data" / "x", "x")
        other._handle = os.open(other.path, os.O_RDWR)
        assert not other._take()
        assert other._progress().startswith(f" (process {os.getpid()} on ")
        assert other._progress().endswith(", 40 %)")
    assert other._take()
    os.close(other._handle)


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locking, "EVERY", 0.0)
    with Lock(home() / "data" / "x", "x") as lock:
        with DownloadProgress("climbmix", 9, 4 << 20, lock) as progress:
            progress.show(1 << 20, 2)
        line = capsys.readouterr().err
        assert line.startswith("climbmix: 2 of 9 files, 1.0 MiB of 4.0 MiB, ")
        monkeypatch.setattr(locking, "is_live", lambda _: True)
        monkeypatch.setenv("FORCE_COLOR", "1")
        with DownloadProgress("climbmix", 9, 4 << 20, lock) as progress:
            progress.show(1 << 20, 2)
        bar = capsys.readouterr().err
        assert "climbmix 2/9" in bar
        assert "1.0/4.2 MB" in bar or "1.0/4.0 MiB" in bar
        monkeypatch.setenv("LOCAL_RANK", "3")
        with DownloadProgress("climbmix", 9, 4 << 20, lock) as progress:
            progress.show(1 << 20, 2)
        assert capsys.readouterr().err == ""


def kill_and_resume(server: Server, points: int, seed: int) -> int:
    """Kill a download at random moments and take it up again; returns how many kills hit it half-way."""
    rng = random.Random(seed)
    half_way = 0
    for point in range(points):
        content = noise(seed + point, 24 * CHUNK + rng.randrange(CHUNK))
        url = server.add(f"/{point}.bin", content)
        path = f"/{point}.bin"
        server.rate = 1.5e6  # bytes per second and connection: about 0.3 s for the file
        process = start(url)
        deadline = time.monotonic() + 120
        aim = rng.randrange(len(content))  # die when about this much was sent
        while server.sent(path) < aim and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        server.rate = 0.0
        server.settle()
        final = folder_of(url) / f"{point}.bin"
        kept = journalled(final, url)
        wasted = server.sent(path) - kept
        assert wasted <= WORKERS * CHUNK, "more than one range per connection was lost"
        before = server.sent(path)
        if not final.exists():
            half_way += 0 < kept < len(content)
            fetch(url, workers=WORKERS, policy=FAST)
        assert final.read_bytes() == content
        missing = len(content) - kept
        assert server.sent(path) - before == missing, "bytes on disk were fetched again"
    return half_way


def journalled(final: Path, url: str) -> int:
    """Bytes the journal vouches for, as the next run will see them."""
    if final.exists():
        return final.stat().st_size
    if not final.with_name(final.name + ".part").exists():
        return 0
    part = PartFile(final)
    part.open("", url)
    part.close()
    return sum(end - start for start, end in part.ranges)


def test_after_kill_9_only_the_missing_bytes_are_fetched_again(server: Server) -> None:
    assert kill_and_resume(server, points=3, seed=1) >= 1


@pytest.mark.slow
def test_after_kill_9_at_20_random_points_only_the_missing_bytes_are_fetched_again(server: Server) -> None:
    assert kill_and_resume(server, points=20, seed=7) >= 10


def test_a_killed_download_gives_the_lock_back(server: Server) -> None:
    url = server.add("/a.bin", noise(5, 20 * CHUNK))
    server.rate = 1e6
    process = start(url)
    while server.sent() < 2 * CHUNK:
        time.sleep(0.005)
    waiting = start(url)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    server.rate = 0.0
    waiting.join(120)
    assert waiting.exitcode == 0
    assert (folder_of(url) / "a.bin").read_bytes() == server.files["/a.bin"].content
