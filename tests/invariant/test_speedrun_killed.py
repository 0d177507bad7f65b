"""A recipe that is killed again and again ends with the model and the table of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
KILLS = 4
RECIPE = """
run: tiny
stages:
  - tokenizer train: {{source: {text}, vocab_size: 300}}
  - data prepare: {{source: [{text}], out: $HOME/data/words, val_fraction: 0.1, workers: 1}}
  - base: {{depth: 2, dim: 32, head_dim: 16, max_seq_len: 64, device_batch_size: 4, total_batch_size: 512,
           data: [$HOME/data/words], num_iterations: 30, save_every: 4, eval_every: 0, sample_every: 0}}
  - sft: {{data: [{chats}], device_batch_size: 4, total_batch_size: 512, num_iterations: 20, save_every: 4,
          eval_every: 0, sample_every: 0}}
"""


def speedrun(folder: Path, home: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "ASCENDCHAT_HOME": str(folder / home), "OMP_NUM_THREADS": "1"}
    words = ["speedrun", "--recipe", str(folder / "recipe.yaml"), "--device-type", "cpu"]
    return subprocess.Popen(
        [sys.executable, "-m", "ascendchat", *words],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(folder: Path, home: str) -> tuple[str, bytes]:
    """Run to the end; the table, and the weights."""
    output, _ = (process := speedrun(folder, home)).communicate()
    assert process.returncode == 0, output
    table = output[output.index("train loss") : output.index("stages done")].rsplit("\n", 1)[0]
    return table, (folder / home / "runs/tiny/sft/step_000020/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_recipe_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) + "." for _ in range(200)]
    text, chats = tmp_path / "text.jsonl", tmp_path / "chats.jsonl"
    text.write_text("\n".join(json.dumps({"text": t}) for t in texts), encoding="utf-8")
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairwise(texts)]
    chats.write_text("\n".join(json.dumps({"messages": turn}) for turn in turns), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(text=text, chats=chats), encoding="utf-8")
    whole = end(tmp_path, "whole")
    reached = set()
    for _ in range(KILLS):
        process = speedrun(tmp_path, "killed")
        try:
            process.wait(timeout=rng.uniform(0.5, 8))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        reached.add(output.count("] ascendchat "))
    assert len(reached) >= 2, "every kill hit the same stage"
    assert end(tmp_path, "killed") == whole
