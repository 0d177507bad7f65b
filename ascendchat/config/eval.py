"""Configs of the evaluation commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config import option
from ascendchat.config.commands import DeviceConfig
from ascendchat.config.generate import KvCacheDtype
from ascendchat.config.stages import StageName


@dataclass(frozen=True)
class EvalBaseConfig(DeviceConfig):
    """Score a base model: bits per byte of validation text, and CORE (22 tasks, 0 = guessing, 1 = perfect)."""

    run: str = ""
    "name of the run whose newest base checkpoint is scored; by default the run written last"
    checkpoint: str = option("", also=("model",))
    "folder of a checkpoint (step_...), of a stage that holds some, or of a Hugging Face model; wins over --run"
    eval: tuple[Literal["bpb", "core"], ...] = ("bpb", "core")
    "what to compute"
    data: tuple[str, ...] = ()
    "prepared corpora for bits per byte; by default those of the run"
    eval_tokens: int = option(10_000_000, least=0, most=1e15)
    "validation tokens per corpus at most; 0: all"
    bundle: str = ""
    "folder of the CORE bundle; by default what `ascendchat data fetch core` stored"
    max_per_task: int | None = option(None, least=1, most=1e9, besides=(-1,))
    "CORE: only so many rows of each task, for a quick look; by default, and with -1, all"
    max_seq_len: int | None = option(None, least=16, most=1e6)
    "tokens per row; longer CORE prompts lose their beginning; by default the length the model was trained with"
    tokens_per_batch: int = option(32768, least=1, most=1e9)
    "tokens per forward pass, padding included"
    tokenizer: str = ""
    "folder of the model's tokenizer; by default that of the run, else of $ASCENDCHAT_HOME"
    attention: str | None = None
    "attention kernel by name; by default the best that runs here"
    kv_cache_dtype: KvCacheDtype = "auto"
    "fp8: see keys and values rounded as `serve --kv-cache-dtype fp8` keeps them, and so what that costs"
    json: bool = False
    "print one JSON object; progress goes to standard error"


@dataclass(frozen=True)
class EvalChatConfig(DeviceConfig):
    """Examine a chat model: ChatCORE (0 = guessing, 1 = perfect), its Chinese counterpart, the toy world."""

    generates = True
    run: str = ""
    "name of the run; by default the one that saved a checkpoint last"
    stage: StageName | None = None
    "stage of the run; by default its latest"
    checkpoint: str = option("", also=("model",))
    "folder of a checkpoint (step_...), of a stage that holds some, or of a Hugging Face model; wins over --run"
    tasks: tuple[str, ...] = ("chatcore", "chinese")
    "tasks or groups: arc_easy, arc_challenge, mmlu, gsm8k, humaneval, ceval, cmmlu; chatcore, chinese, toy, all"
    source: str = ""
    "folder that holds the evaluation sets; by default they are fetched"
    max_per_task: int | None = option(None, least=1, most=1e9, besides=(-1,))
    "only so many rows of each task, for a quick look; by default, and with -1, all"
    samples: int = option(1, least=1, most=1e4)
    "replies per question, for pass@k; more than one needs a temperature"
    temperature: float = option(0.0, least=0, most=10)
    "randomness of the replies; 0: always the likeliest token"
    max_new_tokens: int = option(512, least=1, most=1e6)
    "tokens of a reply at most"
    context: int | None = option(None, least=16, most=1e6)
    "tokens of prompt and reply together; longer prompts lose their beginning; by default the model's row length"
    slots: int = option(64, least=1, most=1e4)
    "replies generated at the same time"
    tokens_per_batch: int = option(32768, least=1, most=1e9)
    "tokens per forward pass of multiple choice, padding included"
    seed: int = option(0, least=0, most=1e18)
    "of the samples"
    tokenizer: str = ""
    "folder of the model's tokenizer; by default that of the run, else of $ASCENDCHAT_HOME"
    attention: str | None = None
    "attention kernel by name; by default the best that runs here"
    json: bool = False
    "print one JSON object; progress goes to standard error"
