"""The training stages of a run, in their order: the one table of their names. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

StageName = Literal["base", "mid", "sft", "hf", "rl"]  # hf: `ascendchat finetune`


class StageFacts(NamedTuple):
    """What other modules must know about a stage."""

    starts_from: tuple[StageName, ...]  # earlier stages; the first one that has a checkpoint is used
    chats: bool  # the model has been trained on conversations


STAGES: dict[str, StageFacts] = {
    "base": StageFacts(starts_from=(), chats=False),
    "mid": StageFacts(starts_from=("base",), chats=True),
    "sft": StageFacts(starts_from=("mid", "base"), chats=True),
    "hf": StageFacts(starts_from=(), chats=True),
    "rl": StageFacts(starts_from=("sft", "mid", "base"), chats=True),
}
