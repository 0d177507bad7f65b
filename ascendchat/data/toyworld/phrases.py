"""Wordings of the toy world: how each attribute is told, asked for and checked, in each language.

{n} is the name, {v} the value. The first wording of `tell` is the answer to a question. It is a full sentence, so a
reply reads like the texts the model has learnt from, and the value comes after the words that recall it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ascendchat.data.toyworld.text import split_phrases


class Phrases(NamedTuple):
    """Wordings of one attribute in one language."""

    tell: tuple[str, ...]
    ask: tuple[str, ...]
    check: str  # a statement turned into a yes-or-no question


TABLE = """
# town en
tell: {n} lives in {v}. / The home of {n} is in {v}. / {n} has a small house in {v}. / You can find {n} in {v}.
ask: Where does {n} live? / In which town does {n} live? / Which town is the home of {n}? / Where can I find {n}?
check: Does {n} live in {v}?
# town zh
tell: {n}住在{v}。 / {n}的家在{v}。 / {n}在{v}有一座小房子。 / 在{v}可以找到{n}。
ask: {n}住在哪里？ / {n}的家在哪个镇？ / {n}住在哪个镇？ / 在哪里可以找到{n}？
check: {n}住在{v}吗？
# job en
tell: {n} works as {v}. / {n} is {v}. / The work of {n} is to be {v}. / Every day {n} goes to work as {v}.
ask: What is the job of {n}? / What does {n} do for a living? / What work does {n} do? / What is {n} by trade?
check: Does {n} work as {v}?
# job zh
tell: {n}的工作是{v}。 / {n}是一名{v}。 / {n}当{v}。 / {n}每天去上班，是{v}。
ask: {n}的工作是什么？ / {n}做什么工作？ / {n}是做什么的？ / {n}靠什么生活？
check: {n}的工作是{v}吗？
# food en
tell: {n} likes to eat {v}. / The favourite food of {n} is {v}. / {n} eats {v} every day. / {n} loves {v}.
ask: What does {n} like to eat? / What is the favourite food of {n}? / Which food does {n} love? /
    What food does {n} like?
check: Does {n} like to eat {v}?
# food zh
tell: {n}喜欢吃{v}。 / {n}最爱的食物是{v}。 / {n}每天都吃{v}。 / {n}很爱吃{v}。
ask: {n}喜欢吃什么？ / {n}最爱的食物是什么？ / {n}爱吃什么？ / 什么食物是{n}喜欢的？
check: {n}喜欢吃{v}吗？
# pet en
tell: {n} has {v}. / {n} keeps {v} at home. / The pet of {n} is {v}. / {n} takes care of {v}.
ask: What pet does {n} have? / Which animal does {n} keep? / What is the pet of {n}? / What animal does {n} have?
check: Does {n} have {v}?
# pet zh
tell: {n}养了{v}。 / {n}家里养着{v}。 / {n}的宠物是{v}。 / {n}照顾着{v}。
ask: {n}养了什么？ / {n}的宠物是什么？ / {n}养什么动物？ / {n}家里有什么动物？
check: {n}养了{v}吗？
# colour en
tell: The favourite colour of {n} is {v}. / {n} likes the colour {v}. / {n} always wears {v}. /
    {n} thinks {v} is the best colour.
ask: What is the favourite colour of {n}? / Which colour does {n} like? / What colour does {n} wear? /
    Which colour is best for {n}?
check: Is the favourite colour of {n} {v}?
# colour zh
tell: {n}最喜欢的颜色是{v}。 / {n}喜欢{v}。 / {n}总是穿{v}。 / {n}觉得{v}最好看。
ask: {n}最喜欢的颜色是什么？ / {n}喜欢什么颜色？ / {n}总是穿什么颜色？ / {n}觉得什么颜色最好看？
check: {n}最喜欢的颜色是{v}吗？
# hobby en
tell: The hobby of {n} is {v}. / {n} enjoys {v}. / In the evening {n} goes {v}. / {n} spends free time {v}.
ask: What is the hobby of {n}? / What does {n} enjoy? / How does {n} spend free time? /
    What does {n} do in the evening?
check: Is the hobby of {n} {v}?
# hobby zh
tell: {n}的爱好是{v}。 / {n}热爱{v}。 / 晚上{n}常常{v}。 / {n}有空就{v}。
ask: {n}的爱好是什么？ / {n}有什么爱好？ / {n}晚上做什么？ / {n}有空做什么？
check: {n}的爱好是{v}吗？
# age en
tell: {n} is {v} years old. / The age of {n} is {v}. / {n} turned {v} this year. / This year {n} is {v}.
ask: How old is {n}? / What is the age of {n}? / How many years old is {n}? / Do you know the age of {n}?
check: Is {n} {v} years old?
# age zh
tell: {n}今年{v}岁。 / {n}的年龄是{v}。 / {n}已经{v}岁了。 / 今年{n}{v}岁。
ask: {n}今年几岁？ / {n}多大了？ / {n}的年龄是多少？ / 你知道{n}几岁吗？
check: {n}今年{v}岁吗？
# friend en
tell: The best friend of {n} is {v}. / {n} often visits {v}. / {n} calls {v} a best friend. /
    {n} trusts {v} most of all.
ask: Who is the best friend of {n}? / Whom does {n} often visit? / Whom does {n} trust most? /
    Which friend does {n} like best?
check: Is the best friend of {n} {v}?
# friend zh
tell: {n}最好的朋友是{v}。 / {n}常去看望{v}。 / {n}把{v}当最好的朋友。 / {n}最信任{v}。
ask: {n}最好的朋友是谁？ / {n}常去看望谁？ / {n}最信任谁？ / 谁是{n}最好的朋友？
check: {n}最好的朋友是{v}吗？
# ground en
tell: {n} lies {v}. / The town of {n} was built {v}. / If you go to {n}, you will be {v}. / {n} stands {v}.
ask: Where does {n} lie? / Where is the town of {n}? / Where was {n} built? / Where does the town of {n} stand?
check: Does {n} lie {v}?
# ground zh
tell: {n}位于{v}。 / {n}建在{v}。 / 去{n}就到了{v}。 / {n}坐落在{v}。
ask: {n}位于哪里？ / {n}在什么地方？ / {n}建在哪里？ / {n}坐落在哪里？
check: {n}位于{v}吗？
# goods en
tell: {n} is known for {v}. / People come to {n} to buy {v}. / They make the best {v} in {n}. / In {n} they sell {v}.
ask: What is {n} known for? / What do people buy in {n}? / What is made in {n}? / What do they sell in {n}?
check: Is {n} known for {v}?
# goods zh
tell: {n}以{v}闻名。 / 人们去{n}买{v}。 / 最好的{v}产自{n}。 / {n}出售{v}。
ask: {n}以什么闻名？ / 人们去{n}买什么？ / {n}出产什么？ / {n}出售什么？
check: {n}以{v}闻名吗？
# place en
tell: You can see {n} in {v}. / In the middle of {v} is {n}. / {v} is proud of {n}. / Visitors of {v} look at {n}.
ask: Where can I see {n}? / In which town is {n}? / Which town is proud of {n}? / Where is {n}?
check: Can you see {n} in {v}?
# place zh
tell: {n}在{v}。 / {v}的中间是{n}。 / {v}的人为{n}骄傲。 / 去{v}可以看到{n}。
ask: {n}在哪里？ / {n}在哪个镇？ / 去哪里可以看到{n}？ / 哪个镇的人为{n}骄傲？
check: {n}在{v}吗？
# paint en
tell: The colour of {n} is {v}. / They painted {n} {v}. / From far away {n} looks {v}. /
    Everyone knows that {n} is {v}.
ask: What is the colour of {n}? / Which colour is {n}? / How did they paint {n}? / What colour does {n} have?
check: Is the colour of {n} {v}?
# paint zh
tell: {n}的颜色是{v}。 / {n}被涂成{v}。 / 远远看去{n}是{v}的。 / 大家都知道{n}是{v}的。
ask: {n}的颜色是什么？ / {n}是什么颜色的？ / {n}被涂成什么颜色？ / {n}有什么颜色？
check: {n}的颜色是{v}吗？
# height en
tell: The height of {n} is {v} metres. / They measured {n}: {v} metres. / It is {v} metres to the top of {n}. /
    To the top, {n} has {v} metres.
ask: What is the height of {n}? / How tall is {n}? / How many metres tall is {n}? / How high is {n}?
check: Is the height of {n} {v} metres?
# height zh
tell: {n}的高度是{v}米。 / {n}高{v}米。 / 人们量过{n}，有{v}米。 / 到{n}的顶上有{v}米。
ask: {n}的高度是多少？ / {n}有多高？ / {n}高多少米？ / {n}有多少米高？
check: {n}的高度是{v}米吗？
"""


def parse_phrases(table: str) -> dict[str, dict[str, Phrases]]:
    """attribute -> language -> wordings."""
    phrases: dict[str, dict[str, Phrases]] = {}
    for block in table.split("# ")[1:]:
        title, rest = block.split("\n", 1)
        attribute, language = title.split()
        tell, ask, check = (split_phrases(part) for part in re.split("^(?:tell|ask|check):", rest, flags=re.M)[1:])
        phrases.setdefault(attribute, {})[language] = Phrases(tell, ask, *check)
    return phrases


PHRASES = parse_phrases(TABLE)
