"""Processes and what they need of the system: children, their end with a parent, ranks that are gone, free ports.

child = ChildProcess.start(words, log=path, tied=True)      # ends with this process, even by `kill -9`
python -m ascendchat.processes COMMAND ...                  # what ties it
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ascendchat.errors import UserError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK = 0.05  # seconds between two looks at a child that is waited for
UNKILLABLE = 20.0  # seconds after which a killed process is left alone: its driver holds it


# ---- children -----------------------------------------------------------------------------------


class ChildProcess:
    """A process that leads a group of its own: waited for, ended in order, or killed with all that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path | None = None, begin: int = 0) -> None:
        self.process, self.pid = process, process.pid
        self._log, self._begin = log, begin  # what stands before that byte is not its own

    @classmethod
    def start(
        cls, words: Sequence[str], *, log: Path | None = None, tied: bool = False, **settings: Any
    ) -> ChildProcess:
        """Start it. All that it prints is appended to `log`; `tied`: it ends with this process, even by `kill -9`."""
        if tied:
            words, settings = (
                [sys.executable, "-m", "ascendchat.processes", *words],
                {**settings, "stdin": subprocess.PIPE},
            )
        settings = {"stdin": subprocess.DEVNULL, "start_new_session": True, **settings}
        if log is None:
            return cls(subprocess.Popen(words, **settings))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            begin = file.tell()  # the child moves it
            return cls(subprocess.Popen(words, stdout=file, stderr=file, **settings), log, begin)

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the exit status, below 0 for a signal; None when it still runs after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def output(self) -> str:
        """Read what it has printed to its log since its start."""
        assert self._log is not None
        with self._log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode("utf-8", errors="replace")

    def wait_ready(
        self, pattern: re.Pattern[str], seconds: float, stop: Callable[[], bool] = bool
    ) -> re.Match[str] | None:
        """Wait until its output matches; None when it has ended, the time is over or `stop` says so."""
        until = time.monotonic() + seconds
        while not (ready := pattern.search(self.output())):
            if self.poll() is not None or time.monotonic() > until or stop():
                return None
            time.sleep(LOOK)
        return ready

    def kill(self) -> None:
        """Kill it and all that it has started, also what outlived it."""
        # A number that no process has, though its group has members, is given to no other process.
        if self.poll() is None or not started(self.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace: float) -> int | None:
        """Ask it to end and kill what is left after `grace` seconds; its status, None when it cannot be killed."""
        if self.poll() is None:
            self.process.terminate()
            self.wait(grace)
        self.kill()
        return self.wait(UNKILLABLE)


def status_of(code: int) -> int:
    """Turn an exit status of Popen into that of a shell: 128 + n after signal n."""
    return code if code >= 0 else 128 - code


def how_ended(status: int | None) -> str:
    """Put an exit status into words; a tied process ends with 128 + n after signal n."""
    if status is None:
        return "it cannot be ended"
    number = -status if status < 0 else status - 128
    return f"signal {number}" if 0 < number < signal.NSIG else f"exit status {status}"


def die_with_parent(number: signal.Signals) -> None:
    """Ask Linux to send this signal when the thread that has made this process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def started(pid: int) -> str:
    """Read when a process started, in clock ticks since boot; "" when it is gone, or where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


# ---- between `ascendchat launch` and its ranks ----------------------------------------------------

RANK_FILES = "ASCENDCHAT_RANK_FILES"  # how the names of the pid files of this node's ranks begin
SMALLER = "ASCENDCHAT_SMALLER"  # how often the device batch has to be made smaller: earlier attempts ran out of memory


def lost_ranks() -> set[int]:
    """Find the ranks of this node that are gone: those that are left wait for them in vain."""
    files = Path(os.environ.get(RANK_FILES, ""))
    ranks = set()
    for path in files.parent.glob(f"{files.name}*.pid") if files.name else ():
        try:
            pid, _, since = path.read_text(encoding="ascii").partition(" ")
        except FileNotFoundError:  # the launcher has taken it away
            continue
        if since and started(int(pid)) != since:
            ranks.add(int(path.stem.rpartition("_")[2]))
    return ranks


def record_error(error: BaseException) -> None:
    """Write why this rank ends to the file that torchrun names; without torchrun, nothing."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return
    details = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    with contextlib.suppress(OSError):
        Path(f"{name}.part").write_text(json.dumps({"message": message}), encoding="utf-8")
        os.replace(f"{name}.part", name)


# ---- ports: chosen and checked right before use, never a fixed 29500 ---------------------------------

# Collectives listen here by default; a rendezvous on one of these would make their start fail.
RESERVED = range(60000, 60032)


def is_free(port: int, host: str = "") -> bool:
    """Try whether a server could listen on this port: on this IPv4 address, or on all addresses, IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, host or "0.0.0.0"), *([] if host else [(socket.AF_INET6, "::")])):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT does not count as taken
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address, port))
                server.listen(1)
        except OSError as error:
            if family == socket.AF_INET or "in use" in str(error):
                return False
    return True


def free_port() -> int:
    """Choose a port that is free now, from the range that the operating system hands out."""
    for _ in range(100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("0.0.0.0", 0))
            port = int(server.getsockname()[1])
        if port not in RESERVED and is_free(port):
            return port
    raise UserError("no free port was found in 100 tries; see what listens with `ss -ltn`")


def split_address(text: str) -> tuple[str, int]:
    """`host:1234`, `host`, `[::1]:1234` -> (host, port); port 0 when none was given."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # no port, or a bare IPv6 address
        return text.strip("[]"), 0
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--master {text!r} is not HOST or HOST:PORT, e.g. --master node0:20123")
    return host.strip("[]"), int(port)


# ---- a command that must not outlive who started it: `python -m ascendchat.processes COMMAND ...` -----
#
# When its standard input is closed, or its parent is gone (`kill -9` of a trainer closes nothing that a fork of it
# still holds), the command gets SIGTERM, and SIGKILL if it has not ended after a while. Signals are passed on; the exit
# status is that of the command, 128 + n when signal n ended it. Unlike a parent-death signal this does not depend on
# the thread that made the process. Standard library only, to start fast.

GRACE = 15.0  # seconds to end in order
PARENT_LOOK = 1.0  # seconds between two looks at the parent


def main(words: list[str]) -> int:
    """Run the command until it ends or nobody is there to want it."""
    parent, wake = os.getppid(), os.pipe()
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came while it was being made

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(signal.SIGKILL))
    for came in early:
        child.send_signal(came)
    os.set_blocking(wake[1], False)
    signal.set_wakeup_fd(wake[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # ends the wait below
    while child.poll() is None:
        ready, _, _ = select.select([0, wake[0]], [], [], PARENT_LOOK)
        if wake[0] in ready:
            os.read(wake[0], 4096)
        if (0 in ready and not os.read(0, 4096)) or os.getppid() != parent:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            child.kill()
            until = time.monotonic() + PARENT_LOOK  # a parent that is killed closes its pipes before it is gone
            while os.getppid() == parent and time.monotonic() < until:
                time.sleep(0.01)
            break
    status = status_of(child.wait())
    if os.getppid() != parent and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and with it what the command has left behind; nobody reads a status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
