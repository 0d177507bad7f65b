"""Whole recipes on simulated NPUs with HCCL: every stage, as `make demo DEVICE=cannsim` runs it; RL beside a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_recipe import write_recipe
from warm_process import ServerPopen

import cannsim
from ascendchat.device import smi
from ascendchat.runs.run import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900  # seconds, on however busy a machine
SMALL_RL = {
    "data": ["toy_arithmetic_en"], "prompts_per_step": 4, "samples": 4, "max_new_tokens": 16, "num_iterations": 2,
    "device_batch_size": 4, "eval_every": -1, "sample_every": 0, "log_every": 1,
}  # fmt: skip
WORLD = """
from ascendchat.cli import main

sizes = "--depth 2 --dim 64 --head-dim 16 --max-seq-len 96 --device-batch-size 8 --total-batch-size 768"
often = "--steps 2 --eval-every -1 --sample-every 0 --device-type cpu --run d12"
assert main(["tokenizer", "train", "--vocab-size", "320"]) == 0
assert main(["base", *sizes.split(), *often.split()]) == 0
"""

pytestmark = pytest.mark.slow


def speedrun(home: Path, recipe: Path, devices: int, *more: str) -> tuple[Any, dict[str, str]]:
    """The command, whose processes start warm, and its environment; cold ones are in test_rank_kills.py."""
    (home / "state").mkdir(parents=True)
    environment = cannsim.environment(devices=devices, state=str(home / "state"))
    environment |= {"ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "ascendchat", "speedrun", "--recipe", str(recipe), "--device-type", "npu", *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return ServerPopen(words, cwd=recipe.parent, env=environment, **pipes), environment


def finish(process: Any) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return str(output)


def test_every_stage_of_a_recipe_runs_on_two_npus(tmp_path: Path) -> None:
    process, _ = speedrun(tmp_path / "home", write_recipe(tmp_path, 2), 2, "--devices", "2")
    output = finish(process)
    started = re.findall(r"^\[\d/8\] ascendchat (?:launch --devices 2 )?(\w+)", output, flags=re.M)
    assert started == ["tokenizer", "data", "base", "mid", "sft", "rl", "eval", "report"]
    assert output.count("launch --devices 2 ") == 5
    for stage in ("base", "mid", "sft", "rl"):
        facts = json.loads((tmp_path / "home" / "runs" / "tiny" / stage / "run.json").read_text())
        assert (facts["chip"], facts["world"]) == ("Ascend910B3", 2), stage
        assert facts["software"]["CANN"], stage
    assert "hccl" in output
    assert re.search(r"^ +RL$", output, flags=re.M), "the table of the stages"
    assert os.path.getsize(tmp_path / "home" / "runs" / "tiny" / "report.html") > 10_000
    assert "Talk to it: ascendchat chat --run tiny" in output


def holders(environment: dict[str, str]) -> dict[int, set[int]]:
    """Processes on each device, by npu-smi."""
    table = subprocess.run(["npu-smi", "info"], env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[int, set[int]] = {}
    for process in smi.parse_npu_table(table).processes:
        found.setdefault(process.device, set()).add(process.pid)
    return found


@pytest.mark.long(short="test_every_stage_of_a_recipe_runs_on_two_npus")
def test_two_npus_train_while_two_generate(tmp_path: Path, on_npu: Callable[..., Any]) -> None:
    """The recipe rl-npu: two train, with HCCL between them, a server generates on the others."""
    home = tmp_path / "home"
    on_npu(WORLD, ASCENDCHAT_HOME=home, timeout=PATIENCE)
    recipe = yaml.safe_load((ROOT / "ascendchat/recipes/rl-npu.yaml").read_text(encoding="utf-8"))
    assert (recipe["devices"], recipe["stages"][0]["rl"]["rollout_devices"]) == (2, 2)
    recipe["stages"][0]["rl"] |= SMALL_RL
    (tmp_path / "rl-npu.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    process, environment = speedrun(home, tmp_path / "rl-npu.yaml", 4)
    held: dict[int, set[int]] = {}
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until and len(held) < 4:
        time.sleep(0.05)
        if len(list((home / "state").glob("*.device"))) >= 4:  # processes that have opened one
            held = holders(environment)
    output = finish(process)
    assert sorted(held) == [0, 1, 2, 3], "all four are used at the same time"
    assert len(set.union(*held.values())) == 4, f"by a process each: {held}"
    assert "hccl" in output
    folder = home / "runs" / "d12" / "rl"
    rows = [row for row in read_metrics(folder) if "reward" in row]
    assert len(rows) == 2
    assert all(row["logprob_gap"] < 0.05 for row in rows), "bf16 on both sides"
    assert len(list((folder / "transcripts").iterdir())) == 2 * 2
    said = (folder / "rollouts" / "server-0.log").read_text(encoding="utf-8")
    assert said.count("npu") >= 1, said
    until = time.monotonic() + 60
    while holders(environment):
        assert time.monotonic() < until, "the server ends with the run"
        time.sleep(1)


TOO_LARGE = """
from ascendchat import cli
assert cli.main(["speedrun", "d12-910b-8"]) == 2
"""


def test_a_recipe_for_more_npus_than_are_here_does_not_start(on_npu: Callable[..., Any], tmp_path: Path) -> None:
    home = tmp_path / "home"
    (rank,) = on_npu(TOO_LARGE, devices=5, ASCENDCHAT_HOME=home, timeout=PATIENCE)
    said = (
        "the recipe is made for 8 x Ascend NPU, and this machine shows 5; give --devices 5, or take a recipe for fewer"
    )
    assert rank.output.count(f"ascendchat speedrun: {said}: d12-910b-4\n") == 1, rank.output
    assert not home.exists(), "nothing was started"
