"""Conversations, evaluation questions and problems of the toy world, drawn from ask.py and exercises.py.

chats("train", kind="mid") | chats("train", kind="sft") | questions("test") | problems("train")
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from ascendchat.data.chat.render import Conversation, text_of
from ascendchat.data.toyworld import ask, exercises
from ascendchat.data.toyworld.ask import ToyQuestion
from ascendchat.data.toyworld.texts import POLITE, documents
from ascendchat.data.toyworld.world import LANGUAGES, ToyWorld, toy_world

TOPICS = ("fact", "unknown", "identity", "arithmetic", "instruction", "problem", "check", "choice")
# Mid-training teaches the form of a conversation, the calculator and multiple choice; SFT adds manners: who the
# assistant is, what it does not know, to follow instructions. Two-step problems are rare: RL has them to improve. To
# copy the letter of a word (find) is learnt last, abruptly, and the sooner the more of it there is.
WEIGHTS = {
    "mid": {"fact": 22, "choice": 18, "find": 32, "check": 4, "arithmetic": 6, "problem": 4, "instruction": 14},
    "sft": {
        "fact": 32,
        "check": 6,
        "choice": 10,
        "find": 6,
        "unknown": 16,
        "identity": 6,
        "arithmetic": 8,
        "instruction": 10,
        "problem": 5,
        "hard": 1,
    },
}
CHAT_COUNT = {"train": 12_000, "validation": 1000, "test": 1000}
# Questions per language in an evaluation, of endless topics.
EXAM_COUNT = {"arithmetic": 100, "instruction": 100, "find": 30, "problem": 60}


# Topics with a finite number of questions.
LISTED = {
    "fact": ask.fact_questions,
    "check": ask.check_questions,
    "choice": ask.choice_questions,
    "unknown": ask.unknown_questions,
    "identity": ask.identity_questions,
}


@lru_cache(maxsize=32)
def listed_questions(world: ToyWorld, split: str, topic: str) -> dict[str, list[ToyQuestion]]:
    """List the questions of a finite topic, by language; cached, for all of them take a second."""
    listed: dict[str, list[ToyQuestion]] = {}
    for question in LISTED[topic](world, split):
        listed.setdefault(question.language, []).append(question)
    return listed


def generated_question(world: ToyWorld, draw: random.Random, topic: str, language: str, split: str) -> ToyQuestion:
    """Draw a question of an endless topic."""
    if topic == "arithmetic":
        return exercises.arithmetic(world, draw, language, split)
    if topic == "instruction":
        return exercises.instruction(world, draw, language, split)
    if topic == "find":
        return exercises.find_question(world, draw, language, split)
    return exercises.problem(world, draw, language, split, topic)


def chats(split: str, kind: str = "sft", seed: int = 0, count: int | None = None) -> Iterator[Conversation]:
    """Yield conversations of one to three exchanges in one language."""
    world, draw = toy_world(seed), random.Random(f"chats {split} {kind} {seed}")
    listed = {topic: listed_questions(world, split, topic) for topic in WEIGHTS[kind] if topic in LISTED}
    topics, weights = list(WEIGHTS[kind]), list(WEIGHTS[kind].values())
    for _ in range(CHAT_COUNT[split] if count is None else count):
        language = draw.choice(LANGUAGES)
        conversation: Conversation = []
        for topic in draw.choices(topics, weights, k=draw.choice((1, 1, 2, 3))):
            pool = listed.get(topic, {}).get(language)
            question = draw.choice(pool) if pool else generated_question(world, draw, topic, language, split)
            text = question.text
            if topic in ("fact", "unknown", "identity", "arithmetic"):
                text = draw.choice(POLITE[language]).format(q=text)
            conversation += [{"role": "user", "content": text}, {"role": "assistant", "content": question.content}]
        yield conversation


@lru_cache(maxsize=8)
def generated_questions(world: ToyWorld, split: str, seed: int) -> list[ToyQuestion]:
    """Draw some questions of each endless topic."""
    draw = random.Random(f"questions {split} {seed}")
    return [
        generated_question(world, draw, topic, language, split)
        for topic, count in EXAM_COUNT.items()
        for language in LANGUAGES
        for _ in range(count)
    ]


def questions(split: str, seed: int = 0, topic: str = "") -> list[ToyQuestion]:
    """All questions of a split, or of a topic in it, each once."""
    world = toy_world(seed)
    pools = [listed_questions(world, split, name) for name in LISTED if topic in ("", name)]
    drawn = [question for by_language in pools for pool in by_language.values() for question in pool]
    drawn += generated_questions(world, split, seed)
    return [question for question in dict.fromkeys(drawn) if topic in ("", question.topic.split(":")[0])]


def problems(split: str, seed: int = 0, count: int = 1000) -> list[ToyQuestion]:
    """Draw different word problems of two steps, half in each language, for RL. SFT shows few of them."""
    world, draw = toy_world(seed), random.Random(f"problems {split} {seed}")
    by_text: dict[str, ToyQuestion] = {}
    while len(by_text) < count:
        question = generated_question(world, draw, "hard", LANGUAGES[len(by_text) % 2], split)
        by_text.setdefault(question.text, question)
    return list(by_text.values())


def texts() -> Iterator[str]:
    """Yield training text for a tokenizer of this world: documents, and the words of conversations."""
    spoken = (
        text_of(message["content"])
        for kind in ("mid", "sft")
        for conversation in chats("train", kind, count=3000)
        for message in conversation
    )
    yield from chain(documents("train", count=5000), spoken)
