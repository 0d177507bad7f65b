"""Multiple choice: MMLU, ARC, C-Eval and CMMLU are rows of one table; a new benchmark is one more row.

    MultipleChoice("mmlu", "test")                            # `ascendchat eval chat --tasks mmlu,ceval`
    MultipleChoice("ceval", "val", source="DIR")

data/chat/render.render_choice formats the question. The model answers with the letter whose logit is highest where
the answer begins. Guessing is right in a quarter of the cases.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascendchat.data.chat.formats import parse_choice
from ascendchat.data.chat.render import LETTERS, Conversation, render_choice
from ascendchat.data.chat.tables import TableRow
from ascendchat.errors import UserError
from ascendchat.tasks.eval_files import SPLIT, set_rows
from ascendchat.tasks.task import Task

ANSWER_WITH = {"en": None, "zh": "只回答一个字母：{letters}。"}  # the closing line; None: as render_choice says it


@dataclass(frozen=True)
class _Benchmark:
    """One benchmark: its data set, the pattern of its files, the splits that have answers."""

    set: str  # of `ascendchat data fetch`
    language: str
    pattern: str  # in the lower-case path of its files
    splits: Mapping[str, str]  # name -> pattern
    scored: str  # the split that models are evaluated on
    baseline: float = 0.25  # accuracy of guessing


def _splits(*names: str, **other: str) -> dict[str, str]:
    return {**{name: SPLIT[name] for name in names}, **other}


ARC = _splits("train", "val", test=SPLIT["test"] + "|/world_knowledge/")  # the CORE bundle holds the test questions
BENCHMARKS: dict[str, _Benchmark] = {
    "mmlu": _Benchmark("mmlu", "en", r"(^|/)mmlu[^/]*/", _splits("train", "val", "dev", "test"), "test"),
    "arc_easy": _Benchmark("arc", "en", r"(^|/)arc[-_]easy[/.]", ARC, "test"),
    "arc_challenge": _Benchmark("arc", "en", r"(^|/)arc[-_]challenge[/.]", ARC, "test"),
    "ceval": _Benchmark(
        "ceval", "zh", r"(^|/)ceval[^/]*/", _splits("val", "dev"), "val"
    ),  # its test answers are secret
    "cmmlu": _Benchmark("cmmlu", "zh", r"(^|/)cmmlu[^/]*/", _splits("dev", "test"), "test"),
}


@dataclass(frozen=True)
class _ChoiceQuestion:
    """One question with its choices."""

    question: str
    choices: tuple[str, ...]
    answer: int

    @classmethod
    def of(cls, row: TableRow) -> _ChoiceQuestion:
        """Parse a row of any of the published tables."""
        question, choices, answer = parse_choice(row)
        if question is None:
            raise ValueError("its question is null")
        stem = str(question).strip().removeprefix("Question: ")
        return cls(stem, tuple(str(choice).strip() for choice in choices), answer)


HAN = re.compile("[\u3400-\u9fff]")


def is_letter(reply: str, letter: str) -> bool:
    """True if a reply begins with this letter, alone and not as a part of a word or sentence: A dog is not A. Before
    Chinese, which has no articles, a blank is enough to set it apart."""
    line = reply.strip().split("\n")[0]
    after = line[1:].lstrip()[:1]
    before_chinese = line[1:2].isspace() and HAN.match(after) is not None
    return line[:1] == letter and (before_chinese or not after.isalnum())


class MultipleChoice(Task):
    """The questions of one benchmark and split."""

    kind = "choice"

    def __init__(self, name: str, split: str = "", source: str = "") -> None:
        benchmark = BENCHMARKS[name]
        self.name, self.split = name, split or benchmark.scored
        self.language, self.baseline = benchmark.language, benchmark.baseline
        if self.split not in benchmark.splits:
            raise UserError(f"{name} has the splits {', '.join(benchmark.splits)}, not {self.split!r}")
        self.items = list(
            set_rows(benchmark.set, benchmark.pattern, benchmark.splits[self.split], source, _ChoiceQuestion.of)
        )

    def __len__(self) -> int:
        return len(self.items)

    def question(self, index: int) -> str:
        return self.items[index].question

    def prompt(self, index: int) -> Conversation:
        item, closing = self.items[index], ANSWER_WITH[self.language]
        ask = closing.format(letters="、".join(self.letters(index))) if closing else None
        return [{"role": "user", "content": render_choice(item.question, item.choices, ask=ask)}]

    def example(self, index: int) -> Conversation:
        return [*self.prompt(index), {"role": "assistant", "content": LETTERS[self.items[index].answer]}]

    def letters(self, index: int) -> Sequence[str]:
        return LETTERS[: len(self.items[index].choices)]

    def answer(self, index: int) -> int:
        return self.items[index].answer

    def right_choice(self, index: int) -> str:
        return self.items[index].choices[self.items[index].answer]

    def correct(self, index: int, reply: str) -> bool:
        """Judge a reply in words."""
        return is_letter(reply, LETTERS[self.items[index].answer])

    def row(self, index: int) -> dict[str, Any]:
        return {"letters": list(self.letters(index)), "choices": list(self.items[index].choices)}
