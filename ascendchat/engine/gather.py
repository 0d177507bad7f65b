"""Rows move together when few are left: a step runs all slots up to the highest busy one, so that one long answer in
the last slot would cost as much as all of them.

    gather()          # before each step

What a row has moves with it, on the device and on the host, and its answer changes no more than with other neighbours.
What the freed slot kept for later prompts goes the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ascendchat.engine.decode import Decoder, power
from ascendchat.engine.prefix import Copy, rounds

if TYPE_CHECKING:
    from ascendchat.engine.engine import Engine

LEAST = 16  # rows that a step must run: fewer take hardly less time
# Guesses, not timed on a card: steps in a row that half as many rows would do for, since moving takes as long as a few;
PATIENCE = 8
RECORDING = 256  # such steps in all, before a step of another size is recorded, which takes as long as many


class Gather:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sparse = engine, 0
        self.wanted: Counter[int] = Counter()  # by rows: steps that so many would have done for

    def __call__(self) -> None:
        self.sparse = self.sparse + 1 if self.worth() else 0
        if self.sparse > PATIENCE:
            self.sparse = 0
            self.engine._collect(0)  # what is under way comes back by slot
            self.engine._dismiss()
            self.move()

    def worth(self) -> bool:
        """Whether a step would have half as many rows. Not while prompts are read or wait for a slot."""
        engine, decoder = self.engine, self.engine.decoder
        if len(engine.running) < LEAST or engine.waiting or engine.reading.jobs:
            return False
        busy = np.flatnonzero(engine.sheet.owner)
        top = int(busy[-1]) + 1 if len(busy) else 0
        few = size(decoder, len(busy))
        if top < LEAST or size(decoder, top) < 2 * few:
            return False
        self.wanted[few] += 1
        if not (decoder.graphs or decoder.compiled) or self.wanted[few] > RECORDING:
            return True
        return any(rows == few for rows, _, _ in decoder._steps)

    def move(self) -> None:
        """The rows of the highest slots to the lowest free ones; nothing may be under way."""
        engine, held = self.engine, self.engine.prefixes.held
        busy = [slot for slot, job in enumerate(engine.running) if job is not None]
        targets = [slot for slot in range(len(busy)) if engine.running[slot] is None]
        sources = busy[len(busy) - len(targets) :]
        if not sources:
            return
        groups, records = [], []
        for source, target in zip(sources, targets):
            length, kept = int(engine.decoder.held[source]), held[target]
            groups.append([Copy(source, target, length, (length - 1) % 2)])
            if kept is not None and len(kept.tokens) >= engine.prefixes.least:
                groups[-1].append(Copy(target, source, len(kept.tokens), (len(kept.tokens) - 1) % 2))
            else:
                kept = None
            records.append((kept, held[source]))
            held[source] = held[target] = None  # nothing of it may be found if a copy fails
        for copies in rounds(groups):
            engine.decoder.copy(copies)
        move_state(engine.decoder, sources, targets)
        engine.sheet.move(np.array(sources), np.array(targets))
        for source, target, record in zip(sources, targets, records):
            held[source], held[target] = record
            job = engine.running[source]
            assert job is not None
            engine.running[target], engine.running[source], job.slot = job, None, target


def size(decoder: Decoder, rows: int) -> int:
    """Rows that a step for so many runs."""
    if decoder.prepared:
        return next(most for most, _ in decoder.prepared if most >= rows)
    return power(rows, 1, decoder.slots) if decoder.graphs or decoder.compiled else rows


@torch.no_grad()
def move_state(decoder: Decoder, sources: Sequence[int], targets: Sequence[int]) -> None:
    """All that the decoder knows of these rows but their cache; the slots that they leave are idle."""
    source, target = decoder.put(sources), decoder.put(targets)
    tables = decoder.seen, decoder.barred, decoder.bias, decoder.counts
    rows = decoder.token, decoder.previous, decoder.length, decoder.override, *decoder.settings
    for tensor in (*rows, *(table for table in tables if table is not None)):
        tensor[target] = tensor[source]
    decoder.target[target] = target
    decoder.held[targets] = decoder.held[sources]
    decoder.leave(sources)
