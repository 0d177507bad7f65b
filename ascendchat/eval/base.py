"""`ascendchat eval base --run NAME`: bits per byte and CORE of a base model; also under `ascendchat launch`.

Prints a table, and adds what it found to eval_STEP.json beside the checkpoint. Bits per byte do not depend on the
tokenizer: the nats of all text tokens, in bits, over the bytes they stand for; special tokens count in neither sum.
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
from ascendchat.checkpoint import Checkpoint
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
    model, tokenizer = loaded.model, loaded.tokenizer
    found = Checkpoint(loaded.folder, loaded.state)
    about = {"checkpoint": str(found.folder), "model": found.fingerprint, "step": found.step}
    result: dict[str, Any] = dict(about)
    corpora = corpora_of(config, loaded) if "bpb" in config.eval else []
    bundle = Path(config.bundle or home() / "data" / "core").absolute()
    tasks = load_bundle(bundle) if "core" in config.eval else []
    core.check(tasks)
    shape = model.shape
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention)
    say(reason)
    limit = config.max_seq_len or shape.seq_len
    scorer = ModelScorer(model, kernel, place, max_tokens=config.tokens_per_batch, max_len=limit, pin=device.pin)
    settings = {
        "chip": device.chip.name, "world": world.size, "dtype": str(device.dtype).removeprefix("torch."),
        "attention": kernel.name, "max_seq_len": limit,
    }  # fmt: skip
    say(f"{loaded.folder}: {shape.total_parameters / 1e6:.1f} M parameters, rows of {limit} tokens")
    if corpora:
        token_bytes = np.asarray(tokenizer.token_bytes(), dtype=np.int64)
        result["bpb"] = {
            str(c.folder): _corpus(scorer, c, limit, config.eval_tokens, token_bytes, say) | {"settings": settings}
            for c in corpora
        }
        store(found, result, say)  # now: CORE takes long
    if tasks:
        say(f"  {'task':<34}{'accuracy':>8}{'centred':>9}{'rows':>7}")
        report = core.evaluate(tasks, scorer, tokenizer, max_len=limit, max_per_task=most, say=say)
        for text in core.summary(report):
            say(text)
        result["core"] = {**report.to_dict(), "settings": {**settings, "bundle": str(bundle)}}
        correct = {task.label: "".join("01"[right] for right in task.correct) for task in report.tasks}
        store(found, {**about, "core": result["core"], "correct": correct}, say)
    if world.rank == 0 and config.json:
        print(json.dumps(result))
    dist.teardown()
    return 0


def store(found: Checkpoint, new: dict[str, Any], say: Callable[[str], None]) -> None:
    """Add results to the file beside the checkpoint."""
    if dist.world().rank:
        return
    path = found.folder.parent / f"eval_{found.step:06d}.json"
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        old = None
    both, kept = merged(old if isinstance(old, dict) else {}, new)
    for text in kept:
        say(f"{path} keeps {text}")
    write_atomic(path, json.dumps(both, indent=1))


def merged(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Results of the same weights stand side by side, each with its settings; other weights start anew.

    What was taken over less never replaces what was taken over more; the second value says what was kept so."""
    if old.get("model") != new["model"]:
        return new, []
    both, kept = {**old, **new}, []
    if "bpb" in old and "bpb" in new:
        both["bpb"] = {**old["bpb"], **new["bpb"]}
        for folder, now in new["bpb"].items():
            was = old["bpb"].get(folder, now)
            if was["corpus"] == now["corpus"] and was["tokens_asked"] > now["tokens_asked"]:
                both["bpb"][folder] = was
                kept.append(f"the bits per byte of {folder} found over more tokens ({was['bits_per_byte']:.4f})")
    if "core" in old and "core" in new and _reach(old["core"]) > _reach(new["core"]):
        both.update(core=old["core"], correct=old["correct"])
        kept.append(f"the CORE found before over {_rows(old['core'])}, not this one over {_rows(new['core'])}")
    return both, kept


def _reach(found: dict[str, Any]) -> float:
    """How many rows of each task a CORE result may cover; without bound if no task was cut."""
    if not found["tasks"]:
        return 0.0
    cut = any(task["rows"] < task["rows_in_file"] for task in found["tasks"])
    return float(found["max_per_task"]) if cut else math.inf


def _rows(found: dict[str, Any]) -> str:
    reach = _reach(found)
    return "all rows" if reach == math.inf else f"the first {reach:.0f} rows of each task" if reach else "no task"


def _corpus(
    scorer: Scorer, corpus: Corpus, seq_len: int, most: int, token_bytes: np.ndarray, say: Callable[[str], None]
) -> dict[str, Any]:
    rows = evaluation_rows(corpus, seq_len)
    cut = most and corpus.tokens > most
    bits = bits_per_byte(scorer, itertools.islice(rows, max(1, most // seq_len)) if cut else rows, token_bytes)
    note = f", the first of {corpus.tokens}" if cut else ""
    say(f"bits per byte {bits.bits_per_byte:.4f} on {corpus.folder} ({bits.tokens} tokens{note}; {bits.seconds:.1f} s)")
    asked = most if cut else corpus.tokens
    return {**asdict(bits), "corpus": corpus.fingerprint, "tokens_in_split": corpus.tokens, "tokens_asked": asked}
