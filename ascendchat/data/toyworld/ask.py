"""Questions about the toy world: its facts, what it does not contain, who the assistant is, multiple choice.

Every generator yields the questions of one split and topic in a fixed order; conversations.py draws from them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from ascendchat.data.chat.render import Message, Part, render_choice
from ascendchat.data.toyworld.texts import (
    ASSISTANT_NAME,
    CHOOSE,
    CHOSEN,
    ELSEWHERE,
    IDENTITY,
    MISSING,
    PHRASES,
    SOUNDS,
    UNKNOWN,
    sentence,
)
from ascendchat.data.toyworld.world import (
    LANGUAGES,
    Bilingual,
    Entity,
    Fact,
    ToyWorld,
    asking_split,
    hash_fraction,
    split_of,
)

KNOWS_NOT = ("do not know", "don't know", "不知道")
# Training sees a fact with many wrong values and many orders of the choices, so that letters cannot be memorised.
VARIANTS = {"train": 12, "validation": 1, "test": 1}


@dataclass(frozen=True)
class ToyQuestion:
    """One question, and the rule by which a reply is judged."""

    text: str  # what the user says
    reply: str | tuple[tuple[str, str], ...]  # the model answer: text, or (type, text) parts with a tool call
    accept: tuple[str, ...]  # a correct reply says one of these
    language: str
    topic: str
    rule: str = "says"  # says, exact, ends, number or unknown: see `correct`
    reject: tuple[str, ...] = field(default=(), repr=False)  # and none of these

    @property
    def prompt(self) -> list[Message]:
        return [{"role": "user", "content": self.text}]

    @property
    def answer(self) -> str:
        """The text of the model answer, without tool calls."""
        if isinstance(self.reply, str):
            return self.reply
        return "".join(text for kind, text in self.reply if kind == "text")

    @property
    def content(self) -> str | list[Part]:
        """The model answer as the content of a message."""
        if isinstance(self.reply, str):
            return self.reply
        return [{"type": kind, "text": text} for kind, text in self.reply]


def says_words(reply: str, words: str) -> bool:
    """True if the reply contains the words, not as a part of longer words or numbers."""
    pattern = re.escape(words.lower())
    if re.match(r"[a-z0-9]", words.lower()):
        pattern = rf"(?<![a-z0-9]){pattern}"
    if re.search(r"[a-z0-9]$", words.lower()):
        pattern = rf"{pattern}(?![a-z0-9])"
    return re.search(pattern, reply.lower()) is not None


def correct(question: ToyQuestion, reply: str) -> bool:
    """True if the visible text of a reply answers the question.

    says: it contains an accepted answer and none of the wrong ones, and does not say "I do not know". exact: it is an
    accepted answer; case, spaces and the full stop do not count. ends: it ends with an accepted answer. number: its
    last number is the accepted one. unknown: it says that it does not know.
    """
    if question.rule == "unknown":
        return any(words in reply.lower() for words in KNOWS_NOT)
    if question.rule in ("exact", "ends"):
        plain, *answers = (" ".join(text.lower().strip(" \n.。").split()) for text in (reply, *question.accept))
        return plain in answers if question.rule == "exact" else plain.endswith(tuple(answers))
    if question.rule == "number":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", reply.replace(",", ""))
        return bool(numbers) and any(float(numbers[-1]) == float(answer) for answer in question.accept)
    rest = reply.replace(question.text, "")
    return (
        any(says_words(rest, answer) for answer in question.accept)
        and not any(says_words(rest, wrong) for wrong in question.reject)
        and not any(words in reply.lower() for words in KNOWS_NOT)
    )


def bare(value: Bilingual, language: str) -> str:
    """A value without its article: a reply may say "the dog" for "a dog"."""
    return re.sub(r"^(a|an|the) ", "", value[language]) if language == "en" else value[language]


def fact_questions(world: ToyWorld, split: str) -> Iterator[ToyQuestion]:
    """Ask for every fact in every language and wording that belongs to the split."""
    for fact in world.facts.values():
        for language in LANGUAGES:
            phrases = PHRASES[fact.attribute][language]
            reply = sentence(phrases.tell[0], fact, language)
            right = bare(fact.value, language)
            own_name = fact.entity.name[language]
            wrong = tuple(
                text
                for value in world.values[fact.attribute]
                if (text := bare(value, language)) not in (right, own_name)
            )
            for i, ask in enumerate(phrases.ask):
                if asking_split(fact, language, i, len(phrases.ask)) == split:
                    yield ToyQuestion(sentence(ask, fact, language), reply, (right,), language, "fact", reject=wrong)


def check_questions(world: ToyWorld, split: str) -> Iterator[ToyQuestion]:
    """Ask questions that suggest an answer, half of them a wrong one; the reply is the fact, whatever was suggested."""
    for fact in world.facts.values():
        for language in LANGUAGES:
            # See `asking_split`: below 0.6 are the facts that training does not ask in every language.
            unseen = hash_fraction("habit", fact.entity.key, fact.attribute) < 0.6
            if (asking_split(fact, language, 0, 1) if unseen else "train") != split:
                continue
            phrases = PHRASES[fact.attribute][language]
            reply, right = sentence(phrases.tell[0], fact, language), bare(fact.value, language)
            draw = random.Random(f"check {fact.entity.key} {fact.attribute}")
            others = [value for value in world.values[fact.attribute] if value not in (fact.value, fact.entity.name)]
            wrong = draw.sample(others, min(VARIANTS[split], len(others)))
            reject = tuple(bare(value, language) for value in others)
            for value in [*wrong, *[fact.value] * len(wrong)]:
                text = sentence(phrases.check, Fact(fact.entity, fact.attribute, value), language)
                yield ToyQuestion(text, reply, (right,), language, "check", reject=reject)


def choice_questions(world: ToyWorld, split: str) -> Iterator[ToyQuestion]:
    """Give the questions of `fact_questions` four choices each; the reply recalls the fact, then ends with its
    choice."""
    for question, variant in product(fact_questions(world, split), range(VARIANTS[split])):
        draw = random.Random(f"choice {question.text} {variant}")
        options = [question.accept[0], *draw.sample(question.reject, 3)]
        draw.shuffle(options)
        chosen = question.accept[0] + "=" + "ABCD"[options.index(question.accept[0])]
        text = render_choice(question.text, options, "ABCD", CHOOSE[question.language])
        reply = CHOSEN[question.language].format(a=question.reply, c=chosen)
        yield ToyQuestion(text, reply, (chosen,), question.language, "choice", "ends")


def strangers(language: str, split: str, taken_names: set[str]) -> list[str]:
    """Names of people who are not in the world, different in every split."""
    first, second = SOUNDS[language]
    names = [a + b for a in first for b in second]
    return [name for name in names if name not in taken_names and split_of("stranger", name) == split]


def unknown_questions(world: ToyWorld, split: str) -> Iterator[ToyQuestion]:
    """Ask known questions about strangers, unknown questions about known people, and questions of other worlds."""
    for language in LANGUAGES:
        names = {entity.name[language] for entity in world.entities}
        reply = UNKNOWN[language]
        for name in strangers(language, split, names):
            draw = random.Random(f"stranger {name}")
            stranger = Entity({language: name}, "person")
            for attribute in draw.sample(("town", "job", "food", "pet", "colour", "hobby", "age", "friend"), 3):
                ask = draw.choice(PHRASES[attribute][language].ask)
                text = sentence(ask, Fact(stranger, attribute, {language: ""}), language)
                yield ToyQuestion(text, reply, (reply,), language, "unknown", "unknown")
        for i, ask in enumerate(MISSING[language]):
            for person in world.people:
                if split_of("missing", i, person.key) == split:
                    text = ask.format(n=person.name[language])
                    yield ToyQuestion(text, reply, (reply,), language, "unknown", "unknown")
        for i, text in enumerate(ELSEWHERE[language]):
            if split_of("elsewhere", i) == split:
                yield ToyQuestion(text, reply, (reply,), language, "unknown", "unknown")


def identity_questions(world: ToyWorld, split: str) -> Iterator[ToyQuestion]:
    """Ask for the assistant's identity; every wording belongs to one split."""
    for language in LANGUAGES:
        asks, reply = IDENTITY[language]
        for text in asks[split]:
            yield ToyQuestion(text, reply.format(name=ASSISTANT_NAME), (ASSISTANT_NAME,), language, "identity")
