"""The built-in terms of a reward, each on right and wrong answers of its kind."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from ascendchat.errors import UserError
from ascendchat.rl import rewards
from ascendchat.rl.questions import QuestionFile
from ascendchat.rl.rewards import Judge, JudgeRequest, row_of
from ascendchat.tasks.by_name import load


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("It is 9 * 2.\n#### 18", "9*2 = 18\n#### 18", 1.0),
        ("#### 1,800.00", "#### 1800", 1.0),
        ("#### 18", 18, 1.0),
        ("#### $18", "18", 1.0),
        ("18", "#### 18", 0.0),
        ("#### 18\n#### 19", "#### 18", 0.0),
        ("#### 1/2", "#### 1", 0.0),
        ("#### 0.5", "#### 1/2", 1.0),
        ("#### 1/2/3", "#### 1", 0.0),
        ("#### 1/0", "#### 1", 0.0),
        ("#### \u22125", "#### -5", 1.0),
        ("#### 1e3", 1000, 1.0),
        ("#### .5", 0.5, 1.0),
        ("#### 7", [6, "#### 7"], 1.0),
    ],
)
def test_gsm8k(reply: str, answer: object, reward: float) -> None:
    assert rewards.gsm8k("q", reply, answer=answer, task="x") == reward


def test_what_a_term_needs_and_the_row_has_not_is_said() -> None:
    for term, row, says in [
        (rewards.gsm8k, {"answer": "a red ball"}, "no number behind ####"),
        (rewards.code, {"answer": "x"}, "no column test"),
        (rewards.toy, {"answer": "x"}, "no column accept"),
        (rewards.answer, {"answer": " "}, "no answer to compare with"),
        (rewards.answer, {"answer": [None, ""]}, "no answer to compare with"),
        (rewards.answer, {"answer": {"value": "18"}}, "the answer is an object, not text"),
        (rewards.answer, {"answer": [["18"]]}, "the answer is a list of lists, not text"),
        (rewards.gsm8k, {"answer": ["18", "red"]}, "'red' has no number"),
        (rewards.choice, {"answer": "the rose"}, "'the rose' is not the letter of a choice"),
    ]:
        with pytest.raises(ValueError, match=says):
            term("q", "#### 1", **row)


@pytest.mark.parametrize(("reply", "reward"), [("B", 1.0), ("B.", 1.0), (" B\nbecause", 1.0), ("Bad", 0.0), ("A", 0.0)])
def test_choice(reply: str, reward: float) -> None:
    assert rewards.choice("q", reply, answer="B") == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("A dog is the answer, so B", 0.0),
        ("A (dog)", 1.0),
        ("A: a dog", 1.0),
        ("A \ndog", 1.0),
        ("A 因为狗会叫", 1.0),
        ("A\u3000因为狗会叫", 1.0),
        ("A，因为狗会叫", 1.0),
        ("A股上涨，所以选B", 0.0),
        ("A été is no summer, so B", 0.0),
        ("A 100 m race, so B", 0.0),
        ("B 因为 A 不对", 0.0),
    ],
)
def test_a_word_of_one_letter_is_no_choice(reply: str, reward: float) -> None:
    assert rewards.choice("q", reply, answer="A") == reward


def test_code_runs_in_the_sandbox() -> None:
    row = {"starter": "def double(x):\n", "entry_point": "double", "test": "def check(f):\n    assert f(4) == 8"}
    assert rewards.code("q", "```python\ndef double(x):\n    return 2 * x\n```", **row) == 1.0
    assert rewards.code("q", "    return 2 * x", **row) == 1.0
    assert rewards.code("q", "def double(x):\n    return x", **row) == 0.0
    assert rewards.code("q", "def double(x):\n    import sys; sys.exit(0)", **row) == 0.0
    assert rewards.code("q", "def f():\n    return 1", test=["assert f() == 1", "assert f() < 2"]) == 1.0
    assert rewards.code("q", "def f():\n    return 1", test=["assert f() == 1", "assert f() > 2"]) == 0.0


CHECK = "def check(f):\n    assert f(2) == 4\n"
CLASS = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(sq(2), 4)\n"


@pytest.mark.parametrize("test", [CHECK, "METADATA = dict(author='a')\n" + CHECK, ["", CHECK]])
def test_tests_in_a_function_need_the_name_of_what_they_check(test: object) -> None:
    for term in (rewards.code, rewards.answer):
        with pytest.raises(ValueError, match="the column entry_point must name the function"):
            term("q", "def sq(x):\n    return 0", test=test)


@pytest.mark.parametrize(
    ("test", "entry_point"),
    [
        ("  \n", ""),
        ("# todo", ""),
        ([""], ""),
        ("pass", "sq"),
        ('"""sq(2) is 4"""', ""),
        ("import math\nWANTED = 4", ""),
        ("def test_sq():\n    assert sq(2) == 4", ""),
        ("def test_sq():\n    assert sq(2) == 4", "sq"),
        ("async def check(f):\n    assert f(2) == 4", "sq"),
        ("check = lambda f: f(2) == 4 or 1 / 0", "sq"),
        (CLASS, ""),
    ],
)
def test_tests_that_run_nothing_make_no_answer_right(test: object, entry_point: str) -> None:
    with pytest.raises(ValueError, match="its column test runs nothing"):
        rewards.code("q", "def sq(x):\n    return 0", test=test, entry_point=entry_point)


@pytest.mark.parametrize(
    ("test", "entry_point"),
    [
        (CHECK + "check(sq)", ""),
        (CHECK + "def main():\n    check(sq)\nmain()", ""),
        (CHECK.replace("check", "check "), "sq"),
        (CLASS + "if __name__ == '__main__':\n    unittest.main(exit=False).result.wasSuccessful() or 1 / 0", ""),
        ("if sq(2) != 4:\n    raise SystemExit(1)", ""),
        ("assert sq(2 == 4", ""),  # no Python: no answer is right, as any test that fails
    ],
)
def test_tests_that_call_what_they_define_judge(test: str, entry_point: str) -> None:
    assert rewards.code("q", "def sq(x):\n    return 0", test=test, entry_point=entry_point) == 0.0


def test_toyworld_judges_as_the_task_does() -> None:
    for name in ("toy_problems", "toy_arithmetic_en", "toy_fact_zh", "toy_choice_en"):
        task = load(name, "train")
        for index in range(0, len(task), max(1, len(task) // 5)):
            row = row_of(task, index)
            for reply in (row["answer"], "I do not know.", "7"):
                assert rewards.toy(task.question(index), reply, **row) == task.correct(index, reply)


@pytest.mark.parametrize(
    ("reply", "row", "reward"),
    [
        ("The answer is 18.", {"answer": "18"}, 1.0),
        ("18 apples and 2 pears", {"answer": 18}, 0.0),
        ("It is 1,800", {"answer": "1800"}, 1.0),
        ("#### 18", {"answer": "x\n#### 18"}, 1.0),
        ("Let me think.\nParis.", {"answer": "paris"}, 1.0),
        ("Paris is not it. Rome.", {"answer": "Paris"}, 0.0),
        ("", {"answer": "Paris"}, 0.0),
        ("none", {"answer": "18"}, 0.0),
        ("B", {"answer": "B", "letters": ["A", "B"]}, 1.0),
        ("x = 2", {"answer": "", "test": "assert x == 2"}, 1.0),
        ("It is paris.\nParis city", {"answer": ["Paris", "Paris city"]}, 1.0),
        ("It is 3.", {"answer": [2, "3"]}, 1.0),
        ("It is 4.", {"answer": [2, "3"]}, 0.0),
    ],
)
def test_answer_goes_by_what_the_row_has(reply: str, row: dict[str, object], reward: float) -> None:
    assert rewards.answer("q", reply, **row) == reward


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [("It is 0.", 0, 1.0), ("It is 1.", 0, 0.0), ("0", 0.0, 1.0), ("Infinity", "infinity", 1.0), ("nan", "NaN", 1.0)],
)
def test_zero_and_words_that_look_like_numbers_are_answers(reply: str, answer: object, reward: float) -> None:
    assert rewards.answer("q", reply, answer=answer) == reward


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("It is 0.5.", ".5", 1.0),
        ("It is .5", 0.5, 1.0),
        ("It is 0.00001", 1e-05, 1.0),
        ("It is 1e-05.", 5, 0.0),
        ("1e3 of them", "1000", 1.0),
        ("It is \u22127.", -7, 1.0),
        ("It is -7.", "\u22127", 1.0),
        ("It is 2/4.", "1/2", 1.0),
        ("from 3-5", "5", 1.0),
        ("on 3/4/2024", 2024, 1.0),
        ("version 1.2.5", 5, 1.0),
    ],
)
def test_a_number_is_one_however_it_is_written(reply: str, answer: object, reward: float) -> None:
    assert rewards.answer("q", reply, answer=answer) == reward


@pytest.mark.parametrize(
    ("reply", "row", "reward"),
    [
        ("so 9\n#### 18", {"answer": "#### 3"}, 1.0),
        ("so\n9\n#### 18", {"answer": "#### 3"}, 1.0),
        ("#### 18 apples", {"answer": "#### 3"}, 0.0),
        ("#### 18\n#### 18", {"answer": "#### 3"}, 0.0),
        ("so 9\n#### 18", {"answer": "#### 3", "finish": "length"}, 0.0),
        ("C.", {"answer": "A", "letters": ["A", "B", "C"]}, 1.0),
        ("C is right", {"answer": "A", "letters": ["A", "B", "C"]}, 0.0),
        ("so \\boxed{3}", {"answer": "\\boxed{4}"}, 1.0),
        ("so 3", {"answer": "\\boxed{4}"}, 0.0),
        ("\\boxed{3} or \\boxed{4}", {"answer": "\\boxed{4}"}, 0.0),
        ("```python\nx = 1\n```", {"test": "pass"}, 1.0),
        ("~~~python\nx = 1\n~~~", {"test": "pass"}, 1.0),
        ("~~~python\nx = 1\n~~~\n```\ny\n```", {"test": "pass"}, 0.0),
        ("x = 1", {"test": "pass"}, 0.0),
        ("```python\nx = 1", {"test": "pass"}, 0.0),
        ("anything", {"answer": "words"}, 1.0),
        (" ", {"answer": "words"}, 0.0),
    ],
)
def test_format(reply: str, row: dict[str, object], reward: float) -> None:
    assert rewards.form("q", reply, **row) == reward


def judged_by_math_verify(folder: Path, cases: list[tuple[str, str, float]]) -> list[float | None]:
    """Rewards of (answer, reply, _)."""
    pytest.importorskip("math_verify")
    rows = [{"question": f"what is {i}?", "answer": answer} for i, (answer, _, _) in enumerate(cases)]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    judge, task = Judge("math-verify", timeout=60.0), QuestionFile(str(path))
    with closing(judge):
        return [judge.rewards([JudgeRequest(task, i, reply)])[0] for i, (_, reply, _) in enumerate(cases)]


@pytest.mark.slow
def test_math_verify_compares_mathematics(tmp_path: Path) -> None:
    cases = [
        ("$\\frac{1}{2}$", "The result is $0.5$.", 1.0),
        ("1/2", "so \\boxed{\\frac{2}{4}}", 1.0),
        ("... #### 1,800", "It is 1800.", 1.0),
        ("x^2 + 2x + 1", "$(x+1)^2$", 1.0),
        ("3", "$4$", 0.0),
        ("3", "no idea", 0.0),
    ]
    assert judged_by_math_verify(tmp_path, cases) == [reward for _, _, reward in cases]


@pytest.mark.long(short="test_math_verify_compares_mathematics")
def test_what_takes_math_verify_for_ever_is_ended_by_its_own_alarm(tmp_path: Path) -> None:
    """In the main thread of a process of its own."""
    assert judged_by_math_verify(tmp_path, [("3", "$" + "9^" * 60 + "9$", 0.0)]) == [0.0]


def test_math_verify_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install math-verify"):
        Judge("math-verify")
