"""Pretraining: `ascendchat base --depth 12 --data DIR`, on many devices with `ascendchat launch --devices 8 base ...`.

Reads top to bottom: device, data, shape, batch and horizon, model and optimizer, then the loop of train/loop.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ascendchat.checkpoint import Checkpoint, to_continue
from ascendchat.config.train import USUAL_DEPTH, USUAL_ROW, BaseConfig
from ascendchat.data import toyworld
from ascendchat.data.corpus import Corpus, TextRows, open_corpora, read_corpus_manifest
from ascendchat.data.loader import MicroBatch
from ascendchat.data.mixture import MIXTURE, Batches, absolute, parse_entry
from ascendchat.data.prepare import TOYWORLD, prepare
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.data.verify import MANIFEST
from ascendchat.engine.request import Sampling, prompt_room
from ascendchat.errors import UserError, home
from ascendchat.eval import core
from ascendchat.eval.core import load_bundle
from ascendchat.models.open import settings_of
from ascendchat.nn.optim import MuonAdamW
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context
from ascendchat.runs.run import run_folder
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split, batch_for
from ascendchat.sizes.memory import mean_on_device
from ascendchat.train.budget import MAX_PASSES, horizon_of, passes, plan_run, shape_of, sizes_for
from ascendchat.train.model import TrainModel, build
from ascendchat.train.rows import SAMPLE_TOKENS, RowStage
from ascendchat.train.run import train_stage, training_context, with_attend
from ascendchat.train.stage import updates_of

MAX_EVAL_TOKENS = 10_000_000
EMBEDDED_VOCAB = 1536  # ids of the tokenizer that is made for the embedded corpus,
EMBEDDED_TOKENS = 826_000  # and the tokens that the corpus has with it
EMBEDDED_PASSES = 60  # over the embedded corpus at most, unless it is asked for by name: depth 4 reads it 51 times
USUAL_VOCAB = 32768  # ids of a tokenizer for the web
MAX_SHARDS, SHARD_TOKENS = 6542, 55_000_000  # files of climbmix, and the tokens of one (about)
PROMPTS = ("", "The capital of", "北京")


class BaseStage(RowStage):
    """Next-token prediction over packed text."""

    def __init__(
        self,
        learner: TrainModel,
        split: Split,
        steps: int,
        text: _Text,
        config: BaseConfig,
        core_tasks: Sequence[core.CoreTask] = (),
    ) -> None:
        self.text, self.eval_tokens = text, config.eval_tokens
        self.core_tasks, self.core_rows = core_tasks, config.core_metric_max_per_task
        self.dropout = config.dropout
        super().__init__(learner, split, steps, text.tokenizer, config)
        self.decay = schedule.full_decay(split.total, steps * split.total, config.weight_decay)
        held = (
            learner.model.shape,
            learner.device.chip,
            collectives.world().size,
            split.rows,
            config.activation_checkpointing,
        )
        self.planned: Split | None = split  # None: not even that fits
        self.roomy = mean_on_device(*held) > 0  # not with a smaller one: then the plan counted too little

    def micro_batches(self, step: int) -> list[MicroBatch]:
        self.ahead = torch.full((), schedule.ahead(step, self.steps), device=self.learner.place)
        if self.dropout:
            self.draw_anew(step)
        return super().micro_batches(step)

    def probe(self) -> MicroBatch:
        self.averaging.reserve_mean(self.roomy and self.split is self.planned)
        self.ahead = torch.full((), schedule.ahead(0, self.steps), device=self.learner.place)
        return super().probe()

    def smaller(self) -> bool:
        if super().smaller():
            return True
        again, self.planned = self.roomy and self.split is self.planned, None  # one row may fit without the mean
        return again

    @property
    def averaging(self) -> MuonAdamW:
        assert isinstance(self.optimizer, MuonAdamW)
        return self.optimizer

    def after_step(self, step: int) -> None:
        """The model is a mean of weights of the last part of the run."""
        count = schedule.averaged(step, self.steps)
        if count > schedule.averaged(step - 1, self.steps):
            self.averaging.average(count, last=step + 1 == self.steps)

    def load(self, saved: Checkpoint) -> None:
        """The mean comes to the host; the dry run finds where it was before, for the same bits."""
        averaging = schedule.averaged(saved.step - 1, self.steps) > 0
        self.averaging.load(saved.reader(), updates_of(saved), averaging=averaging)

    def batches(self, rows_per_step: int) -> Batches:
        seq_len, seed = self.split.seq_len, self.seed
        return Batches(
            [(TextRows(corpus, seq_len, seed), weight) for corpus, weight in self.text.corpora], rows_per_step
        )

    def evaluate(self, step: int) -> dict[str, float]:
        return self.text_bits(self.text.validation, self.eval_tokens or MAX_EVAL_TOKENS)

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


class _Text(NamedTuple):
    """What a base model reads."""

    config: BaseConfig  # with paths that later commands find from any directory
    corpora: list[tuple[Corpus, float]]
    validation: list[Corpus]
    tokenizer: Tokenizer


def check_horizon(config: BaseConfig) -> None:
    """One flag says how long the run is."""
    asked = {"--minutes": config.minutes, "--tokens": config.tokens, "--target-flops": config.target_flops}
    asked["--steps"] = config.num_iterations
    given = [flag for flag in asked if asked[flag] is not None]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} both say how long the run is; give one of them")


def open_training_text(config: BaseConfig, here: Context) -> _Text:
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
    return _Text(resolved, corpora, validation, tokenizer)


def check_tokenizer(own: Path, text: _Text) -> None:
    """Of a run that is to go on: the usual tokenizer may have been trained anew since."""
    if own.is_dir() and Tokenizer.load(own).fingerprint != text.tokenizer.fingerprint:
        raise UserError(
            f"{own.parent} was begun with another tokenizer than that of {text.config.tokenizer}; go on with its own "
            f"(--tokenizer {shlex.quote(str(own))}, and --data prepared with it), or begin anew: --resume never"
        )


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


def run(config: BaseConfig) -> int:
    """The command."""
    check_horizon(config)
    with training_context(config) as here:
        text = open_training_text(config, here)
        config = text.config
        core_tasks, chip = open_core(config), here.device.chip
        depth, row = config.depth or USUAL_DEPTH, config.max_seq_len or USUAL_ROW
        if config.minutes is not None:
            depth, row = sizes_for(config, text.corpora, chip)
        folder = run_folder(config.run or f"d{depth}", "base")
        saved = to_continue(folder, config.resume, say=here.say)
        if saved and "steps" in saved.state:  # not a model that was imported: train_stage refuses it
            check_tokenizer(folder / "tokenizer", text)
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
        if config.max_seq_len is None and config.minutes is not None and saved:
            row = saved.state["shape"]["seq_len"]
        elif row < (config.max_seq_len or USUAL_ROW):
            here.say(f"rows of {row} tokens instead of {USUAL_ROW}: there is time for few steps of such long ones")
        config = with_attend(replace(config, depth=depth, max_seq_len=row), saved, "row")
        shape = shape_of(config, text.corpora[0][0].vocab_size)
        learner = build(config, shape, here)
        split, steps = plan_run(config, learner, text.corpora, saved, here.say)
        if (times := passes(text.corpora, steps * split.total)) > 0.95 * MAX_PASSES:
            here.say(
                f"the text is read {times:.1f} times; beyond {MAX_PASSES:.0f} a model tends to learn it by heart and "
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
    if config.tokenizer and not tokenizer.is_dir():
        raise UserError(f"there is no folder {tokenizer}; name that of the tokenizer which prepared the data")
    prepared, first = home() / "data" / "prepared", collectives.world().rank == 0
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
        collectives.barrier()
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
        tokens = config.num_iterations * (config.total_batch_size or batch_for(tokens, config.max_seq_len or USUAL_ROW))
    if tokens <= EMBEDDED_PASSES * EMBEDDED_TOKENS:
        return
    shards = min(MAX_SHARDS, math.ceil(horizon_of(config, shape_of(config, USUAL_VOCAB)) / SHARD_TOKENS))
    raise UserError(
        f"no --data given, and this run would read the small embedded corpus {tokens / EMBEDDED_TOKENS:,.0f} times; "
        f"get real text: `ascendchat data fetch climbmix --shards {shards}`, `ascendchat tokenizer train "
        f"{home() / 'data' / 'climbmix'}`, `ascendchat data prepare climbmix`, then run this again; or say --data "
        "toyworld if you mean it"
    )
