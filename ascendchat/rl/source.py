"""Sources of rollouts: groups are generated in turn with training (sync), or at the same time (stream, async).

    source = AsyncRolloutSource(rollout, schedule)        # or SyncRolloutSource, also for the engine of this process
    source.update_weights(weights, version=0)             # the weights that answer; also before anything begins
    for slots in source.finished(batch): ...              # lists of PromptSlots, to train on in this order
    source.next_batch(weights)                            # the weights after it; more slots may begin

schedule.py says what may begin. Answers are whole: what new weights interrupt, the generator continues.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ascendchat.checkpoint import host_copy
from ascendchat.engine.request import Weights
from ascendchat.errors import UserError, rank_error
from ascendchat.parallel import collectives
from ascendchat.rl.rollout import Rollout
from ascendchat.rl.schedule import PromptSlot, RolloutSchedule

MAX_THREADS = 256  # groups that are generated at the same time


@dataclass
class _Waiting:
    """Seconds that each side has waited for the other since they were last read."""

    trainer: float = 0.0
    rollouts: float = 0.0
    idle_since: float = field(default_factory=time.perf_counter)
    busy: int = 0  # groups under way

    def begin(self) -> None:
        if not self.busy:
            self.rollouts += time.perf_counter() - self.idle_since
        self.busy += 1

    def end(self) -> None:
        self.busy -= 1
        self.idle_since = time.perf_counter()

    def read(self) -> tuple[float, float]:
        """(trainer, rollouts); both count from 0 again."""
        now = time.perf_counter()
        if not self.busy:
            self.rollouts, self.idle_since = self.rollouts + now - self.idle_since, now
        seconds = self.trainer, self.rollouts
        self.trainer = self.rollouts = 0.0
        return seconds


class SyncRolloutSource:
    """Generates all groups of a batch, then lets it be trained. The generator may live in this process."""

    def __init__(self, rollout: Rollout, schedule: RolloutSchedule) -> None:
        self.rollout, self.schedule = rollout, schedule
        self.version = -1  # of the weights that answer; -1: none were sent yet
        self.lock = threading.RLock()  # around the schedule and its slots
        self._waiting = _Waiting()
        self._last = time.perf_counter(), 0  # when throughput was read, and the tokens generated until then

    # ---- weights -------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int) -> None:
        """Answer with these weights from now on. Every rank calls it; rank 0 sends them."""
        generator = self.rollout.generator
        if generator.elsewhere:
            self._send(host_copy(weights), version)
        else:  # the engine reads the very tensors that are trained
            generator.renew(version)
        self.version = version

    def next_batch(self, weights: Weights) -> None:
        """A batch is trained: answer with the new weights."""
        with self.lock:
            self.schedule.next_batch()
        self.update_weights(weights, self.schedule.version)

    def _send(self, weights: Weights, version: int) -> None:
        """Send them once for all ranks. An error ends the run on every rank."""
        own: Exception | None = None
        if collectives.world().rank == 0:
            try:
                self._load(weights, version)
            except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks wait)
                own = error
        if problem := collectives.broadcast_object(own and rank_error(own, 0)):
            raise own or problem
        if collectives.world().rank:  # rank 0 has loaded them into servers that all ranks ask
            self.rollout.generator.renew(version)

    def _load(self, weights: Weights, version: int) -> None:
        try:  # interrupts also where nothing is under way: a killed trainer may have left a server paused
            self.rollout.generator.load(weights, version, interrupt=True)
        except (UserError, ValueError) as error:
            problem = f"the weights after {version} updates were not taken: {error}"
            if "not finite" in str(error):
                problem += "; go on from an earlier checkpoint, with a lower learning rate"
            elif isinstance(error, ValueError):
                problem += "; start the servers with the model that is trained"
            raise UserError(problem) from None

    # ---- groups --------------------------------------------------------------------------------

    def finished(self, batch: int) -> Iterator[list[PromptSlot]]:
        """The slots of a batch with their groups, each once, in the order of training."""
        self.begin()
        while True:
            since = time.perf_counter()
            slots = self._next(batch)
            self._waiting.trainer += time.perf_counter() - since
            if not slots:
                return
            yield slots

    def begin(self) -> None:
        """Admit the slots that the staleness bound allows."""
        self.schedule.admit()

    def _next(self, batch: int) -> list[PromptSlot]:
        """The whole batch, then nothing."""
        while slots := self.schedule.running(batch):  # again while groups are resampled
            self._waiting.begin()
            self._generate(slots)
            self._waiting.end()
        return self.schedule.take(batch)

    def _generate(self, slots: Sequence[PromptSlot]) -> None:
        """Generate and judge one group for each slot."""
        rollout = self.rollout
        groups = rollout.groups([rollout.questions.ask(self.schedule.question(slot)) for slot in slots])
        with self.lock:
            for slot, group in zip(slots, groups):
                self.schedule.finish(slot, group)

    def drop(self, batch: int) -> None:
        """Forget the slots of a batch that was packed as a whole."""
        with self.lock:
            self.schedule.drop(batch)

    def close(self) -> None:
        """Begin nothing new."""
        return

    # ---- throughput ----------------------------------------------------------------------------

    def throughput(self, trained: float, device: torch.device) -> dict[str, float]:
        """Tokens per second of both sides while they worked, and seconds that each waited for the other, since the last
        call. `trained`: tokens of all ranks since then, like the tokens generated."""
        generated = torch.tensor([float(self.rollout.tokens - self._last[1])], device=device)
        collectives.all_reduce(generated, "sum")
        now, (trainer, rollouts) = time.perf_counter(), self._waiting.read()
        seconds = now - self._last[0]
        self._last = now, self.rollout.tokens
        return {
            "rollout_tokens_per_second": generated.item() / max(1e-9, seconds - rollouts),
            "training_tokens_per_second": trained / max(1e-9, seconds - trainer),
            "trainer_waited": trainer,
            "rollouts_waited": rollouts,
        }


class AsyncRolloutSource(SyncRolloutSource):
    """Generates elsewhere while the trainer works, one thread per prompt slot; groups are trained as they finish."""

    def __init__(self, rollout: Rollout, schedule: RolloutSchedule) -> None:
        super().__init__(rollout, schedule)
        self._changed = threading.Condition(self.lock)
        self._queue: queue.PriorityQueue[tuple[int, PromptSlot]] = queue.PriorityQueue()  # the lowest number first
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._begun = self._closed = False

    def begin(self) -> None:
        """Queue the slots that the staleness bound allows; the first time also those of a checkpoint."""
        with self.lock:
            resumed = [] if self._begun else list(self.schedule.slots.values())
            slots, self._begun = [*resumed, *self.schedule.admit()], True
            for slot in slots:
                if slot.group is None:
                    self._waiting.begin()
                    self._queue.put((slot.number, slot))
        for _ in range(min(MAX_THREADS, self._waiting.busy) - len(self._threads)):
            self._threads.append(threading.Thread(target=self._work, name="rollout", daemon=True))
            self._threads[-1].start()

    def next_batch(self, weights: Weights) -> None:
        super().next_batch(weights)
        self.begin()

    def _work(self) -> None:
        """Fill one slot after another."""
        try:
            while not self._closed:
                _, slot = self._queue.get()
                while slot.group is None and not self._closed:  # again while it is resampled
                    self._generate([slot])
                with self._changed:
                    self._waiting.end()
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised where the trainer waits)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self, batch: int) -> list[PromptSlot]:
        """All groups that have finished meanwhile; waits for one."""
        with self._changed:
            while not (slots := self.schedule.take(batch)) and not self.schedule.is_taken(batch):
                if self._error is not None:
                    raise self._error
                self._changed.wait(timeout=1.0)  # so that a signal is seen
            return slots

    def close(self) -> None:
        self._closed = True
