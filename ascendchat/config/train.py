"""Configs of the training commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config import option
from ascendchat.config.commands import DeviceConfig


@dataclass(frozen=True)
class TrainConfig(DeviceConfig):
    """What all training stages have in common."""

    run: str = option("", also=("run_name",))  # plain torchrun takes --run for its own --run-path
    "name of the run; its folder holds metrics, samples and checkpoints; by default d and the depth"
    resume: Literal["auto", "never"] = "auto"
    "auto continues from the last checkpoint of the run if there is one; never starts anew"
    device_batch_size: int | None = None
    "rows per device and micro-batch; by default the most that fit"
    total_batch_size: int | None = None
    "tokens per optimizer step over all devices; by default it follows the horizon"
    gradient_accumulation_steps: int | None = None
    "micro-batches per step; checked against the total batch, which decides when both are given"
    num_iterations: int | None = option(None, also=("steps",))
    "optimizer steps; by default they follow from the horizon"
    eval_every: int = 250
    "steps between validations; 0: only at the end"
    save_every: int = 500
    "steps between checkpoints; 0: only at the end"
    sample_every: int = 1000
    "steps between samples of the model's text; 0: none"
    keep: int = 2
    "checkpoints to keep, besides the best"
    log_every: int = 10
    "steps between lines when the output is not a terminal"
    seed: int = 0
    "seed of the initial weights and of the order of the data"
    attention: str | None = None
    "attention kernel by name; by default the best that runs here"
    activation_checkpointing: bool = False
    "recompute activations in the backward pass: less memory, about a quarter slower"
    fp8: bool = False
    "8-bit matrix products where the chip has them; ignored with a notice elsewhere"
    compile: bool | None = None
    "torch.compile on or off; by default on where it is sound"
    track: tuple[Literal["tensorboard", "swanlab", "wandb"], ...] = ()
    "trackers that also receive the metrics"


@dataclass(frozen=True)
class BaseConfig(TrainConfig):
    """Pretrain a model from raw text. One dial, --depth, sets width, heads, batch, learning rates and horizon."""

    depth: int = 20
    "number of layers"
    data: tuple[str, ...] = option(())
    "prepared corpora, as FOLDER or FOLDER=WEIGHT; by default the embedded one"
    tokenizer: str = ""
    "folder of the tokenizer that prepared the data; by default that of $ASCENDCHAT_HOME"
    max_seq_len: int = 2048
    "tokens per row"
    window_pattern: str = "L"
    "attention windows, repeated over the layers: S sees a quarter of the row, L all of it"
    dim: int | None = None
    "width; by default 64 per layer"
    head_dim: int | None = None
    "channels per head; by default 128, less in a narrow model"
    kv_heads: int | None = option(None, also=("n_kv_head",))
    "key-value heads; fewer than heads is grouped-query attention"
    tokens: int | None = None
    "horizon in tokens; by default target_param_data_ratio per scaling parameter"
    minutes: float | None = None
    "horizon in minutes instead: the speed is measured first, then steps and batch follow"
    target_param_data_ratio: float = 12.0
    "horizon in tokens per scaling parameter"
    lr_multiplier: float = 1.0
    "factor on every learning rate; the rates themselves follow width and batch"
    weight_decay: float | None = None
    "of the matrices, as of a run of depth 12 with its own batch and horizon; by default 0.28, at most 2 % per step"
    eval_tokens: int | None = None
    "validation tokens; by default the whole split up to ten million"


@dataclass(frozen=True)
class ChatTrainConfig(TrainConfig):
    """What mid-training and SFT have in common."""

    start: str = option("", also=("model_tag",))
    "run or checkpoint folder to start from; by default the last earlier stage of --run, or of the newest run"
    data: tuple[str, ...] = ("toyworld",)
    "mixture, as NAME or NAME=WEIGHT: toyworld, tasks (gsm8k, smoltalk, ...), files of conversations, prepared corpora"
    source: str = ""
    "folder with local copies of the tasks' sets; evaluation questions found in the mixture are reported"
    tokenizer: str = ""
    "folder of the tokenizer; by default the one the model was trained with"
    max_seq_len: int | None = None
    "tokens per row; by default that of the model"
    epochs: float = 1.0
    "how often to read the conversations"
    target_examples_per_step: int | None = None
    "rows of conversations per step, instead of --total-batch-size"
    lr_multiplier: float = 1.0
    "factor on every learning rate of pretraining"
    warm_start: bool = False
    "also take over the moments of the optimizer"


@dataclass(frozen=True)
class MidConfig(ChatTrainConfig):
    """Teach a base model the form of conversations, tools and choices, mixed with text."""


@dataclass(frozen=True)
class SftConfig(ChatTrainConfig):
    """Fine-tune on conversations; the loss is on the replies only."""

    lr_multiplier: float = 0.5
    "factor on every learning rate of pretraining"


@dataclass(frozen=True)
class BenchTrainConfig(TrainConfig):
    """Time real training steps on random tokens; the last line is one JSON object."""

    depth: int = 12
    "number of layers"
    max_seq_len: int = 2048
    "tokens per row"
    vocab_size: int = 32768
    "size of the vocabulary"
    window_pattern: str = "L"
    "attention windows: S sees a quarter of the row, L all of it"
    dim: int | None = None
    "width; by default 64 per layer"
    head_dim: int | None = None
    "channels per head"
    steps_to_time: int = 10
    "optimizer steps to time, after two that warm up"
