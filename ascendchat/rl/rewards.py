"""Judges answers: by the task itself, by built-in terms, or by functions of the user's in processes that may crash.

    judge = Judge(("gsm8k=1", "format=0.1", "length=-0.001"))          # `ascendchat rl --reward ...`; none: the task
    judge = Judge("my_rewards:short_and_right", timeout=15)             # fn(prompt, completion, **row) -> float
    judge.rewards([(task, index, reply), ...])                          # -> [1.0, 0.0, ...]; None: not judged
    judge.verdicts([Asked(task, index, reply, ...), ...])               # the same with the terms apart

A function may be async, then many run beside one another in a process; it may take `prompt_ids` and `completion_ids`,
as AReaL's do. One that raises, hangs, fills the memory or kills its process is tried again, then the answer counts as
not judged: a run never stops over it.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ascendchat.config import UserError, nearest
from ascendchat.data.chat.template import text_of
from ascendchat.data.mixture import parse_entry
from ascendchat.rl import terms
from ascendchat.sandbox.pool import WORKERS, Failure, Pool
from ascendchat.sandbox.reward_call import checked, run
from ascendchat.tasks.base import Task

# Run here, in threads: they are bounded, and programs of a model run in the sandbox.
OURS: dict[str, Callable[..., float]] = {
    "answer": terms.answer,
    "choice": terms.choice,
    "code": terms.code,
    "format": terms.form,
    "gsm8k": terms.gsm8k,
    "length": terms.length,
    "toyworld": terms.toy,
}
TASK, MATH = "task", "math-verify"
MANNERS = ("format", "length")  # terms that say nothing about whether an answer is right
TAKEN = ("prompt", "completion")  # columns of a row that are the function's own arguments


class Asked(NamedTuple):
    """An answer that is to be judged."""

    task: Task
    row: int
    reply: str
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    finish: str = "stop"  # or "length": it was cut short


@dataclass(frozen=True)
class Verdict:
    """What an answer is worth. `reward` is None where a term could not be found out."""

    reward: float | None
    terms: dict[str, float] = field(default_factory=dict)  # by name, without weights
    right: bool = False  # the first term that says so is above 0


class Term(NamedTuple):
    """One term of a reward."""

    name: str
    weight: float
    shared: bool = False  # an async function: many in one process


def row_of(task: Task, index: int) -> dict[str, Any]:
    """What a reward function may want to know of a question, besides its text."""
    known = {"task": task.name, "index": index, "answer": text_of(task.example(index)[-1]["content"])}
    row = {**known, **task.row(index), "messages": task.prompt(index)}
    return {name: value for name, value in row.items() if name not in TAKEN}


class Judge:
    """Turns answers into rewards; any thread may ask. `reward`: terms as NAME=WEIGHT, where NAME may be
    module:function. `timeout`: seconds for one answer."""

    def __init__(
        self, reward: str | Sequence[str] = (), timeout: float = 15.0, say: Callable[[str], None] = print
    ) -> None:
        self.timeout, self.say = timeout, say
        self._said = False  # the first failure was said
        self._worked: set[str] = set()  # terms that have judged something
        self._problems: dict[str, str] = {}  # the last of each term
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="judge")
        self._pool: Pool | None = None
        self._guard = threading.Lock()
        given = [reward] if isinstance(reward, str) and reward else reward or [TASK]
        try:
            self.terms = [self._open(*parse_entry(text, signed=True)) for text in given]
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, weight: float | None) -> Term:
        """A term that can work; else an error now, not in an hour."""
        weight = 1.0 if weight is None else weight
        if name in OURS or name == TASK:
            return Term(name, weight)
        if name == MATH:
            if importlib.util.find_spec("math_verify") is None:
                raise UserError("--reward math-verify needs the package of this name: pip install math-verify")
            return Term(name, weight)
        if ":" not in name:
            known = nearest(name, [TASK, *OURS, MATH])
            raise UserError(f"--reward {name} is no built-in term; {known}; or write module:function")
        try:
            shared = self._processes().submit((name,), attempts=1).result()
        except Failure as problem:
            raise UserError(
                f"--reward {name}: {problem}; write module:function of a file that can be imported"
            ) from None
        return Term(name, weight, bool(shared))

    def _processes(self) -> Pool:
        with self._guard:
            if self._pool is None:
                self._pool = Pool(run, self.timeout)
            return self._pool

    def rewards(self, answers: Sequence[Any]) -> list[float | None]:
        """Of each answer, in order; None where nothing could be found out."""
        return [verdict.reward for verdict in self.verdicts(answers)]

    def verdicts(self, answers: Sequence[Any]) -> list[Verdict]:
        """Of each answer (an Asked, or its first fields), in order."""
        verdicts = [future.result() for future in [self.submit(Asked(*asked)) for asked in answers]]
        if answers:
            self.check_worked(len(answers))
        return verdicts

    def check_worked(self, answers: int) -> None:
        """A term that has never judged any answer is a mistake in it, which would be found in the morning."""
        for name, problem in self._problems.items():
            if name not in self._worked:
                raise UserError(f"--reward {name} has judged none of {answers} answers: {problem}; mend the function")

    def submit(self, asked: Asked) -> Future[Verdict]:
        """Begin to judge one answer."""
        numbers = [self._begin(term, asked) for term in self.terms]
        whole: Future[Verdict] = Future()
        left, lock = len(numbers), threading.Lock()

        def count(_: Future[float]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = not left
            if last:
                whole.set_result(self._verdict(numbers))

        for number in numbers:
            number.add_done_callback(count)
        return whole

    def _begin(self, term: Term, asked: Asked) -> Future[float]:
        task, index, reply, prompt_ids, completion_ids, finish = asked
        if term.name == TASK:
            return self._threads.submit(lambda: float(task.correct(index, reply)))
        ids = {"prompt_ids": list(prompt_ids), "completion_ids": list(completion_ids), "finish": finish}
        question, row = task.question(index), {**row_of(task, index), **ids}
        if term.name in OURS:
            return self._threads.submit(lambda: checked(OURS[term.name](question, reply, **row)))
        path = f"{terms.__name__}:{terms.math_verify.__name__}" if term.name == MATH else term.name
        return self._processes().submit((path, question, reply, row), shared=term.shared)

    def _verdict(self, numbers: Sequence[Future[float]]) -> Verdict:
        found: dict[str, float] = {}
        for term, number in zip(self.terms, numbers):
            problem = number.exception()
            if problem is None:
                found[term.name] = number.result()
                self._worked.add(term.name)
            else:
                text = str(problem) if isinstance(problem, Failure) else f"{type(problem).__name__}: {problem}"
                self._problems[term.name] = text
                self._say_once(f"--reward {term.name} failed: {text}")
        whole = len(found) == len(self.terms)
        reward = sum(term.weight * found[term.name] for term in self.terms) if whole else None
        judging = [term.name for term in self.terms if term.name not in MANNERS]
        return Verdict(reward, found, bool(judging) and found.get(judging[0], 0.0) > 0)

    def _say_once(self, text: str) -> None:
        if not self._said:
            self._said = True
            self.say(f"{text}; answers that cannot be judged count as the worst of their group")

    def close(self) -> None:
        """End the processes and threads."""
        if self._pool is not None:
            self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
