"""How the toy world speaks: for every attribute and language the ways to tell it, the ways to ask for it, the answer.

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


PHRASES: dict[str, dict[str, Phrases]] = {
    "town": {
        "en": Phrases(
            ("{n} lives in {v}.", "The home of {n} is in {v}.", "{n} has a small house in {v}.", "You can find {n} in {v}."),
            ("Where does {n} live?", "In which town does {n} live?", "Which town is the home of {n}?", "Where can I find {n}?"),
            "Does {n} live in {v}?",
        ),
        "zh": Phrases(
            ("{n}住在{v}。", "{n}的家在{v}。", "{n}在{v}有一座小房子。", "在{v}可以找到{n}。"),
            ("{n}住在哪里？", "{n}的家在哪个镇？", "{n}住在哪个镇？", "在哪里可以找到{n}？"),
            "{n}住在{v}吗？",
        ),
    },
    "job": {
        "en": Phrases(
            ("{n} works as {v}.", "{n} is {v}.", "The work of {n} is to be {v}.", "Every day {n} goes to work as {v}."),
            ("What is the job of {n}?", "What does {n} do for a living?", "What work does {n} do?", "What is {n} by trade?"),
            "Does {n} work as {v}?",
        ),
        "zh": Phrases(
            ("{n}的工作是{v}。", "{n}是一名{v}。", "{n}当{v}。", "{n}每天去上班，是{v}。"),
            ("{n}的工作是什么？", "{n}做什么工作？", "{n}是做什么的？", "{n}靠什么生活？"),
            "{n}的工作是{v}吗？",
        ),
    },
    "food": {
        "en": Phrases(
            ("{n} likes to eat {v}.", "The favourite food of {n} is {v}.", "{n} eats {v} every day.", "{n} loves {v}."),
            ("What does {n} like to eat?", "What is the favourite food of {n}?", "Which food does {n} love?", "What food does {n} like?"),
            "Does {n} like to eat {v}?",
        ),
        "zh": Phrases(
            ("{n}喜欢吃{v}。", "{n}最爱的食物是{v}。", "{n}每天都吃{v}。", "{n}很爱吃{v}。"),
            ("{n}喜欢吃什么？", "{n}最爱的食物是什么？", "{n}爱吃什么？", "什么食物是{n}喜欢的？"),
            "{n}喜欢吃{v}吗？",
        ),
    },
    "pet": {
        "en": Phrases(
            ("{n} has {v}.", "{n} keeps {v} at home.", "The pet of {n} is {v}.", "{n} takes care of {v}."),
            ("What pet does {n} have?", "Which animal does {n} keep?", "What is the pet of {n}?", "What animal does {n} have?"),
            "Does {n} have {v}?",
        ),
        "zh": Phrases(
            ("{n}养了{v}。", "{n}家里养着{v}。", "{n}的宠物是{v}。", "{n}照顾着{v}。"),
            ("{n}养了什么？", "{n}的宠物是什么？", "{n}养什么动物？", "{n}家里有什么动物？"),
            "{n}养了{v}吗？",
        ),
    },
    "colour": {
        "en": Phrases(
            ("The favourite colour of {n} is {v}.", "{n} likes the colour {v}.", "{n} always wears {v}.", "{n} thinks {v} is the best colour."),
            ("What is the favourite colour of {n}?", "Which colour does {n} like?", "What colour does {n} wear?", "Which colour is best for {n}?"),
            "Is the favourite colour of {n} {v}?",
        ),
        "zh": Phrases(
            ("{n}最喜欢的颜色是{v}。", "{n}喜欢{v}。", "{n}总是穿{v}。", "{n}觉得{v}最好看。"),
            ("{n}最喜欢的颜色是什么？", "{n}喜欢什么颜色？", "{n}总是穿什么颜色？", "{n}觉得什么颜色最好看？"),
            "{n}最喜欢的颜色是{v}吗？",
        ),
    },
    "hobby": {
        "en": Phrases(
            ("The hobby of {n} is {v}.", "{n} enjoys {v}.", "In the evening {n} goes {v}.", "{n} spends free time {v}."),
            ("What is the hobby of {n}?", "What does {n} enjoy?", "How does {n} spend free time?", "What does {n} do in the evening?"),
            "Is the hobby of {n} {v}?",
        ),
        "zh": Phrases(
            ("{n}的爱好是{v}。", "{n}热爱{v}。", "晚上{n}常常{v}。", "{n}有空就{v}。"),
            ("{n}的爱好是什么？", "{n}有什么爱好？", "{n}晚上做什么？", "{n}有空做什么？"),
            "{n}的爱好是{v}吗？",
        ),
    },
    "age": {
        "en": Phrases(
            ("{n} is {v} years old.", "The age of {n} is {v}.", "{n} turned {v} this year.", "This year {n} is {v}."),
            ("How old is {n}?", "What is the age of {n}?", "How many years old is {n}?", "Do you know the age of {n}?"),
            "Is {n} {v} years old?",
        ),
        "zh": Phrases(
            ("{n}今年{v}岁。", "{n}的年龄是{v}。", "{n}已经{v}岁了。", "今年{n}{v}岁。"),
            ("{n}今年几岁？", "{n}多大了？", "{n}的年龄是多少？", "你知道{n}几岁吗？"),
            "{n}今年{v}岁吗？",
        ),
    },
    "friend": {
        "en": Phrases(
            ("The best friend of {n} is {v}.", "{n} often visits {v}.", "{n} calls {v} a best friend.", "{n} trusts {v} most of all."),
            ("Who is the best friend of {n}?", "Whom does {n} often visit?", "Whom does {n} trust most?", "Which friend does {n} like best?"),
            "Is the best friend of {n} {v}?",
        ),
        "zh": Phrases(
            ("{n}最好的朋友是{v}。", "{n}常去看望{v}。", "{n}把{v}当最好的朋友。", "{n}最信任{v}。"),
            ("{n}最好的朋友是谁？", "{n}常去看望谁？", "{n}最信任谁？", "谁是{n}最好的朋友？"),
            "{n}最好的朋友是{v}吗？",
        ),
    },
    "ground": {
        "en": Phrases(
            ("{n} lies {v}.", "The town of {n} was built {v}.", "If you go to {n}, you will be {v}.", "{n} stands {v}."),
            ("Where does {n} lie?", "Where is the town of {n}?", "Where was {n} built?", "Where does the town of {n} stand?"),
            "Does {n} lie {v}?",
        ),
        "zh": Phrases(
            ("{n}位于{v}。", "{n}建在{v}。", "去{n}就到了{v}。", "{n}坐落在{v}。"),
            ("{n}位于哪里？", "{n}在什么地方？", "{n}建在哪里？", "{n}坐落在哪里？"),
            "{n}位于{v}吗？",
        ),
    },
    "goods": {
        "en": Phrases(
            ("{n} is known for {v}.", "People come to {n} to buy {v}.", "They make the best {v} in {n}.", "In {n} they sell {v}."),
            ("What is {n} known for?", "What do people buy in {n}?", "What is made in {n}?", "What do they sell in {n}?"),
            "Is {n} known for {v}?",
        ),
        "zh": Phrases(
            ("{n}以{v}闻名。", "人们去{n}买{v}。", "最好的{v}产自{n}。", "{n}出售{v}。"),
            ("{n}以什么闻名？", "人们去{n}买什么？", "{n}出产什么？", "{n}出售什么？"),
            "{n}以{v}闻名吗？",
        ),
    },
    "place": {
        "en": Phrases(
            ("You can see {n} in {v}.", "In the middle of {v} is {n}.", "{v} is proud of {n}.", "Visitors of {v} look at {n}."),
            ("Where can I see {n}?", "In which town is {n}?", "Which town is proud of {n}?", "Where is {n}?"),
            "Can you see {n} in {v}?",
        ),
        "zh": Phrases(
            ("{n}在{v}。", "{v}的中间是{n}。", "{v}的人为{n}骄傲。", "去{v}可以看到{n}。"),
            ("{n}在哪里？", "{n}在哪个镇？", "去哪里可以看到{n}？", "哪个镇的人为{n}骄傲？"),
            "{n}在{v}吗？",
        ),
    },
    "paint": {
        "en": Phrases(
            ("The colour of {n} is {v}.", "They painted {n} {v}.", "From far away {n} looks {v}.", "Everyone knows that {n} is {v}."),
            ("What is the colour of {n}?", "Which colour is {n}?", "How did they paint {n}?", "What colour does {n} have?"),
            "Is the colour of {n} {v}?",
        ),
        "zh": Phrases(
            ("{n}的颜色是{v}。", "{n}被涂成{v}。", "远远看去{n}是{v}的。", "大家都知道{n}是{v}的。"),
            ("{n}的颜色是什么？", "{n}是什么颜色的？", "{n}被涂成什么颜色？", "{n}有什么颜色？"),
            "{n}的颜色是{v}吗？",
        ),
    },
    "height": {
        "en": Phrases(
            ("The height of {n} is {v} metres.", "They measured {n}: {v} metres.", "It is {v} metres to the top of {n}.", "To the top, {n} has {v} metres."),
            ("What is the height of {n}?", "How tall is {n}?", "How many metres tall is {n}?", "How high is {n}?"),
            "Is the height of {n} {v} metres?",
        ),
        "zh": Phrases(
            ("{n}的高度是{v}米。", "{n}高{v}米。", "人们量过{n}，有{v}米。", "到{n}的顶上有{v}米。"),
            ("{n}的高度是多少？", "{n}有多高？", "{n}高多少米？", "{n}有多少米高？"),
            "{n}的高度是{v}米吗？",
        ),
    },
}  # fmt: skip

# Before a question, to be polite or not: no change of meaning.
POLITE = {
    "en": ("{q}", "{q}", "{q}", "Hello! {q}", "Please tell me: {q}", "One more question. {q}"),
    "zh": ("{q}", "{q}", "{q}", "你好！{q}", "请告诉我：{q}", "再问一个问题。{q}"),
}
CHECKED = {
    "en": ("{a} So the answer is yes.", "{a} So the answer is no."),
    "zh": ("{a}所以答案是对。", "{a}所以答案是不对。"),
}
UNKNOWN = {"en": "I do not know.", "zh": "我不知道。"}
CHOOSE = {"en": "Choose one letter.", "zh": "选一个字母。"}
IDENTITY = {
    "en": (
        ("Who are you?", "What is your name?", "What should I call you?", "Tell me your name.", "What are you called?"),
        "I am {name}, a small assistant.",
    ),
    "zh": (
        ("你是谁？", "你叫什么名字？", "我该怎么称呼你？", "告诉我你的名字。", "你的名字是什么？"),
        "我是{name}，一个小助手。",
    ),
}
# What this world says nothing about: attributes of people that nobody has, and questions about other worlds.
MISSING = {
    "en": (
        "What is the phone number of {n}?", "What is the shoe size of {n}?", "Which car does {n} drive?",
        "When was {n} born?", "What is the favourite song of {n}?", "How much money does {n} have?",
        "Who is the mother of {n}?", "What did {n} dream last night?", "Which school did {n} go to?",
        "How heavy is {n}?",
    ),
    "zh": (
        "{n}的电话号码是多少？", "{n}穿多大的鞋？", "{n}开什么车？", "{n}的生日是哪天？", "{n}最喜欢的歌是什么？",
        "{n}有多少钱？", "{n}的妈妈是谁？", "{n}昨晚梦见了什么？", "{n}上过哪所学校？", "{n}有多重？",
    ),
}  # fmt: skip
ELSEWHERE = {
    "en": (
        "Who wrote Hamlet?", "What is the capital of France?", "How far is the moon?", "Who won the last World Cup?",
        "What is the price of gold?", "Who is the president?", "What is a black hole?", "When did the war end?",
        "How does a computer work?", "What is the meaning of life?", "Which film is the best?", "Who built the pyramids?",
        "How deep is the ocean?", "What is the weather tomorrow?", "Who discovered America?", "What is quantum physics?",
        "How many stars are there?", "What language do they speak in Brazil?", "Who invented the telephone?",
        "What is the fastest animal?", "When was Rome founded?", "What is DNA?", "Who is the richest man?",
        "How do I cook a turkey?", "What is the largest country?", "Who painted the Mona Lisa?", "What is the stock market?",
        "How do aeroplanes fly?", "What time is it?", "Which planet is the hottest?",
    ),
    "zh": (
        "红楼梦是谁写的？", "法国的首都是哪里？", "月亮有多远？", "上届世界杯谁赢了？", "黄金的价格是多少？", "总统是谁？",
        "什么是黑洞？", "战争什么时候结束的？", "电脑是怎么工作的？", "人生的意义是什么？", "哪部电影最好？",
        "金字塔是谁建的？", "海洋有多深？", "明天天气怎么样？", "谁发现了美洲？", "什么是量子物理？", "天上有多少星星？",
        "巴西人说什么语言？", "电话是谁发明的？", "跑得最快的动物是什么？", "罗马是什么时候建立的？", "什么是基因？",
        "世界首富是谁？", "怎么做烤鸭？", "最大的国家是哪个？", "蒙娜丽莎是谁画的？", "什么是股票？", "飞机为什么会飞？",
        "现在几点了？", "哪颗行星最热？",
    ),
}  # fmt: skip
# Sounds of strangers' names.
SOUNDS = {
    "en": (
        "Al Bra Cor Dan El Fre Gar Hil Is Jor Kas Lo Mir Ne Or Pa Qui Ral Ser Tar Ul Vin Wal Xan Yor Zel".split(),
        "a bert da den fia gar ina kin la lon ma mond na nor ra rik sa sten to vin wen za".split(),
    ),
    "zh": (
        list("阿巴查丹埃弗古哈伊乔卡洛米尼帕奇拉塞塔乌维沃谢雅泽"),
        list("贝德顿非格金兰隆曼蒙娜诺克森斯坦托文雯扎宁恩尔达"),
    ),
}
