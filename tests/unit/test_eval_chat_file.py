"""`ascendchat eval chat`: every task is in results.jsonl before the next begins, and the table shows what counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_eval_chat import command, save, stored

from ascendchat.eval import chat
from ascendchat.eval.examine import Examiner, Outcome, selection
from ascendchat.eval.stages import scores, stage_table
from ascendchat.record import run_folder
from ascendchat.record.results import best_results, stage_results
from ascendchat.tasks import Task


def sizes() -> dict[str, int]:
    """Of the results that count."""
    rows = best_results(stage_results(run_folder("tiny", "sft"), "chat"))
    return {name: row["examined"] for name, row in rows.items()}


def guess(task: Task, examiner: Examiner) -> Outcome:
    """In place of an examination, which takes longer."""
    rows = len(selection(task, examiner.max_rows))
    return Outcome(task.name, task.kind, task.split, rows, len(task), 0.5, 0.0, 0.5, {}, 0, 0.0, [1, 0])


@pytest.fixture(autouse=True)
def guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "examine", guess)


def ends_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine goes away when this task is reached."""

    def lost(task: Task, examiner: Examiner) -> Outcome:
        if task.name == name:
            raise KeyboardInterrupt
        return guess(task, examiner)

    monkeypatch.setattr(chat, "examine", lost)


def test_finished_tasks_are_on_disk_before_the_next_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    save("sft", 2)
    assert command("--tasks", "toy_choice_zh") == 0
    ends_before("toy_check_en", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        command("--tasks", "toy_fact_en,toy_check_en")
    assert [row["task"] for row in stored("sft")] == ["toy_choice_zh", "toy_fact_en"]
    assert sizes() == {"toy_choice_zh": 4, "toy_fact_en": 4}
    assert {row["task"]: row["sft"] for row in stage_table("tiny")}["toyworld en"] == 0.5


def test_a_quick_look_never_replaces_a_fuller_result_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    save("sft", 2)
    assert command("--tasks", "toy_choice_en", "--max-per-task", "9") == 0
    capsys.readouterr()
    assert command("--tasks", "toy_choice_en,toy_choice_zh", "--json") == 0  # four rows
    shown = capsys.readouterr()
    assert "what was found before still counts: toy_choice_en over 9 of 317 (now 4)\n" in shown.err
    assert sizes() == {"toy_choice_en": 9, "toy_choice_zh": 4}
    printed = json.loads(shown.out)  # what this run found is printed nevertheless
    assert {name: task["rows"] for name, task in printed["tasks"].items()} == {"toy_choice_en": 4, "toy_choice_zh": 4}
    assert printed["scores"] == scores(printed["tasks"])
    save("sft", 3)  # trained again, to the same step
    assert command("--tasks", "toy_choice_en") == 0
    assert sizes() == {"toy_choice_en": 4}
    assert "still counts" not in capsys.readouterr().out


def test_a_quick_look_with_other_settings_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    save("sft", 2)
    assert command("--tasks", "toy_check_en", "--max-per-task", "9") == 0
    assert command("--tasks", "toy_fact_en,toy_check_en", "--max-new-tokens", "3") == 0
    assert sizes() == {"toy_check_en": 9}
    said = "what was found before with other settings still counts: toy_check_en over 9 of 114 (now 4)"
    assert said in capsys.readouterr().out
    assert command("--tasks", "toy_check_en", "--max-new-tokens", "3", "--max-per-task", "9") == 0  # as full: anew
    assert sizes() == {"toy_fact_en": 4, "toy_check_en": 9}
    assert len(stored("sft")) == 4  # and nothing was lost


def test_results_of_a_checkpoint_outside_of_runs_stand_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("sft", 2)
    shutil.move(run_folder("tiny", "sft"), tmp_path / "moved")
    assert command("--tasks", "toy_choice_en", "--checkpoint", str(tmp_path / "moved")) == 0
    assert [row["task"] for row in stage_results(tmp_path / "moved", "chat")] == ["toy_choice_en"]
    assert (tmp_path / "moved" / "results.jsonl").is_file()
    assert "stages of" not in capsys.readouterr().out
