"""The toy world as tasks: conversations to train on, and evaluations by topic and language.

ToyChats("train", "sft")                          # `ascendchat sft --data toy_sft`
ToyExam("fact", "zh", "test")                     # `ascendchat eval chat --tasks toy`
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ascendchat.data import toyworld
from ascendchat.data.chat.render import Conversation
from ascendchat.errors import UserError
from ascendchat.tasks.dialog import ConversationStore
from ascendchat.tasks.task import Task

TOY_EXAMS = tuple(f"toy_{topic}_{language}" for topic in toyworld.TOPICS for language in toyworld.LANGUAGES)
TOY_TASKS = (*TOY_EXAMS, "toy_problems")  # all evaluations
PROBLEM_COUNT = {"train": 1000, "validation": 400, "test": 400}
SPLIT_NAMES = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}


def _split(split: str) -> str:
    if split not in SPLIT_NAMES:
        raise UserError(f"the toy world has the splits train, val and test, not {split!r}")
    return SPLIT_NAMES[split]


@lru_cache(maxsize=32)
def _questions(split: str, seed: int, topic: str) -> list[toyworld.ToyQuestion]:
    return toyworld.questions(split, seed=seed, topic=topic)


def _row(question: toyworld.ToyQuestion) -> dict[str, Any]:
    """Columns for the reward term `toyworld`: rl/rewards.py."""
    return {"accept": list(question.accept), "reject": list(question.reject), "rule": question.rule}


class ToyChats(Task):
    """Conversations of the kind `mid` or `sft`."""

    def __init__(self, split: str = "train", kind: str = "sft", seed: int = 0, count: int | None = None) -> None:
        self.name, self.split = f"toy_{kind}", split
        self.stored = ConversationStore(toyworld.chats(_split(split), kind=kind, seed=seed, count=count))

    def __len__(self) -> int:
        return len(self.stored)

    def example(self, index: int) -> Conversation:
        return self.stored[index]


class ToyExam(Task):
    """Questions of one topic and language."""

    def __init__(self, topic: str, language: str, split: str = "test", seed: int = 0) -> None:
        self.name, self.split, self.language = f"toy_{topic}_{language}", split, language
        self.kind = "reply"
        self.baseline = 0.25 if topic == "choice" else 0.0  # accuracy of guessing
        self.questions = [q for q in _questions(_split(split), seed, topic) if q.language == language]

    def __len__(self) -> int:
        return len(self.questions)

    def prompt(self, index: int) -> Conversation:
        return self.questions[index].prompt

    def example(self, index: int) -> Conversation:
        return [*self.prompt(index), {"role": "assistant", "content": self.questions[index].content}]

    def correct(self, index: int, reply: str) -> bool:
        return toyworld.correct(self.questions[index], reply)

    def row(self, index: int) -> dict[str, Any]:
        return _row(self.questions[index])


class ToyProblems(Task):
    """Word problems of two steps, for RL and its evaluation."""

    name, kind = "toy_problems", "reply"

    def __init__(self, split: str = "test", seed: int = 0, count: int | None = None) -> None:
        self.split = split
        full_name = _split(split)
        self.questions = toyworld.problems(full_name, seed=seed, count=count or PROBLEM_COUNT[full_name])

    def __len__(self) -> int:
        return len(self.questions)

    def example(self, index: int) -> Conversation:
        question = self.questions[index]
        return [*question.prompt, {"role": "assistant", "content": question.content}]

    def correct(self, index: int, reply: str) -> bool:
        return toyworld.correct(self.questions[index], reply)

    def row(self, index: int) -> dict[str, Any]:
        return _row(self.questions[index])
