"""Evaluation between steps of training: bits per byte, loss of held-out replies, CORE, samples. rows.py calls it.

evaluation = Evaluation(partial(text_bits, train_model, tokenizer, corpora, most), sample=...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ascendchat.data.corpus import Corpus
from ascendchat.data.mixture import MixtureLoader, RowSource
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Generator, Request, Sampling
from ascendchat.eval.bits import corpus_bits
from ascendchat.eval.core_benchmark import CoreTask, score_tasks
from ascendchat.eval.scorer import MAX_TOKENS, ModelScorer
from ascendchat.nn import IGNORE
from ascendchat.parallel import collectives
from ascendchat.train.model import TrainModel

SAMPLE_TOKENS = 24


def _no_metrics(rows: int) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Evaluation:
    """Functions that validate a model, of the rows in a device batch."""

    evaluate: Callable[[int], dict[str, float]] = _no_metrics
    benchmark: Callable[[int], dict[str, float]] = _no_metrics  # takes longer
    sample: Callable[[], list[str]] = list


def model_scorer(train_model: TrainModel, tokenizer: Tokenizer, rows: int) -> ModelScorer:
    """Scores rows with the model as it is now. Without gradients only a layer or two is held at a time, so it takes
    several micro-batches of `rows` at once."""
    shape = train_model.model.shape
    held = rows * shape.seq_len
    tokens = max(held, min(MAX_TOKENS, held * shape.depth // 2))
    bos = tokenizer.bos if train_model.by_document else None
    return ModelScorer(
        train_model.model, train_model.reader, train_model.place, max_tokens=tokens, pin=train_model.device.pin, bos=bos
    )


def text_bits(
    train_model: TrainModel, tokenizer: Tokenizer, corpora: Sequence[Corpus], most: int, rows: int
) -> dict[str, float]:
    """Bits per byte of each corpus over its first `most` tokens, and their mean first."""
    scorer, seq_len = model_scorer(train_model, tokenizer, rows), train_model.model.shape.seq_len
    sizes = np.asarray(tokenizer.token_bytes(), dtype=np.int64)
    bits = [corpus_bits(scorer, corpus, seq_len, most, sizes).bits_per_byte for corpus in corpora]
    names = distinct_names([corpus.folder for corpus in corpora]) if len(bits) > 1 else []
    mean = {"bpb": sum(bits) / len(bits)} if bits else {}
    return {**mean, **{f"bpb_{name}": bit for name, bit in zip(names, bits)}}


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them all apart: a/wiki, b/wiki."""
    parts = 1
    while parts < max(len(folder.parts) for folder in folders):
        if len({folder.parts[-parts:] for folder in folders}) == len(set(folders)):
            break
        parts += 1
    return ["/".join(folder.parts[-parts:]) for folder in folders]


def reply_loss(train_model: TrainModel, validation: Sequence[RowSource], rows: int) -> dict[str, float]:
    """Mean nats of the targets in held-out conversations, over all ranks; nothing without any."""
    if not validation:
        return {}
    total = torch.zeros(2, device=train_model.place)  # nats, targets
    for source in validation:
        batches = MixtureLoader([(source, 1.0)], source.per_epoch)
        for first, stop, own in collectives.turns(source.per_epoch, rows):
            batch = batches.batch(0, first, stop)
            nats = train_model.nats(batch)
            if own:
                total += torch.stack((nats.sum(), nats.new_tensor((batch.targets != IGNORE).sum())))
    collectives.all_reduce(total, "sum")
    nats_sum, count = total.tolist()
    return {"val_loss": nats_sum / count}


def core_metrics(
    train_model: TrainModel, tokenizer: Tokenizer, tasks: Sequence[CoreTask], most: int | None, rows: int
) -> dict[str, float]:
    """CORE over the complete tasks, and over all of them where some are subsets; `most` rows of each task."""
    scorer, length = model_scorer(train_model, tokenizer, rows), train_model.model.shape.seq_len
    report = score_tasks(tasks, scorer, tokenizer, max_len=length, max_per_task=most, say=lambda text: None)
    whole, every = report.mean(subsets=False), report.mean(subsets=True)
    scores = {"core": whole, "core_with_subsets": None if every == whole else every}
    return {name: score for name, score in scores.items() if score is not None}


def continue_prompts(
    train_model: TrainModel, tokenizer: Tokenizer, prompts: Sequence[list[int]], sampling: Sampling
) -> list[str]:
    """The continuation of each prompt by the model as it is now, in one line."""
    longest = max(map(len, prompts)) + sampling.max_tokens
    engine: Generator = Engine(
        train_model.model,
        train_model.reader,
        tokenizer,
        train_model.device,
        train_model.place,
        slots=len(prompts),
        context=min(longest, train_model.model.shape.seq_len),
        graphs=False,  # a trainer's process cannot capture on every chip
    )
    answers = engine.generate([Request(prompt, sampling) for prompt in prompts])
    return [" ".join(answer.text.split()) for answer in answers]
