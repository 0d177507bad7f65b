"""What a task is: rows that can be learned from and examined with.

task = tasks.load("gsm8k", "train")                       # see tasks/named.py for the names
task.example(3)                                           # a whole conversation, for training
task.prompt(3); task.correct(3, "... #### 18")            # for a task that is answered in words
task.prompt(3); task.letters(3); task.answer(3)           # for multiple choice, scored by the letters' logits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ascendchat.data.chat.template import Conversation, text_of

TaskKind = Literal["choice", "reply", "dialog"]  # examined by letters, by what is said, or not at all


class Task:
    """Rows of one kind. A subclass says how many there are and what each holds."""

    name: str = ""
    split: str = ""
    kind: TaskKind = "dialog"
    language: str = ""  # "en", "zh" or "" for both
    baseline: float = 0.0  # accuracy of guessing
    notices: Sequence[str] = ()  # what had to be left out when it was read, in a line each

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
        """What is asked, bare: by this an evaluation question is recognised in training data."""
        return text_of(self.prompt(index)[-1]["content"])

    def letters(self, index: int) -> Sequence[str]:
        """The possible answers of a multiple-choice row."""
        raise NotImplementedError

    def answer(self, index: int) -> int:
        """Which of `letters` is right."""
        raise NotImplementedError

    def right_choice(self, index: int) -> str:
        """The words of the right choice; empty where nothing is chosen from."""
        return ""

    def correct(self, index: int, reply: str) -> bool:
        """Whether the visible text of a reply is right. Safe to call from several threads."""
        raise NotImplementedError

    def row(self, index: int) -> dict[str, Any]:
        """What a reward may want to know besides the question and its answer."""
        return {}

    def __iter__(self) -> Iterator[Conversation]:
        return (self.example(index) for index in range(len(self)))
