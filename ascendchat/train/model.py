"""A model on its device for training: attention kernel, compiled forward pass, loss, captured micro-batches.

train_model = build(config, shape, here)
train_model.forward_backward(batch, weight)                  # gradients are added to those of earlier micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat.chips import Chip
from ascendchat.config.train import StepConfig
from ascendchat.data.loader import MicroBatch
from ascendchat.data.mixture import Batch
from ascendchat.device import Device
from ascendchat.errors import UserError
from ascendchat.nn.attention import Attention, choose, dense, documents
from ascendchat.nn.fp8 import Fp8Head, Fp8Ops
from ascendchat.nn.gpt import GPT, Heads, Ops, PlainOps
from ascendchat.nn.loss import HeadProducts, head_loss, token_nats
from ascendchat.nn.model import Documents, LanguageModel
from ascendchat.nn.optim import Group, MuonAdamW, adamw_groups, groups
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context
from ascendchat.sizes.batch import Split
from ascendchat.sizes.memory import training, usable
from ascendchat.sizes.shape import Shape

_Model = TypeVar("_Model", bound=LanguageModel)


def say(sentence: str) -> None:
    """Print on rank 0."""
    if collectives.world().rank == 0:
        print(sentence)


class _Graph(NamedTuple):
    """A micro-batch captured as one graph: a small model computes faster than the host launches its operators."""

    shape: torch.Size  # (B, T) of its tokens
    replay: Callable[..., Tensor]


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


class TrainModel(Generic[_Model]):
    """A model on its device, with the kernel chosen for it, compiled where that is sound, captured where that pays."""

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
        self.score = device.compile(model.score, dynamic=False)  # nats and their gradient: nn/loss.py
        eight = isinstance(getattr(model, "ops", None), Fp8Ops)
        self.products = Fp8Head(partial(device.compile, dynamic=False)) if eight else HeadProducts
        self._graph: _Graph | None = None
        self._first = True  # no micro-batch was seen yet: the next one may be captured
        self._keeps = True  # gradients are kept for an optimizer

    @property
    def packaged(self) -> list[str]:
        """Parts of the model that optional packages compute here."""
        ops, kernel = getattr(self.model, "ops", None), self.kernel
        used = {
            "attention": kernel.packaged >= self.model.shape.head_dim,
            "mlp": isinstance(ops, PlainOps) and ops.whole_mlp is not None,
        }
        return [part for part in used if used[part]]

    @cached_property
    def reader(self) -> Attention:
        """The kernel for samples and scores, which read KV caches: that of training where it can."""
        where = self.device.type, self.device.dtype, self.model.shape.head_dim
        if self.kernel.refusal(*where, decodes=True) is None:
            return self.kernel
        kernel, why = choose(*where, decodes=True)
        say(f"samples and scores use another kernel, {why}")
        return kernel

    def mean_over(self, tokens: int) -> None:
        """Set the number of this rank's tokens that the loss of a step is the mean of: fp8 scales gradients by it."""
        ops = getattr(self.model, "ops", None)
        if isinstance(ops, Fp8Ops):
            ops.mean_over(tokens)

    def documents(self, tokens: Tensor, lengths: NDArray[np.int32]) -> Documents | None:
        """Borders of the documents in a batch, if attention keeps to them, else None; made once for all layers."""
        if not self.by_document:
            return None
        device, restarts = self.device, self.model.restarts
        return documents(
            self.kernel, lengths, tokens, device.dtype, compiled=device.compiles, pin=device.pin, restarts=restarts
        )

    def hidden(self, inputs: Tensor, documents: Documents | None) -> Tensor:
        """Hidden states (B, T, C) of inputs (B, T), compiled where that is sound."""
        hidden: Tensor = self._forward(inputs, self.attend, self._rope, documents=documents)
        return hidden

    def loss(self, batch: MicroBatch, weight: Tensor, mtp_weight: Tensor | None = None) -> Tensor:
        """`weight` times the sum of the nats of all targets; `mtp_weight`: see head_loss in nn/loss.py."""
        documents = self.documents(batch.inputs, batch.lengths)
        return head_loss(
            self.hidden(batch.inputs, documents),
            self.model.head,
            batch.targets,
            self.model.shape.vocab,
            weight=weight,
            mtp_weight=mtp_weight,
            continues_document=None if documents is None else documents.continues_document,
            scorer=self.score,
            products=self.products,
        )

    def forward_backward(self, batch: MicroBatch, weight: Tensor, mtp_weight: Tensor | None = None) -> Tensor:
        """Add up the gradients of `loss`; returns it, detached.

        The first call, that of the dry run, captures both passes as one graph where that pays. Capturing runs them
        several times, so its gradients are to be zeroed. Micro-batches of another size are launched operator by
        operator.
        """
        if self._first and self.captures(len(batch.inputs)):
            self._graph = self._capture(batch, weight, mtp_weight)
        self._first = False
        if self._graph is None or batch.inputs.shape != self._graph.shape:
            return self._eager(batch, weight, mtp_weight)
        loss = self._graph.replay(*_present(batch.inputs, batch.targets, weight, mtp_weight))
        return loss.clone()  # the next replay writes to the same memory

    def _eager(self, batch: MicroBatch, weight: Tensor, mtp_weight: Tensor | None = None) -> Tensor:
        loss = self.loss(batch, weight, mtp_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._keeps:
            self.model.zero_grad()
        return loss.detach()

    def captures(self, rows: int) -> bool:
        """True if micro-batches of so many rows are captured: they are short and always the same work. Several devices
        were not tried."""
        model, device = self.model, self.device
        able = device.captures_training and device.compiles and device.chip.graphs
        if not able or not isinstance(model, GPT) or collectives.world().size > 1:
            return False
        same = not self.by_document and not model.dropout and not device.scaling.needed
        return same and short(model.shape, device.chip, rows, model.checkpoint_activations, self.packaged)

    def _capture(self, like: MicroBatch, weight: Tensor, mtp_weight: Tensor | None) -> _Graph | None:
        """Capture forward and backward pass for micro-batches of the size of `like`."""

        def run(inputs: Tensor, targets: Tensor, weight: Tensor, mtp_weight: Tensor | None = None) -> Tensor:
            return self._eager(replace(like, inputs=inputs, targets=targets), weight, mtp_weight)

        self.device.release()  # a graph has memory of its own and cannot use cached blocks
        static = [tensor.clone() for tensor in _present(like.inputs, like.targets, weight, mtp_weight)]
        try:
            return _Graph(like.inputs.shape, self.device.graph(run, *static))
        except torch.OutOfMemoryError:  # other processes have some of the device's memory
            say("there is no room to capture micro-batches: their operators are launched one by one")
        self.device.release()
        return None

    def release_graph(self) -> None:
        """Forget the graph: micro-batches have another size from here on, or gradients another place."""
        self._graph, self._first = None, True

    @contextmanager
    def forgetting_gradients(self) -> Iterator[None]:
        """Keep no gradients in here, to measure the speed before there is an optimizer that has room for them."""
        self.release_graph()
        self._keeps = False
        try:
            yield
        finally:
            self.release_graph()
            self._keeps = True

    def nats(self, batch: Batch) -> Tensor:
        """Nats of every target of a batch on the host, for evaluation; 0 where nothing is scored."""
        inputs, targets = (torch.from_numpy(array).to(self.place) for array in (batch.inputs, batch.targets))
        hidden = self.model(inputs, self.attend, documents=self.documents(inputs, batch.lengths))
        return token_nats(hidden, self.model.head, targets, self.model.shape.vocab, self.model.cap)


def operators(config: StepConfig, shape: Shape, here: Context, packaged: bool) -> Ops:
    """Choose the operators of a block: 8-bit, the chip's own, or plain torch; with nn/triton_training.py where that
    runs, and with the MLP of an optional package, if it may be `packaged`."""
    device = here.device
    heads: Heads | None = None
    if device.triton:
        from ascendchat.nn.triton_training import heads
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
    mlp, said = device.packaged_mlp(shape.dim, shape.mlp_dim) if packaged else (None, None)
    if said:
        here.say(said)
    return device.operators() or PlainOps(heads, mlp)


def build(
    config: StepConfig, shape: Shape, here: Context, *, packaged: bool = True, dropout: float = 0.0
) -> TrainModel[GPT]:
    """Make model and kernel; weights are drawn on the host, so every device starts alike. `packaged`: False where
    values computed with gradients are compared with values computed without, which a package rounds otherwise."""
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
    ops = operators(config, shape, here, packaged)
    model = GPT(shape, ops, checkpoint_activations=config.activation_checkpointing, dropout=dropout)
    model.initialise(config.seed)
    place = here.place
    train_model = TrainModel(model.to_compute(device.dtype).to(place), kernel, device, place, by_document=by_document)
    say_package(train_model, here)
    return train_model


def say_package(train_model: TrainModel, here: Context) -> None:
    """Say whether an optional package computes attention over rows, and if not, why."""
    if said := train_model.kernel.notice(train_model.model.shape.head_dim):
        here.say(said)


def optimizer_for(train_model: TrainModel, rates: dict[str, float], made: Sequence[Group] = ()) -> MuonAdamW:
    """Make the optimizer of a model; `made`: other groups than the default ones."""
    device, model = train_model.device, train_model.model
    compile = device.compile if device.compiles else None
    made = made or (groups(model, rates) if isinstance(model, GPT) else adamw_groups(model, rates["all"]))
    few_launches = compile is None and device.operators() is not None
    return MuonAdamW(
        made, compute_dtype=device.dtype, compile=compile, fused=device.chip.fused_adamw, few_launches=few_launches
    )


def random_micro_batch(train_model: TrainModel, split: Split, seed: int = 0) -> MicroBatch:
    """Random tokens, others on every rank, to measure memory and speed."""
    generator = torch.Generator().manual_seed(seed + collectives.world().rank)
    size = (2, split.rows, split.seq_len)
    inputs, targets = torch.randint(0, train_model.model.shape.vocab, size, generator=generator).to(train_model.place)
    return MicroBatch(inputs, targets, np.full(split.rows, split.seq_len, np.int32), split.total)


SHORT = 0.01  # seconds at the chip's peak; a longer micro-batch hides its launches (docs/log.md)


def short(shape: Shape, chip: Chip, rows: int, checkpointing: bool, packaged: Collection[str] = ()) -> bool:
    """True if a micro-batch is short, by its time at the chip's peak, and has room in a graph, which keeps its
    activations beside those of work outside of it."""
    held = training(shape, chip, 1, rows, checkpointing, packaged)
    twice = sum(held.values()) + held["activations"] + held["logits"] + held["workspace"]
    seconds = rows * shape.seq_len * shape.train_flops_per_token / chip.peak if chip.peak else SHORT
    return seconds < SHORT and twice <= usable(chip)
