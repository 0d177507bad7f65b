"""`ascendchat eval base --run NAME`: bits per byte and CORE of a base model; also under `ascendchat launch`.

Prints a table, and adds rows to runs/NAME/results.jsonl: one per corpus and per task of CORE, as each ends.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ascendchat.config.generate import EvalBaseConfig
from ascendchat.data.corpus import Corpus, open_corpora
from ascendchat.device import pick
from ascendchat.engine.cache import Narrowed, kv_cache_dtype
from ascendchat.engine.open import open_for_generation
from ascendchat.errors import UserError, home
from ascendchat.eval.bits import corpus_bits
from ascendchat.eval.core_benchmark import CoreTask, check_rows, core_lines, load_bundle, score_tasks
from ascendchat.eval.scorer import ModelScorer, Scorer, row_length
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.open import OpenedModel
from ascendchat.nn.attention import Attention
from ascendchat.parallel.context import joined
from ascendchat.runs.results import NewResults


def corpora_of(config: EvalBaseConfig, opened: OpenedModel) -> list[Corpus]:
    """The validation splits to score, checked against the model's tokenizer."""
    data = config.data or tuple(opened.source.settings.get("data") or ())
    if not data:
        raise UserError(
            "bits per byte need a corpus: --data DIR (as `ascendchat data prepare` wrote it), or --eval core"
        )
    corpora = [corpus for corpus, _ in open_corpora(data, split="val")]
    for corpus in corpora:
        if opened.tokenizer.fingerprint != corpus.tokenizer:
            if isinstance(opened.model, CausalLM):
                raise UserError(
                    f"{corpus.name} was not prepared with this model's tokenizer, and corpora are prepared with ours "
                    "only; score a Hugging Face model with --eval core"
                )
            raise UserError(f"{corpus.name} was not prepared with this model's tokenizer; prepare it again with it")
    return corpora


def run(config: EvalBaseConfig) -> int:
    """Run `ascendchat eval base`."""
    max_per_task = None if config.max_per_task == -1 else config.max_per_task
    with joined(pick(config.device_type), sys.stderr if config.json else None) as here:
        opened = open_for_generation(here, config, "base", config.max_seq_len)
        if (dtype := kv_cache_dtype(config.kv_cache_dtype, here.device)) is not None:
            opened = replace(opened, kernel=cast(Attention, Narrowed(opened.kernel, dtype)))
        corpora = corpora_of(config, opened) if "bpb" in config.eval else []
        bundle = Path(config.bundle or home() / "data" / "core").absolute()
        tasks = load_bundle(bundle) if "core" in config.eval else []
        check_rows(tasks)
        here.say(opened.why_kernel)
        result = score_model(config, max_per_task, opened, corpora, tasks, bundle)
        if here.main and config.json:
            print(json.dumps(result))
    return 0


def score_model(
    config: EvalBaseConfig,
    max_per_task: int | None,
    opened: OpenedModel,
    corpora: Sequence[Corpus],
    tasks: Sequence[CoreTask],
    bundle: Path,
) -> dict[str, Any]:
    """Compute bits per byte of the corpora and CORE of the tasks; results are stored as each ends."""
    here, model, tokenizer, say = opened.here, opened.model, opened.tokenizer, opened.here.say
    limit = row_length("--max-seq-len", config.max_seq_len, model.shape.seq_len)
    tokens, pin = config.tokens_per_batch, here.device.pin
    # attention was restricted to the own document in training
    bos = tokenizer.bos if opened.source.settings.get("attend") == "document" else None
    scorer = ModelScorer(model, opened.kernel, here.place, max_tokens=tokens, max_len=limit, pin=pin, bos=bos)
    result: dict[str, Any] = dict(opened.identity)
    folder, machine = opened.source.folder, opened.machine
    settings: dict[str, Any] = {"max_seq_len": limit}
    if config.kv_cache_dtype != "auto":  # rows that are older than the flag have no such entry
        settings["kv_cache_dtype"] = config.kv_cache_dtype
    say(f"{folder}: {model.shape.total_parameters / 1e6:.1f} M parameters, rows of {limit} tokens")
    common = {**opened.identity, **machine, "settings": settings}
    new = {
        name: NewResults(opened.source.results_folder, {"evaluation": name, **common}, here.main)
        for name in config.eval
    }
    token_bytes = np.asarray(tokenizer.token_bytes(), dtype=np.int64)
    for corpus in corpora:
        name, bits = corpus.name, _corpus(scorer, corpus, limit, config.eval_tokens, token_bytes, say)
        new["bpb"].add(name, bits["tokens_asked"], bits["tokens_in_split"], bits, source=None)
        result.setdefault("bpb", {})[name] = bits | {"settings": machine | settings}
    if tasks:
        say(f"  {'task':<34}{'accuracy':>8}{'centred':>9}{'rows':>7}")
        done = functools.partial(new["core"].add, source=str(bundle))
        report = score_tasks(tasks, scorer, tokenizer, max_len=limit, max_per_task=max_per_task, say=say, done=done)
        for text in core_lines(report):
            say(text)
        result["core"] = {**report.to_dict(), "settings": machine | settings | {"bundle": str(bundle)}}
    for text in filter(None, (each.better_earlier() for each in new.values())):
        say(text)
    return result


def _corpus(
    scorer: Scorer, corpus: Corpus, seq_len: int, max_tokens: int, token_bytes: np.ndarray, say: Callable[[str], None]
) -> dict[str, Any]:
    """Bits per byte of the first `max_tokens` tokens (0: all), as a row of results has them."""
    bits = corpus_bits(scorer, corpus, seq_len, max_tokens, token_bytes)
    cut = max_tokens and corpus.tokens > max_tokens
    note = f", the first of {corpus.tokens}" if cut else ""
    say(f"bits per byte {bits.bits_per_byte:.4f} on {corpus.name} ({bits.tokens} tokens{note}; {bits.seconds:.1f} s)")
    requested = max_tokens if cut else corpus.tokens
    return {**asdict(bits), "corpus": corpus.fingerprint, "tokens_in_split": corpus.tokens, "tokens_asked": requested}
