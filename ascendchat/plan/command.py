"""`ascendchat plan`: what a run needs, before any device is used: parameters, FLOPs, memory by part, hours and cost.

ascendchat plan --depth 20 --chip Ascend910B3 --devices 8 [--goal rl] [--hf-config config.json] [--json]
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from ascendchat.chips import GIB, Chip, find, this_cpu
from ascendchat.config.commands import PlanConfig
from ascendchat.errors import UserError
from ascendchat.plan.goals import TooLarge, device_memory, inference_plan, model_facts, model_of, rl_plan, train_plan
from ascendchat.sizes import hf
from ascendchat.sizes.hf import packing_saves
from ascendchat.sizes.memory import compute_dtype

GOALS = {"train": train_plan, "rl": rl_plan, "inference": inference_plan}


def choose_chip(name: str) -> tuple[Chip, list[str]]:
    """The named chip, that of $ASCENDCHAT_CHIP, or the CPU; which of them is said. "cpu" is that of this machine."""
    named = name or os.environ.get("ASCENDCHAT_CHIP", "")
    chip = find(named or "cpu")
    if chip.name == "cpu":
        chip = this_cpu()
    if name:
        return chip, []
    if named:
        return chip, [f"no --chip given: {named} from $ASCENDCHAT_CHIP"]
    return chip, ["no --chip given: this machine's CPU; name another with --chip Ascend910B3"]


def make(config: PlanConfig, chip: Chip) -> dict[str, Any]:
    """The whole plan as plain values; DoesNotFit (a UserError) names the smallest changes when nothing fits."""
    if config.lora_rank and not config.hf_config:
        raise UserError("--lora-rank adapts an existing model; name it with --hf-config config.json")
    if config.bits and config.goal != "train":
        raise UserError("--bits belongs to --goal train")
    if config.bits:
        hf.check_bits(bool(config.lora_rank), config.shard)
        hf.check_bits_on(chip)
    if config.rollout_devices and config.goal != "rl":
        raise UserError("--rollout-devices belongs to --goal rl")
    plan = GOALS[config.goal]
    facts = dataclasses.asdict(chip)
    head = {"goal": config.goal, "chip": facts, "devices": config.devices, "dtype": compute_dtype(chip)}
    try:
        return head | {"fits": True} | plan(config, chip)
    except TooLarge as reason:
        refused = refusal(plan, config, chip, reason)
        refused.facts = head | {"fits": False} | refused.facts
        raise refused from None


def run(config: PlanConfig) -> int:
    """`ascendchat plan`: print the plan as a table, or as one JSON object. A refusal is an object too, and exits 2."""
    chip, notes = choose_chip(config.chip)
    try:
        plan = make(config, chip)
    except DoesNotFit as refused:
        if config.json:
            print(json.dumps(refused.facts))
        raise
    if config.devices > 1 and chip.devices_per_node == 1:
        notes.append(f"a machine has one {chip.name}: {config.devices} of them are {config.devices} machines")
    if not chip.trains and config.goal != "inference":
        notes.append(f"{chip.name} is an inference product, ascendchat does not train on it; see --goal inference")
    plan["notes"] = notes + plan["notes"]
    if config.json:
        print(json.dumps(plan))
        return 0
    from ascendchat.plan.show import show

    show(plan)
    return 0


# What to change when a plan does not fit: every suggestion is found by search and has been planned itself.
#
# ascendchat plan --depth 32 --chip Ascend910B4       # refused, with the flags that would fit

Planner = Callable[[PlanConfig, Chip], dict[str, Any]]
MAX_DEVICES = 1024
MIN_ROW = 128


def _halves(length: int) -> list[int]:
    """1000 -> 500, 250"""
    return [length >> k for k in range(1, length.bit_length()) if length >> k >= MIN_ROW]


def _ladders(config: PlanConfig, chip: Chip) -> Iterator[Iterator[dict[str, Any]]]:
    """One ladder of changes per setting, gentlest first; the first rung of each that fits is suggested."""
    if config.device_batch_size is not None:
        rows = range(config.device_batch_size - 1, 0, -1)
        powers = [r for r in rows if r & (r - 1) == 0]
        yield ({"device_batch_size": r} for r in powers)
    training = config.goal != "inference"
    if config.goal == "rl" and not config.rollout_devices and config.devices > 1:
        yield ({"rollout_devices": n} for n in range(1, config.devices))
    if training and not config.activation_checkpointing:
        yield iter([{"activation_checkpointing": True}])
    # More devices share the optimizer state; decoding needs whole copies, and a second CPU is a second machine.
    if training and chip.devices_per_node > 1:
        yield ({"devices": 2**k} for k in range(MAX_DEVICES.bit_length()) if config.devices < 2**k <= MAX_DEVICES)
    if training and config.hf_config and not config.lora_rank:
        yield iter([{"lora_rank": 16}])
    if config.goal == "train" and config.hf_config and not config.bits and not config.shard and packing_saves(chip):
        yield iter([{"bits": 4} if config.lora_rank else {"lora_rank": 16, "bits": 4}])
    if config.goal != "train":
        yield ({"context": n} for n in _halves(config.context or config.max_seq_len))
    if training:
        yield ({"max_seq_len": n} for n in _halves(config.max_seq_len))
    if not config.hf_config:
        yield ({"depth": d} for d in range(config.depth - 1, 0, -1))
        if training:
            yield ({"depth": d, "activation_checkpointing": True} for d in range(config.depth - 1, 0, -1))
    elif training and not config.activation_checkpointing:
        yield iter([{"lora_rank": config.lora_rank or 16, "activation_checkpointing": True}])


def _fits(plan: Planner, config: PlanConfig, chip: Chip) -> bool:
    try:
        plan(config, chip)
    except (TooLarge, UserError):
        return False
    return True


def suggestions(plan: Planner, config: PlanConfig, chip: Chip) -> list[dict[str, Any]]:
    """Changes of one setting that fit, each the smallest of its kind; of two settings only where no single one does."""
    changes: list[dict[str, Any]] = []
    for ladder in _ladders(config, chip):
        for change in ladder:
            if changes and len(change) > 1:
                break
            if _fits(plan, dataclasses.replace(config, **change), chip):
                changes.append(change)
                break
    return changes


def flags(change: dict[str, Any]) -> str:
    """A change as the user types it."""
    words = []
    for name, value in change.items():
        words.append("--" + name.replace("_", "-") + ("" if value is True else f" {value}"))
    return " ".join(words)


class DoesNotFit(UserError):
    """The sentence for people, and `facts` for `--json`."""

    def __init__(self, text: str, facts: dict[str, Any]) -> None:
        super().__init__(text)
        self.facts = facts


def refusal(plan: Planner, config: PlanConfig, chip: Chip, reason: TooLarge) -> DoesNotFit:
    """One sentence: what does not fit where, by how much, and what would."""
    model = config.hf_config or f"depth {config.depth}"
    where = chip.name if config.devices == 1 else f"{config.devices} x {chip.name}"
    memory = device_memory(reason.parts, chip)
    changes = suggestions(plan, config, chip)
    remedy = "no change of its settings fits: use a chip with more memory"
    if changes:
        remedy = f"use {', or '.join(flags(change) for change in changes)}"
    text = (
        f"{model} does not fit {where}: {reason.what} needs {memory['total'] / GIB:.1f} GiB on a device, "
        f"{memory['room'] / GIB:.1f} of its {chip.memory / GIB:.0f} GiB can be used; {remedy}"
    )
    facts = {"model": model_facts(model_of(config)), "memory": memory, "reason": text, "suggestions": changes}
    return DoesNotFit(text, facts)
