"""A recipe that is killed again and again ends with the models and the table of one that was left alone.

ASCENDCHAT_KILLS=10 python -m pytest -m '' tests/invariant/test_speedrun_killed.py     # more of them
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_recipe import write_recipe
from warm_process import ServerPopen, children

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("ASCENDCHAT_KILLS", "1"))
STEPS = 5
PATIENCE = 1500  # seconds, on however busy a machine
STAGES = 8


def start(recipe: Path, home: Path) -> Any:
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "ascendchat", "speedrun", "--recipe", str(recipe), "--device-type", "cpu"]
    with open(home.with_suffix(".log"), "a") as log:
        return ServerPopen(words, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def kill(number: int) -> None:
    """A process and all that it has started, at once, as when a machine is switched off."""
    for child in children(number):
        kill(child)
    os.kill(number, signal.SIGKILL)


def ended(recipe: Path, home: Path) -> tuple[str, dict[str, bytes], str]:
    """Run to the end: the table, the weights of every stage, and all that was printed."""
    process = start(recipe, home)
    status = process.wait(PATIENCE)
    output = home.with_suffix(".log").read_text()
    assert status == 0, output
    last = output[output.rindex("train loss") : output.rindex("stages done")]
    found = {path.parent.parent.name: path.read_bytes() for path in home.glob("runs/tiny/*/step_*/model.safetensors")}
    assert set(found) == {"base", "mid", "sft", "rl"}
    assert (home / "runs" / "tiny" / "report.html").stat().st_size > 10_000
    return last.rsplit("\n", 1)[0], found, output


def steps(home: Path) -> int:
    """Training steps that were told of, those that were done again included."""
    log = home.with_suffix(".log")
    return len(re.findall(r"step \d+/\d+ \|", log.read_text())) if log.exists() else 0


@pytest.mark.slow
def test_a_recipe_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """The moments are counted in steps, so that they fall into all stages on any machine."""
    recipe, home = write_recipe(tmp_path, STEPS), tmp_path / "killed"
    table, weights, output = ended(recipe, tmp_path / "whole")
    assert output.count(f"/{STAGES}] ascendchat ") == STAGES
    assert steps(tmp_path / "whole") > 3 * STEPS
    for moment in sorted(random.Random(0).sample(range(1, 3 * STEPS), KILLS)):
        process, until = start(recipe, home), time.monotonic() + PATIENCE
        while process.poll() is None and steps(home) < moment:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert process.poll() is None, home.with_suffix(".log").read_text()
        kill(process.pid)
        process.wait(PATIENCE)
    again, others, output = ended(recipe, home)
    assert others == weights
    assert again == table
    assert "skipped" in output, "what was done before a kill is not done again"
