"""The stage of `ascendchat rl`: policy gradients on answers that were just given. See Stage in stage.py.

stage = RlStage(learner, split, steps, engine, rollout, ...)        # built by rl.py

A step: questions are answered several times each and judged (rollout.py), each answer is compared with the others to
its question, and the likelier the better ones become (grpo.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat import dist
from ascendchat.checkpoint import Checkpoint
from ascendchat.config.rl import RlConfig
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.eval.examine import Examiner, GeneratorChooser, examine
from ascendchat.files import write_atomic
from ascendchat.infer.engine import Engine
from ascendchat.infer.inputs import to_device
from ascendchat.infer.request import Completion
from ascendchat.nn import IGNORE
from ascendchat.nn.loss import head_objective
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split
from ascendchat.plan.schedule import Curve
from ascendchat.tasks import Task
from ascendchat.train.grpo import PRESETS, advantages, token_weights
from ascendchat.train.rollout import SPARE, Group, Rollout, TokenRows, pack
from ascendchat.train.rows import Learner, curve, learning_rates, optimizer_for
from ascendchat.train.stage import Loss, Stage

MOMENTUM = 0.85, 0.95, 0.95  # at the beginning, in the middle, at the end


@dataclass(frozen=True)
class PolicyBatch:
    """What one forward pass of RL takes, on the device: columns of the shape (B, T)."""

    inputs: Tensor
    targets: Tensor
    advantage: Tensor
    behaviour: Tensor
    weight: Tensor
    lengths: NDArray[np.int32]


class RlStage(Stage):
    """Policy gradients on answers that the model has just given."""

    higher_is_better = True

    def __init__(
        self,
        learner: Learner,
        split: Split,
        steps: int,
        engine: Engine,
        rollout: Rollout,
        exam: Sequence[Task],
        tokenizer: Tokenizer,
        config: RlConfig,
        origin: Checkpoint,
        folder: Path,
    ) -> None:
        self.learner, self.split, self.steps = learner, split, steps
        self.engine, self.rollout, self.exam = engine, rollout, exam
        self.tokenizer, self.config, self.origin, self.folder = tokenizer, config, origin, folder
        self.model, self.method = learner.model, PRESETS[config.preset]
        self.curve = curve(config, steps, Curve(warmup=min(20, steps // 10), warmdown=1.0, final=0.0))
        shape = learner.model.shape
        self.flops_per_token = float(shape.train_flops_per_token)
        self.tokens_per_step = config.prompts_per_step * config.samples  # corrected by every step
        self.learning_rates = learning_rates(config, shape, split.total)
        self.optimizer = optimizer_for(learner, self.learning_rates)
        self._objective = self.method.objective()
        self._known: dict[str, float] = {}

    # ---- a step --------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> Iterator[PolicyBatch]:
        """Generate, judge, compare; then this rank's rows."""
        self.model.eval()
        self.engine.renew(step)
        groups = self.answered(step)
        self.model.train()
        for group in groups:
            rewards = torch.tensor([group.rewards], dtype=torch.float64)
            group.advantages = advantages(rewards, self.method.scale)[0].tolist()
        self.write_transcript(step, groups)
        kept = [group for group in groups if group.differ] if self.method.drop_equal else groups
        lengths = torch.tensor([learnt(answer) for group in kept for answer in group.answers], dtype=torch.float64)
        total = torch.stack((lengths.sum(), torch.tensor(float(len(lengths)), dtype=torch.float64)))
        total = total.float().to(self.learner.place)
        dist.all_reduce(total, "sum")
        tokens, answers = total.tolist()
        self._note(groups, kept)
        weights = self.weights_of(lengths, tokens, answers)
        rows = pack(kept, weights, self.model.shape.seq_len, self.pad)
        return map(self.upload, rows.cut(self.split.rows, self.pad, fill=self.learner.device.compiles))

    def answered(self, step: int) -> list[Group]:
        """This rank's groups; those without any difference are replaced by other questions, a few times."""
        world, config = dist.world(), self.config
        mine = range(step * config.prompts_per_step + world.rank, (step + 1) * config.prompts_per_step, world.size)
        groups = self.rollout.groups(mine)
        for round in range(config.refill if self.method.drop_equal else 0):
            equal = [i for i, group in enumerate(groups) if not group.differ]
            if not equal:
                break
            first = SPARE + (step * config.refill + round) * config.prompts_per_step + world.rank
            more = self.rollout.groups(range(first, first + len(equal) * world.size, world.size))
            for i, group in zip(equal, more):
                if group.differ:
                    groups[i] = group
        return groups

    def weights_of(self, lengths: Tensor, tokens: float, answers: float) -> list[float]:
        """Of the tokens of each of this rank's answers, so that those of all ranks make the mean."""
        if not len(lengths):
            return []
        weights = token_weights(lengths, self.method.mean, self.config.max_new_tokens)
        share = lengths.sum() / max(1.0, tokens) if self.method.mean == "token" else len(lengths) / max(1.0, answers)
        return (weights * share).tolist()  # type: ignore[no-any-return]

    def upload(self, rows: TokenRows) -> PolicyBatch:
        put = partial(to_device, place=self.learner.place, pin=self.learner.device.pin)
        inputs, targets = put(rows.inputs), put(rows.targets)
        numbers = (put(column, dtype=torch.float32) for column in (rows.advantage, rows.behaviour, rows.weight))
        advantage, behaviour, weight = numbers
        return PolicyBatch(inputs, targets, advantage, behaviour, weight, rows.lengths)

    def loss(self, batch: PolicyBatch, scale: float = 1.0) -> Loss:
        """Of this rank's tokens; the loop takes the mean over the ranks, so each counts as often as there are ranks."""
        learner, ranks = self.learner, dist.world().size
        hidden = learner.hidden(batch.inputs, learner.documents(batch.inputs, batch.lengths))
        unknown = torch.full_like(batch.weight, torch.nan)  # one update per batch: the proximal policy is this one
        columns = batch.advantage, unknown, batch.behaviour, batch.weight
        weight = torch.full((), ranks * scale, device=learner.place)
        vocab, head = self.model.shape.vocab, self.model.head
        loss, logprobs = head_objective(hidden, head, batch.targets, vocab, self._objective, columns, weight=weight)
        scored = batch.targets != IGNORE
        gap = torch.where(scored, logprobs - batch.behaviour, 0.0)
        share = ranks * batch.weight
        metrics = {
            "logprob_gap": (gap.abs() * share).sum(),
            "mismatch_kl": ((gap.exp() - 1 - gap) * share).sum(),
            "entropy": (torch.where(scored, -batch.behaviour, 0.0) * share).sum(),
        }
        return Loss(loss, metrics)

    def probe(self) -> PolicyBatch:
        rows = TokenRows.empty(self.split.rows, self.model.shape.seq_len, self.pad)
        rows.targets[:] = 0
        return self.upload(rows)

    @property
    def pad(self) -> int:
        return self.tokenizer.specials["<|pad|>"]

    # ---- what is known of it -------------------------------------------------------------------

    def _note(self, groups: Sequence[Group], kept: Sequence[Group]) -> None:
        """What a step has seen, over all ranks."""
        answers = [answer for group in groups for answer in group.answers]
        own = torch.tensor(
            [
                float(len(groups)),
                float(len(answers)),
                sum(reward for group in groups for reward in group.rewards),
                float(sum(max(group.rewards) > 0 for group in groups)),
                float(sum(len(answer.ids) for answer in answers)),
                float(sum(answer.finish_reason == "length" for answer in answers)),
                float(len(kept)),
                float(sum(len(group.answers) - group.judged for group in groups)),
            ],
            device=self.learner.place,
        )
        dist.all_reduce(own, "sum")
        questions, count, reward, solved, length, cut, used, unjudged = own.tolist()
        self.tokens_per_step = int(length)
        self._known = {
            "reward": reward / count,
            f"pass@{self.config.samples}": solved / questions,
            "answer_tokens": length / count,
            "truncated": cut / count,
            "informative": used / questions,
            "unjudged": unjudged,
        }

    def rates(self, step: int) -> dict[str, float]:
        scale = schedule.lr_scale(step, self.steps, **asdict(self.curve))
        momentum = schedule.momentum(step, self.steps, values=MOMENTUM, ramp=300, warmdown=self.curve.warmdown)
        return {"lr_scale": scale, "momentum": momentum, "matrix_decay": 0.0, "clip": 1.0}

    def notes(self, step: int) -> dict[str, float]:
        return dict(self._known)

    def write_transcript(self, step: int, groups: Sequence[Group]) -> None:
        """What was asked, answered and how it was judged, one line per answer, in the run's folder."""
        folder = self.folder / "transcripts"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps(
                {
                    "task": group.question.task.name,
                    "index": group.question.index,
                    "question": group.question.task.question(group.question.index),
                    "answer": answer.text,
                    "reward": reward,
                    "tokens": len(answer.ids),
                    "finish": answer.finish_reason,
                    "version": answer.version,
                },
                ensure_ascii=False,
            )
            for group in groups
            for answer, reward in zip(group.answers, group.rewards)
        ]
        write_atomic(folder / f"step_{step:06d}-{dist.world().rank}.jsonl", "\n".join(lines) + "\n")

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy answers to questions that are not trained on."""
        self.engine.renew(step)
        examiner = Examiner(
            self.tokenizer,
            GeneratorChooser(self.engine),
            self.engine,
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
        names = "preset", "prompts_per_step", "samples", "max_new_tokens", "temperature", "top_k", "refill", "reward"
        return {
            "stage": "rl",
            "shape": self.model.shape.to_dict(),
            "tokenizer": self.tokenizer.fingerprint,
            "steps": self.steps,
            "seed": config.seed,
            "questions": self.rollout.questions.fingerprint,
            "start": f"{origin.state.get('stage')} step {origin.step} {origin.fingerprint}",
            **{name: getattr(config, name) for name in names},
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
        self.rollout.judge.close()


def learnt(answer: Completion) -> int:
    """Tokens that the model chose itself."""
    return sum(not forced for forced in answer.forced)
