"""`finetune --shard`: two ranks that share the weights out train as one process does: all weights, adapters, pairs."""

from __future__ import annotations

import sys
from pathlib import Path

import hf_models
import pytest
import torch
import warm_process

from ascendchat.runs.run import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ROWS = 4  # of a step


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, sums to learn, and pairs of a right and a wrong answer."""
    return hf_models.save_with_sums(tmp_path_factory.mktemp("shards"), num_hidden_layers=2)


def finetune(
    place: Path, run: str, ranks: int, *more: str, data: str = "sums", program: tuple[str, ...] = ()
) -> list[float]:
    """The losses of a run. `program`: what runs the command, where it is not ascendchat itself."""
    words = ["finetune", "--model", str(place / "tiny"), "--data", str(place / f"{data}.jsonl"), "--run", run]
    words += f"--max-seq-len 96 --total-batch-size {ROWS * 96} --steps 4 --learning-rate 0.01".split()
    words += f"--device-batch-size {ROWS // ranks} --val-size 0.1 --save-every 2 --sample-every 2".split()
    words += ["--eval-every", "2", "--log-every", "1", "--device-type", "cpu", *more]
    if ranks > 1:
        words = ["launch", "--devices", str(ranks), "--device-type", "cpu", *program, *words, "--shard", "2"]
    command = [sys.executable, "-m", "ascendchat", *words]
    done = warm_process.run(command, how=warm_process.TheirsPopen, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if program:
        assert done.stderr.count("starting again with the next smaller device batch") == 1, done.stderr[-4000:]
    rows = read_metrics(Path(str(place)) / "home" / "runs" / run / "hf")
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(autouse=True)
def _home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs are in one $ASCENDCHAT_HOME."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(place / "home"))


def test_all_weights(place: Path, tmp_path: Path) -> None:
    whole = finetune(place, "whole", 1, "--output-dir", str(tmp_path / "whole"))
    assert whole[-1] < whole[0]
    begun = finetune(place, "shared", 2, "--output-dir", str(tmp_path / "shared"))
    assert begun == pytest.approx(whole, abs=1e-5)
    transformers = pytest.importorskip("transformers")
    row = torch.arange(5, 40)[None]
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(row).logits
        for name in ("whole", "shared")
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_adapters_whose_base_is_on_the_host(place: Path) -> None:
    pytest.importorskip("peft")
    whole = finetune(place, "lora", 1, "--lora", "--lora-rank", "4")
    assert finetune(place, "lora-shared", 2, "--lora", "--lora-rank", "4", "--offload") == pytest.approx(
        whole, abs=1e-5
    )


SHORT = """
import os, sys, torch
from ascendchat.cli import main
from ascendchat.models import causal_lm

attention = causal_lm.attention

def short_of_memory(module, *arguments, **named):
    if module.layer_idx == 1 and os.environ["RANK"] == "1" and "ASCENDCHAT_SMALLER" not in os.environ:
        raise torch.OutOfMemoryError("no room")  # rank 0 waits for its share of this layer
    return attention(module, *arguments, **named)

causal_lm.attention = short_of_memory
sys.exit(main(sys.argv[1:]))
"""


def test_adapters_in_bf16_after_one_rank_alone_ran_out_of_memory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("ASCENDCHAT_DTYPE", "bf16")
    (place / "short.py").write_text(SHORT, encoding="utf-8")
    asked = "--lora", "--lora-rank", "4", "--eval-every", "-1"
    whole = finetune(place, "lora-bf16", 1, *asked)
    shared = finetune(place, "lora-bf16-shared", 2, *asked, program=(str(place / "short.py"),))
    assert shared == pytest.approx(whole, abs=0.02)
    assert whole[-1] < whole[0] - 0.2


def test_pairs(place: Path) -> None:
    whole = finetune(place, "dpo", 1, "--stage", "dpo", data="pairs")
    assert whole[0] == pytest.approx(0.6931, abs=1e-3)
    assert whole[-1] < 0.6
    assert finetune(place, "dpo-shared", 2, "--stage", "dpo", data="pairs") == pytest.approx(whole, abs=1e-4)
