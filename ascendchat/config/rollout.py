"""Config of `ascendchat rollout-server`, and the block `inference_engine:` of `ascendchat rl --config FILE`.

inference_engine:
  type: vllm
  vllm_config: {device: npu, dtype: bfloat16, enforce_eager: true}
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from ascendchat.config import UserError, accept, nearest, option


@dataclass(frozen=True)
class VllmConfig:
    """What is said to vLLM: the keys of `vllm_config`."""

    device: Literal["npu", "cuda", "cpu"] | None = option(None, also=("device_type",))
    "device that vLLM generates on; by default the first found of npu, cuda, cpu"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    "dtype of the weights; auto: that of the model"
    enforce_eager: bool = False
    "capture no graphs: slower, and starts sooner"
    max_num_seqs: int | None = option(None, least=1, most=1e5)
    "answers generated at the same time; by default as vLLM likes"
    gpu_memory_utilization: float | None = option(None, also=("memory_share",), above=0, most=1)
    "share of the device's memory that vLLM takes; by default as vLLM likes"
    max_model_len: int | None = option(None, also=("context",), least=16, most=1e7)
    "most tokens of prompt and answer together; by default that of the model"
    tensor_parallel_size: int = option(1, also=("tp",), least=1, most=1024)
    "devices that share the model"
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    "log-probabilities behind or before temperature, top-k and top-p; a trainer needs those of what was sampled from"
    weight_transfer: Literal["auto", "none", "hccl", "nccl", "ipc"] = "auto"
    "backend of vLLM's own weight transfer; auto: the device's collective, where this vLLM has it"
    sleep_mode: bool = option(False, also=("enable_sleep_mode",))
    "let vLLM give its memory back between two uses (/sleep, /wake_up)"
    seed: int = option(0, least=0, most=2**31 - 1)
    "of requests that name none"


@dataclass(frozen=True)
class RolloutServerConfig(VllmConfig):
    """Start vLLM (or vllm-ascend) for the rollouts of a trainer, with everything that a weight sync needs."""

    more: tuple[str, ...] = option((), words="rest")
    "further flags for vLLM, behind --"
    model: str = ""
    "folder or hub name of a model of Hugging Face"
    python: str = ""
    "Python in whose environment vLLM is; by default that of the `vllm` on the PATH"
    host: str = "127.0.0.1"
    "address to listen on; any other than this machine's own needs --no-auth: vLLM asks nobody who replaces weights"
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
    """The values of a block `inference_engine:`, by the names of VllmConfig; what nobody knows is refused by name."""
    unknown = next((key for key in block if key not in ("type", "vllm_config")), None)
    if unknown is not None:
        raise UserError(f"{source}: unknown setting {unknown}; {nearest(str(unknown), ['type', 'vllm_config'])}")
    if block.get("type", "vllm") != "vllm":
        raise UserError(
            f"{source}.type: {block['type']!r} is not known; it is vllm, or leave inference_engine out: a server of "
            "ascendchat's own is started by --rollout-devices"
        )
    given = block.get("vllm_config") or {}
    if not isinstance(given, dict):
        raise UserError(f"{source}.vllm_config holds `name: value` lines, found {given!r}")
    fields = {field.name: field for field in dataclasses.fields(VllmConfig)}
    spellings = {name: field for field in fields.values() for name in (field.name, *field.metadata.get("also", ()))}
    kinds, values = get_type_hints(VllmConfig), {}
    for key, value in given.items():
        field = spellings.get(str(key).replace("-", "_"))
        if field is None:
            raise UserError(f"{source}.vllm_config: unknown setting {key}; {nearest(str(key), list(fields))}")
        values[field.name] = accept(f"{source}.vllm_config.{key}", field, kinds[field.name], value)
    return values


def merged(config: RolloutServerConfig) -> RolloutServerConfig:
    """The config with what its block says, where no flag says anything."""
    defaults = {field.name: field.default for field in dataclasses.fields(VllmConfig)}
    said = vllm_settings(config.inference_engine) if config.inference_engine else {}
    return dataclasses.replace(
        config, **{name: value for name, value in said.items() if getattr(config, name) == defaults[name]}
    )
