"""A command that ends with who started it: its input is closed, its parent is killed, a signal comes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIED = [sys.executable, "-m", "ascendchat.processes"]
PATIENCE = 60  # seconds
# Says its number, and on SIGTERM that it ends in order.
CHILD = """
import os, signal, sys, time
def end(*_):
    print("in order", flush=True)
    os._exit(5)
signal.signal(signal.SIGTERM, end)
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
tied = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
{more}
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + PATIENCE
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def begin(words: list[str]) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_its_status_is_that_of_the_command() -> None:
    for code, status in (("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)):
        process = subprocess.Popen([*TIED, sys.executable, "-c", code], stdin=subprocess.PIPE)
        assert process.wait(PATIENCE) == status


def test_a_closed_input_ends_it_in_order() -> None:
    process, child = begin([*TIED, sys.executable, "-c", CHILD])
    assert process.stdin is not None
    process.stdin.write("words for nobody\n")
    process.stdin.close()
    assert process.wait(PATIENCE) == 5
    assert process.stdout is not None
    assert process.stdout.read() == "in order\n"
    assert gone(child)


def test_a_signal_is_passed_on() -> None:
    process, child = begin([*TIED, sys.executable, "-c", CHILD])
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 5
    assert gone(child)


EARLY = """
import os, signal, subprocess, sys
from ascendchat import processes
class Popen(subprocess.Popen):
    def __init__(self, *words, **more):
        super().__init__(*words, stdout=subprocess.PIPE, **more)
        self.stdout.readline()  # its handler is installed
        os.kill(os.getpid(), signal.SIGTERM)  # before the wrapper knows that it is there
subprocess.Popen = Popen
sys.exit(processes.main(sys.argv[1:]))
"""


def test_a_signal_right_behind_the_start_is_passed_on() -> None:
    process = subprocess.Popen([sys.executable, "-c", EARLY, sys.executable, "-c", CHILD], stdin=subprocess.PIPE)
    assert process.wait(PATIENCE) == 5


@pytest.mark.parametrize("more", ["", "import os\nif os.fork(): time.sleep(600)\nelse: time.sleep(10); os._exit(0)"])
def test_it_ends_with_a_parent_that_is_killed(more: str) -> None:
    """Also when a fork of the parent still holds the other end of its input."""
    parent, child = begin([sys.executable, "-c", PARENT.format(more=more), *TIED, sys.executable, "-c", CHILD])
    parent.kill()
    parent.wait()
    assert gone(child)


def test_a_killed_wrapper_takes_the_command_along() -> None:
    process, child = begin([*TIED, sys.executable, "-c", CHILD])
    process.kill()
    process.wait()
    assert gone(child)
