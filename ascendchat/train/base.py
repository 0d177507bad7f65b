"""Pretraining: `ascendchat base --depth 12 --data DIR`, on many devices with `ascendchat launch --devices 8 base ...`.

Reads top to bottom: device, data, shape, batch and horizon, model and optimizer, then the loop of train/loop.py.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat import dist
from ascendchat.checkpoint import newest
from ascendchat.config import UserError, home
from ascendchat.config.train import BaseConfig, TrainConfig
from ascendchat.data.corpus import IGNORE, Batches, Corpus, Prefetcher, evaluation_rows, open_mixture
from ascendchat.data.prefetch import MicroBatch
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device import Device, describe, pick
from ascendchat.nn.attention import Attention, choose
from ascendchat.nn.fp8 import Fp8Ops
from ascendchat.nn.gpt import GPT, Ops, dense
from ascendchat.nn.loss import head_loss, score, softcap, token_nats
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split, batch_for, fit_split, horizon
from ascendchat.plan.shape import Shape
from ascendchat.record import open_run, run_folder
from ascendchat.train.loop import Options, fit, load_state

MOST_EVAL_TOKENS = 10_000_000
SPEED_SECONDS = 8.0  # chips slow down as they warm up: measure past that
OPTIMIZER_SHARE = 0.96  # of the time is forward and backward
SAME = ("shape", "tokenizer", "data", "total_batch", "seed", "steps")  # what a resumed run must have in common
PROMPTS = ("", "The capital of", "北京")


class Learner:
    """A model on its device, with the kernel chosen for it, compiled where that is sound."""

    def __init__(self, model: GPT, kernel: Attention, device: Device, place: torch.device) -> None:
        self.model, self.kernel, self.device, self.place = model, kernel, device, place
        self.attend = dense(model, kernel)
        self._rope = model.rope(model.shape.seq_len, device.dtype, place)
        self._forward = device.compile(model, dynamic=False, fullgraph=True)
        self._score = device.compile(score, dynamic=False)

    def loss(self, batch: MicroBatch, weight: Tensor) -> Tensor:
        """`weight` times the sum of the nats of all targets."""
        hidden = self._forward(batch.inputs, self.attend, self._rope)
        vocab = self.model.shape.vocab
        return head_loss(hidden, self.model.head, batch.targets, vocab, weight=weight, scorer=self._score)


def operators(config: TrainConfig, device: Device, tokens: int, say: Callable[[str], None]) -> Ops | None:
    """The operators of a block: 8-bit, fused, or None for plain torch."""
    if config.fp8 and device.chip.fp8 and device.compiles:
        return Fp8Ops(tokens)
    if config.fp8:
        lacks = "is not compiled here" if device.chip.fp8 else f"{device.chip.name} has no 8-bit matrix products"
        say(f"--fp8 is ignored: {lacks}")
    return device.operators()


def build(
    config: TrainConfig, shape: Shape, device: Device, place: torch.device, tokens: int, say: Callable[[str], None]
) -> Learner:
    """Model and kernel; weights are drawn on the host, so every device starts alike."""
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention)
    say(reason)
    model = GPT(shape, operators(config, device, tokens, say), checkpoint_activations=config.activation_checkpointing)
    model.initialise(config.seed)
    return Learner(model.to_compute(device.dtype).to(place), kernel, device, place)


class BaseStage:
    """Next-token prediction over packed rows; see Stage in loop.py."""

    def __init__(
        self, learner: Learner, split: Split, steps: int, corpora: list[tuple[Corpus, float]], seed: int,
        validation: list[Corpus], eval_tokens: int | None, tokenizer: Tokenizer | None, lr_multiplier: float = 1.0,
    ) -> None:  # fmt: skip
        self.learner, self.split, self.steps = learner, split, steps
        self.model = learner.model
        self.corpora, self.seed, self.validation, self.eval_tokens = corpora, seed, validation, eval_tokens
        self.tokenizer = tokenizer
        shape = learner.model.shape
        self.tokens_per_step, self.flops_per_token = split.total, float(shape.train_flops_per_token)
        self.decay = schedule.full_decay(split.total, steps * split.total)
        rates = {name: rate * lr_multiplier for name, rate in schedule.rates(shape.dim, split.total).items()}
        compile = learner.device.compile if learner.device.compiles else None
        self.optimizer = MuonAdamW(
            groups(learner.model, rates),
            compute_dtype=learner.device.dtype,
            compile=compile,
        )
        self._weight = torch.tensor(split.devices / split.total, device=learner.place)  # of a token in this rank's mean
        self._feed = self._prefetcher()

    def _prefetcher(self) -> Prefetcher:
        split, world = self.split, dist.world()
        mine = split.rows * split.accumulation
        batches = Batches(self.corpora, split.seq_len, mine * split.devices, self.seed)
        return Prefetcher(
            batches, self.learner.place, rows=(world.rank * mine, (world.rank + 1) * mine), micro_batch=split.rows,
            pin=self.learner.device.pin,
        )  # fmt: skip

    def micro_batches(self, step: int) -> list[MicroBatch]:
        return self._feed.take(step)

    def loss(self, batch: MicroBatch) -> Tensor:
        return self.learner.loss(batch, self._weight)

    def rates(self, step: int) -> dict[str, float]:
        return {
            "lr_scale": schedule.lr_scale(step, self.steps),
            "momentum": schedule.momentum(step, self.steps),
            "matrix_decay": schedule.weight_decay(step, self.steps, self.decay),
        }

    def smaller(self) -> bool:
        split = self.split.smaller()
        if split is None:
            return False
        self._feed.close()
        self.split = split
        self._feed = self._prefetcher()
        return True

    def evaluate(self, step: int) -> dict[str, float]:
        bits = [self.bits_per_byte(corpus) for corpus in self.validation]
        names = ["bpb"] if len(bits) == 1 else [f"bpb_{corpus.folder.name}" for corpus in self.validation]
        found = dict(zip(names, bits))
        return found if len(bits) <= 1 else {"bpb": sum(bits) / len(bits), **found}

    def bits_per_byte(self, corpus: Corpus) -> float:
        """Over the validation split, or its first eval_tokens with the bytes in proportion."""
        shape, world = self.model.shape, dist.world()
        limit = min(corpus.tokens, self.eval_tokens or MOST_EVAL_TOKENS)
        most = max(1, limit // shape.seq_len)
        rows = itertools.islice(
            evaluation_rows(corpus, shape.seq_len), world.rank, most if most > 1 else None, world.size
        )
        total = torch.zeros(2, device=self.learner.place)  # nats, targets
        for inputs, targets in _stack(rows, self.split.rows, self.learner.place):
            hidden = self.model(inputs, self.learner.attend)
            nats = token_nats(hidden, self.model.head, targets, shape.vocab)
            total += torch.stack((nats.sum(), (targets != IGNORE).sum().float()))
        dist.all_reduce(total, "sum")
        nats, count = total.tolist()
        text_tokens = corpus.tokens - corpus.documents  # every document begins with bos, which has no bytes
        return nats / count * text_tokens / (math.log(2) * corpus.text_bytes)

    @torch.no_grad()
    def sample(self, step: int) -> list[str]:
        """Greedy continuations, by running the whole row for each token: slow, but short and without a cache."""
        if self.tokenizer is None:
            return []
        texts = []
        for prompt in PROMPTS:
            row = [self.tokenizer.bos, *self.tokenizer.encode(prompt)]
            for _ in range(24):
                tokens = torch.tensor([row[-self.model.shape.seq_len :]], device=self.learner.place)
                hidden = self.model(tokens, self.learner.attend)[0, -1:]
                row.append(int(softcap(hidden @ self.model.head[: self.model.shape.vocab].t()).argmax()))
            texts.append(" ".join(self.tokenizer.decode(row[1:]).split()))
        return texts

    def state_dict(self) -> dict[str, Any]:
        return {
            "stage": "base",
            "shape": self.model.shape.to_dict(),
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer else self.corpora[0][0].tokenizer,
            "data": [[corpus.fingerprint, weight] for corpus, weight in self.corpora],
            "total_batch": self.split.total,
            "steps": self.steps,
            "seed": self.seed,
        }

    def close(self) -> None:
        self._feed.close()


def _stack(rows: Iterator[Any], size: int, place: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows in batches of `size`."""
    while batch := list(itertools.islice(rows, size)):
        inputs, targets = zip(*batch)
        yield (
            torch.stack([torch.from_numpy(row) for row in inputs]).to(place),
            torch.stack([torch.from_numpy(row) for row in targets]).to(place),
        )


def share_out(config: BaseConfig, shape: Shape, device: Device, tokens: int) -> tuple[Split, int]:
    """Batch and steps of a run over `tokens`."""
    total = config.total_batch_size or batch_for(tokens, shape.seq_len)
    split = fit_split(
        shape, device.chip, dist.world().size, total, rows=config.device_batch_size,
        checkpointing=config.activation_checkpointing,
    )  # fmt: skip
    asked = config.gradient_accumulation_steps
    if asked is not None and config.total_batch_size is None:
        split = replace(split, accumulation=asked)
    elif asked is not None and asked != split.accumulation:
        raise UserError(
            f"--gradient-accumulation-steps {asked} does not fit --total-batch-size {total}: with "
            f"{split.devices} device(s) and {split.rows} rows of {split.seq_len} it takes {split.accumulation}"
        )
    return split, config.num_iterations or max(1, round(tokens / split.total))


def measured_horizon(learner: Learner, split: Split, minutes: float) -> int:
    """Tokens that fit in the time, from the speed of a few warm micro-batches of noise; alike on all ranks."""
    noise = torch.randint(0, learner.model.shape.vocab, (2, split.rows, split.seq_len)).to(learner.place)
    batch = MicroBatch(noise[0], noise[1], np.full(split.rows, split.seq_len, np.int32))
    weight = torch.tensor(1.0 / noise[0].numel(), device=learner.place)
    started, done = 0.0, 0
    while not started or time.perf_counter() - started < SPEED_SECONDS:
        learner.loss(batch, weight).backward()  # type: ignore[no-untyped-call]
        learner.model.zero_grad()
        learner.device.synchronize()
        done = done + noise[0].numel() if started else 0  # the first one compiles
        started = started or time.perf_counter()
    pace = dist.metrics({"pace": done / (time.perf_counter() - started)})["pace"] * dist.world().size
    return int(pace * minutes * 60 * OPTIMIZER_SHARE)


def run(config: BaseConfig) -> int:
    """The command."""
    device = pick(config.device_type, compiled=config.compile)
    world = dist.init(device)
    place = device.bind(world.local_rank)
    main = world.rank == 0
    say = print if main else lambda text: None
    say(describe(device))
    data, tokenizer_folder = find_data(config)
    corpora = open_mixture(data)
    tokenizer = Tokenizer.load(tokenizer_folder) if tokenizer_folder else None
    if tokenizer and tokenizer.fingerprint != corpora[0][0].tokenizer:
        raise UserError(
            f"{data[0]} was not prepared with the tokenizer in {tokenizer_folder}; prepare it again with it"
        )
    validation = [corpus for corpus, _ in open_mixture(data, split="val")]
    shape = Shape.from_depth(
        config.depth, vocab=corpora[0][0].vocab_size, seq_len=config.max_seq_len, dim=config.dim,
        head_dim=config.head_dim, kv_heads=config.kv_heads, window_pattern=config.window_pattern,
    )  # fmt: skip
    tokens = config.tokens or horizon(shape, config.target_param_data_ratio)
    split, steps = share_out(config, shape, device, tokens)
    folder = run_folder(config.run or f"d{config.depth}", "base")
    found = None if config.resume == "never" and "ASCENDCHAT_RESTART" not in os.environ else newest(folder, say=say)
    learner = build(config, shape, device, place, split.total // split.devices, say)
    if config.minutes is not None:
        known = found.state["steps"] * found.state["total_batch"] if found else 0
        split, steps = share_out(config, shape, device, known or measured_horizon(learner, split, config.minutes))
    stage = BaseStage(
        learner, split, steps, corpora, config.seed, validation, config.eval_tokens, tokenizer, config.lr_multiplier
    )
    expected = {name: value for name, value in stage.state_dict().items() if name in SAME}
    start = load_state(stage, found, expected) if found else 0
    if start >= stage.steps:
        say(f"{folder} is finished: {start} steps; --resume never starts anew")
        return 0
    say(
        f"{shape.total_parameters / 1e6:.1f} M parameters; {steps} steps of {split.total} tokens = {split.devices} "
        f"device(s) x {split.rows} rows x {split.accumulation} micro-batch(es) x {shape.seq_len}"
        + (f"; continuing after step {start}" if start else "")
    )
    options = Options(
        config.save_every, config.eval_every, config.sample_every, config.log_every, config.keep, start,
        (found.state.get("best") or math.inf) if found else math.inf,
    )  # fmt: skip
    facts = {"chip": device.chip.name, "world": world.size, "attention": learner.kernel.name, "split": vars(split)}
    with open_run(folder, config, facts=facts, resume_step=start or None, track=config.track, main=main) as record:
        result = fit(stage, device, record, options, title=f"base d{config.depth}")
    stage.close()
    dist.teardown()
    return 128 + result.stopped_by if result.stopped_by else 0


def find_data(config: BaseConfig) -> tuple[list[str], Path | None]:
    """The prepared corpora and their tokenizer."""
    if not config.data:
        raise UserError("no data given: --data FOLDER, as written by `ascendchat data prepare`")
    named = Path(config.tokenizer) if config.tokenizer else home() / "tokenizer"
    return list(config.data), named if config.tokenizer or named.is_dir() else None
