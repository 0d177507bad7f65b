"""Forked ranks: what may go wrong around the process that forks them. The whole: tests/launch/test_warm_launch.py"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascendchat.cli import main
from ascendchat.launch import supervise
from ascendchat.launch.forkserver import Nursery, WarmAgent
from ascendchat.launch.supervise import Signals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
ROOT = Path(__file__).resolve().parents[2]
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
from ascendchat.launch.forkserver import ForkedRank
signal.signal(signal.SIGTERM, lambda *_: sys.exit("heard"))
os.register_at_fork(after_in_parent=lambda: (os.kill(os.getpid(), signal.SIGTERM), [0 for _ in range(1000)]))
ForkedRank(("rank.py", sys.argv[1]), dict(os.environ))
print("lost")
"""
    words = [sys.executable, "-c", script, str(tmp_path / "none")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "lost" not in result.stdout
    assert result.returncode == 1
    assert "heard" in result.stderr  # of the rank, which has no folder, there is a traceback, too, perhaps in between


class Told:
    """A nursery of which the test says what is heard, and what happens while that is read."""

    broken = False

    def __init__(self, *answers: int) -> None:
        self.answers, self.meanwhile = list(answers), lambda: None

    def tell(self, what: object) -> None:
        pass

    def heard(self) -> int | None:
        found, now = self.answers.pop(0) if self.answers else None, self.meanwhile
        self.meanwhile = lambda: None
        now()
        return found


def agent_of(nursery: Any, tmp_path: Path) -> WarmAgent:
    return WarmAgent(nursery, [], {}, tmp_path / "log")


def test_a_signal_for_a_torchrun_whose_end_is_not_told_yet_is_no_error(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    agent = agent_of(Told(ended.pid), tmp_path)
    agent.send_signal(signal.SIGTERM)  # it is not there yet
    assert agent.poll() is None
    agent.send_signal(signal.SIGTERM)
    agent.kill()


def test_a_signal_that_comes_while_answers_are_read_takes_none_of_them(tmp_path: Path) -> None:
    """The status of a torchrun that has failed would be taken for its number, and process 1 be ended."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        nursery, signals = Told(other.pid, 1), Signals()
        signals.agent = agent = agent_of(nursery, tmp_path)
        nursery.meanwhile = lambda: signals.handle(signal.SIGTERM, None)
        try:
            assert agent.poll() == 1
            assert agent.pid == other.pid
            assert other.wait(60) == -signal.SIGTERM
        finally:
            other.kill()


class Early(Signals):
    """A signal comes between the moment in which it knows the process and the next line."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "agent" and value is not None:
            self.handle(signal.SIGTERM, None)


@pytest.mark.parametrize("when", ["before", "meanwhile", "behind"])
def test_a_signal_around_the_start_of_torchrun_reaches_it_once(when: str) -> None:
    """At a second one it would kill the ranks that are saving."""
    sent: list[int] = []
    agent: Any = SimpleNamespace(send_signal=sent.append)
    signals = Early() if when == "meanwhile" else Signals()
    if when == "before":
        signals.handle(signal.SIGTERM, None)
    signals.attach(agent)
    if when == "behind":
        signals.handle(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]
    signals.handle(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM]
    assert signals.again


@pytest.mark.parametrize("begun", [True, False])
def test_only_an_attempt_that_never_began_is_made_again_under_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Other nodes count one whose ranks have run, and meet on the port of the next."""

    def start(*known: object) -> Any:
        if begun:
            (tmp_path / "rank_0.pid").write_text("0 0", encoding="ascii")
        return SimpleNamespace(poll=lambda: 1, wait=lambda: 1)

    monkeypatch.setattr(supervise, "start_agent", start)
    nursery: Any = SimpleNamespace(broken=True)  # killed
    outcome = supervise.run_torchrun([], tmp_path, {}, 1.0, show=False, nursery=nursery)
    assert (outcome.status, outcome.lost) == (1, not begun)


RANKS = """
import os, signal, sys, time
from ascendchat.launch.forkserver import ForkedRank
os.register_at_fork(after_in_child=lambda: {late})
rank = ForkedRank(("rank.py", sys.argv[1]), {{**os.environ, "RANK": "0"}})
os.killpg(rank.pid, signal.SIGTERM)  # as torchrun does
print(rank.wait(60))
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def forked(tmp_path: Path, late: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "witness.py").write_text("import os, time\nopen('ran', 'w').close()\ntime.sleep(600)\n")
    (tmp_path / "program.json").write_text('["-m", "witness"]')
    words = [sys.executable, "-c", RANKS.format(late=late), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


def test_a_rank_leads_its_group_before_anybody_can_signal_it(tmp_path: Path) -> None:
    found = forked(tmp_path, "time.sleep(0.5)")
    assert (found.returncode, found.stdout) == (0, f"{-signal.SIGTERM}\n"), found.stderr


def test_a_rank_whose_torchrun_was_killed_before_it_could_ask_ends(tmp_path: Path) -> None:
    """Linux tells of a parent's death only those that have asked before."""
    found = forked(tmp_path, "(os.kill(os.getppid(), signal.SIGKILL), time.sleep(0.5))")
    assert found.returncode == -signal.SIGKILL
    pid, until = int((tmp_path / "rank_0.pid").read_text().split()[0]), time.monotonic() + 60
    try:
        while runs(pid) and not (tmp_path / "ran").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert not (tmp_path / "ran").exists()
        assert not runs(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
