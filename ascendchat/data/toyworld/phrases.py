"""How the toy world tells and asks: for every attribute and language some ways to tell it, to ask for it, to doubt it.

{n} is the name, {v} the value. The first way of telling is the answer to a question: a full sentence, so that a reply
reads like the texts the model has learnt from, and the value comes after the words that call it to mind.
"""

from __future__ import annotations

from typing import NamedTuple


class Phrases(NamedTuple):
    """Wordings of one attribute in one language."""

    tell: tuple[str, ...]
    ask: tuple[str, ...]
    check: str  # a statement turned into a yes-or-no question


TABLE = """
# town en
tell: {n} lives in {v}.
tell: The home of {n} is in {v}.
tell: {n} has a small house in {v}.
tell: You can find {n} in {v}.
ask: Where does {n} live?
ask: In which town does {n} live?
ask: Which town is the home of {n}?
ask: Where can I find {n}?
check: Does {n} live in {v}?
# town zh
tell: {n}住在{v}。
tell: {n}的家在{v}。
tell: {n}在{v}有一座小房子。
tell: 在{v}可以找到{n}。
ask: {n}住在哪里？
ask: {n}的家在哪个镇？
ask: {n}住在哪个镇？
ask: 在哪里可以找到{n}？
check: {n}住在{v}吗？
# job en
tell: {n} works as {v}.
tell: {n} is {v}.
tell: The work of {n} is to be {v}.
tell: Every day {n} goes to work as {v}.
ask: What is the job of {n}?
ask: What does {n} do for a living?
ask: What work does {n} do?
ask: What is {n} by trade?
check: Does {n} work as {v}?
# job zh
tell: {n}的工作是{v}。
tell: {n}是一名{v}。
tell: {n}当{v}。
tell: {n}每天去上班，是{v}。
ask: {n}的工作是什么？
ask: {n}做什么工作？
ask: {n}是做什么的？
ask: {n}靠什么生活？
check: {n}的工作是{v}吗？
# food en
tell: {n} likes to eat {v}.
tell: The favourite food of {n} is {v}.
tell: {n} eats {v} every day.
tell: {n} loves {v}.
ask: What does {n} like to eat?
ask: What is the favourite food of {n}?
ask: Which food does {n} love?
ask: What food does {n} like?
check: Does {n} like to eat {v}?
# food zh
tell: {n}喜欢吃{v}。
tell: {n}最爱的食物是{v}。
tell: {n}每天都吃{v}。
tell: {n}很爱吃{v}。
ask: {n}喜欢吃什么？
ask: {n}最爱的食物是什么？
ask: {n}爱吃什么？
ask: 什么食物是{n}喜欢的？
check: {n}喜欢吃{v}吗？
# pet en
tell: {n} has {v}.
tell: {n} keeps {v} at home.
tell: The pet of {n} is {v}.
tell: {n} takes care of {v}.
ask: What pet does {n} have?
ask: Which animal does {n} keep?
ask: What is the pet of {n}?
ask: What animal does {n} have?
check: Does {n} have {v}?
# pet zh
tell: {n}养了{v}。
tell: {n}家里养着{v}。
tell: {n}的宠物是{v}。
tell: {n}照顾着{v}。
ask: {n}养了什么？
ask: {n}的宠物是什么？
ask: {n}养什么动物？
ask: {n}家里有什么动物？
check: {n}养了{v}吗？
# colour en
tell: The favourite colour of {n} is {v}.
tell: {n} likes the colour {v}.
tell: {n} always wears {v}.
tell: {n} thinks {v} is the best colour.
ask: What is the favourite colour of {n}?
ask: Which colour does {n} like?
ask: What colour does {n} wear?
ask: Which colour is best for {n}?
check: Is the favourite colour of {n} {v}?
# colour zh
tell: {n}最喜欢的颜色是{v}。
tell: {n}喜欢{v}。
tell: {n}总是穿{v}。
tell: {n}觉得{v}最好看。
ask: {n}最喜欢的颜色是什么？
ask: {n}喜欢什么颜色？
ask: {n}总是穿什么颜色？
ask: {n}觉得什么颜色最好看？
check: {n}最喜欢的颜色是{v}吗？
# hobby en
tell: The hobby of {n} is {v}.
tell: {n} enjoys {v}.
tell: In the evening {n} goes {v}.
tell: {n} spends free time {v}.
ask: What is the hobby of {n}?
ask: What does {n} enjoy?
ask: How does {n} spend free time?
ask: What does {n} do in the evening?
check: Is the hobby of {n} {v}?
# hobby zh
tell: {n}的爱好是{v}。
tell: {n}热爱{v}。
tell: 晚上{n}常常{v}。
tell: {n}有空就{v}。
ask: {n}的爱好是什么？
ask: {n}有什么爱好？
ask: {n}晚上做什么？
ask: {n}有空做什么？
check: {n}的爱好是{v}吗？
# age en
tell: {n} is {v} years old.
tell: The age of {n} is {v}.
tell: {n} turned {v} this year.
tell: This year {n} is {v}.
ask: How old is {n}?
ask: What is the age of {n}?
ask: How many years old is {n}?
ask: Do you know the age of {n}?
check: Is {n} {v} years old?
# age zh
tell: {n}今年{v}岁。
tell: {n}的年龄是{v}。
tell: {n}已经{v}岁了。
tell: 今年{n}{v}岁。
ask: {n}今年几岁？
ask: {n}多大了？
ask: {n}的年龄是多少？
ask: 你知道{n}几岁吗？
check: {n}今年{v}岁吗？
# friend en
tell: The best friend of {n} is {v}.
tell: {n} often visits {v}.
tell: {n} calls {v} a best friend.
tell: {n} trusts {v} most of all.
ask: Who is the best friend of {n}?
ask: Whom does {n} often visit?
ask: Whom does {n} trust most?
ask: Which friend does {n} like best?
check: Is the best friend of {n} {v}?
# friend zh
tell: {n}最好的朋友是{v}。
tell: {n}常去看望{v}。
tell: {n}把{v}当最好的朋友。
tell: {n}最信任{v}。
ask: {n}最好的朋友是谁？
ask: {n}常去看望谁？
ask: {n}最信任谁？
ask: 谁是{n}最好的朋友？
check: {n}最好的朋友是{v}吗？
# ground en
tell: {n} lies {v}.
tell: The town of {n} was built {v}.
tell: If you go to {n}, you will be {v}.
tell: {n} stands {v}.
ask: Where does {n} lie?
ask: Where is the town of {n}?
ask: Where was {n} built?
ask: Where does the town of {n} stand?
check: Does {n} lie {v}?
# ground zh
tell: {n}位于{v}。
tell: {n}建在{v}。
tell: 去{n}就到了{v}。
tell: {n}坐落在{v}。
ask: {n}位于哪里？
ask: {n}在什么地方？
ask: {n}建在哪里？
ask: {n}坐落在哪里？
check: {n}位于{v}吗？
# goods en
tell: {n} is known for {v}.
tell: People come to {n} to buy {v}.
tell: They make the best {v} in {n}.
tell: In {n} they sell {v}.
ask: What is {n} known for?
ask: What do people buy in {n}?
ask: What is made in {n}?
ask: What do they sell in {n}?
check: Is {n} known for {v}?
# goods zh
tell: {n}以{v}闻名。
tell: 人们去{n}买{v}。
tell: 最好的{v}产自{n}。
tell: {n}出售{v}。
ask: {n}以什么闻名？
ask: 人们去{n}买什么？
ask: {n}出产什么？
ask: {n}出售什么？
check: {n}以{v}闻名吗？
# place en
tell: You can see {n} in {v}.
tell: In the middle of {v} is {n}.
tell: {v} is proud of {n}.
tell: Visitors of {v} look at {n}.
ask: Where can I see {n}?
ask: In which town is {n}?
ask: Which town is proud of {n}?
ask: Where is {n}?
check: Can you see {n} in {v}?
# place zh
tell: {n}在{v}。
tell: {v}的中间是{n}。
tell: {v}的人为{n}骄傲。
tell: 去{v}可以看到{n}。
ask: {n}在哪里？
ask: {n}在哪个镇？
ask: 去哪里可以看到{n}？
ask: 哪个镇的人为{n}骄傲？
check: {n}在{v}吗？
# paint en
tell: The colour of {n} is {v}.
tell: They painted {n} {v}.
tell: From far away {n} looks {v}.
tell: Everyone knows that {n} is {v}.
ask: What is the colour of {n}?
ask: Which colour is {n}?
ask: How did they paint {n}?
ask: What colour does {n} have?
check: Is the colour of {n} {v}?
# paint zh
tell: {n}的颜色是{v}。
tell: {n}被涂成{v}。
tell: 远远看去{n}是{v}的。
tell: 大家都知道{n}是{v}的。
ask: {n}的颜色是什么？
ask: {n}是什么颜色的？
ask: {n}被涂成什么颜色？
ask: {n}有什么颜色？
check: {n}的颜色是{v}吗？
# height en
tell: The height of {n} is {v} metres.
tell: They measured {n}: {v} metres.
tell: It is {v} metres to the top of {n}.
tell: To the top, {n} has {v} metres.
ask: What is the height of {n}?
ask: How tall is {n}?
ask: How many metres tall is {n}?
ask: How high is {n}?
check: Is the height of {n} {v} metres?
# height zh
tell: {n}的高度是{v}米。
tell: {n}高{v}米。
tell: 人们量过{n}，有{v}米。
tell: 到{n}的顶上有{v}米。
ask: {n}的高度是多少？
ask: {n}有多高？
ask: {n}高多少米？
ask: {n}有多少米高？
check: {n}的高度是{v}米吗？
"""


def parse_phrases(table: str) -> dict[str, dict[str, Phrases]]:
    """attribute -> language -> wordings."""
    phrases: dict[str, dict[str, Phrases]] = {}
    for block in table.split("# ")[1:]:
        title, *lines = block.strip().split("\n")
        attribute, language = title.split()
        words = {
            kind: tuple(line[len(kind) + 2 :] for line in lines if line.startswith(f"{kind}: "))
            for kind in ("tell", "ask", "check")
        }
        phrases.setdefault(attribute, {})[language] = Phrases(words["tell"], words["ask"], words["check"][0])
    return phrases


PHRASES = parse_phrases(TABLE)
