"""The inside of a process that runs functions of users, started by pool.py. It may hang, die or fill the memory.

Calls come over a pipe and run in one event loop in the main thread, where `signal.alarm` works. The process leads a
session of its own, so that all it has started can be ended with it, and it ends itself when its parent is gone. Before
each piece of a call that runs, its number is noted in memory that the parent can read: so the parent knows which of
several calls killed the process or holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NOBODY = -1  # no call is running right now
RUNNING, FORKS = 0, 1  # indices of the shared memory: number of the call that runs; forks since it started
MAX_FORKS = 128  # beyond, the process and all its children end: a fork bomb would take the machine

Runner = Callable[..., Awaitable[Any]]  # async def runner(link, *args): what a call does


class _Refused(Exception):
    """The parent could not answer a question; the text says why."""


def find_object(path: str) -> Any:
    """Import `module:name`, also from the current folder."""
    module, colon, name = path.partition(":")
    if not colon or not name:
        raise ImportError(f"{path} is not of the form module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    thing: Any = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def contain(shared: Any) -> None:
    """Lead a session, be the first to go when memory is short, and never outlive the parent."""
    parent = os.getppid()
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    def count_fork() -> None:  # the memory is shared with the children, which count on
        shared[FORKS] += 1
        if shared[FORKS] > MAX_FORKS:
            os.killpg(0, signal.SIGKILL)

    os.register_at_fork(before=count_fork)
    threading.Thread(target=watch, daemon=True).start()


class _Tracked:
    """Awaits a coroutine, and writes its number into the shared memory while it runs."""

    def __init__(self, coroutine: Awaitable[Any], number: int, shared: Any) -> None:
        self.inner, self.number, self.shared = coroutine.__await__(), number, shared

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            self.shared[RUNNING] = self.number
            try:
                waits_for = self.inner.send(value) if error is None else self.inner.throw(error)  # type: ignore[attr-defined]
            except StopIteration as end:
                return end.value
            finally:
                self.shared[RUNNING] = NOBODY
            try:
                value, error = (yield waits_for), None
            except BaseException as thrown:  # noqa: BLE001 (it is thrown into the coroutine)
                value, error = None, thrown


class Link:
    """The way of one call to the parent: it reports the start, and asks questions."""

    def __init__(self, inside: _Inside, number: int) -> None:
        self.inside, self.number, self.questions = inside, number, 0
        self.batch: list[tuple[int, tuple[Any, ...]]] = []

    def begin(self) -> None:
        """Report that the function is imported: from now on the time counts."""
        self.inside.send("begun", self.number)

    async def ask(self, *question: Any) -> Any:
        """Ask the parent; the time until its answer does not count. Questions asked at once go out in one message and
        are answered by one, so that what the parent does together does not depend on the speed of anything."""
        loop = asyncio.get_running_loop()
        self.questions += 1
        answer = self.inside.waiting[self.number, self.questions] = loop.create_future()
        if not self.batch:
            loop.call_soon(self._send)
        self.batch.append((self.questions, question))
        return await answer

    def _send(self) -> None:
        batch, self.batch = self.batch, []
        self.inside.send("ask", self.number, batch)


class _Inside:
    """The calls of this process. Messages in both directions: (what, number of the call, ...)."""

    def __init__(self, connection: Connection, shared: Any, runner: Runner) -> None:
        self.connection, self.shared, self.runner = connection, shared, runner
        self.own = os.getpid()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.waiting: dict[tuple[int, int], asyncio.Future[Any]] = {}  # by call and question
        self.over = asyncio.Event()

    async def serve(self) -> None:
        """Run calls until the pipe is closed."""
        asyncio.get_running_loop().add_reader(self.connection.fileno(), self.read)
        await self.over.wait()

    def read(self) -> None:
        try:
            while self.connection.poll():
                what, number, *rest = self.connection.recv()
                if what == "call":
                    self.tasks[number] = asyncio.get_running_loop().create_task(self.run(number, rest[0]))
                elif what == "cancel" and number in self.tasks:
                    self.tasks[number].cancel()
                elif what == "answers":
                    for which, value, problem in rest[0]:
                        self.answer(number, which, value, problem)
        except (EOFError, OSError):
            self.over.set()

    def answer(self, number: int, which: int, value: Any, problem: str) -> None:
        future = self.waiting.pop((number, which), None)
        if future is None or future.done():  # the call was cancelled
            return
        if problem:
            future.set_exception(_Refused(problem))
        else:
            future.set_result(value)

    async def run(self, number: int, args: tuple[Any, ...]) -> None:
        """Run one call and send its result."""
        self.shared[FORKS] = 0
        try:
            value = await _Tracked(self.runner(Link(self, number), *args), number, self.shared)
            self.send("done", number, value)
        except asyncio.CancelledError:
            self.send("failed", number, "it was cancelled")
        except BaseException as error:  # noqa: BLE001 (whatever a user's function raises)
            self.send("failed", number, f"{type(error).__name__}: {error}")
        finally:
            self.tasks.pop(number, None)

    def send(self, *message: Any) -> None:
        if os.getpid() != self.own:  # a child that the function has forked and let return
            os._exit(0)
        try:
            self.connection.send(message)
        except BrokenPipeError:  # the trainer was killed
            os._exit(0)


def work(connection: Connection, shared: Any, runner: Runner) -> None:
    """Run calls in this process until the parent closes the pipe or is gone."""
    contain(shared)

    async def serve() -> None:
        await _Inside(connection, shared, runner).serve()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
    os._exit(0)  # whatever threads the functions have left behind


# One call of a reward function of the user's, in a process of the pool (rl/rewards.py). Little is imported here: every
# process of every run begins with it.

MAX_REWARD = 1e6  # beyond, float32 has no room for differences


async def run(link: Link, path: str, *args: Any) -> Any:
    """Score an answer, in a process of the pool; without arguments, tell whether the function is async."""
    function = find_object(path)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    if not args:
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    link.begin()
    prompt, completion, row = args
    value = function(prompt, completion, **accepted(function, row))
    return checked(await value if inspect.isawaitable(value) else value)


def accepted(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """Choose the columns that a function takes: all with **row, else those that it names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def checked(value: Any) -> float:
    number = float(value)
    if not abs(number) < MAX_REWARD:
        raise ValueError(f"a reward must be a number between -{MAX_REWARD:g} and {MAX_REWARD:g}, not {number}")
    return number
