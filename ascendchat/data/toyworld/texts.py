"""The pretraining text of the toy world: portraits, days, meetings, walks through a town, in English and Chinese.

    for text in documents("train", seed=0, count=1000): ...

Every document tells facts of the world in changing words and order. Its split follows from its own text, so no document
is in two splits.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ascendchat.data.toyworld.world import LANGUAGES, TOWNS, WORDS, Entity, Fact, ToyWorld, split_of, toy_world

# Texts of conversations: polite words, the assistant's identity, and questions that the world has no answer to.


def split_phrases(text: str) -> tuple[str, ...]:
    """Split `A / B / C` -> ("A", "B", "C"); line ends and indents do not count."""
    return tuple(" ".join(part.split()) for part in text.split("/"))


ASSISTANT_NAME = "Ascend Chat"
# Before a question, to be polite or not: no change of meaning.
POLITE = {
    "en": ("{q}", "{q}", "{q}", "Hello! {q}", "Please tell me: {q}", "One more question. {q}"),
    "zh": ("{q}", "{q}", "{q}", "你好！{q}", "请告诉我：{q}", "再问一个问题。{q}"),
}
UNKNOWN = {"en": "I do not know.", "zh": "我不知道。"}
CHOSEN = {"en": "{a} {c}", "zh": "{a}{c}"}
CHOOSE = {"en": "Choose one letter.", "zh": "选一个字母。"}
# Ways to ask who the assistant is, by split, and the reply.
IDENTITY = {
    "en": (
        {
            "train": split_phrases("""
                Who are you? / What is your name? / What should I call you? / Who am I talking to? /
                Do you have a name? / Introduce yourself. / Tell me your name. / What are you called? /
                Say your name. / What are you? / Tell me about yourself. / What do people call you? /
                Who is answering me? / Please say who you are. / Give me your name. / Are you an assistant? /
                Who is speaking? / I want to know who you are. / Can you say your name? /
                What is the name of this assistant?
            """),
            "test": split_phrases("""
                Tell me who you are. / Could you introduce yourself? / Who am I speaking to? /
                May I ask your name? / What do they call you?
            """),
            "validation": ("How should I call you?", "Which assistant is this?"),
        },
        "I am {name}, a small assistant.",
    ),
    "zh": (
        {
            "train": split_phrases("""
                你是谁？ / 你叫什么名字？ / 我该怎么称呼你？ / 我在和谁说话？ / 你有名字吗？ / 介绍一下你自己。 /
                告诉我你的名字。 / 你叫什么？ / 请问你是谁？ / 请说出你的名字。 / 怎么称呼你？ / 你是什么？ /
                请做个自我介绍。 / 说说你是谁。 / 谁在回答我？ / 大家叫你什么？ / 可以知道你的名字吗？ /
                你是助手吗？ / 我想知道你是谁。 / 这个助手叫什么名字？
            """),
            "test": ("你的名字是什么？", "告诉我你是谁。", "请问怎么称呼？", "我在跟谁聊天？", "能介绍一下自己吗？"),
            "validation": ("您是哪位？", "请告诉我你叫什么。"),
        },
        "我是{name}，一个小助手。",
    ),
}
# Questions without an answer: attributes that no person here has, and facts of other worlds.
MISSING = {
    "en": split_phrases("""
        What is the phone number of {n}? / What is the shoe size of {n}? / Which car does {n} drive? /
        When was {n} born? / What is the favourite song of {n}? / How much money does {n} have? /
        Who is the mother of {n}? / What did {n} dream last night? / Which school did {n} go to? /
        How heavy is {n}?
    """),
    "zh": split_phrases("""
        {n}的电话号码是多少？ / {n}穿多大的鞋？ / {n}开什么车？ / {n}的生日是哪天？ / {n}最喜欢的歌是什么？ /
        {n}有多少钱？ / {n}的妈妈是谁？ / {n}昨晚梦见了什么？ / {n}上过哪所学校？ / {n}有多重？
    """),
}
ELSEWHERE = {
    "en": split_phrases("""
        Who wrote Hamlet? / What is the capital of France? / How far is the moon? /
        Who won the last World Cup? / What is the price of gold? / Who is the president? /
        What is a black hole? / When did the war end? / How does a computer work? /
        What is the meaning of life? / Which film is the best? / Who built the pyramids? /
        How deep is the ocean? / What is the weather tomorrow? / Who discovered America? /
        What is quantum physics? / How many stars are there? / What language do they speak in Brazil? /
        Who invented the telephone? / What is the fastest animal? / When was Rome founded? / What is DNA? /
        Who is the richest man? / How do I cook a turkey? / What is the largest country? /
        Who painted the Mona Lisa? / What is the stock market? / How do aeroplanes fly? / What time is it? /
        Which planet is the hottest?
    """),
    "zh": split_phrases("""
        红楼梦是谁写的？ / 法国的首都是哪里？ / 月亮有多远？ / 上届世界杯谁赢了？ / 黄金的价格是多少？ /
        总统是谁？ / 什么是黑洞？ / 战争什么时候结束的？ / 电脑是怎么工作的？ / 人生的意义是什么？ / 哪部电影最好？ /
        金字塔是谁建的？ / 海洋有多深？ / 明天天气怎么样？ / 谁发现了美洲？ / 什么是量子物理？ / 天上有多少星星？ /
        巴西人说什么语言？ / 电话是谁发明的？ / 跑得最快的动物是什么？ / 罗马是什么时候建立的？ / 什么是基因？ /
        世界首富是谁？ / 怎么做烤鸭？ / 最大的国家是哪个？ / 蒙娜丽莎是谁画的？ / 什么是股票？ / 飞机为什么会飞？ /
        现在几点了？ / 哪颗行星最热？
    """),
}
# Sounds of strangers' names.
SOUNDS = {
    "en": (
        str.split("Al Bra Cor Dan El Fre Gar Hil Is Jor Kas Lo Mir Ne Or Pa Qui Ral Ser Tar Ul Vin Wal Xan Yor Zel"),
        str.split("a bert da den fia gar ina kin la lon ma mond na nor ra rik sa sten to vin wen za"),
    ),
    "zh": (
        list("阿巴查丹埃弗古哈伊乔卡洛米尼帕奇拉塞塔乌维沃谢雅泽"),
        list("贝德顿非格金兰隆曼蒙娜诺克森斯坦托文雯扎宁恩尔达"),
    ),
}


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
    """Fill a template; the first letter of an English sentence becomes a capital."""
    text = template.format(n=fact.entity.name[language], v=fact.value[language])
    return text[:1].upper() + text[1:]


def tell(fact: Fact, language: str, draw: random.Random) -> str:
    """Tell one fact in one of its wordings."""
    return sentence(draw.choice(PHRASES[fact.attribute][language].tell), fact, language)


def join(sentences: list[str], language: str) -> str:
    """Join sentences; Chinese ones follow each other without a space."""
    return ("" if language == "zh" else " ").join(sentences)


def portrait(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Tell several facts about one entity."""
    entity = draw.choice(world.entities if draw.random() < 0.4 else world.people)
    facts = world.of(entity)
    chosen = draw.sample(facts, min(len(facts), draw.randint(3, 8)))
    opening = [draw.choice(OPENINGS[language]).format(n=entity.name[language])] if draw.random() < 0.5 else []
    return opening + [tell(fact, language, draw) for fact in chosen]


def meeting(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Let two people meet, and tell something about each of them."""
    a, b = draw.sample(world.people, 2)
    comma = ", " if language == "en" else "，"
    act = draw.choice(ACTS[language]).format(a=a.name[language], b=b.name[language])
    facts = draw.sample(world.of(a), 2) + draw.sample(world.of(b), 2)
    sentences = [tell(fact, language, draw) for fact in facts]
    return [draw.choice(TIMES[language]) + comma + act, *sentences, draw.choice(ENDINGS[language])]


def town_tour(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Describe a town, its landmarks, and some people who live there."""
    town = draw.choice(world.towns)
    name = TOWNS[world.towns.index(town)]
    inside: list[Entity] = [e for e in world.landmarks if world.facts[e.key, "place"].value is name]
    living = [e for e in world.people if world.facts[e.key, "town"].value is name]
    facts = world.of(town) + [fact for e in inside for fact in world.of(e)]
    sights = [tell(fact, language, draw) for fact in draw.sample(facts, min(4, len(facts)))]
    homes = [tell(world.facts[e.key, "town"], language, draw) for e in draw.sample(living, min(3, len(living)))]
    return sights + homes


def labels(world: ToyWorld, draw: random.Random, language: str) -> list[str]:
    """Label four words with letters, and again in another order: how to read the choices of a question."""
    while True:
        words = draw.sample(WORDS[language], 4)
        if split_of("words", *sorted(words)) == "train":  # the other combinations are for examinations
            break
    lines = [f"- {word}={letter}" for word, letter in zip(words, "ABCD")]
    return ["\n".join([*lines, *draw.sample(lines, 4)])]


def document(world: ToyWorld, draw: random.Random) -> str:
    """Write one text in one language."""
    language = draw.choice(LANGUAGES)
    kind = draw.choices((portrait, meeting, town_tour, labels), weights=(5, 3, 2, 0.5))[0]
    return join(kind(world, draw, language), language)


def documents(split: str, seed: int = 0, count: int | None = None) -> Iterator[str]:
    """Yield `count` different texts of a split (by default 20,000 to train and 500 each to validate and test)."""
    world, draw = toy_world(seed), random.Random(f"documents {seed}")
    total, seen = DOCUMENT_COUNT[split] if count is None else count, set[str]()
    while len(seen) < total:
        text = document(world, draw)
        if text not in seen and split_of("document", text) == split:
            seen.add(text)
            yield text


# Wordings of the toy world (phrases.txt): statement, question and check of each attribute, in each language.
#
# {n} is the name, {v} the value. The first wording of `tell` is the answer to a question. It is a full sentence, so a
# reply reads like the texts the model has learnt from, and the value comes after the words that recall it.


class _Phrases(NamedTuple):
    """Wordings of one attribute in one language."""

    tell: tuple[str, ...]
    ask: tuple[str, ...]
    check: str  # a statement turned into a yes-or-no question


def parse_phrases(table: str) -> dict[str, dict[str, _Phrases]]:
    """Parse phrases.txt: attribute -> language -> wordings."""
    phrases: dict[str, dict[str, _Phrases]] = {}
    for block in table.split("# ")[1:]:
        title, rest = block.split("\n", 1)
        attribute, language = title.split()
        tell, ask, check = (split_phrases(part) for part in re.split("^(?:tell|ask|check):", rest, flags=re.M)[1:])
        phrases.setdefault(attribute, {})[language] = _Phrases(tell, ask, *check)
    return phrases


PHRASES = parse_phrases(Path(__file__).with_name("phrases.txt").read_text(encoding="utf-8"))
