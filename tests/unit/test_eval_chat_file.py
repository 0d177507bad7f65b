"""`ascendchat eval chat`: its file is written after every task, and keeps what was found over more rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_eval_chat import command, save

from ascendchat.eval import chat
from ascendchat.eval.examine import Examiner, Outcome, selection
from ascendchat.launch.world import World
from ascendchat.record import run_folder
from ascendchat.tasks import Task

ABOUT = {"model": "0f", "step": 3, "settings": {"samples": 1}, "source": None, "missing": {}}
MANY = 40  # rows of every task here


def found(accuracy: float = 0.5, **rows: int) -> dict[str, Any]:
    """Results as a run hands them over."""
    tasks = {
        name: {"accuracy": accuracy, "centred": accuracy, "rows": count, "rows_in_task": MANY}
        for name, count in rows.items()
    }
    return {**ABOUT, "tasks": tasks}


def rows_of(new: dict[str, Any]) -> chat.Rows:
    return {name: (task["rows"], task["rows_in_task"]) for name, task in new["tasks"].items()}


def stored(stage: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((stage / chat.FILE).read_text())
    return content


def sizes(content: dict[str, Any]) -> dict[str, int]:
    return {name: task["rows"] for name, task in content["tasks"].items()}


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
    stage = run_folder("tiny", "sft")
    assert command("--tasks", "toy_choice_zh") == 0
    ends_before("toy_check_en", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        command("--tasks", "toy_fact_en,toy_check_en")
    content = stored(stage)
    assert sizes(content) == {"toy_fact_en": 4, "toy_choice_zh": 4}  # and the one before
    assert content["scores"]["toyworld en"]["tasks"] == 1
    assert [path.name for path in stage.iterdir() if "eval_chat" in path.name] == [chat.FILE]


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = found(toy_fact_en=9)
    monkeypatch.setattr(chat.dist, "world", lambda: World(rank=1, size=2))
    chat.store(tmp_path, new, rows_of(new))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(chat.dist, "world", lambda: World(rank=0, size=2))
    chat.store(tmp_path, new, rows_of(new))
    assert sizes(stored(tmp_path)) == {"toy_fact_en": 9}


def test_a_quick_look_never_replaces_a_fuller_result_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    save("sft", 2)
    path = run_folder("tiny", "sft") / chat.FILE
    assert command("--tasks", "toy_choice_en", "--max-per-task", "9") == 0
    before = stored(path.parent)["tasks"]["toy_choice_en"]
    capsys.readouterr()
    assert command("--tasks", "toy_choice_en,toy_choice_zh", "--json") == 0  # four rows
    shown = capsys.readouterr()
    assert f"{path} keeps what was found before: toy_choice_en over 9 rows (now 4)\n" in shown.err
    content = stored(path.parent)
    assert content["tasks"]["toy_choice_en"] == before
    assert content["scores"] == chat.scores(content["tasks"])
    assert sizes(content) == {"toy_choice_en": 9, "toy_choice_zh": 4}
    assert json.loads(shown.out)["tasks"]["toy_choice_en"]["rows"] == 4  # what this run found is printed nevertheless
    save("sft", 3)  # trained again, to the same step
    assert command("--tasks", "toy_choice_en") == 0
    assert sizes(stored(path.parent)) == {"toy_choice_en": 4}
    assert "keeps" not in capsys.readouterr().out


def test_a_quick_look_with_other_settings_leaves_the_file_alone_from_its_first_task_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save("sft", 2)
    stage = run_folder("tiny", "sft")
    assert command("--tasks", "toy_check_en", "--max-per-task", "9") == 0
    before = stored(stage)
    assert command("--tasks", "toy_fact_en,toy_check_en", "--max-new-tokens", "3") == 0
    assert stored(stage) == before
    assert "keeps what was found before with other settings: toy_check_en over 9 rows" in capsys.readouterr().out
    ends_before("toy_check_en", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        command("--tasks", "toy_fact_en,toy_check_en", "--max-new-tokens", "3")
    assert stored(stage) == before
    assert command("--tasks", "toy_choice_en", "--max-new-tokens", "3") == 0  # no quick look at what is there: anew
    assert sizes(stored(stage)) == {"toy_choice_en": 4}


def test_as_many_rows_of_the_same_files_replace_what_was_found() -> None:
    old = {**found(mmlu=40, toy_fact_en=8), "source": "/a"}
    for new, kept in (
        (found(0.9, toy_fact_en=8), {}),
        (found(0.9, toy_fact_en=7), {"toy_fact_en": 8}),
        ({**found(0.9, mmlu=39, toy_fact_en=9), "source": "/a"}, {"mmlu": 40}),
        ({**found(0.9, mmlu=39), "source": "/b"}, {}),  # other files
        ({**found(0.9, mmlu=39), "source": "/a", "model": "1e"}, {}),
        ({**found(0.9, mmlu=39), "source": "/a", "step": 4}, {}),
    ):
        more = chat.fuller(old, new, rows_of(new))
        assert {name: was["rows"] for name, was in more.items()} == kept
    assert chat.fuller(old, {**found(), "source": "/a"}, {"mmlu": (30, 30)}) == {}  # all of a file that has changed


def test_files_that_still_hold_max_per_task_among_the_settings_are_added_to(tmp_path: Path) -> None:
    first, second = found(toy_fact_en=40), found(toy_fact_zh=8)
    chat.store(tmp_path, {**first, "settings": {"samples": 1, "max_per_task": None}}, rows_of(first))
    chat.store(tmp_path, second, rows_of(second))
    assert sizes(stored(tmp_path)) == {"toy_fact_en": 40, "toy_fact_zh": 8}


def test_a_run_that_examined_nothing_takes_nothing_away(tmp_path: Path) -> None:
    full = {**found(mmlu=40), "source": "/a"}
    chat.store(tmp_path, full, rows_of(full))
    before = stored(tmp_path)
    words = chat.store(tmp_path, {**found(), "source": "/mistyped", "missing": {"mmlu": "no files"}}, {})[1]
    assert (stored(tmp_path), words) == (before, "what was found before: nothing was examined now")
