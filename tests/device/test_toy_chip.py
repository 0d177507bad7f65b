"""A new kind of chip is one file and one row: toy_chip/ has both, and every command that computes runs on it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import hf_models
import pytest
from running_server import Server
from small_training import prepared_home

from ascendchat.runs.run import read_metrics

TOY = Path(__file__).parent / "toy_chip"
ROOT = Path(__file__).parents[2]
SIZES = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 64 --device-batch-size 4 --total-batch-size 512"
CHAIN = """
import json, os, sys
from ascendchat.cli import main
for words in json.loads(sys.argv[1]):
    print("COMMAND", words[0], flush=True)
    os.environ["TOY_COMMAND"] = words[0]
    sys.modules["toy"].used.clear() if "toy" in sys.modules else None
    assert main(words) == 0, words
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, conversations and a Hugging Face model."""
    folder = tmp_path_factory.mktemp("toy")
    prepared_home(folder)
    hf_models.save_with_sums(folder, num_hidden_layers=1)
    chance, words = random.Random(0), "red blue tree river stone bird".split()
    talks = [[(role, " ".join(chance.choices(words, k=5))) for role in ("user", "assistant")] for _ in range(40)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def environment(home: Path, command: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TOY), str(ROOT), os.environ.get("PYTHONPATH")]))
    toy = {"TOY_CARDS": "2", "TOY_USED": str(home / "used"), "TOY_COMMAND": command, "ASCENDCHAT_DEVICE": "toy"}
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return {**os.environ, **toy, **quiet, "PYTHONPATH": path, "ASCENDCHAT_HOME": str(home)}


def run(home: Path, command: str, *words: str) -> str:
    """Python with the toy, in a process of its own; what it prints."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, *words], env=environment(home, command), cwd=home, check=False, **both)
    assert done.returncode == 0, done.stdout
    return done.stdout


def used(home: Path, command: str) -> set[str]:
    """The methods of the toy's own attention that a command has called."""
    lines = (home / "used").read_text(encoding="utf-8").splitlines() if (home / "used").exists() else []
    return {line.split()[1] for line in lines if line.split()[0] == command}


@pytest.mark.slow
def test_every_command_trains_on_the_toy_with_its_own_attention(home: Path) -> None:
    short = "--num-iterations 3 --log-every 1 --sample-every 0 --eval-every 3 --device-type toy".split()
    batch = "--device-batch-size 4 --total-batch-size 512".split()
    said = run(
        home,
        "",
        "-c",
        CHAIN,
        json.dumps(
            [
                ["base", *SIZES.split(), "--data", str(home / "words"), "--run", "ours", *short],
                ["sft", "--data", str(home / "chats.jsonl"), "--start", "ours", "--run", "ours", *batch, *short],
                [
                    *("finetune --lora --lora-rank 4 --run theirs --max-seq-len 64 --device-batch-size 4").split(),
                    *("--model", str(home / "tiny"), "--data", str(home / "sums.jsonl"), *short),
                ],
                ["plan", "--depth", "4", "--chip", "toy x1", "--devices", "2"],
            ]
        ),
    )
    parts = dict(part.strip().split("\n", 1) for part in said.split("COMMAND ")[1:])
    for command, run_name, stage in (("base", "ours", "base"), ("sft", "ours", "sft"), ("finetune", "theirs", "hf")):
        assert "toy: Toy X1, float32, 4.0 GiB, 2 visible, eager, gloo" in parts[command]
        assert "attention: toy" in parts[command]
        losses = [row["loss"] for row in read_metrics(home / "runs" / run_name / stage) if "loss" in row]
        assert len(losses) == 3
        assert all(0 < loss < 10 for loss in losses)
    assert used(home, "base") >= {"dense"}
    assert used(home, "sft") >= {"packed"}
    assert used(home, "finetune") >= {"packed"}
    assert "2 x Toy X1, 4.00 GiB, 1 TFLOP/s" in parts["plan"]
    assert "at 40% of the peak" in parts["plan"]


@pytest.mark.slow
def test_doctor_finds_the_toy(home: Path) -> None:
    report = json.loads(run(home, "doctor", "-m", "ascendchat", "doctor", "--json", "--lang", "en"))
    assert report["device"] == {"type": "toy", "name": "Toy X1", "count": 2} | report["device"]
    assert report["ok"]
    assert "toy" in run(home, "doctor", "-m", "ascendchat", "doctor", "--help")


@pytest.mark.slow
def test_a_server_answers_on_the_toy_with_its_own_attention(home: Path) -> None:
    log = home / "serve.log"
    words = [sys.executable, "-m", "ascendchat", "serve", "--model", str(home / "tiny"), "--device-type", "toy"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words, "--port", "0", "--devices", "1", "--slots", "2"],
            env=environment(home, "serve"),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=home,
        )
    try:
        answer = Server(process, log).chat("What is 1 plus 2?", max_tokens=4, temperature=0)
        assert answer.status_code == 200, answer.text
        assert used(home, "serve") >= {"cached"}
    finally:
        process.terminate()
        process.wait(60)
