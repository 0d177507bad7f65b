"""Evaluation questions in training data: what counts as one, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence

from ascendchat.data.chat.render import Conversation, render_choice
from ascendchat.tasks.contamination import (
    MAX_SHOWN_OVERLAPS,
    Overlap,
    OverlapFinder,
    contains_words,
    normal,
    questions_in,
)
from ascendchat.tasks.task import Task


class Talks(Task):
    """Conversations as they are given."""

    def __init__(self, name: str, talks: list[Conversation], split: str = "train") -> None:
        self.name, self.split, self.talks = name, split, talks

    def __len__(self) -> int:
        return len(self.talks)

    def example(self, index: int) -> Conversation:
        return self.talks[index]


class Choices(Talks):
    """Multiple choice, the first choice being the right one."""

    kind = "choice"

    def __init__(self, name: str, rows: list[tuple[str, list[str]]]) -> None:
        super().__init__(name, [talk(render_choice(question, choices), "A") for question, choices in rows], "test")
        self.rows = rows

    def question(self, index: int) -> str:
        return self.rows[index][0]

    def right_choice(self, index: int) -> str:
        return self.rows[index][1][0]


def talk(*texts: str) -> Conversation:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


STEM = "Which of the following is true?"
EXAM = Choices("exam", [(STEM, ["Bees dance.", "Bees sing.", "Bees write.", "None of these."])])


def overlaps(training: Sequence[Task], evaluation: Sequence[Task]) -> list[Overlap]:
    """Evaluation questions that stand in the training data."""
    finder = OverlapFinder(evaluation)
    for source in training:
        assert len(list(finder.over(source))) == len(source)
    return finder.overlaps()


def in_training(*texts: str) -> bool:
    return bool(overlaps([Talks("chats", [talk("Hello", "Hi"), talk(*texts)])], [EXAM]))


def test_a_multiple_choice_question_is_found_with_its_right_choice_and_not_by_its_stem() -> None:
    assert in_training(render_choice("WHICH of the following, is true", ["bees dance", "Rocks dance"]), "A")
    assert not in_training(render_choice(STEM, ["Rocks dance.", "Rocks sing."]), "A")
    assert not in_training(render_choice(STEM, ["Rocks dance.", "None of these."]), "B")  # a wrong choice in common
    assert not in_training(STEM, "That rocks dance.")
    assert in_training(STEM, "It is true that bees dance.")
    assert not in_training("Which is true?", "Bees dance.")
    assert not in_training(STEM, "Rocks dance.", "And what do bees do?", "Bees dance.")  # of another question
    assert not in_training("Bees dance. Is it so?", "Yes", STEM, "Rocks dance.")


def test_questions_that_are_answered_in_words_are_found_by_their_words() -> None:
    exam = Talks("sums", [talk("What is 1+1?", "2"), talk("What is 1+2?", "3")], "test")
    leaky = Talks("b", [talk("x", "y"), talk("x", "y", "WHAT is  1 + 2", "many")])
    clean = Talks("a", [talk("x", "y")])
    (found,) = overlaps([clean, leaky], [exam])
    assert found[:4] == ("sums test", 1, "b train", 1)
    assert "What is 1+2?" in found.line()
    assert len(overlaps([exam], [exam])) == 2


def test_the_log_has_one_line_of_numbers_and_few_examples_for_each_evaluation() -> None:
    exam = Talks("sums", [talk(f"What is 1+{n}?", str(n + 1)) for n in range(10)], "test")
    finder = OverlapFinder([EXAM, exam])
    first, second = Talks("first", exam.talks[2:8] * 2), Talks("second", exam.talks[7:9])
    assert [*finder.over(first), *finder.over(second)] == [*first.talks, *second.talks]
    assert len(finder.overlaps()) == 8  # row 7 is in both
    assert finder.lines() == [
        "sums: 7 of 10 test questions are in the mixture (first train 6, second train 2)",
        *(f"  sums test row {row} is in first train row {row - 2}: What is 1+{row}?" for row in (2, 3, 4)),
    ]
    assert MAX_SHOWN_OVERLAPS == 3
    assert OverlapFinder([EXAM]).lines() == []


def test_questions_are_compared_by_their_words() -> None:
    assert normal("  Who, if ANY？") == normal("who if any?")
    assert normal("1+1") != normal("1+2")
    for text in map(chr, range(128)):  # plain letters take a short cut to the same words
        assert normal(f"A {text}b_") == normal(f"A {text}b_\u3000")
    assert list(questions_in([{"role": "assistant", "content": "x"}])) == []
    assert list(questions_in([{"role": "user", "content": "half a letter \ud83d"}]))


def test_words_stand_in_a_text_as_words() -> None:
    assert contains_words("It is the Sun, surely", "sun")
    assert not contains_words("sunlight", "sun")
    assert not contains_words("15 s", "5 s")
    assert contains_words("最大的器官是皮肤。", "皮肤")
    assert contains_words("a ≥ b", "≥")
    assert not contains_words("a = b", "≥")
