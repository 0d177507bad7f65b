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
from test_core import CPU, KERNEL, Hashed, Letters, model, text_rows, write_bundle  # noqa: F401 (model is a fixture)

from ascendchat.checkpoint import Writer
from ascendchat.config.data import DataPrepareConfig
from ascendchat.config.generate import EvalBaseConfig
from ascendchat.data import prepare
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.errors import UserError, home
from ascendchat.eval import core_benchmark as core
from ascendchat.eval.base import run
from ascendchat.eval.bits import bits_per_byte
from ascendchat.eval.core_benchmark import CoreTask, load_bundle
from ascendchat.eval.scorer import Example, ModelScorer, Pending, Scored
from ascendchat.nn import IGNORE
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import token_nats
from ascendchat.runs.results import stage_results
from ascendchat.runs.run import run_folder
from ascendchat.sizes.shape import Shape

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
    """Trained on the documents of these tests."""
    return train_tokenizer(DOCUMENTS, 300)


@pytest.fixture
def trained(tokenizer: Tokenizer) -> GPT:
    """A run named `tiny` in $ASCENDCHAT_HOME: tokenizer, CORE bundle, and a checkpoint of the model returned."""
    tokenizer.save(home() / "tokenizer")
    write_bundle(home() / "data" / "core")
    return save(tokenizer, 3)


def save(tokenizer: Tokenizer, seed: int) -> GPT:
    """A model as step 7 of the run `tiny`."""
    tiny = GPT(Shape.from_depth(2, vocab=tokenizer.vocab_size, dim=32, head_dim=16, seq_len=256, window_pattern="SL"))
    tiny.initialise(seed=seed)
    state = {"shape": tiny.shape.to_dict(), "tokenizer": tokenizer.fingerprint}
    writer = Writer(run_folder("tiny", "base"), say=lambda text: None)
    writer.save(7, model=dict(tiny.state_dict()), shards={}, state=state)
    writer.wait()
    return tiny


CONFIG = EvalBaseConfig(device_type="cpu", run="tiny", json=True)


def test_the_command_scores_a_checkpoint_and_leaves_its_results_in_the_run(
    trained: GPT, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(dataclasses.replace(CONFIG, eval=("core",))) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = {row["task"]: row for row in stage_results(run_folder("tiny", "base"), "core")}
    assert all(row["model"] == printed["model"] and row["step"] == 7 for row in rows.values())
    assert rows["gone"]["result"] == {"missing": printed["core"]["missing"]["gone"]}
    for task in printed["core"]["tasks"]:
        found = dict(rows[task["label"]]["result"])
        assert len(found.pop("correct")) == rows[task["label"]]["examined"] == task["rows"]
        assert found == task
    tasks = load_bundle(home() / "data" / "core")
    expected = run_reference(trained, dense(trained, KERNEL), tokenizer, tasks, CPU)
    for label, judged in expected.items():
        assert rows[label]["result"]["correct"] == "".join(str(int(one.correct)) for one in judged), label
    assert (printed["core"]["core_tasks"], list(printed["core"]["missing"])) == (3, ["gone"])
    assert printed["core"]["examples_per_second"] > 0


@pytest.fixture
def prepared(trained: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A corpus whose validation split is DOCUMENTS."""
    text, others, out = tmp_path / "docs.jsonl", tmp_path / "others.jsonl", str(tmp_path / "prepared")
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    others.write_text(json.dumps({"text": "an unrelated document"}) + "\n")
    prepare.run(DataPrepareConfig((str(others),), val_source=(str(text),), out=out, workers=1))
    capsys.readouterr()
    return out


def score(**changes: Any) -> None:
    assert run(dataclasses.replace(CONFIG, **{"eval": ("core",), **changes})) == 0


def rows_of(evaluation: str) -> list[dict[str, Any]]:
    """What the run has of one kind of evaluation, without the task that has no file."""
    return [row for row in stage_results(run_folder("tiny", "base"), evaluation) if row["examined"]]


def test_a_quick_look_says_that_fuller_results_count_and_settings_and_weights_keep_results_apart(
    prepared: str, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which of them count: test_results.py."""
    score(eval=("bpb", "core"), data=(prepared,))
    (bits,) = rows_of("bpb")
    assert (bits["settings"], bits["examined"]) == ({"max_seq_len": 256}, bits["in_task"])
    full = {row["task"]: row["examined"] for row in rows_of("core")}
    capsys.readouterr()
    score(eval=("bpb", "core"), data=(prepared,), max_per_task=8, max_seq_len=128, eval_tokens=300)
    shown = capsys.readouterr()
    assert (rows_of("core")[-1]["settings"], rows_of("core")[-1]["examined"]) == ({"max_seq_len": 128}, 8)
    before = "what was found before with other settings still counts: "
    assert f"{before}{prepared} over {bits['in_task']} of {bits['in_task']} (now 300)\n" in shown.err
    assert f"{before}choice over {full['choice']} of {full['choice']} (now 8), " in shown.err
    assert json.loads(shown.out)["core"]["max_per_task"] == 8  # what this run found is printed nevertheless
    score(kv_cache_dtype="fp8", max_per_task=2)  # fewer than the demonstrations
    assert rows_of("core")[-1]["settings"] == {"max_seq_len": 256, "kv_cache_dtype": "fp8"}
    assert rows_of("core")[-1]["examined"] == 2
    save(tokenizer, 4)  # trained again, to the same step
    score(max_per_task=500)  # a cut that cuts nothing is complete
    again = {row["task"]: row["examined"] for row in rows_of("core") if row["model"] != bits["model"]}
    assert again == full


def test_what_is_scored_is_on_disk_before_the_next_task_begins(
    prepared: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = core.score_task

    def lost(task: CoreTask, *words: Any, **named: Any) -> core.TaskScore:
        if task.label == "lm":
            raise RuntimeError("the machine is gone")
        return real(task, *words, **named)

    monkeypatch.setattr(core, "score_task", lost)
    with pytest.raises(RuntimeError):
        score(eval=("bpb", "core"), data=(prepared,), max_per_task=8)
    labels = [task.label for task in load_bundle(home() / "data" / "core")]
    assert [row["task"] for row in rows_of("core")] == labels[: labels.index("lm")]
    bits = rows_of("bpb")[0]["result"]
    assert bits["bytes"] == sum(len(document.encode()) for document in DOCUMENTS)
    near = math.log2(tokenizer.vocab_size) * bits["tokens"] / bits["bytes"]  # untrained: nearly uniform
    assert bits["bits_per_byte"] == pytest.approx(near, rel=0.01)


def test_a_bundle_with_too_few_rows_is_refused_before_anything_is_computed(
    prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = home() / "data" / "core" / "eval_data" / "words" / "lm.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))
    monkeypatch.setattr(ModelScorer, "submit", lambda *_: pytest.fail("something was computed"))
    with pytest.raises(UserError, match=r"lm shows 2 other rows .* lm\.jsonl holds only 2"):
        run(dataclasses.replace(CONFIG, eval=("bpb", "core"), data=(prepared,)))


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
    ],
)
def test_what_is_missing_is_said_with_the_next_step(trained: GPT, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(dataclasses.replace(CONFIG, **{"eval": ("core",), **changes}))


def test_a_model_is_never_scored_with_another_tokenizer(trained: GPT) -> None:
    train_tokenizer(["entirely different words"] * 5, 290).save(home() / "tokenizer")
    with pytest.raises(UserError, match="was not trained with the tokenizer"):
        run(dataclasses.replace(CONFIG, eval=("core",)))


def test_rows_longer_than_those_the_model_was_trained_with_are_refused(trained: GPT) -> None:
    with pytest.raises(UserError, match="--max-seq-len 257: this model was trained with rows of 256 tokens"):
        run(dataclasses.replace(CONFIG, eval=("core",), max_seq_len=257))
