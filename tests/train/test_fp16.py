"""Training in fp16 with a scaled loss, on a CPU that computes in float16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import prepared_home
from test_loop import ToyStage, start

from ascendchat.cli import main
from ascendchat.device import DeviceOptions, Scaling
from ascendchat.device.cpu import CPU
from ascendchat.runs.run import read_metrics
from ascendchat.train import loop
from ascendchat.train.loop import MAX_SKIPPED, Diverged, fit
from ascendchat.train.stage import Loss


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


def losses(home: Path, run: str) -> list[float]:
    return [row["loss"] for row in read_metrics(home / "runs" / run / "base") if "loss" in row]


@pytest.mark.slow
def test_base_in_fp16_follows_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    data = prepared_home(tmp_path)
    sizes = "--depth 1 --dim 32 --head-dim 32 --max-seq-len 32 --total-batch-size 256 --num-iterations 12"
    words = f"base {sizes} --eval-every 0 --sample-every 0 --device-type cpu".split() + [data]
    assert main([*words, "--run", "fp32"]) == 0
    monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, **__: HalfCPU())
    assert main([*words, "--run", "fp16"]) == 0
    exact, half = losses(tmp_path, "fp32"), losses(tmp_path, "fp16")
    assert half == pytest.approx(exact, rel=0.02)
    assert half[-1] < half[0] - 0.5


def test_when_every_step_overflows_the_run_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Backward(steps=100)
    with start(tmp_path) as run, pytest.raises(Diverged, match=r"overflowed in 30 steps in a row, up to step 30.*fp32"):
        fit(stage, HalfCPU(), run, loop.Options(eval_every=0, save_every=0))
    said = capsys.readouterr().out
    assert "step 1: float16 overflowed, no update; loss scale 65536 -> 32768" in said
    assert said.count("overflowed, no update") == MAX_SKIPPED
    assert torch.equal(stage.model.weight, torch.zeros(4))
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= MAX_SKIPPED - 2
    assert rows[-1]["loss_scale"] == 1.0
