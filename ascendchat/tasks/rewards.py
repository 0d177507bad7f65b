"""Judges answers: by the task itself, or by a function of the user's in processes that may crash or hang.

    judge = Judge("my_rewards:short_and_right", timeout=15)     # fn(prompt, completion, **row) -> float, plain or async
    judge.rewards([(task, index, reply), ...])                  # -> [1.0, 0.0, ...]; None where it could not be judged

A reward that raises, hangs or kills its process is tried again, then counts as not judged: a run never stops over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import math
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

from ascendchat.config import UserError
from ascendchat.data.chat import text_of
from ascendchat.tasks.base import Task

Asked = tuple[Task, int, str]  # task, row, reply
WORKERS = 4
ATTEMPTS = 2
MOST_REWARD = 1e6  # beyond, float32 has no room for differences
START_TIMEOUT = 120.0  # seconds until a process must have begun


def find_function(path: str) -> Callable[..., Any]:
    """`module:function`, looked for in the current folder too."""
    module, colon, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--reward {path}: {error}; write module:function of a file that can be imported") from None
    if not colon or not callable(function):
        raise UserError(f"--reward {path} is not a function; write module:function")
    return function  # type: ignore[no-any-return]


def row_of(task: Task, index: int) -> dict[str, Any]:
    """What a reward function may want to know of a question, besides its text."""
    example = task.example(index)
    return {
        "task": task.name,
        "index": index,
        "messages": task.prompt(index),
        "answer": text_of(example[-1]["content"]),
    }


def call(path: str, prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Run the function, in a worker process."""
    value = find_function(path)(prompt, completion, **row)
    if inspect.isawaitable(value):
        value = asyncio.run(_wait(value))
    number = float(value)
    if not abs(number) < MOST_REWARD:
        raise ValueError(f"a reward must be a number between -{MOST_REWARD:g} and {MOST_REWARD:g}, not {number}")
    return number


async def _wait(value: Any) -> Any:
    return await value


def work(connection: Connection, path: str) -> None:
    """A process that judges one answer at a time until its pipe is closed."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            prompt, completion, row = connection.recv()
            connection.send(None)  # from now on the time counts, not while Python starts
            try:
                connection.send(call(path, prompt, completion, row))
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises)
                connection.send(f"{type(error).__name__}: {error}")


class Judging:
    """One such process, and the answer that it is judging."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, path), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.deadline = -1, math.inf

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Judge:
    """Turns answers into rewards. `timeout`: seconds for one answer."""

    def __init__(self, path: str = "", timeout: float = 15.0, say: Callable[[str], None] = print) -> None:
        self.path, self.timeout, self.say = path, timeout, say
        self._said = self._works = False  # the first failure was said; some answer was judged
        self._free: list[Judging] = []
        if path:
            find_function(path)  # an error now, not in an hour

    def rewards(self, answers: Sequence[Asked]) -> list[float | None]:
        """Of each answer, in order; None where nothing could be found out."""
        if not self.path:
            with ThreadPoolExecutor(WORKERS) as threads:
                return [float(right) for right in threads.map(_right, answers)]
        rewards: list[float | None] = [None] * len(answers)
        left = deque((number, ATTEMPTS) for number in range(len(answers)))
        busy: dict[Any, tuple[Judging, int]] = {}
        last = ""
        while left or busy:
            while left and len(busy) < WORKERS:
                number, attempts = left.popleft()
                judging = self._begin(answers[number], number)
                busy[judging.connection] = judging, attempts
            soonest = min(judging.deadline for judging, _ in busy.values())
            ready = wait(list(busy), max(0.0, soonest - time.monotonic()))
            late = [connection for connection, (judging, _) in busy.items() if judging.deadline <= time.monotonic()]
            for connection, (judging, attempts) in list(busy.items()):
                if connection not in ready and connection not in late:
                    continue
                reward, problem = self._result(judging, connection in ready)
                if reward is None and not problem:
                    continue  # it has only begun
                del busy[connection]
                rewards[judging.number] = reward
                self._works |= reward is not None
                if problem:
                    last = problem
                    self._say_once(f"--reward {self.path} failed: {problem}")
                if problem and attempts > 1:
                    left.append((judging.number, attempts - 1))
        if answers and not self._works:  # a mistake in the function, which would be found in the morning
            raise UserError(
                f"--reward {self.path} has judged none of {len(answers)} answers: {last}; mend the function"
            )
        return rewards

    def _begin(self, asked: Asked, number: int) -> Judging:
        task, index, reply = asked
        judging = self._free.pop() if self._free else Judging(self.path)
        judging.number, judging.deadline = number, time.monotonic() + START_TIMEOUT
        try:
            judging.connection.send((task.question(index), reply, row_of(task, index)))
        except OSError:  # died while it had nothing to do
            judging.end()
            return self._begin(asked, number)
        return judging

    def _result(self, judging: Judging, ready: bool) -> tuple[float | None, str]:
        """What came of it: a reward, or why there is none; neither when it has just begun. A process that hangs or died
        is not used again."""
        try:
            if ready:
                value = judging.connection.recv()
                if value is None:
                    judging.deadline = time.monotonic() + self.timeout
                    return None, ""
                self._free.append(judging)
                return (value, "") if isinstance(value, float) else (None, str(value))
            problem = f"it took longer than {self.timeout:g} s"
        except (EOFError, OSError):
            problem = "its process died"
        judging.end()
        return None, problem

    def _say_once(self, text: str) -> None:
        if not self._said:
            self.say(f"{text}; answers that cannot be judged count as the worst of their group")
        self._said = True

    def close(self) -> None:
        """End the processes."""
        for judging in self._free:
            judging.end()
        self._free = []


def _right(asked: Asked) -> bool:
    task, index, reply = asked
    return task.correct(index, reply)
