"""The Stage over packed rows, which pretraining, mid-training, SFT and fine-tuning are. See Stage in stage.py.

train_model = build(config, shape, here)                                         # model.py
stage = RowStage(train_model, split, steps, batches=..., optimizer=..., ...)     # pretrain.py, chat.py, finetune.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.checkpoint import Checkpoint
from ascendchat.config.train import HFTrainConfig, OwnModelConfig, TrainConfig
from ascendchat.data.loader import MicroBatch, Prefetcher
from ascendchat.data.mixture import MixtureLoader
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.errors import UserError
from ascendchat.models.shape import HFShape
from ascendchat.nn.model import Sizes
from ascendchat.nn.optim import MuonAdamW
from ascendchat.parallel import collectives
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split, fit_split, split_fixed
from ascendchat.sizes.batch import split as share
from ascendchat.sizes.schedule import Curve
from ascendchat.sizes.shape import Shape
from ascendchat.train.evaluation import Evaluation
from ascendchat.train.model import TrainModel, random_micro_batch
from ascendchat.train.stage import Loss, Optimizer, Stage, updates_of
from ascendchat.train.start import WeightLayout, learning_rate, most_rows


def total_flag(total: int | None, examples: int | None = None) -> str:
    """The flag that sets the size of a step, as it was given; empty where none was."""
    if examples and total:
        raise UserError("--target-examples-per-step and --total-batch-size say the same thing; give one of them")
    return f"--target-examples-per-step {examples}" if examples else f"--total-batch-size {total}" if total else ""


def share_out(
    config: TrainConfig,
    shape: Shape | HFShape,
    device: Device,
    total: int,
    *,
    beside: int = 0,
    flag: str = "",
    packaged: Collection[str] = (),
    layout: WeightLayout = WeightLayout(),  # noqa: B008 (immutable)
) -> Split:
    """Split `total` tokens a step over the devices; `beside`: bytes of each that something else needs; `packaged` as
    TrainModel.packaged. `flag`: the one that set the total; without it, rows per device times micro-batches are the
    total if both were set."""
    fixed, checkpointing, size = config.device_batch_size, config.activation_checkpointing, collectives.world().size
    accumulation = config.gradient_accumulation_steps
    if not flag and fixed and accumulation:
        return Split(size, fixed, accumulation, shape.seq_len)
    if isinstance(shape, HFShape):
        rows = fixed or most_rows(shape.counted, device.chip, size, checkpointing, beside=beside, **layout._asdict())
        split = (split_fixed if fixed else share)(total, size, shape.seq_len, rows)
    else:
        known: Any = {"checkpointing": checkpointing, "beside": beside, "packaged": packaged}
        split = fit_split(shape, device.chip, size, total, rows=fixed, **known)
    if accumulation is not None and not flag:
        return replace(split, accumulation=accumulation)
    if accumulation is not None and accumulation != split.accumulation:
        raise UserError(
            f"--gradient-accumulation-steps {accumulation} does not fit {flag}: with "
            f"{split.devices} device(s) and {split.rows} rows of {split.seq_len} it takes {split.accumulation}"
        )
    return split


def curve(config: TrainConfig, steps: int, usual: Curve) -> Curve:
    """Schedule of the learning rate over `steps`: that of the stage, `usual`, changed by the flags."""
    if config.warmup_steps is not None and config.warmup_ratio is not None:
        raise UserError("--warmup-steps and --warmup-ratio say the same thing; give one of them")
    ratio = None if config.warmup_ratio is None else round(config.warmup_ratio * steps)
    flags = {"warmup": config.warmup_steps if ratio is None else ratio, "final": config.final_lr_frac}
    if isinstance(config, OwnModelConfig):
        flags["warmdown"] = config.warmdown_ratio
    return Curve(**{**asdict(usual), **{name: value for name, value in flags.items() if value is not None}})


def learning_rates(config: TrainConfig, shape: Sizes, total: int) -> dict[str, float]:
    """Learning rate of each group of parameters, for steps of `total` tokens."""
    if isinstance(shape, HFShape):
        return {"all": learning_rate(shape, config.learning_rate if isinstance(config, HFTrainConfig) else None)}
    flags = {"matrix": config.matrix_lr}
    if isinstance(config, OwnModelConfig):
        flags |= {"embedding": config.embedding_lr, "unembedding": config.unembedding_lr, "scalar": config.scalar_lr}
    rates = schedule.rates(shape.dim, total, **flags)
    return {name: rate * config.lr_multiplier for name, rate in rates.items()}


def mixed(*numbers: int) -> int:
    """Hash numbers to a seed of 63 bits whose last 32, all that a CPU takes, differ too."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) % 2**63


def seeder(train_model: TrainModel, seed: int) -> Callable[..., None]:
    """Seeds the device by numbers such as step and micro-batch, and by the rank: a run that goes on drops the same."""

    def reseed(*numbers: int) -> None:
        train_model.device.seed(mixed(seed, collectives.world().rank, *numbers))

    return reseed


def pretraining_rates(step: int, *, steps: int, curve: Curve, decay: float = 0.0) -> dict[str, float]:
    """Arguments of the optimizer for a model of our own; `decay`: of the matrices, at step 0."""
    return {
        "lr_scale": schedule.lr_scale(step, steps, **asdict(curve)),
        "momentum": schedule.momentum(step, steps, warmdown=curve.warmdown),
        "matrix_decay": schedule.weight_decay(step, steps, decay),
    }


def row_facts(train_model: TrainModel, split: Split, rates: dict[str, float], curve: Curve) -> dict[str, Any]:
    """Facts of a stage for the run's record."""
    return {
        "attention": train_model.kernel.name,
        "packaged": train_model.packaged,
        "split": vars(split),
        "learning_rates": rates,
        "schedule": asdict(curve),
    }


def row_identity(train_model: TrainModel, tokenizer: Tokenizer, split: Split, steps: int, seed: int) -> dict[str, Any]:
    """The part of Stage.identity that all stages over rows have."""
    return {
        "shape": train_model.model.shape.to_dict(),
        "tokenizer": tokenizer.fingerprint,
        "total_batch": split.total,
        "steps": steps,
        "seed": seed,
    }


class WeightAveraging:
    """Makes the model the mean of about eight weights of the last tenth of its run (LAWA)."""

    def __init__(self, optimizer: MuonAdamW, steps: int) -> None:
        self.optimizer, self.steps = optimizer, steps

    def after_step(self, step: int) -> None:
        count = schedule.averaged_snapshots(step, self.steps)
        if count > schedule.averaged_snapshots(step - 1, self.steps):
            self.optimizer.average(count, last=step + 1 == self.steps)

    def load(self, saved: Checkpoint) -> None:
        begun = schedule.averaged_snapshots(saved.step - 1, self.steps) > 0
        self.optimizer.load(saved.reader(), updates_of(saved), averaging=begun)


class RowStage(Stage):
    """Packed rows in, cross-entropy out. Pretraining, mid-training, SFT and fine-tuning differ in what they give in.

    `batches` makes global batches of so many rows; `mtp_weights` (steps,) weigh the loss of the token after next (MTP);
    `reseed` is called with step and micro-batch before each forward pass, where something is dropped at random;
    `weights` are those of a checkpoint, if not all.
    """

    def __init__(
        self,
        train_model: TrainModel,
        split: Split,
        steps: int,
        *,
        batches: Callable[[int], MixtureLoader],
        optimizer: Optimizer,
        rates: Callable[[int], dict[str, float]],
        identity: Mapping[str, Any],
        facts: Mapping[str, Any],
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        mtp_weights: Tensor | None = None,
        averaging: WeightAveraging | None = None,
        reseed: Callable[[int, int], None] | None = None,
        weights: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        self.train_model, self.model, self.split, self.steps = train_model, train_model.model, split, steps
        self.optimizer, self.evaluation, self.facts = optimizer, evaluation, facts
        self._batches, self._rates, self._identity, self._weights = batches, rates, identity, weights
        self._mtp_weights, self._averaging, self._reseed = mtp_weights, averaging, reseed
        self.tokens_per_step, self.flops_per_token = split.total, float(train_model.model.shape.train_flops_per_token)
        train_model.mean_over(split.total // split.devices)
        self._step = self._number = 0  # of the micro-batch to come
        self._target_weight = 0, torch.zeros(())  # targets of a step, and the weight of one; made anew when they change
        self._loader = self._prefetcher()

    def _prefetcher(self) -> Prefetcher:
        split, train_model, own = self.split, self.train_model, self.split.rows * self.split.accumulation
        first = collectives.world().rank * own
        batches, pin = self._batches(own * split.devices), train_model.device.pin
        return Prefetcher(batches, train_model.place, rows=(first, first + own), micro_batch=split.rows, pin=pin)

    # ---- a step --------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> Iterable[MicroBatch]:
        self._step, self._number = step, 0
        return self._loader.take(step)

    def forward_backward(self, batch: MicroBatch, scale: float = 1.0) -> Loss:
        """Every target of the step weighs the same, whichever rank has it; padding weighs nothing."""
        if batch.step_targets != self._target_weight[0]:
            # The loop takes the mean over the ranks, which divides by the devices again.
            weight = torch.full((), self.split.devices / batch.step_targets, device=self.train_model.place)
            self._target_weight = batch.step_targets, weight
        weight = self._target_weight[1] if scale == 1.0 else self._target_weight[1] * scale
        if self._reseed is not None:
            self._reseed(self._step, self._number)
            self._number += 1
        mtp_weight = None if self._mtp_weights is None else self._mtp_weights[self._step]
        return Loss(self.train_model.forward_backward(batch, weight, mtp_weight))

    def probe(self) -> Any:
        return random_micro_batch(self.train_model, self.split)

    def smaller(self) -> bool:
        split = self.split.smaller()
        if split is None:
            return False
        self._loader.close()
        self.train_model.release_graph()
        self.split = split
        self._loader = self._prefetcher()
        return True

    def rates(self, step: int) -> dict[str, float]:
        return self._rates(step)

    def after_step(self, step: int) -> None:
        if self._averaging is not None:
            self._averaging.after_step(step)

    # ---- evaluation and checkpoints ------------------------------------------------------------

    def evaluate(self, step: int) -> dict[str, float]:
        return self.evaluation.evaluate(self.split.rows)

    def benchmark(self, step: int) -> dict[str, float]:
        return self.evaluation.benchmark(self.split.rows)

    def sample(self, step: int) -> list[str]:
        return self.evaluation.sample()

    def identity(self) -> dict[str, Any]:
        return dict(self._identity)

    def weights(self) -> dict[str, Tensor]:
        return super().weights() if self._weights is None else self._weights()

    def load(self, saved: Checkpoint) -> None:
        super().load(saved) if self._averaging is None else self._averaging.load(saved)

    @property
    def trained(self) -> int:
        """Parameters that learn."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def summary(self) -> str:
        split = self.split
        adapters = not all(parameter.requires_grad for parameter in self.model.parameters())
        part = f", of which {self.trained / 1e6:.2f} M learn (LoRA)" if adapters else ""
        return (
            f"{self.model.shape.total_parameters / 1e6:.1f} M parameters{part}; {self.steps} steps of {split.total} "
            f"tokens = {split.devices} device(s) x {split.rows} rows x {split.accumulation} micro-batch(es) x "
            f"{split.seq_len}"
        )

    def close(self) -> None:
        self._loader.close()
