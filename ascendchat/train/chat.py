"""Mid-training and SFT: `ascendchat mid --run demo`, `ascendchat sft --run demo`. Conversations, loss on the replies.

Both start from the last checkpoint of an earlier stage and are Stages of the one loop; they differ in their defaults.
tasks/chat_mixture.py says what --data may hold.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ascendchat.checkpoint import Checkpoint, to_continue
from ascendchat.config.train import ChatTrainConfig, MidConfig, SftConfig, StageName
from ascendchat.data.chat.dataset_info import listed_data
from ascendchat.data.chat.preview import colours, preview_mixture
from ascendchat.data.chat.render import render_prompt
from ascendchat.data.mixture import MixtureLoader, absolute
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Sampling, prompt_room
from ascendchat.models.open import ModelSource
from ascendchat.runs.run import run_folder
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split, batch_for
from ascendchat.sizes.schedule import Curve
from ascendchat.sizes.shape import Shape
from ascendchat.tasks.by_name import knows
from ascendchat.tasks.chat_mixture import ChatMixture, default_data, open_chat_mixture
from ascendchat.tasks.contamination import report_overlaps
from ascendchat.train.evaluation import SAMPLE_TOKENS, Evaluation, continue_prompts, reply_loss, text_bits
from ascendchat.train.model import TrainModel, build, optimizer_for
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
from ascendchat.train.run import train_stage, training_context, with_attend
from ascendchat.train.stage import Optimizer, updates_of
from ascendchat.train.start import initial_checkpoint, only_weights

WARMDOWN = {"mid": 1.0, "sft": 0.5}  # share of the run that lowers the learning rate
TEXT_TOKENS = 1_000_000  # of each text's validation split
QUESTIONS = ("Who are you?", "What is 17 + 25?", "你是谁？")


def chat_stage(
    name: str,
    train_model: TrainModel,
    split: Split,
    steps: int,
    mixture: ChatMixture,
    tokenizer: Tokenizer,
    config: ChatTrainConfig,
    origin: ModelSource,
) -> RowStage:
    """Put together the stage of cross-entropy on the assistant's tokens of packed conversations."""
    usual = Curve(warmup=min(20, steps // 10), warmdown=WARMDOWN.get(name, 1.0), final=0.0)
    lrs, lr_curve = learning_rates(config, train_model.model.shape, split.total), curve(config, steps, usual)

    def rates(step: int) -> dict[str, float]:
        momentum = schedule.momentum(step, steps, values=(0.85, 0.95, 0.95), ramp=300, warmdown=lr_curve.warmdown)
        return {**pretraining_rates(step, steps=steps, curve=lr_curve), "momentum": momentum}

    return RowStage(
        train_model,
        split,
        steps,
        batches=partial(MixtureLoader, mixture.sources),
        optimizer=optimizer_for(train_model, lrs),
        rates=rates,
        identity=chat_identity(name, train_model, split, steps, mixture, tokenizer, config, origin),
        facts=row_facts(train_model, split, lrs, lr_curve),
        evaluation=chat_evaluation(train_model, tokenizer, mixture),
    )


def chat_identity(
    name: str,
    train_model: TrainModel,
    split: Split,
    steps: int,
    mixture: ChatMixture,
    tokenizer: Tokenizer,
    config: ChatTrainConfig,
    origin: ModelSource,
) -> dict[str, Any]:
    """Stage.identity of training on conversations."""
    start = f"{origin.state.get('stage')} step {origin.step} {origin.fingerprint}"
    rows = row_identity(train_model, tokenizer, split, steps, config.seed)
    return {"stage": name, **rows, "data": mixture.facts, "start": start}


def chat_evaluation(train_model: TrainModel, tokenizer: Tokenizer, mixture: ChatMixture) -> Evaluation:
    """Validate by the loss of held-out replies, and by bits per byte of the texts that have a validation split."""

    def evaluate(rows: int) -> dict[str, float]:
        replies = reply_loss(train_model, mixture.validation, rows)
        return {**replies, **text_bits(train_model, tokenizer, mixture.texts, TEXT_TOKENS, rows)}

    return Evaluation(evaluate, sample=partial(samples, train_model, tokenizer))


def samples(train_model: TrainModel, tokenizer: Tokenizer) -> list[str]:
    """Greedy answers to QUESTIONS."""
    room = prompt_room(train_model.model.shape.seq_len, SAMPLE_TOKENS)
    prompts = [render_prompt(tokenizer, [{"role": "user", "content": question}], room) for question in QUESTIONS]
    sampling = Sampling(max_tokens=SAMPLE_TOKENS, temperature=0.0)
    texts = continue_prompts(train_model, tokenizer, prompts, sampling)
    return [f"{question} | {text}" for question, text in zip(QUESTIONS, texts)]


def begin_from(origin: Checkpoint, optimizer: Optimizer, warm: bool) -> None:
    """Take the weights of the model that a stage starts from, and with `warm` the moments of its optimizer."""
    read = origin.reader()
    optimizer.load(read if warm else only_weights(read), updates_of(origin) if warm else 0)


def batch_and_steps(config: ChatTrainConfig, shape: Shape, train_model: TrainModel, rows: int) -> tuple[Split, int]:
    """Batch, and steps for `epochs` over all rows."""
    total = config.total_batch_size or batch_for(int(rows * shape.seq_len * config.epochs), shape.seq_len)
    if config.target_examples_per_step:
        total = config.target_examples_per_step * shape.seq_len
    flag = total_flag(config.total_batch_size, config.target_examples_per_step)
    split = share_out(config, shape, train_model.device, total, flag=flag, packaged=train_model.packaged)
    per_step = split.devices * split.rows * split.accumulation
    return split, config.num_iterations or max(1, math.ceil(rows * config.epochs / per_step))


def run_stage(config: MidConfig | SftConfig, name: StageName) -> int:
    """Train one stage; `ascendchat mid` and `ascendchat sft` are this."""
    with training_context(config) as here:
        origin = initial_checkpoint(config, name, here.say)
        here.say(f"starting from {origin.folder}")
        shape = origin.shape
        folder = Path(config.tokenizer or origin.tokenizer_folder).resolve()
        listed = listed_data(config.data, config.dataset_dir, knows)
        data = absolute(listed or default_data(name, origin.settings.get("data") or (), config.source))
        config = replace(config, tokenizer=str(folder), data=data)  # what later commands look up
        tokenizer = origin.load_tokenizer(folder)
        if config.max_seq_len and config.max_seq_len != shape.seq_len:
            shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})
        seed, source, find, say = config.seed, config.source, here.main, here.say
        run = run_folder(config.run or origin.folder.parent.parent.name, name)
        saved = to_continue(run, config.resume, say=say)
        config = with_attend(config, saved, "document")
        mixture = open_chat_mixture(
            data, name, tokenizer, shape.seq_len, seed=seed, source=source, find_overlaps=find, say=say
        )
        if config.preview:
            for text in preview_mixture(data, mixture.sources, tokenizer, config.preview, colours(sys.stdout)):
                say(text)
            return 0
        train_model = build(config, shape, here)  # before the batch is planned: it knows what is kept
        split, steps = batch_and_steps(config, shape, train_model, mixture.per_epoch)
        stage = chat_stage(name, train_model, split, steps, mixture, tokenizer, config, origin)
        if not saved:
            begin_from(origin, stage.optimizer, config.load_optimizer)

        def add_files(run: Path) -> None:
            tokenizer.save(run / "tokenizer")  # a model without its tokenizer is lost
            report_overlaps(mixture.overlaps, run, say)

        facts = {**stage.facts, "start": str(origin.folder)}
        return train_stage(stage, here, config, run, saved, title=name, facts=facts, add_files=add_files)


# `ascendchat mid --run demo`: teach a base model the form of conversations, tools and choices (train/chat.py).


def run_mid(config: MidConfig) -> int:
    """The command."""
    return run_stage(config, "mid")


# `ascendchat sft --run demo`: supervised fine-tuning of a mid-trained (or base) model on conversations.


def run_sft(config: SftConfig) -> int:
    """The command."""
    return run_stage(config, "sft")
