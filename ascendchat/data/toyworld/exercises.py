"""Exercises for the assistant of the toy world: arithmetic with the calculator, instructions on lists, word problems.

Each generator takes the world and a `random.Random`, and draws one question: their number is endless. The split of a
question follows from its numbers or words, so no combination is in two splits.
"""

from __future__ import annotations

import random

from ascendchat.data.chat.render import render_choice
from ascendchat.data.toyworld.ask import ToyQuestion
from ascendchat.data.toyworld.texts import CHOOSE
from ascendchat.data.toyworld.world import WORDS, Bilingual, ToyWorld, split_of

OPERATIONS = ("+", "-", "*")
ARITHMETIC = {
    "en": ("What is {e}?", "Compute {e}.", "How much is {e}?", "{e} = ?", "Please calculate {e}."),
    "zh": ("{e}等于多少？", "计算{e}。", "{e}是多少？", "{e} = ?", "请算一下{e}。"),
}
NAMES = {  # an operation in words
    "en": {"+": "{a} plus {b}", "-": "{a} minus {b}", "*": "{a} times {b}"},
    "zh": {"+": "{a}加{b}", "-": "{a}减{b}", "*": "{a}乘{b}"},
}
RESULT = {"en": "The answer is {r}.", "zh": "答案是{r}。"}


def value_of(expression: str) -> int:
    """The value of a chain of +, - and * over whole numbers, without brackets; * binds closer."""
    total = 0
    for term in expression.replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += product
    return total


def calculator_question(text: str, expression: str, language: str, topic: str) -> ToyQuestion:
    """Build a question whose reply first calls the calculator."""
    result = str(value_of(expression))
    reply = (("tool", expression), ("output", result), ("text", RESULT[language].format(r=result)))
    return ToyQuestion(text, reply, (result,), language, topic, "number")


def operands(draw: random.Random, operation: str) -> tuple[int, int]:
    """Draw two numbers up to 99; a difference is never negative."""
    a, b = draw.randint(0, 99), draw.randint(0, 99)
    return (max(a, b), min(a, b)) if operation == "-" else (a, b)


def arithmetic(world: ToyWorld, draw: random.Random, language: str, split: str) -> ToyQuestion:
    """Draw two numbers and one operation, in signs or in words; the pair of numbers belongs to one split."""
    while True:
        operation = draw.choice(OPERATIONS)
        a, b = operands(draw, operation)
        if split_of("operands", min(a, b), max(a, b)) == split:
            break
    wording = draw.choice(("{a} {o} {b}", "{a}{o}{b}", NAMES[language][operation]))
    text = draw.choice(ARITHMETIC[language]).format(e=wording.format(a=a, b=b, o=operation))
    return calculator_question(text, f"{a}{operation}{b}", language, "arithmetic")


# name: (wording in English, in Chinese)
INSTRUCTIONS = {
    "repeat": ("Repeat: {l}", "重复：{l}"),
    "reverse": ("Reverse the list: {l}", "倒过来说：{l}"),
    "count": ("How many words are in this list: {l}", "下面有几个词：{l}"),
    "first": ("What is the first word: {l}", "第一个词是什么：{l}"),
    "last": ("What is the last word: {l}", "最后一个词是什么：{l}"),
}


def instruction(world: ToyWorld, draw: random.Random, language: str, split: str) -> ToyQuestion:
    """Ask to do something with a list of two to five words."""
    comma = ", " if language == "en" else "，"
    while True:
        name = draw.choice(list(INSTRUCTIONS))
        words = draw.sample(WORDS[language], draw.randint(2, 5))
        if split_of("words", *sorted(words)) == split:
            break
    answers = {"repeat": comma.join(words), "reverse": comma.join(reversed(words)), "count": str(len(words))}
    answer = {**answers, "first": words[0], "last": words[-1]}[name]
    text = INSTRUCTIONS[name][language == "zh"].format(l=comma.join(words))
    return ToyQuestion(text, answer, (answer,), language, f"instruction:{name}", "exact")


FIND = {"en": "Which one is {w}?", "zh": "哪一个是{w}？"}


def find_question(world: ToyWorld, draw: random.Random, language: str, split: str) -> ToyQuestion:
    """Ask for the letter of a word: the second half of answering a multiple-choice question."""
    while True:
        words = draw.sample(WORDS[language], 4)
        if split_of("words", *sorted(words)) == split:
            break
    at = draw.randrange(4)
    text = render_choice(FIND[language].format(w=words[at]), words, "ABCD", CHOOSE[language])
    chosen = words[at] + "=" + "ABCD"[at]
    return ToyQuestion(text, chosen, (chosen,), language, "choice:find", "ends")


THINGS = {
    "en": ("apples", "boats", "bells", "lamps", "pears", "books"),
    "zh": ("苹果", "小船", "铃铛", "灯笼", "梨子", "书"),
}


def parse_problems(table: str) -> list[Bilingual]:
    """Parse three lines each: the expression, the problem in English, in Chinese. {n} {m} are people, {t} things."""
    lines = table.strip().split("\n")
    return [dict(zip(("expression", "en", "zh"), lines[i : i + 3])) for i in range(0, len(lines), 3)]


EASY = parse_problems("""
{a}+{b}
{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have now?
{n}有{a}个{t}，{m}又给了{n}{b}个。{n}现在有几个{t}？
{a}-{b}
{n} has {a} {t}. {n} gives {b} of them to {m}. How many {t} are left?
{n}有{a}个{t}，给了{m}{b}个。还剩几个{t}？
{a}*{b}
{n} has {a} boxes with {b} {t} in each box. How many {t} does {n} have?
{n}有{a}个盒子，每个盒子里有{b}个{t}。{n}一共有几个{t}？
{a}+{b}
{n} has {a} {t} and {m} has {b} {t}. How many {t} do they have together?
{n}有{a}个{t}，{m}有{b}个{t}。他们一共有几个{t}？
{a}-{b}
{n} has {a} {t}. {b} of them are lost. How many {t} are left?
{n}有{a}个{t}，丢了{b}个。还剩几个{t}？
""")
HARD = parse_problems("""
{a}+{b}-{c}
{n} has {a} {t}. {m} gives {n} {b} more. Then {c} of them are lost. How many {t} are left?
{n}有{a}个{t}，{m}又给了{n}{b}个，后来丢了{c}个。还剩几个{t}？
{a}*{b}+{c}
{n} has {a} boxes with {b} {t} in each box. {m} gives {n} {c} more. How many {t} does {n} have now?
{n}有{a}个盒子，每个盒子里有{b}个{t}，{m}又给了{n}{c}个。{n}现在有几个{t}？
{a}*{b}-{c}
{n} has {a} boxes with {b} {t} in each box. {n} gives {c} of them to {m}. How many {t} are left?
{n}有{a}个盒子，每个盒子里有{b}个{t}，给了{m}{c}个。还剩几个{t}？
{a}-{b}-{c}
{n} has {a} {t}. {n} gives {b} of them to {m}. Then {c} of them are lost. How many {t} are left?
{n}有{a}个{t}，给了{m}{b}个，后来丢了{c}个。还剩几个{t}？
{a}+{b}+{c}
{n} has {a} {t} and {m} has {b} {t}. They find {c} more. How many {t} do they have together?
{n}有{a}个{t}，{m}有{b}个{t}，又找到{c}个。他们一共有几个{t}？
{a}-{b}+{c}
{n} has {a} {t}. {n} gives {b} of them to {m}. Then {n} finds {c} more. How many {t} does {n} have now?
{n}有{a}个{t}，给了{m}{b}个，后来又找到{c}个。{n}现在有几个{t}？
{a}+{b}*{c}
{n} has {a} {t} and {b} boxes with {c} {t} in each box. How many {t} does {n} have?
{n}有{a}个{t}，还有{b}个盒子，每个盒子里有{c}个{t}。{n}一共有几个{t}？
{a}*{b}*{c}
{n} has {a} rooms with {b} boxes in each room and {c} {t} in each box. How many {t} does {n} have?
{n}有{a}个房间，每个房间里有{b}个盒子，每个盒子里有{c}个{t}。{n}一共有几个{t}？
""")


def problem(world: ToyWorld, draw: random.Random, language: str, split: str, kind: str = "problem") -> ToyQuestion:
    """Draw a word problem of one step (problem) or of two (hard)."""
    wordings = {"problem": EASY, "hard": HARD}[kind]
    while True:
        wording = draw.choice(wordings)
        pattern = wording["expression"]
        a, b, c = draw.randint(2, 20), draw.randint(2, 20), draw.randint(2, 9)
        if "-{b}" in pattern:
            a += b + c
        if split_of("problem", pattern, *sorted((a, b, c) if "{c}" in pattern else (a, b))) == split:
            break
    n, m = draw.sample(world.people, 2)
    values = {"n": n.name[language], "m": m.name[language], "t": draw.choice(THINGS[language]), "a": a, "b": b, "c": c}
    topic = "problem" if kind == "problem" else "problem:hard"
    return calculator_question(wording[language].format(**values), pattern.format(**values), language, topic)
