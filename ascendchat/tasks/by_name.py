"""The tasks that have a name, and `load`, which finds one by it."""

from __future__ import annotations

from pathlib import Path

from ascendchat.data.chat.dataset_info import is_listed
from ascendchat.data.fetch import SETS
from ascendchat.data.fetch.sources import ALIASES
from ascendchat.data.prepare import TOYWORLD
from ascendchat.errors import UserError, nearest
from ascendchat.tasks import toy
from ascendchat.tasks.dialog import Dialog
from ascendchat.tasks.gsm8k import Gsm8k
from ascendchat.tasks.humaneval import HumanEval, pass_at_k
from ascendchat.tasks.multiple_choice import BENCHMARKS, MultipleChoice
from ascendchat.tasks.task import Task

__all__ = ["EVALUATIONS", "Task", "knows", "load", "pass_at_k"]

# All evaluations, in the order of the printed table.
EVALUATIONS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval", "ceval", "cmmlu", *toy.TOY_TASKS)
CHATS = ("toy_mid", "toy_sft")


def knows(name: str) -> bool:
    """True if a name needs no file: that of a task, or of a data set of `ascendchat data fetch`."""
    names = (*EVALUATIONS, *CHATS, *BENCHMARKS, *toy.TOY_EXAMS, "toy_problems", TOYWORLD)
    return name in names or ALIASES.get(name, name) in SETS


def load(name: str, split: str = "", source: str = "") -> Task:
    """Load a task by its name, or conversations from a file or folder. No split: the one that models are evaluated
    on."""
    if name in BENCHMARKS:
        return MultipleChoice(name, split, source)
    if name == "gsm8k":
        return Gsm8k(split or "test", source)
    if name == "humaneval":
        return HumanEval(split or "test", source)
    if name in CHATS:
        return toy.ToyChats(split or "train", name.removeprefix("toy_"))
    if name == "toy_problems":
        return toy.ToyProblems(split or "test")
    if name in toy.TOY_EXAMS:
        _, topic, language = name.split("_")
        return toy.ToyExam(topic, language, split or "test")
    path = Path(name).expanduser()
    if path.exists() or ALIASES.get(name, name) in SETS or is_listed(path):
        return Dialog(name, split or "train", source)
    names = [*EVALUATIONS, *CHATS, *(s.name for s in SETS.values() if s.use == "chat")]
    raise UserError(f"{name!r} is neither a task nor a file; {nearest(name, names)}")
