"""Training in fp16 with a scaled loss: on the CPU with a device that computes in float16, and on a GPU where there is
one (`pytest -m '' tests/unit/test_fp16.py` on a CUDA machine; ASCENDCHAT_DTYPE=fp16 forces it there)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from test_loop import ToyStage, start

from ascendchat.cli import main
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer import train_tokenizer
from ascendchat.device import DeviceOptions, Scaling
from ascendchat.device.cpu import CPU
from ascendchat.record import read_metrics
from ascendchat.train import loop
from ascendchat.train.loop import MOST_SKIPPED, Diverged, fit
from ascendchat.train.stage import Loss

WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]


class HalfCPU(CPU):
    """A CPU as a chip without bf16: everything the model computes is in float16, and overflow shows as inf."""

    scaling = Scaling(needed=True, overflow="inf")  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(DeviceOptions())
        self.dtype = torch.float16


class Backward(ToyStage):
    """Its loss is finite and its gradients are not, as when only the backward pass leaves the range of float16."""

    def loss(self, batch: int, scale: float = 1.0) -> Loss:
        loss = super().loss(batch, scale)
        loss.value.register_hook(lambda gradient: gradient * float("inf"))
        return loss


def smoothed(home: Path, run: str, width: int) -> list[float]:
    found = [row["loss"] for row in read_metrics(home / "runs" / run / "base") if "loss" in row]
    return [sum(found[i : i + width]) / width for i in range(0, len(found), width)]


@pytest.mark.slow
def test_base_in_fp16_follows_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) + "." for _ in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer")
    prepare([str(tmp_path / "text.txt")], tmp_path / "tokenizer", tmp_path / "words", val_fraction=0.1, workers=1)
    sizes = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 64 --total-batch-size 512 --num-iterations 24"
    words = f"base {sizes} --eval-every 0 --sample-every 0 --device-type cpu --data {tmp_path / 'words'}".split()
    assert main([*words, "--run", "fp32"]) == 0
    monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, **__: HalfCPU())
    assert main([*words, "--run", "fp16"]) == 0
    assert smoothed(tmp_path, "fp16", 1) == pytest.approx(smoothed(tmp_path, "fp32", 1), rel=0.02)
    assert smoothed(tmp_path, "fp16", 1)[-1] < smoothed(tmp_path, "fp16", 1)[0] - 0.5


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fp16_on_a_gpu_follows_bf16_for_200_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Depth 6, the embedded text; means over 20 steps, since single steps differ by rounding."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    sizes = "--depth 6 --max-seq-len 512 --total-batch-size 16384 --device-batch-size 16 --num-iterations 200"
    words = f"base {sizes} --eval-every 0 --sample-every 0 --device-type cuda".split()
    for dtype in ("bf16", "fp16"):
        monkeypatch.setenv("ASCENDCHAT_DTYPE", dtype)
        assert main([*words, "--run", dtype]) == 0
    last = [row for row in read_metrics(tmp_path / "runs" / "fp16" / "base") if "loss" in row][-1]
    assert last["skipped_steps"] < 20
    assert smoothed(tmp_path, "fp16", 20) == pytest.approx(smoothed(tmp_path, "bf16", 20), rel=0.02)


def test_when_every_step_overflows_the_run_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Backward(steps=100)
    with start(tmp_path) as run, pytest.raises(Diverged, match=r"overflowed in 30 steps in a row, up to step 30.*fp32"):
        fit(stage, HalfCPU(), run, loop.Options(eval_every=0, save_every=0))
    said = capsys.readouterr().out
    assert "step 1: float16 overflowed, no update; loss scale 65536 -> 32768" in said
    assert said.count("overflowed, no update") == MOST_SKIPPED
    assert torch.equal(stage.model.weight, torch.zeros(4))
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= MOST_SKIPPED - 2
    assert rows[-1]["loss_scale"] == 1.0
