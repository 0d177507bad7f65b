"""`ascendchat rl --run demo`: reinforcement learning of a chat model on questions whose answers can be checked.

A step: the model answers each question several times (infer/engine.py), answers are judged (tasks/rewards.py), each is
compared with the others to its question, and the likelier the better ones become (train/grpo.py). What is generated in
a step is a pure function of (weights, seed, step): so a run that is resumed generates the very same answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat import dist
from ascendchat.checkpoint import Checkpoint, to_continue
from ascendchat.config import UserError
from ascendchat.config.rl import RlConfig
from ascendchat.data.mixture import absolute, parse_entry
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.dist.context import Context
from ascendchat.eval.examine import Examiner, GeneratorChooser, examine
from ascendchat.files import write_atomic
from ascendchat.infer.engine import Engine
from ascendchat.infer.generator import prompt_room
from ascendchat.infer.inputs import to_device
from ascendchat.infer.load import open_tokenizer, settings_of, tokenizer_folder
from ascendchat.infer.request import Completion, Sampling
from ascendchat.nn import IGNORE
from ascendchat.nn.loss import head_objective
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split
from ascendchat.plan.schedule import Curve
from ascendchat.plan.shape import Shape
from ascendchat.record import run_folder
from ascendchat.tasks import Task, load
from ascendchat.tasks.rewards import Judge
from ascendchat.train.grpo import PRESETS, advantages, length_penalty, token_weights
from ascendchat.train.rollout import SPARE, Group, Questions, Rollout, TokenRows, pack
from ascendchat.train.rows import Learner, build, curve, learning_rates, optimizer_for, share_out
from ascendchat.train.run import train_stage, training_context
from ascendchat.train.stage import Loss, Stage
from ascendchat.train.start import only_weights, starting_point

MOST_SLOTS = 256
NOT_HERE = "warm_start", "target_examples_per_step", "total_batch_size"  # flags of mid and sft without a meaning here
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
        self.curve = curve(config, steps, Curve(warmup=0, warmdown=1.0, final=0.0))
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
        return map(self.upload, rows.cut(self.split.rows, self.pad))

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


def default_questions(learnt_from: Sequence[str]) -> tuple[str, ...]:
    """Where no --data is given."""
    toy = {Path(parse_entry(entry).name).name for entry in learnt_from} == {"toyworld"}
    return ("toy_problems",) if toy else ("gsm8k",)


def run(config: RlConfig) -> int:
    """The command."""
    if asked := next((name for name in NOT_HERE if getattr(config, name)), ""):
        raise UserError(
            f"--{asked.replace('_', '-')} means nothing here; a step is --prompts-per-step times --samples answers, "
            "and the run starts from weights alone"
        )
    with training_context(config) as here:
        origin = starting_point(config, "rl", here.say)
        here.say(f"starting from {origin.folder}")
        shape = Shape.from_dict(origin.state["shape"])
        tokens = tokenizer_folder(config.tokenizer, origin).resolve()
        data = absolute(config.data or default_questions(settings_of(origin).get("data") or ()))
        config = replace(config, tokenizer=str(tokens), data=data, attend=config.attend or "document")
        tokenizer = open_tokenizer(tokens, origin, shape)
        if config.max_seq_len:
            shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})
        room = prompt_room(shape.seq_len, config.max_new_tokens)
        if config.max_new_tokens >= shape.seq_len:  # an answer ends with its row, and lengths are measured by that
            config = replace(config, max_new_tokens=shape.seq_len - 1)
        questions = Questions(data, tokenizer, config.seed, room, config.source)
        learner = build(config, shape, here)
        answers = -(-config.prompts_per_step // here.world.size) * config.samples
        engine = engine_of(learner, tokenizer, config.slots or min(MOST_SLOTS, answers))
        rollout = rollout_of(config, questions, engine, here)
        steps = config.num_iterations or max(1, int(questions.per_epoch * config.epochs) // config.prompts_per_step)
        folder = run_folder(config.run or origin.folder.parent.parent.name, "rl")
        split = share_out(config, shape, here.device, here.world.size * batch_rows(answers) * shape.seq_len)
        exam = [examination(parse_entry(entry).name, config.source) for entry in data]
        stage = RlStage(learner, split, steps, engine, rollout, exam, tokenizer, config, origin, folder)
        saved = to_continue(folder, config.resume, say=here.say)
        if not saved:
            stage.optimizer.load(only_weights(origin.reader()), 0)

        def add_files(run: Path) -> None:
            tokenizer.save(run / "tokenizer")

        facts = {"method": asdict(stage.method), "learning_rates": stage.learning_rates, "start": str(origin.folder)}
        return train_stage(stage, here, config, folder, saved, title="rl", facts=facts, add_files=add_files)


def rollout_of(config: RlConfig, questions: Questions, engine: Engine, here: Context) -> Rollout:
    """How answers are asked for and judged."""
    most, share = config.max_new_tokens, PRESETS[config.preset].soft_length

    def shaped(reward: float, answer: Completion) -> float:
        return reward + length_penalty(len(answer.ids), most, share)

    sampling = Sampling(most, config.temperature, config.top_k, logprobs=True, keep_stop=True)
    judge = Judge(config.reward, config.reward_timeout, say=here.say)
    return Rollout(questions, engine, judge, sampling, config.samples, config.seed, shaped)


def examination(name: str, source: str) -> Task:
    """The questions to be examined with: those kept for validation, else those of the test."""
    try:
        return load(name, "val", source)
    except UserError:  # it has no such split
        return load(name, "test", source)


def batch_rows(answers: int) -> int:
    """Rows that the answers of a step may fill, as a power of two: the size of the learning rates follows from it."""
    return 1 << max(0, (answers // 4).bit_length())


def engine_of(learner: Learner, tokenizer: Tokenizer, slots: int) -> Engine:
    """The engine around the very weights that are trained."""
    return Engine(
        learner.model,
        learner.kernel,
        tokenizer,
        learner.device,
        learner.place,
        slots=slots,
        context=learner.model.shape.seq_len,
        graphs=False,  # a trainer's process cannot capture on every chip
    )
