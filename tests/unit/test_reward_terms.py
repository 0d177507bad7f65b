"""The built-in terms of a reward, each on right and wrong answers of its kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascendchat.config import UserError
from ascendchat.tasks import load, terms
from ascendchat.tasks.questions import QuestionFile
from ascendchat.tasks.rewards import Asked, Judge, row_of


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("It is 9 * 2.\n#### 18", "9*2 = 18\n#### 18", 1.0),
        ("#### 1,800.00", "#### 1800", 1.0),
        ("#### 18", 18, 1.0),
        ("#### $18", "18", 1.0),
        ("18", "#### 18", 0.0),
        ("#### 18\n#### 19", "#### 18", 0.0),
    ],
)
def test_gsm8k(reply: str, answer: object, reward: float) -> None:
    assert terms.gsm8k("q", reply, answer=answer, task="x") == reward


def test_gsm8k_without_a_number_to_compare_with_cannot_judge() -> None:
    with pytest.raises(ValueError, match="no number"):
        terms.gsm8k("q", "#### 1", answer="a red ball")


@pytest.mark.parametrize(("reply", "reward"), [("B", 1.0), ("B.", 1.0), (" B\nbecause", 1.0), ("Bad", 0.0), ("A", 0.0)])
def test_choice(reply: str, reward: float) -> None:
    assert terms.choice("q", reply, answer="B") == reward


def test_code_runs_in_the_sandbox() -> None:
    row = {"starter": "def double(x):\n", "entry_point": "double", "test": "def check(f):\n    assert f(4) == 8"}
    assert terms.code("q", "```python\ndef double(x):\n    return 2 * x\n```", **row) == 1.0
    assert terms.code("q", "    return 2 * x", **row) == 1.0
    assert terms.code("q", "def double(x):\n    return x", **row) == 0.0
    assert terms.code("q", "def double(x):\n    import sys; sys.exit(0)", **row) == 0.0
    assert terms.code("q", "def f():\n    return 1", test=["assert f() == 1", "assert f() < 2"]) == 1.0
    assert terms.code("q", "def f():\n    return 1", test=["assert f() == 1", "assert f() > 2"]) == 0.0


def test_toyworld_judges_as_the_task_does() -> None:
    for name in ("toy_problems", "toy_arithmetic_en", "toy_fact_zh", "toy_choice_en"):
        task = load(name, "train")
        for index in range(0, len(task), max(1, len(task) // 20)):
            row = row_of(task, index)
            for reply in (row["answer"], "I do not know.", "7"):
                assert terms.toy(task.question(index), reply, **row) == task.correct(index, reply)


@pytest.mark.parametrize(
    ("reply", "row", "reward"),
    [
        ("The answer is 18.", {"answer": "18"}, 1.0),
        ("18 apples and 2 pears", {"answer": 18}, 0.0),
        ("It is 1,800", {"answer": "1800"}, 1.0),
        ("#### 18", {"answer": "x\n#### 18"}, 1.0),
        ("Let me think.\nParis.", {"answer": "paris"}, 1.0),
        ("Paris is not it. Rome.", {"answer": "Paris"}, 0.0),
        ("B", {"answer": "B", "letters": ["A", "B"]}, 1.0),
        ("x = 2", {"answer": "", "test": "assert x == 2"}, 1.0),
    ],
)
def test_answer_goes_by_what_the_row_has(reply: str, row: dict[str, object], reward: float) -> None:
    assert terms.answer("q", reply, **row) == reward


@pytest.mark.parametrize(
    ("reply", "row", "reward"),
    [
        ("so 9\n#### 18", {"answer": "#### 3"}, 1.0),
        ("#### 18 apples", {"answer": "#### 3"}, 0.0),
        ("#### 18\n#### 18", {"answer": "#### 3"}, 0.0),
        ("so 9\n#### 18", {"answer": "#### 3", "finish": "length"}, 0.0),
        ("C.", {"answer": "A", "letters": ["A", "B", "C"]}, 1.0),
        ("C is right", {"answer": "A", "letters": ["A", "B", "C"]}, 0.0),
        ("so \\boxed{3}", {"answer": "\\boxed{4}"}, 1.0),
        ("so 3", {"answer": "\\boxed{4}"}, 0.0),
        ("```python\nx = 1\n```", {"test": "pass"}, 1.0),
        ("x = 1", {"test": "pass"}, 0.0),
        ("anything", {"answer": "words"}, 1.0),
        (" ", {"answer": "words"}, 0.0),
    ],
)
def test_format(reply: str, row: dict[str, object], reward: float) -> None:
    assert terms.form("q", reply, **row) == reward


@pytest.mark.slow
def test_math_verify_compares_mathematics_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    cases = [
        ("$\\frac{1}{2}$", "The result is $0.5$.", 1.0),
        ("1/2", "so \\boxed{\\frac{2}{4}}", 1.0),
        ("... #### 1,800", "It is 1800.", 1.0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1.0),
        ("3", "$4$", 0.0),
        ("3", "no idea", 0.0),
        ("3", "$" + "9^" * 60 + "9$", 0.0),  # takes for ever: its own alarm ends it
    ]
    rows = [{"question": f"what is {i}?", "answer": answer} for i, (answer, _, _) in enumerate(cases)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = QuestionFile(str(path))
    judge = Judge("math-verify", timeout=60.0)
    try:
        found = judge.rewards([Asked(task, i, reply) for i, (_, reply, _) in enumerate(cases)])
        assert found == [reward for _, _, reward in cases]
    finally:
        judge.close()


def test_math_verify_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install math-verify"):
        Judge("math-verify")
