"""A micro-batch as one recording of the device: forward, loss and backward without a launch of the host.

    learn = learning(learner, like, weight, ahead, clear)     # `like`: a micro-batch of the size that is to come
    loss = learn(batch, weight, ahead)                        # its gradients are added up

A small model is over before the host has launched it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ascendchat.chips import Chip
from ascendchat.data.loader import MicroBatch
from ascendchat.nn.gpt import GPT
from ascendchat.parallel import collectives
from ascendchat.sizes.memory import training, usable
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import Learner, say

SHORT = 0.01  # seconds at the chip's peak; a longer micro-batch hides its launches (docs/log.md)

Learn = Callable[[MicroBatch, Tensor, Tensor | None], Tensor]


def pays(learner: Learner, rows: int) -> bool:
    """Whether micro-batches of so many rows are recorded: they are short, always the same work, and there is room for
    their activations beside those of work that is not recorded. Several devices were not tried."""
    model, device = learner.model, learner.device
    able = device.records_training and device.compiles and device.chip.graphs
    if not able or not isinstance(model, GPT) or collectives.world().size > 1:
        return False
    same = not learner.by_document and not model.dropout and not device.scaling.needed
    return same and short(model.shape, device.chip, rows, model.checkpoint_activations)


def short(shape: Shape, chip: Chip, rows: int, checkpointing: bool) -> bool:
    """By time at the chip's peak, and by room."""
    held = training(shape, chip, 1, rows, checkpointing)
    twice = sum(held.values()) + held["activations"] + held["logits"] + held["workspace"]
    seconds = rows * shape.seq_len * shape.train_flops_per_token / chip.peak if chip.peak else SHORT
    return seconds < SHORT and twice <= usable(chip)


def learning(
    learner: Learner,
    like: MicroBatch,
    weight: Tensor,
    ahead: Tensor | None,
    clear: Callable[[], None],
    *,
    keep: bool = True,
) -> Learn:
    """Learns from micro-batches; those of the size of `like` as one recording, where that pays. Call it when there are
    no gradients yet: `clear` forgets those that recording makes. `weight`, `ahead`: as they will be given, or None.
    A recording adds up gradients that an optimizer has given their place; without one, `keep` none of them."""

    def plain(batch: MicroBatch, weight: Tensor, ahead: Tensor | None) -> Tensor:
        loss = learner.loss(batch, weight, ahead)
        loss.backward()  # type: ignore[no-untyped-call]
        if not keep:
            clear()
        return loss.detach()

    if not pays(learner, like.inputs.size(0)):
        return plain

    def run(inputs: Tensor, targets: Tensor, weight: Tensor, ahead: Tensor | None = None) -> Tensor:
        return plain(replace(like, inputs=inputs, targets=targets), weight, ahead)

    def given(batch: MicroBatch, *numbers: Tensor | None) -> list[Tensor]:
        return [batch.inputs, batch.targets, *(number for number in numbers if number is not None)]

    learner.device.release()  # what ran before, unrecorded, has left room for its activations
    try:
        replay = learner.device.graph(run, *(tensor.clone() for tensor in given(like, weight, ahead)))
    except torch.OutOfMemoryError:  # other processes have some of the device's memory
        say("there is no room to record micro-batches: they are launched one by one")
        replay = None
    clear()
    if replay is None:
        learner.device.release()
        return plain

    def learn(batch: MicroBatch, weight: Tensor, ahead: Tensor | None) -> Tensor:
        if batch.inputs.shape != like.inputs.shape:
            return plain(batch, weight, ahead)
        loss: Tensor = replay(*given(batch, weight, ahead))
        return loss.clone()  # the next one is written to the same place

    return learn
