"""The three plans behind `ascendchat plan --goal train | rl | inference`: functions of the config and a chip, and of
the config.json of a Hugging Face model.

Each returns one plain dictionary with every number (what `--json` prints) or raises TooLarge when nothing fits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ascendchat.chips import Chip
from ascendchat.config.commands import PlanConfig
from ascendchat.errors import UserError
from ascendchat.sizes import batch, hf, memory, schedule
from ascendchat.sizes.batch import Fabric, Split, duration
from ascendchat.sizes.hf import FINETUNE_ROWS, HFModel
from ascendchat.sizes.memory import exchanged_elements
from ascendchat.sizes.shape import Shape

FINETUNE_TOKENS = 10_000_000  # horizon when none is given
RL_SAMPLES = 256  # sequences per RL step: 16 questions x 16 samples
RL_STEPS = 100  # horizon when none is given
DECODE_SHARE = 0.5  # of the bandwidth roofline that generation is assumed to reach


class TooLarge(Exception):
    """It does not fit: `what` needs these `parts` on a device."""

    def __init__(self, what: str, parts: dict[str, int]) -> None:
        super().__init__(what)
        self.what, self.parts = what, parts


def model_of(config: PlanConfig) -> Shape | HFModel:
    """Our own model from the dial, or the one in a config.json."""
    if config.hf_config:
        return hf.read_config(config.hf_config, config.max_seq_len)
    return Shape.from_depth(
        config.depth, vocab=config.vocab_size, seq_len=config.max_seq_len, window_pattern=config.window_pattern
    )


def train_parts(config: PlanConfig, model: Shape | HFModel, chip: Chip, devices: int, rows: int) -> dict[str, int]:
    """Bytes by part of one training device."""
    if isinstance(model, HFModel):
        return hf_parts(config, model, chip, devices, rows, config.lora_rank)
    parts = memory.training(model, chip, devices, rows, config.activation_checkpointing)
    if config.goal == "rl":
        parts["logits"] += memory.policy_logits(chip)
    return parts


def hf_parts(config: PlanConfig, model: HFModel, chip: Chip, devices: int, rows: int, rank: int) -> dict[str, int]:
    """Memory by part for an existing model, with adapters of this rank or, at 0, all weights."""
    how: dict[str, Any] = {"lora_rank": rank, "shard": config.shard, "offload": config.offload}
    how["bits"] = config.bits if rank else None
    return hf.finetuning(model, chip, devices, rows, config.activation_checkpointing, **how)


def model_facts(model: Shape | HFModel) -> dict[str, Any]:
    """Sizes, parameters by part and FLOPs."""
    sizes = model.to_dict() if isinstance(model, Shape) else dataclasses.asdict(model)
    facts: dict[str, Any] = {"shape": sizes, "parameters": {k: v for k, v in model.parameters().items() if v}}
    facts["total_parameters"] = model.total_parameters
    if isinstance(model, Shape):
        facts["scaling_parameters"] = model.scaling_parameters
        facts["windows"] = list(model.windows())
    else:
        facts["active_parameters"] = model.active_parameters
    facts["train_flops_per_token"] = model.train_flops_per_token
    return facts


def device_memory(parts: dict[str, int], chip: Chip) -> dict[str, Any]:
    """Parts and totals of one device."""
    return {
        "parts": parts,
        "total": sum(parts.values()),
        "allocated": memory.allocated(parts),  # compare with the framework's peak counter
        "room": memory.usable(chip),
        "device": chip.memory,
    }


def choose_rows(
    config: PlanConfig, model: Shape | HFModel, chip: Chip, devices: int, beside: int = 0
) -> tuple[int, int]:
    """(rows per device to use, largest power of two that fits); the first is what the user asked for, if it fits.
    `beside` is the number of bytes that a rollout keeps on the device for its weights."""

    def need(rows: int) -> dict[str, int]:
        parts = train_parts(config, model, chip, devices, rows)
        return {**parts, "rollout_weights": beside} if beside else parts

    room, fixed = memory.usable(chip), config.device_batch_size
    if fixed is not None and sum(need(fixed).values()) > room:
        raise TooLarge(f"a device batch of {fixed}", need(fixed))
    largest = batch.largest_rows(lambda rows: sum(need(rows).values()) <= room)
    if not largest:
        raise TooLarge("one row per device", need(1))
    return fixed or largest, largest


def _horizon(config: PlanConfig, model: Shape | HFModel) -> tuple[int, int, list[str]]:
    """(tokens of the run, wanted tokens per step, notes)."""
    notes: list[str] = []
    if isinstance(model, Shape):
        tokens = config.tokens or batch.default_token_budget(model, config.target_param_data_ratio)
        return tokens, config.total_batch_size or batch.batch_for(tokens, model.seq_len), notes
    if not config.tokens:
        notes.append(f"no --tokens given: {FINETUNE_TOKENS:,} assumed for the fine-tuning")
    return config.tokens or FINETUNE_TOKENS, config.total_batch_size or FINETUNE_ROWS * model.seq_len, notes


def _share_out(
    config: PlanConfig, total: int, devices: int, seq_len: int, max_rows: int
) -> tuple[batch.Split, list[str]]:
    fixed = config.device_batch_size is not None
    split = (batch.split_fixed if fixed else batch.split)(total, devices, seq_len, max_rows)
    if split.total == total:
        return split, []
    note = (
        f"total batch raised to {split.total:,}: {total:,} tokens do not split into rows of {seq_len} on "
        f"{devices} device{'s' * (devices > 1)}{f' x {max_rows} rows' if fixed else ''}"
    )
    return split, [note]


def _batch(split: Split, largest: int) -> dict[str, int]:
    return {
        "device_rows": split.rows,
        "largest_device_rows": largest,
        "accumulation": split.accumulation,
        "devices": split.devices,
        "seq_len": split.seq_len,
        "total_tokens": split.total,
    }


def _flops(config: PlanConfig, model: Shape | HFModel) -> int:
    """FLOPs of one token in training."""
    if isinstance(model, HFModel):
        return model.finetuning_flops_per_token(config.lora_rank)
    return model.train_flops_per_token


def _recompute(config: PlanConfig, model: Shape | HFModel) -> float:
    """Checkpointing runs the forward pass of the layers again: a third of their share of the FLOPs."""
    if not config.activation_checkpointing:
        return 0.0
    head = 6 * model.padded_vocab * model.dim
    return (1 - head / model.train_flops_per_token) / 3


def _exchanged(config: PlanConfig, model: Shape | HFModel, chip: Chip, devices: int = 0) -> int:
    """Bytes that devices exchange in a step: gradients as they are kept, and the weights that learn."""
    if isinstance(model, Shape):
        reduced, gathered, between = exchanged_elements(model, devices or config.devices)
        # An all-reduce is a reduce-scatter and a gather.
        return memory.FP32 * (reduced + 2 * between) + memory.compute_bytes(chip) * gathered
    trained = model.total_parameters
    if isinstance(model, HFModel) and config.lora_rank:
        trained = model.lora_parameters(config.lora_rank)
    return train_parts(config, model, chip, 1, 1)["gradients"] + memory.compute_bytes(chip) * trained


def _held(parts: dict[str, int]) -> int:
    """Bytes of a device's memory that go into a checkpoint."""
    return parts["weights"] + parts["masters"] + parts["optimizer"]


def checkpoint_bytes(config: PlanConfig, model: Shape | HFModel, chip: Chip) -> int:
    """Bytes on disk: what one device would hold if it were alone, and the float32 weights beside those of the model's
    own file also where they are the same; of adapters nothing but themselves."""
    if isinstance(model, HFModel) and config.lora_rank:
        return model.lora_parameters(config.lora_rank) * (memory.compute_bytes(chip) + 3 * memory.FP32)
    alone = dataclasses.replace(config, shard=0, offload=False)
    parts = train_parts(alone, model, chip, 1, 1)
    return _held(parts) + (0 if parts["masters"] else parts["weights"])


def train_plan(config: PlanConfig, chip: Chip, model: Shape | HFModel | None = None) -> dict[str, Any]:
    """Parameters, memory, batch, steps, hours and cost of one training run, of the config's model or of another."""
    model = model or model_of(config)
    tokens, total, notes = _horizon(config, model)
    rows, largest = choose_rows(config, model, chip, config.devices)
    split, raised = _share_out(config, total, config.devices, model.seq_len, rows)
    steps = max(1, tokens // split.total)
    parts = train_parts(config, model, chip, config.devices, split.rows)
    exchanged, recompute = _exchanged(config, model, chip), _recompute(config, model)
    flops, fabric = _flops(config, model), fabric_of(config)
    in_one_node = _exchanged(config, model, chip, min(config.devices, chip.devices_per_node))
    time = batch.duration(
        flops, exchanged, chip, split, steps, config.mfu, config.price, recompute, fabric, in_one_node
    )
    plan: dict[str, Any] = {
        "memory": device_memory(parts, chip),
        "batch": _batch(split, largest),
        "run": {"tokens": tokens, "steps": steps, "flops": steps * split.total * flops},
        "time": dataclasses.asdict(time),
    }
    if config.devices > chip.devices_per_node:
        if rest := config.devices % chip.devices_per_node:
            notes.append(
                f"{config.devices} devices do not fill nodes of {chip.devices_per_node}, the last has {rest}: the "
                f"exchange is counted as if it were full; give --devices {config.devices - rest} or "
                f"{config.devices - rest + chip.devices_per_node}"
            )
        plan["scale"] = {
            "nodes": -(-config.devices // chip.devices_per_node),
            "exchanged": exchanged,
            "growth": growth(
                config, chip, split, flops, lambda devices: _exchanged(config, model, chip, devices), recompute
            ),
            **reliability(config, _held(parts), checkpoint_bytes(config, model, chip), time.step_seconds),
        }
    if isinstance(model, Shape):
        plan["rates"] = schedule.rates(model.dim, split.total)
        plan["weight_decay"] = schedule.full_decay(split.total, tokens)
        if steps < batch.MIN_STEPS:
            notes.append(f"{steps} steps are few: the recipe wants {batch.MIN_STEPS}; lower --total-batch-size")
    else:
        plan["lora"] = _lora(config, model, chip, split.rows)
    return {"model": model_facts(model), **plan, "notes": notes + raised}


def _lora(config: PlanConfig, model: HFModel, chip: Chip, rows: int) -> dict[str, Any]:
    """The other way to fine-tune, for comparison: the same rows with adapters and, if that was asked for, without."""
    rank = config.lora_rank or 16
    lora, full = (hf_parts(config, model, chip, config.devices, rows, adapters) for adapters in (rank, 0))
    room = memory.usable(chip)
    return {
        "rank": rank,
        "bits": config.bits,
        "parameters": model.lora_parameters(rank),
        "total": sum(lora.values()),
        "fits": sum(lora.values()) <= room,
        "full_total": sum(full.values()),
        "full_fits": sum(full.values()) <= room,
    }


def inference_plan(config: PlanConfig, chip: Chip, model: Shape | HFModel | None = None) -> dict[str, Any]:
    """Weights, cache per token, sequences that fit, and the roofline. Every device serves a whole copy of the model."""
    model = model or model_of(config)
    context = config.context or config.max_seq_len
    weights = model.total_parameters * memory.compute_bytes(chip)
    max_sequences = memory.max_sequences_beside(model, chip, context, weights + sum(memory.outside(chip).values()))
    if not max_sequences:
        raise TooLarge("one sequence", memory.decoding(model, chip, 1, context))
    return {
        "model": model_facts(model),
        "memory": device_memory(memory.decoding(model, chip, max_sequences, context), chip),
        "weights": weights,
        "context": context,
        "kv_bytes_per_sequence": memory.kv_bytes(model, chip, context),
        "kv_bytes_per_token": memory.kv_bytes(model, chip, context) / context,
        "sequences_per_device": max_sequences,
        "sequences": max_sequences * config.devices,
        "roofline_tokens_per_second": {
            "one_sequence": memory.decode_rate(model, chip, 1, context),
            "all_sequences": memory.decode_rate(model, chip, max_sequences, context) * config.devices,
        },
        "notes": [f"each of the {config.devices} devices serves a whole copy"] if config.devices > 1 else [],
    }


def rl_plan(config: PlanConfig, chip: Chip, model: Shape | HFModel | None = None) -> dict[str, Any]:
    """Trainer and rollout. Shared devices: both keep their weights, and the caches of a rollout use the room that the
    activations have in training. With --rollout-devices those generate and the others train."""
    model = model or model_of(config)
    context = config.context or config.max_seq_len
    rollout_devices = config.rollout_devices
    trainers = config.devices - rollout_devices
    if trainers < 1:
        raise UserError(
            f"--rollout-devices {rollout_devices} leaves no device to train; give at least --devices "
            f"{rollout_devices + 1}"
        )
    copy = model.total_parameters * memory.compute_bytes(chip)
    rows, largest = choose_rows(config, model, chip, trainers, beside=0 if rollout_devices else copy)
    total = config.total_batch_size or RL_SAMPLES * context
    split, notes = _share_out(config, total, trainers, model.seq_len, rows)
    parts = train_parts(config, model, chip, trainers, split.rows)
    training_only = ("activations", "logits", "workspace")  # nothing of these lives during a rollout
    if rollout_devices:
        resident = {"rollout_weights": copy, **memory.outside(chip)}
    else:
        parts = {**parts, "rollout_weights": copy}
        resident = {name: size for name, size in parts.items() if name not in training_only}
    max_sequences = memory.max_sequences_beside(model, chip, context, sum(resident.values()))
    if not max_sequences:
        raise TooLarge("one rollout", {**resident, **memory.caches(model, chip, 1, context)})
    rollout_parts = {**resident, **memory.caches(model, chip, max_sequences, context)}
    samples = max(1, split.total // context)
    generators = rollout_devices or config.devices
    concurrent = min(max_sequences, -(-samples // generators))  # sequences that one device decodes at once
    rate = DECODE_SHARE * generators * memory.decode_rate(model, chip, concurrent, context)
    steps = max(1, config.tokens // split.total) if config.tokens else RL_STEPS
    if not config.tokens:
        notes.append(f"no --tokens given: {RL_STEPS} steps assumed")
    exchanged, recompute = _exchanged(config, model, chip), _recompute(config, model)
    time = batch.duration(_flops(config, model), exchanged, chip, split, steps, config.mfu, None, recompute)
    rollout = split.total / rate
    hours = steps * (max(rollout, time.step_seconds) if rollout_devices else rollout + time.step_seconds) / 3600
    return {
        "model": model_facts(model),
        "memory": device_memory(parts, chip),
        "rollout_memory": device_memory(rollout_parts, chip),
        "batch": {**_batch(split, largest), "samples": samples},
        "rollout": {
            "shared": not rollout_devices,
            "devices": generators,
            "context": context,
            "kv_bytes_per_sequence": memory.kv_bytes(model, chip, context),
            "sequences_per_device": max_sequences,
            "sequences": max_sequences * generators,
            "waves": -(-samples // (max_sequences * generators)),
            "tokens_per_second": rate,
            "roofline_share": DECODE_SHARE,
        },
        "run": {"steps": steps, "tokens": steps * split.total},
        "time": {
            "mfu": time.mfu,
            "rollout_seconds": rollout,
            "train_seconds": time.step_seconds,
            "hours": hours,
            "device_hours": hours * config.devices,
            "cost": None if config.price is None else hours * config.devices * config.price,
        },
        "notes": notes,
    }


# Beyond one node: exchange, waiting for the slowest, failures. `ascendchat plan --depth 26 --devices 1024` prints it.
#
#     growth(...)        step time from one node to N, each device with the same work
#     reliability(...)   failures per day, seconds to recover, share of the time that is lost
#
# The formulas are in docs/en/scale.md. Only the bytes and the number of exchanges are measured (on simulated NPUs, see
# tests/npu/test_scale_npu.py); links come from chips.py, the rest are assumptions with a flag each.

HOST_BANDWIDTH = (
    10e9  # bytes per second from a device to its host's memory: the only time a checkpoint holds training up
)


def fabric_of(config: PlanConfig) -> Fabric:
    """The assumptions about the network that the user may set."""
    return Fabric(hop=config.hop_microseconds * 1e-6, jitter=config.jitter)


def growth(
    config: PlanConfig, chip: Chip, split: Split, flops: float, exchanged: Callable[[int], int], recompute: float
) -> list[dict[str, Any]]:
    """One row per number of devices, from one node (or all) to `config.devices`: the work of a device stays the same,
    so the batch grows with the devices, and any growth of the step is the price of being many. `exchanged`: bytes
    of a step, by devices."""
    sizes = [chip.devices_per_node]
    while sizes[-1] * 2 < config.devices:
        sizes.append(sizes[-1] * 2)
    rows: list[dict[str, Any]] = []
    for devices in [*sizes, config.devices]:
        work = dataclasses.replace(split, devices=devices)
        one = exchanged(min(devices, chip.devices_per_node))
        time = duration(flops, exchanged(devices), chip, work, 1, config.mfu, None, recompute, fabric_of(config), one)
        first = rows[0]["step_seconds"] if rows else time.step_seconds
        rows.append(
            {
                "devices": devices,
                "total_tokens": work.total,
                "step_seconds": time.step_seconds,
                "communication_seconds": time.communication_seconds,
                "waiting_seconds": time.waiting_seconds,
                "tokens_per_second": time.tokens_per_second,
                "efficiency": first / time.step_seconds,
            }
        )
    return rows


def reliability(config: PlanConfig, held: int, checkpoint: int, step_seconds: float) -> dict[str, float]:
    """Cost of failures. `held`: bytes that the device with most of it copies to its host for a checkpoint;
    `checkpoint`: bytes of all devices together."""
    devices = config.devices
    between = config.device_mtbf_hours * 3600 / devices  # seconds between two failures of the job
    pause = held / HOST_BANDWIDTH
    restart = config.restart_seconds + checkpoint / (config.storage_speed * 1e9)
    interval = config.save_every * step_seconds
    best = math.sqrt(2 * pause * between)
    return {
        "failures_per_day": 86400 / between,
        "seconds_between_failures": between,
        "checkpoint_bytes": checkpoint,
        "pause_seconds": pause,
        "save_every": config.save_every,
        "restart_seconds": restart,
        "recover_seconds": restart + interval / 2,
        "lost_share": lost(interval, pause, restart, between),
        "best_save_every": max(1, round(best / step_seconds)),
        "best_lost_share": lost(max(best, step_seconds), pause, restart, between),
    }


def lost(interval: float, pause: float, restart: float, between: float) -> float:
    """Share of the time: pauses for checkpoints, and per failure the restart and half an interval done twice."""
    return min(1.0, pause / interval + (restart + interval / 2) / between)
