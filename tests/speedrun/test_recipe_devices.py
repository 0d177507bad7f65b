"""A recipe is compared with the devices of the machine before it starts, and what it needs is counted for as many as it
has. On NPUs: tests/npu/test_speedrun_npu.py."""

from __future__ import annotations

import dataclasses

import pytest

from ascendchat.chips import find
from ascendchat.config.commands import SpeedrunConfig
from ascendchat.device.env import MachineFacts
from ascendchat.sizes.shape import Shape
from ascendchat.speedrun.command import read_recipe, run
from ascendchat.speedrun.estimate import estimates
from ascendchat.speedrun.recipe import devices_here, recipe_files, select_stages, shortage


def said(name: str, here: int, device_type: str = "npu", only: tuple[str, ...] = ()) -> str:
    recipe = read_recipe(recipe_files()[name])
    return shortage(recipe, select_stages(recipe, "", only), device_type, here)


def test_too_few_devices_are_a_sentence_with_what_to_do() -> None:
    made = "the recipe is made for 8 x Ascend NPU, and this machine shows"
    assert said("d20-910b-8", 4) == f"{made} 4; give --devices 4, or take a recipe for fewer: d12-910b-4"
    assert said("d20-910b-8", 2) == f"{made} 2; give --devices 2"
    assert said("qwen-grpo-910b-8", 6) == f"{made} 6; give --devices 2"
    own = "in a recipe of your own, lower devices and rollout_devices"
    assert said("qwen-grpo-910b-8", 4) == f"{made} 4; {own}"
    gpus = "the recipe is made for 8 x NVIDIA GPU, and this machine shows 1"
    assert said("d20-h100-8", 1, "cuda") == f"{gpus}; give --devices 1, or take a recipe for fewer: d12-h200-1"


def test_enough_devices_for_the_stages_that_run_are_no_news() -> None:
    assert said("d20-910b-8", 8) == said("d20-910b-8", 16) == said("rl-npu", 4) == ""
    assert said("qwen-grpo-910b-8", 1, only=("data fetch",)) == said("qwen-grpo-910b-8", 4, only=("eval",)) == ""


def test_devices_are_counted_only_where_some_may_be() -> None:
    bare = MachineFacts(torch_npu=True, cann=False, driver=False, nodes=(), nvidia=False)
    assert [bare.may_have(kind) for kind in ("npu", "cuda", "mps", "cpu")] == [False] * 4
    assert MachineFacts(True, True, True, (), False).may_have("npu")
    assert MachineFacts(False, False, False, (), True).may_have("cuda")
    assert devices_here("cpu") is None


def test_a_plan_for_another_machine_says_nothing_of_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Here are no NPUs, and nobody said that there were: the recipe is planned as for its own machine."""
    assert run(SpeedrunConfig("d20-910b-8", dry_run=True)) == 0
    assert "this machine shows" not in capsys.readouterr().out


def test_only_base_keeps_the_mean_of_its_weights_and_checkpoints_are_whole() -> None:
    chip, disks = find("Ascend910B3"), set()
    for devices in (1, 4, 8):
        recipe = dataclasses.replace(read_recipe(recipe_files()["d20-910b-8"]), devices=devices)
        made = dict(zip([command for command, _ in recipe.stages], estimates(recipe, chip, "")))
        base, sft = made["base"], made["sft"]
        assert base.disk - sft.disk == 4 * Shape.from_depth(20).total_parameters, "the last one has the mean"
        disks.add(sft.disk)
    assert len(disks) == 1, "how many devices write it does not matter"
    assert base.memory == sft.memory, "on the devices it takes nothing"
