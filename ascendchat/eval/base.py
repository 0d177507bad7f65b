"""`ascendchat eval base --run NAME`: bits per byte and CORE of a base model; also under `ascendchat launch`.

Prints a table, and writes eval_STEP.json beside the checkpoint. Bits per byte do not depend on the tokenizer: the nats
of all text tokens, in bits, over the bytes that they stand for; special tokens count in neither sum.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascendchat import dist
from ascendchat.config import UserError, home
from ascendchat.config.eval import EvalBaseConfig
from ascendchat.data.corpus import IGNORE, Corpus, evaluation_rows, open_mixture
from ascendchat.device import describe, pick
from ascendchat.eval import core
from ascendchat.eval.bundle import load_bundle
from ascendchat.eval.scorer import Example, ModelScorer, Pending, Scorer
from ascendchat.files import write_atomic
from ascendchat.infer.load import Loaded, load
from ascendchat.nn.attention import choose

ROWS_AT_ONCE = 128  # rows handed to the scorer together

Pair = tuple[np.ndarray, np.ndarray]  # inputs (T,), targets (T,), IGNORE where nothing is scored


@dataclass(frozen=True)
class Bits:
    """Bits per byte, and the sums behind it."""

    bits_per_byte: float
    nats: float
    bytes: int
    tokens: int
    seconds: float


def text_rows(tokenizer: core.Encoder, texts: Iterable[str], seq_len: int) -> Iterator[Pair]:
    """Rows of at most `seq_len` tokens; every token of every text is a target exactly once."""
    for text in texts:
        ids = np.array([tokenizer.specials["<|bos|>"], *tokenizer.encode(text)], dtype=np.int64)
        for begin in range(0, len(ids) - 1, seq_len):
            row = ids[begin : begin + seq_len + 1]
            yield row[:-1], row[1:]


def bits_per_byte(scorer: Scorer, rows: Iterable[Pair], token_bytes: np.ndarray) -> Bits:
    """`token_bytes[id]` is the length of a token, 0 for specials. With several ranks each scores its share."""
    began, world = time.perf_counter(), dist.world()
    nats, size, tokens = 0.0, 0, 0

    def add(batch: Sequence[Pair], pending: Pending) -> None:
        nonlocal nats, size, tokens
        for (_, targets), result in zip(batch, pending()):
            scored = result[0].nats.astype(np.float64)
            wanted = targets[: len(scored)]
            lengths = np.where(wanted == IGNORE, 0, token_bytes[np.maximum(wanted, 0)])
            nats += float(scored[lengths > 0].sum())
            size += int(lengths.sum())
            tokens += int((lengths > 0).sum())

    mine = itertools.islice(rows, world.rank, None, world.size)
    before: tuple[Sequence[Pair], Pending] | None = None
    while batch := list(itertools.islice(mine, ROWS_AT_ONCE)):
        current = batch, scorer.submit([_example(*pair) for pair in batch])
        if before:
            add(*before)  # while the device works on the current one
        before = current
    if before:
        add(*before)
    sums = dist.gather_objects((nats, size, tokens))
    nats, size, tokens = (sum(part[i] for part in sums) for i in range(3))
    bits = nats / (math.log(2) * size) if size else math.nan
    return Bits(bits, nats, size, tokens, time.perf_counter() - began)


def _example(inputs: np.ndarray, targets: np.ndarray) -> Example:
    """The row as far as something is scored. A target in the middle is the next input, scored or not."""
    scored = np.flatnonzero(targets != IGNORE)
    end = int(scored[-1]) + 1 if len(scored) else 0
    return Example([np.append(inputs[:end], targets[end - 1 : end])], [1])


def corpora_of(config: EvalBaseConfig, loaded: Loaded) -> list[Corpus]:
    """The validation splits to score, checked against the model's tokenizer."""
    data = config.data or tuple(loaded.settings.get("data") or ())
    if not data:
        raise UserError(
            "bits per byte need a corpus: --data DIR (as `ascendchat data prepare` wrote it), or --eval core"
        )
    corpora = [corpus for corpus, _ in open_mixture(data, split="val")]
    for corpus in corpora:
        if loaded.tokenizer.fingerprint != corpus.tokenizer:
            raise UserError(f"{corpus.folder} was not prepared with this model's tokenizer; prepare it again with it")
    return corpora


def run(config: EvalBaseConfig) -> int:
    """The command."""
    most = None if config.max_per_task == -1 else config.max_per_task
    if config.tokens_per_batch < 1 or config.eval_tokens < 0 or (most is not None and most < 1):
        raise UserError("--tokens-per-batch and --max-per-task must be at least 1, --eval-tokens at least 0")
    device = pick(config.device_type)
    world = dist.init(device)
    place = device.bind(world.local_rank)

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, file=sys.stderr if config.json else sys.stdout, flush=True)

    say(describe(device))
    loaded = load(
        device, place, run=config.run, stage="base", checkpoint=config.checkpoint, tokenizer=config.tokenizer, say=say
    )
    model, tokenizer, step = loaded.model, loaded.tokenizer, int(loaded.state["step"])
    corpora = corpora_of(config, loaded) if "bpb" in config.eval else []
    tasks = (
        load_bundle(Path(config.bundle) if config.bundle else home() / "data" / "core") if "core" in config.eval else []
    )
    shape = model.shape
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention)
    say(reason)
    limit = config.max_seq_len or shape.seq_len
    scorer = ModelScorer(model, kernel, place, max_tokens=config.tokens_per_batch, max_len=limit, pin=device.pin)
    result: dict[str, Any] = {
        "checkpoint": str(loaded.folder), "step": step, "chip": device.chip.name, "world": world.size,
        "dtype": str(device.dtype).removeprefix("torch."), "attention": kernel.name, "max_seq_len": limit,
    }  # fmt: skip
    say(f"{loaded.folder}: {shape.total_parameters / 1e6:.1f} M parameters, rows of {limit} tokens")
    if corpora:
        token_bytes = np.asarray(tokenizer.token_bytes(), dtype=np.int64)
        result["bpb"] = {
            str(c.folder): _corpus(scorer, c, limit, config.eval_tokens, token_bytes, say) for c in corpora
        }
    correct: dict[str, str] = {}
    if tasks:
        say(f"  {'task':<34}{'accuracy':>8}{'centred':>9}{'rows':>7}")
        report = core.evaluate(tasks, scorer, tokenizer, max_len=limit, max_per_task=most, say=say)
        for text in core.summary(report):
            say(text)
        result["core"] = report.to_dict()
        correct = {task.label: "".join("01"[right] for right in task.correct) for task in report.tasks}
    if world.rank == 0:
        write_atomic(
            loaded.folder.parent / f"eval_{step:06d}.json", json.dumps({**result, "correct": correct}, indent=1)
        )
        if config.json:
            print(json.dumps(result))
    dist.teardown()
    return 0


def _corpus(
    scorer: Scorer, corpus: Corpus, seq_len: int, most: int, token_bytes: np.ndarray, say: Callable[[str], None]
) -> dict[str, Any]:
    rows = evaluation_rows(corpus, seq_len)
    cut = most and corpus.tokens > most
    bits = bits_per_byte(scorer, itertools.islice(rows, max(1, most // seq_len)) if cut else rows, token_bytes)
    note = f", the first of {corpus.tokens}" if cut else ""
    say(f"bits per byte {bits.bits_per_byte:.4f} on {corpus.folder} ({bits.tokens} tokens{note}; {bits.seconds:.1f} s)")
    return {**asdict(bits), "tokens_in_split": corpus.tokens}
