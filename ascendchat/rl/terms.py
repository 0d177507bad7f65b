"""The built-in terms of a reward, for `ascendchat rl --reward gsm8k=1,format=0.1,length=-0.001`: plain functions.

    gsm8k(prompt, completion, answer="... #### 18")      # 1.0 or 0.0; each takes the columns of the row that it needs

A function of a user's has the same form. rewards.py says where each of them runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from ascendchat.data import toyworld
from ascendchat.tasks.choice import is_letter
from ascendchat.tasks.gsm8k import FINAL, as_number, final_number
from ascendchat.tasks.gsm8k import NUMBER as ONE_NUMBER
from ascendchat.tasks.humaneval import CODE_BLOCK, judged, program

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
    question = toyworld.Question(prompt, "", tuple(map(str, accept)), "", "", rule, tuple(map(str, reject)))
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
