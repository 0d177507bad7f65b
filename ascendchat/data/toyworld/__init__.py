"""A small world in English and Chinese, made by code: texts, conversations, questions and problems, with no download.

    from ascendchat.data import toyworld
    toyworld.texts()                                 # what to train the tokenizer on
    toyworld.documents("train")                      # pretraining text
    toyworld.chats("train", kind="sft")              # conversations for data/chat.py
    toyworld.questions("test", language="zh")        # questions that training never saw; toyworld.correct(q, reply)
    toyworld.problems("train")                       # word problems of two steps, for RL

`ascendchat speedrun --recipe tiny-cpu` trains on it and is examined on it. Everything follows from a seed.

What is unseen: all facts are told in the pretraining text, but a fifth of them is never asked in training, two fifths
are asked in one language only, and of the rest one wording per language is kept back (world.asked); numbers, word
lists, strangers' names and the combinations of people with unknown things are dealt to the splits by their content.
"""

from __future__ import annotations

from ascendchat.data.toyworld.ask import Question, correct
from ascendchat.data.toyworld.stories import documents
from ascendchat.data.toyworld.talk import NAME, TOPICS, chats, problems, questions, texts
from ascendchat.data.toyworld.world import LANGUAGES, SPLITS, world

__all__ = [
    "LANGUAGES", "NAME", "SPLITS", "TOPICS", "Question", "chats", "correct", "documents", "problems",
    "questions", "texts", "world",
]  # fmt: skip
