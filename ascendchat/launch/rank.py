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
from pathlib import Path

from ascendchat.processes import RANK_FILES, started

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


def signal_groups(paths: list[Path], number: int) -> bool:
    """Send a signal to the process groups of these ranks; False when none of them has a process any more."""
    left = False
    for path in paths:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            pid, _, since = path.read_text(encoding="ascii").partition(" ")
            # A number that no process has, though its group has members, is given to no other process: these are ours.
            if pid.isdigit() and int(pid) > 1 and started(int(pid)) in ("", since):
                os.killpg(int(pid), number)
                left = True
    return left


def end_groups(logs: Path, prefix: str) -> None:
    """Kill what is left of the ranks and of all that they have started, and remove their pid files."""
    paths = pid_files(logs, prefix)
    signal_groups(paths, signal.SIGKILL)
    for path in paths:
        path.unlink(missing_ok=True)


def guard(logs: Path, prefix: str, grace: float) -> None:
    """Wait until the launcher, which holds the other end of the input, is gone; let its ranks save, then kill them."""
    sys.stdin.buffer.read()
    until = time.monotonic() + grace
    signalled: set[Path] = set()
    while time.monotonic() < until and signal_groups(paths := pid_files(logs, prefix), 0):
        signal_groups([path for path in paths if path not in signalled], signal.SIGTERM)
        signalled.update(paths)
        time.sleep(LOOK)
    end_groups(logs, prefix)


if __name__ == "__main__":
    if sys.argv[1] == "begin":
        begin(sys.argv[2:])
    else:
        guard(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
