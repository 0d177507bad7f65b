"""Configs of `ascendchat rl`, and of `rollout-server`, which starts vLLM for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_type_hints

from ascendchat.config.commands import VllmDevice
from ascendchat.config.flags import accept, option
from ascendchat.config.train import HFTrainConfig, OwnModelConfig
from ascendchat.errors import UserError, nearest

_STEP = "a step is --prompts-per-step times --samples answers"
REFUSED: Mapping[str, str] = {  # settings of sft that RL had before it had a config of its own
    **dict.fromkeys(("total_batch_size", "target_examples_per_step"), _STEP),
    **dict.fromkeys(("load_optimizer", "warm_start"), "RL starts from weights alone"),
    "dataset_dir": "--data takes the paths of files of questions",
    "preview": "every answer is written to transcripts/ in the folder of the run",
}


@dataclass(frozen=True)
class RlConfig(HFTrainConfig, OwnModelConfig):
    """Reinforcement learning (GRPO and relatives): the model answers, answers are judged, good ones get likelier."""

    refused: ClassVar[Mapping[str, str]] = REFUSED

    "# Model and data"
    start: str = option("", also=("model",))
    """run, checkpoint folder or Hugging Face model to start from; by default the last earlier stage of --run, or of the
    newest run"""
    data: tuple[str, ...] = ()
    """questions, as NAME or NAME=WEIGHT: tasks with checkable answers (gsm8k, mmlu, toy_problems, ...) or files of
    questions; by default gsm8k, for a model of the embedded corpus its arithmetic and word problems"""

    "# Rewards"
    reward: tuple[str, ...] = ()
    """what an answer is worth, as NAME or NAME=WEIGHT, added up: task, answer, gsm8k, math-verify, choice, code,
    toyworld, format, length (tokens), or a function of yours, as module:function; by default task: what the task calls
    right"""
    reward_timeout: float = option(15.0, above=0, most=1e6)
    "seconds after which a call of your reward function is given up"
    workflow: str = ""
    """conversations of several turns in place of one answer: calculator, try-again, or a function or class of yours, as
    module:name"""
    workflow_timeout: float = option(60.0, above=0, most=1e6)
    "seconds that a workflow may take between two answers of the model"

    "# Rollouts"
    prompts_per_step: int = option(16, also=("examples_per_step",), least=1, most=1e6)
    "questions per step, over all devices"
    samples: int = option(8, also=("num_samples", "group_size"), least=2, most=1e5)
    "answers to each question"
    max_new_tokens: int = option(256, least=1, most=1e6)
    "maximum number of tokens of an answer"
    temperature: float = option(1.0, above=0, most=10)
    "sampling temperature; also applied to the log-probabilities in training"
    top_k: int = option(0, least=0, most=1e7)
    "choose among this many tokens; 0: all"
    refill: int = option(2, least=0, most=100)
    "dynamic sampling: times that groups without any difference in reward are replaced by other questions"
    slots: int | None = option(None, least=1, most=1e5)
    "answers generated at the same time on each device; by default all of a step, at most 256"
    rollouts: tuple[str, ...] = ("local",)
    """where answers are generated: local, in the trainer's own process, or the addresses of servers (`ascendchat serve
    --weight-updates`, vLLM), separated by commas"""
    rollout_devices: int = option(0, least=0, most=1024)
    "devices behind those of the trainer for a server that this command starts and ends; on a CPU: processes"
    inference_engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    """in a YAML file, {type: vllm, vllm_config: {...}}: this command starts vLLM instead, with these settings
    of rollout-server; the model must be one of Hugging Face"""
    rollout_key_file: str = ""
    "file whose first line is the API key of the servers; by default the first key in $ASCENDCHAT_API_KEYS, if any"
    rollout_timeout: float = option(900.0, above=0, most=1e6)
    """seconds for one answer of a server; with --rollouts more than the server's --request-timeout, so that what it has
    written by then is kept and continued"""
    rollout_patience: float = option(600.0, above=0, most=1e6)
    "seconds without any server that answers, after which the run ends"
    rollout_mode: Literal["sync", "stream", "async"] = option("sync", also=("rhythm",))
    """sync: all answers of a step, then training; stream: groups are trained as they finish; async: answers are also
    generated while the weights change (--staleness)"""
    staleness: int = option(2, least=0, most=1e6)
    "with --rollout-mode async: by how many versions the weights that answer may be older than those that are trained"
    updates: int = option(1, least=1, most=1e6)
    "optimizer steps on the questions of one --prompts-per-step; the weights that answer change after all of them"

    "# Policy gradient"
    preset: Literal["default", "grpo", "drgrpo", "dapo", "gspo", "cispo", "reinforce"] = "default"
    "how rewards become a loss"
    clip_low: float | None = option(None, also=("epsilon",), above=0, most=1)
    "clipping: how far the ratio to the policy before the update may fall below 1; by default the preset's"
    clip_high: float | None = option(None, also=("epsilon_high",), above=0, most=1e3)
    "clipping: how far that ratio may rise above 1; by default the preset's"
    correction: Literal["none", "mask", "truncate"] | None = None
    """for tokens whose probability differs between generator and trainer: leave them out (mask, IcePop), weigh them by
    at most 2 (truncate, truncated importance sampling), or none; by default the preset's"""
    kl: float = option(0.0, also=("beta",), least=0, most=1e3)
    "weight of the KL to the weights that the run starts from; 0: none, and no copy of them is kept"
    batch_invariant: bool = False
    "generator and trainer give exactly the same log-probabilities: slower, for float32 on a CPU"

    "# Run"
    epochs: float = option(1.0, above=0, most=1e6)
    "passes over the questions; --steps wins over it"
    num_iterations: int | None = option(None, also=("steps",), least=1, most=1e9)
    "optimizer steps; by default they follow from the epochs"

    "# Optimization"
    lr_multiplier: float = option(0.05, also=("init_lr_frac",), above=0, most=1e3)
    "factor on every learning rate of pretraining"
    learning_rate: float | None = option(None, above=0, most=1)
    "learning rate of a Hugging Face model, all weights (AdamW); by default 1e-5, from 2 billion parameters on 1e-6"

    "# Batch and memory"

    "# Validation, checkpoints and logging"
    eval_every: int = option(60, least=-1, most=1e9)
    "steps between evaluations; 0: only at the end, -1: never"
    eval_examples: int = option(256, least=1, most=1e9)
    "maximum number of questions of an evaluation"
    save_every: int = option(60, least=-1, most=1e9)
    "steps between checkpoints; 0 and -1: only at the end"


# Config of `ascendchat rollout-server`, and the block `inference_engine:` of `ascendchat rl --config FILE`.
#
# inference_engine:
#   type: vllm
#   vllm_config: {device: npu, dtype: bfloat16, enforce_eager: true}


@dataclass(frozen=True)
class _VllmConfig:
    """Settings of vLLM: the keys of `vllm_config`."""

    "# vLLM"

    device: VllmDevice | None = option(None, also=("device_type",))
    "device that vLLM generates on; by default the best one found"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    "dtype of the weights; auto: that of the model"
    enforce_eager: bool = False
    "capture no graphs: slower, and starts sooner"
    max_num_seqs: int | None = option(None, least=1, most=1e5)
    "answers generated at the same time; by default vLLM decides"
    gpu_memory_utilization: float | None = option(None, also=("memory_share",), above=0, most=1)
    "share of the device's memory that vLLM takes; by default vLLM decides"
    max_model_len: int | None = option(None, also=("context",), least=16, most=1e7)
    "maximum number of tokens of prompt and answer together; by default that of the model"
    tensor_parallel_size: int = option(1, also=("tp",), least=1, most=1024)
    "devices that share the model"
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    "log-probabilities behind or before temperature, top-k and top-p; a trainer needs those of what was sampled from"
    weight_transfer: Literal["auto", "none", "hccl", "nccl", "ipc"] = "auto"
    "backend of vLLM's own weight transfer; auto: the device's collective, where this vLLM has it"
    sleep_mode: bool = option(False, also=("enable_sleep_mode",))
    "let vLLM give its memory back between two uses (/sleep, /wake_up)"
    seed: int = option(0, least=0, most=2**31 - 1)
    "seed of requests that name none"


@dataclass(frozen=True)
class RolloutServerConfig(_VllmConfig):
    """Start vLLM (or vllm-ascend) for the rollouts of a trainer, with everything that a weight sync needs."""

    more: tuple[str, ...] = option((), words="rest")
    "further flags for vLLM, behind --"
    model: str = ""
    "folder or hub name of a model of Hugging Face"
    python: str = ""
    "Python in whose environment vLLM is; by default that of the `vllm` on the PATH"
    host: str = "127.0.0.1"
    "address to listen on; any other than this machine's own needs --no-auth: in vLLM anybody may replace the weights"
    port: int = option(8000, also=("p",), least=1, most=65535)
    "port to listen on"
    api_key_file: str = ""
    "file whose first line is the API key for generating; by default the first key in $ASCENDCHAT_API_KEYS, if any"
    no_auth: bool = False
    "listen beyond this machine, though everyone who reaches the port can replace the weights"
    start_timeout: float = option(1800.0, above=0, most=1e6)
    "seconds in which vLLM must be ready"
    dry_run: bool = False
    "print the command and what is added to its environment, and end"
    inference_engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    "the same block as for rl, in a YAML file: its vllm_config stands for flags that are not given"


def vllm_settings(block: dict[str, Any], source: str = "inference_engine") -> dict[str, Any]:
    """The values of a block `inference_engine:`, by the names of _VllmConfig's fields; unknown ones are a UserError."""
    unknown = next((key for key in block if key not in ("type", "vllm_config")), None)
    if unknown is not None:
        raise UserError(f"{source}: unknown setting {unknown}; {nearest(str(unknown), ['type', 'vllm_config'])}")
    if block.get("type", "vllm") != "vllm":
        raise UserError(
            f"{source}.type: {block['type']!r} is not known; it is vllm, or leave inference_engine out: a server of "
            "ascendchat's own is started by --rollout-devices"
        )
    settings = block.get("vllm_config") or {}
    if not isinstance(settings, dict):
        raise UserError(f"{source}.vllm_config holds `name: value` lines, found {settings!r}")
    fields = {field.name: field for field in dataclasses.fields(_VllmConfig)}
    spellings = {name: field for field in fields.values() for name in (field.name, *field.metadata.get("also", ()))}
    kinds, values = get_type_hints(_VllmConfig), {}
    for key, value in settings.items():
        field = spellings.get(str(key).replace("-", "_"))
        if field is None:
            raise UserError(f"{source}.vllm_config: unknown setting {key}; {nearest(str(key), list(fields))}")
        values[field.name] = accept(f"{source}.vllm_config.{key}", field, kinds[field.name], value)
    return values


def merged(config: RolloutServerConfig) -> RolloutServerConfig:
    """The config with the settings of its block wherever no flag was given."""
    block = vllm_settings(config.inference_engine) if config.inference_engine else {}
    flags, usual = dataclasses.asdict(config), dataclasses.asdict(_VllmConfig())
    return dataclasses.replace(config, **{name: value for name, value in block.items() if flags[name] == usual[name]})
