"""A Stage over packed rows: what pretraining, mid-training and SFT have in common. See Stage in loop.py.

learner = build(config, shape, here)                             # model.py
stage = BaseStage(learner, split, steps, ...)                    # pretrain.py; or ChatStage of chat.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.config.train import TrainConfig
from ascendchat.data.corpus import Corpus
from ascendchat.data.loader import MicroBatch, Prefetcher
from ascendchat.data.mixture import Batches
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Generator, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.eval.bits import corpus_bits
from ascendchat.eval.scorer import MAX_TOKENS, ModelScorer
from ascendchat.models.shape import HFShape
from ascendchat.nn.model import Sizes
from ascendchat.parallel import collectives
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split, fit_split, split_fixed
from ascendchat.sizes.batch import split as share
from ascendchat.sizes.schedule import Curve
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import TrainModel, noise, optimizer_for
from ascendchat.train.stage import Loss, Optimizer, Stage
from ascendchat.train.start import kept, learning_rate, most_rows

SAMPLE_TOKENS = 24


def share_out(config: TrainConfig, shape: Shape | HFShape, device: Device, total: int, beside: int = 0) -> Split:
    """How the devices share `total` tokens a step; `beside`: bytes of each that something else needs. Without a total
    from the user, rows per device and micro-batches are the total where both are given."""
    fixed, checkpointing, size = config.device_batch_size, config.activation_checkpointing, collectives.world().size
    asked, examples = config.gradient_accumulation_steps, getattr(config, "target_examples_per_step", None)
    if examples and config.total_batch_size:
        raise UserError("--target-examples-per-step and --total-batch-size say the same thing; give one of them")
    given = f"--target-examples-per-step {examples}" if examples else f"--total-batch-size {config.total_batch_size}"
    free = not (examples or config.total_batch_size)
    if free and fixed and asked:
        return Split(size, fixed, asked, shape.seq_len)
    if isinstance(shape, HFShape):
        rows = fixed or most_rows(shape.counted, device.chip, size, checkpointing, beside=beside, **kept(config))
        split = (split_fixed if fixed else share)(total, size, shape.seq_len, rows)
    else:
        split = fit_split(shape, device.chip, size, total, rows=fixed, checkpointing=checkpointing, beside=beside)
    if asked is not None and free:
        return replace(split, accumulation=asked)
    if asked is not None and asked != split.accumulation:
        raise UserError(
            f"--gradient-accumulation-steps {asked} does not fit {given}: with "
            f"{split.devices} device(s) and {split.rows} rows of {split.seq_len} it takes {split.accumulation}"
        )
    return split


def curve(config: TrainConfig, steps: int, usual: Curve) -> Curve:
    """The learning rate over `steps`: as usual in the stage, but for what was asked for."""
    if config.warmup_steps is not None and config.warmup_ratio is not None:
        raise UserError("--warmup-steps and --warmup-ratio say the same thing; give one of them")
    ratio = None if config.warmup_ratio is None else round(config.warmup_ratio * steps)
    asked = {"warmup": config.warmup_steps if ratio is None else ratio, "warmdown": config.warmdown_ratio}
    asked["final"] = config.final_lr_frac
    return Curve(**{**asdict(usual), **{name: value for name, value in asked.items() if value is not None}})


def learning_rates(config: TrainConfig, shape: Sizes, total: int) -> dict[str, float]:
    """Of each group of parameters, for steps of `total` tokens."""
    if isinstance(shape, HFShape):
        return {"all": learning_rate(shape, getattr(config, "learning_rate", None))}
    asked = {
        "matrix": config.matrix_lr,
        "embedding": config.embedding_lr,
        "unembedding": config.unembedding_lr,
        "scalar": config.scalar_lr,
    }
    rates = schedule.rates(shape.dim, total, **asked)
    return {name: rate * config.lr_multiplier for name, rate in rates.items()}


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them all apart: a/wiki, b/wiki."""
    parts = 1
    while parts < max(len(folder.parts) for folder in folders):
        if len({folder.parts[-parts:] for folder in folders}) == len(set(folders)):
            break
        parts += 1
    return ["/".join(folder.parts[-parts:]) for folder in folders]


def mixed(*numbers: int) -> int:
    """A seed of 63 bits for each list of numbers, different in the last 32 too, which is all that a CPU takes."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) % 2**63


class RowStage(Stage):
    """Batches of rows in, cross-entropy out. A stage says where its batches come from and how it is validated."""

    def __init__(
        self,
        learner: TrainModel,
        split: Split,
        steps: int,
        tokenizer: Tokenizer,
        config: TrainConfig,
        usual: Curve | None = None,
    ) -> None:
        self.learner, self.split, self.steps, self.tokenizer, self.seed = learner, split, steps, tokenizer, config.seed
        self.curve = curve(config, steps, usual or Curve())
        self.model = learner.model
        learner.mean_over(split.total // split.devices)
        shape = learner.model.shape
        self.tokens_per_step, self.flops_per_token = split.total, float(shape.train_flops_per_token)
        self.decay = 0.0  # of the matrices, at step 0
        self.ahead: Tensor | None = None  # weight of the token after next
        rates = learning_rates(config, shape, split.total)
        self.facts = {  # for the run's record
            "attention": learner.kernel.name,
            "packaged": learner.packaged,
            "split": vars(split),
            "learning_rates": rates,
            "schedule": asdict(self.curve),
        }
        self.optimizer = self.make_optimizer(rates)
        self._weight = 0, torch.zeros(())  # targets of a step, and the weight of one of them
        self._feed = self._prefetcher()

    def make_optimizer(self, rates: dict[str, float]) -> Optimizer:
        return optimizer_for(self.learner, rates)

    def batches(self, rows_per_step: int) -> Batches:
        """Where the rows come from."""
        raise NotImplementedError

    def _prefetcher(self) -> Prefetcher:
        split, learner, mine = self.split, self.learner, self.split.rows * self.split.accumulation
        first = collectives.world().rank * mine
        batches, pin = self.batches(mine * split.devices), learner.device.pin
        return Prefetcher(batches, learner.place, rows=(first, first + mine), micro_batch=split.rows, pin=pin)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return self._feed.take(step)

    def draw_anew(self, *place: int) -> None:
        """What is dropped from here on is a function of seed, rank and place: a run that goes on drops the same."""
        self.learner.device.seed(mixed(self.seed, collectives.world().rank, *place))

    def probe(self) -> MicroBatch:
        return noise(self.learner, self.split)

    def forward_backward(self, batch: MicroBatch, scale: float = 1.0) -> Loss:
        """Every target of the step weighs the same, whichever rank has it; padding weighs nothing."""
        return Loss(self.learner.forward_backward(batch, self.weight(batch, scale), self.ahead))

    def weight(self, batch: MicroBatch, scale: float) -> Tensor:
        """Of one target."""
        if batch.step_targets != self._weight[0]:
            weight = torch.full((), self.split.devices / batch.step_targets, device=self.learner.place)
            self._weight = batch.step_targets, weight
        return self._weight[1] if scale == 1.0 else self._weight[1] * scale

    def rates(self, step: int) -> dict[str, float]:
        return {
            "lr_scale": schedule.lr_scale(step, self.steps, **asdict(self.curve)),
            "momentum": schedule.momentum(step, self.steps, warmdown=self.curve.warmdown),
            "matrix_decay": schedule.weight_decay(step, self.steps, self.decay),
        }

    def summary(self) -> str:
        split = self.split
        return (
            f"{self.model.shape.total_parameters / 1e6:.1f} M parameters; {self.steps} steps of {split.total} tokens = "
            f"{split.devices} device(s) x {split.rows} rows x {split.accumulation} micro-batch(es) x {split.seq_len}"
        )

    def identity(self) -> dict[str, Any]:
        return {
            "shape": self.model.shape.to_dict(),
            "tokenizer": self.tokenizer.fingerprint,
            "total_batch": self.split.total,
            "steps": self.steps,
            "seed": self.seed,
        }

    def smaller(self) -> bool:
        split = self.split.smaller()
        if split is None:
            return False
        self._feed.close()
        self.learner.release_graph()
        self.split = split
        self._feed = self._prefetcher()
        return True

    def scorer(self) -> ModelScorer:
        """Scores rows with the model as it is now. Without gradients only a layer or two is held at a time, so several
        micro-batches fit where training holds one."""
        learner, mine = self.learner, self.split.rows * self.model.shape.seq_len
        tokens = max(mine, min(MAX_TOKENS, mine * self.model.shape.depth // 2))
        bos = self.tokenizer.bos if learner.by_document else None
        return ModelScorer(
            self.model, learner.reader, learner.place, max_tokens=tokens, pin=learner.device.pin, bos=bos
        )

    def text_bits(self, corpora: Sequence[Corpus], most: int) -> dict[str, float]:
        """Bits per byte of each corpus over its first `most` tokens, and their mean first."""
        scorer, seq_len = self.scorer(), self.model.shape.seq_len
        sizes = np.asarray(self.tokenizer.token_bytes(), dtype=np.int64)
        bits = [corpus_bits(scorer, corpus, seq_len, most, sizes).bits_per_byte for corpus in corpora]
        names = distinct_names([corpus.folder for corpus in corpora]) if len(bits) > 1 else []
        mean = {"bpb": sum(bits) / len(bits)} if bits else {}
        return {**mean, **{f"bpb_{name}": bit for name, bit in zip(names, bits)}}

    def continue_prompts(self, prompts: Sequence[list[int]], sampling: Sampling) -> list[str]:
        """What the model writes behind each prompt, in one line."""
        learner, longest = self.learner, max(map(len, prompts)) + sampling.max_tokens
        engine: Generator = Engine(
            self.model,
            learner.reader,
            self.tokenizer,
            learner.device,
            learner.place,
            slots=len(prompts),
            context=min(longest, self.model.shape.seq_len),
            graphs=False,  # a trainer's process cannot capture on every chip
        )
        answers = engine.generate([Request(prompt, sampling) for prompt in prompts])
        return [" ".join(answer.text.split()) for answer in answers]

    def close(self) -> None:
        self._feed.close()
