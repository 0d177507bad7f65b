"""Ranks that start in a tenth of a second: forked from one process that has imported all they need.

    ascendchat launch --devices 8 --max-restarts 50 base --depth 20

Importing torch and the plug-in of a device takes seconds of CPU time, in every rank and in torchrun itself, and again
after every failure. With --max-restarts one process (forkserver.py) imports them once, never touches a device, and forks a
torchrun for each attempt, which forks its ranks. Only for commands of our own, on Linux; where it cannot be done the
ranks start as always. This file is the launcher's side of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK = 0.01  # seconds between two looks at a process that is waited for


class Nursery:
    """The process that forks, seen from the launcher. It ends when the launcher does."""

    def __init__(self, program: list[str], environment: dict[str, str], log: Path) -> None:
        self._answers, answers = os.pipe()  # not its output, to which anything may be printed
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ascendchat.launch.forkserver", str(answers)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment,
                pass_fds=[answers],
                start_new_session=True,
            )
        os.close(answers)
        os.set_blocking(self._answers, False)
        self.broken = False  # nothing comes from it any more
        self._read = b""
        self.tell(program)

    def tell(self, what: object) -> None:
        """One line to the process; that it has ended is seen by `heard`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()

    def heard(self) -> int | None:
        """The next number that it has sent, if there is one."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._answers, 4096):
                self._read += piece
            self.broken = True
        line, found, rest = self._read.partition(b"\n")
        if not found:
            return None
        self._read = rest
        return int(line)

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended before
            self.process.stdin.close()
        os.close(self._answers)
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()


class WarmAgent:
    """A torchrun that the nursery has forked, with those methods of subprocess.Popen that supervise.py needs."""

    def __init__(self, nursery: Nursery, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.nursery, self.pid, self.returncode = nursery, 0, None  # type: tuple[Nursery, int, int | None]
        self._waiting: list[int] = []  # signals for a process that is not there yet
        nursery.tell({"words": words, "env": environment, "log": str(log)})

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        if not self.pid and (number := self.nursery.heard()):
            self.pid = number
            for waiting in self._waiting:
                self._signal(waiting)
        if self.pid and self.returncode is None:
            self.returncode = self.nursery.heard()
        if self.returncode is None and self.nursery.broken:
            self.returncode = 1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Does not look for news: a handler may call this while `poll` has half of them in its hands."""
        if self.pid:
            self._signal(number)
        else:
            self._waiting.append(number)

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which has not been told yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """At once, also while modules are still imported."""
        if self.poll() is None and not self.pid:
            self.nursery.process.kill()
        else:
            self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(LOOK)
        return status
