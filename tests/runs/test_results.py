"""results.jsonl: rows of several evaluations in one file, and which of them count when they are read."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm_process

from ascendchat.config.commands import PlanConfig
from ascendchat.errors import UserError, home
from ascendchat.runs.results import NewResults, best_results, results_file, run_of, stage_results
from ascendchat.runs.run import open_run, run_folder

MANY = 40  # rows of every task here


def result(task: str, examined: int = MANY, **changes: Any) -> dict[str, Any]:
    about = {"evaluation": "chat", "checkpoint": "x", "model": "0f", "step": 3, "settings": {"samples": 1}}
    found = {"task": task, "examined": examined, "in_task": MANY, "source": None, "result": {"accuracy": 0.5}}
    return {"time": next(CLOCK), **about, **found, **changes}


CLOCK = iter(range(1_000_000))


def examined(folder: Path, *rows: dict[str, Any]) -> NewResults:
    """An evaluation of these tasks, all with the same settings."""
    about = {name: rows[0][name] for name in ("evaluation", "checkpoint", "model", "step", "settings")}
    new = NewResults(folder, about)
    for row in rows:
        new.add(row["task"], row["examined"], row["in_task"], row["result"], row["source"])
    return new


def counts(*rows: dict[str, Any]) -> dict[str, int]:
    """Task -> rows of the result that counts."""
    return {task: row["examined"] for task, row in best_results(rows).items()}


def test_rows_of_all_stages_stand_in_the_file_of_the_run_and_of_other_checkpoints_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("mid", "sft"):
        run_folder("tiny", stage).mkdir(parents=True)
        examined(run_folder("tiny", stage), result("mmlu", result={"accuracy": math.nan}))
    path = home() / "runs" / "tiny" / "results.jsonl"
    assert [json.loads(line)["stage"] for line in path.read_text().splitlines()] == ["mid", "sft"]
    (row,) = stage_results(run_folder("tiny", "mid"), "chat")
    assert math.isnan(row["result"]["accuracy"])
    assert stage_results(run_folder("tiny", "mid"), "core") == []
    assert stage_results(run_folder("nobody", "mid"), "chat") == []
    monkeypatch.chdir(run_folder("tiny", "sft"))  # given by another path
    examined(Path(), result("mmlu"))
    assert [row["stage"] for row in stage_results(run_folder("tiny", "sft"), "chat")] == ["sft", "sft"]
    examined(tmp_path, result("mmlu"))
    assert (run_of(tmp_path), results_file(tmp_path)) == ("", tmp_path / "results.jsonl")
    assert len(stage_results(tmp_path, "chat")) == 1


def test_a_model_that_is_trained_anew_does_not_inherit_the_results_of_the_one_set_aside() -> None:
    stage = run_folder("tiny", "base")
    with open_run(stage, PlanConfig(), say=lambda text: None):
        pass
    examined(stage, result("mmlu"))
    with open_run(stage, PlanConfig(), resume_step=2, say=lambda text: None):
        assert len(stage_results(stage, "chat")) == 1  # the same training goes on
    (stage / "step_000003").mkdir()
    with open_run(stage, PlanConfig(), say=lambda text: None):
        assert (home() / "runs" / "tiny" / "base.old").is_dir()
        assert stage_results(stage, "chat") == []


ADDING = """
import sys
from pathlib import Path
from ascendchat.runs.results import NewResults
new = NewResults(Path(sys.argv[1]), {"evaluation": "chat", "step": 3})
print("ready", flush=True)
for number in range(int(sys.argv[3])):
    new.add(sys.argv[2], number, 40, {"right": [1] * 20000}, source=None)
"""


def adding(folder: Path, task: str, number: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ADDING, str(folder), task, str(number)]
    process: subprocess.Popen[str] = warm_process.Popen(words, stdout=subprocess.PIPE, text=True)
    return process


def waiting(number: int) -> str:
    """Locks that a process waits for."""
    return "".join(
        line for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line and f" {number} " in line
    )


def test_a_row_is_added_only_when_the_one_being_written_is_whole(tmp_path: Path) -> None:
    line = json.dumps({**result("first"), "stage": tmp_path.name, "run_id": None}).encode() + b"\n"
    with (tmp_path / "results.jsonl").open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line[:50])
        process = adding(tmp_path, "second", 1)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while "FLOCK" not in waiting(process.pid):  # it would write now, if it did not wait
            assert process.poll() is None
            time.sleep(0.01)
        file.write(line[50:])
    assert process.wait(timeout=120) == 0
    assert [row["task"] for row in stage_results(tmp_path, "chat")] == ["first", "second"]


def test_a_killed_evaluation_leaves_rows_that_can_be_read(tmp_path: Path) -> None:
    """A write of many pages may be cut by SIGKILL; half a row at the end is nobody's, and goes."""
    process = adding(tmp_path, "a", 1_000_000)
    while len(rows := stage_results(tmp_path, "chat")) < 5:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    left = stage_results(tmp_path, "chat")
    assert len(left) >= len(rows)
    examined(tmp_path, result("mmlu"))
    assert [row["task"] for row in stage_results(tmp_path, "chat")] == [*(row["task"] for row in left), "mmlu"]
    assert (tmp_path / "results.jsonl").read_bytes().endswith(b"\n")


def test_a_torn_line_is_not_read_and_goes_when_the_next_row_comes(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("half a fi")
    assert stage_results(tmp_path, "chat") == []
    examined(tmp_path, result("mmlu"))
    assert [row["task"] for row in stage_results(tmp_path, "chat")] == ["mmlu"]
    path.write_text("not a row\n" + path.read_text())
    for read in (lambda: stage_results(tmp_path, "chat"), lambda: NewResults(tmp_path, {"evaluation": "chat"})):
        with pytest.raises(UserError, match=r"results.jsonl line 1 is not one of its rows; delete that line"):
            read()
    path.unlink()
    NewResults(tmp_path, {"evaluation": "chat", "step": 3}, main=False).add("mmlu", 4, 40, {}, "")
    assert not path.exists(), "only the main rank writes"
    path.mkdir()
    with pytest.raises(UserError, match=r"cannot write .*results\.jsonl: Is a directory"):
        examined(tmp_path, result("mmlu"))


def test_tasks_examined_one_after_the_other_count_until_the_weights_change() -> None:
    first, second = result("mmlu"), result("gsm8k")
    assert counts(first, second) == {"mmlu": 40, "gsm8k": 40}
    assert counts(first, second, result("gsm8k", 4, model="1e")) == {"gsm8k": 4}
    assert counts(first, second, result("gsm8k", 4, step=4)) == {"gsm8k": 4}
    assert counts() == {}


def test_a_quick_look_never_replaces_a_fuller_result_of_the_same_files() -> None:
    full = result("mmlu", 9, source="/a")
    for new, expected in (
        (result("mmlu", 8, source="/a"), 9),
        (result("mmlu", 8, source="/b"), 8),
        (result("mmlu", 8, source="/a", in_task=41), 8),  # the file has changed
        (result("mmlu", 8, source="/a", model="1e"), 8),
        (result("mmlu", 0, source="/a", in_task=0, result={"missing": "gone"}), 9),
    ):
        assert counts(full, new) == {"mmlu": expected}
    as_many = result("mmlu", 9, source="/a")
    assert best_results([full, as_many])["mmlu"] is as_many
    corpora = [result("/data", 40 - i, evaluation="bpb", result={"corpus": name}) for i, name in enumerate("aab")]
    assert (counts(*corpora[:2]), counts(*corpora)) == ({"/data": 40}, {"/data": 38})


def test_results_of_other_settings_are_not_mixed_and_the_last_settings_count_if_none_was_fuller() -> None:
    other = {"settings": {"samples": 8}}
    before = [result("mmlu"), result("gsm8k", 9)]
    assert counts(*before, result("gsm8k", 9, **other)) == {"gsm8k": 9}
    quick = [result("humaneval", 8, **other), result("gsm8k", 8, **other)]
    assert counts(*before, *quick) == {"mmlu": 40, "gsm8k": 9}
    assert counts(*before, *quick, result("gsm8k", 9, **other)) == {"humaneval": 8, "gsm8k": 9}
    crossed = [result("mmlu", 8, **other), result("gsm8k", 40, **other)]
    assert counts(*before, *crossed) == {"mmlu": 40, "gsm8k": 9}  # each is fuller once: what was there stays


def test_tasks_of_another_folder_are_not_mixed_in_but_the_embedded_ones_stay() -> None:
    rows = [result("mmlu", source="/a"), result("toy"), result("gsm8k", source="/a")]
    assert set(best_results(rows)) == {"mmlu", "toy", "gsm8k"}
    rows.append(result("gsm8k", 4, source="/b"))
    assert counts(*rows) == {"toy": 40, "gsm8k": 4}
    rows.append(result("toy_zh"))
    assert set(best_results(rows)) == {"toy", "gsm8k", "toy_zh"}
    assert set(best_results([*rows, result("mmlu", source="")])) == {"toy", "mmlu", "toy_zh"}  # fetched


def missing(task: str, source: str) -> dict[str, Any]:
    return result(task, 0, source=source, in_task=0, result={"missing": "no files"})


def sizes(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {task: row["examined"] for task, row in rows.items()}


def test_what_was_just_found_is_shown_beside_earlier_results_of_the_same_settings(tmp_path: Path) -> None:
    examined(tmp_path, result("toy", 9), result("mmlu", source="/a"), missing("ceval", "/a"))
    assert sizes(examined(tmp_path, result("toy", 4)).with_earlier()) == {"toy": 4, "mmlu": 40, "ceval": 0}
    mistyped = examined(tmp_path, missing("mmlu", "/mistyped"))
    assert sizes(mistyped.with_earlier()) == {"toy": 9, "mmlu": 0}
    assert counts(*stage_results(tmp_path, "chat")) == {"toy": 9, "mmlu": 40}  # it takes nothing away
    assert mistyped.better_earlier() == ""
    assert sizes(examined(tmp_path, result("toy", 4, model="1e")).with_earlier()) == {"toy": 4}


def test_what_counts_instead_of_a_quick_look_is_said(tmp_path: Path) -> None:
    assert examined(tmp_path, result("mmlu", 9)).better_earlier() == ""
    said = "what was found before still counts: mmlu over 9 of 40 (now 4)"
    assert examined(tmp_path, result("mmlu", 4), result("gsm8k", 4)).better_earlier() == said
    other = {"settings": {"samples": 8}}
    said = "what was found before with other settings still counts: "
    quick = examined(tmp_path, result("mmlu", 4, **other), result("ceval", 9, **other))
    assert quick.better_earlier() == said + "mmlu over 9 of 40 (now 4)"
    assert examined(tmp_path, result("cmmlu", **other)).better_earlier() == said + "not what was found now"
    many = [[result(f"task{number}", size) for number in range(30)] for size in (9, 8)]
    examined(tmp_path, *many[0])
    assert examined(tmp_path, *many[1]).better_earlier().endswith(" ...")
