"""`ascendchat bench train --depth 12`: tokens per second, MFU, memory and where a step's time goes, on this device;
without a compiler, also launches, bytes and the speed that they allow.

Real optimizer steps on random tokens. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ascendchat.bench.counting import Count
from ascendchat.config.train import BenchTrainConfig
from ascendchat.device import Device, Mark
from ascendchat.nn.fp8 import Fp8Ops
from ascendchat.runs.speed import speed
from ascendchat.sizes import memory, schedule
from ascendchat.sizes.batch import Split, fit_split
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import Learner, build, noise, optimizer_for
from ascendchat.train.recorded import learning, pays
from ascendchat.train.run import training_context


class Bench:
    """A model, its optimizer and one batch of noise."""

    def __init__(self, learner: Learner, split: Split, seed: int) -> None:
        self.learner, self.split = learner, split
        learner.mean_over(split.total // split.devices)
        self.batch = noise(learner, split, seed)
        self.weight = torch.tensor(split.devices / split.total, device=learner.place)
        self.optimizer = optimizer_for(learner, schedule.rates(learner.model.shape.dim, split.total))
        self.learn = learning(learner, self.batch, self.weight, self.weight, self.optimizer.zero_grad)

    def micro_batch(self) -> None:
        self.learn(self.batch, self.weight, self.weight)

    def update(self) -> None:
        self.optimizer.step(lr_scale=0.01, momentum=0.9, matrix_decay=0.1)

    def step(self) -> tuple[Mark, Mark, Mark]:
        """One optimizer step; marks before, between and after."""
        device = self.learner.device
        marks = [device.event()]
        for _ in range(self.split.accumulation):
            self.micro_batch()
        marks.append(device.event())
        self.update()
        marks.append(device.event())
        return marks[0], marks[1], marks[2]


def measure(bench: Bench, steps: int, device: Device) -> dict[str, Any]:
    """Time `steps` steps after two warm ones."""
    bench.step(), bench.step()
    device.synchronize()
    if not pays(bench.learner, bench.split.rows):  # a recording allocates nothing: its peak is that of making it
        device.reset_peak()
    marks = [bench.step() for _ in range(steps)]
    device.synchronize()
    shape, split = bench.learner.model.shape, bench.split
    seconds = marks[-1][2].since(marks[0][0]) / 1e3
    pace = speed(split.total * steps, seconds, shape.train_flops_per_token, device.chip.peak, split.devices)
    checkpointing = bench.learner.model.checkpoint_activations
    predicted = memory.allocated(memory.training(shape, device.chip, split.devices, split.rows, checkpointing))
    return {
        "tokens_per_second": round(pace.tokens_per_second),
        "mfu": None if pace.mfu is None else round(pace.mfu, 4),
        "step_ms": round(seconds * 1e3 / steps, 3),
        "forward_backward_ms": round(sum(b.since(a) for a, b, _ in marks) / steps, 3),
        "optimizer_ms": round(sum(c.since(b) for _, b, c in marks) / steps, 3),
        "memory_peak_gib": round(device.memory().peak / 2**30, 3),
        "memory_planned_gib": round(predicted / 2**30, 3),
    }


def roofline(bench: Bench, device: Device) -> dict[str, Any]:
    """Where nothing is compiled: the launches of a micro-batch and of an optimizer step, the bytes that all operators
    of a step move beside the products, and what is the most that the chip could do if moving them at its bandwidth and
    multiplying at its peak took turns. Empty for a chip whose peak is not known."""
    if device.compiles or not device.chip.peak:
        return {}
    with Count() as micro_batch:
        bench.micro_batch()
    with Count() as update:
        bench.update()
    shape, split = bench.learner.model.shape, bench.split
    moved = split.accumulation * micro_batch.vector_bytes + update.vector_bytes
    multiplying = split.total / split.devices * shape.train_flops_per_token / device.chip.peak
    seconds = multiplying + moved / device.chip.bandwidth
    return {
        "launches_micro_batch": micro_batch.launches,
        "launches_optimizer": update.launches,
        "vector_gb": round(moved / 1e9, 6),
        "roofline_tokens_per_second": round(split.total / seconds),
        "roofline_mfu": round(multiplying / seconds, 4),
    }


def run(config: BenchTrainConfig) -> int:
    """The command."""
    with training_context(config) as here:
        shape = Shape.from_depth(
            config.depth,
            vocab=config.vocab_size,
            seq_len=config.max_seq_len,
            window_pattern=config.window_pattern,
            dim=config.dim,
            head_dim=config.head_dim,
        )
        learner = build(config, shape, here)
        total, chip, checkpointing = config.total_batch_size or 2**19, here.device.chip, config.activation_checkpointing
        rows = config.device_batch_size
        split = fit_split(shape, chip, here.world.size, total, rows=rows, checkpointing=checkpointing)
        bench = Bench(learner, split, config.seed)
        results = {**measure(bench, config.steps_to_time, here.device), **roofline(bench, here.device)}
        eight = isinstance(learner.model.ops, Fp8Ops)  # not what was asked for, but what was timed
        facts = {"depth": config.depth, "chip": chip.name, "devices": here.world.size, "fp8": eight}
        facts |= {"window_pattern": config.window_pattern, "attention": learner.kernel.name, "torch": torch.__version__}
        facts |= {"rows": split.rows, "accumulation": split.accumulation, "total_batch": split.total}
        for name, value in results.items():
            here.say(f"{name:<26} {value}")
        here.say(json.dumps({**facts, **results}))
    return 0
