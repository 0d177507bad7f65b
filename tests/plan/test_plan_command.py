"""`ascendchat plan`: valid JSON for the sizes and chips that matter, a readable table, refusals whose advice fits."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.chips import find
from ascendchat.config import parse
from ascendchat.config.commands import PlanConfig
from ascendchat.errors import UserError
from ascendchat.plan import command as plan
from ascendchat.plan.command import flags as flags_text
from ascendchat.plan.command import suggestions
from ascendchat.plan.goals import TooLarge
from ascendchat.plan.show import plan_text

STEADY = settings(derandomize=True, deadline=None, max_examples=40)  # the same examples on every machine

ROOT = Path(__file__).resolve().parents[2]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert plan.run(parse(PlanConfig, [*flags, "--json"])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.fixture(autouse=True)
def _same_cpu_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans of these tests do not depend on the machine that runs them: two cores, 8 GiB."""
    monkeypatch.setattr(plan, "this_cpu", lambda: find("cpu"))
    monkeypatch.delenv("ASCENDCHAT_CHIP", raising=False)


@pytest.mark.parametrize("goal", ["train", "rl", "inference"])
@pytest.mark.parametrize(("chip", "devices"), [("Ascend910B3", 8), ("cpu", 1)])
def test_the_plan_is_one_json_object_whose_parts_add_up(
    capsys: pytest.CaptureFixture[str], chip: str, devices: int, goal: str
) -> None:
    flags = ["--depth", "20", "--chip", chip, "--devices", str(devices), "--goal", goal]
    refused = ""
    try:
        found = planned(capsys, *flags)
    except UserError as error:
        refused = str(error)
        found = json.loads(capsys.readouterr().out)
    memory = found["memory"]
    assert sum(memory["parts"].values()) == memory["total"]
    assert found["fits"] == (memory["total"] <= memory["room"]) == (not refused)
    assert sum(found["model"]["parameters"].values()) == found["model"]["total_parameters"]
    assert found["fits"] or chip == "cpu"
    if refused:
        assert refused == found["reason"]
        change = found["suggestions"][0]
        assert plan.make(parse(PlanConfig, [*flags, *flags_text(change).split()]), find(chip))["fits"]
    elif goal != "inference":
        batch = found["batch"]
        micro = batch["devices"] * batch["device_rows"] * batch["seq_len"]
        assert batch["total_tokens"] == micro * batch["accumulation"]
        assert found["time"]["hours"] > 0


def test_training_numbers_agree_with_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--depth", "20", "--chip", "Ascend910B3", "--npus", "8", "--price", "2")
    assert found["batch"]["total_tokens"] == 2**20
    assert found["run"]["steps"] == 4980
    assert found["rates"]["matrices"] == pytest.approx(0.02 * 2**0.5)
    assert found["weight_decay"] == pytest.approx(0.28 * 2**0.5 * 1.3212 / 5.2219, rel=1e-3)
    assert found["time"]["cost"] == pytest.approx(found["time"]["hours"] * 16)
    assert 100_000 < found["time"]["tokens_per_second"] < 300_000  # ports reach about 140 K at depth 24


def test_a_total_that_does_not_divide_is_raised_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--depth", "12", "--chip", "Ascend910B3", "--total-batch-size", "524288"]
    assert planned(capsys, *flags, "--devices", "4")["notes"] == []
    found = planned(capsys, *flags, "--devices", "3")
    assert found["batch"]["total_tokens"] == 261 * 2048
    assert any("total batch raised to 534,528" in note for note in found["notes"])


def test_without_a_chip_the_environment_or_the_cpu_is_used_and_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCENDCHAT_CHIP", "Ascend910B3")
    found = planned(capsys, "--depth", "12")
    assert (found["chip"]["name"], found["notes"]) == (
        "Ascend910B3",
        ["no --chip given: Ascend910B3 from $ASCENDCHAT_CHIP"],
    )
    monkeypatch.delenv("ASCENDCHAT_CHIP")
    monkeypatch.setattr(plan, "this_cpu", lambda: dataclasses.replace(find("cpu"), memory=512 * 2**30))
    found = planned(capsys, "--goal", "inference", "--depth", "2")
    assert (found["chip"]["device_type"], found["chip"]["memory"]) == ("cpu", 512 * 2**30)
    assert "this machine's CPU" in found["notes"][0]


def test_rollout_devices_of_their_own_hold_only_weights_and_caches(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--goal", "rl", "--depth", "20", "--chip", "Ascend910B3", "--devices", "8", "--context", "1024"]
    shared, apart = planned(capsys, *flags), planned(capsys, *flags, "--rollout-devices", "4")
    assert "gradients" in shared["rollout_memory"]["parts"]
    assert "gradients" not in apart["rollout_memory"]["parts"]
    assert apart["rollout"]["sequences_per_device"] > shared["rollout"]["sequences_per_device"]
    assert (apart["batch"]["devices"], apart["rollout"]["devices"]) == (4, 4)
    for found in (shared, apart):
        memory = found["rollout_memory"]
        assert memory["total"] == sum(memory["parts"].values()) <= memory["room"]
        assert found["batch"]["samples"] == 256


CONFIGS = st.builds(
    PlanConfig,
    goal=st.sampled_from(["train", "rl", "inference"]),
    depth=st.integers(1, 120),
    chip=st.sampled_from(["Ascend910B4", "Ascend310P3", "RTX 4090", "T4", "cpu"]),
    devices=st.sampled_from([1, 2, 3, 8]),
    max_seq_len=st.sampled_from([512, 2048, 8192]),
    device_batch_size=st.sampled_from([None, None, 4, 48, 512]),
    context=st.sampled_from([None, 65536]),
)


@STEADY
@given(CONFIGS)
def test_what_a_refusal_suggests_does_fit(config: PlanConfig) -> None:
    chip = find(config.chip)
    goal = plan.GOALS[config.goal]
    try:
        goal(config, chip)
    except TooLarge:
        changes = suggestions(goal, config, chip)
        for change in changes:
            plan.make(dataclasses.replace(config, **change), chip)
        with pytest.raises(UserError, match="does not fit") as error:
            plan.make(config, chip)
        assert str(error.value).count("--") >= len(changes)


def test_a_refusal_names_the_smallest_changes_and_they_can_be_typed() -> None:
    flags = ["--depth", "32", "--chip", "Ascend910B4"]
    with pytest.raises(UserError) as error:
        plan.run(parse(PlanConfig, flags))
    text = str(error.value)
    assert text.startswith("depth 32 does not fit Ascend910B4: one row per device needs")
    advice = re.findall(r"--depth (\d+)", text.split("; use ")[1])
    deeper = [*flags, "--depth", str(int(advice[0]) + 1)]
    with pytest.raises(UserError):
        plan.run(parse(PlanConfig, deeper))
    assert plan.run(parse(PlanConfig, [*flags, "--depth", advice[0]])) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lora-rank", "8"], "--hf-config"),
        (["--bits", "4"], "add --lora (of plan: --lora-rank 16)"),
        (["--bits", "4", "--goal", "inference"], "--bits belongs to --goal train"),
        (["--bits", "4", "--hf-config", "x", "--lora-rank", "8", "--shard", "2"], "leave one of the two out"),
        (["--bits", "4", "--hf-config", "x", "--lora-rank", "8", "--chip", "Ascend910B3"], "not on Ascend NPU"),
        (["--rollout-devices", "1"], "--goal rl"),
        (["--goal", "rl", "--rollout-devices", "1"], "--devices 2"),
        (["--chip", "910B"], "the Atlas A2 cards are Ascend910B1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(flags: list[str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        plan.run(parse(PlanConfig, ["--chip", "H100", "--depth", "12", *flags]))


@pytest.mark.parametrize("goal", ["train", "rl", "inference"])
def test_the_table_fits_100_columns_and_names_every_part(goal: str) -> None:
    found = plan.make(parse(PlanConfig, ["--goal", goal, "--depth", "26", "--devices", "8"]), find("Ascend910_9392"))
    text = plan_text(found)
    assert max(map(len, text.splitlines())) <= 100
    for part, size in found["memory"]["parts"].items():
        assert (part.replace("_", " ") in text) == (size > 0)
    assert "1.68 B (1,681,916,730)" in text


def test_the_command_runs_without_torch() -> None:
    script = "import sys; from ascendchat.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, "plan", "--depth", "12", "--chip", "H200"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert "total parameters" in result.stdout


def test_more_cpus_are_never_suggested_and_are_said_to_be_machines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        plan.run(parse(PlanConfig, ["--depth", "26", "--chip", "cpu"]))
    assert "--devices" not in str(error.value)
    found = planned(capsys, "--depth", "4", "--chip", "cpu", "--devices", "2")
    assert "a machine has one cpu: 2 of them are 2 machines" in found["notes"]


def test_a_device_batch_that_was_asked_for_does_not_hide_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--depth", "12", "--chip", "H200", "--device-batch-size", "2")["batch"]
    assert (found["device_rows"], found["largest_device_rows"]) == (2, 128)


def test_a_device_batch_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    with pytest.raises(UserError, match=r"a device batch of 48 needs .* use --device-batch-size 8, or"):
        plan.run(parse(PlanConfig, ["--depth", "20", "--chip", "Ascend910B3", "--device-batch-size", "48"]))


def test_checkpointing_saves_memory_and_costs_up_to_a_third_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--depth", "20", "--chip", "Ascend910B3", "--devices", "8", "--device-batch-size", "16"]
    plainly, again = planned(capsys, *flags), planned(capsys, *flags, "--activation-checkpointing")
    assert again["memory"]["total"] < 0.6 * plainly["memory"]["total"]
    assert 1.25 < again["time"]["hours"] / plainly["time"]["hours"] < 4 / 3
