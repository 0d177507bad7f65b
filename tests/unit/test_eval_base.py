"""`ascendchat eval base`: bits per byte, and the command from a checkpoint on disk to its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_reference import run as run_reference
from test_core import CPU, KERNEL, Hashed, Letters, model, write_bundle  # noqa: F401 (model is a fixture)

from ascendchat.checkpoint import Writer
from ascendchat.config import UserError, home
from ascendchat.config.data import DataPrepareConfig
from ascendchat.config.eval import EvalBaseConfig
from ascendchat.data import prepare
from ascendchat.data.corpus import IGNORE
from ascendchat.data.tokenizer import Tokenizer, train
from ascendchat.eval.base import bits_per_byte, run, text_rows
from ascendchat.eval.bundle import load_bundle
from ascendchat.eval.scorer import Example, ModelScorer, Pending, Scored
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import token_nats
from ascendchat.plan.shape import Shape
from ascendchat.record import run_folder

TEXTS = ["the cat sat on the mat. " * 30, "one", "", "two old dogs ran\nand ran " * 7]


class Uniform:
    """Gives every token of a vocabulary of 41 the same probability."""

    def submit(self, examples: Sequence[Example]) -> Pending:
        lengths = [len(e.rows[0]) - e.starts[0] for e in examples]
        return lambda: [[Scored(np.full(n, math.log(41), np.float32), np.zeros(n, bool))] for n in lengths]


def test_a_uniform_model_costs_log2_of_the_vocabulary_per_token() -> None:
    token_bytes = np.ones(41, dtype=np.int64)  # one token per character, one byte each
    bits = bits_per_byte(Uniform(), text_rows(Letters(), TEXTS, 32), token_bytes)
    assert bits.tokens == bits.bytes == sum(map(len, TEXTS))
    assert bits.bits_per_byte == pytest.approx(math.log2(41), rel=1e-6)
    wide = bits_per_byte(Uniform(), text_rows(Letters(), TEXTS, 32), 3 * token_bytes)
    assert wide.bits_per_byte == pytest.approx(math.log2(41) * wide.tokens / wide.bytes, rel=1e-6)


@pytest.mark.parametrize("seq_len", [7, 64, 5000])
def test_every_token_of_every_text_is_a_target_once(seq_len: int) -> None:
    rows = list(text_rows(Hashed(), TEXTS, seq_len))
    assert all(len(inputs) == len(targets) <= seq_len for inputs, targets in rows)
    assert [int(t) for _, targets in rows for t in targets] == [t for text in TEXTS for t in Hashed().encode(text)]


def test_the_model_is_scored_as_its_loss_says(model: GPT) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    rows: list[Any] = []
    for _ in range(150):  # more than the scorer is given at once
        stream = rng.integers(0, 41, 25)
        rows.append((stream[:-1], np.where(rng.random(24) < 0.3, IGNORE, stream[1:])))
    rows.append((np.zeros(24, np.int64), np.full(24, IGNORE)))  # nothing to score
    token_bytes = rng.integers(1, 9, 41)
    token_bytes[[5, 40]] = 0  # specials
    inputs, targets = (torch.tensor(np.stack(part)) for part in zip(*rows))
    with torch.no_grad():
        nats = token_nats(model(inputs, dense(model, KERNEL)), model.head, targets, 41)
    counted = (targets != IGNORE) & (torch.tensor(token_bytes)[targets.clamp(min=0)] > 0)
    expected_bytes = int(torch.tensor(token_bytes)[targets[counted]].sum())
    bits = bits_per_byte(ModelScorer(model, KERNEL, CPU, max_tokens=500), rows, token_bytes)
    assert (bits.tokens, bits.bytes) == (int(counted.sum()), expected_bytes)
    assert bits.nats == pytest.approx(float(nats[counted].double().sum()), rel=1e-6)
    assert bits.bits_per_byte == pytest.approx(bits.nats / math.log(2) / expected_bytes)


DOCUMENTS = ["the cat sat on the red mat and saw one old dog.\n" * 12, "two big dogs ran.", "猫坐在垫子上。" * 9]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(DOCUMENTS, 300)


@pytest.fixture
def trained(tokenizer: Tokenizer) -> GPT:
    """A run named `tiny` in $ASCENDCHAT_HOME: tokenizer, CORE bundle, and a checkpoint of the model returned."""
    tokenizer.save(home() / "tokenizer")
    write_bundle(home() / "data" / "core")
    tiny = GPT(Shape.from_depth(2, vocab=tokenizer.vocab_size, dim=32, head_dim=16, seq_len=256))
    tiny.initialise(seed=3)
    state = {"shape": tiny.shape.to_dict(), "tokenizer": tokenizer.fingerprint}
    writer = Writer(run_folder("tiny", "base"), say=lambda text: None)
    writer.save(7, model=dict(tiny.state_dict()), shards={}, state=state)
    writer.wait()
    return tiny


CONFIG = EvalBaseConfig(device_type="cpu", run="tiny", json=True)


def test_the_command_scores_a_checkpoint_and_leaves_its_results_beside_it(
    trained: GPT, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dataclasses.replace(CONFIG, eval=("core",))) == 0
    printed = json.loads(capsys.readouterr().out)
    stored = json.loads((run_folder("tiny", "base") / "eval_000007.json").read_text())
    assert {**printed, "correct": stored["correct"]} == stored
    tasks = load_bundle(home() / "data" / "core")
    expected = run_reference(trained, dense(trained, KERNEL), tokenizer, tasks, CPU)
    for label, judged in expected.items():
        assert stored["correct"][label] == "".join(str(int(one.correct)) for one in judged), label
    assert (printed["core"]["core_tasks"], list(printed["core"]["missing"])) == (3, ["gone"])
    assert printed["core"]["examples_per_second"] > 0


@pytest.mark.slow
def test_the_command_measures_bits_per_byte_of_a_prepared_corpus(
    trained: GPT, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, others, out = tmp_path / "docs.jsonl", tmp_path / "others.jsonl", str(tmp_path / "prepared")
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    others.write_text(json.dumps({"text": "an unrelated document"}) + "\n")
    prepare.run(DataPrepareConfig((str(others),), val_source=(str(text),), out=out, workers=1))
    capsys.readouterr()
    assert run(dataclasses.replace(CONFIG, data=(out,), eval=("bpb",))) == 0
    bits = json.loads(capsys.readouterr().out)["bpb"][out]
    assert bits["bytes"] == sum(len(document.encode()) for document in DOCUMENTS)
    near = math.log(tokenizer.vocab_size) / math.log(2) * bits["tokens"] / bits["bytes"]  # untrained: nearly uniform
    assert bits["bits_per_byte"] == pytest.approx(near, rel=0.01)


def test_without_a_name_the_run_saved_last_is_scored(trained: GPT, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(dataclasses.replace(CONFIG, run="", eval=("core",), max_per_task=8, json=False)) == 0
    shown = capsys.readouterr().out
    assert "runs/tiny/base/step_000007" in shown
    assert "over the 3 complete of 5 tasks, first 8 rows of each" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "nobody"}, "no checkpoint in .*nobody"),
        ({"eval": ("bpb",)}, "--data DIR"),
        ({"bundle": "nowhere"}, "ascendchat data fetch core"),
        ({"max_per_task": 0}, "at least 1"),
    ],
)
def test_what_is_missing_is_said_with_the_next_step(trained: GPT, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(dataclasses.replace(CONFIG, **{"eval": ("core",), **changes}))


def test_a_model_is_never_scored_with_another_tokenizer(trained: GPT) -> None:
    train(["entirely different words"] * 5, 290).save(home() / "tokenizer")
    with pytest.raises(UserError, match="was not trained with the tokenizer"):
        run(dataclasses.replace(CONFIG, eval=("core",)))
