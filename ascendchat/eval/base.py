"""`ascendchat eval base --run NAME`: bits per byte and CORE of a base model; also under `ascendchat launch`.

Prints a table, and adds what it found to eval_STEP.json beside the checkpoint.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ascendchat import dist
from ascendchat.checkpoint import Checkpoint
from ascendchat.config import UserError, home
from ascendchat.config.eval import EvalBaseConfig
from ascendchat.data.corpus import Corpus, open_corpora
from ascendchat.device import describe, pick
from ascendchat.eval import core
from ascendchat.eval.bits import corpus_bits
from ascendchat.eval.bundle import load_bundle
from ascendchat.eval.scorer import ModelScorer, Scorer, row_length
from ascendchat.files import write_atomic
from ascendchat.infer.load import Loaded, load
from ascendchat.nn.attention import choose


def corpora_of(config: EvalBaseConfig, loaded: Loaded) -> list[Corpus]:
    """The validation splits to score, checked against the model's tokenizer."""
    data = config.data or tuple(loaded.settings.get("data") or ())
    if not data:
        raise UserError(
            "bits per byte need a corpus: --data DIR (as `ascendchat data prepare` wrote it), or --eval core"
        )
    corpora = [corpus for corpus, _ in open_corpora(data, split="val")]
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
    limit = row_length("--max-seq-len", config.max_seq_len, shape.seq_len)
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
    bits = corpus_bits(scorer, corpus, seq_len, most, token_bytes)
    cut = most and corpus.tokens > most
    note = f", the first of {corpus.tokens}" if cut else ""
    say(f"bits per byte {bits.bits_per_byte:.4f} on {corpus.folder} ({bits.tokens} tokens{note}; {bits.seconds:.1f} s)")
    asked = most if cut else corpus.tokens
    return {**asdict(bits), "corpus": corpus.fingerprint, "tokens_in_split": corpus.tokens, "tokens_asked": asked}
