"""Runs a command that must not outlive who started it: `python -m ascendchat.tied COMMAND ...`.

When its standard input is closed, or its parent is gone (`kill -9` of a trainer closes nothing that a fork of it still
holds), the command gets SIGTERM, and SIGKILL if it has not ended after a while. Signals are passed on; the exit status
is that of the command, 128 + n when signal n ended it. Unlike a parent-death signal this does not depend on the thread
that made the process. Standard library only, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from types import FrameType

from ascendchat.launch.rank import die_with_parent

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
