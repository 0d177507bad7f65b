"""What a task is: rows that can be learned from and examined with; slices and mixtures of them.

task = tasks.load("gsm8k", "train")                       # see tasks/__init__.py for the names
task.example(3)                                           # a whole conversation, for training
task.prompt(3); task.correct(3, "... #### 18")            # for a task that is answered in words
task.prompt(3); task.letters(3); task.answer(3)           # for multiple choice, scored by the letters' logits
Mixture([(task, 2.0), (other[:1000], 1.0)], seed=7)       # `ascendchat mid`, `ascendchat sft`
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

from ascendchat.config import UserError
from ascendchat.data.chat import Conversation, text_of

Kind = Literal["choice", "reply", "dialog"]  # examined by letters, by what is said, or not at all


class Task:
    """Rows of one kind. A subclass says how many there are and what each holds."""

    name: str = ""
    split: str = ""
    kind: Kind = "dialog"
    language: str = ""  # "en", "zh" or "" for both
    baseline: float = 0.0  # accuracy of guessing

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

    def __getitem__(self, part: slice) -> Slice:
        """task[100:200], task[::10]"""
        return Slice(self, part)

    def __iter__(self) -> Iterator[Conversation]:
        return (self.example(index) for index in range(len(self)))


class Slice(Task):
    """Some rows of a task, by start, stop and step."""

    def __init__(self, task: Task, part: slice) -> None:
        self.task, self.rows = task, range(*part.indices(len(task)))
        self.name, self.split, self.kind = task.name, task.split, task.kind
        self.language, self.baseline = task.language, task.baseline

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> Conversation:
        return self.task.example(self.rows[index])

    def prompt(self, index: int) -> Conversation:
        return self.task.prompt(self.rows[index])

    def question(self, index: int) -> str:
        return self.task.question(self.rows[index])

    def letters(self, index: int) -> Sequence[str]:
        return self.task.letters(self.rows[index])

    def answer(self, index: int) -> int:
        return self.task.answer(self.rows[index])

    def right_choice(self, index: int) -> str:
        return self.task.right_choice(self.rows[index])

    def correct(self, index: int, reply: str) -> bool:
        return self.task.correct(self.rows[index], reply)


class Mixture:
    """Tasks with weights: 2 shows every row twice in an epoch, 0.25 a quarter of the rows, others in each epoch.

    Epoch `e` is a pure function of (tasks, weights, seed, e): whoever asks, in whatever order, sees the same.
    """

    def __init__(self, parts: Sequence[tuple[Task, float]], seed: int = 0) -> None:
        if not parts:
            raise UserError("a mixture needs at least one task")
        for task, weight in parts:
            if not weight > 0 or not len(task):
                raise UserError(f"{task.name}: {len(task)} rows with weight {weight}; both must be above 0")
        self.parts, self.seed = list(parts), seed
        self.counts = [max(1, round(len(task) * weight)) for task, weight in parts]
        self._epoch: tuple[int, list[tuple[int, int]]] | None = None

    def __len__(self) -> int:
        """Conversations per epoch."""
        return sum(self.counts)

    def order(self, epoch: int) -> list[tuple[int, int]]:
        """(task, row) of every conversation of an epoch."""
        if self._epoch is not None and self._epoch[0] == epoch:
            return self._epoch[1]
        found: list[tuple[int, int]] = []
        for number, ((task, _), count) in enumerate(zip(self.parts, self.counts)):
            whole, rest = divmod(count, len(task))
            found += [(number, row) for _ in range(whole) for row in range(len(task))]
            if rest:
                # One order for all epochs, and each epoch takes the next piece of it: no row is left out for long.
                turns = self._shuffled(list(range(len(task))), "part", number)
                first = epoch * rest
                found += [(number, turns[(first + i) % len(task)]) for i in range(rest)]
        order = self._shuffled(found, "epoch", epoch)
        self._epoch = epoch, order
        return order

    def _shuffled(self, rows: list, *key: object) -> list:  # type: ignore[type-arg]
        random.Random(f"mixture {self.seed} {' '.join(map(str, key))}").shuffle(rows)
        return rows

    def example(self, position: int) -> Conversation:
        """The conversation at a position of the endless stream: epoch after epoch."""
        epoch, index = divmod(position, len(self))
        number, row = self.order(epoch)[index]
        return self.parts[number][0].example(row)

    def lines(self) -> list[str]:
        """What is in it, for the log."""
        total = len(self)
        return [
            f"  {task.name:<24}{task.split:<8}{len(task):>9} rows x {weight:<6g}{count / total:>7.1%} of an epoch"
            for (task, weight), count in zip(self.parts, self.counts)
        ]
