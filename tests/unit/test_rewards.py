"""A user's reward function may raise, hang or die: every other answer is judged all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ascendchat.config import UserError
from ascendchat.tasks import load
from ascendchat.tasks.rewards import Judge

MODULE = """
import os, time

def fate(prompt, completion, **row):
    if completion == "raise":
        raise RuntimeError("as told")
    if completion == "die":
        os._exit(1)
    if completion == "hang":
        time.sleep(3600)
    if completion == "nan":
        return float("nan")
    return len(completion)

async def later(prompt, completion, **row):
    return float(row["index"])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fates.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fates", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "fates"


@pytest.mark.slow
def test_whatever_one_answer_does_the_others_are_judged(module: str) -> None:
    task, said = load("toy_arithmetic_en", "train"), list[str]()
    judge = Judge(f"{module}:fate", timeout=4.0, say=said.append)
    words = ["a", "raise", "bb", "die", "ccc", "hang", "dddd", "nan", *["eeeee"] * 8]
    try:
        found = judge.rewards([(task, 0, word) for word in words])
        assert found == [1.0, None, 2.0, None, 3.0, None, 4.0, None, *[5.0] * 8]
        assert len(said) == 1, "one sentence, however many fail"
        assert judge.rewards([(task, 0, "again")]) == [5.0]
    finally:
        judge.close()


@pytest.mark.slow
def test_a_function_that_never_works_ends_the_run_and_one_that_did_does_not(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    judge = Judge(f"{module}:fate", say=lambda text: None)
    try:
        with pytest.raises(UserError, match="judged none of 3 answers: RuntimeError: as told"):
            judge.rewards([(task, 0, "raise")] * 3)
        assert judge.rewards([]) == []
        assert judge.rewards([(task, 0, "a")]) == [1.0]
        assert judge.rewards([(task, 0, "raise")] * 3) == [None] * 3
    finally:
        judge.close()


@pytest.mark.slow
def test_a_function_may_be_async_and_sees_its_row(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    judge = Judge(f"{module}:later")
    try:
        assert judge.rewards([(task, index, "x") for index in (3, 1, 2)]) == [3.0, 1.0, 2.0]
    finally:
        judge.close()


def test_without_a_function_the_task_decides() -> None:
    task = load("toy_arithmetic_en", "train")
    right = task.example(0)[-1]["content"]
    text = right if isinstance(right, str) else "".join(part["text"] for part in right if part["type"] == "text")
    assert Judge().rewards([(task, 0, text), (task, 0, "I do not know.")]) == [1.0, 0.0]


@pytest.mark.parametrize("path", ["fates", "fates:nothing", "no_such_module:fate", ":"])
def test_a_wrong_name_is_one_sentence(module: str, path: str) -> None:
    with pytest.raises(UserError, match="--reward"):
        Judge(path)
