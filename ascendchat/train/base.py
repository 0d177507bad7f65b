"""Pretraining: `ascendchat base --depth 12 --data DIR`, on many devices with `ascendchat launch --devices 8 base ...`.

Reads top to bottom: device, data, shape, batch and horizon, model and optimizer, then the loop of train/loop.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ascendchat import dist
from ascendchat.checkpoint import Checkpoint, to_continue
from ascendchat.chips import Chip
from ascendchat.config import UserError, home
from ascendchat.config.train import USUAL_DEPTH, BaseConfig
from ascendchat.data import toyworld
from ascendchat.data.corpus import Corpus, TextRows, open_corpora, read_corpus_manifest
from ascendchat.data.mixture import MIXTURE, Batches, absolute, parse_entry
from ascendchat.data.prefetch import MicroBatch
from ascendchat.data.prepare import TOYWORLD, prepare
from ascendchat.data.tokenizer import Tokenizer, train_tokenizer
from ascendchat.data.verify import MANIFEST
from ascendchat.device import Device
from ascendchat.dist.context import Context
from ascendchat.eval import core
from ascendchat.eval.bundle import load_bundle
from ascendchat.infer.generator import prompt_room
from ascendchat.infer.load import settings_of
from ascendchat.infer.request import Sampling
from ascendchat.nn.optim import MuonAdamW
from ascendchat.plan import schedule
from ascendchat.plan.batch import MFU, MIN_STEPS, Split, batch_for, horizon
from ascendchat.plan.memory import mean_fits, training, usable
from ascendchat.plan.shape import Shape
from ascendchat.record import run_folder
from ascendchat.train.dry_run import until_it_fits
from ascendchat.train.rows import SAMPLE_TOKENS, Learner, RowStage, build, share_out
from ascendchat.train.run import train_stage, training_context, with_attend
from ascendchat.train.stage import updates_of

MOST_EVAL_TOKENS = 10_000_000
SPEED_SECONDS = 2.0  # an H200 had its lasting speed after one
KEPT_SPEED = 0.88  # of the measured speed is what a run keeps: optimizer, text instead of noise, a warm chip
MOST_PASSES = 2.0  # depth 12 on 50 M tokens: 1.078 bits per byte after 2.0 passes, 1.085 after 2.4, 1.23 after 5.4
LEAST_DEPTH, MOST_DEPTH = 2, 64  # that --minutes chooses
MOST_PARAMETERS = 14  # of such a model for a token of text
FP8_GAIN = 1.15  # what 8-bit products add to the speed
TIME_LEFT = 1.1  # times the time of a run is what twice its steps take (depth 12 on an H200)
EMBEDDED_VOCAB = 1536  # ids of the tokenizer that is made for the embedded corpus,
EMBEDDED_TOKENS = 826_000  # and the tokens that the corpus has with it
EMBEDDED_PASSES = 60  # over the embedded corpus at most, unless it is asked for by name: depth 4 reads it 51 times
USUAL_VOCAB = 32768  # ids of a tokenizer for the web
MOST_SHARDS, SHARD_TOKENS = 6542, 55_000_000  # files of climbmix, and the tokens of one (about)
PROMPTS = ("", "The capital of", "北京")


class BaseStage(RowStage):
    """Next-token prediction over packed text."""

    def __init__(
        self,
        learner: Learner,
        split: Split,
        steps: int,
        text: Text,
        config: BaseConfig,
        core_tasks: Sequence[core.CoreTask] = (),
    ) -> None:
        self.text, self.eval_tokens = text, config.eval_tokens
        self.core_tasks, self.core_rows = core_tasks, config.core_metric_max_per_task
        self.dropout = config.dropout
        super().__init__(learner, split, steps, text.tokenizer, config)
        self.decay = schedule.full_decay(split.total, steps * split.total, config.weight_decay)
        held = learner.model.shape, learner.device.chip, dist.world().size, split.rows, config.activation_checkpointing
        self.roomy = split if mean_fits(*held) else None  # not after a smaller one: then the plan counted too little

    def micro_batches(self, step: int) -> list[MicroBatch]:
        self.ahead = torch.full((), schedule.ahead(step, self.steps), device=self.learner.place)
        if self.dropout:  # what is dropped is a function of the step too: a run that goes on drops the same
            self.learner.device.seed(mixed(self.seed, dist.world().rank, step))
        return super().micro_batches(step)

    def probe(self) -> MicroBatch:
        self.ahead = torch.full((), schedule.ahead(0, self.steps), device=self.learner.place)
        return super().probe()

    @property
    def averaging(self) -> MuonAdamW:
        assert isinstance(self.optimizer, MuonAdamW)
        return self.optimizer

    def after_step(self, step: int) -> None:
        """The model is a mean of weights of the last part of the run."""
        count = schedule.averaged(step, self.steps)
        if count > schedule.averaged(step - 1, self.steps):
            self.averaging.average(count, last=step + 1 == self.steps, near=self.split is self.roomy)

    def load(self, saved: Checkpoint) -> None:
        averaging = schedule.averaged(saved.step - 1, self.steps) > 0
        self.averaging.load(saved.reader(), updates_of(saved), averaging=averaging, near=self.split is self.roomy)

    def batches(self, rows_per_step: int) -> Batches:
        seq_len, seed = self.split.seq_len, self.seed
        return Batches(
            [(TextRows(corpus, seq_len, seed), weight) for corpus, weight in self.text.corpora], rows_per_step
        )

    def evaluate(self, step: int) -> dict[str, float]:
        return self.text_bits(self.text.validation, self.eval_tokens or MOST_EVAL_TOKENS)

    def examine(self, step: int) -> dict[str, float]:
        length, most = self.split.seq_len, None if self.core_rows == -1 else self.core_rows
        report = core.score_tasks(
            self.core_tasks, self.scorer(), self.tokenizer, max_len=length, max_per_task=most, say=lambda text: None
        )
        whole, every = report.mean(subsets=False), report.mean(subsets=True)
        found = {"core": whole, "core_with_subsets": None if every == whole else every}
        return {name: score for name, score in found.items() if score is not None}

    def sample(self, step: int) -> list[str]:
        room = prompt_room(self.model.shape.seq_len, SAMPLE_TOKENS)
        starts = [[self.tokenizer.bos, *self.tokenizer.encode(prompt)][:room] for prompt in PROMPTS]
        plain = Sampling(max_tokens=SAMPLE_TOKENS, temperature=0.0, stop_tokens=(), tools=False)
        return [f"{prompt} | {text}" for prompt, text in zip(PROMPTS, self.continue_prompts(starts, plain))]

    def identity(self) -> dict[str, Any]:
        data = [[corpus.fingerprint, weight] for corpus, weight in self.text.corpora]
        return {"stage": "base", **super().identity(), "data": data}


def mixed(*numbers: int) -> int:
    """A seed of 63 bits for each list of numbers, different in the last 32 too, which is all that a CPU takes."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) % 2**63


class Text(NamedTuple):
    """What a base model reads."""

    config: BaseConfig  # with paths that later commands find from any directory
    corpora: list[tuple[Corpus, float]]
    validation: list[Corpus]
    tokenizer: Tokenizer


def open_training_text(config: BaseConfig, here: Context) -> Text:
    """The corpora of --data and their tokenizer."""
    data, folder = find_data(config)
    corpora, tokenizer = open_corpora(data), Tokenizer.load(folder)
    if tokenizer.fingerprint != corpora[0][0].tokenizer:
        raise UserError(f"{data[0]} was not prepared with the tokenizer in {folder}; prepare it again with it")
    validation = [corpus for corpus, _ in open_corpora(data, split="val", needed=False)]
    if not validation:
        hint = "`ascendchat data prepare --val-source FILE` adds some"
        here.say(f"no validation text in --data: nothing is validated; {hint}")
    resolved = replace(config, data=absolute(data), tokenizer=str(folder.resolve()))
    return Text(resolved, corpora, validation, tokenizer)


def open_core(config: BaseConfig) -> list[core.CoreTask]:
    """The tasks for --core-metric-every; what they need and is not there is said at the start."""
    if config.core_metric_every <= 0:
        return []
    bundle = home() / "data" / "core"
    if not bundle.exists():
        raise UserError(f"--core-metric-every: no CORE tasks in {bundle}; get them: ascendchat data fetch core")
    tasks = load_bundle(bundle)
    core.check_rows(tasks)
    return tasks


def shape_of(config: BaseConfig, vocab: int, depth: int | None = None) -> Shape:
    """The model that the flags describe; `depth` where they say none."""
    return Shape.from_depth(
        config.depth or depth or USUAL_DEPTH,
        vocab=vocab,
        seq_len=config.max_seq_len,
        window_pattern=config.window_pattern,
        dim=config.dim,
        head_dim=config.head_dim,
        kv_heads=config.kv_heads,
    )


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


def expected_horizon(config: BaseConfig, shape: Shape, chip: Chip) -> int:
    """Tokens that fit in --minutes by the chip's data sheet."""
    speed = chip.flops * MFU[chip.device_type] * (FP8_GAIN if config.fp8 and chip.fp8 else 1.0)
    return max(1, int(dist.world().size * speed * (config.minutes or 0.0) * 60 / shape.train_flops_per_token))


def depth_for(config: BaseConfig, text: Text, chip: Chip) -> int:
    """The deepest model for which --minutes are enough to read the text MOST_PASSES times, or as many tokens as it is
    worth, if that is less. Small models on 4.8 M tokens, two passes each: the larger, the fewer bits per byte, up to
    14 parameters for a token of text (docs/log.md); beyond that nothing was tried."""
    vocab, whole = text.corpora[0][0].vocab_size, int(MOST_PASSES / passes(text.corpora, 1))
    best = 0
    for depth in range(LEAST_DEPTH, MOST_DEPTH + 1):
        try:
            shape = shape_of(config, vocab, depth)
        except UserError:  # --head-dim or --kv-heads are for other widths
            continue
        needed = min(horizon_of(config, shape), whole)
        large = shape.total_parameters > MOST_PARAMETERS * whole / MOST_PASSES
        held = training(shape, chip, dist.world().size, 1, config.activation_checkpointing)
        fits = sum(held.values()) <= usable(chip)
        if best and (large or not fits or needed > expected_horizon(config, shape, chip)):
            break
        best = depth
    agreed = torch.tensor([float(best or LEAST_DEPTH)], device=dist.place())
    dist.all_reduce(agreed, "min")  # chips of several kinds
    return int(agreed.item())


def first_batch(learner: Learner, split: Split, text: Text, seed: int) -> MicroBatch:
    """This rank's first micro-batch of the text."""
    rows, rank, world = split.rows, dist.world().rank, dist.world().size
    sources = [(TextRows(corpus, split.seq_len, seed), weight) for corpus, weight in text.corpora]
    batch = Batches(sources, rows * world).batch(0, rank * rows, (rank + 1) * rows)
    inputs, targets = (torch.from_numpy(array).to(learner.place) for array in (batch.inputs, batch.targets))
    return MicroBatch(inputs, targets, batch.lengths, split.total)


def measured_speed(learner: Learner, batch: MicroBatch) -> float:
    """Tokens a second of this rank, over one micro-batch again and again."""
    tokens = batch.inputs.numel()
    weight = torch.tensor(1.0 / tokens, device=learner.place)
    learner.mean_over(tokens)
    started, done = 0.0, 0
    while not started or time.perf_counter() - started < SPEED_SECONDS:
        learner.loss(batch, weight, weight).backward()  # type: ignore[no-untyped-call]
        learner.model.zero_grad()
        learner.device.synchronize()
        done = done + tokens if started else 0  # the first one compiles
        started = started or time.perf_counter()
    return done / (time.perf_counter() - started)


def measured_horizon(config: BaseConfig, learner: Learner, text: Text, split: Split, say: Callable[[str], None]) -> int:
    """Tokens that fit in --minutes, alike on all ranks: from the speed with the rows of `split`, or as many as fit."""
    tried, found = [split], [0.0]

    def trial() -> None:
        found.append(measured_speed(learner, first_batch(learner, tried[-1], text, config.seed)))

    def smaller() -> bool:
        less = tried[-1].smaller()
        tried.append(less or split)
        return less is not None

    until_it_fits(trial, smaller, learner.model.zero_grad, learner.model, learner.device, say)
    pace = dist.metrics({"pace": found[-1]})["pace"] * dist.world().size
    return max(1, int(pace * (config.minutes or 0.0) * 60 * KEPT_SPEED))


def plan_run(
    config: BaseConfig, learner: Learner, text: Text, saved: Checkpoint | None, say: Callable[[str], None]
) -> tuple[Split, int]:
    """Batch and steps: from the flags, or from the speed that was measured for --minutes."""
    shape, device = learner.model.shape, learner.device
    tokens = horizon_of(config, shape)
    split, steps = steps_of(config, shape, device, tokens, batch_for(tokens, shape.seq_len))
    if config.minutes is None:
        return split, steps
    if saved and "steps" in saved.state:  # not a model that was imported: train_stage refuses it
        total = saved.state["total_batch"]
        tokens = saved.state["steps"] * total
    else:
        tokens, total = timed(expected_horizon(config, shape, device.chip), text.corpora, shape.seq_len)
        split, _ = steps_of(config, shape, device, tokens, total)  # most likely that of the run: compiled only once
        tokens, total = timed(measured_horizon(config, learner, text, split, say), text.corpora, shape.seq_len)
    return steps_of(config, shape, device, tokens, total)


def run(config: BaseConfig) -> int:
    """The command."""
    with training_context(config) as here:
        text = open_training_text(config, here)
        config = text.config
        core_tasks = open_core(config)
        depth = config.depth or (USUAL_DEPTH if config.minutes is None else depth_for(config, text, here.device.chip))
        folder = run_folder(config.run or f"d{depth}", "base")
        saved = to_continue(folder, config.resume, say=here.say)
        if config.depth is None and saved:
            before = settings_of(saved).get("minutes")
            if config.minutes not in (None, before) and not config.run:
                raise UserError(
                    f"depth {depth} was chosen, and {folder} holds another run, with --minutes {before}; name this one "
                    "(--run NAME), or begin it there: --resume never"
                )
            depth = saved.state["shape"]["depth"]
        elif config.depth is None and config.minutes is not None:
            here.say(f"--minutes {config.minutes:g}: depth {depth}, the most for which time and text are enough")
        config = with_attend(replace(config, depth=depth), saved, "row")
        shape = shape_of(config, text.corpora[0][0].vocab_size)
        learner = build(config, shape, here)
        split, steps = plan_run(config, learner, text, saved, here.say)
        if (times := passes(text.corpora, steps * split.total)) > 0.95 * MOST_PASSES:
            here.say(
                f"the text is read {times:.1f} times; beyond {MOST_PASSES:.0f} a model tends to learn it by heart and "
                "to validate worse (so --minutes stops there): more text helps, --dropout 0.1 may"
            )
        stage = BaseStage(learner, split, steps, text, config, core_tasks)
        return train_stage(
            stage,
            here,
            config,
            folder,
            saved,
            title=f"base d{config.depth}",
            facts=stage.facts,
            add_files=lambda folder: text.tokenizer.save(folder / "tokenizer"),  # without it a model is lost
            examine_every=config.core_metric_every,
        )


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
    entries = [parse_entry(entry) for entry in data or [TOYWORLD]]
    if any(name == TOYWORLD and not Path(name).exists() for name, _ in entries):
        corpus = home() / "data" / TOYWORLD
        if first and not _embedded_is_ready(corpus, tokenizer):
            print(f"{'' if data else 'no --data given: '}preparing the embedded corpus", flush=True)
            if not tokenizer.is_dir():
                train_tokenizer(toyworld.texts(), EMBEDDED_VOCAB).save(tokenizer)
            prepare([TOYWORLD], tokenizer, corpus, workers=1)
        dist.barrier()
        entries = [e._replace(name=str(corpus)) if e.name == TOYWORLD else e for e in entries]
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
    return bool(read_corpus_manifest(corpus)["tokenizer"] == Tokenizer.load(tokenizer).fingerprint)


def check_embedded(config: BaseConfig) -> None:
    """The embedded corpus is for tiny models: a longer run, unless it asks for it by name, is told how to get text."""
    if config.minutes is not None:
        return
    tokens = horizon_of(config, shape_of(config, EMBEDDED_VOCAB))
    if config.num_iterations is not None:
        tokens = config.num_iterations * (config.total_batch_size or batch_for(tokens, config.max_seq_len))
    if tokens <= EMBEDDED_PASSES * EMBEDDED_TOKENS:
        return
    shards = min(MOST_SHARDS, math.ceil(horizon_of(config, shape_of(config, USUAL_VOCAB)) / SHARD_TOKENS))
    raise UserError(
        f"no --data given, and this run would read the small embedded corpus {tokens / EMBEDDED_TOKENS:,.0f} times; "
        f"get real text: `ascendchat data fetch climbmix --shards {shards}`, `ascendchat tokenizer train "
        f"{home() / 'data' / 'climbmix'}`, `ascendchat data prepare climbmix`, then run this again; or say --data "
        "toyworld if you mean it"
    )
