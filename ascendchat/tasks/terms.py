"""The built-in terms of a reward, for `ascendchat rl --reward gsm8k=1,format=0.1,length=-0.001`: plain functions.

    gsm8k(prompt, completion, answer="... #### 18")      # 1.0 or 0.0; each takes the columns of the row that it needs

A function of a user's has the same form. rewards.py says where each of them runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from ascendchat.data import toyworld
from ascendchat.tasks.choice import is_letter
from ascendchat.tasks.gsm8k import FINAL, final_number
from ascendchat.tasks.humaneval import CODE_BLOCK, judged, program

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")  # not a name of LaTeX
BOXED = re.compile(r"\\boxed\s*\{[^{}]")


def as_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().lstrip("$").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None  # "infinity" and "nan" are words


def gsm8k(prompt: str, completion: str, answer: Any = "", **row: Any) -> float:
    """1 if the number behind #### is that of the answer, which may be a bare number."""
    right = final_number(str(answer))
    right = as_number(str(answer)) if right is None else right
    if right is None:
        raise ValueError(f"the answer {str(answer)[-60:]!r} has no number behind ####")
    return float(final_number(completion) == right)


def choice(prompt: str, completion: str, answer: Any = "", **row: Any) -> float:
    """1 if the reply is the letter of the right choice, whatever follows it is not a letter."""
    return float(is_letter(completion, str(answer)))


def code(prompt: str, completion: str, test: Any = None, starter: str = "", entry_point: str = "", **row: Any) -> float:
    """1 if the program in the reply passes `test`, in the sandbox. See humaneval.program for the columns."""
    if not test:
        raise ValueError("the question has no column test with a program that checks the answer")
    return float(judged(*program(completion, test, starter, entry_point)).ok)


def toy(
    prompt: str, completion: str, accept: Sequence[str] = (), reject: Sequence[str] = (), rule: str = "says", **row: Any
) -> float:
    """1 if the toy world calls it right: see toyworld.correct."""
    if not accept and rule != "unknown":
        raise ValueError("the question has no column accept with the answers of the toy world")
    question = toyworld.Question(prompt, "", tuple(map(str, accept)), "", "", rule, tuple(map(str, reject)))
    return float(toyworld.correct(question, completion))


def words_of(answer: Any) -> str:
    """The right answer of a row as text; "" where there is none. The number 0 is an answer."""
    return "" if answer is None else str(answer).strip()


def answer(prompt: str, completion: str, **row: Any) -> float:
    """1 if it is right by what the row has: a `test` to pass, `letters` to choose from, or an `answer` with a number
    behind ####, a number (the last one of the reply counts), or words (the reply or its last line)."""
    if row.get("test"):
        return code(prompt, completion, **row)
    if row.get("letters"):
        return choice(prompt, completion, **row)
    right = words_of(row.get("answer"))
    if not right:
        raise ValueError("the question has no answer to compare with")
    if FINAL.search(right):
        return gsm8k(prompt, completion, right)
    number = as_number(right)
    if number is not None:
        said = NUMBER.findall(completion)
        return float(bool(said) and as_number(said[-1]) == number)
    lines = completion.strip().splitlines() or [""]
    return float(_plain(right) in (_plain(completion), _plain(lines[-1])))


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

    right = str(answer).rpartition("####")[2].strip()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it reports every timeout
    marked = "$" in right or "\\boxed" in right or WORD.search(right)
    gold = parse(right if marked else f"${right}$") or parse(right)
    if not gold:
        raise ValueError(f"math-verify finds no mathematics in the answer {right[-60:]!r}")
    return float(verify(gold, parse(completion)))
