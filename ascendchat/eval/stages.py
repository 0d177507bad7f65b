"""ChatCORE and the other summary numbers of `ascendchat eval chat`, and the table of all stages of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ascendchat.config.train import STAGES
from ascendchat.runs.results import best_results, stage_results
from ascendchat.runs.run import run_folder
from ascendchat.tasks.by_name import EVALUATIONS
from ascendchat.tasks.toy import TOY_EXAMS
from ascendchat.tasks.toy import TOY_TASKS as TOY

COLUMNS = tuple(STAGES)  # of the table; hf is a Hugging Face model, fine-tuned or not
GROUPS: dict[str, tuple[str, ...]] = {
    "chatcore": ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval"),
    "chinese": ("ceval", "cmmlu"),
    "toy": TOY,
}
# SCORES are means of the centred accuracies of a group. POOLS are shares of right answers to questions of the toy
# world: to those in one language without the word problems, which RL has to improve, and to all.
SCORES = {"ChatCORE": GROUPS["chatcore"], "ChatCORE-zh": GROUPS["chinese"]}
POOLS = {
    f"toyworld {language}": tuple(
        name for name in TOY_EXAMS if name.endswith(f"_{language}") and "_problem_" not in name
    )
    for language in ("en", "zh")
} | {"toyworld": TOY}


def scores(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The summary numbers of one stage, each with the number of its tasks and the names of the missing ones."""
    means: dict[str, dict[str, Any]] = {}
    for name, members in (SCORES | POOLS).items():
        present = [tasks[task] for task in members if task in tasks]
        values = [(t["accuracy"], t["rows"]) if name in POOLS else (t["centred"], 1) for t in present]
        if total := sum(weight for _, weight in values):
            mean = sum(value * weight for value, weight in values) / total
            without = [task for task in members if task not in tasks]
            means[name] = {"score": mean, "tasks": len(present), "of": len(members), "without": without}
    return means


def score_lines(means: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The summary numbers in words."""
    lines = []
    for name, value in means.items():
        lacks = f", INCOMPLETE: without {', '.join(value['without'])}" if value["without"] else ""
        lines.append(f"{name} {value['score']:.4f} over {value['tasks']} of {value['of']} tasks{lacks}")
    return lines


def stage_table(run: str) -> list[dict[str, Any]]:
    """A row per task and summary number, a column per stage: {"task": ..., "base": 0.25, "sft": 0.31}.

    A value is None where a stage was not evaluated on the task. `incomplete` lists the stages of which a summary number
    lacks a task."""
    best = {stage: best_results(stage_results(run_folder(run, stage), "chat")) for stage in COLUMNS}
    stages = {
        stage: {task: row["result"] for task, row in results.items()} for stage, results in best.items() if results
    }
    rows: list[dict[str, Any]] = []
    for name in EVALUATIONS:
        values = {stage: results.get(name, {}).get("accuracy") for stage, results in stages.items()}
        if any(value is not None for value in values.values()):
            rows.append({"task": name, **values})
    for name in (*SCORES, *POOLS):
        means = {stage: scores(results).get(name) for stage, results in stages.items()}
        if any(means.values()):
            values = {stage: mean["score"] if mean else None for stage, mean in means.items()}
            incomplete = [stage for stage, mean in means.items() if mean and mean["without"]]
            rows.append({"task": name, **values, "incomplete": incomplete})
    return rows


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """`stage_table` as lines of text; * marks a number that lacks some of its tasks."""
    stages = [stage for stage in COLUMNS if any(stage in row for row in rows)]
    lines = [f"  {'':<24}" + "".join(f"{stage.upper():>10}" for stage in stages)]
    for row in rows:
        cells = []
        for stage in stages:
            value = row.get(stage)
            mark = "*" if stage in row.get("incomplete", ()) else ""
            shown = "-" if value is None or math.isnan(value) else f"{value:.4f}{mark}"
            cells.append(f"{shown:>10}")
        lines.append(f"  {row['task']:<24}" + "".join(cells))
    if any(row.get("incomplete") for row in rows):
        lines.append("  * some of its tasks are missing: not comparable with complete ones")
    return lines
