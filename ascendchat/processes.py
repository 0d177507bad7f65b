"""Processes and what they need of the system: die with a parent, tell who is gone, find a free port.

As a program it runs a command that must not outlive who started it: `python -m ascendchat.processes COMMAND ...`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from ascendchat.errors import UserError

FILES = "ASCENDCHAT_RANK_FILES"  # how the names of the pid files of this node's ranks begin


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: signal.Signals) -> None:
    """Ask Linux to send this signal when the parent is gone, so that `kill -9` of a launcher leaves no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" when it is gone, or where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


def ended() -> set[int]:
    """Ranks of this node that are gone: those that are left wait for them in vain."""
    files = Path(os.environ.get(FILES, ""))
    found = set()
    for path in files.parent.glob(f"{files.name}*.pid") if files.name else ():
        try:
            pid, _, since = path.read_text(encoding="ascii").partition(" ")
        except FileNotFoundError:  # the launcher has taken it away
            continue
        if since and started(int(pid)) != since:
            found.add(int(path.stem.rpartition("_")[2]))
    return found


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


SMALLER = "ASCENDCHAT_SMALLER"  # how often the device batch has to be made smaller: earlier attempts ran out of memory


# Free ports for the rendezvous of `ascendchat launch`: chosen and checked right before use, never a fixed 29500.

# Collectives listen here by default; a rendezvous on one of these would make their start fail.
RESERVED = range(60000, 60032)


def is_free(port: int, host: str = "") -> bool:
    """True when a server could listen on this port now: on this IPv4 address, or on all addresses, IPv4 and IPv6."""
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
    """A port that is free at this moment, from the range that the operating system hands out."""
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


# Runs a command that must not outlive who started it: `python -m ascendchat.processes COMMAND ...`.
#
# When its standard input is closed, or its parent is gone (`kill -9` of a trainer closes nothing that a fork of it
# still holds), the command gets SIGTERM, and SIGKILL if it has not ended after a while. Signals are passed on; the exit
# status is that of the command, 128 + n when signal n ended it. Unlike a parent-death signal this does not depend on
# the thread that made the process. Standard library only, to start fast.

GRACE = 15.0  # seconds to end in order
LOOK = 1.0  # seconds between two looks at the parent


def end(child: subprocess.Popen[bytes], grace: float = GRACE) -> None:
    """In order, then by force."""
    child.terminate()
    try:
        child.wait(grace)
    except subprocess.TimeoutExpired:
        child.kill()


def status_of(code: int) -> int:
    """As a shell gives it."""
    return code if code >= 0 else 128 - code


def main(words: list[str]) -> int:
    """Until the command ends, or nobody is there to want it."""
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
        ready, _, _ = select.select([0, wake[0]], [], [], LOOK)
        if wake[0] in ready:
            os.read(wake[0], 4096)
        if (0 in ready and not os.read(0, 4096)) or os.getppid() != parent:
            end(child)
    with contextlib.suppress(ProcessLookupError):
        child.wait()
    return status_of(child.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
