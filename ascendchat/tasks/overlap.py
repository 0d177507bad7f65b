"""Evaluation questions in training data: looked for while the data is read, so that nothing is read for this alone.

finder = OverlapFinder([tasks.load("mmlu"), tasks.load("gsm8k")])
for conversation in finder.over(tasks.load("talk.jsonl", "train")): ...    # `ascendchat mid`, `ascendchat sft`
finder.lines()                                            # how many of each evaluation, and the first few

A question is found where a user says all of it (case, width, punctuation and spaces aside). Of multiple choice the
right choice must follow as well, in the list of choices or in the reply: "Which of these is true?" is asked about
everything, and a question that shares only its stem, or a wrong choice, gives nothing away.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ascendchat.data.chat.template import Conversation, text_of
from ascendchat.files import write_atomic
from ascendchat.runs.console import inert
from ascendchat.tasks.base import Task

SHOWN_OVERLAPS = 3  # examples for each evaluation
SIGNS = {number: " " for number in range(128) if not chr(number).isalnum()}


class Overlap(NamedTuple):
    """An evaluation question that training shows."""

    evaluation: str
    row: int
    training: str
    training_row: int
    question: str

    def line(self) -> str:
        """One line for the log."""
        shown = inert(" ".join(self.question.split()))
        return f"{self.evaluation} row {self.row} is in {self.training} row {self.training_row}: {shown[:80]}"


def normal(text: str) -> str:
    """The same question however it is written: case, width, punctuation and spaces do not count."""
    if text.isascii():  # the same, several times as fast
        return " ".join(text.lower().translate(SIGNS).split())
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).lower()).strip()


def questions_in(conversation: Conversation) -> Iterator[tuple[int, str]]:
    """Everything a conversation asks, with the number of the message: each user's text, and of a multiple-choice
    question the part before its list."""
    for number, message in enumerate(conversation):
        if message["role"] == "user":
            text = text_of(message["content"])
            yield number, text
            head, choices, _ = text.partition("\n- ")
            if choices:
                yield number, head


def following(conversation: Conversation, number: int, question: str) -> str:
    """What comes behind a question that begins a message: the rest of it, and all until the user speaks again."""
    rest = [text_of(conversation[number]["content"])[len(question) :]]
    for message in itertools.takewhile(lambda message: message["role"] != "user", conversation[number + 1 :]):
        rest.append(text_of(message["content"]))
    return "\n".join(rest)


def contains_words(text: str, words: str) -> bool:
    """Whether these words stand in a text; `sun` does not stand in `sunlight`. Mere signs are taken as they are."""
    wanted = normal(words)
    if not wanted:
        return words.strip() in text
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", normal(text)) is not None


def label(task: Task) -> str:
    return f"{task.name} {task.split}".strip()


class OverlapFinder:
    """Looks for the questions of some evaluations in conversations that pass by."""

    def __init__(self, evaluation: Sequence[Task]) -> None:
        self.evaluation = list(evaluation)
        self._overlaps: dict[tuple[str, int, str], Overlap] = {}
        self._wanted: dict[str, list[tuple[Task, int]]] = {}
        for task in evaluation:
            for row in range(len(task)):
                if question := normal(task.question(row)):
                    self._wanted.setdefault(question, []).append((task, row))

    def over(self, source: Task) -> Iterator[Conversation]:
        """The conversations of a source, looked at as they are taken."""
        for row, conversation in enumerate(source):
            self._look(label(source), row, conversation)
            yield conversation

    def _look(self, source: str, row: int, conversation: Conversation) -> None:
        for number, text in questions_in(conversation):
            for task, at in self._wanted.get(normal(text), ()):
                right = task.right_choice(at)
                if not right or contains_words(following(conversation, number, text), right):
                    overlap = Overlap(label(task), at, source, row, task.question(at))
                    self._overlaps.setdefault((overlap.evaluation, at, source), overlap)

    def overlaps(self) -> list[Overlap]:
        """Each question once for each source that has it, at its first place there."""
        return sorted(self._overlaps.values())

    def lines(self) -> list[str]:
        """For the log: of each evaluation how many questions, in which sources, and the first of them."""
        lines, every = [], self.overlaps()
        for task in self.evaluation:
            mine = [overlap for overlap in every if overlap.evaluation == label(task)]
            if mine:
                sources = Counter(overlap.training for overlap in mine).most_common()
                where = ", ".join(f"{source} {count}" for source, count in sources)
                questions, kind = len({overlap.row for overlap in mine}), f"{task.split} questions".strip()
                lines.append(f"{task.name}: {questions} of {len(task)} {kind} are in the mixture ({where})")
                lines += [f"  {overlap.line()}" for overlap in mine[:SHOWN_OVERLAPS]]
        return lines


def report_overlaps(finder: OverlapFinder | None, folder: Path, say: Callable[[str], None]) -> None:
    """Say which evaluation questions stand in the mixture; where only the first are shown, all go to a file."""
    lines, overlaps = (finder.lines(), finder.overlaps()) if finder else ([], [])
    for line in lines:
        say(line)
    whole = folder / "overlaps.txt"
    if sum(line.startswith(" ") for line in lines) < len(overlaps):
        write_atomic(whole, "".join(f"{overlap.line()}\n" for overlap in overlaps))
        say(f"all {len(overlaps)} of them: {whole}")
    else:
        whole.unlink(missing_ok=True)  # of an earlier run of this name
