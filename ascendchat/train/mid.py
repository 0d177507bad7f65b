"""`ascendchat mid --run demo`: teach a base model the form of conversations, tools and choices (train/chat.py)."""

from __future__ import annotations

from ascendchat.config.train import MidConfig
from ascendchat.train.chat import run_stage


def run(config: MidConfig) -> int:
    """The command."""
    return run_stage(config, "mid")
