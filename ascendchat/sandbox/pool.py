"""Runs functions of users in processes: they may raise, hang, die, fill the memory or fork without end.

    pool = Pool(runner, timeout=15)                      # async def runner(link, *args), of a module; see process.py
    call = pool.submit((path, prompt, completion, row))  # a Future: what the runner returns, or a Failure
    pool.close()

Any thread may submit; one thread of the pool's own speaks to the processes. A call that is `shared` waits for things
most of its time, and runs beside others in a process. When a process ends or is ended, the call that it was running
has failed; the others start again in another process.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ascendchat.sandbox.process import NOBODY, RUNNING, Runner, work

WORKERS = 4
ATTEMPTS = 2
START_TIMEOUT = 120.0  # seconds until a process must have begun
GRACE = 3.0  # seconds in which a call must end after it was cancelled
LOOK_EVERY = 0.25  # seconds between two looks at the memory and the children of the processes
MAX_PROCESSES = 256  # that a process may have started
MAX_MEMORY = max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)  # bytes, children included


class Failure(Exception):
    """A call has no result; the text says why."""


CLOSED = Failure("the pool was closed")


@dataclass(eq=False)
class _Call:
    """One call, from submit to its result."""

    args: tuple[Any, ...]
    shared: bool
    attempts: int
    timeout: float
    hear: Callable[..., None]  # hear("ask", questions); hear("again"): it starts once more
    future: Future[Any] = field(default_factory=Future)
    number: int = NOBODY  # in its process
    deadline: float = math.inf
    unanswered: int = 0  # batches of questions
    cancelled: bool = False


@dataclass(frozen=True, eq=False)
class Questions:
    """Questions that a call asks at once; the answers go to Pool.answer, all together."""

    process: _Process
    number: int  # of the call
    asked: Sequence[tuple[int, tuple[Any, ...]]]  # (which, question)


class _Process:
    """One process and its calls. A thread sends to it: a process that hangs does not read."""

    def __init__(self, runner: Runner) -> None:
        context = multiprocessing.get_context("spawn")
        self.shared = context.RawArray("q", [NOBODY, 0])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.shared, runner), daemon=True)
        self.process.start()
        theirs.close()
        self.calls: dict[int, _Call] = {}
        self.numbers = 0
        self.out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (message := self.out.get()) is not None:
                self.connection.send(message)

    def begin(self, call: _Call) -> None:
        self.numbers += 1
        call.number, call.deadline, call.unanswered, call.cancelled = self.numbers, _now() + START_TIMEOUT, 0, False
        self.calls[call.number] = call
        self.out.put(("call", call.number, call.args))

    def end(self) -> None:
        """Kill the process and all that it has started."""
        self.out.put(None)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # not its leader yet: ProcessLookupError
        self.process.kill()
        self.process.join()
        self.connection.close()


def _now() -> float:
    return time.monotonic()


def usage() -> dict[int, tuple[int, int]]:
    """Count (processes, bytes of memory) by session; empty where there is no /proc."""
    used: dict[int, tuple[int, int]] = {}
    page = os.sysconf("SC_PAGE_SIZE")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            session, resident = int(fields[3]), int(fields[21]) * page
            processes, memory = used.get(session, (0, 0))
            used[session] = processes + 1, memory + resident
    return used


def _nothing(*_: Any) -> None:
    pass


class Pool:
    """Runs calls in a few processes, which start when they are needed. `timeout`: seconds for a call, without the time
    in which it waits for answers. `room`: shared calls in one process."""

    def __init__(self, runner: Runner, timeout: float, *, workers: int = WORKERS, room: int = 16) -> None:
        self.runner, self.timeout, self.workers, self.room = runner, timeout, workers, room
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._waiting: deque[_Call] = deque()
        self._processes: list[_Process] = []
        self._woken, self._wake = os.pipe()
        self._closed, self._lock = False, threading.Lock()
        self._last_look = 0.0
        self._thread = threading.Thread(target=self._run, name="pool", daemon=True)
        self._thread.start()

    # ---- from any thread -----------------------------------------------------------------------

    def submit(
        self,
        args: tuple[Any, ...],
        *,
        shared: bool = False,
        attempts: int = ATTEMPTS,
        hear: Callable[..., None] = _nothing,
    ) -> Future[Any]:
        """Start the call as soon as there is room. `hear` runs in the pool's thread and must return at once."""
        call = _Call(args, shared, attempts, self.timeout, hear)
        self._post("submit", call)
        return call.future

    def answer(self, questions: Questions, answers: Sequence[tuple[Any, str]]) -> None:
        """Answer questions of a call: (value, problem) of each; a problem is raised there. Too late is no error."""
        self._post("answer", questions, answers)

    def close(self) -> None:
        """End the processes; calls under way fail."""
        self._post("close")
        self._thread.join()

    def _post(self, what: str, *details: Any) -> None:
        with self._lock:
            if not self._closed:
                self._inbox.put((what, *details))
                os.write(self._wake, b"x")
            elif what == "submit":
                details[0].future.set_exception(CLOSED)

    # ---- the pool's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._begin_calls()
            busy = [process for process in self._processes if process.calls]
            soonest = min((call.deadline for process in busy for call in process.calls.values()), default=math.inf)
            pause = min(soonest - _now(), LOOK_EVERY) if busy else None
            connections: list[Any] = [self._woken, *(process.connection for process in self._processes)]
            ready = wait(connections, pause if pause is None else max(0.0, pause))
            if self._woken in ready:
                os.read(self._woken, 4096)
            self._take_messages()
            for process in list(self._processes):
                if process.connection in ready:
                    self._receive(process)
            self._look()
        self._take_messages()
        for process in self._processes:
            process.end()
            self._waiting.extend(process.calls.values())
        for call in self._waiting:
            call.future.set_exception(CLOSED)
        os.close(self._woken)
        os.close(self._wake)

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                what, *rest = self._inbox.get_nowait()
                if what == "submit":
                    self._waiting.append(rest[0])
                elif what == "answer":
                    self._answer(*rest)
                else:
                    with self._lock:
                        self._closed = True

    def _answer(self, questions: Questions, answers: Sequence[tuple[Any, str]]) -> None:
        call = questions.process.calls.get(questions.number)
        if call is None:
            return
        call.unanswered -= 1
        if not call.unanswered:
            call.deadline = _now() + call.timeout
        answered = [(which, *answer) for (which, _), answer in zip(questions.asked, answers)]
        questions.process.out.put(("answers", questions.number, answered))

    def _begin_calls(self) -> None:
        """Start waiting calls in their order; one that finds no room lets those behind it wait too."""
        while self._waiting:
            process = self._room_for(self._waiting[0])
            if process is None:
                return
            process.begin(self._waiting.popleft())

    def _room_for(self, call: _Call) -> _Process | None:
        """Find the least busy process that can take the call, or start a new one; None: there is no room."""
        least = min(self._processes, key=lambda process: len(process.calls), default=None)
        if least is None or (least.calls and len(self._processes) < self.workers):
            self._processes.append(_Process(self.runner))
            return self._processes[-1]
        if not least.calls:
            return least
        mixes = [p for p in self._processes if len(p.calls) < self.room and all(c.shared for c in p.calls.values())]
        return min(mixes, key=lambda process: len(process.calls), default=None) if call.shared else None

    def _receive(self, process: _Process) -> None:
        """Take one message from the process, or notice its end."""
        try:
            what, number, *rest = process.connection.recv()
        except (EOFError, OSError):
            self._lose(process, "its process died")
            return
        except Exception as error:  # noqa: BLE001 (what a function returned cannot be read here)
            self._lose(process, f"what it returned cannot be read: {error}")
            return
        call = process.calls.get(number)
        if call is None:
            return
        if what == "begun":
            call.deadline = _now() + call.timeout
        elif what == "ask":
            call.unanswered, call.deadline = call.unanswered + 1, math.inf
            call.hear("ask", Questions(process, number, rest[0]))
        elif what == "done":
            del process.calls[number]
            call.future.set_result(rest[0])
        else:
            del process.calls[number]
            self._failed(call, self._too_late(call) if call.cancelled else rest[0])

    def _failed(self, call: _Call, problem: str) -> None:
        call.attempts -= 1
        if call.attempts > 0:
            self._restart(call)
        else:
            call.future.set_exception(Failure(problem))

    def _restart(self, call: _Call) -> None:
        call.deadline = math.inf
        self._waiting.append(call)
        call.hear("again")

    def _too_late(self, call: _Call) -> str:
        return f"it took longer than {call.timeout:g} s"

    def _lose(self, process: _Process, problem: str) -> None:
        """End a process. The call that it was running has failed; all of them, if it is unknown which one ran."""
        process.end()
        self._processes.remove(process)
        calls, process.calls = process.calls, {}
        running = calls.get(process.shared[RUNNING])
        for call in calls.values():
            if running in (None, call):
                self._failed(call, problem)
            else:
                self._restart(call)

    def _look(self) -> None:
        """End the calls that are late, and the processes that have died silently or take too much."""
        now = _now()
        for process in list(self._processes):
            late = [call for call in process.calls.values() if call.deadline <= now]
            if not late:
                continue
            if any(call.cancelled or not call.shared for call in late):
                self._lose(process, self._too_late(late[0]))
                continue
            for call in late:  # of several: if it only waits it can be cancelled
                call.cancelled, call.deadline = True, now + GRACE
                process.out.put(("cancel", call.number))
        if now - self._last_look < LOOK_EVERY:
            return
        self._last_look = now
        used = usage() if any(process.calls for process in self._processes) else {}
        for process in list(self._processes):
            processes, memory = used.get(process.process.pid or 0, (0, 0))
            if process.process.exitcode is not None:  # a child of its own may hold the pipe open
                self._lose(process, "its process died")
            elif processes > MAX_PROCESSES:
                self._lose(process, f"it has started {processes} processes")
            elif memory > MAX_MEMORY:
                self._lose(process, f"it took more than {MAX_MEMORY / (1 << 30):.1f} GiB of memory")
