"""Configs of the commands around training: doctor, selftest, explain, plan, clean, setup, launch, report, speedrun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ascendchat.chips import KINDS
from ascendchat.config.flags import option

if TYPE_CHECKING:
    DeviceType = str
    VllmDevice = str
else:
    DeviceType = Literal[tuple(KINDS)]
    VllmDevice = Literal[tuple(kind for kind, row in KINDS.items() if row.vllm)]


@dataclass(frozen=True)
class DeviceConfig:
    """Settings of every command that computes on a device."""

    generates = False  # True: it decodes with captured graphs, which an NPU's environment must allow

    "# Device"
    device_type: DeviceType | None = None
    "device to use; by default $ASCENDCHAT_DEVICE, else the best one found"
    npu_debug: bool = False
    "slow, blocking, verbose settings that make an NPU error point at the line that caused it"


@dataclass(frozen=True)
class DoctorConfig:
    """Check this machine: what is there, what is missing, and the command that mends it."""

    json: bool = False
    "print one JSON object instead of a table"
    devices: int | None = option(None, also=("npus", "gpus"), least=1, most=1e4)
    "run real collectives on this many devices, check every number and report the bandwidth"
    device_type: DeviceType | None = None
    "device type for --devices; by default the best one found"
    watch: bool = False
    "show the devices live: use, memory, temperature, processes (Ctrl-C ends)"
    interval: float = option(2.0, least=0.1, most=1e4)
    "seconds between two readings of --watch"
    lang: Literal["en", "zh"] | None = None
    "language of the texts; by default that of the locale"
    deep: bool = False
    "compare the checksum of every stored file, however long it takes"


@dataclass(frozen=True)
class SelftestConfig:
    """Prove on this device what can be proven: operators, decoding, collectives, training, faults; one file to send."""

    devices: int | None = option(None, also=("npus", "gpus"), least=1, most=1e4)
    "devices for the collectives and the training; by default all that are visible (on CPU: 1)"
    device_type: DeviceType | None = None
    "device to test; by default $ASCENDCHAT_DEVICE, else the best one found"
    quick: bool = False
    "smaller shapes, 40 steps of training instead of 200, and no timing"
    only: tuple[str, ...] = ()
    "names of the items to test, instead of all"
    out: str = "selftest.json"
    "the file to send"
    deadline: float = option(900.0, above=0, most=1e6)
    "seconds without an answer after which an item has failed"
    table: bool = False
    "test nothing, and print the files that follow as rows of a table"
    files: tuple[str, ...] = option((), words="each")
    "files of selftest, for --table"


@dataclass(frozen=True)
class ExplainConfig:
    """Turn an error text, or what you see ("training hangs"), into its cause, what to check and the command to run."""

    log: tuple[str, ...] = option((), words="each")
    "log files, run folders (all their *.log), - for standard input (the default), or a symptom in words"
    lang: Literal["en", "zh"] | None = None
    "language of the texts; by default that of the locale"
    json: bool = False
    "print JSON"


@dataclass(frozen=True)
class PlanConfig:
    """Parameters, FLOPs, memory by part, the largest batch that fits, tokens, hours and cost, before the run."""

    "# Model and run"
    goal: Literal["train", "rl", "inference"] = "train"
    "what to plan: training, RL (trainer and rollout together) or inference"
    depth: int = option(20, least=1, most=1000)
    "number of layers; width, heads, batch and horizon follow from it"
    chip: str = ""
    "chip name, e.g. Ascend910B3, H100, H200, cpu; by default $ASCENDCHAT_CHIP, else the CPU of this machine"
    devices: int = option(1, also=("npus", "gpus"), least=1, most=1e6)
    "how many devices"
    max_seq_len: int = option(2048, least=1, most=1e7)
    "tokens per row"
    vocab_size: int = option(32768, least=1, most=1e7)
    "size of the vocabulary"
    window_pattern: str = "L"
    "layers that see a quarter of the row (S) or all of it (L), repeated over the depth; the last is always L"
    tokens: int | None = option(None, least=1, most=1e18)
    "training tokens; by default target_param_data_ratio times the scaling parameters"
    target_param_data_ratio: float = option(12.0, above=0, most=1e6)
    "training tokens per scaling parameter"

    "# Batch and memory"
    device_batch_size: int | None = option(None, least=1, most=1e6)
    "rows per device and micro-batch; by default the largest power of two that fits"
    total_batch_size: int | None = option(None, least=1, most=1e12)
    "tokens per optimizer step over all devices; by default chosen from the horizon"
    activation_checkpointing: bool = False
    "recompute activations in the backward pass"

    "# Fine-tuning of an existing model"
    hf_config: str = option("", also=("model",))
    "plan the fine-tuning of this model: its Hugging Face folder, or the config.json in it"
    lora_rank: int = option(0, least=0, most=1e5)
    "with --model: train adapters of this rank instead of all weights"
    bits: Literal[4] | None = option(None, also=("quantization_bit",))
    "with --lora-rank: the frozen base is held in 4 bits (finetune --bits)"
    shard: int = option(0, least=0, most=1e5)
    "with --model: devices that hold one copy of the weights together (finetune --shard); 0: every device holds all"
    offload: bool = False
    "with --shard: the shards are kept in the memory of the host (finetune --offload)"

    "# RL and inference"
    rollout_devices: int = option(0, least=0, most=1e6)
    "RL: devices that only generate; by default trainer and rollout share all devices"
    context: int | None = option(None, least=1, most=1e7)
    "inference, RL: tokens per sequence in the key-value cache; by default max_seq_len"

    "# Time and cost"
    mfu: float | None = option(None, above=0, most=1)
    "model FLOPs utilization you expect, 0.4 for 40 %; by default a measured or cautious figure per device type"
    price: float | None = option(None, least=0, most=1e9)
    "price per device-hour, for the cost"

    "# Several nodes"
    hop_microseconds: float = option(20.0, least=0, most=1e6)
    "latency of the shortest message between two nodes, in microseconds"
    jitter: float = option(0.01, least=0, most=1)
    "standard deviation of a device's computing time, as a share of it"
    device_mtbf_hours: float = option(50_000.0, above=0, most=1e9)
    "mean hours between two failures of one device, its share of the node's failures included"
    restart_seconds: float = option(120.0, least=0, most=1e6)
    "seconds from a failure until all ranks are connected again, without reading the checkpoint"
    storage_speed: float = option(10.0, above=0, most=1e6)
    "GB/s that the shared storage delivers to all nodes together"
    save_every: int = option(500, least=1, most=1e9)
    "steps between checkpoints"

    "# Output"
    json: bool = False
    "print one JSON object"


@dataclass(frozen=True)
class CleanConfig:
    """List what holds devices, shared memory and disk, how much each would free, and free what you confirm."""

    yes: bool = False
    "free everything in the list that is yours, without asking"
    dry_run: bool = False
    "only list"
    json: bool = False
    "print JSON (implies --dry-run)"
    grace: float = option(10.0, least=0, most=1e6)
    "seconds that a process gets to save and stop after SIGTERM, before SIGKILL"
    lang: Literal["en", "zh"] | None = None
    "language of the texts; by default that of the locale"


@dataclass(frozen=True)
class SetupConfig:
    """List what to install here, in order: driver, CANN, torch and torch_npu that fit, ascendchat, mirrors."""

    yes: bool = False
    "run the steps that are done by pip"
    device_type: DeviceType | None = None
    "device to install for; by default the best one found"
    index: str = ""
    "address of the package index that pip uses, such as a mirror near you; by default as pip is configured"
    extra_index: str = ""
    "address of a further index, such as PyTorch's own for the CPU build of torch"
    lang: Literal["en", "zh"] | None = None
    "language of the texts; by default that of the locale"


@dataclass(frozen=True)
class LaunchConfig:
    """Run a command on many devices: torchrun underneath, a free port, logs per rank, restarts that resume."""

    command: tuple[str, ...] = option(words="rest")
    "what to run: an ascendchat command, `-m MODULE` or a .py file, then its flags"
    devices: int | None = option(None, also=("npus", "gpus", "nproc_per_node"), least=1, most=1e4)
    "processes on this node, one per device; by default all visible devices (on CPU: 1)"
    nnodes: int | None = option(None, least=1, most=1e5)
    "number of nodes; by default from the scheduler (Slurm, Kubernetes, ModelArts), else 1"
    node_rank: int | None = option(None, least=0, most=1e5)
    "this node's number, from 0; by default from the scheduler"
    master: str = option("", also=("master_addr",))
    "address[:port] of node 0; needed with several nodes outside a scheduler"
    master_port: int | None = option(None, least=1, most=65535)
    "port of the rendezvous; by default a free one (several nodes: derived from the job, checked on node 0)"
    max_restarts: int = option(0, least=0, most=1e6)
    "start the job again this many times after a failure; training resumes from its last checkpoint"
    run: str = ""
    "name of the run; its folder receives the logs of all ranks; by default the command and the time"
    device_type: DeviceType | None = None
    "device type, passed on to the command"
    grace: float = option(30.0, least=0, most=1e6)
    "seconds that the ranks get to save and stop after SIGTERM or SIGINT"


@dataclass(frozen=True)
class ReportConfig:
    """Curves, tables, samples and environment of a run, or of several side by side, in one file."""

    run: tuple[str, ...] = option((), words="each")
    """names of runs; by default the newest. Runs that differ in nothing but their seed are shown as their mean and its
    95 % confidence band"""
    out: str = ""
    """file to write; its ending is the format: .html, all in one file, or .md, with plots beside it; by default
    report.html in the folder of the first run"""
    price: float | None = option(None, least=0, most=1e9)
    "price per device-hour, for the cost"
    watch: bool = False
    "serve the page on this machine instead; it follows the run while it trains"
    host: str = "127.0.0.1"
    "address on which --watch listens"
    port: int = option(8008, least=0, most=65535)
    "port on which --watch listens; 0: a free one"


@dataclass(frozen=True)
class SpeedrunConfig:
    """Run every stage of a recipe in order, from text to a chat model; finished stages are skipped."""

    recipe: str = option("tiny-cpu", words="each")
    "name of a recipe of the package, or a YAML file with stages of your own"
    run: str = ""
    "name of the run; by default that of the recipe"
    device_type: DeviceType | None = None
    "device for the stages that compute; by default that of the recipe's chip, else the best one found"
    devices: int | None = option(None, also=("npus", "gpus"), least=1, most=1e4)
    "how many devices these stages use; by default as many as the recipe names"
    sets: str = ""
    "folder of text and sets that the recipe calls $SETS; by default $ASCENDCHAT_SETS"
    from_stage: str = option("", also=("from",))
    "begin at this stage, such as mid or eval; earlier ones are taken as they are"
    only: tuple[str, ...] = ()
    "run these stages only, such as base,mid"
    fresh: bool = False
    "run all stages again, finished ones too"
    serve: bool = False
    "afterwards serve the page and the API of the model, until Ctrl-C"
    dry_run: bool = False
    "show time, memory, disk and downloads of each stage, and end"
