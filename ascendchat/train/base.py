"""Pretraining: `ascendchat base --depth 12 --data DIR`, on many devices with `ascendchat launch --devices 8 base ...`.

Reads top to bottom: device, data, shape, batch and horizon, model and optimizer, then the loop of train/loop.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendchat import dist
from ascendchat.checkpoint import to_continue
from ascendchat.config import UserError, home
from ascendchat.config.train import BaseConfig
from ascendchat.data import toyworld
from ascendchat.data.corpus import Batches, Corpus, absolute, named, open_mixture, read_manifest
from ascendchat.data.prefetch import MicroBatch
from ascendchat.data.prepare import MANIFEST, MIXTURE, TOYWORLD, prepare
from ascendchat.data.tokenizer import Tokenizer, train_tokenizer
from ascendchat.device import Device, describe
from ascendchat.eval import core
from ascendchat.eval.bundle import load_bundle
from ascendchat.plan import schedule
from ascendchat.plan.batch import MIN_STEPS, Split, batch_for, horizon
from ascendchat.plan.shape import Shape
from ascendchat.record import open_run, run_folder
from ascendchat.train.loop import Options, fit, load_state
from ascendchat.train.rows import Learner, RowStage, build, share_out, training_device

MOST_EVAL_TOKENS = 10_000_000
SPEED_SECONDS = 8.0  # chips slow down as they warm up: measure past that
KEPT_SPEED = 0.88  # of the measured speed is what a run keeps: optimizer, text instead of noise, a warm chip
MOST_PASSES = 2.0  # depth 12 on 50 M tokens: 1.078 bits per byte after 2.0 passes, 1.085 after 2.4, 1.23 after 5.4
TIME_LEFT = 1.1  # times the time of a run is what twice its steps take (depth 12 on an H200)
SAME = ("shape", "tokenizer", "data", "total_batch", "seed", "steps")  # what a resumed run must have in common
EMBEDDED_VOCAB = 1536  # ids of the tokenizer that is made for the embedded corpus,
EMBEDDED_TOKENS = 826_000  # and the tokens that the corpus has with it
EMBEDDED_PASSES = 60  # over the embedded corpus at most, unless it is asked for by name: depth 4 reads it 51 times
USUAL_VOCAB = 32768  # ids of a tokenizer for the web
MOST_SHARDS, SHARD_TOKENS = 6542, 55_000_000  # files of climbmix, and the tokens of one (about)
PROMPTS = ("", "The capital of", "北京")


class BaseStage(RowStage):
    """Next-token prediction over packed text."""

    def __init__(
        self, learner: Learner, split: Split, steps: int, corpora: list[tuple[Corpus, float]], config: BaseConfig,
        validation: list[Corpus], tokenizer: Tokenizer, core_tasks: Sequence[core.Task] = (),
    ) -> None:  # fmt: skip
        self.corpora, self.validation, self.eval_tokens = corpora, validation, config.eval_tokens
        self.core_tasks, self.core_rows = core_tasks, config.core_metric_max_per_task
        super().__init__(learner, split, steps, tokenizer, config)
        self.decay = schedule.full_decay(split.total, steps * split.total, config.weight_decay)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        self.ahead = torch.full((), schedule.ahead(step, self.steps), device=self.learner.place)
        return super().micro_batches(step)

    def averaged(self, step: int) -> int:
        return schedule.averaged(step, self.steps)

    def batches(self, rows_per_step: int) -> Batches:
        return Batches(self.corpora, self.split.seq_len, rows_per_step, self.seed)

    def evaluate(self, step: int) -> dict[str, float]:
        return self.text_bits(self.validation, self.eval_tokens or MOST_EVAL_TOKENS)

    def core(self, step: int) -> dict[str, float]:
        length, most = self.split.seq_len, None if self.core_rows == -1 else self.core_rows
        report = core.evaluate(
            self.core_tasks, self.scorer(), self.tokenizer, max_len=length, max_per_task=most, say=lambda text: None
        )
        whole, every = report.mean(subsets=False), report.mean(subsets=True)
        found = {"core": whole, "core_with_subsets": None if every == whole else every}
        return {name: score for name, score in found.items() if score is not None}

    def sample(self, step: int) -> list[str]:
        starts = [[self.tokenizer.bos, *self.tokenizer.encode(prompt)] for prompt in PROMPTS]
        return [f"{prompt} | {self.continue_text(start)}" for prompt, start in zip(PROMPTS, starts)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "stage": "base",
            "shape": self.model.shape.to_dict(),
            "tokenizer": self.tokenizer.fingerprint,
            "data": [[corpus.fingerprint, weight] for corpus, weight in self.corpora],
            "total_batch": self.split.total,
            "steps": self.steps,
            "seed": self.seed,
        }


def open_core(config: BaseConfig) -> list[core.Task]:
    """The tasks for --core-metric-every; what they need and is not there is said at the start."""
    if config.core_metric_every <= 0:
        return []
    bundle = home() / "data" / "core"
    if not bundle.exists():
        raise UserError(f"--core-metric-every: no CORE tasks in {bundle}; get them: ascendchat data fetch core")
    tasks = load_bundle(bundle)
    core.check(tasks)
    return tasks


def shape_of(config: BaseConfig, vocab: int) -> Shape:
    """The model that the flags describe."""
    return Shape.from_depth(
        config.depth, vocab=vocab, seq_len=config.max_seq_len, dim=config.dim, head_dim=config.head_dim,
        kv_heads=config.kv_heads, window_pattern=config.window_pattern,
    )  # fmt: skip


def horizon_of(config: BaseConfig, shape: Shape) -> int:
    """Tokens that the flags ask for; --steps and --minutes come on top."""
    if config.target_flops is not None:
        return config.tokens or max(1, int(config.target_flops / shape.train_flops_per_token))
    return config.tokens or horizon(shape, config.target_param_data_ratio)


def steps_of(config: BaseConfig, shape: Shape, device: Device, tokens: int, total: int) -> tuple[Split, int]:
    """How the devices share `total` tokens a step, unless another batch was asked for, and the steps over `tokens`."""
    split = share_out(config, shape, device, config.total_batch_size or total)
    return split, config.num_iterations or max(1, round(tokens / split.total))


def timed(fits: int, corpora: Sequence[tuple[Corpus, float]], seq_len: int) -> tuple[int, int]:
    """Tokens and batch of a run with time for `fits` tokens: no more than MOST_PASSES over the text, and the time that
    is then left over goes into smaller steps."""
    tokens = max(1, int(fits * min(1.0, MOST_PASSES / passes(corpora, fits))))
    return tokens, batch_for(tokens, seq_len, MIN_STEPS if fits < TIME_LEFT * tokens else 2 * MIN_STEPS)


def passes(corpora: Sequence[tuple[Corpus, float]], tokens: int) -> float:
    """How often a run of `tokens` reads the corpus that it reads most often."""
    whole = sum(weight for _, weight in corpora)
    return max(tokens * weight / whole / corpus.tokens for corpus, weight in corpora)


def measured_horizon(learner: Learner, split: Split, minutes: float) -> int:
    """Tokens that fit in the time, from the speed of a few warm micro-batches of noise; alike on all ranks."""
    noise = torch.randint(0, learner.model.shape.vocab, (2, split.rows, split.seq_len)).to(learner.place)
    batch = MicroBatch(noise[0], noise[1], np.full(split.rows, split.seq_len, np.int32), noise[0].numel())
    weight = torch.tensor(1.0 / noise[0].numel(), device=learner.place)
    learner.mean_over(noise[0].numel())
    started, done = 0.0, 0
    while not started or time.perf_counter() - started < SPEED_SECONDS:
        learner.loss(batch, weight, weight).backward()  # type: ignore[no-untyped-call]
        learner.model.zero_grad()
        learner.device.synchronize()
        done = done + noise[0].numel() if started else 0  # the first one compiles
        started = started or time.perf_counter()
    pace = dist.metrics({"pace": done / (time.perf_counter() - started)})["pace"] * dist.world().size
    return max(1, int(pace * minutes * 60 * KEPT_SPEED))


def run(config: BaseConfig) -> int:
    """The command."""
    device = training_device(config)
    world = dist.init(device)
    place = device.bind(world.local_rank)
    main = world.rank == 0
    say = print if main else lambda text: None
    say(describe(device))
    data, tokenizer_folder = find_data(config)
    config = replace(config, data=absolute(data), tokenizer=str(tokenizer_folder.resolve()))  # later commands look here
    corpora = open_mixture(data)
    tokenizer = Tokenizer.load(tokenizer_folder)
    if tokenizer.fingerprint != corpora[0][0].tokenizer:
        raise UserError(
            f"{data[0]} was not prepared with the tokenizer in {tokenizer_folder}; prepare it again with it"
        )
    validation = [corpus for corpus, _ in open_mixture(data, split="val", needed=False)]
    if not validation:
        say("no validation text in --data: nothing is validated; `ascendchat data prepare --val-source FILE` adds some")
    core_tasks = open_core(config)
    shape = shape_of(config, corpora[0][0].vocab_size)
    tokens = horizon_of(config, shape)
    split, steps = steps_of(config, shape, device, tokens, batch_for(tokens, shape.seq_len))
    folder = run_folder(config.run or f"d{config.depth}", "base")
    found = to_continue(folder, config.resume, say=say)
    learner = build(config, shape, device, place, say)
    if config.minutes is not None:
        if found:
            total = found.state["total_batch"]
            tokens = found.state["steps"] * total
        else:
            tokens, total = timed(measured_horizon(learner, split, config.minutes), corpora, shape.seq_len)
        split, steps = steps_of(config, shape, device, tokens, total)
    stage = BaseStage(learner, split, steps, corpora, config, validation, tokenizer, core_tasks)
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
    if (times := passes(corpora, steps * split.total)) > 0.95 * MOST_PASSES:
        say(
            f"the text is read {times:.1f} times; beyond {MOST_PASSES:.0f} a model tends to learn it by heart and to "
            "validate worse (so --minutes stops there): more text helps"
        )
    options = Options.of(config, start, found, config.core_metric_every)
    facts = {"chip": device.chip.name, "world": world.size, "attention": learner.kernel.name, "split": vars(split)}
    facts |= stage.about_rates
    with open_run(folder, config, facts=facts, resume_step=start or None, track=config.track, main=main) as record:
        if main:
            tokenizer.save(folder / "tokenizer")  # a model without its tokenizer is lost
        result = fit(stage, device, record, options, title=f"base d{config.depth}")
    stage.close()
    dist.teardown()
    return 128 + result.stopped_by if result.stopped_by else 0


def find_data(config: BaseConfig) -> tuple[list[str], Path]:
    """The prepared corpora and their tokenizer. Without --data: what `data prepare` wrote by default, else the embedded
    corpus, which rank 0 makes once, if the run is small enough for it."""
    tokenizer = Path(config.tokenizer) if config.tokenizer else home() / "tokenizer"
    prepared, first = home() / "data" / "prepared", dist.world().rank == 0
    data = list(config.data)
    if not data and any((prepared / name).is_file() for name in (MANIFEST, MIXTURE)):
        data = [str(prepared)]
        if first:
            print(f"no --data given: {prepared}", flush=True)
    if not data:
        check_embedded(config)
    entries = [named(entry) for entry in data or [TOYWORLD]]
    if any(name == TOYWORLD and not Path(name).exists() for name, _ in entries):
        corpus = home() / "data" / TOYWORLD
        if first and not _embedded_is_ready(corpus, tokenizer):
            print(f"{'' if data else 'no --data given: '}preparing the embedded corpus", flush=True)
            if not tokenizer.is_dir():
                train_tokenizer(toyworld.texts(), EMBEDDED_VOCAB).save(tokenizer)
            prepare([TOYWORLD], tokenizer, corpus, workers=1)
        dist.barrier()
        entries = [(str(corpus) if name == TOYWORLD else name, weight) for name, weight in entries]
    data = [name if weight is None else f"{name}={weight}" for name, weight in entries]
    if not tokenizer.is_dir():
        raise UserError(
            f"no tokenizer in {tokenizer}, and nobody could talk to a model without one; name the folder of the "
            "tokenizer that prepared the data: --tokenizer FOLDER"
        )
    return data, tokenizer


def _embedded_is_ready(corpus: Path, tokenizer: Path) -> bool:
    if not (corpus / MANIFEST).is_file() or not tokenizer.is_dir():
        return False
    return bool(read_manifest(corpus)["tokenizer"] == Tokenizer.load(tokenizer).fingerprint)


def check_embedded(config: BaseConfig) -> None:
    """The embedded corpus is for tiny models: a longer run, unless it asks for it by name, is told how to get text."""
    tokens = horizon_of(config, shape_of(config, EMBEDDED_VOCAB))
    if config.num_iterations is not None:
        tokens = config.num_iterations * (config.total_batch_size or batch_for(tokens, config.max_seq_len))
    if config.minutes is not None or tokens <= EMBEDDED_PASSES * EMBEDDED_TOKENS:
        return
    shards = min(MOST_SHARDS, math.ceil(horizon_of(config, shape_of(config, USUAL_VOCAB)) / SHARD_TOKENS))
    raise UserError(
        f"no --data given, and this run would read the small embedded corpus {tokens / EMBEDDED_TOKENS:,.0f} times; "
        f"get real text: `ascendchat data fetch climbmix --shards {shards}`, `ascendchat tokenizer train "
        f"{home() / 'data' / 'climbmix'}`, `ascendchat data prepare climbmix`, then run this again; or say --data "
        "toyworld if you mean it"
    )
