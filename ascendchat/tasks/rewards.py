"""Judges answers: by the task itself, or by a function of the user's in processes that may crash or hang.

    judge = Judge("my_rewards:short_and_right", timeout=15)     # fn(prompt, completion, **row) -> float, plain or async
    judge.rewards([(task, index, reply), ...])                  # -> [1.0, 0.0, ...]; None where it could not be judged

A reward that raises, hangs or kills its process is tried again, then counts as not judged: a run never stops over it.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ascendchat.config import UserError
from ascendchat.data.chat import text_of
from ascendchat.tasks.base import Task

Asked = tuple[Task, int, str]  # task, row, reply
WORKERS = 4
ATTEMPTS = 2


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
    if not math.isfinite(number):
        raise ValueError(f"a reward must be a finite number, not {number}")
    return number


async def _wait(value: Any) -> Any:
    return await value


class Judge:
    """Turns answers into rewards."""

    def __init__(self, path: str = "", timeout: float = 15.0, say: Callable[[str], None] = print) -> None:
        self.path, self.timeout, self.say = path, timeout, say
        self.failures = 0
        self._pool: ProcessPoolExecutor | None = None
        if path:
            find_function(path)  # an error now, not in an hour

    def rewards(self, answers: Sequence[Asked]) -> list[float | None]:
        """Of each answer, in order; None where nothing could be found out."""
        if not self.path:
            with ThreadPoolExecutor(WORKERS) as threads:
                return [float(right) for right in threads.map(_right, answers)]
        rewards: list[float | None] = [None] * len(answers)
        left = list(range(len(answers)))
        for _ in range(ATTEMPTS):
            left = self._round(answers, left, rewards)
            if not left:
                break
        self.failures += len(left)
        return rewards

    def _round(self, answers: Sequence[Asked], numbers: list[int], rewards: list[float | None]) -> list[int]:
        """Try these once; those that failed. One that hangs or dies takes its pool with it, not the others' chance."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))
        pool, failed = self._pool, list[int]()
        futures = {}
        for number in numbers:
            task, index, reply = answers[number]
            futures[number] = pool.submit(call, self.path, task.question(index), reply, row_of(task, index))
        broken = False
        for number, future in futures.items():
            try:
                rewards[number] = future.result(0.1 if broken else self.timeout)
            except (Late, BrokenProcessPool):
                failed.append(number)
                broken = True
            except Exception as error:  # noqa: BLE001 (whatever a user's function raises)
                failed.append(number)
                if self.failures == 0 and len(failed) == 1:
                    self.say(f"--reward {self.path} failed: {type(error).__name__}: {error}")
        if broken:
            self.close()
        return failed

    def close(self) -> None:
        """End the processes, also those that hang."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            self._pool = None


def _right(asked: Asked) -> bool:
    task, index, reply = asked
    return task.correct(index, reply)
