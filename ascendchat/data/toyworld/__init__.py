"""A small world in English and Chinese, made by code: texts, conversations, questions and problems, with no download.

    from ascendchat.data import toyworld
    toyworld.texts()                                 # what to train the tokenizer on
    toyworld.documents("train")                      # pretraining text
    toyworld.chats("train", kind="sft")              # conversations for data/chat/render.py
    toyworld.questions("test")                       # questions that training never saw; toyworld.correct(q, reply)
    toyworld.problems("train")                       # word problems of two steps, for RL

`ascendchat speedrun --recipe tiny-cpu` trains on it and is evaluated on it. Everything follows from a seed.

Held-out questions: the pretraining text tells all facts, but training never asks for a fifth of them, asks for two
fifths in one language only, and for the rest in all wordings but one per language (world.asking_split). Numbers,
word lists, strangers' names and the pairs of a person and an unknown thing are given to the splits by a hash.
"""

from __future__ import annotations

from ascendchat.data.toyworld.ask import ToyQuestion, correct
from ascendchat.data.toyworld.conversations import TOPICS, chats, problems, questions, texts
from ascendchat.data.toyworld.texts import ASSISTANT_NAME, documents
from ascendchat.data.toyworld.world import LANGUAGES

__all__ = [
    "ASSISTANT_NAME",
    "LANGUAGES",
    "TOPICS",
    "ToyQuestion",
    "chats",
    "correct",
    "documents",
    "problems",
    "questions",
    "texts",
]
