"""Contamination: evaluation questions in training data, searched for while the data is read anyway.

finder = OverlapFinder([load("mmlu"), load("gsm8k")])
for conversation in finder.over(load("talk.jsonl", "train")): ...    # `ascendchat mid`, `ascendchat sft`
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

from ascendchat.data.chat.render import Conversation, text_of
from ascendchat.files import write_atomic
from ascendchat.runs.console import inert
from ascendchat.tasks.task import Task

MAX_SHOWN_OVERLAPS = 3  # for each evaluation
SIGNS = {number: " " for number in range(128) if not chr(number).isalnum()}  # table for str.translate


class Overlap(NamedTuple):
    """An evaluation question that training shows."""

    evaluation: str
    row: int
    training: str
    training_row: int
    question: str

    def line(self) -> str:
        """Format one line for the log."""
        shown = inert(" ".join(self.question.split()))
        return f"{self.evaluation} row {self.row} is in {self.training} row {self.training_row}: {shown[:80]}"


def normal(text: str) -> str:
    """Normalise a question: case, width, punctuation and spaces do not count."""
    if text.isascii():  # the result of the line below, several times as fast
        return " ".join(text.lower().translate(SIGNS).split())
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).lower()).strip()


def questions_in(conversation: Conversation) -> Iterator[tuple[int, str]]:
    """Yield the questions of a conversation, each with the number of its message: every user's text, and of a
    multiple-choice question the part before its list."""
    for number, message in enumerate(conversation):
        if message["role"] == "user":
            text = text_of(message["content"])
            yield number, text
            head, choices, _ = text.partition("\n- ")
            if choices:
                yield number, head


def following(conversation: Conversation, number: int, question: str) -> str:
    """The text after a question that begins a message: the rest of it, and all until the user speaks again."""
    rest = [text_of(conversation[number]["content"])[len(question) :]]
    for message in itertools.takewhile(lambda message: message["role"] != "user", conversation[number + 1 :]):
        rest.append(text_of(message["content"]))
    return "\n".join(rest)


def contains_words(text: str, words: str) -> bool:
    """True if a text contains these words; `sun` is not in `sunlight`. Words that are only signs are compared as
    they are."""
    normalised = normal(words)
    if not normalised:
        return words.strip() in text
    return re.search(rf"(?<![a-z0-9]){re.escape(normalised)}(?![a-z0-9])", normal(text)) is not None


def label(task: Task) -> str:
    return f"{task.name} {task.split}".strip()


class OverlapFinder:
    """Searches conversations that pass by for the questions of some evaluations."""

    def __init__(self, evaluation: Sequence[Task]) -> None:
        self.evaluation = list(evaluation)
        self._overlaps: dict[tuple[str, int, str], Overlap] = {}
        self._wanted: dict[str, list[tuple[Task, int]]] = {}
        for task in evaluation:
            for row in range(len(task)):
                if question := normal(task.question(row)):
                    self._wanted.setdefault(question, []).append((task, row))

    def over(self, source: Task) -> Iterator[Conversation]:
        """Yield the conversations of a source, and search each."""
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
        """List each question once for each source that has it, at its first place there."""
        return sorted(self._overlaps.values())

    def lines(self) -> list[str]:
        """Format for the log: of each evaluation the number of questions, their sources, and the first of them."""
        lines, overlaps = [], self.overlaps()
        for task in self.evaluation:
            found_here = [overlap for overlap in overlaps if overlap.evaluation == label(task)]
            if found_here:
                sources = Counter(overlap.training for overlap in found_here).most_common()
                where = ", ".join(f"{source} {count}" for source, count in sources)
                questions, kind = len({overlap.row for overlap in found_here}), f"{task.split} questions".strip()
                lines.append(f"{task.name}: {questions} of {len(task)} {kind} are in the mixture ({where})")
                lines += [f"  {overlap.line()}" for overlap in found_here[:MAX_SHOWN_OVERLAPS]]
        return lines


def report_overlaps(finder: OverlapFinder | None, folder: Path, say: Callable[[str], None]) -> None:
    """Print the evaluation questions in the mixture; if only the first are shown, all go to a file."""
    lines, overlaps = (finder.lines(), finder.overlaps()) if finder else ([], [])
    for line in lines:
        say(line)
    path = folder / "overlaps.txt"
    if sum(line.startswith(" ") for line in lines) < len(overlaps):
        write_atomic(path, "".join(f"{overlap.line()}\n" for overlap in overlaps))
        say(f"all {len(overlaps)} of them: {path}")
    else:
        path.unlink(missing_ok=True)  # left by an earlier run of this name
