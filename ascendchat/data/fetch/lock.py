"""Lock: one process downloads, the others wait and show its progress. Used by `ascendchat data fetch` and by every
rank.

    with Lock(folder, "climbmix") as lock:      # lock.waited: another process had it first
        with DownloadProgress("climbmix", files=9, total=900_000_000, lock=lock) as progress:
            progress.show(done_bytes, done_files)

The lock is `flock` on FOLDER/.lock: the kernel releases it when its holder dies, so it is never stale.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ascendchat.data.fetch.http import redact
from ascendchat.errors import UserError
from ascendchat.runs.console import clock, is_live

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LOG_INTERVAL = 10.0  # seconds


def quiet() -> bool:
    """True on ranks other than the first of a machine, which print nothing."""
    return os.environ.get("LOCAL_RANK", "0") not in ("", "0")


def notify(text: str) -> None:
    if not quiet():
        print(redact(text), file=sys.stderr, flush=True)


def readable_size(count: float) -> str:
    """Format bytes for people: 1,234,567 -> 1.2 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


class Lock:
    """The right of one process (or thread) to write into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / ".lock"
        self.name = name
        self.waited = False
        self._handle = -1

    def __enter__(self) -> Lock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write into {self.path.parent}: {error.strerror}; choose another folder with --out or "
                "ASCENDCHAT_HOME"
            ) from None
        last_notice = time.monotonic() - LOG_INTERVAL + 2.0  # a short wait is not worth a line
        while not self._take():
            self.waited = True
            if time.monotonic() - last_notice >= LOG_INTERVAL:
                last_notice = time.monotonic()
                notify(f"{self.name}: another process is fetching it{self._progress()}; waiting")
            time.sleep(0.1)
        self.note("")
        return self

    def _take(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR):
                return False
            raise UserError(
                f"the file system of {self.path.parent} has no locks ({error.strerror}); put ASCENDCHAT_HOME on one "
                "that has"
            ) from None
        return True

    def _progress(self) -> str:
        try:
            state = json.loads(os.pread(self._handle, 500, 0))
            return f" (process {state['pid']} on {state['host']}{state['text']})"
        except (ValueError, KeyError, TypeError, OSError):  # just being rewritten
            return ""

    def note(self, text: str) -> None:
        """Tell the waiting processes about the progress."""
        state = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "text": text}).encode()
        os.pwrite(self._handle, state, 0)
        os.ftruncate(self._handle, len(state))

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)  # closing gives the lock up


class DownloadProgress:
    """A bar on a terminal, plain lines elsewhere, nothing on ranks other than the first."""

    def __init__(self, name: str, files: int, total: int, lock: Lock) -> None:
        self.name, self.files, self.total, self.lock = name, files, total, lock
        self._bar: Bar | None = None
        self._said = self._noted = self._began = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> DownloadProgress:
        if is_live(sys.stderr) and not quiet():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Bar(TextColumn("{task.description}"), *columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self.name, total=self.total or None)
            self._bar.start()
        return self

    def show(self, received: int, finished: int) -> None:
        """Show the progress: called a few times a second with the bytes received so far, those of earlier runs
        included."""
        now = time.monotonic()
        if self._first is None:
            self._first = received
        text = f"{self.name}: {finished} of {self.files} files, {readable_size(received)}"
        if self.total:
            text += f" of {readable_size(self.total)}"
        if now - self._noted > 1.0:
            self._noted = now
            self.lock.note(f", {100 * received / self.total:.0f} %" if self.total else f", {readable_size(received)}")
        if self._bar is not None:
            task = self._bar.tasks[0].id
            self._bar.update(task, completed=received, description=f"{self.name} {finished}/{self.files}")
        elif now - self._said >= LOG_INTERVAL:
            self._said = now
            rate = (received - self._first) / (now - self._began)
            left = f", {clock((self.total - received) / rate)} left" if rate > 0 and self.total else ""
            notify(f"{text}, {readable_size(max(0.0, rate))}/s{left}")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
