"""Conversations, examinations and problems of the toy world, drawn from ask.py and work.py.

chats("train", kind="mid") | chats("train", kind="sft") | questions("test") | problems("train")
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from ascendchat.data.chat import Conversation, text_of
from ascendchat.data.toyworld import ask, work
from ascendchat.data.toyworld.ask import Question
from ascendchat.data.toyworld.stories import documents
from ascendchat.data.toyworld.text import POLITE
from ascendchat.data.toyworld.world import LANGUAGES, World, world

NAME = "Ascend Chat"
TOPICS = ("fact", "unknown", "identity", "arithmetic", "instruction", "problem", "check", "choice")
# Mid-training teaches the form of a conversation, the calculator and multiple choice; SFT adds manners: who the
# assistant is, what it does not know, to follow instructions. Two-step problems are rare: RL has them to improve.
WEIGHTS = {
    "mid": {"fact": 38, "choice": 12, "find": 14, "check": 6, "arithmetic": 8, "problem": 4, "instruction": 18},
    "sft": {
        "fact": 32, "check": 6, "choice": 10, "find": 6, "unknown": 16, "identity": 6, "arithmetic": 8,
        "instruction": 10, "problem": 5, "hard": 1,
    },
}  # fmt: skip
COUNT = {"mid": 12_000, "sft": 12_000}
ASKED = {"arithmetic": 100, "instruction": 100, "find": 30, "problem": 60}  # questions per language in an examination


@lru_cache(maxsize=8)
def pools(here: World, split: str, name: str) -> dict[tuple[str, str], list[Question]]:
    """The questions that can be listed, by topic and language; made once, for it takes a second."""
    listed = {
        "fact": ask.facts(here, split), "check": ask.checks(here, split), "choice": ask.choices(here, split),
        "unknown": ask.unknowns(here, split), "identity": ask.identities(here, split, name),
    }  # fmt: skip
    found: dict[tuple[str, str], list[Question]] = {}
    for topic, questions_ in listed.items():
        for question in questions_:
            found.setdefault((topic, question.language), []).append(question)
    return found


def made(here: World, draw: random.Random, topic: str, language: str, split: str) -> Question:
    """A question of a topic whose questions are endless."""
    if topic == "arithmetic":
        return work.arithmetic(here, draw, language, split)
    if topic == "instruction":
        return work.instruction(here, draw, language, split)
    if topic == "find":
        return work.finding(here, draw, language, split)
    return work.problem(here, draw, language, split, topic)


def chats(
    split: str, kind: str = "sft", seed: int = 0, count: int | None = None, name: str = NAME
) -> Iterator[Conversation]:
    """Conversations of one to three exchanges in one language."""
    here, draw = world(seed), random.Random(f"chats {split} {kind} {seed}")
    listed = pools(here, split, name)
    topics, weights = list(WEIGHTS[kind]), list(WEIGHTS[kind].values())
    for _ in range(COUNT[kind] if count is None else count):
        language = draw.choice(LANGUAGES)
        conversation: Conversation = []
        for topic in draw.choices(topics, weights, k=draw.choice((1, 1, 2, 3))):
            pool = listed.get((topic, language))
            question = draw.choice(pool) if pool else made(here, draw, topic, language, split)
            text = question.text
            if topic in ("fact", "unknown", "identity", "arithmetic"):
                text = draw.choice(POLITE[language]).format(q=text)
            conversation += [{"role": "user", "content": text}, {"role": "assistant", "content": question.content}]
        yield conversation


def questions(
    split: str, language: str | None = None, topic: str | None = None, seed: int = 0, name: str = NAME
) -> list[Question]:
    """The examination of a split, all of it or one language or topic."""
    here = world(seed)
    found = [q for pool in pools(here, split, name).values() for q in pool]
    draw = random.Random(f"questions {split} {seed}")
    for endless, count in ASKED.items():
        for each in LANGUAGES:
            found += [made(here, draw, endless, each, split) for _ in range(count)]
    return [
        q
        for q in dict.fromkeys(found)
        if language in (None, q.language) and topic in (None, q.topic, q.topic.split(":")[0])
    ]


def problems(split: str, seed: int = 0, count: int = 1000) -> list[Question]:
    """Different word problems of two steps, half in each language, for RL: SFT shows few of them, of three of the eight
    kinds none."""
    here, draw = world(seed), random.Random(f"problems {split} {seed}")
    found: dict[str, Question] = {}
    while len(found) < count:
        question = made(here, draw, "new", LANGUAGES[len(found) % 2], split)
        found.setdefault(question.text, question)
    return list(found.values())


def texts(seed: int = 0, name: str = NAME) -> Iterator[str]:
    """What a tokenizer for this world should be trained on: documents, and what is said in conversations."""
    said = (
        text_of(message["content"])
        for kind in ("mid", "sft")
        for conversation in chats("train", kind, seed, 3000, name)
        for message in conversation
    )
    yield from chain(documents("train", seed, 5000), said)
