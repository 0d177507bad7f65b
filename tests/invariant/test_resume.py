"""A run that is killed and started again ends with the same weights, bit for bit; one that is asked to stop saves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer import train

STEPS = 24
WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tokenizer and a small prepared corpus."""
    folder = tmp_path_factory.mktemp("resume")
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) + "." for _ in range(400)]
    source = folder / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train(texts, 300).save(folder / "tokenizer")
    prepare([str(source)], folder / "tokenizer", folder / "data" / "words", val_fraction=0.1, workers=1)
    return folder


def command(home: Path, run: str, *more: str) -> list[str]:
    sizes = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 32 --device-batch-size 4 --total-batch-size 256"
    pace = f"--num-iterations {STEPS} --save-every 3 --eval-every 8 --eval-tokens 500 --sample-every 0 --log-every 1"
    where = ["--data", str(home / "data" / "words"), "--run", run, "--device-type", "cpu"]
    return [sys.executable, "-m", "ascendchat", "base", *sizes.split(), *pace.split(), *where, *more]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def finish(home: Path, run: str, *more: str) -> str:
    result = subprocess.run(
        command(home, run, *more), env=environment(home), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def final(home: Path, run: str) -> dict[str, bytes]:
    folder = home / "runs" / run / "base" / f"step_{STEPS:06d}"
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optim-0-of-1.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> dict[str, bytes]:
    finish(home, "whole")
    return final(home, "whole")


def kill_at(home: Path, run: str, moment: float) -> bool:
    """Start the run and kill -9 it `moment` seconds after its first step; True if it was still running."""
    process = subprocess.Popen(command(home, run), env=environment(home), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if " step " in line:
            break
    time.sleep(moment)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


@pytest.mark.slow
def test_thirty_kills_at_random_moments_change_nothing(home: Path, undisturbed: dict[str, bytes]) -> None:
    rng, kills, run = random.Random(1), 0, 0
    while kills < 30:
        run += 1
        name = f"killed{run}"
        for _ in range(5):
            if not kill_at(home, name, rng.random() * 0.25):
                break
            kills += 1
        finish(home, name)
        assert final(home, name) == undisturbed, f"run {name} ended elsewhere"
    assert run >= 3


def test_a_run_that_was_killed_once_ends_with_the_same_weights(home: Path, undisturbed: dict[str, bytes]) -> None:
    assert kill_at(home, "once", 0.02)
    finish(home, "once")
    assert final(home, "once") == undisturbed


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(home: Path, undisturbed: dict[str, bytes]) -> None:
    process = subprocess.Popen(command(home, "term"), env=environment(home), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if " step 4/" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 128 + signal.SIGTERM
    assert "stopped by a signal after step" in rest
    assert "continuing after step" in finish(home, "term")
    assert final(home, "term") == undisturbed


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(home: Path, undisturbed: dict[str, bytes]) -> None:
    finish(home, "flip")
    folder = home / "runs" / "flip" / "base"
    victim = folder / f"step_{STEPS:06d}" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    output = finish(home, "flip")
    assert "DAMAGED CHECKPOINT" in output
    assert str(victim) in output
    assert final(home, "flip") == undisturbed


def test_other_settings_are_refused_with_the_way_out(home: Path, undisturbed: dict[str, bytes]) -> None:
    result = subprocess.run(
        command(home, "whole", "--seed", "5"), env=environment(home), capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "seed 0, this command has 5" in result.stderr
    assert "--resume never" in result.stderr
    assert "Traceback" not in result.stderr
