"""The processes of a rank of `ascendchat launch`: how they begin, and how all of them end, whoever is killed.

    python -m ascendchat.launch.rank begin WORDS...                # by torchrun: becomes Python with these words
    python -m ascendchat.launch.rank guard LOGS PREFIX SECONDS     # beside the launcher: ends ranks that outlive it

A rank leads a process group of its own. Its pid file holds its process id and when it started, so that another process
that gets the id later is not taken for it. Standard library only, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ascendchat.processes import PARENT_LOOK, RANK_FILES, started

LOOK = 0.05  # seconds between two looks at ranks that shall end


def begin(words: list[str]) -> None:
    """Take no input, send all output to one file, write the pid file and become the program; the process id stays."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1, 2)
    own = os.getpid()
    Path(f"{os.environ[RANK_FILES]}{os.environ['RANK']}.pid").write_text(f"{own} {started(own)}", encoding="ascii")
    os.execv(sys.executable, [sys.executable, "-u", *words])


def pid_files(logs: Path, prefix: str) -> list[Path]:
    """The pid files of this node, of whatever attempt."""
    return list(logs.glob(f"attempt_*/{prefix}rank_*.pid"))


def _content(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii")
    return ""


def signal_groups(ranks: Iterable[str], number: int) -> bool:
    """Send a signal to the process groups of these ranks, given as the contents of their pid files; False when none of
    them has a process any more."""
    left = False
    for text in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pid, _, since = text.partition(" ")
            # A number that no process has, though its group has members, is given to no other process: these are ours.
            if pid.isdigit() and int(pid) > 1 and started(int(pid)) in ("", since):
                os.killpg(int(pid), number)
                left = True
    return left


def forget_ranks(logs: Path, prefix: str) -> None:
    """Remove pid files of an earlier launch that was killed together with its guard: they are no ranks of this one."""
    for path in pid_files(logs, prefix):
        path.unlink(missing_ok=True)


def end_groups(logs: Path, prefix: str) -> None:
    """Kill what is left of the ranks and of all that they have started, and remove their pid files."""
    paths = pid_files(logs, prefix)
    signal_groups(map(_content, paths), signal.SIGKILL)
    for path in paths:
        path.unlink(missing_ok=True)


def guard(logs: Path, prefix: str, grace: float) -> None:
    """Wait until the launcher, which holds the other end of the input, is gone; let its ranks save, then kill them.

    The ranks are those that had begun by then: meanwhile another launch of the same run may use the same files."""
    parent = os.getppid()
    sys.stdin.buffer.read()
    until = time.monotonic() + PARENT_LOOK  # a launcher that is killed closes its pipes before it is gone
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(0.01)
    ranks = {path: _content(path) for path in pid_files(logs, prefix)}
    until = time.monotonic() + grace
    signal_groups(ranks.values(), signal.SIGTERM)
    while time.monotonic() < until and signal_groups(ranks.values(), 0):
        time.sleep(LOOK)
    signal_groups(ranks.values(), signal.SIGKILL)
    for path, text in ranks.items():
        if _content(path) == text:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[1] == "begin":
        begin(sys.argv[2:])
    else:
        guard(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
