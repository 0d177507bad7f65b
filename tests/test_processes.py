"""Children of ours: started, waited for and ended; and commands that end with who started them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascendchat import processes as processes_module
from ascendchat.processes import ChildProcess, how_ended

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


# Starts a child that heeds no SIGTERM; both hold the pipe. The first heeds it or not.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
other = subprocess.Popen([sys.executable, "-c", deaf], close_fds=False, stdout=subprocess.PIPE)
other.stdout.readline()
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready at", os.getpid(), flush=True)
time.sleep(0 if sys.argv[1] == "ends" else 600)
"""
READY = re.compile(r"ready at (\d+)")


def family(tmp_path: Path, how: str, tied: bool) -> tuple[ChildProcess, int]:
    """A child that is ready or has ended, and the end of a pipe that it and its own child hold."""
    (tmp_path / "log").write_text("ready at 7, says one before\n")
    ours, theirs = os.pipe()
    words = [sys.executable, "-c", FAMILY, how]
    child = ChildProcess.start(words, log=tmp_path / "log", tied=tied, pass_fds=[] if tied else [theirs])
    os.close(theirs)
    ready = child.wait_ready(READY, PATIENCE)
    assert ready is not None
    assert ready[1] != "7", "what stood in the log before is not its output"
    if how == "ends":
        assert child.wait(PATIENCE) == 0
    return child, ours


@pytest.mark.parametrize("how", ["heeds", "deaf", "ends"])
def test_a_child_ends_with_all_that_it_has_started(tmp_path: Path, how: str) -> None:
    child, pipe = family(tmp_path, how, tied=False)
    assert child.end(0.5) == {"heeds": -signal.SIGTERM, "deaf": -signal.SIGKILL, "ends": 0}[how]
    assert select.select([pipe], [], [], PATIENCE)[0], "its own child is left"
    os.close(pipe)
    child.kill()  # no error where nothing is left
    assert child.end(0.0) == child.poll()


def test_one_that_is_tied_has_the_status_of_the_command(tmp_path: Path) -> None:
    child, pipe = family(tmp_path, "heeds", tied=True)
    os.close(pipe)
    status = child.end(PATIENCE)
    assert status == 128 + signal.SIGTERM
    assert how_ended(status) == how_ended(-signal.SIGTERM) == "signal 15"
    assert [how_ended(status) for status in (3, 200, None)] == [
        "exit status 3",
        "exit status 200",
        "it cannot be ended",
    ]


def test_one_that_is_never_ready_is_not_waited_for(tmp_path: Path) -> None:
    child = ChildProcess.start([sys.executable, "-c", "print('no')"], log=tmp_path / "new" / "log")
    assert child.wait_ready(READY, PATIENCE) is None
    assert child.output() == "no\n"
    slow = ChildProcess.start([sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "slow")
    assert slow.wait_ready(READY, 0.1) is None
    assert slow.wait_ready(READY, PATIENCE, stop=lambda: True) is None
    assert slow.wait(0.0) is None
    slow.kill()
    assert slow.wait() == -signal.SIGKILL


def test_what_a_child_prints_at_once_is_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, popen = tmp_path / "log", subprocess.Popen

    def slow(*words: object, **settings: object) -> subprocess.Popen[bytes]:
        child = popen(*words, **settings)  # type: ignore[call-overload]
        child.wait(PATIENCE)
        return child

    monkeypatch.setattr(processes_module.subprocess, "Popen", slow)
    log.write_text("before\n")
    assert ChildProcess.start([sys.executable, "-c", "print('at once')"], log=log).output() == "at once\n"


LEFT = """
import sys, time
from pathlib import Path
from ascendchat.processes import ChildProcess
ChildProcess.start([sys.executable, "-c", sys.argv[1], "heeds"], log=Path(sys.argv[2]), tied=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_what_a_tied_command_has_started_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", LEFT, FAMILY, str(log)])
    until = time.monotonic() + PATIENCE
    while not (log.exists() and (ready := READY.search(log.read_text()))):
        assert time.monotonic() < until
        time.sleep(0.02)
    group = os.getpgid(int(ready[1]))
    parent.kill()
    parent.wait()
    while time.monotonic() < until and any(alive(int(path.name)) and of_group(path, group) for path in processes()):
        time.sleep(0.05)
    assert not [path.name for path in processes() if alive(int(path.name)) and of_group(path, group)]


def processes() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*"))


def of_group(process: Path, group: int) -> bool:
    try:
        return os.getpgid(int(process.name)) == group
    except ProcessLookupError:
        return False
