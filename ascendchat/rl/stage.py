"""The stage of `ascendchat rl`: policy gradients on answers that were just given. See Stage in train/stage.py.

stage = RlStage(policy_loss, split, steps, engine, source, ...)    # built by command.py

A step: questions are answered several times each and judged (rollout.py), each answer is compared with the others to
its question, and the likelier the better ones become (grpo.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat.checkpoint import Checkpoint
from ascendchat.config.rl import RlConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.engine import Engine
from ascendchat.engine.padding import to_device
from ascendchat.engine.request import Completion
from ascendchat.errors import UserError, of_rank
from ascendchat.eval.examine import Examiner, GeneratorChooser, examine
from ascendchat.models.trained import HFSource
from ascendchat.nn import IGNORE
from ascendchat.nn.logprobs import Drawn, head_logprobs, head_objective
from ascendchat.parallel import collectives
from ascendchat.rl.buffer import Part, dealt, from_tensors, to_tensors
from ascendchat.rl.grpo import (
    PRESETS,
    Method,
    advantages,
    correction,
    k3,
    mean_correction,
    sequence_anchor,
    token_weight,
)
from ascendchat.rl.rollout import Group, TokenRows, pack
from ascendchat.rl.schedule import Slot
from ascendchat.rl.source import InTurn
from ascendchat.rl.transcript import figures, learnt, write_transcript
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split
from ascendchat.sizes.schedule import Curve
from ascendchat.tasks.base import Task
from ascendchat.train.model import TrainModel, optimizer_for
from ascendchat.train.rows import curve, learning_rates
from ascendchat.train.stage import Correction, Loss, Stage

MOMENTUM = 0.85, 0.95, 0.95  # at the beginning, in the middle, at the end


class RlStage(Stage):
    """Policy gradients on answers that the model has just given."""

    higher_is_better = True

    def __init__(
        self,
        policy_loss: PolicyLoss,
        split: Split,
        steps: int,
        engine: Callable[[], Engine],
        source: InTurn,
        exam: Sequence[Task],
        tokenizer: Tokenizer,
        config: RlConfig,
        origin: Checkpoint | HFSource,
        folder: Path,
    ) -> None:
        self.policy_loss, self.split, self.steps = policy_loss, split, steps
        self.learner = learner = policy_loss.learner
        self.engine, self.source, self.rollout, self.exam = engine, source, source.rollout, exam
        self.tokenizer, self.config, self.origin, self.folder = tokenizer, config, origin, folder
        self.model, self.method = learner.model, policy_loss.method
        self.curve = curve(config, steps, Curve(warmup=min(20, steps // 10), warmdown=1.0, final=0.0))
        shape = learner.model.shape
        self.flops_per_token = float(shape.train_flops_per_token)
        self.tokens_per_step = config.prompts_per_step * config.samples  # corrected by every step
        self.learning_rates = learning_rates(config, shape, split.total)
        self.optimizer = optimizer_for(learner, self.learning_rates)
        self._most = config.prompts_per_step * config.samples, config.max_new_tokens  # answers of a batch, their length
        learner.mean_over(math.prod(self._most) // collectives.world().size)  # as `token_weight` weighs each of them
        self._known: dict[str, float] = {}
        self._parts: dict[int, Part] = {}  # of the batch that is trained, those still to come
        self._complained = False  # of a disk that takes no transcripts
        self._seen: list[Slot] | None = None  # of a batch that nothing was told of yet
        self._size = 0, 0  # tokens and answers that this rank learns from in a step
        self._problem: Exception | None = None  # why this rank has no more answers; raised where all ranks meet

    # ---- a step --------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> Iterator[PolicyBatch]:
        """This rank's rows of a step, as soon as they are there."""
        batch, part = divmod(step, self.config.updates)
        if self.source.pushed < 0:
            self.source.push(self.weights(), self.source.rhythm.version)
        if self.config.updates == 1:
            return self._as_they_come(batch)
        if not self._parts:
            self._prepare(batch)
        return self._of_part(self._parts.pop(part))

    def _as_they_come(self, batch: int) -> Iterator[PolicyBatch]:
        """One update for the batch: each wave is trained while the others are still generated."""
        slots: list[Slot] = []
        micro_batches = tokens = answers = 0
        for wave in self.waves(batch):
            slots += wave
            rows, kept = self.packed(wave)
            if len(rows.inputs):
                for batch_rows in self.cut(rows):
                    micro_batches += 1
                    yield self.upload(batch_rows)
            tokens, answers = tokens + sum(map(learnt, kept)), answers + len(kept)
        if not micro_batches:
            yield self.upload(TokenRows.empty(self.split.rows, self.model.shape.seq_len, self.pad))
        self._seen, self._size = slots, (tokens, answers)

    def waves(self, batch: int) -> Iterator[list[Slot]]:
        """The slots of a batch in the order of training, with their advantages. What keeps this rank from them ends
        the run in `correction`, on all ranks: the others would wait there for one that has left."""
        waves = self.source.waves(batch)
        while True:
            self.model.eval()  # it may be the one that answers
            try:
                wave = next(waves, None)
            except Exception as problem:  # noqa: BLE001 (whatever it is, the other ranks wait)
                wave, self._problem = None, problem
            self.model.train()
            if wave is None:
                return
            for group in groups_of(wave):
                rewards = torch.tensor([group.rewards], dtype=torch.float64)
                group.advantages = advantages(rewards, self.method.scale)[0].tolist()
            yield wave

    def packed(self, slots: Sequence[Slot]) -> tuple[TokenRows, list[Completion]]:
        """The rows of what is learnt from, and its answers."""
        kept = self.kept(groups_of(slots))
        rows = pack(kept, self.weight_of, self.model.shape.seq_len, self.pad)
        return rows, [answer for group in kept for answer in group.answers]

    def kept(self, groups: Sequence[Group]) -> list[Group]:
        """Those that are learnt from."""
        return [group for group in groups if group.differ or not self.method.drop_equal]

    def weight_of(self, answer: Completion) -> float:
        """Of each token of an answer; see `correction`."""
        return token_weight(learnt(answer), self.method.mean, *self._most)

    def correction(self, step: int) -> Correction:
        """What the weights of the tokens are too small by. All ranks are here: it is also time to compare notes."""
        sums = *self._size, self._problem is not None
        total = torch.tensor([float(number) for number in sums], device=self.learner.place)
        collectives.all_reduce(total, "sum")
        tokens, answers, problems = total.tolist()
        if problems:
            told = self._problem and of_rank(self._problem, collectives.world().rank)
            every = collectives.gather_objects(told)
            raise self._problem or next(filter(None, every))
        self._known = {} if self._seen is None else self._note(step, self._seen)
        self._seen = None
        most, longest = self._most
        return Correction(
            mean_correction(self.method.mean, tokens, answers, *self._most), most * longest / max(1.0, tokens)
        )

    def after_step(self, step: int) -> None:
        """New weights for the generator, after the last update of a batch."""
        if (step + 1) % self.config.updates == 0:
            with self.source.lock:
                self.source.rhythm.next_batch()
            self.source.push(self.weights(), self.source.rhythm.version)
            if self.config.rhythm != "sync" and step + 1 < self.steps:
                self.source.begin()

    # ---- several updates of one batch ----------------------------------------------------------

    def _prepare(self, batch: int) -> None:
        """The whole batch, in as many parts as it has updates, with the log-probabilities of the weights that it finds:
        the proximal policy of all its updates."""
        slots = [slot for wave in self.waves(batch) for slot in wave]
        if self._problem is None:
            with self.source.lock:
                self.source.rhythm.drop(batch)
        slots.sort(key=lambda slot: slot.number)
        count, updates = len(slots), self.config.updates
        for part in range(updates):
            rows, kept = self.packed(slots[count * part // updates : count * (part + 1) // updates])
            self._parts[part] = Part(self.with_proximal(rows), sum(map(learnt, kept)), len(kept))
        self._seen = slots

    def with_proximal(self, rows: TokenRows) -> TokenRows:
        """The rows with the log-probabilities of these weights."""
        found = [self.policy_loss.logprobs(self.upload(some)).cpu() for some in self.cut(rows)]
        return replace(rows, proximal=torch.cat(found)[: len(rows.inputs)].numpy())

    def _of_part(self, part: Part) -> Iterator[PolicyBatch]:
        self._size = part.tokens, part.answers
        return map(self.upload, self.cut(part.rows))

    # ---- a resumed run -------------------------------------------------------------------------

    def extra(self) -> dict[str, Tensor]:
        """What was generated and is not trained yet."""
        with self.source.lock:
            return to_tensors(list(self.source.rhythm.slots.values()), self._parts)

    def load(self, saved: Checkpoint) -> None:
        super().load(saved)
        slots, parts = from_tensors(saved.extras(), self.rollout.questions.ask)
        batch, part = divmod(saved.step, self.config.updates)
        self.source.rhythm.go_on(batch, slots, dropped=part > 0)
        self._parts = dealt(parts, collectives.world().rank, collectives.world().size)

    # ---- the loss ------------------------------------------------------------------------------

    def cut(self, rows: TokenRows) -> list[TokenRows]:
        """The rows of each forward pass."""
        return rows.cut(self.split.rows, self.pad, fill=self.learner.device.compiles)

    def upload(self, rows: TokenRows) -> PolicyBatch:
        put = partial(to_device, place=self.learner.place, pin=self.learner.device.pin)
        inputs, targets = put(rows.inputs), put(rows.targets)
        columns = rows.advantage, rows.behaviour, rows.weight, rows.proximal
        advantage, behaviour, weight, proximal = (put(column, dtype=torch.float32) for column in columns)
        known = proximal if self.config.updates > 1 else None  # with one update it is the policy that is trained
        return PolicyBatch(inputs, targets, advantage, behaviour, weight, rows.lengths, known)

    def loss(self, batch: PolicyBatch, scale: float = 1.0) -> Loss:
        """See stage.py."""
        most, longest = self._most
        return self.policy_loss(batch, most * longest, scale)

    def probe(self) -> PolicyBatch:
        rows = TokenRows.empty(self.split.rows, self.model.shape.seq_len, self.pad)
        rows.targets[:] = 0
        return self.upload(rows)

    @property
    def pad(self) -> int:
        return self.tokenizer.pad

    # ---- what is known of it -------------------------------------------------------------------

    def _keep(self, step: int, groups: Sequence[Group]) -> None:
        """A transcript; a full disk does not end training for it, and is said once."""
        try:
            write_transcript(self.folder / "transcripts", step, groups)
        except OSError as error:
            if not self._complained:
                print(f"transcripts cannot be written ({error.strerror}): they are lost until there is room again")
            self._complained = True

    def _note(self, step: int, slots: Sequence[Slot]) -> dict[str, float]:
        """What a batch has seen, over all ranks."""
        groups = groups_of(sorted(slots, key=lambda slot: slot.number))
        self._keep(step, groups)
        batch, replaced, config = step // self.config.updates, sum(slot.round for slot in slots), self.config
        judged = [] if config.workflow else [term.name for term in self.rollout.judge.terms]
        apart = {"terms": judged, "tasks": [task.name for task in self.rollout.questions.tasks]}
        apart = {what: names for what, names in apart.items() if len(names) > 1}
        place = self.learner.place
        seen = figures(groups, self.kept(groups), replaced, batch, place, samples=config.samples, **apart)
        tokens = seen["answer_tokens"] * seen.pop("answers")
        self.tokens_per_step = int(tokens / config.updates)
        return {**seen, **self.source.pace(tokens, self.learner.place)}

    def rates(self, step: int) -> dict[str, float]:
        scale = schedule.lr_scale(step, self.steps, **asdict(self.curve))
        momentum = schedule.momentum(step, self.steps, values=MOMENTUM, ramp=300, warmdown=self.curve.warmdown)
        return {"lr_scale": scale, "momentum": momentum, "matrix_decay": 0.0, "clip": 1.0}

    def notes(self, step: int) -> dict[str, float]:
        """Of a batch, with the first of its steps."""
        return {**self._known, "max_ratio": self.policy_loss.largest_ratio()}

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy answers to questions that are not trained on; nothing where none can be checked."""
        if not self.exam:
            return {}
        engine = self.engine()
        engine.renew(self.source.rhythm.version)
        examiner = Examiner(
            self.tokenizer,
            GeneratorChooser(engine),
            engine,
            max_tokens=self.config.max_new_tokens,
            max_rows=self.config.eval_examples,
        )
        results = {task.name: examine(task, examiner).accuracy for task in self.exam}
        return {"accuracy": sum(results.values()) / len(results), **(results if len(results) > 1 else {})}

    def summary(self) -> str:
        config = self.config
        return (
            f"{self.model.shape.total_parameters / 1e6:.1f} M parameters; {self.steps} steps of "
            f"{config.prompts_per_step} questions x {config.samples} answers, {config.preset}"
        )

    def identity(self) -> dict[str, Any]:
        config, origin = self.config, self.origin
        names = "preset clip_low clip_high correction kl batch_invariant prompts_per_step samples max_new_tokens"
        names += " temperature top_k refill rhythm staleness"
        return {
            "stage": "rl",
            "shape": self.model.shape.to_dict(),
            "tokenizer": self.tokenizer.fingerprint,
            "steps": self.steps,
            "seed": config.seed,
            "questions": self.rollout.questions.fingerprint,
            "reward": ",".join(config.reward) + (f" in {config.workflow}" if config.workflow else ""),
            "start": f"{origin.state.get('stage')} step {origin.step} {origin.fingerprint}",
            "updates_per_batch": config.updates,
            **{name: getattr(config, name) for name in names.split()},
        }

    def is_spike(self, loss: float, mean: float) -> bool:
        return False  # the loss of policy gradients is no measure of anything

    def smaller(self) -> bool:
        split = self.split.smaller()
        if split is None:
            return False
        self.split = split
        return True

    def close(self) -> None:
        self.source.close()
        self.rollout.close()


def groups_of(slots: Sequence[Slot]) -> list[Group]:
    """Of slots that are finished."""
    return [slot.group for slot in slots if slot.group is not None]


# The loss of a batch of answers and what is measured of it: nn/logprobs.py and grpo.py put together.
#
#     of_policy = PolicyLoss(learner, method, drawn, reference)       # built by command.py
#     loss = of_policy(batch, tokens)                                 # RlStage.loss
#     batch = replace(batch, proximal=of_policy.logprobs(batch))      # before the first of several updates on a batch
#
# What is computed once per batch, without gradient: for GSPO with a known proximal policy the log-probabilities, from
# the same hidden states, since its ratio is that of a whole answer; and with a KL those of the reference.


@dataclass(frozen=True)
class PolicyBatch:
    """What one forward pass of RL takes, on the device: columns of the shape (B, T)."""

    inputs: Tensor
    targets: Tensor
    advantage: Tensor
    behaviour: Tensor
    weight: Tensor
    lengths: NDArray[np.int32]
    proximal: Tensor | None = None  # log-probabilities before the first update on the batch; None: this is the first


def method_of(config: RlConfig) -> Method:
    """The preset with what was asked for."""
    asked = {"clip_low": config.clip_low, "clip_high": config.clip_high, "correction": config.correction}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(PRESETS[config.preset], kl=config.kl, **given)  # type: ignore[arg-type]


class PolicyLoss:
    """The loss of answers, and their log-probabilities. `reference` has the weights that training began with; it is
    there if the method has a KL. `exact`: the generator must have reported the very same log-probabilities."""

    def __init__(
        self,
        learner: TrainModel,
        method: Method,
        drawn: Drawn,
        reference: TrainModel | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.learner, self.method, self.drawn, self.reference, self.exact = learner, method, drawn, reference, exact
        self.objective = method.objective()
        self._largest = torch.zeros((), device=learner.place)

    @torch.no_grad()
    def logprobs(self, batch: PolicyBatch) -> Tensor:
        """(B, T) of the targets by the weights as they are now, 0 where nothing is scored: the same bits, on a CPU, as
        the loss would find. Logits exist chunk by chunk."""
        return self._logprobs(self.learner, batch)

    def _logprobs(self, learner: TrainModel, batch: PolicyBatch) -> Tensor:
        return head_logprobs(self._hidden(learner, batch), learner.model.head, batch.targets, self.drawn)

    def _hidden(self, learner: TrainModel, batch: PolicyBatch) -> Tensor:
        return learner.hidden(batch.inputs, learner.documents(batch.inputs, batch.lengths))

    def __call__(self, batch: PolicyBatch, tokens: int, scale: float = 1.0) -> Loss:
        """Of this rank's tokens; the loop takes the mean over the ranks, so each counts as often as there are ranks.
        `tokens`: those that the metrics are means over."""
        learner, scored = self.learner, batch.targets != IGNORE
        hidden = self._hidden(learner, batch)
        unknown = torch.full_like(batch.weight, torch.nan)
        proximal = unknown if batch.proximal is None else batch.proximal
        anchor = self._anchor(hidden, proximal, batch) if batch.proximal is not None else proximal
        columns = [batch.advantage, anchor, proximal, batch.behaviour, batch.weight]
        if self.reference is not None:
            with torch.no_grad():
                columns.append(self._logprobs(self.reference, batch))
        weight = torch.full((), collectives.world().size * scale, device=learner.place)
        loss, logprobs, entropy = head_objective(
            hidden, learner.model.head, batch.targets, self.drawn, self.objective, columns, weight=weight
        )
        share = torch.where(scored, collectives.world().size / tokens, 0.0)
        metrics = {"entropy": entropy, **self._compared(logprobs, *columns)}
        if self.exact and (apart := torch.where(batch.weight * scored > 0, metrics["logprob_gap"], 0.0).max()) > 0:
            raise UserError(
                f"--batch-invariant: generator and trainer differ by {apart:.1e}: on this machine torch changes the "
                "order of sums with the shape even so; leave the flag out"
            )
        ratio = torch.where(scored, (logprobs - batch.behaviour).exp(), 0.0)
        self._largest = torch.maximum(self._largest, ratio.max())
        return Loss(loss, {name: (value * share).sum() for name, value in metrics.items()})

    def _anchor(self, hidden: Tensor, proximal: Tensor, batch: PolicyBatch) -> Tensor:
        """What the ratio of each token is measured from, (B, T)."""
        if self.method.level == "token":
            return proximal
        now = head_logprobs(hidden.detach(), self.learner.model.head, batch.targets, self.drawn)
        owner = torch.from_numpy(np.arange(len(batch.lengths)).repeat(batch.lengths)).to(proximal.device)
        scored = (batch.targets != IGNORE).flatten()
        anchor = sequence_anchor(now.flatten(), proximal.flatten(), owner, scored, len(batch.lengths))
        return anchor.view(proximal.shape)

    def _compared(
        self,
        logprobs: Tensor,
        advantage: Tensor,
        anchor: Tensor,
        proximal: Tensor,
        behaviour: Tensor,
        weight: Tensor,
        reference: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """Per token: how the trained policy differs from the others."""
        gap = torch.where(proximal.isnan(), logprobs, proximal) - behaviour
        found = {
            "logprob_gap": gap.abs(),
            "mismatch_kl": k3(gap),
            "clip_fraction": self.method.clipped(logprobs, advantage, anchor),
            "masked_fraction": correction(gap, self.method.correction) == 0,
        }
        return found if reference is None else {**found, "kl": k3(reference - logprobs)}

    def largest_ratio(self) -> float:
        """Of the probability of a token to the generator's, over all ranks, since this was asked for last."""
        collectives.all_reduce(self._largest, "max")
        found = self._largest.item()
        self._largest = torch.zeros_like(self._largest)
        return found
