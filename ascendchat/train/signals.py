"""SIGTERM and Ctrl-C while `ascendchat base`, `mid` or `sft` trains: save and end, or end at once.

with StopSignals(run) as signals:
    signals.unsaved = True          # from now on there is something to save
    signals.received                # the loop looks here after every step
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ascendchat.checkpoint import WRITING
from ascendchat.parallel import collectives
from ascendchat.processes import lost_ranks
from ascendchat.runs.run import Run, old_models_notice

LAST = 10.0  # seconds for a checkpoint that is being written when another rank dies
SAME = 0.5  # seconds: `timeout` and job managers send one signal twice, to the process and to its group


class Interrupted(KeyboardInterrupt):
    """A signal came in the middle of something that may be broken off."""


class StopSignals:
    """SIGTERM and SIGINT ask for a checkpoint and an end. Where there is nothing to save, and at a second one, the
    process ends at once, also in the middle of a long operation: Python's own handlers run only after it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.received, self.leaving, self.unsaved = 0, False, False
        self.last_save = False  # no collective follows: ranks that have ended are missed by nobody

    def __enter__(self) -> StopSignals:
        self.before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write)  # the interpreter writes a signal's number there at once
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def _listen(self) -> None:
        first: float | None = None
        while number := os.read(self._read, 1):
            if number[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            if not self.unsaved:
                self._end(number[0], "stopped by a signal; there was nothing to save")
            elif not self.last_save and lost_ranks():
                self._end_alone(number[0])
            elif first is None:
                first = time.monotonic()
            elif time.monotonic() - first > SAME:
                self._end(number[0], "stopped by a second signal, at once")
        os.close(self._read)

    def _end_alone(self, number: int) -> None:
        """Another rank has died, and the main thread waits for it in a collective: nothing of this step can be saved.
        A checkpoint that is being written is worth a moment."""
        for thread in threading.enumerate():
            if thread.name == WRITING:
                thread.join(LAST)
        self._end(number, "another rank has ended; this one goes, too")

    def _end(self, number: int, reason: str) -> None:
        if self.run.main:
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar has hidden it
            with contextlib.suppress(OSError):
                os.write(2, f"{cursor}{reason}\n{old_models_notice(self.run.folder)}".encode().rstrip() + b"\n")
                self.run.note(status="stopped", ended=round(time.time(), 3))
        os._exit(128 + number)

    def _note(self, number: int, frame: Any) -> None:
        self.received = number
        if self.leaving:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal interrupts the code in here. Not on several ranks: those without a signal would wait."""
        self.leaving = collectives.world().size == 1
        try:
            if self.leaving and self.received:
                raise Interrupted
            yield
        finally:
            self.leaving = False

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)  # the listener reads the end, and ends
        for number, handler in self.before.items():
            signal.signal(number, handler)
