"""Judges answers: by the task itself, by built-in terms, or by functions of the user's in processes that may crash.

    judge = Judge(("gsm8k=1", "format=0.1", "length=-0.001"))          # `ascendchat rl --reward ...`; none: the task
    judge = Judge("my_rewards:short_and_right", timeout=15)             # fn(prompt, completion, **row) -> float
    judge.rewards([(task, index, reply), ...])                          # -> [1.0, 0.0, ...]; None: not judged
    judge.verdicts([JudgeRequest(task, index, reply, ...), ...])               # the same with the terms apart

A function may be async, then many run beside one another in a process; it may take `prompt_ids` and `completion_ids`,
as AReaL's do. One that raises, hangs, fills the memory or kills its process is tried again, then the answer counts as
not judged: a run never stops over it.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ascendchat.data import toyworld
from ascendchat.data.chat.render import text_of
from ascendchat.data.mixture import parse_entry
from ascendchat.errors import UserError, nearest
from ascendchat.sandbox.pool import WORKERS, Failure, Pool
from ascendchat.sandbox.process import checked, run
from ascendchat.tasks.gsm8k import FINAL, as_number, final_number
from ascendchat.tasks.gsm8k import NUMBER as ONE_NUMBER
from ascendchat.tasks.humaneval import CODE_BLOCK, judged, program
from ascendchat.tasks.multiple_choice import is_letter
from ascendchat.tasks.task import Task

# The built-in terms of a reward, for `ascendchat rl --reward gsm8k=1,format=0.1,length=-0.001`: plain functions.
#
#     gsm8k(prompt, completion, answer="... #### 18")      # 1.0 or 0.0; each takes the columns of the row that it needs
#
# A function of a user's has the same form. rewards.py says where each of them runs.

NUMBER = re.compile(ONE_NUMBER)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")  # not a name of LaTeX
BOXED = re.compile(r"\\boxed\s*\{[^{}]")


def accepted(answer: Any) -> list[str]:
    """The right answers of a row as texts: one, or those of a list, each of which is right; none where it is null or
    blank. The number 0 is an answer."""
    every = answer if isinstance(answer, (list, tuple)) else [answer]
    for one in every:
        if isinstance(one, (list, tuple, dict)):
            kind = "an object" if isinstance(one, dict) else "a list of lists"
            raise ValueError(f"the answer is {kind}, not text, a number or a list of these, each of which is right")
    return [text for one in every if one is not None and (text := str(one).strip())]


def gsm8k(prompt: str, completion: str, answer: Any = "", **row: Any) -> float:
    """1 if the number behind #### is that of the answer, which may be a bare number."""
    rights = []
    for text in accepted(answer) or [""]:
        number = final_number(text)
        rights.append(as_number(text) if number is None else number)
        if rights[-1] is None:
            raise ValueError(f"the answer {text[-60:]!r} has no number behind ####")
    return float(final_number(completion) in rights)


def choice(prompt: str, completion: str, answer: Any = "", **row: Any) -> float:
    """1 if the reply is the letter of the right choice: see is_letter."""
    letters = accepted(answer)
    if not letters or max(map(len, letters)) > 1:
        raise ValueError(f"the answer {str(answer)[-60:]!r} is not the letter of a choice")
    return float(any(is_letter(completion, letter) for letter in letters))


def code(
    prompt: str,
    completion: str,
    test: Any = None,
    starter: str | None = "",
    entry_point: str | None = "",
    **row: Any,
) -> float:
    """1 if the program in the reply passes `test`, in the sandbox. See humaneval.program for the columns; null is as if
    the row had none."""
    if not test:
        raise ValueError("the question has no column test with a program that checks the answer")
    return float(judged(*program(completion, test, starter or "", entry_point or "")).ok)


def toy(
    prompt: str, completion: str, accept: Sequence[str] = (), reject: Sequence[str] = (), rule: str = "says", **row: Any
) -> float:
    """1 if the toy world calls it right: see toyworld.correct."""
    if not accept and rule != "unknown":
        raise ValueError("the question has no column accept with the answers of the toy world")
    question = toyworld.ToyQuestion(prompt, "", tuple(map(str, accept)), "", "", rule, tuple(map(str, reject)))
    return float(toyworld.correct(question, completion))


def answer(prompt: str, completion: str, **row: Any) -> float:
    """1 if it is right by what the row has: a `test` to pass, `letters` to choose from, or an `answer` with a number
    behind ####, a number (the last one of the reply counts), or words (the reply or its last line); of a list any."""
    if row.get("test"):
        return code(prompt, completion, **row)
    if row.get("letters"):
        return choice(prompt, completion, **row)
    rights = accepted(row.get("answer"))
    if not rights:
        raise ValueError("the question has no answer to compare with")
    return float(any(_says(completion, right) for right in rights))


def why_unjudged(row: dict[str, Any]) -> str:
    """Why `answer` can say of no reply to this question whether it is right; "" where it can."""
    try:
        if row.get("test"):
            program("", row["test"], row.get("starter") or "", row.get("entry_point") or "")
        else:
            answer("", "", **row)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _says(completion: str, right: str) -> bool:
    if FINAL.search(right):
        return gsm8k("", completion, right) > 0
    number = as_number(right)
    if number is not None:
        said = NUMBER.findall(completion)
        return bool(said) and as_number(said[-1]) == number
    lines = completion.strip().splitlines() or [""]
    return _plain(right) in (_plain(completion), _plain(lines[-1]))


def _plain(text: str) -> str:
    return " ".join(text.casefold().strip(" \n\t.。!！").split())


def form(prompt: str, completion: str, answer: Any = "", finish: str = "stop", **row: Any) -> float:
    """1 if the reply has come to its end and has the form of the right answer: one `#### number` in the last line, one
    \\boxed{}, a bare letter, one code block; any text where the answer has none of these."""
    said, right = completion.strip(), str(answer)
    if finish != "stop" or not said:
        return 0.0
    if row.get("test"):
        fences = {said.count("```"), said.count("~~~")}
        return float(fences == {0, 2} and CODE_BLOCK.search(said) is not None)
    if row.get("letters"):
        return float(said.rstrip(".") in row["letters"])
    if FINAL.search(right):
        return float(said.count("####") == 1 and FINAL.fullmatch(said.splitlines()[-1].strip()) is not None)
    if "\\boxed" in right:
        return float(len(BOXED.findall(said)) == 1)
    return 1.0


def length(prompt: str, completion: str, completion_ids: Sequence[int] = (), **row: Any) -> float:
    """Tokens of the reply."""
    return float(len(completion_ids))


def math_verify(prompt: str, completion: str, answer: Any = "", **row: Any) -> float:
    """1 if both are the same mathematics, by the package math-verify. It bounds its time with `signal.alarm`, which
    needs the main thread: so this runs in a process of its own."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it reports every timeout
    said = parse(completion)
    for text in accepted(answer) or [""]:
        right = text.rpartition("####")[2].strip()
        marked = "$" in right or "\\boxed" in right or WORD.search(right)
        gold = parse(right if marked else f"${right}$") or parse(right)
        if not gold:
            raise ValueError(f"math-verify finds no mathematics in the answer {right[-60:]!r}")
        if verify(gold, said):
            return 1.0
    return 0.0


# Run here, in threads: they are bounded, and programs of a model run in the sandbox.
OURS: dict[str, Callable[..., float]] = {
    "answer": answer,
    "choice": choice,
    "code": code,
    "format": form,
    "gsm8k": gsm8k,
    "length": length,
    "toyworld": toy,
}
TASK, MATH = "task", "math-verify"
MANNERS = ("format", "length")  # terms that say nothing about whether an answer is right
TAKEN = ("prompt", "completion")  # columns of a row that are the function's own arguments


class JudgeRequest(NamedTuple):
    """An answer that is to be judged."""

    task: Task
    row: int
    reply: str
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()
    finish: str = "stop"  # or "length": it was cut short


@dataclass(frozen=True)
class Judgement:
    """The reward of an answer; None where a term could not be computed."""

    reward: float | None
    terms: dict[str, float] = field(default_factory=dict)  # by name, without weights
    right: bool = False  # the first term that says so is above 0


class _Term(NamedTuple):
    """One term of a reward."""

    name: str
    weight: float
    shared: bool = False  # an async function: many in one process


def row_of(task: Task, index: int) -> dict[str, Any]:
    """Keyword arguments of a reward function: all columns of a question but its text."""
    columns = {"task": task.name, "index": index, "answer": text_of(task.example(index)[-1]["content"])}
    row = {**columns, **task.row(index), "messages": task.prompt(index)}
    return {name: value for name, value in row.items() if name not in TAKEN}


class Judge:
    """Turns answers into rewards; thread-safe. `reward`: terms as NAME=WEIGHT, where NAME may be
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
        entries = [reward] if isinstance(reward, str) and reward else reward or [TASK]
        try:
            self.terms = [self._open(*parse_entry(text, signed=True)) for text in entries]
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, weight: float | None) -> _Term:
        """Check a term now, not after the first hour of generating."""
        weight = 1.0 if weight is None else weight
        if name in OURS or name == TASK:
            return _Term(name, weight)
        if name == MATH:
            if importlib.util.find_spec("math_verify") is None:
                raise UserError("--reward math-verify needs the package of this name: pip install math-verify")
            return _Term(name, weight)
        if ":" not in name:
            known = nearest(name, [TASK, *OURS, MATH])
            raise UserError(f"--reward {name} is no built-in term; {known}; or write module:function")
        try:
            shared = self._processes().submit((name,), attempts=1).result()
        except Failure as problem:
            raise UserError(
                f"--reward {name}: {problem}; write module:function of a file that can be imported"
            ) from None
        return _Term(name, weight, bool(shared))

    def _processes(self) -> Pool:
        with self._guard:
            if self._pool is None:
                self._pool = Pool(run, self.timeout)
            return self._pool

    def rewards(self, answers: Sequence[Any]) -> list[float | None]:
        """The reward of each answer, in order; None where it could not be computed."""
        return [verdict.reward for verdict in self.verdicts(answers)]

    def verdicts(self, answers: Sequence[Any]) -> list[Judgement]:
        """Judge answers (each an JudgeRequest, or its first fields), in order."""
        verdicts = [future.result() for future in [self.submit(JudgeRequest(*asked)) for asked in answers]]
        if answers:
            self.check_worked(len(answers))
        return verdicts

    def check_worked(self, answers: int) -> None:
        """End a run in which a term has failed for every answer: that is a mistake in the function."""
        for name, problem in self._problems.items():
            if name not in self._worked:
                raise UserError(f"--reward {name} has judged none of {answers} answers: {problem}; mend the function")

    def submit(self, request: JudgeRequest) -> Future[Judgement]:
        """Begin to judge one answer."""
        numbers = [self._begin(term, request) for term in self.terms]
        whole: Future[Judgement] = Future()
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

    def _begin(self, term: _Term, request: JudgeRequest) -> Future[float]:
        task, index, reply, prompt_ids, completion_ids, finish = request
        if term.name == TASK:
            return self._threads.submit(lambda: float(task.correct(index, reply)))
        ids = {"prompt_ids": list(prompt_ids), "completion_ids": list(completion_ids), "finish": finish}
        question, row = task.question(index), {**row_of(task, index), **ids}
        if term.name in OURS:
            return self._threads.submit(lambda: checked(OURS[term.name](question, reply, **row)))
        path = f"{__name__}:{math_verify.__name__}" if term.name == MATH else term.name
        return self._processes().submit((path, question, reply, row), shared=term.shared)

    def _verdict(self, numbers: Sequence[Future[float]]) -> Judgement:
        values: dict[str, float] = {}
        for term, number in zip(self.terms, numbers):
            problem = number.exception()
            if problem is None:
                values[term.name] = number.result()
                self._worked.add(term.name)
            else:
                text = str(problem) if isinstance(problem, Failure) else f"{type(problem).__name__}: {problem}"
                self._problems[term.name] = text
                self._say_once(f"--reward {term.name} failed: {text}")
        whole = len(values) == len(self.terms)
        reward = sum(term.weight * values[term.name] for term in self.terms) if whole else None
        judging = [term.name for term in self.terms if term.name not in MANNERS]
        return Judgement(reward, values, bool(judging) and values.get(judging[0], 0.0) > 0)

    def _say_once(self, text: str) -> None:
        if not self._said:
            self._said = True
            self.say(f"{text}; answers that cannot be judged count as the worst of their group")

    def close(self) -> None:
        """End the processes and threads."""
        if self._pool is not None:
            self._pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
