"""Stages that the loop has never heard of pass through it, and a run that was killed ends in the same bytes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from warm_process import run

from ascendchat.record import read_metrics
from ascendchat.record.saved import checkpoints

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("other_stages.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # no simulated CANN here


def train(name: str, folder: Path, *more: str, how: Callable[..., Any] = run) -> int:
    words = [sys.executable, str(SCRIPT), name, str(folder), *more]
    return int(how(words, cwd=ROOT, env=ENVIRONMENT, timeout=600).returncode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy", "adapters"])
def test_a_killed_run_of_another_stage_ends_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    if name == "adapters":
        pytest.importorskip("transformers")
    assert train(name, tmp_path / "whole", how=subprocess.run) == 0
    assert train(name, tmp_path / "killed", "8") == -9
    assert checkpoints(tmp_path / "killed")[-1] == 6
    assert train(name, tmp_path / "killed") == 0
    for file in ("model.safetensors", "optim-0-of-1.safetensors"):
        whole, killed = ((tmp_path / run / "step_000010" / file).read_bytes() for run in ("whole", "killed"))
        assert whole == killed
    whole, killed = (
        [(row["step"], row["loss"], row["gradient_norm"]) for row in read_metrics(tmp_path / run) if "loss" in row]
        for run in ("whole", "killed")
    )
    assert whole == killed
    names = set(load_file(tmp_path / "whole" / "step_000010" / "model.safetensors"))
    if name == "adapters":
        assert len(names) == 12, "only the adapters of six layers are saved"
        assert whole[-1][1] < whole[0][1] - 0.1
    else:
        rewards = [row["reward"] for row in read_metrics(tmp_path / "whole") if "reward" in row]
        assert rewards[-1] > 0.6, f"sampling by chance gives 0.5: {rewards}"
        assert (tmp_path / "whole" / "best").is_file()
        assert all(-4.0 < row["logprob"] < 0.0 for row in read_metrics(tmp_path / "whole") if "loss" in row)
    assert json.loads((tmp_path / "whole" / "step_000010" / "state.json").read_text())["stage"] == name


def test_the_loop_names_no_model_and_no_optimizer() -> None:
    for file in ("loop.py", "stage.py", "run.py"):
        tree = ast.parse((ROOT / "ascendchat" / "train" / file).read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not names & {"GPT", "MuonAdamW", "RowStage", "BaseStage", "ChatStage", "Tokenizer"}, file
