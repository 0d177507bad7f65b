"""The stage of `ascendchat rl`: policy gradients on rollouts. See Stage in train/stage.py.

stage = RlStage(policy_loss, split, steps, engine, source, ...)    # built by command.py

A step: questions are answered several times each and judged (rollout.py), the advantage of an answer is its reward less
the mean of its group (grpo.py), and finished groups become micro-batches.

    batch          prompts_per_step questions that are answered by the same schedule; one update, or --updates of them
    prompt slot    one place of a batch, filled by one group: `samples` answers to a question
    micro-batch    packed rows (B, T) of answers, one forward and backward pass
"""

from __future__ import annotations

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
from ascendchat.config import as_dict
from ascendchat.config.rl import RlConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.engine import Engine
from ascendchat.engine.padding import to_device
from ascendchat.engine.request import Completion
from ascendchat.errors import UserError, rank_error
from ascendchat.eval.chat_tasks import GeneratorChooser, TaskEvaluator, evaluate_task
from ascendchat.models.open import ModelSource
from ascendchat.nn import IGNORE
from ascendchat.nn.logprobs import SamplingDistribution, head_logprobs, head_objective
from ascendchat.parallel import collectives
from ascendchat.rl.buffer import UpdateShare, dealt, from_tensors, to_tensors
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
from ascendchat.rl.rollout import AnswerGroup, TokenRows, pack
from ascendchat.rl.schedule import PromptSlot
from ascendchat.rl.source import SyncRolloutSource
from ascendchat.rl.transcript import BatchSums, batch_metrics, batch_sums, own_tokens, write_transcript
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split
from ascendchat.sizes.schedule import Curve
from ascendchat.tasks.task import Task
from ascendchat.train.model import TrainModel, optimizer_for
from ascendchat.train.rows import curve, learning_rates
from ascendchat.train.stage import Correction, Loss, Stage

MOMENTUM = 0.85, 0.95, 0.95  # of Muon: at the beginning, in the middle, at the end


class RlStage(Stage):
    """Policy gradients on answers of the model, by its weights now or, within --staleness, by earlier ones."""

    higher_is_better = True

    def __init__(
        self,
        policy_loss: PolicyLoss,
        split: Split,
        steps: int,
        engine: Callable[[], Engine],
        source: SyncRolloutSource,
        exam: Sequence[Task],
        tokenizer: Tokenizer,
        config: RlConfig,
        origin: ModelSource,
        folder: Path,
    ) -> None:
        self.policy_loss, self.split, self.steps = policy_loss, split, steps
        self.train_model = train_model = policy_loss.train_model
        self.engine, self.source, self.rollout, self.exam = engine, source, source.rollout, exam
        self.tokenizer, self.config, self.origin, self.folder = tokenizer, config, origin, folder
        self.model, self.method = train_model.model, policy_loss.method
        self.curve = curve(config, steps, Curve(warmup=min(20, steps // 10), warmdown=1.0, final=0.0))
        shape = train_model.model.shape
        self.flops_per_token = float(shape.train_flops_per_token)
        self.tokens_per_step = config.prompts_per_step * config.samples  # until the first batch is counted
        self.learning_rates = learning_rates(config, shape, split.total)
        self.optimizer = optimizer_for(train_model, self.learning_rates)
        self.answers, self.longest = config.prompts_per_step * config.samples, config.max_new_tokens  # of a batch
        train_model.mean_over(self.answers * self.longest // collectives.world().size)  # as `token_weight` weighs them
        self._metrics: dict[str, float] = {}  # of the last batch, logged with the first of its steps
        self._shares: dict[int, UpdateShare] = {}  # rows of the updates of this batch that are still to come
        self._complained = False  # printed that transcripts cannot be written
        self._slots: list[PromptSlot] = []  # of this batch, until its metrics are computed
        self._size = 0, 0  # tokens and answers that this rank learns from in a step
        self._in_step = False
        self._problem: Exception | None = None  # why this rank cannot finish the step; raised where all ranks meet

    # ---- a step --------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> Iterator[PolicyBatch]:
        """This rank's rows of a step, as soon as their groups are finished. An error here or in
        `forward_backward` ends the run in `correction`, on all ranks: the others wait there."""
        self._in_step, self._size, empty = True, (0, 0), True
        try:
            for rows in self._rows(*divmod(step, self.config.updates)):
                for part in self.cut(rows) if len(rows.inputs) else ():
                    yield self.upload(part)
                    empty = False
                    if self._problem is not None:
                        return
        except Exception as problem:  # noqa: BLE001 (whatever it is, the other ranks wait)
            self._problem = problem
        if empty:
            yield self.upload(TokenRows.empty(self.split.rows, self.model.shape.seq_len, self.pad))

    def _rows(self, batch: int, update: int) -> Iterator[TokenRows]:
        """Rows of one update: with one update per batch as its groups finish, else a prepared share of the batch."""
        if self.source.version < 0:  # at the start: a generator has its own weights, or none
            self.source.update_weights(self.weights(), self.source.schedule.version)
        if self.config.updates == 1:
            for slots in self._finished(batch):
                self._slots += slots
                share = self._packed(slots)
                self._size = self._size[0] + share.tokens, self._size[1] + share.answers
                yield share.rows
            return
        if update == 0:
            self._prepare(batch)
        prepared = self._shares.pop(update, None)
        if prepared is None:  # fewer ranks have saved this batch than train it now
            return
        self._size = prepared.tokens, prepared.answers
        yield prepared.rows

    def _finished(self, batch: int) -> Iterator[list[PromptSlot]]:
        """The slots of a batch in the order of training, with advantages."""
        finished = self.source.finished(batch)
        while True:
            self.model.eval()  # it may be the one that answers, and only while it does
            try:
                slots = next(finished, None)
            finally:
                self.model.train()
            if slots is None:
                return
            for group in groups_of(slots):
                rewards = torch.tensor([group.rewards], dtype=torch.float64)
                group.advantages = advantages(rewards, self.method.scale)[0].tolist()
            yield slots

    def _packed(self, slots: Sequence[PromptSlot]) -> UpdateShare:
        """The rows of the groups that are learnt from."""
        groups = self.informative(groups_of(slots))
        rows = pack(groups, self.weight_of, self.model.shape.seq_len, self.pad)
        answers = [answer for group in groups for answer in group.answers]
        return UpdateShare(rows, sum(map(own_tokens, answers)), len(answers))

    def informative(self, groups: Sequence[AnswerGroup]) -> list[AnswerGroup]:
        """The groups that are learnt from."""
        return [group for group in groups if group.differ or not self.method.drop_equal]

    def weight_of(self, answer: Completion) -> float:
        """Loss weight of each token of an answer; see `correction`."""
        return token_weight(own_tokens(answer), self.method.mean, self.answers, self.longest)

    def forward_backward(self, batch: PolicyBatch, scale: float = 1.0) -> Loss:
        try:
            return self.policy_loss(batch, self.answers * self.longest, scale).backward()
        except Exception as problem:
            if not self._in_step:  # the dry run, which looks for what fits
                raise
            self._problem = problem
            return Loss(torch.zeros((), device=self.train_model.place))

    def correction(self, step: int) -> Correction:
        """The factor that `token_weight` left out. All ranks meet here: an error of one ends the run on all."""
        own = self._own_sums(step) if step % self.config.updates == 0 else None
        self._in_step = False
        sums = *self._size, self._problem is not None
        total = torch.tensor([float(number) for number in sums], device=self.train_model.place)
        collectives.all_reduce(total, "sum")
        tokens, answers, problems = total.tolist()
        if problems:
            every = collectives.gather_objects(self._problem and rank_error(self._problem, collectives.world().rank))
            raise self._problem or next(filter(None, every))
        self._metrics = self._reduced(own) if own else {}
        return Correction(
            mean_correction(self.method.mean, tokens, answers, self.answers, self.longest),
            self.answers * self.longest / max(1.0, tokens),
        )

    def after_step(self, step: int) -> None:
        """New weights for the generator, after the last update of a batch."""
        if (step + 1) % self.config.updates == 0:
            self.source.next_batch(self.weights())

    def _prepare(self, batch: int) -> None:
        """Split a whole batch into a share for each of its updates, with the log-probabilities of the weights now: the
        proximal policy of all its updates."""
        self._slots = sorted((slot for slots in self._finished(batch) for slot in slots), key=lambda slot: slot.number)
        self.source.drop(batch)
        count, updates = len(self._slots), self.config.updates
        for update in range(updates):
            share = self._packed(self._slots[count * update // updates : count * (update + 1) // updates])
            self._shares[update] = replace(share, rows=self.with_proximal(share.rows))

    def with_proximal(self, rows: TokenRows) -> TokenRows:
        """The rows with the log-probabilities of the weights now."""
        logprobs = [self.policy_loss.logprobs(self.upload(part)).cpu() for part in self.cut(rows)]
        return replace(rows, proximal=torch.cat(logprobs)[: len(rows.inputs)].numpy())

    # ---- a resumed run -------------------------------------------------------------------------

    def extra(self) -> dict[str, Tensor]:
        """Rollouts that are not trained yet."""
        with self.source.lock:
            return to_tensors(list(self.source.schedule.slots.values()), self._shares)

    def load(self, saved: Checkpoint) -> None:
        super().load(saved)
        slots, shares = from_tensors(saved.extras(), self.rollout.questions.ask)
        batch, update = divmod(saved.step, self.config.updates)
        self.source.schedule.resume(batch, slots, dropped=update > 0)
        self._shares = dealt(shares, collectives.world().rank, collectives.world().size)

    # ---- the loss ------------------------------------------------------------------------------

    def cut(self, rows: TokenRows) -> list[TokenRows]:
        """Split rows into micro-batches."""
        return rows.cut(self.split.rows, self.pad, fill=self.train_model.device.compiles)

    def upload(self, rows: TokenRows) -> PolicyBatch:
        put = partial(to_device, place=self.train_model.place, pin=self.train_model.device.pin)
        inputs, targets = put(rows.inputs), put(rows.targets)
        columns = rows.advantage, rows.behaviour, rows.weight, rows.proximal
        advantage, behaviour, weight, proximal = (put(column, dtype=torch.float32) for column in columns)
        fixed = proximal if self.config.updates > 1 else None  # with one update it is the policy that is trained
        return PolicyBatch(inputs, targets, advantage, behaviour, weight, rows.lengths, fixed)

    def probe(self) -> PolicyBatch:
        rows = TokenRows.empty(self.split.rows, self.model.shape.seq_len, self.pad)
        rows.targets[:] = 0
        return self.upload(rows)

    @property
    def pad(self) -> int:
        return self.tokenizer.pad

    # ---- metrics, evaluation -------------------------------------------------------------------

    def _own_sums(self, step: int) -> BatchSums | None:
        """This rank's part of the batch's metrics, and its transcript; None after an error."""
        groups = groups_of(sorted(self._slots, key=lambda slot: slot.number))
        replaced, self._slots = sum(slot.attempt for slot in self._slots), []
        try:
            self._write_transcript(step, groups)
            terms = [] if self.config.workflow else [term.name for term in self.rollout.judge.terms]
            split = {"terms": terms, "tasks": [task.name for task in self.rollout.questions.tasks]}
            split = {what: names for what, names in split.items() if len(names) > 1}
            batch, samples = step // self.config.updates, self.config.samples
            return batch_sums(groups, self.informative(groups), replaced, batch, samples=samples, **split)
        except Exception as problem:  # noqa: BLE001 (raised in `correction`, on all ranks)
            self._problem = self._problem or problem
            return None

    def _write_transcript(self, step: int, groups: Sequence[AnswerGroup]) -> None:
        """A full disk does not end training for a transcript, and is said once."""
        try:
            write_transcript(self.folder / "transcripts", step, groups)
        except OSError as error:
            if not self._complained:
                print(f"transcripts cannot be written ({error.strerror}): they are lost until there is room again")
            self._complained = True

    def _reduced(self, own: BatchSums) -> dict[str, float]:
        """The metrics of a batch over all ranks."""
        device = self.train_model.place
        metrics = batch_metrics(own, device)
        tokens = metrics["answer_tokens"] * metrics.pop("answers")
        self.tokens_per_step = int(tokens / self.config.updates)
        return {**metrics, **self.source.throughput(tokens, device)}

    def rates(self, step: int) -> dict[str, float]:
        scale = schedule.lr_scale(step, self.steps, **asdict(self.curve))
        momentum = schedule.momentum(step, self.steps, values=MOMENTUM, ramp=300, warmdown=self.curve.warmdown)
        return {"lr_scale": scale, "momentum": momentum, "matrix_decay": 0.0, "clip": 1.0}

    def extra_metrics(self, step: int) -> dict[str, float]:
        return {**self._metrics, "max_ratio": self.policy_loss.largest_ratio()}

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy answers to questions that are not trained on; nothing where none can be checked."""
        if not self.exam:
            return {}
        engine = self.engine()
        engine.renew(self.source.schedule.version)
        evaluator = TaskEvaluator(
            self.tokenizer,
            GeneratorChooser(engine),
            engine,
            max_tokens=self.config.max_new_tokens,
            max_rows=self.config.eval_examples,
        )
        results = {task.name: evaluate_task(task, evaluator).accuracy for task in self.exam}
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
        names += " temperature top_k refill staleness"
        settings = as_dict(config)
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
            "rhythm": config.rollout_mode,
            **{name: settings[name] for name in names.split()},
        }

    def is_spike(self, loss: float, mean: float) -> bool:
        return False  # a policy-gradient loss measures no progress

    def smaller(self) -> bool:
        split = self.split.smaller()
        if split is None:
            return False
        self.split = split
        return True

    def close(self) -> None:
        self.source.close()
        self.rollout.close()


def groups_of(slots: Sequence[PromptSlot]) -> list[AnswerGroup]:
    """The groups of finished slots."""
    return [slot.group for slot in slots if slot.group is not None]


# The policy loss of a micro-batch and its metrics: nn/logprobs.py and grpo.py put together.
#
#     policy_loss = PolicyLoss(train_model, method, drawn, reference)      # built by command.py
#     loss = policy_loss(batch, tokens).backward()                     # RlStage.forward_backward
#     batch = replace(batch, proximal=policy_loss.logprobs(batch))     # before the first of several updates on a batch
#
# Computed without gradient: for GSPO with a proximal policy the log-probabilities, from the same hidden states, since
# its ratio is that of a whole answer; and with a KL those of the reference.


@dataclass(frozen=True)
class PolicyBatch:
    """The micro-batch of one forward pass, on the device; columns are (B, T)."""

    inputs: Tensor
    targets: Tensor
    advantage: Tensor
    behaviour: Tensor
    weight: Tensor
    lengths: NDArray[np.int32]
    proximal: Tensor | None = None  # log-probabilities before the first update on the batch; None: this is the first


def method_of(config: RlConfig) -> Method:
    """The preset with the flags that were given."""
    flags = {"clip_low": config.clip_low, "clip_high": config.clip_high, "correction": config.correction}
    overrides = {name: value for name, value in flags.items() if value is not None}
    return replace(PRESETS[config.preset], kl=config.kl, **overrides)  # type: ignore[arg-type]


class PolicyLoss:
    """The policy loss of answers, and their log-probabilities. `reference`: the initial model, if the method has a
    KL to it. `exact`: an error unless the generator has reported the very same log-probabilities."""

    def __init__(
        self,
        train_model: TrainModel,
        method: Method,
        drawn: SamplingDistribution,
        reference: TrainModel | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.train_model, self.method, self.drawn, self.reference, self.exact = (
            train_model,
            method,
            drawn,
            reference,
            exact,
        )
        self.objective = method.objective()
        self._largest = torch.zeros((), device=train_model.place)

    @torch.no_grad()
    def logprobs(self, batch: PolicyBatch) -> Tensor:
        """Log-probabilities (B, T) of the targets by the weights now, 0 without a target: on a CPU the same bits
        as in the loss. Logits exist chunk by chunk."""
        return self._logprobs(self.train_model, batch)

    def _logprobs(self, train_model: TrainModel, batch: PolicyBatch) -> Tensor:
        return head_logprobs(self._hidden(train_model, batch), train_model.model.head, batch.targets, self.drawn)

    def _hidden(self, train_model: TrainModel, batch: PolicyBatch) -> Tensor:
        return train_model.hidden(batch.inputs, train_model.documents(batch.inputs, batch.lengths))

    def __call__(self, batch: PolicyBatch, tokens: int, scale: float = 1.0) -> Loss:
        """The loss of this rank's tokens, times the number of ranks, since the loop takes the mean over them. `tokens`:
        the number that metrics are divided by."""
        train_model, scored = self.train_model, batch.targets != IGNORE
        hidden = self._hidden(train_model, batch)
        unknown = torch.full_like(batch.weight, torch.nan)
        proximal = unknown if batch.proximal is None else batch.proximal
        anchor = self._anchor(hidden, proximal, batch) if batch.proximal is not None else proximal
        columns = [batch.advantage, anchor, proximal, batch.behaviour, batch.weight]
        if self.reference is not None:
            with torch.no_grad():
                columns.append(self._logprobs(self.reference, batch))
        weight = torch.full((), collectives.world().size * scale, device=train_model.place)
        loss, logprobs, entropy = head_objective(
            hidden, train_model.model.head, batch.targets, self.drawn, self.objective, columns, weight=weight
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
        """The log-probability that the ratio of each token is measured from, (B, T)."""
        if self.method.level == "token":
            return proximal
        now = head_logprobs(hidden.detach(), self.train_model.model.head, batch.targets, self.drawn)
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
        """Metrics per token, (B, T): differences between the trained policy and the others."""
        gap = torch.where(proximal.isnan(), logprobs, proximal) - behaviour
        metrics = {
            "logprob_gap": gap.abs(),
            "mismatch_kl": k3(gap),
            "clip_fraction": self.method.clipped(logprobs, advantage, anchor),
            "masked_fraction": correction(gap, self.method.correction) == 0,
        }
        return metrics if reference is None else {**metrics, "kl": k3(reference - logprobs)}

    def largest_ratio(self) -> float:
        """The largest ratio of a token's probability to the generator's, over all ranks, since the last call."""
        collectives.all_reduce(self._largest, "max")
        largest = self._largest.item()
        self._largest = torch.zeros_like(self._largest)
        return largest
