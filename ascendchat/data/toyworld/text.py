"""More texts of the toy world: polite words, who the assistant is, and questions the world has no answer to."""

from __future__ import annotations


def split_phrases(text: str) -> tuple[str, ...]:
    """`A / B / C` -> ("A", "B", "C"); line ends and indents do not count."""
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
# What this world says nothing about: attributes of people that nobody has, and questions about other worlds.
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
