"""Watches one torchrun of `ascendchat launch`: shows rank 0, passes signals on, and leaves no process behind."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from ascendchat.launch.forkserver import Nursery, WarmAgent
from ascendchat.launch.rank import AUTOLOAD, KEPT_AUTOLOAD, MARK, log_file
from ascendchat.processes import started

POLL = 0.05  # seconds between two looks at rank 0's log
SLACK = 5.0  # seconds that torchrun itself gets to end after its ranks had their grace
STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # died of it, or ended because of it (train/signals.py)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class AttemptResult:
    """How one attempt ended. status: 0, the failing rank's exit status, or 128 + n when signal n ended it."""

    status: int
    log: Path
    rank: int | None = None
    others: tuple[int, ...] = ()
    shown: bool = False
    stopped: int = 0
    port_taken: bool = False
    detail: str = ""
    lost: bool = False  # no rank has begun: the process that forks (forkserver.py) has ended before


class _Agent(Protocol):
    """A running torchrun."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int, /) -> None: ...


class Follower:
    """Copies what is appended to a file to standard output; what was there before is not shown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = path.stat().st_size if path.exists() else 0
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pump(self) -> None:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.position)
            while chunk := file.read(65536):
                self.position += len(chunk)
                sys.stdout.write(self.decoder.decode(chunk))
        sys.stdout.flush()


class Signals:
    """Passes the first signal on to torchrun, which sends it to every rank once. After a second one all are killed."""

    def __init__(self) -> None:
        self.first = 0
        self.since = 0.0
        self.again = False
        self.agent: _Agent | None = None
        self._times = itertools.count()  # that the signal was about to be passed on

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.first:
            self.again = True
            return
        self.first, self.since = number, time.monotonic()
        self._pass_on()

    def attach(self, agent: _Agent) -> None:
        """From now on signals go there, also one that came while the process was being made."""
        self.agent = agent
        self._pass_on()

    def _pass_on(self) -> None:
        """Once, wherever in `attach` the signal came: torchrun kills the ranks at a second one."""
        if self.first and self.agent is not None and next(self._times) == 0:
            self.agent.send_signal(self.first)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
            yield
            return
        before = {number: signal.signal(number, self.handle) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def start_agent(words: list[str], environment: dict[str, str], log: Path, nursery: Nursery | None) -> _Agent:
    """torchrun, forked if there is somebody to do it.

    In a session of its own: Ctrl-C reaches the ranks through us, once, and not a second time from the terminal.
    """
    if nursery is not None:
        return WarmAgent(nursery, words, environment, log)
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "ascendchat.launch.agent", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def run_torchrun(
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    grace: float,
    show: bool,
    node: str = "",
    nursery: Nursery | None = None,
) -> AttemptResult:
    """Run torchrun with these arguments until it ends; `show` copies rank 0 to the console; `node`: see rank.py."""
    result, agent_log = folder / f"{node}result.json", folder / f"{node}torchrun.log"
    for old in (result, *_pid_files(folder, node)):  # of a launcher that was killed
        old.unlink(missing_ok=True)
    autoload = {KEPT_AUTOLOAD: environment.get(AUTOLOAD, ""), AUTOLOAD: "0"}
    limit = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(grace)))}
    follower, signals = Follower(log_file(folder, 0)), Signals()
    with signals.installed():
        agent = start_agent([str(result), *arguments], {**environment, **autoload, **limit}, agent_log, nursery)
        try:
            signals.attach(agent)
            while agent.poll() is None:
                if show:
                    follower.pump()
                impatient = signals.first and time.monotonic() > signals.since + grace + SLACK
                if signals.again or impatient:
                    agent.kill()
                time.sleep(POLL)
        finally:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
            begun = bool(_pid_files(folder, node))
            end_groups(folder, node)
        if show:
            follower.pump()
    code = agent.wait()
    if nursery is not None and nursery.broken and not begun and not result.exists() and not signals.first:
        return AttemptResult(1, agent_log, lost=True)
    return attempt_result(_read(result), folder, agent_log, code, signals.first, show)


def _pid_files(folder: Path, node: str) -> list[Path]:
    return list(folder.glob(f"{node}rank_*.pid"))


def end_groups(folder: Path, node: str) -> None:
    """End what is left of the process groups of this node's ranks (each rank leads its own)."""
    for path in _pid_files(folder, node):
        mark = path.read_text(encoding="ascii")
        pid = mark.partition(" ")[0]
        if pid.isdigit() and int(pid) > 1 and _is_group_of(int(pid), mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(pid), signal.SIGKILL)
        path.unlink(missing_ok=True)


def _is_group_of(pid: int, mark: str) -> bool:
    """True while the group with this number is that of the marked rank, and not of a process that got it later."""
    now = started(pid)
    if now or not started(os.getpid()):  # without /proc: it was written during this attempt, which must do
        return mark == f"{pid} {now}"
    # The rank is gone. The kernel gives its number to no other process while a child is left in the group, so it is
    # enough to find one child that carries the mark.
    return any(_is_child(int(path.name), pid, mark) for path in Path("/proc").glob("[0-9]*"))


def _is_child(process: int, group: int, mark: str) -> bool:
    try:
        if os.getpgid(process) != group:
            return False
        return f"{MARK}={mark}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is somebody else's
        return False


def _read(result: Path) -> dict[str, Any]:
    try:
        report = json.loads(result.read_text(encoding="utf-8"))
    except FileNotFoundError:  # torchrun died before it could tell
        return {"error": "torchrun ended without a report"}
    result.unlink(missing_ok=True)
    return dict(report)


def attempt_result(
    result: dict[str, Any], folder: Path, agent_log: Path, code: int, stopped: int, shown: bool
) -> AttemptResult:
    """What torchrun reported, its own exit status and the signal that we passed on -> how the attempt ended."""
    if stopped and code != 0:
        return AttemptResult(128 + stopped, log_file(folder, 0), stopped=stopped)
    failed = {int(rank): status for rank, status in result.get("failed", {}).items()}
    if failed:
        # A rank that torchrun stopped (SIGTERM, then SIGKILL) is not the cause. Of the others, the one whose log ended
        # first is.
        victims = {rank for rank, status in failed.items() if status in STOPPED} | set(result.get("killed", ()))

        def order(rank: int) -> tuple[bool, float, int]:
            log = log_file(folder, rank)
            return rank in victims, log.stat().st_mtime if log.exists() else 0.0, rank

        first = min(failed, key=order)
        status = failed[first] if failed[first] >= 0 else 128 - failed[first]
        others = tuple(sorted(rank for rank in failed if rank != first and rank not in victims))
        return AttemptResult(status, log_file(folder, first), first, others, shown and first == 0)
    if "error" in result:
        return AttemptResult(1, agent_log, port_taken=bool(result.get("port_taken")), detail=str(result["error"]))
    if code != 0:
        return AttemptResult(code if code > 0 else 128 - code, agent_log, detail=f"torchrun ended with status {code}")
    return AttemptResult(0, agent_log)
