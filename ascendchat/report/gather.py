"""Read run folders: runs/NAME/{base,mid,sft,rl}/{metrics.jsonl,run.json,config.yaml}, results.jsonl.

    run = gather("demo")
    run.stages[0].series("loss")             # ([1, 2, ...], [7.3, 7.1, ...])
    results_table([run], "chat")             # task -> stage -> accuracies

A run may be training while it is read: files that are not there yet are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.config import load_yaml
from ascendchat.config.train import STAGES
from ascendchat.errors import UserError, home
from ascendchat.runs.results import best_results, stage_results
from ascendchat.runs.run import read_facts, read_metrics, run_folder

# Settings that do not change the training
NOT_TRAINING = {
    "seed",
    "run",
    "resume",
    "device_type",
    "config",
    "track",
    "tokenizer",
    "output_dir",
}
MAX_TRANSCRIPTS = 3  # answers of RL

NAME = re.compile(r"step_\d{6,}")  # of a run's checkpoint
Series = tuple[list[float], list[float]]  # steps, values


@dataclass(frozen=True)
class StageData:
    """One stage of a run."""

    name: str
    folder: Path
    facts: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # evaluation -> task -> row

    def series(self, metric: str) -> Series:
        """Steps and values of a metric, where it has a finite number."""
        points = [(row["step"], row[metric]) for row in self.rows if is_number(row.get(metric))]
        return [float(step) for step, _ in points], [float(value) for _, value in points]

    def last(self, metric: str, count: int = 1) -> float | None:
        """Mean of the last `count` values; None without any."""
        values = self.series(metric)[1][-count:]
        return sum(values) / len(values) if values else None

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics that have numbers, in the order in which they came."""
        return list(dict.fromkeys(name for row in self.rows for name, value in row.items() if is_number(value)))

    @property
    def steps(self) -> int:
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def seconds(self) -> float:
        """Total wall time of all sessions; a killed session counts until its last logged row."""
        sessions = [*self.facts.get("history", ()), self.facts]
        times = sorted(row["time"] for row in self.rows if is_number(row.get("time")))
        total = 0.0
        for session in sessions:
            begin = session.get("started")
            if not is_number(begin):
                continue
            later = [
                other["started"] for other in sessions if is_number(other.get("started")) and other["started"] > begin
            ]
            logged = [time for time in times if begin <= time < min(later, default=math.inf)]
            end = session.get("ended")
            total += max(0.0, (end if is_number(end) else max(logged, default=begin)) - begin)
        return total

    @property
    def tokens(self) -> float:
        """Trained tokens, as far as the record says."""
        split = self.facts.get("split") or {}
        per_step = math.prod(split.get(name, 0) for name in ("devices", "rows", "accumulation", "seq_len"))
        return float(per_step * self.steps)

    @property
    def devices(self) -> int:
        return int(self.facts.get("world") or 1)

    def samples(self) -> list[str]:
        """The last sampled texts."""
        return next((list(row["samples"]) for row in reversed(self.rows) if row.get("samples")), [])

    def transcripts(self) -> list[dict[str, Any]]:
        """A few answers of the last step of RL: the best, the median, the worst."""
        files = sorted((self.folder / "transcripts").glob("step_*.jsonl"))
        lines = files[-1].read_text(encoding="utf-8").splitlines() if files else []
        answers = sorted((json.loads(line) for line in lines if line), key=lambda answer: answer["reward"])
        places = sorted({len(answers) - 1, len(answers) // 2, 0}, reverse=True)
        return [answers[place] for place in places if answers][:MAX_TRANSCRIPTS]


@dataclass(frozen=True)
class RunData:
    """All stages of a run that have begun."""

    name: str
    stages: list[StageData]

    def stage(self, name: str) -> StageData | None:
        return next((stage for stage in self.stages if stage.name == name), None)


def gather(name: str) -> RunData:
    """Read the folder of a run."""
    stages = []
    for stage in stage_names():
        folder = run_folder(name, stage)
        if not (folder / "metrics.jsonl").is_file():
            continue
        path = folder / "config.yaml"
        settings = load_yaml(path) if path.is_file() else {}
        results = {kind: best_results(stage_results(folder, kind)) for kind in ("bpb", "core", "chat")}
        stages.append(
            StageData(stage, folder, read_facts(folder / "run.json"), settings, read_metrics(folder), results)
        )
    if not stages:
        raise UserError(
            f"there is nothing to report in {run_folder(name, '').parent}; train first, or name another --run"
        )
    return RunData(name, stages)


def stage_names() -> list[str]:
    return list(dict.fromkeys([*STAGES, "hf"]))


def newest_run() -> str:
    """Name of the run that was written to last."""
    files = (home() / "runs").glob("*/*/metrics.jsonl")
    last = max(files, key=lambda path: path.stat().st_mtime, default=None)
    if last is None:
        raise UserError(f"no run in {home() / 'runs'}; train one first, or set ASCENDCHAT_HOME")
    return last.parents[1].name


def group_seeds(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Group runs with the same stages and settings, in the order in which they were named."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        key = [(stage.name, same_settings(stage)) for stage in run.stages]
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def same_settings(stage: StageData) -> dict[str, Any]:
    """Settings that runs of other seeds have in common: also the model that they start from, unless it is a run
    itself."""
    start = str(stage.settings.get("start") or "")
    is_run = ("/" not in start and (home() / "runs" / start).is_dir()) or NAME.fullmatch(Path(start).name)
    ignored = NOT_TRAINING | {"start"} if is_run else NOT_TRAINING
    return {name: value for name, value in stage.settings.items() if name not in ignored}


def results_table(runs: Sequence[RunData], kind: str) -> dict[str, dict[str, list[float]]]:
    """Results of one kind of evaluation ("bpb", "core", "chat") by task and stage; one value per seed."""
    table: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for stage in run.stages:
            for task, row in stage.results.get(kind, {}).items():
                value = row["result"].get("bits_per_byte" if kind == "bpb" else "accuracy")
                if is_number(value):
                    table.setdefault(task, {}).setdefault(stage.name, []).append(float(value))
    return table


def is_number(value: Any) -> bool:
    """True for a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
