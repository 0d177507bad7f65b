"""Pretraining: `ascendchat base --depth 12 --data DIR`, on many devices with `ascendchat launch --devices 8 base ...`.

Reads top to bottom: device, data, shape, batch and horizon, model and optimizer, then the loop of train/loop.py.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ascendchat.checkpoint import to_continue
from ascendchat.config.train import USUAL_DEPTH, USUAL_ROW, BaseConfig
from ascendchat.data import toyworld
from ascendchat.data.corpus import Corpus, TextRows, open_corpora, read_corpus_manifest
from ascendchat.data.mixture import MIXTURE, MixtureLoader, absolute, parse_entry
from ascendchat.data.prepare import TOYWORLD, prepare
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.data.verify import MANIFEST
from ascendchat.engine.request import Sampling, prompt_room
from ascendchat.errors import UserError, home
from ascendchat.eval.core_benchmark import CoreTask, check_rows, load_bundle
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context
from ascendchat.runs.run import run_folder
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split, batch_for
from ascendchat.sizes.schedule import Curve
from ascendchat.train.budget import MAX_PASSES, passes, plan_run, shape_of, sizes_for, token_budget
from ascendchat.train.evaluation import SAMPLE_TOKENS, Evaluation, continue_prompts, core_metrics, text_bits
from ascendchat.train.model import TrainModel, build, optimizer_for
from ascendchat.train.rows import (
    RowStage,
    WeightAveraging,
    curve,
    learning_rates,
    pretraining_rates,
    row_facts,
    row_identity,
    seeder,
)
from ascendchat.train.run import train_stage, training_context, with_attend

MAX_EVAL_TOKENS = 10_000_000
EMBEDDED_VOCAB = 1536  # ids of the tokenizer that is made for the embedded corpus,
EMBEDDED_TOKENS = 826_000  # and the tokens that the corpus has with it
EMBEDDED_PASSES = 60  # over the embedded corpus at most, unless it is asked for by name: depth 4 reads it 51 times
USUAL_VOCAB = 32768  # ids of a tokenizer for the web
MAX_SHARDS, SHARD_TOKENS = 6542, 55_000_000  # files of climbmix, and the tokens of one (about)
PROMPTS = ("", "The capital of", "北京")


class _Text(NamedTuple):
    """Corpora and tokenizer of a base model."""

    config: BaseConfig  # with paths that later commands find from any directory
    corpora: list[tuple[Corpus, float]]
    validation: list[Corpus]
    tokenizer: Tokenizer


def base_stage(
    train_model: TrainModel,
    split: Split,
    steps: int,
    text: _Text,
    config: BaseConfig,
    core_tasks: Sequence[CoreTask] = (),
) -> RowStage:
    """Put together the stage of next-token prediction over packed text."""
    shape, tokenizer, seed = train_model.model.shape, text.tokenizer, config.seed
    lrs, lr_curve = learning_rates(config, shape, split.total), curve(config, steps, Curve())
    optimizer = optimizer_for(train_model, lrs)
    decay = schedule.full_decay(split.total, steps * split.total, config.weight_decay)
    sources = [(TextRows(corpus, split.seq_len, seed), weight) for corpus, weight in text.corpora]
    most_rows = None if config.core_metric_max_per_task == -1 else config.core_metric_max_per_task
    most_tokens = config.eval_tokens or MAX_EVAL_TOKENS
    evaluation = Evaluation(
        evaluate=partial(text_bits, train_model, tokenizer, text.validation, most_tokens),
        benchmark=partial(core_metrics, train_model, tokenizer, core_tasks, most_rows),
        sample=partial(samples, train_model, tokenizer),
    )
    data = [[corpus.fingerprint, weight] for corpus, weight in text.corpora]
    reseed = seeder(train_model, seed)

    def reseed_by_step(step: int, number: int) -> None:
        if number == 0:  # later micro-batches of the step draw on
            reseed(step)

    return RowStage(
        train_model,
        split,
        steps,
        batches=partial(MixtureLoader, sources),
        optimizer=optimizer,
        rates=partial(pretraining_rates, steps=steps, curve=lr_curve, decay=decay),
        identity={"stage": "base", **row_identity(train_model, tokenizer, split, steps, seed), "data": data},
        facts=row_facts(train_model, split, lrs, lr_curve),
        evaluation=evaluation,
        mtp_weights=torch.tensor([schedule.mtp_weight(step, steps) for step in range(steps)], device=train_model.place),
        averaging=WeightAveraging(optimizer, steps),
        reseed=reseed_by_step if config.dropout else None,
    )


def samples(train_model: TrainModel, tokenizer: Tokenizer) -> list[str]:
    """Greedy continuations of PROMPTS."""
    room = prompt_room(train_model.model.shape.seq_len, SAMPLE_TOKENS)
    starts = [[tokenizer.bos, *tokenizer.encode(prompt)][:room] for prompt in PROMPTS]
    plain = Sampling(max_tokens=SAMPLE_TOKENS, temperature=0.0, stop_tokens=(), tools=False)
    return [
        f"{prompt} | {text}" for prompt, text in zip(PROMPTS, continue_prompts(train_model, tokenizer, starts, plain))
    ]


def check_one_length(config: BaseConfig) -> None:
    """Refuse two flags that both say how long the run is."""
    lengths = {"--minutes": config.minutes, "--tokens": config.tokens, "--target-flops": config.target_flops}
    lengths["--steps"] = config.num_iterations
    flags = [flag for flag in lengths if lengths[flag] is not None]
    if len(flags) > 1:
        raise UserError(f"{flags[0]} and {flags[1]} both say how long the run is; give one of them")


def open_training_text(config: BaseConfig, here: Context) -> _Text:
    """Open the corpora of --data and their tokenizer."""
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
    """Refuse to resume with another tokenizer: the default one may have been trained anew since."""
    if own.is_dir() and Tokenizer.load(own).fingerprint != text.tokenizer.fingerprint:
        raise UserError(
            f"{own.parent} was begun with another tokenizer than that of {text.config.tokenizer}; go on with its own "
            f"(--tokenizer {shlex.quote(str(own))}, and --data prepared with it), or begin anew: --resume never"
        )


def open_core(config: BaseConfig) -> list[CoreTask]:
    """Load the tasks for --core-metric-every; missing files are an error at the start."""
    if config.core_metric_every <= 0:
        return []
    bundle = home() / "data" / "core"
    if not bundle.exists():
        raise UserError(f"--core-metric-every: no CORE tasks in {bundle}; get them: ascendchat data fetch core")
    tasks = load_bundle(bundle)
    check_rows(tasks)
    return tasks


def run(config: BaseConfig) -> int:
    """The command."""
    check_one_length(config)
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
            before = saved.settings.get("minutes")
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
        train_model = build(config, shape, here, dropout=config.dropout)
        split, steps = plan_run(config, train_model, text.corpora, saved, here.say)
        if (times := passes(text.corpora, steps * split.total)) > 0.95 * MAX_PASSES:
            here.say(
                f"the text is read {times:.1f} times; beyond {MAX_PASSES:.0f} a model tends to learn it by heart and "
                "to validate worse (so --minutes stops there): more text helps, --dropout 0.1 may"
            )
        stage = base_stage(train_model, split, steps, text, config, core_tasks)
        return train_stage(
            stage,
            here,
            config,
            folder,
            saved,
            title=f"base d{config.depth}",
            facts=stage.facts,
            add_files=lambda folder: text.tokenizer.save(folder / "tokenizer"),  # without it a model is lost
            benchmark_every=config.core_metric_every,
        )


def find_data(config: BaseConfig) -> tuple[list[str], Path]:
    """Find the prepared corpora and their tokenizer. Without --data: those that `data prepare` wrote by default, else
    the embedded corpus, which rank 0 makes once, if the run is small enough for it."""
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
    """Refuse to read the embedded corpus too often: a longer run has to name it, or get real text."""
    if config.minutes is not None:
        return
    tokens = token_budget(config, shape_of(config, EMBEDDED_VOCAB))
    if config.num_iterations is not None:
        tokens = config.num_iterations * (config.total_batch_size or batch_for(tokens, config.max_seq_len or USUAL_ROW))
    if tokens <= EMBEDDED_PASSES * EMBEDDED_TOKENS:
        return
    shards = min(MAX_SHARDS, math.ceil(token_budget(config, shape_of(config, USUAL_VOCAB)) / SHARD_TOKENS))
    raise UserError(
        f"no --data given, and this run would read the small embedded corpus {tokens / EMBEDDED_TOKENS:,.0f} times; "
        f"get real text: `ascendchat data fetch climbmix --shards {shards}`, `ascendchat tokenizer train "
        f"{home() / 'data' / 'climbmix'}`, `ascendchat data prepare climbmix`, then run this again; or say --data "
        "toyworld if you mean it"
    )
