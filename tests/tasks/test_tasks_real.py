"""Tasks on the real evaluation sets: how many rows each has, known leaks, HumanEval's own solutions."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendchat.tasks import by_name
from ascendchat.tasks.contamination import OverlapFinder
from ascendchat.tasks.humaneval import HumanEval

ROWS = [
    ("mmlu", "test", 14_042),
    ("ceval", "val", 1_346),
    ("cmmlu", "test", 11_582),
    ("gsm8k", "test", 1_319),
    ("humaneval", "test", 164),
    ("arc_easy", "test", 2_376),
    ("arc_challenge", "test", 1_172),
]


@pytest.mark.parametrize(("name", "split", "rows"), ROWS)
def test_the_sets_have_as_many_rows_as_published(name: str, split: str, rows: int, real_data: Path) -> None:
    # The folder itself, or one that holds it among others.
    task = by_name.load(name, split, str(real_data if name == "ceval" else real_data / "eval"))
    assert len(task) == rows
    for row in (0, rows // 2, rows - 1):
        assert task.example(row)[-1]["role"] == "assistant"
        assert task.question(row).strip()
    if task.kind == "choice":
        assert all(0 <= task.answer(row) < len(task.letters(row)) for row in range(rows))


def test_gsm8k_answers_are_right_by_its_own_rule(real_data: Path) -> None:
    task = by_name.load("gsm8k", "test", str(real_data / "eval"))
    replies = [row[1] for row in task.rows]  # type: ignore[attr-defined]
    assert all(task.correct(i, reply) for i, reply in enumerate(replies))
    assert sum(task.correct(i, replies[i - 1]) for i in range(len(replies))) < 60


@pytest.mark.parametrize(("name", "found"), [("arc_easy", 4), ("arc_challenge", 2)])
def test_known_leaks_between_training_and_test_are_found(name: str, found: int, real_data: Path) -> None:
    # The words of 7 test questions of each ARC are asked in training; of 3 and 5 the right choice is another one there.
    train = by_name.load(name, "train", str(real_data / "sft"))
    finder = OverlapFinder([by_name.load(name, "test", str(real_data / "eval"))])
    assert len(list(finder.over(train))) == len(train)
    assert len(finder.overlaps()) == found


@pytest.mark.slow
def test_solutions_of_humaneval_are_right_and_empty_answers_and_early_exits_wrong(real_data: Path) -> None:
    task = HumanEval(source=str(real_data / "eval"))
    for i in range(0, len(task), 24):
        row = task.rows[i]
        assert task.correct(i, str(task.example(i)[-1]["content"]))
        assert task.correct(i, row["canonical_solution"]), "without the head"
        assert not task.correct(i, "")
        assert not task.correct(i, f"```python\n{row['prompt']}    raise SystemExit(0)\n```")
        assert not task.correct(i, f"import os\nos._exit(0)\ndef {row['entry_point']}(): pass")
