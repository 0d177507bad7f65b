"""On real text: bytes per token beside GPT-2 and Qwen2.5, the trainer's cost and the encoder's cost."""

from __future__ import annotations

import itertools
import json
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rustbpe
import tiktoken

from ascendchat.config import parse
from ascendchat.config.data import TokenizerEvalConfig
from ascendchat.data.read import read_documents
from ascendchat.data.tokenizer.commands import eval_command, first_chars, interleave
from ascendchat.data.tokenizer.tokenizer import PATTERN, Tokenizer, train_tokenizer

pytestmark = pytest.mark.slow
MIX_CHARS = 3_000_000  # of 200 million: enough for the targets, and short


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Processor time of all threads: the machine may be busy with something else."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def text_of(real_data: Path, language: str, part: str) -> Iterator[str]:
    return read_documents([real_data / "pretrain" / language / f"wiki_{part}.jsonl.xz"])


@pytest.fixture(scope="module")
def half_half(real_data: Path) -> Tokenizer:
    """The usual vocabulary, learnt from as much English as Chinese."""
    streams = [text_of(real_data, language, "train_00") for language in ("en", "zh")]
    return train_tokenizer(first_chars(interleave(streams, [1.0, 1.0]), MIX_CHARS))


def test_a_half_half_vocabulary_serves_both_languages(
    half_half: Tokenizer, real_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half_half.save(tmp_path / "mix")
    files = [real_data / "pretrain" / language / "wiki_val.jsonl.xz" for language in ("en", "zh")]
    others = [f"{name}={real_data / 'tokenizers' / name}" for name in ("gpt2", "qwen2_5")]
    argv = [*map(str, files), "--tokenizer", str(tmp_path / "mix"), "--against", ",".join(others), "--json"]
    eval_command(parse(TokenizerEvalConfig, [*argv, "--max-chars", "200000"]))
    result = json.loads(capsys.readouterr().out)
    english, chinese = (row["bytes_per_token"] for row in result["sources"])
    assert result["vocab_size"]["ours"] == 32768
    assert chinese["ours"] >= 0.85 * chinese["qwen2_5"]
    assert chinese["ours"] >= 2 * chinese["gpt2"]
    assert english["ours"] >= 0.90 * english["gpt2"]


def test_training_costs_little_more_than_the_rust_trainer_alone(real_data: Path) -> None:
    texts = list(first_chars(text_of(real_data, "en", "train_00"), 2_000_000))

    def alone() -> None:
        rustbpe.Tokenizer().train_from_iterator(iter(texts), 2048, pattern=PATTERN)

    ours = theirs = math.inf
    for _ in range(3):  # the least of up to three, for a busy machine
        ours = min(ours, cpu_seconds(lambda: train_tokenizer(iter(texts), 2048)))
        theirs = min(theirs, cpu_seconds(alone))
        if ours <= 1.4 * theirs:
            break
    assert ours <= 1.4 * theirs, (ours, theirs)  # what is more goes into recovering the merges


def test_encoding_is_as_fast_as_tiktoken_alone(half_half: Tokenizer, real_data: Path) -> None:
    texts = list(itertools.islice(text_of(real_data, "en", "val"), 30))
    texts += itertools.islice(text_of(real_data, "zh", "val"), 30)
    ranks = {token: number for number, token in enumerate(half_half.tokens)}
    raw = tiktoken.Encoding("raw", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    ours = theirs = 0.0
    for start in range(0, len(texts), 10):  # the least of several short turns: what other processes disturb least
        part = texts[start : start + 10]
        turns = [
            (
                cpu_seconds(lambda: [half_half.encode(text) for text in part]),  # noqa: B023 (called at once)
                cpu_seconds(lambda: [raw.encode_ordinary(text) for text in part]),  # noqa: B023
            )
            for _ in range(7)
        ]
        ours += min(turn[0] for turn in turns)
        theirs += min(turn[1] for turn in turns)
    assert ours <= 1.35 * theirs, (ours, theirs)  # 1.006 and 1.016 when the machine is quiet, 1.21 beside a busy one
