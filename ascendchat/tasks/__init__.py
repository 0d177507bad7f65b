"""Tasks by name: what `ascendchat eval chat --tasks` examines and what the mixtures of `mid` and `sft` are made of.

    load("mmlu"), load("gsm8k", "train"), load("smoltalk", "train"), load("my.jsonl", "train"), load("toy_fact_zh")
    mixture([{"task": "gsm8k", "weight": 2}, {"task": "smoltalk", "stop": 10000}, "talk.jsonl"], seed=7)

base.py says what a task is. An entry of a mixture is a name, or a mapping with `task` and any of: split (train), weight
(1), start, stop, step (of the rows), source (a folder), slots (words for {{name}} in its texts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendchat.config import UserError, nearest
from ascendchat.data import toyworld
from ascendchat.data.fetch import SETS
from ascendchat.data.fetch.sources import ALSO
from ascendchat.tasks import toy
from ascendchat.tasks.base import Mixture, Slice, Task
from ascendchat.tasks.choice import EXAMS, Exam
from ascendchat.tasks.dialog import Dialog
from ascendchat.tasks.gsm8k import Gsm8k
from ascendchat.tasks.humaneval import HumanEval, pass_at_k
from ascendchat.tasks.overlap import Overlap, Watch, overlaps

__all__ = [
    "EVALUATIONS", "Mixture", "Overlap", "Slice", "Task", "Watch", "load", "mixture", "overlaps", "pass_at_k",
]  # fmt: skip

# Everything that can be examined, in the order of the printed table.
EVALUATIONS: tuple[str, ...] = (
    "arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval", "ceval", "cmmlu", *toy.EXAMS,
)  # fmt: skip
CHATS = ("toy_mid", "toy_sft")
FIELDS = ("task", "split", "weight", "start", "stop", "step", "source", "slots")


def load(name: str, split: str = "", source: str = "", slots: Mapping[str, str] | None = None) -> Task:
    """A task by its name, or conversations from a file or folder. No split: the one that models are examined on."""
    if name in EXAMS:
        return Exam(name, split, source)
    if name == "gsm8k":
        return Gsm8k(split or "test", source)
    if name == "humaneval":
        return HumanEval(split or "test", source)
    if name in CHATS:
        return toy.ToyChats(split or "train", name.removeprefix("toy_"))
    if name == "toy_problems":
        return toy.ToyProblems(split or "test")
    if name in toy.EXAMS:
        _, topic, language = name.split("_")
        return toy.ToyExam(topic, language, split or "test")
    if Path(name).expanduser().exists() or (ALSO.get(name, name) in SETS):
        return Dialog(name, split or "train", source, {"name": toyworld.NAME, "author": toyworld.NAME, **(slots or {})})
    known = [*EVALUATIONS, *CHATS, "toy_problems", *(s.name for s in SETS.values() if s.use == "chat")]
    raise UserError(f"{name!r} is neither a task nor a file; {nearest(name, known)}")


def mixture(entries: Sequence[str | Mapping[str, Any]], *, seed: int = 0, source: str = "") -> Mixture:
    """What a recipe lists under `mixture:`."""
    parts: list[tuple[Task, float]] = []
    for entry in entries:
        given: Mapping[str, Any] = {"task": entry} if isinstance(entry, str) else entry
        if "task" not in given or set(given) - set(FIELDS):
            odd = next((key for key in given if key not in FIELDS), "")
            why = nearest(str(odd), list(FIELDS)) if odd else f"it needs a task; choose from: {', '.join(FIELDS)}"
            raise UserError(f"the entry {dict(given)!r} of the mixture is not understood; {why}")
        name, split = str(given["task"]), str(given.get("split", "train"))
        task = load(name, split, str(given.get("source", source)), given.get("slots"))
        try:
            part = slice(*(None if given.get(key) is None else int(given[key]) for key in ("start", "stop", "step")))
            task, weight = task[part] if part != slice(None) else task, float(given.get("weight", 1.0))
        except (TypeError, ValueError):
            raise UserError(f"{name}: start, stop, step and weight of a mixture are numbers, not {given!r}") from None
        parts.append((task, weight))
    return Mixture(parts, seed)
