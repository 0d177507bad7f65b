"""The start of every command that computes: a device, the world of processes, a way to print.

with joined(pick(config.device_type)) as here:
    here.say("only rank 0 prints this")
    model.to(here.place)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import torch

from ascendchat.device import Device, describe
from ascendchat.parallel import collectives
from ascendchat.parallel.world import World


@dataclass(frozen=True)
class Context:
    """This process and its device."""

    device: Device
    world: World
    place: torch.device  # where tensors go
    say: Callable[[str], None]  # prints on rank 0, nothing on the others

    @property
    def main(self) -> bool:
        """True on rank 0, which prints and writes."""
        return self.world.rank == 0


@contextmanager
def joined(device: Device, out: TextIO | None = None, *, quiet: bool = False) -> Iterator[Context]:
    """Bind the device and join the job; the first line printed says what was picked, unless `quiet`.

    `out` is where lines go: standard output by default, standard error where that holds a result.
    """
    world = collectives.init(device)

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, file=out or sys.stdout, flush=True)

    if not quiet:
        say(describe(device))
    yield Context(device, world, device.bind(world.local_rank), say)
    collectives.teardown()  # after an error at exit (init sees to it), for it may wait: the message comes first
