"""A Stage over packed rows: what pretraining, mid-training and SFT have in common. See Stage in loop.py.

learner = build(config, shape, here)                             # model, kernel, compiled loss
stage = BaseStage(learner, split, steps, ...)                    # base.py; or ChatStage of chat.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat import dist
from ascendchat.config import UserError
from ascendchat.config.train import StepConfig, TrainConfig
from ascendchat.data.corpus import Corpus
from ascendchat.data.mixture import Batch, Batches
from ascendchat.data.prefetch import MicroBatch, Prefetcher
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.dist.context import Context
from ascendchat.eval.bits import corpus_bits
from ascendchat.eval.scorer import MAX_TOKENS, ModelScorer
from ascendchat.hf.shape import HFShape
from ascendchat.infer.engine import Engine
from ascendchat.infer.generator import Generator
from ascendchat.infer.request import Request, Sampling
from ascendchat.nn.attention import Attention, Flash, choose
from ascendchat.nn.documents import Documents, documents
from ascendchat.nn.fp8 import Fp8Head, Fp8Ops
from ascendchat.nn.gpt import GPT, Heads, Ops, PlainOps
from ascendchat.nn.loss import HeadProducts, head_loss, token_nats
from ascendchat.nn.model import LanguageModel, Sizes, dense
from ascendchat.nn.optim import Group, MuonAdamW, adamw_groups, groups
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split, fit_split, split_fixed
from ascendchat.plan.batch import split as share
from ascendchat.plan.schedule import Curve
from ascendchat.plan.shape import Shape
from ascendchat.train.huggingface import kept, learning_rate, most_rows
from ascendchat.train.stage import Loss, Optimizer, Stage

SAMPLE_TOKENS = 24
_Model = TypeVar("_Model", bound=LanguageModel)


def share_out(config: TrainConfig, shape: Shape | HFShape, device: Device, total: int, beside: int = 0) -> Split:
    """How the devices share `total` tokens a step; `beside`: bytes of each that something else needs."""
    fixed, checkpointing, size = config.device_batch_size, config.activation_checkpointing, dist.world().size
    if isinstance(shape, HFShape):
        rows = fixed or most_rows(shape.counted, device.chip, size, checkpointing, beside=beside, **kept(config))
        split = (split_fixed if fixed else share)(total, size, shape.seq_len, rows)
    else:
        split = fit_split(shape, device.chip, size, total, rows=fixed, checkpointing=checkpointing, beside=beside)
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


def say(sentence: str) -> None:
    """To people, once."""
    if dist.world().rank == 0:
        print(sentence)


class Learner(Generic[_Model]):
    """A model on its device, with the kernel chosen for it, compiled where that is sound."""

    def __init__(
        self,
        model: _Model,
        kernel: Attention,
        device: Device,
        place: torch.device,
        *,
        by_document: bool = False,
    ) -> None:
        self.model, self.kernel, self.device, self.place = model, kernel, device, place
        self.by_document = by_document  # a token sees nothing of the other documents in its row
        self.attend = dense(model, kernel)
        self._rope = model.rope(model.shape.seq_len, device.dtype, place)
        sound = device.compiles and (kernel.compiles_packed or not by_document)
        self._forward = model.compiled(device.compile, say) if sound else model
        self.score = device.compile(model.score, dynamic=False)
        eight = isinstance(getattr(model, "ops", None), Fp8Ops)
        self.products = Fp8Head(partial(device.compile, dynamic=False)) if eight else HeadProducts

    @cached_property
    def reader(self) -> Attention:
        """The kernel for samples and scores, which read caches: the same where it can."""
        asked = self.device.type, self.device.dtype, self.model.shape.head_dim
        if self.kernel.refusal(*asked, decodes=True) is None:
            return self.kernel
        kernel, why = choose(*asked, decodes=True)
        say(f"samples and scores use another kernel, {why}")
        return kernel

    def mean_over(self, tokens: int) -> None:
        """The tokens of this rank that the loss of a step is the mean of: the size of its gradients follows."""
        ops = getattr(self.model, "ops", None)
        if isinstance(ops, Fp8Ops):
            ops.mean_over(tokens)

    def documents(self, tokens: Tensor, lengths: NDArray[np.int32]) -> Documents | None:
        """Where the documents of a batch lie, if its tokens are to keep to them; made once for all layers."""
        if not self.by_document:
            return None
        device, restarts = self.device, self.model.restarts
        return documents(
            self.kernel, lengths, tokens, device.dtype, compiled=device.compiles, pin=device.pin, restarts=restarts
        )

    def hidden(self, inputs: Tensor, known: Documents | None) -> Tensor:
        """(B, T, C), compiled where that is sound."""
        hidden: Tensor = self._forward(inputs, self.attend, self._rope, documents=known)
        return hidden

    def loss(self, batch: MicroBatch, weight: Tensor, ahead: Tensor | None = None) -> Tensor:
        """`weight` times the sum of the nats of all targets; `ahead` as in nn/loss.py."""
        known = self.documents(batch.inputs, batch.lengths)
        return head_loss(
            self.hidden(batch.inputs, known),
            self.model.head,
            batch.targets,
            self.model.shape.vocab,
            weight=weight,
            ahead=ahead,
            follows=None if known is None else known.follows,
            scorer=self.score,
            products=self.products,
        )

    def nats(self, batch: Batch) -> Tensor:
        """Nats of every target of a batch on the host, without gradient; 0 where nothing is scored."""
        inputs, targets = (torch.from_numpy(array).to(self.place) for array in (batch.inputs, batch.targets))
        hidden = self.model(inputs, self.attend, documents=self.documents(inputs, batch.lengths))
        return token_nats(hidden, self.model.head, targets, self.model.shape.vocab, self.model.cap)


def operators(config: StepConfig, shape: Shape, here: Context) -> Ops:
    """The operators of a block: 8-bit, the chip's own, or plain torch; with nn/heads.py where that runs."""
    device = here.device
    heads: Heads | None = None
    if device.triton:
        from ascendchat.nn.heads import heads
    if config.fp8:
        odd = [size for size in (shape.dim, shape.q_dim, shape.qkv_dim, shape.mlp_dim, shape.padded_vocab) if size % 16]
        lacks = "" if device.compiles else "the model is not compiled here"
        if not device.chip.fp8:
            lacks = f"{device.chip.name} has no 8-bit products"
        elif device.scaling.needed:  # the fixed scales of fp8 are for gradients of their true size
            lacks = "the loss is scaled for float16"
        elif odd:
            lacks = f"8-bit products are of sizes that 16 divides, not {odd[0]}"
        if not lacks:
            return Fp8Ops(here.place, heads)
        here.say(f"--fp8 is ignored: {lacks}")
    return device.operators() or PlainOps(heads)


def build(config: StepConfig, shape: Shape, here: Context) -> Learner[GPT]:
    """Model and kernel; weights are drawn on the host, so every device starts alike."""
    device = here.device
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention)
    here.say(reason)
    by_document = config.attend == "document"
    if by_document and device.compiles and not kernel.compiles_packed:
        raise UserError(
            f"--attend document: attention kernel {kernel.name} cannot be compiled for documents, whose lengths change "
            "with every batch; train without compiling (--no-compile), or over whole rows (--attend row)"
        )
    here.say("a token sees its own document only" if by_document else "a token sees the whole row before it")
    ops, dropout = operators(config, shape, here), getattr(config, "dropout", 0.0)
    model = GPT(shape, ops, checkpoint_activations=config.activation_checkpointing, dropout=dropout)
    model.initialise(config.seed)
    place = here.place
    learner = Learner(model.to_compute(device.dtype).to(place), kernel, device, place, by_document=by_document)
    say_package(learner, here)
    return learner


def say_package(learner: Learner, here: Context) -> None:
    """Whether rows are read by a package that the user has installed for that, and if not, why."""
    if isinstance(learner.kernel, Flash):
        from ascendchat.device.cuda_attention import notice

        if said := notice(learner.place, learner.model.shape.head_dim):
            here.say(said)


def optimizer_for(learner: Learner, rates: dict[str, float], made: Sequence[Group] = ()) -> MuonAdamW:
    """The optimizer of a model on its device; `made`: other groups than the usual ones."""
    device, model = learner.device, learner.model
    compile = device.compile if device.compiles else None
    made = made or (groups(model, rates) if isinstance(model, GPT) else adamw_groups(model, rates["all"]))
    few_launches = compile is None and device.operators() is not None
    return MuonAdamW(
        made, compute_dtype=device.dtype, compile=compile, fused=device.chip.fused_adamw, few_launches=few_launches
    )


def noise(learner: Learner, split: Split, seed: int = 0) -> MicroBatch:
    """A micro-batch of random tokens, another one on every rank: to measure memory and speed."""
    generator = torch.Generator().manual_seed(seed + dist.world().rank)
    size = (2, split.rows, split.seq_len)
    inputs, targets = torch.randint(0, learner.model.shape.vocab, size, generator=generator).to(learner.place)
    return MicroBatch(inputs, targets, np.full(split.rows, split.seq_len, np.int32), split.total)


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them all apart: a/wiki, b/wiki."""
    parts = 1
    while parts < max(len(folder.parts) for folder in folders):
        if len({folder.parts[-parts:] for folder in folders}) == len(set(folders)):
            break
        parts += 1
    return ["/".join(folder.parts[-parts:]) for folder in folders]


class RowStage(Stage):
    """Batches of rows in, cross-entropy out. A stage says where its batches come from and how it is validated."""

    def __init__(
        self,
        learner: Learner,
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
        first = dist.world().rank * mine
        batches, pin = self.batches(mine * split.devices), learner.device.pin
        return Prefetcher(batches, learner.place, rows=(first, first + mine), micro_batch=split.rows, pin=pin)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return self._feed.take(step)

    def probe(self) -> MicroBatch:
        return noise(self.learner, self.split)

    def loss(self, batch: MicroBatch, scale: float = 1.0) -> Loss:
        """Every target of the step weighs the same, whichever rank has it; padding weighs nothing."""
        if batch.step_targets != self._weight[0]:
            weight = torch.full((), self.split.devices / batch.step_targets, device=self.learner.place)
            self._weight = batch.step_targets, weight
        weight = self._weight[1] if scale == 1.0 else self._weight[1] * scale
        return Loss(self.learner.loss(batch, weight, self.ahead))

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
