"""Configs of the training commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ascendchat.config.commands import DeviceConfig
from ascendchat.config.flags import option

# The training stages of a run, in their order: the one table of their names. No torch.

StageName = Literal["base", "mid", "sft", "hf", "rl"]  # hf: `ascendchat finetune`


# The mixtures of nanochat, but for its spelling exercises: a set that is named twice is read twice.
PUBLISHED = {
    "mid": ("smoltalk", "mmlu", "gsm8k", "identity", "identity"),
    "sft": ("smoltalk", *("mmlu",) * 3, *("gsm8k",) * 4, "identity", "identity"),
}

USUAL_DEPTH, USUAL_ROW = 20, 2048  # of `base`


@dataclass(frozen=True)
class StepConfig(DeviceConfig):
    """Settings of a training step, in a run (TrainConfig) or timed alone (`bench train`)."""

    "# Batch and memory"
    device_batch_size: int | None = option(None, least=1, most=1e6)
    "rows per device and micro-batch; by default the most that fit"
    activation_checkpointing: bool = False
    "recompute activations in the backward pass: less memory, about a quarter slower"

    "# Computation"
    seed: int = option(0, least=0, most=1e18)
    "seed of the initial weights and of the order of the data"
    attention: str | None = None
    "attention kernel by name; by default the best that runs here"
    attend: Literal["row", "document"] | None = None
    """what a token attends to: everything before it in its row, or only its own document or conversation; by default as
    in the run that is resumed, else row (mid, sft: document)"""
    fp8: bool = False
    "8-bit matrix products where the chip has them; ignored with a notice elsewhere"
    compile: bool | None = None
    "torch.compile on or off; by default on where it is sound"


@dataclass(frozen=True)
class TrainConfig(StepConfig):
    """Settings of every training command."""

    "# Run"
    run: str = option("", also=("run_name",))  # plain torchrun takes --run for its own --run-path
    "name of the run; its folder holds settings, metrics and checkpoints"
    resume: Literal["auto", "never"] = "auto"
    "auto continues from the last checkpoint of the run if there is one; never starts anew"
    num_iterations: int | None = option(None, also=("steps",), least=1, most=1e9)
    "optimizer steps; by default they follow from the horizon"

    "# Optimization"
    lr_multiplier: float = option(1.0, above=0, most=1e3)
    "factor on every learning rate; the rates themselves follow width and batch"
    matrix_lr: float | None = option(None, above=0, most=1e3)
    "learning rate of matrices (Muon) and gates at 2^19 tokens per step, scaled to the batch like all; by default 0.02"
    warmup_steps: int | None = option(None, least=0, most=1e9)
    "steps in which the learning rates rise; by default 40 (mid, sft: a tenth of the run, at most 20)"
    warmup_ratio: float | None = option(None, least=0, most=1)
    "warm-up as a share of the run, instead of --warmup-steps"
    final_lr_frac: float | None = option(None, least=0, most=1)
    "what is left of the learning rates at the end; by default 0.05 (mid, sft: 0)"

    "# Batch and memory"
    gradient_accumulation_steps: int | None = option(None, least=1, most=1e6)
    "micro-batches per step; with --total-batch-size too, the two must agree"

    "# Validation, checkpoints and logging"
    eval_every: int = option(250, least=-1, most=1e9)
    "steps between validations; 0: only at the end, -1: never"
    sample_every: int = option(1000, least=-1, most=1e9)
    "steps between samples of the model's text, and at the end; 0 and -1: none"
    save_every: int = option(500, least=-1, most=1e9)
    "steps between checkpoints; 0 and -1: only at the end"
    keep: int = option(2, least=1, most=1e6)
    "checkpoints to keep, besides the best"
    log_every: int = option(10, least=1, most=1e9)
    "steps between lines when the output is not a terminal"
    track: tuple[Literal["tensorboard", "swanlab", "wandb"], ...] = ()
    "trackers that also receive the metrics"
    profile: int = option(0, least=0, most=1e4)
    "steps to trace with the profiler, after three that warm up: a trace and a table in the run folder"


@dataclass(frozen=True)
class OwnModelConfig(TrainConfig):
    """Settings of the commands that train models of our own: base, mid, sft and rl."""

    "# Optimization"
    embedding_lr: float | None = option(None, above=0, most=1e3)
    "learning rate of the embedding (value embeddings: half) at 2^19 tokens per step and width 768; by default 0.3"
    unembedding_lr: float | None = option(None, above=0, most=1e3)
    "learning rate of the head at 2^19 tokens per step and width 768; by default 0.008"
    scalar_lr: float | None = option(None, above=0, most=1e3)
    """learning rate of the weights of the first embedding at 2^19 tokens per step; of the residual: 1 % of it; by
    default 0.5"""
    warmdown_ratio: float | None = option(None, least=0, most=1)
    "share of the run in which the learning rates fall; by default 0.65 (mid: 1, sft: 0.5)"


@dataclass(frozen=True)
class BaseConfig(OwnModelConfig):
    """Pretrain a model from raw text. One dial, --depth, sets width, heads, batch, learning rates and horizon."""

    "# Model and data"
    depth: int | None = option(None, least=1, most=1000)
    "number of layers; by default 20; with --minutes the most for which time and text are enough"
    data: tuple[str, ...] = option(())
    """prepared corpora, as FOLDER or FOLDER=WEIGHT, in an object store as s3://BUCKET/FOLDER, and toyworld, the
    embedded one; by default $ASCENDCHAT_HOME/data/prepared, else (tiny models) toyworld"""
    tokenizer: str = ""
    "folder of the tokenizer that prepared the data; by default that of $ASCENDCHAT_HOME"
    max_seq_len: int | None = option(None, least=16, most=1e6)
    "tokens per row; by default 2048; with --minutes fewer where there is time for few rows only"
    window_pattern: str = "L"
    "attention windows, repeated over the layers: S sees a quarter of the row, L all of it"
    dim: int | None = option(None, least=1, most=1e6)
    "width; by default 64 per layer"
    head_dim: int | None = option(None, least=1, most=1e4)
    "channels per head; by default 128, less in a narrow model"
    kv_heads: int | None = option(None, also=("n_kv_head",), least=1, most=1e4)
    "key-value heads; fewer than heads is grouped-query attention"

    "# Run"
    run: str = option("", also=("run_name",))
    "name of the run; its folder holds settings, metrics and checkpoints; by default d and the depth"
    minutes: float | None = option(None, above=0, most=1e7)
    "horizon in minutes: the speed is measured first, then steps and batch follow"
    tokens: int | None = option(None, least=1, most=1e18)
    "horizon in tokens; by default target_param_data_ratio per scaling parameter"
    target_param_data_ratio: float = option(12.0, above=0, most=1e6)
    "horizon in tokens per scaling parameter"
    target_flops: float | None = option(None, above=0, most=1e30)
    "horizon in floating-point operations"

    "# Batch and memory"
    total_batch_size: int | None = option(None, least=1, most=1e12)
    "tokens per optimizer step over all devices; by default it follows the horizon"

    "# Optimization"
    weight_decay: float | None = option(None, least=0, most=1e3)
    """weight decay of the matrices in a run of depth 12 with its own batch and horizon, scaled to this run; by default
    0.28, at most 2 % per step"""
    dropout: float = option(0.0, least=0, most=0.9)
    "share of what each layer adds that is dropped in training; 0.1 for a text that is read many times"

    "# Validation, checkpoints and logging"
    eval_tokens: int | None = option(None, least=1, most=1e15)
    "validation tokens of each corpus; by default the whole split up to ten million"
    core_metric_every: int = option(0, least=-1, most=1e9)
    "steps between CORE scores, and one at the end; 0 and -1: none; needs `ascendchat data fetch core`"
    core_metric_max_per_task: int = option(500, least=1, most=1e9, besides=(-1,))
    "maximum number of rows of each CORE task; -1: all"


@dataclass(frozen=True)
class StartConfig(TrainConfig):
    """Settings of the training commands that start from a model: mid, sft, finetune and rl."""

    "# Model and data"
    start: str = ""
    "run or checkpoint folder to start from; by default the last earlier stage of --run, or of the newest run"
    data: tuple[str, ...] = ()
    """mixture, as NAME or NAME=WEIGHT: toyworld, tasks (gsm8k, smoltalk, ...), files of conversations, prepared
    corpora; by default toyworld for a model of the embedded corpus, else smoltalk, mmlu, gsm8k and identity"""
    source: str = ""
    "folder with local copies of the tasks' sets; evaluation questions found in the mixture are reported"
    tokenizer: str = ""
    "folder of the tokenizer; by default the one the model was trained with"
    max_seq_len: int | None = option(None, least=16, most=1e6)
    "tokens per row; by default that of the model"

    "# Run"
    run: str = option("", also=("run_name",))
    "name of the run; its folder holds settings, metrics and checkpoints; by default that of the model it starts from"
    epochs: float = option(1.0, above=0, most=1e6)
    "passes over all rows of --data; --steps wins over it"


@dataclass(frozen=True)
class HFTrainConfig(StartConfig):
    """Settings of the commands that also train models of Hugging Face: finetune and rl."""

    "# Optimization"
    learning_rate: float | None = option(None, above=0, most=1)
    "peak learning rate of a Hugging Face model"


@dataclass(frozen=True)
class ChatTrainConfig(StartConfig):
    """Settings of the commands that train on conversations: mid, sft and finetune."""

    "# Model and data"
    dataset_dir: str = ""
    "folder whose files --data may name, and the sets that a dataset_info.json in it lists, as LLaMA-Factory has it"
    preview: int = option(0, least=0, most=1e6)
    "show this many rows of each entry of --data as the model will see them, with what it learns marked, and end"

    "# Batch and memory"
    total_batch_size: int | None = option(None, least=1, most=1e12)
    "tokens per optimizer step over all devices; by default it follows the horizon"
    target_examples_per_step: int | None = option(None, least=1, most=1e9)
    "rows of conversations per step, instead of --total-batch-size"


@dataclass(frozen=True)
class _OwnChatConfig(ChatTrainConfig, OwnModelConfig):
    """Settings that mid-training and SFT have in common."""

    "# Model and data"
    load_optimizer: bool = option(False, also=("warm_start",))
    "also take over the moments of the optimizer from the checkpoint"

    "# Run"

    "# Optimization"
    lr_multiplier: float = option(1.0, above=0, most=1e3)
    "factor on every learning rate of pretraining"


@dataclass(frozen=True)
class MidConfig(_OwnChatConfig):
    """Teach a base model the form of conversations, tools and choices; text may be mixed in."""


@dataclass(frozen=True)
class SftConfig(_OwnChatConfig):
    """Fine-tune on conversations; the loss is on the replies, and on all of a text that is mixed in."""

    lr_multiplier: float = option(0.5, above=0, most=1e3)
    "factor on every learning rate of pretraining"


@dataclass(frozen=True)
class BenchTrainConfig(StepConfig):
    """Time real training steps on random tokens; the last line is one JSON object."""

    "# Model and steps"
    depth: int = option(12, least=1, most=1000)
    "number of layers"
    max_seq_len: int = option(2048, least=16, most=1e6)
    "tokens per row"
    vocab_size: int = option(32768, least=1, most=1e7)
    "size of the vocabulary"
    window_pattern: str = "L"
    "attention windows: S sees a quarter of the row, L all of it"
    dim: int | None = option(None, least=1, most=1e6)
    "width; by default 64 per layer"
    head_dim: int | None = option(None, least=1, most=1e4)
    "channels per head; by default 128, less in a narrow model"
    steps_to_time: int = option(10, also=("steps",), least=1, most=1e6)
    "optimizer steps to time, after two that warm up"

    "# Batch and memory"
    total_batch_size: int | None = option(None, least=1, most=1e12)
    "tokens per optimizer step over all devices; by default 524288"

    "# Computation"
    seed: int = option(0, least=0, most=1e18)
    "seed of the weights and of the tokens"


class _StageFacts(NamedTuple):
    """Facts about a stage that other modules need."""

    starts_from: tuple[StageName, ...]  # earlier stages; the first one that has a checkpoint is used
    chats: bool  # the model has been trained on conversations


STAGES: dict[str, _StageFacts] = {
    "base": _StageFacts(starts_from=(), chats=False),
    "mid": _StageFacts(starts_from=("base",), chats=True),
    "sft": _StageFacts(starts_from=("mid", "base"), chats=True),
    "hf": _StageFacts(starts_from=(), chats=True),
    "rl": _StageFacts(starts_from=("sft", "mid", "base"), chats=True),
}
