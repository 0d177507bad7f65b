"""`finetune --stage dpo --model Qwen2.5-0.5B-Instruct --data pairs.jsonl`: learning from pairs of replies.

A Stage of the one loop. Both replies of a pair lie in packed rows as documents that do not see each other
(data/chat/pairs.py); their log-probabilities come from the head in chunks (nn/logprobs.py), and DPO, ORPO or SimPO
(nn/preference.py) makes a loss of them: its mean over the pairs of a step, whichever rank has them. The reference of
DPO is the model as it came: its log-probabilities are computed once, before the first step, and kept in the run's
folder (preference.py), so that no second model takes memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat.checkpoint import UNWRITTEN, Damaged, read_file, to_continue, write_weights
from ascendchat.config import flags_set, spelling
from ascendchat.config.finetune import FinetuneConfig, PreferenceOptions
from ascendchat.data.chat.dataset_info import DEFAULT_DATASET_DIR, listed_data
from ascendchat.data.chat.pairs import PairBatch, PairLoader
from ascendchat.data.chat.preview import colours, preview_mixture
from ascendchat.data.mixture import absolute
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.engine.padding import to_device
from ascendchat.errors import UserError
from ascendchat.files import flush, sha256, write_atomic
from ascendchat.models.open import ModelSource
from ascendchat.models.shape import HFShape
from ascendchat.nn.gpt import GPT
from ascendchat.nn.logprobs import Float32LMHead, SamplingDistribution, differentiable_logprobs
from ascendchat.nn.preference import Pairs, Preference, Weights, preference, sequence_sums
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context
from ascendchat.runs.run import run_folder
from ascendchat.sizes.batch import Split
from ascendchat.sizes.schedule import Curve, finetuning_scale
from ascendchat.sizes.shape import Shape
from ascendchat.tasks.by_name import knows
from ascendchat.tasks.pair_mixture import PairMixture, open_pair_mixture
from ascendchat.train.model import TrainModel, optimizer_for
from ascendchat.train.rows import (
    RowStage,
    curve,
    learning_rates,
    pretraining_rates,
    row_facts,
    row_identity,
    share_out,
    total_flag,
)
from ascendchat.train.run import train_stage
from ascendchat.train.stage import Loss, Optimizer
from ascendchat.train.start import InitialModel, check_output, layout_of

BETAS = {"dpo": 0.1, "orpo": 0.1, "simpo": 2.0}
GAMMA = 0.5
TAKEN_BY = {  # which losses use a number of PreferenceOptions
    **dict.fromkeys(("pref_beta", "pref_ftx"), tuple(BETAS)),
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
}
RATES = {"dpo": 1e-6, "orpo": 5e-6, "simpo": 1e-6}  # of all weights of a Hugging Face model
ADAPTER_RATE = 5e-6
PAIRS_PER_STEP, FEW_STEPS = 32, 100  # fewer pairs where the run would have fewer steps
_Config = TypeVar("_Config", bound=FinetuneConfig)


def method_of(config: FinetuneConfig) -> str:
    """Name of the loss: `--stage orpo` and `--stage dpo --pref-loss orpo` are the same."""
    if config.pref_loss == "sigmoid":
        return config.stage
    if config.stage not in ("dpo", config.pref_loss):
        raise UserError(f"stage {config.stage} and pref_loss {config.pref_loss} differ; leave one of them out")
    return config.pref_loss


def check_numbers(config: FinetuneConfig) -> None:
    """Refuse a hyperparameter that the loss would not use."""
    method = method_of(config)
    for name, losses in TAKEN_BY.items():
        if flags_set(config, [name]) and method not in losses:
            raise UserError(
                f"{spelling(name)} is used by --stage {'|'.join(losses)}, not by {method}; leave it out, "
                "or choose such a stage"
            )


def weights_of(method: str, options: PreferenceOptions) -> Weights:
    """Hyperparameters of the loss."""
    gamma = GAMMA if options.simpo_gamma is None else options.simpo_gamma
    return Weights(
        beta=options.pref_beta or BETAS[method],
        smoothing=options.label_smoothing,
        gamma=gamma if method == "simpo" else 0.0,
        sft=options.pref_ftx,
    )


@dataclass(frozen=True)
class _UploadedPairs:
    """One micro-batch of pairs on the device. R rows of T tokens, S segments, P pairs."""

    inputs: Tensor  # (R, T)
    targets: Tensor  # (R, T), IGNORE but on the replies
    lengths: NDArray[np.int32]  # (S,), on the host
    owner: Tensor  # (R * T,) the segment of each token
    chosen: Tensor  # (P,) segments
    rejected: Tensor
    tokens: Tensor  # (P, 2) float32: targets of the replies
    reference: Tensor | None  # (P, 2) their log-probabilities by the reference
    step_pairs: int  # in the whole step, over all ranks: what its loss is divided by


class PreferenceStage(RowStage):
    """A loss on pairs of replies. `split` shares out bins of two rows."""

    def __init__(
        self,
        method: str,
        train_model: TrainModel,
        split: Split,
        steps: int,
        mixture: PairMixture,
        tokenizer: Tokenizer,
        config: FinetuneConfig,
        origin: ModelSource,
        *,
        optimizer: Optimizer | None = None,
        identity: Mapping[str, Any] | None = None,
        weights: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        """`optimizer`: another than that of our own models; `identity`: more of it; `weights`: of a checkpoint, if not
        all."""
        self.method, self.mixture = method, mixture
        self.numbers = weights_of(method, config)
        self.reference: Tensor | None = None  # (pairs, 2), of all pairs of the mixture, on the host
        shape = train_model.model.shape
        readout = Float32LMHead(train_model.model.head.dtype, train_model.place)
        self.distribution = SamplingDistribution(shape.vocab, softcap=train_model.model.softcap, readout=readout)
        lrs = learning_rates(config, shape, split.total)
        lr_curve = curve(config, steps, Curve(warmup=steps // 10, warmdown=1.0, final=0.0))
        start = f"{origin.state.get('stage')} step {origin.step} {origin.fingerprint}"
        super().__init__(
            train_model,
            split,
            steps,
            batches=partial(PairLoader, mixture.sources),
            optimizer=optimizer or optimizer_for(train_model, lrs),
            rates=partial(pair_rates, steps=steps, curve=lr_curve, config=config),
            identity={
                "stage": "hf",
                "method": method,
                "loss": vars(self.numbers),
                **row_identity(train_model, tokenizer, split, steps, config.seed),
                "data": mixture.facts,
                "start": start,
                **(identity or {}),
            },
            facts=row_facts(train_model, split, lrs, lr_curve),
            weights=weights,
        )
        self.model.train()  # activations are recomputed in this mode only

    # ---- a step --------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> Iterator[_UploadedPairs]:  # type: ignore[override]
        """This rank's bins of a step; one batch is made while the device works on that before."""
        split, mine = self.split, self.split.rows * self.split.accumulation
        batches, first = PairLoader(self.mixture.sources, mine * split.devices), collectives.world().rank * mine
        pairs = batches.targets(step)
        for begin in range(first, first + mine, split.rows):
            yield self.upload(batches.batch(step, begin, begin + split.rows), pairs)

    def upload(self, batch: PairBatch, step_pairs: int) -> _UploadedPairs:
        put = partial(to_device, place=self.train_model.place, pin=self.train_model.device.pin)
        reference = None if self.reference is None else self.reference[torch.from_numpy(batch.number)]
        return _UploadedPairs(
            put(batch.inputs),
            put(batch.targets),
            batch.lengths,
            put(np.arange(len(batch.lengths)).repeat(batch.lengths)),
            put(batch.chosen),
            put(batch.rejected),
            put(batch.tokens, dtype=torch.float32),
            None if reference is None else put(reference, dtype=torch.float32),
            step_pairs,
        )

    def sums(self, batch: _UploadedPairs) -> Tensor:
        """(P, 2) log-probabilities of the chosen and of the rejected replies; logits exist chunk by chunk."""
        train_model = self.train_model
        hidden = train_model.hidden(batch.inputs, train_model.documents(batch.inputs, batch.lengths))
        logprobs = differentiable_logprobs(hidden, train_model.model.head, batch.targets, self.distribution)
        every = sequence_sums(logprobs.flatten(), batch.owner, len(batch.lengths))
        return torch.stack((every[batch.chosen], every[batch.rejected]), dim=1)

    def compared(self, batch: _UploadedPairs) -> tuple[Preference, dict[str, Tensor]]:
        """Losses and metrics of all pairs, (P,) each."""
        sums, reference = self.sums(batch), batch.reference
        references = () if reference is None else reference.unbind(1)
        result = preference(self.method, Pairs(*sums.unbind(1), *batch.tokens.unbind(1), *references), self.numbers)
        means = (sums.detach() / batch.tokens).unbind(1)
        return result, {
            "accuracy": (result.chosen > result.rejected).float(),
            "margin": result.chosen - result.rejected,
            "reward_chosen": result.chosen,
            "reward_rejected": result.rejected,
            "logprob_chosen": means[0],  # per token
            "logprob_rejected": means[1],
        }

    def forward_backward(self, batch: _UploadedPairs, scale: float = 1.0) -> Loss:  # type: ignore[override]
        """Add the gradients of the pairs; every pair of the step weighs the same, whichever rank has it."""
        result, metrics_of_pairs = self.compared(batch)
        share = self.split.devices / batch.step_pairs
        metrics = {name: value.sum() * share for name, value in metrics_of_pairs.items()}
        return Loss(result.loss.sum() * (share * scale), metrics).backward()

    def probe(self) -> _UploadedPairs:
        """The first bins: all bins have one size."""
        batches = PairLoader(self.mixture.sources, self.split.rows)
        return self.upload(batches.batch(0), batches.targets(0))

    # ---- looking at it -------------------------------------------------------------------------

    def all_bins(self, index: int) -> Iterator[tuple[PairBatch, bool]]:
        """This rank's share of one pass over a source (`index` as in mixture.every), a device batch at a time; some are
        not its own (collectives.turns)."""
        rows = self.mixture.every[index]
        batches = PairLoader([(rows, 1.0)], rows.per_epoch)
        for first, stop, own in collectives.turns(rows.per_epoch, self.split.rows):
            yield batches.batch(0, first, stop), own

    @torch.no_grad()
    def reference_table(self) -> Tensor:
        """Log-probabilities (pairs, 2) of all pairs of the mixture by the weights as they are now, on the host."""
        every = self.mixture.every
        table = torch.zeros(sum(rows.pairs for rows in every), 2, device=self.train_model.place)
        self.model.eval()
        for index in range(len(every)):
            for batch, own in self.all_bins(index):
                sums = self.sums(self.upload(batch, 1))
                if own:
                    table[torch.from_numpy(batch.number).to(table.device)] = sums
        self.model.train()
        collectives.all_reduce(table, "sum")  # each pair is in one place, and 0 elsewhere
        return table.cpu()

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean metrics of the held-out pairs; empty without any."""
        total: Tensor | None = None
        names: tuple[str, ...] = ()
        for index in range(len(self.mixture.sources), len(self.mixture.every)):
            for batch, own in self.all_bins(index):
                result, metrics = self.compared(self.upload(batch, 1))
                if not own:
                    continue
                values = {"val_loss": result.loss, **{f"val_{name}": value for name, value in metrics.items()}}
                row = torch.stack(
                    [*(value.sum() for value in values.values()), result.loss.new_tensor(len(result.loss))]
                )
                total, names = row if total is None else total + row, tuple(values)
        return averaged(total, names, self.train_model.place)

    def is_spike(self, loss: float, mean: float) -> bool:
        return False  # a pair that is far off in a step of few pairs shows nothing

    def summary(self) -> str:
        split, mixture = self.split, self.mixture
        pairs = mixture.pairs / mixture.bins * split.devices * split.rows * split.accumulation
        return (
            f"{self.model.shape.total_parameters / 1e6:.1f} M parameters; {self.method} on {mixture.pairs} pairs, "
            f"{self.steps} steps of about {pairs:.0f} pairs = {split.devices} device(s) x {2 * split.rows} rows x "
            f"{split.accumulation} micro-batch(es) x {split.seq_len // 2}"
        )


def pair_rates(step: int, *, steps: int, curve: Curve, config: FinetuneConfig) -> dict[str, float]:
    """Arguments of the optimizer for pairs, whichever model."""
    scale = finetuning_scale(step, steps, config.lr_scheduler_type, curve.warmup, curve.final)
    rates = {**pretraining_rates(step, steps=steps, curve=curve), "lr_scale": scale}
    return {**rates, "clip": config.max_grad_norm} if config.max_grad_norm else rates


def averaged(total: Tensor | None, names: tuple[str, ...], place: torch.device) -> dict[str, float]:
    """Means over all ranks from the sums and a count of each; a rank may have seen nothing."""
    every = collectives.gather_objects(names)
    names = next((found for found in every if found), ())
    if not names:
        return {}
    total = torch.zeros(len(names) + 1, device=place) if total is None else total
    collectives.all_reduce(total, "sum")
    *values, count = total.tolist()
    return {name: value / count for name, value in zip(names, values)}


def doubled(shape: Any) -> Any:
    """Shape for planning memory: a bin, two rows of T tokens, takes as much as one row of 2 T."""
    if isinstance(shape, HFShape):
        counted = replace(shape.counted, seq_len=2 * shape.seq_len)
        return replace(shape, seq_len=2 * shape.seq_len, counted=counted)
    return Shape.from_dict({**shape.to_dict(), "seq_len": 2 * shape.seq_len})


def batch_and_steps(config: FinetuneConfig, shape: Any, device: Device, mixture: PairMixture) -> tuple[Split, int]:
    """Bins per device, micro-batch and step; and steps: `epochs` over all bins."""
    bins, length = mixture.bins, 2 * shape.seq_len
    fixed = max(1, config.device_batch_size // 2) if config.device_batch_size else None
    wanted = (config.target_examples_per_step or PAIRS_PER_STEP) * bins / mixture.pairs
    total = config.total_batch_size
    if not total and fixed and not config.target_examples_per_step:
        total = fixed * (config.gradient_accumulation_steps or 1) * collectives.world().size * length
    if not total:
        most = wanted if config.target_examples_per_step else min(wanted, bins * config.epochs / FEW_STEPS)
        total = max(1, round(most)) * length
    flag = total_flag(config.total_batch_size, config.target_examples_per_step)
    config = replace(config, device_batch_size=fixed)
    split = share_out(config, doubled(shape), device, total, flag=flag, layout=layout_of(config))
    per_step = split.devices * split.rows * split.accumulation
    return split, config.num_iterations or max(1, math.ceil(bins * config.epochs / per_step))


def usual_rate(config: FinetuneConfig, train_model: TrainModel) -> float | None:
    """Learning rate of a Hugging Face model; our own models have one per group."""
    if config.learning_rate or isinstance(train_model.model, GPT):
        return config.learning_rate
    adapters = not all(parameter.requires_grad for parameter in train_model.model.parameters())
    return ADAPTER_RATE if adapters else RATES[method_of(config)]


def for_pairs(config: _Config) -> _Config:
    """Check the config for training on pairs; attention keeps to documents."""
    method_of(config)
    if not config.data:
        raise UserError("name the pairs to learn from: --data FILE with the columns prompt, chosen and rejected")
    if config.source:
        raise UserError("--source means nothing for pairs; leave it out")
    if config.attend == "row":
        raise UserError("--attend row: the replies of a pair would see each other; leave it out")
    return replace(config, attend="document")


def train_pairs(begin: InitialModel[Any], here: Context, make: Callable[..., PreferenceStage] = PreferenceStage) -> int:
    """Train the model of `begin`; the exit status. `make` makes the stage."""
    config: FinetuneConfig = begin.config
    train_model, tokenizer = begin.train_model, begin.tokenizer
    data, validation = (
        absolute(listed_data(names, config.dataset_dir, knows, usual=DEFAULT_DATASET_DIR, say=here.say))
        for names in (config.data, config.validation)
    )
    config = replace(config, data=data, learning_rate=usual_rate(config, train_model))
    shape, method = train_model.model.shape, method_of(config)
    mixture = open_pair_mixture(
        data,
        tokenizer,
        shape.seq_len,
        seed=config.seed,
        held_out=config.val_size,
        max_pairs=config.max_samples,
        validation=validation,
        packing=config.packing,
        say=here.say,
    )
    if config.preview:
        for text in preview_mixture(data, mixture.sources, tokenizer, config.preview, colours(sys.stdout)):
            here.say(text)
        return 0
    split, steps = batch_and_steps(config, shape, here.device, mixture)
    folder = run_folder(config.run or f"{begin.name}-{method}", "hf")
    saved = to_continue(folder, config.resume, say=here.say)
    check_output(config.output_dir, saved, steps)
    stage = make(method, train_model, split, steps, mixture, tokenizer, config, begin.source)
    begin.load_weights(stage.optimizer)
    model = [begin.source.fingerprint, json.dumps(shape.to_dict(), sort_keys=True), str(train_model.model.head.dtype)]
    model += [f"{config.bits} bits"] if config.bits else []
    reference = ReferenceLogprobs(folder, [*model, mixture.identity])
    if method == "dpo":  # before a checkpoint is loaded: by the weights that the run starts from
        stage.reference = reference.read_or_make(stage.reference_table, here)

    def add_files(run: Path) -> None:
        begin.add_files(run)
        if stage.reference is not None:
            reference.write(stage.reference)

    facts = {**stage.facts, "method": method, "loss": vars(stage.numbers), "start": str(begin.source.folder)}
    return train_stage(stage, here, config, folder, saved, title=method, facts=facts, add_files=add_files)


# Log-probabilities of the reference of DPO, kept in the folder of a run: `finetune --stage dpo`.
#
#     reference = ReferenceLogprobs(folder, [start, data])             # what they are a function of
#     table = reference.read_or_make(stage.reference_table, here)
#     reference.write(table)
#
# reference.safetensors has them, reference.json what they belong to and the checksum of the file. Another model, other
# data or a damaged file: they are computed again.

NAME = "logprobs"


class ReferenceLogprobs:
    """(pairs, 2) log-probabilities of the chosen and rejected replies, on disk."""

    def __init__(self, folder: Path, belongs_to: Sequence[str]) -> None:
        self.path, self.about = folder / "reference.safetensors", folder / "reference.json"
        self.fingerprint = hashlib.sha256("\n".join(belongs_to).encode()).hexdigest()[:16]

    def read(self) -> Tensor | None:
        """The table on disk, if it is whole and belongs to this model and these pairs; else None."""
        try:
            about = json.loads(self.about.read_text(encoding="utf-8"))
            if about["fingerprint"] != self.fingerprint or about["sha256"] != sha256(self.path):
                return None
            return read_file(self.path)[NAME].clone()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, Damaged):
            return None

    def read_or_make(self, make: Callable[[], Tensor], here: Context) -> Tensor:
        """The table on all ranks: read, or made by all of them."""
        table: Tensor | None = collectives.broadcast_object(self.read() if here.main else None)
        if table is not None:
            here.say(f"log-probabilities of the reference: read from {self.path}")
            return table
        here.say("log-probabilities of the reference: computed once, for all pairs")
        return make()

    def write(self, table: Tensor, say: Callable[[str], None] = print) -> None:
        """Write the table, unless it is there already. Without the file it is computed again when the run resumes."""
        try:
            self._write(table)
        except UNWRITTEN as error:
            say(f"log-probabilities of the reference: not kept in {self.path} ({error}); training goes on")

    def _write(self, table: Tensor) -> None:
        old = self.read()
        if old is not None and torch.equal(old, table):
            return
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        write_weights(beside, {NAME: table})
        flush(beside)
        checksum = sha256(beside)
        os.replace(beside, self.path)
        write_atomic(self.about, json.dumps({"fingerprint": self.fingerprint, "sha256": checksum}))
