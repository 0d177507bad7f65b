"""The pretraining text of the toy world: portraits, days, meetings, walks through a town, in English and Chinese.

    for text in documents("train", seed=0, count=1000): ...

Every document tells facts of the world in changing words and order. Its split follows from its own text, so no document
is in two splits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ascendchat.data.toyworld.phrases import PHRASES
from ascendchat.data.toyworld.text import split_phrases
from ascendchat.data.toyworld.world import LANGUAGES, TOWNS, WORDS, Entity, Fact, ToyWorld, split_of, toy_world

DOCUMENT_COUNT = {"train": 20_000, "validation": 500, "test": 500}
OPENINGS = {
    "en": ("This is {n}.", "Let me tell you about {n}.", "Do you know {n}?", "Here is a story about {n}.", "Meet {n}."),
    "zh": ("这是{n}。", "我来介绍{n}。", "你认识{n}吗？", "这是关于{n}的故事。", "来认识一下{n}。"),
}
TIMES = {
    "en": ("One morning", "One day", "Last summer", "In the winter", "After the rain", "Late in the evening"),
    "zh": ("一天早上", "有一天", "去年夏天", "冬天里", "雨过之后", "天黑以后"),
}
ACTS = {
    "en": split_phrases("""
        {a} met {b} on the road. / {a} and {b} drank tea together. / {a} helped {b} to carry a box. /
        {a} wrote a long letter to {b}. / {a} showed {b} a new book. / {a} and {b} walked to the market.
    """),
    "zh": split_phrases("""
        {a}在路上遇见了{b}。 / {a}和{b}一起喝茶。 / {a}帮{b}搬箱子。 / {a}给{b}写了一封长信。 / {a}给{b}看一本新书。 /
        {a}和{b}走到市场去。
    """),
}
ENDINGS = {
    "en": ("Everyone was happy.", "Then they went home.", "It was a good day.", "They laughed for a long time."),
    "zh": ("大家都很高兴。", "然后他们回家了。", "这是美好的一天。", "他们笑了很久。"),
}


def sentence(template: str, fact: Fact, language: str) -> str:
    """A template filled; the first letter of an English sentence is a capital."""
    text = template.format(n=fact.entity.name[language], v=fact.value[language])
    return text[:1].upper() + text[1:]


def tell(fact: Fact, language: str, draw: random.Random) -> str:
    """One fact in one of its wordings."""
    return sentence(draw.choice(PHRASES[fact.attribute][language].tell), fact, language)


def join(sentences: list[str], language: str) -> str:
    """Chinese sentences follow each other without a space."""
    return ("" if language == "zh" else " ").join(sentences)


def portrait(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Several facts about one entity."""
    entity = draw.choice(world.entities if draw.random() < 0.4 else world.people)
    facts = world.of(entity)
    chosen = draw.sample(facts, min(len(facts), draw.randint(3, 8)))
    opening = [draw.choice(OPENINGS[language]).format(n=entity.name[language])] if draw.random() < 0.5 else []
    return opening + [tell(fact, language, draw) for fact in chosen]


def meeting(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Two people meet; something about each of them."""
    a, b = draw.sample(world.people, 2)
    comma = ", " if language == "en" else "，"
    act = draw.choice(ACTS[language]).format(a=a.name[language], b=b.name[language])
    facts = draw.sample(world.of(a), 2) + draw.sample(world.of(b), 2)
    told = [tell(fact, language, draw) for fact in facts]
    return [draw.choice(TIMES[language]) + comma + act, *told, draw.choice(ENDINGS[language])]


def town_tour(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """A town, what stands in it, and who lives there."""
    town = draw.choice(world.towns)
    name = TOWNS[world.towns.index(town)]
    inside: list[Entity] = [e for e in world.landmarks if world.facts[e.key, "place"].value is name]
    living = [e for e in world.people if world.facts[e.key, "town"].value is name]
    facts = world.of(town) + [fact for e in inside for fact in world.of(e)]
    told = [tell(fact, language, draw) for fact in draw.sample(facts, min(4, len(facts)))]
    homes = [tell(world.facts[e.key, "town"], language, draw) for e in draw.sample(living, min(3, len(living)))]
    return told + homes


def labels(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Four words with their letters, and again in another order: how to read the choices of a question."""
    while True:
        words = draw.sample(WORDS[language], 4)
        if split_of("words", *sorted(words)) == "train":  # the other combinations are for examinations
            break
    lines = [f"- {word}={letter}" for word, letter in zip(words, "ABCD")]
    return ["\n".join([*lines, *draw.sample(lines, 4)])]


def document(world: ToyWorld, draw: random.Random) -> str:
    """One text in one language."""
    language = draw.choice(LANGUAGES)
    kind = draw.choices((portrait, meeting, town_tour, labels), weights=(5, 3, 2, 0.5))[0]
    return join(kind(world, draw, language), language)


def documents(split: str, seed: int = 0, count: int | None = None) -> Iterator[str]:
    """`count` different texts of a split (by default 20,000 to train and 500 each to validate and test)."""
    world, draw = toy_world(seed), random.Random(f"documents {seed}")
    wanted, seen = DOCUMENT_COUNT[split] if count is None else count, set[str]()
    while len(seen) < wanted:
        text = document(world, draw)
        if text not in seen and split_of("document", text) == split:
            seen.add(text)
            yield text
