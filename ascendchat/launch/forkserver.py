"""Ranks that start in a tenth of a second: forked from one process that has imported all they need.

    ascendchat launch --devices 8 --max-restarts 50 base --depth 20
    python -m ascendchat.launch.forkserver FD     # that process: a JSON line with the program, then one per torchrun

Importing torch and the plug-in of a device takes seconds of CPU time, in every rank and in torchrun itself, and again
after every failure. With --max-restarts one process imports them once, never touches a device, and forks a torchrun for
each attempt, which forks its ranks. It writes two lines for each to FD: the process number, and how it ended. Only for
commands of our own, on Linux; where it cannot be done the ranks start as always. torch is imported inside functions.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ascendchat.chips import KINDS
from ascendchat.errors import UserError
from ascendchat.launch import agent, rank
from ascendchat.processes import die_with_parent

RANK_SCRIPT = "rank.py"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torchrun has handlers for them


def preload(program: list[str]) -> None:
    """Import what `python -m PACKAGE WORDS` will import: `PACKAGE.cli.preload` knows."""
    flag, package, *words = program
    assert flag == "-m", program
    importlib.import_module(f"{package}.cli").preload(words)
    import torch
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    assert hasattr(SubprocessHandler, "_popen"), "this torchrun starts its ranks in another way"
    for kind in (name for name, facts in KINDS.items() if facts.visible):  # devices with numbers, not the CPU
        used = getattr(getattr(torch, kind, None), "is_initialized", bool)()
        assert not used, f"a process that uses {kind} cannot be forked"


def main(answers: int) -> int:
    """Fork one torchrun after the other, and tell its number and how it ended."""
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts jobs with & has it ignored
    jobs = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        preload(json.loads(jobs.readline()))
    except UserError as error:  # the ranks will say it
        print(error, file=sys.stderr)
        return error.status
    gc.collect()
    gc.freeze()  # so that collections in the ranks do not write to every page
    me = os.getpid()
    while line := jobs.readline():
        number = os.fork()
        if number == 0:
            jobs.close()
            os.close(answers)
            _be_agent(json.loads(line), me)
        os.write(answers, f"{number}\n".encode())
        _, status = os.waitpid(number, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return 0


def _end_as_orphan(parent: int) -> None:
    """Who asks to be told of a parent's death after it has died is never told."""
    if os.getppid() != parent:
        os._exit(1)


def _be_agent(job: dict[str, Any], parent: int) -> NoReturn:
    """In the forked process: torchrun, whose ranks are forked from it."""
    status = 1
    try:
        os.setsid()
        die_with_parent(signal.SIGTERM)
        _end_as_orphan(parent)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(job["env"])
        from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = lambda _, words, environment: ForkedRank(words, environment)  # type: ignore
        status = agent.main(job["words"])
    except BaseException:  # noqa: BLE001 (this process has no caller: all it can do is to write it down)
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


class ForkedRank:
    """A rank, with those methods of subprocess.Popen that torchrun uses."""

    def __init__(self, words: tuple[str, ...], environment: dict[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        parent, (entered, enter) = os.getpid(), os.pipe()
        # torchrun's handlers raise, and what is raised in a hook of `fork` is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.pid = os.fork()
        if self.pid:
            os.close(enter)
            os.read(entered, 1)  # until it leads its group, or is gone: torchrun's signals go to that group
            os.close(entered)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        else:
            os.setsid()
            os.close(enter)
            os.close(entered)
            at = next(at for at, word in enumerate(words) if word.endswith(RANK_SCRIPT))
            _be_rank(list(words[at + 1 :]), environment, parent)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(LOOK)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_rank(words: list[str], environment: dict[str, str], parent: int) -> NoReturn:
    """What rank.py does, but for the new Python."""
    status = 1
    try:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        _close_sockets()
        os.environ.clear()
        os.environ.update(environment)
        program = rank.enter(words)
        _end_as_orphan(parent)
        for name, file in (("stdout", 1), ("stderr", 2)):  # as with python -u
            text = open(file, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            text.reconfigure(line_buffering=True, write_through=True)
            setattr(sys, name, text)
        sys.path[0], sys.argv = os.getcwd(), program[1:]
        status = _status_of(program[1])
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does at its end
        atexit._run_exitfuncs()
        ctypes.CDLL(None).fflush(None)  # what libraries have printed
    except BaseException:  # noqa: BLE001 (as above)
        traceback.print_exc()
    os._exit(status)  # taking all modules apart takes longer than it took to fork them


def _close_sockets() -> None:
    """Those of torchrun's store: another rank or node must not wait for an answer of somebody who does not listen."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder that is being listed
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def _status_of(module: str) -> int:
    """Run it as `python -m` does; its exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 (shown as Python shows it)
        traceback.print_exc()
        return 1
    return 0


# The launcher's side of it.

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


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
