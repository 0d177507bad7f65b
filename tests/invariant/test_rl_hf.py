"""`ascendchat rl` from a Hugging Face folder and back to one: a few steps of a tiny Qwen2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_process import TheirsPopen, run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
import hf_models

from ascendchat.record import read_metrics

REWARD = '''
def vowels(prompt, completion, **row):
    """Share of the letters that are vowels."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
'''
STEPS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl-hf")
    (folder / "judges.py").write_text(REWARD, encoding="utf-8")
    hf_models.save(folder / "tiny", "qwen2", initializer_range=0.1)
    return folder


def finish(home: Path, words: list[str], status: int = 0) -> str:
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = run(
        [sys.executable, "-m", "ascendchat", *words],
        how=TheirsPopen,
        env=environment,
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def rl(run: str, *more: str, steps: int = STEPS) -> list[str]:
    sizes = "--data toy_arithmetic_en --prompts-per-step 4 --samples 8 --max-new-tokens 16 --device-batch-size 4"
    often = f"--steps {steps} --save-every 3 --eval-every -1 --learning-rate 0.01 --max-seq-len 128 --log-every 1"
    words = ["rl", "--model", "tiny", "--run", run, "--reward", "judges:vowels", "--device-type", "cpu"]
    return [*words, *sizes.split(), *often.split(), *more]


@pytest.mark.slow
def test_the_reward_of_a_qwen_rises_and_it_goes_back_to_a_folder_that_transformers_loads(home: Path) -> None:
    finish(home, rl("whole"))
    rows = [row for row in read_metrics(home / "runs" / "whole" / "rl") if "reward" in row]
    assert len(rows) == STEPS
    assert all(row["logprob_gap"] < 1e-4 for row in rows), "engine and trainer disagree"
    assert max(row["reward"] for row in rows[-2:]) > rows[0]["reward"] + 0.05
    finish(home, ["export", "--run", "whole", "--out", "out", "--device-type", "cpu"])
    transformers = hf_models.library()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / "out", dtype=torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(home / "out").chat_template == hf_models.CHATML
    tokens = torch.arange(5, 40)[None]
    ours = hf_models.opened(home / "out").model
    from safetensors.torch import load_file

    saved = load_file(home / "runs" / "whole" / "rl" / f"step_{STEPS:06d}" / "model.safetensors")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert not torch.equal(saved["lm_head.weight"], hf_models.opened(home / "tiny").model.head)
    from ascendchat.nn.attention import KERNELS
    from ascendchat.nn.model import dense

    with torch.no_grad():
        found = ours(tokens, dense(ours, KERNELS["sdpa"])) @ ours.head.t()
        torch.testing.assert_close(found, theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    asked = "chat --run whole --stage rl -p plus? -t 0 --max-tokens 8 --device-type cpu"
    again = "chat --model out -p plus? -t 0 --max-tokens 8 --device-type cpu"
    assert finish(home, asked.split()) == finish(home, again.split())


@pytest.mark.slow
def test_a_workflow_speaks_by_the_template_of_the_model(home: Path) -> None:
    finish(home, rl("turns", "--workflow", "try-again", "--reward", "judges:vowels", steps=2))
    rows = [row for row in read_metrics(home / "runs" / "turns" / "rl") if "reward" in row]
    assert len(rows) == 2
    assert all(row["logprob_gap"] < 1e-4 and not row["rejected"] for row in rows)


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_in_the_same_bytes(home: Path) -> None:
    finish(home, rl("once"))
    finish(home, rl("twice"))
    last = home / "runs" / "twice" / "rl"
    for path in (last / f"step_{STEPS:06d}").iterdir():
        path.unlink()
    (last / f"step_{STEPS:06d}").rmdir()
    (last / "latest").write_text("step_000003\n")
    finish(home, rl("twice"))
    for file in ("model.safetensors", "optim-0-of-1.safetensors"):
        once, twice = (home / "runs" / run / "rl" / f"step_{STEPS:06d}" / file for run in ("once", "twice"))
        assert once.read_bytes() == twice.read_bytes()


@pytest.mark.slow
def test_rates_of_the_other_kind_are_refused(home: Path) -> None:
    assert "--learning-rate is that of all" in finish(home, [*rl("x", steps=1), "--matrix-lr", "0.1"], status=2)
    assert json.loads((home / "tiny" / "config.json").read_text())["model_type"] == "qwen2"
