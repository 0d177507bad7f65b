"""QuestionMixture of one's own for RL: every form that a row may have, and what is wrong with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_models import tokenizer

from ascendchat.data.chat.render import render_choice
from ascendchat.engine.request import Completion
from ascendchat.errors import UserError
from ascendchat.rl.questions import QuestionFile, load_questions
from ascendchat.rl.rewards import row_of
from ascendchat.rl.rollout import AnswerGroup, QuestionMixture, pass_sums, task_sums, term_sums
from ascendchat.tasks.by_name import pass_at_k
from ascendchat.tasks.humaneval import ASK


def write(folder: Path, rows: list[Any], name: str = "mine.jsonl") -> str:
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


USER = {"role": "user", "content": "What is 6 * 7?"}


@pytest.mark.parametrize(
    ("row", "prompt", "columns"),
    [
        ({"question": "What is 6 * 7?", "answer": "42"}, [USER], {"answer": "42"}),
        ({"prompt": "What is 6 * 7?", "answer": 42, "level": [3]}, [USER], {"answer": 42, "level": [3]}),
        ({"prompt": [USER], "completion": "42"}, [USER], {"answer": "42"}),
        ({"messages": [USER], "answer": "42", "x": 1}, [USER], {"answer": "42", "x": 1}),
        ({"messages": [USER, {"role": "assistant", "content": "42"}]}, [USER], {"answer": "42"}),
        ({"query": "What is 6 * 7?"}, [USER], {}),
        (
            {"instruction": "What is", "input": "6 * 7?", "output": "42"},
            [{**USER, "content": "What is\n6 * 7?"}],
            {"answer": "42"},
        ),
        ({"question": "What is 6 * 7?", "answer": None, "response": "42"}, [USER], {"answer": "42"}),
        ({"messages": [USER, {"role": "assistant", "content": "42"}], "answer": None}, [USER], {"answer": "42"}),
        ({"question": "What is 6 * 7?", "answer": [42, "forty-two"]}, [USER], {"answer": [42, "forty-two"]}),
        (
            {"system_prompt": "Be brief.", "question": "How old?", "context": "Bob is 7.", "answer": "7"},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How old?\nBob is 7."}],
            {"answer": "7", "context": "Bob is 7."},
        ),
        (
            {"question": "Red?", "options": {"A": "sky", "B": "rose"}, "answer": "B"},
            [{"role": "user", "content": render_choice("Red?", ["sky", "rose"])}],
            {"answer": "B", "letters": ["A", "B"], "choices": ["sky", "rose"]},
        ),
        (
            {"question": "Red?", "choices": ["sky", "rose"], "answer": 1},
            [{"role": "user", "content": render_choice("Red?", ["sky", "rose"])}],
            {"answer": "B", "letters": ["A", "B"], "choices": ["sky", "rose"]},
        ),
        (
            {"prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass"},
            [{"role": "user", "content": ASK.format(prompt="def f():")}],
            {"starter": "def f():\n", "entry_point": "f", "test": "def check(f): pass"},
        ),
        (
            {"prompt": "def f():\n", "entry_point": "f", "starter": None, "test": "def check(f): assert f"},
            [{"role": "user", "content": ASK.format(prompt="def f():")}],
            {"starter": "def f():\n", "test": "def check(f): assert f"},
        ),
    ],
)
def test_every_form_of_a_row(tmp_path: Path, row: dict[str, Any], prompt: list[Any], columns: dict[str, Any]) -> None:
    task = QuestionFile(write(tmp_path, [row] * 2))
    assert task.prompt(0) == prompt
    given = row_of(task, 0)
    assert {name: given[name] for name in columns} == columns
    assert given["messages"] == prompt
    assert not {"prompt", "completion"} & set(given), "a function has them as its own arguments"
    assert task.checkable == ("answer" in columns or "test" in columns)


@pytest.mark.parametrize(("answer", "right"), [(0, "It is 0."), (0.0, "0"), (False, "False")])
def test_an_answer_that_is_zero_or_false_is_an_answer(tmp_path: Path, answer: object, right: str) -> None:
    task = QuestionFile(write(tmp_path, [{"question": "What is 5 - 5?", "answer": answer}] * 2))
    assert task.checkable
    assert task.correct(0, right)
    assert not task.correct(0, "1")


def test_choices_that_are_zero_are_choices(tmp_path: Path) -> None:
    task = QuestionFile(write(tmp_path, [{"question": "5 - 5?", "A": 0, "B": 0.0, "answer": "A"}] * 2))
    assert task.prompt(0) == [{"role": "user", "content": render_choice("5 - 5?", ["0", "0.0"])}]
    assert task.correct(0, "A")


@pytest.mark.parametrize("answer", ["", " ", None, [], {"value": "42"}, [["42"]]])
def test_what_is_empty_or_an_object_is_no_answer_to_compare_with(tmp_path: Path, answer: object) -> None:
    assert not QuestionFile(write(tmp_path, [{"question": "Why?", "answer": answer}] * 2)).checkable


def test_questions_and_answers_with_half_a_character_are_counted_and_named(tmp_path: Path) -> None:
    good = [{"question": f"{i}?", "answer": "a"} for i in range(40)]
    for bad in (
        {"question": "\ud800?", "answer": "a"},
        {"question": "a", "answer": "\udc00"},
        {"messages": [USER], "test": ["\ud800"]},
    ):
        task = QuestionFile(write(tmp_path, [*good, bad]))
        [notice] = [line for line in task.notices if "cannot be read" in line]
        assert (
            notice == "mine.jsonl: 1 of 41 rows cannot be read: line 41: half a character (a lone surrogate); left out"
        )


def test_malformed_rows_are_counted_and_named_by_file_and_line(tmp_path: Path) -> None:
    good = [{"question": f"{i}?", "answer": i} for i in range(400)]
    bad = ["{not json\n", {"question": 7, "answer": 1}, {"answer": "to what?"}]
    task = QuestionFile(write(tmp_path, [*good[:10], *bad, *good[10:]]))
    held = QuestionFile(write(tmp_path, [*good[:10], *bad, *good[10:]]), "val")
    assert len(task) + len(held) == 400
    assert 0 < len(held) < 30
    assert not {task.question(i) for i in range(len(task))} & {held.question(i) for i in range(len(held))}
    [notice] = task.notices
    assert "mine.jsonl: 3 of 403 rows cannot be read" in notice
    assert all(f"line {number}" in notice for number in (11, 12, 13))
    with pytest.raises(UserError, match="more than 1 % is too much"):
        QuestionFile(write(tmp_path, [*good[:10], *bad]))
    with pytest.raises(UserError, match="a question needs a column messages"):
        QuestionFile(write(tmp_path, [{"answer": "to what?"}] * 3))
    with pytest.raises(UserError, match="found: no column at all"):
        QuestionFile(write(tmp_path, [{}] * 3))
    for name, empty in (("question", ""), ("question", " "), ("question", None), ("messages", [])):
        with pytest.raises(UserError, match=f"line 1: its {name} column is empty"):
            QuestionFile(write(tmp_path, [{name: empty, "answer": 1}] * 3))
    with pytest.raises(UserError, match="at least one row"):
        QuestionFile(write(tmp_path, []))
    with pytest.raises(UserError, match="questions are read from"):
        QuestionFile(str(tmp_path / "nothing.jsonl"))


def test_questions_without_an_answer_are_left_out_of_examinations(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?", "answer": i} for i in range(20)]
    rows += [{"question": "Why?", "answer": ""}, {"question": "f?", "test": "pass"}, {"question": "g?", "test": 5}]
    task = QuestionFile(write(tmp_path, rows), "val")
    assert len(task) == 20
    assert all(task.correct(i, str(i)) for i in range(20))
    assert "3 of 23 questions for examinations have no answer to compare: the question has no answer" in task.notices[1]


def test_columns_of_programs_may_be_null(tmp_path: Path) -> None:
    """As a parquet file has them, some of whose rows have a head of the function and others not."""
    row = {"question": "Write f.", "test": ["assert f(2) == 4"], "starter": None, "entry_point": None}
    task = QuestionFile(write(tmp_path, [row] * 2))
    assert task.checkable
    assert task.correct(0, "def f(x):\n    return 2 * x")


def test_a_run_asks_files_multiple_choice_and_programs(tmp_path: Path) -> None:
    exam = [{"question": f"q{i}", "A": "a", "B": "b", "C": "c", "D": "d", "answer": "C"} for i in range(4)]
    (tmp_path / "mmlu" / "train").mkdir(parents=True)
    write(tmp_path / "mmlu" / "train", exam, "x.jsonl")
    code = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "canonical_solution": "    return 1\n",
    }
    write(tmp_path, [{**code, "test": "def check(f):\n    assert f() == 1"}], "HumanEval.jsonl")
    mine = write(tmp_path, [{"question": "6*7?", "answer": "42"}] * 3)
    questions = QuestionMixture(("mmlu=1", "humaneval=1", f"{mine}=2"), tokenizer(), 0, 4096, str(tmp_path))
    asked = [questions.ask(number) for number in range(8)]
    assert sorted(question.task.name for question in asked) == ["humaneval"] * 2 + ["mine"] * 4 + ["mmlu"] * 2
    right = {"mmlu": "C", "humaneval": "def f():\n    return 1", "mine": "It is 42."}
    for question in asked:
        assert question.task.correct(question.index, right[question.task.name])
        assert not question.task.correct(question.index, "no")
    with pytest.raises(UserError, match="cannot be judged"):
        load_questions("toy_sft")


def test_questions_that_are_too_long_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "6*7? " * words, "answer": "42"} for words in (1, 100, 1)]
    questions = QuestionMixture((write(tmp_path, rows),), tokenizer(), 0, 64)
    assert questions.cut(3) == 1
    assert max(len(questions.ask(number).prompt) for number in range(3)) == 64


def test_pass_at_k_is_of_the_questions_that_were_drawn_first() -> None:
    def group(right: list[bool], first: tuple[int, int] | None = None) -> AnswerGroup:
        answers = [Completion() for _ in right]
        return AnswerGroup(None, answers, [0.0] * len(right), len(right), right=right, first=first)  # type: ignore[arg-type]

    groups = [group([True, False, False, False]), group([False] * 4), group([True] * 3), group([True] * 4, (4, 0))]
    sums = pass_sums(groups, 4)
    assert {k: count for k, (_, count) in sums.items()} == {1: 4.0, 2: 4.0, 4: 3.0}
    assert sums[2][0] == pytest.approx(pass_at_k(4, 1, 2) + 0 + 1 + 0)
    assert sums[4][0] == pytest.approx(1.0)
    groups[0].terms = [{"a": 1.0, "b": 2.0}, {"a": 3.0}]
    assert term_sums(groups, ["a", "b"]) == {"a": (4.0, 2.0), "b": (2.0, 1.0)}


def test_rewards_are_summed_by_task(tmp_path: Path) -> None:
    data = write(tmp_path, [{"question": "1 + 1?", "answer": "2"}] * 4) + "=0.5", "toy_problems=0.5"
    questions = QuestionMixture(data, tokenizer(), seed=0, room=200)
    asked = [questions.ask(number) for number in range(40)]
    groups = [AnswerGroup(question, [], [0.25, 1.0] if question.task.name == "mine" else [0.5]) for question in asked]
    mine = sum(question.task.name == "mine" for question in asked)
    assert 0 < mine < 40
    names = [task.name for task in questions.tasks]
    assert task_sums(groups, [*names, "none"]) == {
        "mine": (1.25 * mine, 2.0 * mine),
        "toy_problems": (0.5 * (40 - mine), 40.0 - mine),
        "none": (0, 0.0),
    }
