"""Configs of the commands that generate: chat, bench decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config.commands import DeviceConfig
from ascendchat.config.flags import option
from ascendchat.config.train import StageName

KvCacheDtype = Literal["auto", "fp8"]


@dataclass(frozen=True)
class NamedModelConfig(DeviceConfig):
    """Settings of the commands that open a trained model: which one, and how it is read."""

    "# Model"
    run: str = ""
    "name of the run; by default the one that saved a checkpoint last"
    checkpoint: str = option("", also=("model",))
    "folder of a checkpoint (step_...), of a stage that holds some, or of a Hugging Face model; wins over --run"
    tokenizer: str = ""
    "folder of the model's tokenizer; by default that of the run, else of $ASCENDCHAT_HOME"
    attention: str | None = None
    "attention kernel by name; by default the best that runs here"


@dataclass(frozen=True)
class ModelConfig(NamedModelConfig):
    """Settings of the commands that open a model of any stage: chat, serve and export."""

    generates = True

    "# Model"
    run: str = option("", also=("model_tag", "g"))
    "name of the run; by default the one that saved a checkpoint last"
    stage: StageName | None = option(None, also=("source", "i"))
    "stage of the run; by default the last one it has reached"


@dataclass(frozen=True)
class ExportConfig(ModelConfig):
    """Write a trained model as a Hugging Face folder, which transformers loads offline (and vLLM, but for our own)."""

    to: Literal["hf", "gguf"] = "hf"
    "format: a Hugging Face folder; for gguf it says who makes it"
    out: str = ""
    "folder to write; it must not exist, or be empty"
    adapter: bool = False
    "for a LoRA run: only the adapter, as peft loads it onto the base; by default it is merged into the weights"


@dataclass(frozen=True)
class ChatConfig(ModelConfig):
    """Talk to a model. Without --prompt: line by line from the terminal, or one prompt per line from a pipe."""

    prompt: str = option("", also=("p",))
    "answer this and end"
    system: str = ""
    "system message that opens the conversation"
    enable_thinking: bool | None = None
    "whether answers begin by thinking, for a chat template that knows it (Qwen3)"
    temperature: float = option(0.6, also=("t",), least=0, most=10)
    "sampling temperature; 0: always the likeliest token"
    top_k: int = option(50, also=("k",), least=0, most=1e7)
    "choose among this many tokens; 0: all"
    max_tokens: int = option(512, least=1, most=1e6)
    "maximum number of tokens of an answer"
    seed: int | None = option(None, least=0, most=1e18)
    "the same seed gives the same answers; by default they differ each time"
    verbose: bool = option(False, also=("v",))
    "also say which checkpoint, device and attention kernel are used"


@dataclass(frozen=True)
class BenchDecodeConfig(DeviceConfig):
    """Time the generation of a random model: tokens per second, milliseconds per step, share of memory bandwidth."""

    generates = True
    depth: int = option(12, least=1, most=1000)
    "number of layers"
    batch_sizes: tuple[int, ...] = option((1, 64, 256), least=1, most=1e5)
    "numbers of requests at the same time, each timed on its own"
    context: int = option(1024, least=16, most=1e6)
    "tokens that the cache of a request holds"
    prompt_tokens: int = option(128, least=1, most=1e6)
    "tokens of each prompt"
    new_tokens: int = option(128, least=3, most=1e6)
    "tokens to generate per request"
    vocab_size: int = option(32768, least=1, most=1e7)
    "size of the vocabulary"
    window_pattern: str = "L"
    "attention windows: S sees a quarter of the training row of 2048, L all of it"
    temperature: float = option(1.0, least=0, most=10)
    "sampling temperature; 0: always the likeliest token"
    top_k: int = option(0, least=0, most=1e7)
    "sort the tokens and choose among this many; 0: all"
    attention: str | None = None
    "attention kernel by name; by default the best that runs here"
    kv_cache_dtype: KvCacheDtype = "auto"
    "keys and values in the model's own dtype (auto), or in 8 bits (fp8)"
    compile: bool | None = None
    "torch.compile on or off; by default on where it is sound"


@dataclass(frozen=True)
class ImportNanochatConfig(DeviceConfig):
    """Make a run of nanochat's checkpoints, by nanochat or its NPU ports; nothing in them is executed."""

    paths: tuple[str, ...] = option((), words="each")
    "folder of nanochat (with base_checkpoints and tokenizer), of one kind of checkpoints, of one model, or a .pt file"
    run: str = ""
    "name of the run to make; by default that of the model, such as d18"
    model_tag: str = option("", also=("g",))
    "name of the model, where there are several: d18"
    step: int | None = option(None, also=("s",), least=0, most=1e9)
    "step of the checkpoint; by default the last one of each stage"
    tokenizer: str = ""
    "folder of tokenizer.pkl; by default the folder `tokenizer` beside the checkpoints"
    window_pattern: str = ""
    "windows that the model was trained with, where they are not those of its meta file (a port without windows: L)"


# Configs of the evaluation commands.


@dataclass(frozen=True)
class EvalBaseConfig(NamedModelConfig):
    """Score a base model: bits per byte of validation text, and CORE (22 tasks, 0 = guessing, 1 = perfect)."""

    run: str = ""
    "name of the run whose newest base checkpoint is scored; by default the run written last"
    eval: tuple[Literal["bpb", "core"], ...] = ("bpb", "core")
    "what to compute"
    data: tuple[str, ...] = ()
    "prepared corpora for bits per byte; by default those of the run"
    eval_tokens: int = option(10_000_000, least=0, most=1e15)
    "maximum number of validation tokens per corpus; 0: all"
    bundle: str = ""
    "folder of the CORE bundle; by default what `ascendchat data fetch core` stored"
    max_per_task: int | None = option(None, least=1, most=1e9, besides=(-1,))
    "CORE: maximum number of rows of each task, for a quick look; by default, and with -1, all"
    max_seq_len: int | None = option(None, least=16, most=1e6)
    "tokens per row; longer CORE prompts lose their beginning; by default the length the model was trained with"
    tokens_per_batch: int = option(32768, least=1, most=1e9)
    "tokens per forward pass, padding included"
    kv_cache_dtype: KvCacheDtype = "auto"
    "fp8: round keys and values as `serve --kv-cache-dtype fp8` does, to see what that costs in quality"
    json: bool = False
    "print one JSON object; progress goes to standard error"


@dataclass(frozen=True)
class EvalChatConfig(NamedModelConfig):
    """Examine a chat model: ChatCORE (0 = guessing, 1 = perfect), its Chinese counterpart, the toy world."""

    generates = True
    stage: StageName | None = None
    "stage of the run; by default its latest"
    tasks: tuple[str, ...] = ("chatcore", "chinese")
    "tasks or groups: arc_easy, arc_challenge, mmlu, gsm8k, humaneval, ceval, cmmlu; chatcore, chinese, toy, all"
    source: str = ""
    "folder that holds the evaluation sets; by default they are fetched"
    max_per_task: int | None = option(None, least=1, most=1e9, besides=(-1,))
    "maximum number of rows of each task, for a quick look; by default, and with -1, all"
    samples: int = option(1, least=1, most=1e4)
    "replies per question, for pass@k; more than one needs a temperature"
    temperature: float = option(0.0, least=0, most=10)
    "sampling temperature; 0: always the likeliest token"
    max_new_tokens: int = option(512, least=1, most=1e6)
    "maximum number of tokens of a reply"
    context: int | None = option(None, least=16, most=1e6)
    "tokens of prompt and reply together; longer prompts lose their beginning; by default the model's row length"
    slots: int = option(64, least=1, most=1e4)
    "replies generated at the same time"
    tokens_per_batch: int = option(32768, least=1, most=1e9)
    "tokens per forward pass of multiple choice, padding included"
    seed: int = option(0, least=0, most=1e18)
    "seed of the samples"
    json: bool = False
    "print one JSON object; progress goes to standard error"
