"""Micro-batches captured as one graph: the same gradients and losses as without it, and only where it is sound."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ascendchat.chips import GIB, find
from ascendchat.cli import main
from ascendchat.data.loader import MicroBatch
from ascendchat.device import DeviceOptions, Scaling, pick
from ascendchat.device.cpu import CPU
from ascendchat.device.cuda_attention import Flash
from ascendchat.nn.attention import Reference
from ascendchat.nn.gpt import GPT
from ascendchat.parallel.collectives import World
from ascendchat.sizes import schedule
from ascendchat.sizes.shape import Shape
from ascendchat.train import budget
from ascendchat.train.model import TrainModel, optimizer_for, short

SHAPE = Shape.from_depth(2, dim=64, head_dim=32, vocab=256, seq_len=64)


class Capturing(CPU):
    """A CPU that captures as an accelerator does: it runs first, then reads and writes the same memory for ever."""

    captures_training = True

    def __init__(self) -> None:
        super().__init__(DeviceOptions())
        self.chip, self.dtype, self.compiles = find("H200"), torch.float32, True
        self.captures = self.replays = 0

    def compile(self, fn: Any, **options: Any) -> Any:
        return fn

    def graph(self, fn: Callable[..., Any], *static_inputs: torch.Tensor, updates: Any = None) -> Callable[..., Any]:
        self.captures += 1
        output = [fn(*static_inputs) for _ in range(3)][-1]

        def replay(*inputs: torch.Tensor) -> torch.Tensor:
            self.replays += 1
            for static, new in zip(static_inputs, inputs, strict=True):
                static.copy_(new)
            with torch.no_grad():
                return output.copy_(run())  # type: ignore[no-any-return]

        @torch.enable_grad()
        def run() -> torch.Tensor:
            return fn(*static_inputs)  # type: ignore[no-any-return]

        return replay


def learner_on(device: Any, place: str = "cpu", kernel: Any = None, shape: Shape = SHAPE) -> TrainModel[GPT]:
    model = GPT(shape)
    model.initialise(0)
    with torch.no_grad():  # else layers start as the identity
        for name, parameter in model.named_parameters():
            if name.endswith((".out", ".down")):
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    there = torch.device(place)
    return TrainModel(model.to_compute(device.dtype).to(there), kernel or Reference(), device, there)


def batches(count: int, rows: int, place: str = "cpu", shape: Shape = SHAPE) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(rows)
    both = torch.randint(0, shape.vocab, (count, 2, rows, shape.seq_len), generator=generator).to(place)
    return [MicroBatch(i, t, np.full(rows, shape.seq_len, np.int32), rows * shape.seq_len) for i, t in both]


def learnt(
    train_model: TrainModel[GPT], given: list[MicroBatch], capture: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and gradients added up over all micro-batches, each with a weight of its own."""
    optimizer = optimizer_for(train_model, schedule.rates(train_model.model.shape.dim, 1024))
    place, losses = given[0].inputs.device, []
    weights = [torch.tensor(1.0 / (100 + i), device=place) for i in range(len(given))]
    mtp_weight = torch.tensor(0.4, device=place)
    if capture:
        train_model.forward_backward(given[0], weights[0], mtp_weight)  # the dry run
        optimizer.zero_grad()
    for batch, weight in zip(given, weights):
        if capture:
            losses.append(train_model.forward_backward(batch, weight, mtp_weight))
        else:
            loss = train_model.loss(batch, weight, mtp_weight)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
    return [float(loss) for loss in losses], [gradient.clone() for gradient in optimizer.gradients()]


def test_gradients_add_up_and_each_loss_is_kept_and_another_size_is_not_replayed() -> None:
    device = Capturing()
    mixed = [*batches(3, 2), *batches(1, 1)]  # the last one has another size: it is not replayed
    found, wanted = learnt(learner_on(device), mixed, True), learnt(learner_on(Capturing()), mixed, False)
    assert (device.captures, device.replays) == (1, 1 + 3)
    assert found[0] == wanted[0]
    assert len(set(found[0])) == 4
    for one, other in zip(found[1], wanted[1], strict=True):
        assert torch.equal(one, other)


def test_without_an_optimizer_no_gradient_is_kept() -> None:
    train_model, (batch,) = learner_on(Capturing()), batches(1, 2)
    weight = torch.tensor(0.1)
    with train_model.forgetting_gradients():
        assert float(train_model.forward_backward(batch, weight)) == float(train_model.loss(batch, weight).detach())
    assert all(parameter.grad is None for parameter in train_model.model.parameters())
    assert train_model.device.captures == 1  # type: ignore[attr-defined]
    train_model.forward_backward(batch, weight)
    assert train_model.device.captures == 2, "a graph that keeps no gradients is of no use afterwards"  # type: ignore[attr-defined]
    assert any(parameter.grad is not None for parameter in train_model.model.parameters())
    train_model.release_graph()
    train_model.forward_backward(*batches(1, 1), weight)
    assert train_model.device.captures == 3, "a smaller device batch is captured too"  # type: ignore[attr-defined]


def test_without_room_for_a_graph_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Capturing):
        def graph(self, fn: Callable[..., Any], *rest: Any, **more: Any) -> Callable[..., Any]:
            fn(*rest)
            raise torch.OutOfMemoryError

    found, wanted = (
        learnt(learner_on(Full()), batches(2, 2), True),
        learnt(learner_on(Capturing()), batches(2, 2), False),
    )
    assert "no room to capture" in capsys.readouterr().out
    assert found[0] == wanted[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], wanted[1], strict=True))


def test_the_speed_is_measured_without_an_optimizer_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SPEED_SECONDS", 0.0)
    device = Capturing()
    train_model, (batch,) = learner_on(device), batches(1, 2)
    assert budget.measured_speed(train_model, batch) >= 0
    assert device.replays >= 1
    assert all(parameter.grad is None for parameter in train_model.model.parameters())


def test_only_what_is_the_same_work_each_time_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(change: Callable[[Any], None]) -> bool:
        train_model = learner_on(Capturing())
        change(train_model)
        return train_model.captures(2)

    class Half(Capturing):
        scaling = Scaling(True, "inf")  # type: ignore[assignment]

    assert asked(lambda train_model: None)
    assert not asked(lambda train_model: setattr(train_model, "by_document", True))
    assert not asked(lambda train_model: setattr(train_model, "model", GPT(SHAPE, dropout=0.1)))
    assert not asked(lambda train_model: setattr(train_model.device, "captures_training", False))
    assert not asked(lambda train_model: setattr(train_model, "device", Half()))
    assert not asked(lambda train_model: setattr(train_model.device, "compiles", False))
    assert not asked(lambda train_model: setattr(train_model.device, "chip", find("cpu")))
    monkeypatch.setattr("ascendchat.parallel.collectives.world", lambda: World(size=2))
    assert not asked(lambda train_model: None)


def test_what_is_long_or_has_no_room_for_two_is_not_captured() -> None:
    h200 = find("H200")
    assert short(Shape.from_depth(6), h200, 8, False)
    assert short(Shape.from_depth(12), h200, 4, False)
    assert not short(Shape.from_depth(12), h200, 16, False), "it hides its launches"
    assert not short(Shape.from_depth(20), h200, 4, False)
    room = {gib: short(Shape.from_depth(12), replace(h200, memory=gib * GIB), 4, False) for gib in (8, 12, 16, 24)}
    assert room == {8: False, 12: False, 16: True, 24: True}, "there is room for two"
    assert not short(Shape.from_depth(2), replace(h200, known=False), 1, False), "its speed is not known"


def test_training_is_the_same_with_captured_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--depth 2 --dim 32 --head-dim 32 --max-seq-len 64 --total-batch-size 256 --device-batch-size 2 --steps 3"
    quiet = "--eval-every -1 --sample-every 0 --data toyworld --device-type cpu"
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    losses = {}
    for name, device in (("plain", CPU(DeviceOptions())), ("captured", Capturing())):
        monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, device=device, **__: device)
        assert main(["base", *sizes.split(), *quiet.split(), "--run", name]) == 0
        rows = (tmp_path / "runs" / name / "base" / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
    assert isinstance(device, Capturing)
    assert (device.captures, device.replays) == (1, 1 + 6), "a dry run, then two micro-batches in each of three steps"
    assert losses["captured"] == losses["plain"]
    assert len(losses["plain"]) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_cuda_graph_computes_what_eager_code_does(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDCHAT_DTYPE", dtype)
    shape = Shape.from_depth(4, dim=256, head_dim=64, vocab=512, seq_len=256)
    found, wanted = (
        learnt(
            learner_on(pick("cuda"), "cuda", Flash() if dtype == "bf16" else Reference(), shape),
            batches(4, 8, "cuda", shape),
            capture,
        )
        for capture in (True, False)
    )
    assert found[0] == pytest.approx(wanted[0], rel=1e-3 if dtype == "bf16" else 1e-5)
    assert len(set(found[0])) == 4
    for one, other in zip(found[1], wanted[1], strict=True):
        assert (one - other).norm() <= (2e-2 if dtype == "bf16" else 1e-4) * other.norm()
