"""Many processes fetch once; a process killed with SIGKILL leaves what the next one can trust."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
from http_server import CHUNK, FAST, Server, noise, serve

from ascendchat.data.fetch import fetch, folder_of
from ascendchat.data.fetch import lock as locking
from ascendchat.data.fetch.lock import DownloadProgress, Lock
from ascendchat.errors import home

WORKERS = 4
fork = multiprocessing.get_context("fork")  # cheap, and nothing here touches a device


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that counts what it sends."""
    yield from serve(monkeypatch)


def start(url: str, **options: object) -> multiprocessing.process.BaseProcess:
    process = fork.Process(target=fetch, args=(url,), kwargs={"workers": WORKERS, "policy": FAST, **options})
    process.start()
    return process


def test_four_processes_together_download_each_byte_once(server: Server) -> None:
    files = {f"data/{i}.bin": noise(i, 3 * CHUNK + i) for i in range(3)}
    server.hugging_face("o/n", files)
    server.rate = 2e6
    processes = [start("o/n") for _ in range(4)]
    for process in processes:
        process.join(120)
    assert [p.exitcode for p in processes] == [0] * 4
    folder = home() / "data" / "o--n"
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert server.sent() == sum(map(len, files.values()))
    assert sum("/tree/" in a.path for a in server.asked) == 1


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locking, "LOG_INTERVAL", 0.0)
    with Lock(home() / "data" / "x", "x") as lock:
        lock.note(", 40 %")
        other = Lock(home() / "data" / "x", "x")  # those who wait are told who downloads
        other._handle = os.open(other.path, os.O_RDWR)
        assert not other._take()
        assert re.fullmatch(rf" \(process {os.getpid()} on .*, 40 %\)", other._progress())
        os.close(other._handle)
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


def test_after_kill_9_who_waited_fetches_the_missing_bytes_only(server: Server) -> None:
    content = noise(5, 24 * CHUNK + 7)
    url = server.add("/a.bin", content)
    server.rate = 3e5  # bytes per second and connection: about 1.3 s for the file
    process = start(url)
    while not server.sent("/a.bin"):
        time.sleep(0.002)
    waiting = start(url)
    while server.sent("/a.bin") < 9 * CHUNK:
        assert process.is_alive()
        time.sleep(0.002)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    server.rate = 0.0
    waiting.join(120)
    assert waiting.exitcode == 0, "the lock was not given back"
    assert (folder_of(url) / "a.bin").read_bytes() == content
    server.settle()
    assert server.sent("/a.bin") <= len(content) + WORKERS * CHUNK, "more than one range per connection was lost"
