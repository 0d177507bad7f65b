"""Config of learning from pairs of replies: `finetune --stage dpo|orpo|simpo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config import option
from ascendchat.config.train import ChatTrainConfig


@dataclass(frozen=True)
class PreferenceOptions:
    """What the losses on pairs take; the names are LLaMA-Factory's."""

    pref_beta: float | None = option(None, also=("dpo_beta", "orpo_beta", "simpo_beta"), above=0, most=1e3)
    "of a loss on pairs: how much a difference between the replies counts; by default 0.1, simpo: 2"
    pref_loss: Literal["sigmoid", "orpo", "simpo"] = "sigmoid"
    "with --stage dpo: another loss on pairs; --stage orpo and --stage simpo say the same"
    label_smoothing: float = option(0.0, also=("dpo_label_smoothing",), least=0, below=0.5)
    "of dpo and simpo: the chance that a pair is the wrong way round"
    simpo_gamma: float = option(0.5, least=0, most=1e3)
    "of simpo: how much the better reply has to win by"
    pref_ftx: float = option(0.0, least=0, most=1e3)
    "weight of the loss of SFT on the better reply, added to that on the pair"


@dataclass(frozen=True)
class PreferenceConfig(PreferenceOptions, ChatTrainConfig):
    """Learn from pairs of a better and a worse reply."""

    start: str = option("", also=("model", "model_name_or_path"))
    "model to start from: folder, GGUF file, run or checkpoint"
    data: tuple[str, ...] = option((), also=("dataset",))
    "pairs, as NAME or NAME=WEIGHT: files and folders in any usual form, or names of --dataset-dir"
    validation: tuple[str, ...] = option((), also=("eval_dataset",))
    "pairs to validate on; by default a part of --data that is not trained on"
    val_size: float = option(0.02, least=0, most=1e9)
    "that part: a share, or from 1 on a number of pairs, about; 0: none"
    max_samples: int | None = option(None, least=1, most=1e12)
    "pairs of each entry of --data at most"
    packing: bool = True
    "several pairs in two rows, which do not see each other; or one pair"
    stage: Literal["sft", "dpo", "orpo", "simpo"] = "dpo"
    "the loss on pairs"
    learning_rate: float | None = option(None, also=("lr",), above=0, most=1)
    "of a Hugging Face model; by default 1e-6, of adapters and of orpo 5e-6"
    lr_multiplier: float = option(0.05, above=0, most=1e3)
    "factor on every learning rate of pretraining, for our own models"
    save_every: int = option(100, also=("save_steps",), least=-1, most=1e9)
    "steps between checkpoints; 0 and -1: only at the end"
    eval_every: int = option(100, also=("eval_steps",), least=-1, most=1e9)
    "steps between validations; 0: only at the end, -1: never"
