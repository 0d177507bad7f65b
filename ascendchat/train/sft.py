"""`ascendchat sft --run demo`: supervised fine-tuning of a mid-trained (or base) model on conversations."""

from __future__ import annotations

from ascendchat.config.train import SftConfig
from ascendchat.train.chat import run_stage


def run(config: SftConfig) -> int:
    """The command."""
    return run_stage(config, "sft")
