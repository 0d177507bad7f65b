"""A Stage over packed rows: what pretraining, mid-training and SFT have in common. See Stage in loop.py.

learner = build(config, shape, device, place, say)               # model, kernel, compiled loss
stage = BaseStage(learner, split, steps, ...)                    # base.py; or ChatStage of chat.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat import dist
from ascendchat.config import UserError
from ascendchat.config.train import StepConfig, TrainConfig
from ascendchat.data.corpus import Batches, Corpus, Prefetcher
from ascendchat.data.prefetch import MicroBatch
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device import Device, pick
from ascendchat.eval.bits import corpus_bits
from ascendchat.eval.scorer import MAX_TOKENS, ModelScorer
from ascendchat.nn.attention import Attention, Documents, choose, documents
from ascendchat.nn.fp8 import Fp8Ops
from ascendchat.nn.gpt import GPT, Heads, Ops, PlainOps, dense
from ascendchat.nn.loss import head_loss, score, softcap
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split, fit_split
from ascendchat.plan.schedule import Curve
from ascendchat.plan.shape import Shape

SAMPLE_TOKENS = 24


def training_device(config: StepConfig) -> Device:
    """The device to train on; a chip that is made for inference is refused."""
    device = pick(config.device_type, compiled=config.compile)
    if not device.chip.trains:
        raise UserError(
            f"{device.chip.name} is an inference product: CANN lists no gradients of embeddings and attention for it; "
            "train on another device (--device-type) or machine, copy the run here, and talk to it: ascendchat chat"
        )
    return device


def share_out(config: TrainConfig, shape: Shape, device: Device, total: int) -> Split:
    """How the devices share `total` tokens a step."""
    split = fit_split(
        shape, device.chip, dist.world().size, total, rows=config.device_batch_size,
        checkpointing=config.activation_checkpointing,
    )  # fmt: skip
    asked = config.gradient_accumulation_steps
    if asked is not None and config.total_batch_size is None:
        return replace(split, accumulation=asked)
    if asked is not None and asked != split.accumulation:
        raise UserError(
            f"--gradient-accumulation-steps {asked} does not fit --total-batch-size {total}: with "
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


class Learner:
    """A model on its device, with the kernel chosen for it, compiled where that is sound."""

    def __init__(
        self, model: GPT, kernel: Attention, device: Device, place: torch.device, *, by_document: bool = False
    ) -> None:
        self.model, self.kernel, self.device, self.place = model, kernel, device, place
        self.by_document = by_document  # a token sees nothing of the other documents in its row
        self.attend = dense(model, kernel)
        self._rope = model.rope(model.shape.seq_len, device.dtype, place)
        self._forward = device.compile(model, dynamic=False, fullgraph=True)
        self._score = device.compile(score, dynamic=False)

    def mean_over(self, tokens: int) -> None:
        """The tokens of this rank that the loss of a step is the mean of: the size of its gradients follows."""
        if isinstance(self.model.ops, Fp8Ops):
            self.model.ops.mean_over(tokens)

    def documents(self, tokens: Tensor, lengths: NDArray[np.int32]) -> Documents | None:
        """Where the documents of a batch lie, if its tokens are to keep to them; made once for all layers."""
        if not self.by_document:
            return None
        device = self.device
        return documents(self.kernel, lengths, tokens, device.dtype, compiled=device.compiles, pin=device.pin)

    def loss(self, batch: MicroBatch, weight: Tensor, ahead: Tensor | None = None) -> Tensor:
        """`weight` times the sum of the nats of all targets; `ahead` as in nn/loss.py."""
        known = self.documents(batch.inputs, batch.lengths)
        hidden = self._forward(batch.inputs, self.attend, self._rope, documents=known)
        vocab = self.model.shape.vocab
        return head_loss(hidden, self.model.head, batch.targets, vocab, weight=weight, ahead=ahead, scorer=self._score)


def operators(config: StepConfig, device: Device, place: torch.device, say: Callable[[str], None]) -> Ops:
    """The operators of a block: 8-bit, the chip's own, or plain torch; with nn/heads.py where that runs."""
    heads: Heads | None = None
    if device.triton:
        from ascendchat.nn.heads import heads
    if config.fp8 and device.chip.fp8 and device.compiles and not device.scaling.needed:
        return Fp8Ops(place, heads)
    if config.fp8:
        lacks = "the model is not compiled here" if device.chip.fp8 else f"{device.chip.name} has no 8-bit products"
        if device.scaling.needed:  # the fixed scales of fp8 are for gradients of their true size
            lacks = "the loss is scaled for float16"
        say(f"--fp8 is ignored: {lacks}")
    return device.operators() or PlainOps(heads)


def build(config: StepConfig, shape: Shape, device: Device, place: torch.device, say: Callable[[str], None]) -> Learner:
    """Model and kernel; weights are drawn on the host, so every device starts alike."""
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention)
    say(reason)
    by_document = config.attend == "document"
    if by_document and device.compiles and not kernel.compiles_packed:
        raise UserError(
            f"--attend document: attention kernel {kernel.name} cannot be compiled for documents, whose lengths change "
            "with every batch; train without compiling: --no-compile"
        )
    say("a token sees its own document only" if by_document else "a token sees the whole row before it")
    model = GPT(shape, operators(config, device, place, say), checkpoint_activations=config.activation_checkpointing)
    model.initialise(config.seed)
    return Learner(model.to_compute(device.dtype).to(place), kernel, device, place, by_document=by_document)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them all apart: a/wiki, b/wiki."""
    parts = 1
    while parts < max(len(folder.parts) for folder in folders):
        if len({folder.parts[-parts:] for folder in folders}) == len(set(folders)):
            break
        parts += 1
    return ["/".join(folder.parts[-parts:]) for folder in folders]


class RowStage:
    """Batches of rows in, cross-entropy out. A stage says where its batches come from and how it is validated."""

    def __init__(
        self, learner: Learner, split: Split, steps: int, tokenizer: Tokenizer, config: TrainConfig,
        usual: Curve | None = None,
    ) -> None:  # fmt: skip
        self.learner, self.split, self.steps, self.tokenizer, self.seed = learner, split, steps, tokenizer, config.seed
        self.curve = curve(config, steps, usual or Curve())
        self.model = learner.model
        learner.mean_over(split.total // split.devices)
        shape = learner.model.shape
        self.tokens_per_step, self.flops_per_token = split.total, float(shape.train_flops_per_token)
        self.decay = 0.0  # of the matrices, at step 0
        self.ahead: Tensor | None = None  # weight of the token after next
        rates = schedule.rates(
            shape.dim, split.total, matrix=config.matrix_lr, embedding=config.embedding_lr,
            unembedding=config.unembedding_lr, scalar=config.scalar_lr,
        )  # fmt: skip
        rates = {name: rate * config.lr_multiplier for name, rate in rates.items()}
        self.about_rates = {"learning_rates": rates, "schedule": asdict(self.curve)}  # for the run's record
        compile = learner.device.compile if learner.device.compiles else None
        self.optimizer = MuonAdamW(
            groups(self.model, rates), compute_dtype=learner.device.dtype, compile=compile,
            fused=learner.device.chip.fused_adamw,
        )  # fmt: skip
        self.weight: Tensor  # of one target in this rank's mean; the ranks are averaged afterwards
        self._feed = self._prefetcher()

    def batches(self, rows_per_step: int) -> Batches:
        """Where the rows come from."""
        raise NotImplementedError

    def _prefetcher(self) -> Prefetcher:
        split, world = self.split, dist.world()
        mine = split.rows * split.accumulation
        return Prefetcher(
            self.batches(mine * split.devices), self.learner.place,
            rows=(world.rank * mine, (world.rank + 1) * mine), micro_batch=split.rows, pin=self.learner.device.pin,
        )  # fmt: skip

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Every target of the step weighs the same, whichever rank has it; padding weighs nothing."""
        found = self._feed.take(step)
        self.weight = torch.full((), self.split.devices / found[0].step_targets, device=self.learner.place)
        return found

    def loss(self, batch: MicroBatch, scale: float = 1.0) -> Tensor:
        return self.learner.loss(batch, self.weight if scale == 1.0 else self.weight * scale, self.ahead)

    def rates(self, step: int) -> dict[str, float]:
        return {
            "lr_scale": schedule.lr_scale(step, self.steps, **asdict(self.curve)),
            "momentum": schedule.momentum(step, self.steps, warmdown=self.curve.warmdown),
            "matrix_decay": schedule.weight_decay(step, self.steps, self.decay),
        }

    def averaged(self, step: int) -> int:
        return 0

    def core(self, step: int) -> dict[str, float]:
        return {}

    def smaller(self) -> bool:
        split = self.split.smaller()
        if split is None:
            return False
        self._feed.close()
        self.split = split
        self._feed = self._prefetcher()
        return True

    def scorer(self) -> ModelScorer:
        """Scores rows with the model as it is now. Without gradients only a layer or two is held at a time, so several
        micro-batches fit where training holds one."""
        learner, mine = self.learner, self.split.rows * self.model.shape.seq_len
        tokens = max(mine, min(MAX_TOKENS, mine * self.model.shape.depth // 2))
        return ModelScorer(self.model, learner.kernel, learner.place, max_tokens=tokens, pin=learner.device.pin)

    def text_bits(self, corpora: Sequence[Corpus], most: int) -> dict[str, float]:
        """Bits per byte of each corpus over its first `most` tokens, and their mean first."""
        scorer, seq_len = self.scorer(), self.model.shape.seq_len
        sizes = np.asarray(self.tokenizer.token_bytes(), dtype=np.int64)
        bits = [corpus_bits(scorer, corpus, seq_len, most, sizes).bits_per_byte for corpus in corpora]
        names = distinct_names([corpus.folder for corpus in corpora]) if len(bits) > 1 else []
        mean = {"bpb": sum(bits) / len(bits)} if bits else {}
        return {**mean, **{f"bpb_{name}": bit for name, bit in zip(names, bits)}}

    @torch.no_grad()
    def continue_text(self, ids: list[int], stop: int | None = None) -> str:
        """A greedy continuation, running the whole row for each token: slow, but short and without a cache."""
        row = list(ids)
        for _ in range(SAMPLE_TOKENS):
            tokens = torch.tensor([row[-self.model.shape.seq_len :]], device=self.learner.place)
            hidden = self.model(tokens, self.learner.attend)[0, -1:]
            row.append(int(softcap(hidden @ self.model.head[: self.model.shape.vocab].t()).argmax()))
            if row[-1] == stop:
                break
        return " ".join(self.tokenizer.decode(row[len(ids) :]).split())

    def close(self) -> None:
        self._feed.close()
