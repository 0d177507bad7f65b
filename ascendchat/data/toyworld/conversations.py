"""Conversations, examinations and problems of the toy world, drawn from ask.py and work.py.

chats("train", kind="mid") | chats("train", kind="sft") | questions("test") | problems("train")
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from ascendchat.data.chat.template import Conversation, text_of
from ascendchat.data.toyworld import ask, work
from ascendchat.data.toyworld.ask import Question
from ascendchat.data.toyworld.texts import POLITE, documents
from ascendchat.data.toyworld.world import LANGUAGES, ToyWorld, toy_world

TOPICS = ("fact", "unknown", "identity", "arithmetic", "instruction", "problem", "check", "choice")
# Mid-training teaches the form of a conversation, the calculator and multiple choice; SFT adds manners: who the
# assistant is, what it does not know, to follow instructions. Two-step problems are rare: RL has them to improve. To
# copy the letter behind a word (find) is learnt last, all at once, and the sooner the more of it there is.
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
# Questions per language in an examination, of topics that have no end of questions.
EXAM_COUNT = {"arithmetic": 100, "instruction": 100, "find": 30, "problem": 60}


# Topics whose questions can be listed.
LISTED = {
    "fact": ask.fact_questions,
    "check": ask.check_questions,
    "choice": ask.choice_questions,
    "unknown": ask.unknown_questions,
    "identity": ask.identity_questions,
}


@lru_cache(maxsize=32)
def listed_questions(world: ToyWorld, split: str, topic: str) -> dict[str, list[Question]]:
    """The questions of a topic that can be listed, by language; made once, for all of them take a second."""
    listed: dict[str, list[Question]] = {}
    for question in LISTED[topic](world, split):
        listed.setdefault(question.language, []).append(question)
    return listed


def generated_question(world: ToyWorld, draw: random.Random, topic: str, language: str, split: str) -> Question:
    """A question of a topic whose questions are endless."""
    if topic == "arithmetic":
        return work.arithmetic(world, draw, language, split)
    if topic == "instruction":
        return work.instruction(world, draw, language, split)
    if topic == "find":
        return work.finding(world, draw, language, split)
    return work.problem(world, draw, language, split, topic)


def chats(split: str, kind: str = "sft", seed: int = 0, count: int | None = None) -> Iterator[Conversation]:
    """Conversations of one to three exchanges in one language."""
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
def generated_questions(world: ToyWorld, split: str, seed: int) -> list[Question]:
    """Some of each topic that has no end of questions."""
    draw = random.Random(f"questions {split} {seed}")
    return [
        generated_question(world, draw, topic, language, split)
        for topic, count in EXAM_COUNT.items()
        for language in LANGUAGES
        for _ in range(count)
    ]


def questions(split: str, seed: int = 0, topic: str = "") -> list[Question]:
    """The examination of a split, or a topic of it: every question once."""
    world = toy_world(seed)
    pools = [listed_questions(world, split, name) for name in LISTED if topic in ("", name)]
    exam = [question for by_language in pools for pool in by_language.values() for question in pool]
    exam += generated_questions(world, split, seed)
    return [one for one in dict.fromkeys(exam) if topic in ("", one.topic.split(":")[0])]


def problems(split: str, seed: int = 0, count: int = 1000) -> list[Question]:
    """Different word problems of two steps, half in each language, for RL. SFT shows few of them."""
    world, draw = toy_world(seed), random.Random(f"problems {split} {seed}")
    by_text: dict[str, Question] = {}
    while len(by_text) < count:
        question = generated_question(world, draw, "hard", LANGUAGES[len(by_text) % 2], split)
        by_text.setdefault(question.text, question)
    return list(by_text.values())


def texts() -> Iterator[str]:
    """What a tokenizer for this world should be trained on: documents, and what is said in conversations."""
    said = (
        text_of(message["content"])
        for kind in ("mid", "sft")
        for conversation in chats("train", kind, count=3000)
        for message in conversation
    )
    yield from chain(documents("train", count=5000), said)
