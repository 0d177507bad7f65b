"""plan beyond one node: exchange, growth of the step, failures. python -m pytest tests/plan/test_plan_scale.py"""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from ascendchat.chips import find, this_cpu
from ascendchat.cli import main
from ascendchat.config.commands import PlanConfig
from ascendchat.errors import home
from ascendchat.plan.goals import checkpoint_bytes, lost, train_plan
from ascendchat.plan.show import plan_text
from ascendchat.sizes.batch import COLLECTIVES, Fabric, Split, duration, exchange_seconds
from ascendchat.sizes.shape import Shape

CHIP = find("Ascend910B3")
PLAN = PlanConfig(depth=26, chip=CHIP.name, devices=1024, total_batch_size=2**24)


def planned(**changes: float) -> dict[str, float]:
    found: dict[str, float] = train_plan(dataclasses.replace(PLAN, **changes), CHIP)["scale"]  # type: ignore[arg-type]
    return found


def test_every_device_carries_a_share_of_its_node_between_nodes() -> None:
    """Two nodes: all of a node's exchange as before, then an eighth of the bytes, half of which goes to the other."""
    one = exchange_seconds(8 * 10**9, CHIP, 8, Fabric())
    two = exchange_seconds(8 * 10**9, CHIP, 16, Fabric(hop=0.0))
    assert one == pytest.approx(7e9 / CHIP.link)
    assert two - one == pytest.approx(10**9 / 2 / CHIP.node_link)
    late = exchange_seconds(8 * 10**9, CHIP, 1024, Fabric(hop=1e-3)) - exchange_seconds(
        8 * 10**9, CHIP, 1024, Fabric(0)
    )
    assert late == pytest.approx(COLLECTIVES * 7 * 1e-3), "128 nodes are log2(128) rounds"


def test_one_node_is_as_fast_as_its_share_of_the_peak_says() -> None:
    """The share of the peak was measured with the exchange of a node: nothing is added to it."""
    work = Split(8, 8, 1, 2048)
    calm, rough = (duration(1e9, 10**9, CHIP, work, 1, 0.25, None, 0.0, f) for f in (Fabric(0, 0), Fabric(1, 1)))
    assert calm == rough
    assert calm.step_seconds == pytest.approx(work.total * 1e9 / (CHIP.flops * 0.25 * 8))


def test_the_step_grows_with_the_devices_and_never_faster_than_its_parts() -> None:
    rows = train_plan(PLAN, CHIP)["scale"]["growth"]
    assert [row["devices"] for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024]
    steps = [row["step_seconds"] for row in rows]
    assert steps == sorted(steps)
    assert rows[0]["efficiency"] == 1
    more = rows[-1]["communication_seconds"] - rows[0]["communication_seconds"] + rows[-1]["waiting_seconds"]
    assert steps[-1] - steps[0] == pytest.approx(more)
    assert steps[-1] == train_plan(PLAN, CHIP)["time"]["step_seconds"], "the table ends with the plan itself"


def test_failures_and_recovery_follow_the_formulas() -> None:
    found = planned(device_mtbf_hours=24 * 1024.0, restart_seconds=60.0, storage_speed=1.0, save_every=100)
    assert found["failures_per_day"] == pytest.approx(1)
    assert found["restart_seconds"] == pytest.approx(60 + found["checkpoint_bytes"] / 1e9)
    step = train_plan(PLAN, CHIP)["time"]["step_seconds"]
    assert found["recover_seconds"] == pytest.approx(found["restart_seconds"] + 50 * step)
    share = found["pause_seconds"] / (100 * step) + found["recover_seconds"] / 86400
    assert found["lost_share"] == pytest.approx(share)


def test_no_interval_loses_less_than_the_best() -> None:
    pause, restart, between = 0.35, 120.0, 1e5
    best = math.sqrt(2 * pause * between)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert lost(best, pause, restart, between) < lost(best * factor, pause, restart, between)
    assert planned()["best_lost_share"] <= planned()["lost_share"]


def test_one_node_has_no_such_section_and_several_show_the_formulas() -> None:
    assert "scale" not in train_plan(dataclasses.replace(PLAN, devices=8), CHIP)
    facts = {"goal": "train", "chip": dataclasses.asdict(CHIP), "devices": 1024, "dtype": "bfloat16"}
    text = plan_text(facts | train_plan(PLAN, CHIP))
    assert "24 N / MTBF" in text
    assert "128 x 8" in text
    assert "step time by devices" in text


@pytest.mark.parametrize(
    ("devices", "shown", "whole"),
    [(12, "1 x 8 + 1 x 4", "8 or 16"), (1025, "128 x 8 + 1 x 1", "1024 or 1032"), (16, "2 x 8", "")],
)
def test_devices_that_do_not_fill_their_nodes_are_shown_as_asked_for(devices: int, shown: str, whole: str) -> None:
    plan = train_plan(dataclasses.replace(PLAN, devices=devices), CHIP)
    facts = {"goal": "train", "chip": dataclasses.asdict(CHIP), "devices": devices, "dtype": "bfloat16"}
    assert re.search(rf"nodes x devices +{re.escape(shown)}\n", plan_text(facts | plan))
    notes = [note for note in plan["notes"] if "do not fill nodes" in note]
    assert [note.endswith(f"give --devices {whole}") for note in notes] == [True] * bool(whole)


def test_a_checkpoint_takes_the_disk_that_is_planned() -> None:
    """In float32 the weights are written twice: as the model, and with the state of the optimizer."""
    sizes = "--depth 2 --dim 64 --head-dim 16 --max-seq-len 32 --total-batch-size 64 --device-batch-size 2 --steps 1"
    quiet = "--eval-every 0 --sample-every 0 --device-type cpu --run disk".split()
    assert main(["base", *sizes.split(), "--data", "toyworld", *quiet]) == 0
    folder = home() / "runs" / "disk" / "base" / "step_000001"
    shape = Shape.from_dict(json.loads((folder / "state.json").read_text())["shape"])
    found = sum(path.stat().st_size for path in folder.iterdir())
    assert found == pytest.approx(checkpoint_bytes(PlanConfig(), shape, this_cpu()), rel=0.02)
