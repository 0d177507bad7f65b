"""When a question may begin and when its answers may be trained: the one formula of sync, stream and async.

    rhythm = Rhythm(per_batch=16, staleness=2, refill=2, batches=100)
    for slot in rhythm.admit(): ...                       # ask question rhythm.question(slot)
    rhythm.passed(slot); rhythm.finished(slot, group)     # how far its answers have come
    rhythm.take(batch); rhythm.next_batch()               # what is trained next; the weights of the next version

No clock and no thread is in here: source.py generates, stage.py trains.

A batch has `per_batch` slots, one question each; slot n belongs to batch n // per_batch, whatever is finished first. A
slot may begin while n < (staleness + version + 1) * per_batch, where `version` counts the batches trained: so an answer
is never trained more than `staleness` versions after its first token, and since slots are counted from the beginning of
the run, that holds after a resume as well. To let a finished group of a later batch overtake a long one would break the
bound: the long one could be overtaken any number of times.

The order of training within a batch is a function of the answers alone, though groups finish when they like: by the
round of replacing, then by the wave, which is the length of the longest answer in chunks of a fixed number of tokens. A
wave is trained once every group that still runs is known to be longer. This is nearly the order of finishing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ascendchat.engine.request import Completion
from ascendchat.rl.rollout import SPARE, Group

Key = tuple[float, float]  # round of replacing, wave
NEVER: Key = (math.inf, math.inf)


@dataclass
class Slot:
    """One place of a batch, and how far its group has come."""

    number: int  # counted over the run
    round: int = 0  # times that its question was replaced
    wave: int = 0  # chunks of tokens that each of its answers has, or is finished; with the group: its wave
    answers: list[Completion] = field(default_factory=list)  # so far; "cancelled" are those to go on with
    group: Group | None = None  # the end: one with different rewards, or the last that was tried
    taken: bool = False  # by the trainer
    first: tuple[int, int] | None = None  # `solved` of the group that was replaced first
    rejected: int = 0  # episodes of the groups that were replaced

    @property
    def earliest(self) -> Key:
        """Where it stands in the order of training, or at least will."""
        return self.round, self.wave if self.group else self.wave + 1


class Rhythm:
    """The slots of one rank: those that have begun and are not trained yet. Every rank has the same version."""

    def __init__(
        self, *, per_batch: int, staleness: int, refill: int, batches: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self.per_batch, self.staleness, self.refill, self.batches = per_batch, staleness, refill, batches
        self.rank, self.ranks = rank, ranks
        self.version = 0  # batches trained
        self.begun = 0  # the slots before it, of all ranks, have begun
        self.slots: dict[int, Slot] = {}

    def go_on(self, version: int, slots: Iterable[Slot] = (), *, dropped: bool = False) -> None:
        """As a checkpoint has left it; `slots` may be those of all ranks, of however many there were. `dropped`: those
        of the batch that comes next are elsewhere. What has no slot has not begun."""
        self.version, self.begun = version, (version + dropped) * self.per_batch
        self.slots = {slot.number: slot for slot in slots if self.mine(slot.number)}

    def mine(self, number: int) -> bool:
        return number % self.per_batch % self.ranks == self.rank

    def admit(self) -> list[Slot]:
        """The slots of this rank that may begin now."""
        end = min(self.batches, self.staleness + self.version + 1) * self.per_batch
        new = [Slot(number) for number in range(self.begun, end) if self.mine(number) and number not in self.slots]
        self.begun = max(self.begun, end)
        self.slots |= {slot.number: slot for slot in new}
        return new

    def question(self, slot: Slot) -> int:
        """The number of its question: a function of the slot and the round, so that a replacement can begin at once."""
        if not slot.round:
            return slot.number
        batch, place = divmod(slot.number, self.per_batch)
        return SPARE + (batch * self.refill + slot.round - 1) * self.per_batch + place

    def passed(self, slot: Slot) -> None:
        """Its answers have one chunk more, and some go on."""
        slot.wave += 1

    def finished(self, slot: Slot, group: Group) -> None:
        """All its answers are there. A group without any difference in reward is replaced, a few times."""
        assert slot.group is None, f"slot {slot.number} was finished twice"
        if group.differ or slot.round >= self.refill:
            group.first, group.rejected = slot.first, group.rejected + slot.rejected
            slot.group, slot.wave = group, slot.wave + 1
        else:
            slot.first, slot.rejected = slot.first or group.solved, slot.rejected + group.rejected
            slot.round, slot.wave = slot.round + 1, 0
        slot.answers = []

    def of_batch(self, batch: int) -> list[Slot]:
        first = batch * self.per_batch
        return [slot for number, slot in sorted(self.slots.items()) if first <= number < first + self.per_batch]

    def running(self, batch: int) -> list[Slot]:
        """Those of a batch that are not finished."""
        return [slot for slot in self.of_batch(batch) if slot.group is None]

    def take(self, batch: int, *, whole: bool = False) -> list[Slot]:
        """The next wave that is known to be complete, once; `whole`: all of the batch, when all are there."""
        limit = min((slot.earliest for slot in self.running(batch)), default=NEVER)
        there = [slot for slot in self.of_batch(batch) if slot.group and not slot.taken]
        first = min((slot.earliest for slot in there), default=NEVER)
        if first >= limit or (whole and limit < NEVER):
            return []
        wave = [slot for slot in there if whole or slot.earliest == first]
        for slot in wave:
            slot.taken = True
        return wave

    def over(self, batch: int) -> bool:
        """Whether all of a batch was taken."""
        return all(slot.taken for slot in self.of_batch(batch))

    def drop(self, batch: int) -> None:
        """Forget its slots: somebody else has them."""
        for slot in self.of_batch(batch):
            assert slot.taken, f"slot {slot.number} was not trained"
            del self.slots[slot.number]

    def next_batch(self) -> None:
        """A batch is trained; there are new weights."""
        self.drop(self.version)
        self.version += 1
