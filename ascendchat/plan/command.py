"""`ascendchat plan`: what a run needs, before any device is used: parameters, FLOPs, memory by part, hours and cost.

ascendchat plan --depth 20 --chip Ascend910B3 --devices 8 [--goal rl] [--hf-config config.json] [--json]
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from ascendchat.chips import Chip, find, this_cpu
from ascendchat.config import UserError
from ascendchat.config.commands import PlanConfig
from ascendchat.plan.goals import TooLarge, inference_plan, rl_plan, train_plan
from ascendchat.plan.refuse import DoesNotFit, refusal
from ascendchat.sizes import hf
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
