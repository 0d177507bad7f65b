"""Results of evaluations: runs/NAME/results.jsonl, to which `eval base` and `eval chat` add a row as each task ends.

    new = NewResults(stage_folder, {"evaluation": "chat", "model": "5f...", ...})
    new.add("gsm8k", examined=100, in_task=1319, result={"accuracy": 0.25, ...}, source="")
    best_results(stage_results(stage_folder, "chat"))["gsm8k"]["result"]["accuracy"]

Rows are never changed; which of them counts is decided when they are read, by `best_results` alone. A row holds

    time, evaluation    seconds since 1970; chat, core or bpb
    stage, run_id       sft, ...; the id in the stage's run.json, another one once the stage is trained anew
    checkpoint, model, step    its folder, and the identity of its weights
    chip, world, dtype, attention, settings    the machine; the settings: results with others are not comparable
    task, source        the folder its files come from, "" if they were fetched, None if they are part of this package
    examined, in_task   rows (bpb: tokens) that were examined, and rows of the task; 0 examined: the task was missing
    result              scores, right and wrong of every row included; for a missing task the reason
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.errors import UserError, home
from ascendchat.runs.run import append_row, read_facts, stored_rows, whole_size

ResultRow = dict[str, Any]


def run_of(stage: Path) -> str:
    """The name of the run that a stage folder belongs to; empty for checkpoints that lie somewhere else."""
    run = stage.resolve().parent
    return run.name if run.parent == (home() / "runs").resolve() else ""


def results_file(stage: Path) -> Path:
    """results.jsonl of the run, or beside a checkpoint that belongs to no run."""
    return (stage.resolve().parent if run_of(stage) else stage) / "results.jsonl"


def _owner(stage: Path) -> ResultRow:
    return {"stage": stage.resolve().name, "run_id": read_facts(stage / "run.json").get("id")}


def stage_results(stage: Path, evaluation: str) -> list[ResultRow]:
    """All rows of one evaluation of the model in a stage folder, oldest first, without those of earlier models."""
    path, mine = results_file(stage), {"evaluation": evaluation, **_owner(stage)}
    return [row for row in stored_rows(path) if _same(row, mine, *mine)] if path.is_file() else []


def _same(one: Mapping[str, Any], other: Mapping[str, Any], *names: str) -> bool:
    return all(one.get(name) == other.get(name) for name in names)


def _fuller(old: ResultRow, new: ResultRow) -> bool:
    """True if `old` examined more rows of the same files."""
    if not new["examined"]:
        return old["source"] == new["source"]
    same = _same(old, new, "source", "in_task") and _same(old["result"], new["result"], "corpus")
    return same and bool(old["examined"] > new["examined"])


def _fullest(rows: Sequence[ResultRow]) -> dict[str, ResultRow]:
    """The rows that count among rows with the same weights and settings: rules 3 and 4 of `best_results`."""
    source = next((row["source"] for row in reversed(rows) if row["source"] is not None), None)
    best: dict[str, ResultRow] = {}
    for row in rows:
        task = row["task"]
        if row["source"] in (None, source) and not (task in best and _fuller(best[task], row)):
            best[task] = row
    return best


def best_results(rows: Sequence[ResultRow]) -> dict[str, ResultRow]:
    """The rows that count, by task. `rows` are those of one stage and evaluation, oldest first.

    1. Only the weights that were examined last count.
    2. Only one choice of settings counts, so that a mean over tasks never mixes two: the last one, unless one of its
       tasks was examined over more rows with other settings.
    3. Only files of one source count: the last one. Embedded tasks go with any.
    4. For each task the row with the most examined rows of the same files counts; among equals the last one.

    So the tasks of an evaluation may be spread over several commands, and a quick look never replaces a fuller result.
    """
    rows = [row for row in rows if row["examined"]]
    rows = [row for row in rows if _same(row, rows[-1], "model", "step")]
    every: list[ResultRow] = []  # settings, newest first
    for row in reversed(rows):
        every += [row["settings"]] if row["settings"] not in every else []
    choices = [_fullest([row for row in rows if row["settings"] == settings]) for settings in every]
    for choice in choices:
        if not any(_fuller(other[task], row) for other in choices for task, row in choice.items() if task in other):
            return choice
    return choices[-1] if choices else {}


@dataclass
class NewResults:
    """The rows that one evaluation adds to a results file, task by task; only the `main` rank writes."""

    stage: Path
    about: ResultRow  # evaluation, checkpoint, model, step, chip, world, dtype, attention, settings
    main: bool = True
    rows: dict[str, ResultRow] = field(default_factory=dict)  # task -> row

    def __post_init__(self) -> None:
        stage_results(self.stage, self.about["evaluation"])  # a damaged file is an error now, not after hours

    def add(self, task: str, examined: int, in_task: int, result: ResultRow, source: str | None) -> None:
        """Append the row of a task, as soon as it ends: a killed evaluation keeps its finished tasks. Other processes
        may append to the same file at the same time."""
        if not self.main:
            return
        row = {"task": task, "source": source, "examined": examined, "in_task": in_task, "result": result}
        self.rows[task] = {"time": time.time(), **_owner(self.stage), **self.about, **row}
        path = results_file(self.stage)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # a Hugging Face model has no run yet
            with path.open("ab", buffering=0) as file:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                size = whole_size(path)
                file.truncate(size)  # a row torn by a power cut
                append_row(file.fileno(), self.rows[task], size)
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; make room there, or the folder writable") from None

    def with_earlier(self) -> dict[str, ResultRow]:
        """These rows, and for other tasks earlier rows of the same weights and settings."""
        rows = stage_results(self.stage, self.about["evaluation"])
        same = [row for row in rows if _same(row, self.about, "model", "step", "settings")]
        return {**_fullest(same), **self.rows}

    def better_earlier(self) -> str:
        """A sentence about earlier results that count in place of these; empty if all of these count."""
        best = best_results(stage_results(self.stage, self.about["evaluation"]))
        times = [row["time"] for row in best.values()]
        beaten = [row for row in self.rows.values() if row["examined"] and row["time"] not in times]
        if not beaten:
            return ""
        settings = "" if _same(self.about, next(iter(best.values())), "settings") else " with other settings"
        old = [(best[row["task"]]["examined"], row) for row in beaten if row["task"] in best]
        names = ", ".join(f"{row['task']} over {was} of {row['in_task']} (now {row['examined']})" for was, row in old)
        names = textwrap.shorten(names, 300, placeholder=" ...") or "not what was found now"
        return f"what was found before{settings} still counts: {names}"
