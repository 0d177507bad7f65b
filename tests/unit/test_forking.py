"""Forked ranks: what may go wrong around the process that forks them. The whole: tests/dist/test_warm_launch.py"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascendchat.cli import main
from ascendchat.launch.warm import Nursery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
PROGRAM = ["-m", "json"]  # has no preload: the process ends at once


def test_what_python_prints_at_its_start_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    nursery, log = Nursery(PROGRAM, environment, tmp_path / "warm.log"), tmp_path / "warm.log"
    until = time.monotonic() + 300
    while not nursery.broken and time.monotonic() < until:
        assert nursery.heard() is None
        time.sleep(0.02)
    assert nursery.broken
    nursery.close()
    assert log.read_text().startswith("hello\n")


def test_a_nursery_that_has_died_can_be_told_and_closed(tmp_path: Path) -> None:
    nursery = Nursery(PROGRAM, dict(os.environ), tmp_path / "warm.log")
    nursery.process.kill()
    nursery.process.wait()
    nursery.tell({"words": []})
    nursery.close()


def test_a_home_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", "/proc/nothing")
    flags = ["--devices", "1", "--device-type", "cpu", "--max-restarts", "1"]
    assert main(["launch", *flags, "base", "--depth", "1"]) == 2
    assert "cannot write the logs to /proc/nothing" in capsys.readouterr().err


def test_a_signal_while_a_rank_is_forked_is_not_lost(tmp_path: Path) -> None:
    """What a handler raises inside a hook of os.fork is only printed; torchrun's handlers raise."""
    script = """
import os, signal, sys
from ascendchat.launch.forking import ForkedRank
signal.signal(signal.SIGTERM, lambda *_: sys.exit("heard"))
os.register_at_fork(after_in_parent=lambda: (os.kill(os.getpid(), signal.SIGTERM), [0 for _ in range(1000)]))
ForkedRank(("rank.py", sys.argv[1]), dict(os.environ))
print("lost")
"""
    words = [sys.executable, "-c", script, str(tmp_path / "none")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "lost" not in result.stdout
    assert result.returncode == 1
    assert "heard\n" in result.stderr  # of the rank, which has no folder, there is a traceback, too
