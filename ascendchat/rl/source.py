"""Where the groups of a batch come from: generated in turn with training (sync), or beside it (stream, async).

    source = Beside(rollout, rhythm, chunk=32)             # or InTurn, which also works in the trainer's process
    source.push(weights, version=0)                       # the weights that answer; also before anything begins
    for wave in source.waves(batch): ...                  # lists of Slots, to be trained in this order
    source.push(weights, version=1)                       # the next batch

schedule.py says what may begin and in which order it is trained. A server that was started again has other weights:
what it wrote is left out, and it gets the right ones.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ascendchat.checkpoint import host_copy
from ascendchat.engine.request import Completion, Request, Weights
from ascendchat.errors import UserError, of_rank
from ascendchat.parallel import collectives
from ascendchat.rl.rollout import Begun, Rollout, begun
from ascendchat.rl.schedule import Rhythm, Slot

MAX_THREADS = 256  # groups that are asked for at the same time
FRUITLESS = 30  # times in a row that a generator may answer without a single token
PAUSE = 1.0  # seconds after which it is asked again
WAVES = 8  # chunks of the longest answer that is allowed
LEAST_CHUNK = 8  # tokens


def chunk_of(max_new_tokens: int) -> int:
    """Tokens of a chunk: enough that asking for them one after another costs little."""
    return max(LEAST_CHUNK, -(-max_new_tokens // WAVES))


@dataclass
class _Clock:
    """Seconds that each side has waited for the other since they were last asked for."""

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
        """Of the trainer, of the rollouts; from now on they count anew."""
        now = time.perf_counter()
        if not self.busy:
            self.rollouts, self.idle_since = self.rollouts + now - self.idle_since, now
        found = self.trainer, self.rollouts
        self.trainer = self.rollouts = 0.0
        return found


class InTurn:
    """All groups of a batch, then training. The generator may live in this process."""

    def __init__(self, rollout: Rollout, rhythm: Rhythm, chunk: int) -> None:
        self.rollout, self.rhythm, self.chunk = rollout, rhythm, chunk
        self.clock, self.pushed = _Clock(), -1  # the version that answers
        self._told = time.perf_counter(), 0  # when `pace` was asked for, and the tokens generated until then
        self.lock = threading.RLock()  # around the rhythm, and all that its slots hold
        self._weights: Weights = {}
        self._loads = 0  # times that weights were sent
        self._pushing = threading.Lock()

    # ---- weights -------------------------------------------------------------------------------

    def push(self, weights: Weights, version: int) -> None:
        """Answer with these from now on. Every rank calls it; rank 0 sends them."""
        generator = self.rollout.generator
        with self._pushing:
            if not generator.elsewhere:  # around the very tensors that are trained
                generator.renew(version)
            else:
                self._weights = host_copy(weights)
                self._send(version)
            self._loads, self.pushed = self._loads + 1, version

    def _send(self, version: int) -> None:
        """Once for all ranks. What cannot be sent ends the run on every rank."""
        own: Exception | None = None
        if collectives.world().rank == 0:
            try:
                if problem := self._load(version):
                    own = UserError(problem)
            except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks wait)
                own = error
        if told := collectives.broadcast_object(own and of_rank(own, 0)):
            raise own or told
        if collectives.world().rank:
            self.rollout.generator.renew(version)

    def _load(self, version: int) -> str:
        """Why they were not taken; "" when they were."""
        try:  # with an interruption also where nothing is under way: a killed trainer may have left a server paused
            self.rollout.generator.load(self._weights, version, interrupt=True)
        except (UserError, ValueError) as error:
            problem = f"the weights after {version} updates were not taken: {error}"
            if "not finite" in str(error):
                problem += "; go on from an earlier checkpoint, with a lower learning rate"
            elif isinstance(error, ValueError):
                problem += "; start the servers with the model that is trained"
            return problem
        return ""

    def _push_again(self, loads: int) -> None:
        """A server has lost them; `loads`: how often they had been sent when it was asked."""
        with self._pushing:
            if self._loads == loads:
                if problem := self._load(self.pushed):
                    raise UserError(problem)
                self._loads += 1

    # ---- groups --------------------------------------------------------------------------------

    def waves(self, batch: int) -> Iterator[list[Slot]]:
        """The slots of a batch in the order of training, each once."""
        self.begin()
        while True:
            since = time.perf_counter()
            wave = self._next_wave(batch)
            self.clock.trainer += time.perf_counter() - since
            if not wave:
                return
            yield wave

    def begin(self) -> None:
        """Begin what may begin."""
        self.rhythm.admit()

    def _next_wave(self, batch: int) -> list[Slot]:
        """Wait for it; none: the batch is over."""
        while slots := self.rhythm.running(batch):
            self.clock.begin()
            self._advance(slots, self.rollout.sampling.max_tokens)
            self.clock.end()
        return self.rhythm.take(batch, whole=True)

    def _advance(self, slots: Sequence[Slot], most: int) -> None:
        """Ask for all answers of these slots, up to `most` tokens; what is finished is judged."""
        rhythm, rollout = self.rhythm, self.rollout
        asked = [rollout.questions.ask(rhythm.question(slot)) for slot in slots]
        if rollout.workflow is not None:  # conversations come as a whole
            groups = rollout.workflow.groups(asked, rollout.samples, self.answer)
            if not rollout.generator.elsewhere:  # else counted as they came
                rollout.count(answer for group in groups for answer in group.answers)
            with self.lock:
                for slot, found in zip(slots, groups):
                    rhythm.finished(slot, found)
            return
        given = [
            [(request, answer) for (request, _), answer in zip(fresh, slot.answers)] if slot.answers else fresh
            for fresh, slot in zip(map(rollout.begin, asked), slots)
        ]
        flat = iter(self._go_on([one for group in given for one in group], most))
        answers = [[next(flat) for _ in group] for group in given]
        whole = [all(answer.finish_reason != "cancelled" for answer in group) for group in answers]
        judged = iter(rollout.judged([pair for pair, over in zip(zip(asked, answers), whole) if over]))
        with self.lock:
            for slot, group, over in zip(slots, answers, whole):
                if over:
                    rhythm.finished(slot, next(judged))
                else:
                    slot.answers = group
                    rhythm.passed(slot)

    def answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Whole answers of the weights that were pushed. Any thread may ask where the generator is elsewhere."""
        return self._go_on(list(map(begun, requests)), max(request.sampling.max_tokens for request in requests))

    def _go_on(self, given: Sequence[Begun], most: int) -> list[Completion]:
        """Answers that are whole or have `most` tokens, however often it takes."""
        requests, answers, fruitless = [request for request, _ in given], [answer for _, answer in given], 0
        while True:
            with self._pushing:
                version, loads = self.pushed, self._loads  # pinned before anything is sent
            before = sum(len(answer.ids) for answer in answers)
            answers, stale = self.rollout.extend(list(zip(requests, answers)), most, version)
            if stale:
                self._push_again(loads)
            if all(answer.finish_reason != "cancelled" or len(answer.ids) >= most for answer in answers):
                return answers
            fruitless = 0 if sum(len(answer.ids) for answer in answers) > before else fruitless + 1
            if fruitless > FRUITLESS:
                raise UserError(f"the generator gave up the same answers {fruitless} times; look at its log")
            if fruitless:
                time.sleep(PAUSE)

    def pace(self, trained: float, place: torch.device) -> dict[str, float]:
        """Tokens per second of both sides while they worked, and seconds that each waited for the other, since this was
        last asked for; `trained` tokens since then, of all ranks like the tokens generated. `place`: of this rank."""
        generated = torch.tensor([float(self.rollout.tokens - self._told[1])], device=place)
        collectives.all_reduce(generated, "sum")
        now, (trainer, rollouts) = time.perf_counter(), self.clock.read()
        seconds = now - self._told[0]
        self._told = now, self.rollout.tokens
        return {
            "rollout_tokens_per_second": generated.item() / max(1e-9, seconds - rollouts),
            "training_tokens_per_second": trained / max(1e-9, seconds - trainer),
            "trainer_waited": trainer,
            "rollouts_waited": rollouts,
        }

    def close(self) -> None:
        """Nothing new begins."""
        return


class Beside(InTurn):
    """Groups that are generated elsewhere while the trainer works: one thread waits for each."""

    def __init__(self, rollout: Rollout, rhythm: Rhythm, chunk: int) -> None:
        super().__init__(rollout, rhythm, chunk)
        self._changed = threading.Condition(self.lock)
        self._left: queue.PriorityQueue[tuple[int, Slot]] = queue.PriorityQueue()  # the oldest first
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._begun = self._closed = False

    def begin(self) -> None:
        """Begin what may begin; the first time also what a checkpoint has brought."""
        with self.lock:
            before = [] if self._begun else list(self.rhythm.slots.values())
            slots, self._begun = [*before, *self.rhythm.admit()], True
            for slot in slots:
                if slot.group is None:
                    self.clock.begin()
                    self._left.put((slot.number, slot))
        for _ in range(min(MAX_THREADS, self.clock.busy) - len(self._threads)):
            self._threads.append(threading.Thread(target=self._work, name="rollout", daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        """Finish one slot after another."""
        try:
            while not self._closed:
                _, slot = self._left.get()
                while slot.group is None and not self._closed:
                    self._advance([slot], min((slot.wave + 1) * self.chunk, self.rollout.sampling.max_tokens))
                    with self._changed:
                        if slot.group is not None:
                            self.clock.end()
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised where the trainer waits)
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next_wave(self, batch: int) -> list[Slot]:
        with self._changed:
            while not (wave := self.rhythm.take(batch)) and not self.rhythm.over(batch):
                if self._error is not None:
                    raise self._error
                self._changed.wait(timeout=1.0)  # so that a signal is seen
            return wave

    def close(self) -> None:
        self._closed = True
