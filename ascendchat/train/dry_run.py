"""One micro-batch, forward and backward, before the first step, so that running out of memory shows now and not after
an hour. `fit` (loop.py) calls it; what measures the speed before there is a stage (pretrain.py) uses `until_it_fits`.

On NPUs with TASK_QUEUE_ENABLE=2, which training uses, an operator whose workspace does not fit raises once; from then
on torch_npu drops every operation without an error, and reads return what the memory held before. Nothing mends that
but a new process: it ends with OutOfMemory.status, and `ascendchat launch` starts again with the next smaller batch.

So it does where ranks share the weights out (nn/sharded.py): they gather layer by layer, and a rank that ran out of
memory in the middle takes no further part, while the others wait for its share and cannot be asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ascendchat.config import OutOfMemory, UserError
from ascendchat.device import Device
from ascendchat.launch.command import SMALLER
from ascendchat.parallel import collectives
from ascendchat.train.stage import Stage


def dry_run(stage: Stage, device: Device, say: Callable[[str], None]) -> None:
    """Take smaller device batches until one fits on all ranks."""

    def trial() -> None:
        stage.loss(stage.probe()).value.backward()  # type: ignore[no-untyped-call]
        device.synchronize()

    until_it_fits(trial, stage.smaller, stage.optimizer.zero_grad, stage.model, device, say)


def until_it_fits(
    trial: Callable[[], None],
    smaller: Callable[[], bool],
    clear: Callable[[], None],
    model: torch.nn.Module,
    device: Device,
    say: Callable[[str], None],
) -> None:
    """`trial` again and again, with `smaller` batches, until it fits on all ranks; it calls no other rank. `clear`
    frees the gradients."""
    place = next(model.parameters()).device
    for _ in range(_agreed(int(os.environ.get(SMALLER, "0")), place)):  # what processes before this one have found
        _shrink(smaller, say)
    while True:
        short = False
        try:
            trial()
        except torch.OutOfMemoryError:
            short = True
        dead = not device.responds()
        if dead or (short and _shared_out(model)):
            why = "the device does nothing any more" if dead else "the other devices wait for its share of the weights"
            collectives.abandon()
            raise OutOfMemory(
                f"out of memory in the dry run, and {why}, so this process has to end; `ascendchat launch` starts "
                "again with a smaller batch by itself, without it give a smaller --device-batch-size"
            )
        short = bool(_agreed(int(short), place))
        clear()
        if not short:
            return
        device.release()
        _shrink(smaller, say)


def _shared_out(model: torch.nn.Module) -> bool:
    """Whether other ranks hold parts of the weights. Such parameters are DTensors, which are told by what they have,
    since importing that class takes a second."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _agreed(number: int, place: torch.device) -> int:
    """The largest of all ranks."""
    flag = torch.tensor([float(number)], device=place)
    collectives.all_reduce(flag, "max")
    return int(flag.item())


def _shrink(smaller: Callable[[], bool], say: Callable[[str], None]) -> None:
    if not smaller():
        raise UserError("one row per device does not fit in memory; `ascendchat plan` shows what would")
    say("out of memory in the dry run: trying the next smaller device batch with the same total")
