"""Config of learning from pairs of replies: `finetune --stage dpo|orpo|simpo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config import option


@dataclass(frozen=True)
class PreferenceOptions:
    """What the losses on pairs take; the names are LLaMA-Factory's."""

    pref_beta: float | None = option(None, also=("dpo_beta", "orpo_beta", "simpo_beta"), above=0, most=1e3)
    "of a loss on pairs: how much a difference between the replies counts; by default 0.1, simpo: 2"
    pref_loss: Literal["sigmoid", "orpo", "simpo"] = "sigmoid"
    "with --stage dpo: another loss on pairs; --stage orpo and --stage simpo say the same"
    label_smoothing: float = option(0.0, also=("dpo_label_smoothing",), least=0, below=0.5)
    "of dpo and simpo: the chance that a pair is the wrong way round"
    simpo_gamma: float | None = option(None, least=0, most=1e3)
    "of simpo: how much the better reply has to win by; by default 0.5"
    pref_ftx: float = option(0.0, least=0, most=1e3)
    "weight of the loss of SFT on the better reply, added to that on the pair"
