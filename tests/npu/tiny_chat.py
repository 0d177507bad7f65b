"""A tiny chat model of one answer, from text to a trained checkpoint, and the commands that make it on any device."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

from warm_process import run

from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer import train_tokenizer
from ascendchat.record import read_metrics

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
QUESTION = "a bird walks under the tree."
ANSWER = "the bird sings over the blue river."
STEPS = {"base": 30, "mid": 12, "sft": 20}

CHAIN = """
from ascendchat.cli import main

for words in {commands}:
    status = main(words)
    assert status == 0, (words, status)
"""


def training(home: Path, device: str, run: str) -> list[list[str]]:
    """Base, mid and sft."""
    sizes = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 64".split()
    common = f"--device-type {device} --total-batch-size 512 --eval-every 0 --sample-every 0 --run {run}".split()
    words = [["base", *sizes, "--data", str(home / "words"), *common, "--num-iterations", str(STEPS["base"])]]
    for stage in ("mid", "sft"):
        data = ["--data", str(home / "chats.jsonl")]
        words.append([stage, *data, *common, "--lr-multiplier", "1", "--num-iterations", str(STEPS[stage])])
    return words


def chat(run: str, device: str, temperature: float = 0) -> list[str]:
    words = f"chat --run {run} --device-type {device} --max-tokens 24 -t {temperature} -p".split()
    return [*words, QUESTION]


def make(folder: Path) -> Path:
    """Text, conversations that all end alike, and a model trained on the CPU in fp32."""
    rng = random.Random(0)
    sentences = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 40))) + "." for _ in range(300)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences), encoding="utf-8")
    talks = [[("user", text[:60]), ("assistant", ANSWER)] for text in sentences]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    train_tokenizer([*sentences, ANSWER], 300).save(folder / "tokenizer")
    prepare([str(folder / "text.jsonl")], folder / "tokenizer", folder / "words", val_fraction=0.1, workers=1)
    assert ANSWER in on_cpu(folder, [*training(folder, "cpu", "cpu"), chat("cpu", "cpu")])
    return folder


def on_cpu(home: Path, commands: list[list[str]]) -> str:
    """What the commands print, in one process."""
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    words = [sys.executable, "-c", CHAIN.format(commands=commands)]
    done = run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def losses(home: Path, run: str, stage: str) -> list[float]:
    found = [row["loss"] for row in read_metrics(home / "runs" / run / stage) if "loss" in row]
    assert len(found) == STEPS[stage]
    return found
