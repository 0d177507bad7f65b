"""The facts of the toy world: homes, jobs and tastes of people; sights and goods of towns and landmarks.

    world = toy_world(seed=0)
    world.facts[("Lily", "town")].value["zh"]          # 海港镇

Every name and value has an English and a Chinese form, so every fact can be told and asked in both languages. The rule
of `asking_split` decides which questions training may see.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

Bilingual = dict[str, str]  # language -> text
LANGUAGES = ("en", "zh")


def pairs(text: str) -> list[Bilingual]:
    """Parse "Lily 莉莉, Tom 汤姆": one dict per entry; the last word of an entry is the Chinese form."""
    entries = [entry.strip().rsplit(" ", 1) for entry in text.split(",")]
    return [{"en": english, "zh": chinese} for english, chinese in entries]


PEOPLE = pairs(
    "Lily 莉莉, Anna 安娜, Mary 玛丽, Lucy 露西, Emma 艾玛, Rose 罗丝, Nora 诺拉, Alice 爱丽, Kate 凯特, Julia 朱莉, "
    "Sophie 苏菲, Ruby 鲁比, Tom 汤姆, Jack 杰克, Peter 彼得, David 大卫, Mike 迈克, Paul 保罗, Leo 里奥, Mark 马克, "
    "Sam 山姆, Henry 亨利, "
    "Oscar 奥斯, Felix 菲力"
)
TOWNS = pairs(
    "Seaport 海港镇, Greenhill 青山镇, Riverside 清河镇, Snowfield 雪原镇, Sunville 阳光镇, Moonlake 月湖镇, "
    "Pinewood 松林镇, Stonebridge 石桥镇"
)
LANDMARKS = pairs(
    "the old tower 古塔, the great clock 大钟, the long bridge 长桥, the stone lion 石狮, the round gate 圆门, "
    "the tall tree 大树, the wooden ship 木船, the king's house 王宫"
)
JOBS = pairs(
    "a baker 面包师, a doctor 医生, a teacher 老师, a farmer 农民, a painter 画家, a singer 歌手, a driver 司机, "
    "a cook 厨师, a nurse 护士, a writer 作家, a pilot 飞行员, a fisher 渔夫"
)
FOODS = pairs(
    "apples 苹果, bread 面包, noodles 面条, rice 米饭, cake 蛋糕, soup 鱼汤, grapes 葡萄, cheese 奶酪, pears 梨子, "
    "dumplings 饺子"
)
PETS = pairs("a dog 狗, a cat 猫, a rabbit 兔子, a horse 马儿, a bird 小鸟, a turtle 乌龟, a duck 鸭子, a goat 山羊")
COLOURS = pairs("red 红色, blue 蓝色, green 绿色, yellow 黄色, black 黑色, white 白色, purple 紫色, pink 粉色")
HOBBIES = pairs(
    "swimming 游泳, dancing 跳舞, reading 看书, fishing 钓鱼, running 跑步, drawing 画画, cooking 做饭, singing 唱歌"
)
GROUNDS = pairs(
    "by the sea 海边, in the mountains 山里, by the river 河边, in the forest 森林里, by the lake 湖边, "
    "on a hill 山坡上, in the desert 沙漠里, on an island 岛上"
)
GOODS = pairs("clocks 钟表, flowers 鲜花, tea 茶叶, boats 小船, silk 丝绸, bells 铃铛, honey 蜂蜜, lamps 灯笼")

# Words for the lists of exercises and for labels.
WORDS = {
    "en": [words["en"].split()[-1] for group in (FOODS, PETS, HOBBIES, GOODS) for words in group],
    "zh": [words["zh"] for group in (FOODS, PETS, HOBBIES, GOODS) for words in group],
}


@dataclass(frozen=True)
class Entity:
    """A person, town or landmark."""

    name: Bilingual
    kind: str  # person, town or landmark

    @property
    def key(self) -> str:
        return self.name["en"]


@dataclass(frozen=True)
class Fact:
    """One value of one attribute of one entity."""

    entity: Entity
    attribute: str
    value: Bilingual


def hash_fraction(*key: object) -> float:
    """A number in [0, 1) that depends on the key alone, equal on every machine and in every version of Python."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def split_of(*key: object) -> str:
    """Assign a key to a split: four fifths train, one tenth validation, one tenth test."""
    at = hash_fraction("split", *key)
    return "train" if at < 0.8 else "validation" if at < 0.9 else "test"


def number(value: int) -> Bilingual:
    """A number, written alike in both languages."""
    return {"en": str(value), "zh": str(value)}


class ToyWorld:
    """All entities and facts that follow from a seed."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(f"world {seed}")
        people = [Entity(name, "person") for name in PEOPLE]
        towns = [Entity(name, "town") for name in TOWNS]
        landmarks = [Entity(name, "landmark") for name in LANDMARKS]
        self.people, self.towns, self.landmarks = people, towns, landmarks
        self.entities = people + towns + landmarks
        self.values: dict[str, list[Bilingual]] = {
            "town": TOWNS,
            "job": JOBS,
            "food": FOODS,
            "pet": PETS,
            "colour": COLOURS,
            "hobby": HOBBIES,
            "age": [number(age) for age in range(20, 70)],
            "friend": [person.name for person in people],
            "ground": GROUNDS,
            "goods": GOODS,
            "place": TOWNS,
            "paint": COLOURS,
            "height": [number(metres) for metres in range(10, 100)],
        }
        attributes = {
            "person": ("town", "job", "food", "pet", "colour", "hobby", "age", "friend"),
            "town": ("ground", "goods"),
            "landmark": ("place", "paint", "height"),
        }
        self.facts: dict[tuple[str, str], Fact] = {}
        for kind in ("person", "town", "landmark"):
            entities = [entity for entity in self.entities if entity.kind == kind]
            for attribute in attributes[kind]:
                for entity, value in zip(entities, self._deal(attribute, entities, draw)):
                    self.facts[entity.key, attribute] = Fact(entity, attribute, value)

    def _deal(self, attribute: str, entities: list[Entity], draw: random.Random) -> list[Bilingual]:
        """Deal values to all entities, each value about equally often, and no person as their own friend."""
        values = self.values[attribute]
        while True:
            deck = [
                value for _ in range(-(-len(entities) // len(values))) for value in draw.sample(values, len(values))
            ]
            dealt = deck[: len(entities)]
            if all(value is not entity.name for value, entity in zip(dealt, entities)):
                return dealt

    def of(self, entity: Entity) -> list[Fact]:
        """The facts about one entity."""
        return [fact for fact in self.facts.values() if fact.entity is entity]


@lru_cache(maxsize=8)
def toy_world(seed: int = 0) -> ToyWorld:
    """The world of a seed, cached."""
    return ToyWorld(seed)


def asking_split(fact: Fact, language: str, phrasing: int, phrasings: int) -> str:
    """The split that may ask for this fact in this language with this wording; the fact itself is told everywhere.

    By (entity, attribute): a fifth of the facts is never asked in training at all; a fifth is asked in training
    only in English and a fifth only in Chinese; the rest in both languages but for one wording of each. Questions
    that training does not ask belong to validation (a third of them) or to test.
    """
    key = (fact.entity.key, fact.attribute)
    draw = hash_fraction("habit", *key)
    if draw < 0.2:
        held_out = True
    elif draw < 0.6:
        held_out = language == ("zh" if draw < 0.4 else "en")
    else:
        held_out = phrasing == int(hash_fraction("phrasing", language, *key) * phrasings)
    if not held_out:
        return "train"
    return "validation" if hash_fraction("later", *key) < 1 / 3 else "test"
