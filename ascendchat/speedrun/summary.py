"""What the stages of a run came to, in one table: the end of `ascendchat speedrun`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ascendchat.config.stages import STAGES
from ascendchat.eval.stages import stage_table, table_lines
from ascendchat.runs.run import read_metrics, run_folder

REWARD_OF = "reward_of_"  # before the name of a task, in metrics of RL


def summary(run: str) -> str:
    """One line per trained stage: steps, last loss, last validation; of RL, whose loss says nothing, the reward. Then
    what each stage scored in examinations."""
    lines = [f"{'stage':<8} {'steps':>7} {'train loss':>11}  validation"]
    for stage in STAGES:
        path = run_folder(run, stage) / "metrics.jsonl"
        if not path.is_file():
            continue
        rows = read_metrics(path)
        losses = [row["loss"] for row in rows if "loss" in row]
        rewards = [row["reward"] for row in rows if "reward" in row]
        scores = [{k: v for k, v in row.items() if k.startswith(("bpb", "val", "accuracy"))} for row in rows]
        last: dict[str, Any] = next((score for score in reversed(scores) if score), {})
        shown = [f"{name} {value:.4f}" for name, value in last.items()]
        if rewards:
            shown.insert(0, f"reward {rise(rewards)}{by_task(rows)}")
        loss = "-" if rewards else f"{mean(losses[-20:]):.4f}"
        lines.append(f"{stage:<8} {rows[-1]['step'] if rows else 0:>7} {loss:>11}  {', '.join(shown)}")
    examined = stage_table(run)
    return "\n".join([*lines, *(["", *table_lines(examined)] if examined else [])])


def by_task(rows: Sequence[dict[str, Any]]) -> str:
    """How the reward of each task rose, in brackets; nothing where RL had one only."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(REWARD_OF))
    shown = [f"{name.removeprefix(REWARD_OF)} {rise([row[name] for row in rows if name in row])}" for name in names]
    return f" ({', '.join(shown)})" if shown else ""


def rise(values: Sequence[float]) -> str:
    """From the first ten steps to the last ten."""
    return f"{mean(values[:10]):.4f} -> {mean(values[-10:]):.4f}"


def mean(values: Sequence[float]) -> float:
    """Not a number without any."""
    return sum(values) / len(values) if values else float("nan")
