"""What a step reports beside its loss, and what the loop makes of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from test_loop import ToyStage, device, signalled, start

from ascendchat.config.train import BaseConfig
from ascendchat.device import Device
from ascendchat.parallel.collectives import World
from ascendchat.parallel.context import Context
from ascendchat.runs.run import checkpoints, open_run, read_facts, read_metrics
from ascendchat.train.loop import Diverged, Options, fit
from ascendchat.train.run import train_stage
from ascendchat.train.stage import Loss

__all__ = ["device"]  # a fixture


class Policy(ToyStage):
    """Reports more than its loss, wants its score high, and falls far without being stopped."""

    higher_is_better = True

    def loss(self, batch: int, scale: float = 1.0) -> Loss:
        value, _ = super().loss(batch, scale)
        return Loss(value, {"clipped": torch.tensor(0.25), "entropy": torch.tensor(1.0 + batch)})

    def is_spike(self, loss: float, mean: float) -> bool:
        return False


def test_named_values_travel_with_the_loss_and_the_gradient_norm_is_logged(tmp_path: Path, device: Device) -> None:
    stage = Policy()
    with open_run(tmp_path, BaseConfig()) as run:
        fit(stage, device, run, Options())
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert [row["clipped"] for row in rows] == [0.5] * 8, "two micro-batches add up"
    assert [row["entropy"] for row in rows] == [2.0 * (1 + step) for step in range(8)]
    assert rows[0]["gradient_norm"] == pytest.approx(
        3.0
    )  # d/dw of the mean of (w - 3)^2 over 4 weights of 0: -1.5 each


def test_a_stage_says_what_is_a_spike_and_which_score_is_best(tmp_path: Path, device: Device) -> None:
    with open_run(tmp_path, BaseConfig()) as run:
        fit(Policy(80, {60: 9.0}, scores=[0.1, 0.9, 0.5, 0.2]), device, run, Options(save_every=20, eval_every=20))
    assert (tmp_path / "best").read_text().split() == ["step_000040", "0.9"]
    assert 40 in checkpoints(tmp_path)


def test_a_gradient_that_is_not_a_number_stops_before_its_weights_are_saved(tmp_path: Path, device: Device) -> None:
    class Broken(ToyStage):
        def loss(self, batch: int, scale: float = 1.0) -> Loss:
            loss = super().loss(batch, scale)
            if batch == 5:
                loss.value.register_hook(lambda gradient: gradient * float("nan"))
            return loss

    with start(tmp_path) as run, pytest.raises(Diverged, match="the gradient of step 5 has the norm nan"):
        fit(Broken(), device, run, Options(save_every=2))
    assert 6 not in checkpoints(tmp_path), "weights that are not numbers were saved"


def test_a_stopped_run_is_recorded_as_stopped(tmp_path: Path, device: Device) -> None:
    stage = ToyStage(steps=5)
    signalled(stage, "evaluate", 2)
    here = Context(device, World(), torch.device("cpu"), lambda text: None)
    config = BaseConfig(eval_every=2)
    status = train_stage(stage, here, config, tmp_path, None, title="", facts={}, add_files=lambda folder: None)
    assert status == 128 + signal.SIGTERM
    assert read_facts(tmp_path / "run.json")["status"] == "stopped"
