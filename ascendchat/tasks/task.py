"""The interface of a task: rows to train on and to evaluate with.

task = tasks.load("gsm8k", "train")                       # see tasks/by_name.py for the names
task.example(3)                                           # a whole conversation, for training
task.prompt(3); task.correct(3, "... #### 18")            # for a task that is answered in words
task.prompt(3); task.letters(3); task.answer(3)           # for multiple choice, scored by the letters' logits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ascendchat.data.chat.render import Conversation, text_of

TaskKind = Literal["choice", "reply", "dialog"]  # evaluated by letters' logits, by generated replies, or not at all


class Task:
    """Rows of one kind. A subclass gives their number and content."""

    name: str = ""
    split: str = ""
    kind: TaskKind = "dialog"
    language: str = ""  # "en", "zh" or "" for both
    baseline: float = 0.0  # accuracy of guessing
    notices: Sequence[str] = ()  # lines about what was left out when it was read

    def __len__(self) -> int:
        raise NotImplementedError

    def example(self, index: int) -> Conversation:
        """The whole conversation, ending with the right answer."""
        raise NotImplementedError

    def prompt(self, index: int) -> Conversation:
        """The conversation up to where the assistant must speak."""
        messages = self.example(index)
        while messages and messages[-1]["role"] != "user":
            messages = messages[:-1]
        return messages

    def question(self, index: int) -> str:
        """The bare question, by which an evaluation row is recognised in training data."""
        return text_of(self.prompt(index)[-1]["content"])

    def letters(self, index: int) -> Sequence[str]:
        """The possible answers of a multiple-choice row."""
        raise NotImplementedError

    def answer(self, index: int) -> int:
        """Index of the right one among `letters`."""
        raise NotImplementedError

    def right_choice(self, index: int) -> str:
        """The words of the right choice; empty if the task has no choices."""
        return ""

    def correct(self, index: int, reply: str) -> bool:
        """True if the visible text of a reply is right. Safe to call from several threads."""
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        """Columns that a reward may need besides the question and its answer."""
        return {}

    def __iter__(self) -> Iterator[Conversation]:
        return (self.example(index) for index in range(len(self)))
