"""A whole recipe on two simulated NPUs with HCCL, as `make demo DEVICE=npu` runs it, a few steps a stage."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_recipe import write_recipe
from warm_process import ServerPopen, run

import cannsim

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 1500  # seconds, on however busy a machine

pytestmark = pytest.mark.slow


def test_every_stage_of_a_recipe_runs_on_two_npus(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    environment = cannsim.environment(devices=2, state=str(tmp_path / "state"))
    environment |= {"ASCENDCHAT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = ["speedrun", "--recipe", str(write_recipe(tmp_path, 2)), "--device-type", "npu", "--devices", "2"]
    done = run(  # its processes start warm; cold ones train in test_base_npu, test_finetune_npu and test_hccl
        [sys.executable, "-m", "ascendchat", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        how=ServerPopen,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    started = re.findall(r"^\[\d/8\] ascendchat (?:launch --devices 2 )?(\w+)", done.stdout, flags=re.M)
    assert started == ["tokenizer", "data", "base", "mid", "sft", "rl", "eval", "report"]
    assert done.stdout.count("launch --devices 2 ") == 5
    for stage in ("base", "mid", "sft", "rl"):
        facts = json.loads((tmp_path / "home" / "runs" / "tiny" / stage / "run.json").read_text())
        assert (facts["chip"], facts["world"]) == ("Ascend910B3", 2), stage
        assert facts["software"]["CANN"], stage
    assert "hccl" in done.stdout
    assert re.search(r"^ +RL$", done.stdout, flags=re.M), "the table of the stages"
    assert os.path.getsize(tmp_path / "home" / "runs" / "tiny" / "report.html") > 10_000
    assert "Talk to it: ascendchat chat --run tiny" in done.stdout


TOO_LARGE = """
from ascendchat import cli
assert cli.main(["speedrun", "d12-910b-8", "--dry-run"]) == 0
assert cli.main(["speedrun", "d12-910b-8"]) == 2
"""


def test_a_recipe_for_more_npus_than_are_here_does_not_start(on_npu: Callable[..., Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    (rank,) = on_npu(TOO_LARGE, devices=5, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT, timeout=PATIENCE)
    said = (
        "the recipe is made for 8 x Ascend NPU, and this machine shows 5; give --devices 5, or take a recipe for fewer"
    )
    assert rank.output.count(f"note: {said}: d12-910b-4\n") == 1, rank.output
    assert rank.output.count(f"ascendchat speedrun: {said}: d12-910b-4\n") == 1, rank.output
    assert not home.exists(), "nothing was started"
