"""Bounded-staleness schedule of rollouts: when a prompt slot may begin, and what a batch is trained on.

    schedule = RolloutSchedule(per_batch=16, staleness=2, refill=2, batches=100)
    for slot in schedule.admit(): ...                     # generate answers to question schedule.question(slot)
    schedule.finish(slot, group)                          # dynamic sampling: equal rewards -> another question
    schedule.take(batch); schedule.next_batch()           # the finished groups to train on; new weights

It is pure: no clock, no thread. source.py generates, stage.py trains.

A batch has `per_batch` prompt slots, one question each; slot n belongs to batch n // per_batch, whatever is finished
first. A slot may begin while n < (staleness + version + 1) * per_batch, where `version` counts the batches trained: so
an answer is never trained more than `staleness` versions after its first token, and since slots are counted from the
beginning of the run, that holds after a resume as well. To let a finished group of a later batch overtake a long one
would break the bound: the long one could be overtaken any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ascendchat.rl.rollout import RESAMPLED, AnswerGroup


@dataclass
class PromptSlot:
    """One place of a batch, and the group of answers that fills it."""

    number: int  # counted over the run
    attempt: int = 0  # times that its question was resampled
    group: AnswerGroup | None = None  # the end: one with different rewards, or the last that was tried
    taken: bool = False  # by the trainer
    first: tuple[int, int] | None = None  # `solved` of the group of attempt 0, if that was replaced
    rejected: int = 0  # episodes of the groups that were replaced


class RolloutSchedule:
    """The prompt slots of one rank that have begun and are not trained yet. Every rank has the same version."""

    def __init__(
        self, *, per_batch: int, staleness: int, refill: int, batches: int, rank: int = 0, ranks: int = 1
    ) -> None:
        """`refill`: times that a slot is resampled at most."""
        self.per_batch, self.staleness, self.refill, self.batches = per_batch, staleness, refill, batches
        self.rank, self.ranks = rank, ranks
        self.version = 0  # batches trained
        self.begun = 0  # the slots before this number, of all ranks, have begun
        self.slots: dict[int, PromptSlot] = {}

    def resume(self, version: int, slots: Iterable[PromptSlot] = (), *, dropped: bool = False) -> None:
        """Continue from a checkpoint; `slots` may be those of all ranks, however many there were. `dropped`: the slots
        of the batch under way were packed into rows and are gone. A number without a slot has not begun."""
        self.version, self.begun = version, (version + dropped) * self.per_batch
        self.slots = {slot.number: slot for slot in slots if self.is_mine(slot.number)}

    def is_mine(self, number: int) -> bool:
        return number % self.per_batch % self.ranks == self.rank

    def admit(self) -> list[PromptSlot]:
        """The slots of this rank that may begin now."""
        end = min(self.batches, self.staleness + self.version + 1) * self.per_batch
        numbers = [n for n in range(self.begun, end) if self.is_mine(n) and n not in self.slots]
        self.begun = max(self.begun, end)
        self.slots |= {number: PromptSlot(number) for number in numbers}
        return [self.slots[number] for number in numbers]

    def question(self, slot: PromptSlot) -> int:
        """The number of its question: a function of slot and attempt, so that a resampled one can begin at once."""
        if not slot.attempt:
            return slot.number
        batch, column = divmod(slot.number, self.per_batch)
        return RESAMPLED + (batch * self.refill + slot.attempt - 1) * self.per_batch + column

    def finish(self, slot: PromptSlot, group: AnswerGroup) -> None:
        """Fill the slot, or resample its question if all rewards are equal (dynamic sampling, `refill` times)."""
        assert slot.group is None, f"slot {slot.number} was finished twice"
        if group.differ or slot.attempt >= self.refill:
            group.first, group.rejected = slot.first, group.rejected + slot.rejected
            slot.group = group
        else:
            slot.first, slot.rejected = slot.first or group.solved, slot.rejected + group.rejected
            slot.attempt += 1

    def of_batch(self, batch: int) -> list[PromptSlot]:
        first = batch * self.per_batch
        return [slot for number, slot in sorted(self.slots.items()) if first <= number < first + self.per_batch]

    def running(self, batch: int) -> list[PromptSlot]:
        """The slots of a batch that are not finished."""
        return [slot for slot in self.of_batch(batch) if slot.group is None]

    def take(self, batch: int) -> list[PromptSlot]:
        """The finished slots of a batch, each once."""
        slots = [slot for slot in self.of_batch(batch) if slot.group and not slot.taken]
        for slot in slots:
            slot.taken = True
        return slots

    def is_taken(self, batch: int) -> bool:
        """True when every slot of a batch was taken."""
        return all(slot.taken for slot in self.of_batch(batch))

    def drop(self, batch: int) -> None:
        """Forget the slots of a batch that is trained, or packed."""
        for slot in self.of_batch(batch):
            assert slot.taken, f"slot {slot.number} was not trained"
            del self.slots[slot.number]

    def next_batch(self) -> None:
        """A batch is trained; there are new weights."""
        self.drop(self.version)
        self.version += 1
