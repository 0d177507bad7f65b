"""A fine-tuning that is killed, or that goes on with another number of ranks, ends where it would have ended."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from warm_process import TheirsPopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
import hf_models

from ascendchat.record import read_metrics

STEPS = 12
KILLS = int(os.environ.get("ASCENDCHAT_TEST_KILLS", "3"))  # ten when a release is made
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("finetune-resume"), random.Random(0)
    hf_models.save(folder / "tiny", "qwen2", initializer_range=0.1)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(80)]
    rows = [{"instruction": f"What is {a} plus {b}?", "output": f"The answer is {a + b}."} for a, b in pairs]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def command(run: str, *more: str, ranks: int = 1) -> list[str]:
    sizes = f"--max-seq-len 96 --total-batch-size 384 --device-batch-size 2 --steps {STEPS} --learning-rate 0.01"
    pace = "--save-every 2 --keep 9 --eval-every 4 --sample-every 0 --log-every 1 --device-type cpu"
    named = ["finetune", "--model", "tiny", "--data", "sums.jsonl", "--run", run, "--lora", "--lora-rank", "4"]
    launch = ["launch", "--devices", str(ranks), "--device-type", "cpu"] if ranks > 1 else []
    return [sys.executable, "-m", "ascendchat", *launch, *named, *sizes.split(), *pace.split(), *more]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(home: Path, words: list[str], how: type[subprocess.Popen[str]] = TheirsPopen) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return how(words, env=environment(home), cwd=home, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(home: Path, run: str, *more: str, ranks: int = 1, how: type[subprocess.Popen[str]] = TheirsPopen) -> str:
    process = start(home, command(run, *more, ranks=ranks), how)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def final(home: Path, run: str, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(home / "runs" / run / "hf" / f"step_{STEPS:06d}" / file)


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> dict[str, torch.Tensor]:
    finish(home, "whole", how=subprocess.Popen)  # nothing in common with those that are killed
    return final(home, "whole")


def cut(home: Path, run: str, last: int) -> None:
    """As if the run had been killed behind its checkpoint of step `last`."""
    folder = home / "runs" / run / "hf"
    for path in folder.glob("step_*"):
        if int(path.name[5:]) > last:
            shutil.rmtree(path)
    (folder / "latest").write_text(f"step_{last:06d}\n", encoding="utf-8")


def kill_at_random_moments(home: Path, run: str, times: int, *more: str, behind: str = " step ") -> str:
    """Each time soon after it has said `behind`; what it says when it then comes to its end."""
    rng = random.Random(1)
    for _ in range(times):
        process = start(home, command(run, *more))
        assert process.stdout is not None
        for line in process.stdout:
            if behind in line:
                break
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.wait()
    return finish(home, run, *more)


def assert_same_end(home: Path, one: str, other: str) -> None:
    for file in ("model.safetensors", "optim-0-of-1.safetensors"):
        ours, theirs = final(home, one, file), final(home, other, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file


def test_kills_at_random_moments_change_nothing(home: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    kill_at_random_moments(home, "killed", KILLS)
    assert_same_end(home, "killed", "whole")


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install -e '.[qlora]' to run this test",
)
def test_a_kill_changes_nothing_where_the_base_is_held_in_4_bits(home: Path) -> None:
    finish(home, "four-bits", "--bits", "4", how=subprocess.Popen)
    said = kill_at_random_moments(home, "four-bits-killed", 1, "--bits", "4", behind=" step 7/")
    assert "continuing after step" in said
    assert_same_end(home, "four-bits-killed", "four-bits")


def test_a_run_moves_from_one_rank_to_two_and_back(home: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "moved")
    cut(home, "moved", 4)
    finish(home, "moved", ranks=2)
    assert (home / "runs" / "moved" / "hf" / "step_000008" / "optim-1-of-2.safetensors").is_file()
    cut(home, "moved", 8)
    assert "continuing after step 8" in finish(home, "moved")
    found = final(home, "moved")
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=1e-2, msg=name)
    losses = [
        [row["loss"] for row in read_metrics(home / "runs" / run / "hf") if "loss" in row] for run in ("whole", "moved")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_a_checkpoint_half_deleted_by_hand_is_noticed(home: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "halved")
    victim = home / "runs" / "halved" / "hf" / f"step_{STEPS:06d}" / "model.safetensors"
    victim.unlink()
    said = finish(home, "halved")
    assert f"DAMAGED CHECKPOINT, NOT USED: {victim} is missing" in said
    assert all(torch.equal(final(home, "halved")[name], tensor) for name, tensor in undisturbed.items())
