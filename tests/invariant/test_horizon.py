"""How long `ascendchat base` trains: by the clock, and no longer than its text is worth."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import pytest
import torch
from safetensors.torch import load_file

from ascendchat.checkpoint import to_continue
from ascendchat.chips import Chip, find, this_cpu
from ascendchat.cli import main
from ascendchat.config.train import BaseConfig
from ascendchat.data.corpus import Corpus
from ascendchat.device import pick
from ascendchat.sizes.batch import Split, batch_for
from ascendchat.train import budget, pretrain

SIZES = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 32 --device-batch-size 16 --total-batch-size 512".split()
HORIZONS = ["--tokens", "--target-flops", "--steps"]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of about a thousand tokens."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setattr(budget, "SPEED_SECONDS", 0.2)
    rng = random.Random(0)
    return commands.prepare_texts(tmp_path, [commands.sentence(rng, 40) for _ in range(60)])


def run(words: Path, *more: str) -> None:
    where = ["--data", str(words), "--device-type", "cpu", "--run", "h", "--sample-every", "0"]
    assert main(["base", *SIZES, *where, *more]) == 0


def steps(words: Path) -> int:
    return int((words.parent / "runs" / "h" / "base" / "latest").read_text().strip().removeprefix("step_"))


def test_minutes_follow_the_measured_speed(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(words, "--minutes", "0.001")
    assert 1 <= steps(words) * 512 < 2 * Corpus.open(words).tokens
    assert "the text is read" not in capsys.readouterr().out


def test_a_longer_horizon_that_was_asked_for_is_kept_and_named(words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(words, "--tokens", str(5 * Corpus.open(words).tokens))
    assert re.search(r"the text is read (4\.[6-9]|5\.[0-4]) times", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--minutes 0", "--minutes"),
        ("--weight-decay nan", "--weight-decay"),
        *((f"--minutes 1 {other} 100", f"--minutes and {other} both say how long the run is") for other in HORIZONS),
    ],
)
def test_numbers_that_make_no_sense_or_contradict_each_other_are_refused(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["base", *SIZES, "--device-type", "cpu", *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("given", ["gradient_accumulation_steps", "total_batch_size"])
def test_a_batch_that_was_asked_for_is_the_one_that_was_planned(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """And the one with which the run goes on."""
    asked = {"gradient_accumulation_steps": 4, "total_batch_size": 2**17}[given]
    config = BaseConfig(minutes=5.0, depth=2, **{given: asked})  # type: ignore[arg-type]
    shape, corpora = budget.shape_of(config, 4096), [(SimpleNamespace(tokens=10**7, vocab_size=4096), 1.0)]
    train_model: Any = SimpleNamespace(model=SimpleNamespace(shape=shape), device=pick("cpu"), packaged=[])
    measured: list[Split] = []

    def speed(config: Any, train_model: Any, corpora: Any, split: Split, say: Any) -> int:
        measured.append(split)
        return 1_000_000

    monkeypatch.setattr(budget, "measured_token_budget", speed)
    split, steps = budget.plan_run(config, train_model, corpora, None, print)  # type: ignore[arg-type]
    assert measured == [split]
    assert asked in (split.accumulation, split.total)
    assert steps * split.total == pytest.approx(1_000_000, rel=0.2)
    saved: Any = SimpleNamespace(state={"steps": steps, "total_batch": split.total})
    assert budget.plan_run(config, train_model, corpora, saved, print) == (split, steps)  # type: ignore[arg-type]


def test_time_that_the_text_leaves_over_goes_into_smaller_steps(words: Path) -> None:
    corpora = [(Corpus.open(words), 1.0)]
    text = int(budget.MAX_PASSES * corpora[0][0].tokens)
    assert budget.timed(text // 2, corpora, 1) == (text // 2, batch_for(text // 2))
    tokens, total = budget.timed(int(1.03 * text), corpora, 1)
    assert abs(tokens - text) <= 1
    assert total == batch_for(text)
    tokens, total = budget.timed(3 * text, corpora, 1)
    assert abs(tokens - text) <= 1
    assert total == batch_for(text, min_steps=2000) < batch_for(text)


def test_the_time_of_the_optimizer_is_counted_and_is_a_third_at_most() -> None:
    extra = 700
    corpora: Any = [(SimpleNamespace(tokens=10**10), 1.0)]
    for fits in (300_000, 2_000_000, 50_000_000):
        tokens, total = budget.timed(fits, corpora, 512, extra)
        assert total % 512 == 0
        assert total >= 2 * extra
        assert tokens + tokens / total * extra == pytest.approx(fits, rel=0.15)
        tokens, total = budget.timed(fits, corpora, 512, extra, 1024)
        assert total == 1024
        assert tokens + tokens / total * extra == pytest.approx(fits, rel=0.01)
    text: Any = [(SimpleNamespace(tokens=2_040_000), 1.0)]
    for fits in range(4_000_000, 12_000_000, 500_000):  # the text ends first
        tokens, total = budget.timed(fits, text, 2048, extra)
        assert tokens + tokens / total * extra <= fits
    assert budget.timed(10**9, corpora, 512, 100)[1] == budget.timed(10**9, corpora, 512)[1]


def test_a_timed_run_reads_the_text_twice_at_most_and_goes_on_with_the_batch_it_began_with(
    words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "MIN_STEPS", 10)  # else one row would be the batch, by any rule
    sizes = [*SIZES[:-2], "--data", str(words), "--device-type", "cpu", "--run", "h", "--sample-every", "0"]
    assert main(["base", *sizes, "--minutes", "1000"]) == 0
    assert "the text is read " in capsys.readouterr().out
    begun = steps(words)
    assert 20 <= begun < 40
    monkeypatch.setattr(budget, "measured_token_budget", lambda *_: pytest.fail("measured again"))
    assert main(["base", *sizes, "--minutes", "1000"]) == 0
    assert steps(words) == begun


def test_a_timed_run_goes_on_with_the_rows_it_began_with(
    words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on a machine that would choose other ones."""
    monkeypatch.setattr(budget, "MIN_ROW", 128)
    where = ["--data", str(words), "--device-type", "cpu", "--run", "h", "--sample-every", "0", "--depth", "2"]
    sizes = [*where, "--dim", "32", "--head-dim", "16", "--device-batch-size", "1"]

    def row() -> Any:
        saved = to_continue(words.parent / "runs" / "h" / "base", "auto", say=print)
        return saved.state["shape"]["seq_len"] if saved else None

    assert main(["base", *sizes, "--minutes", "0.0001"]) == 0
    assert row() == 128
    assert "rows of 128 tokens instead of 2048: there is time for few steps" in capsys.readouterr().out
    monkeypatch.setattr(budget, "expected_token_budget", lambda *_: 10**12)
    assert main(["base", *sizes, "--minutes", "0.0001"]) == 0
    assert row() == 128
    assert "rows of" not in capsys.readouterr().out


def test_passes_count_the_corpus_that_is_read_most() -> None:
    corpus: Any = SimpleNamespace(tokens=1000)
    assert budget.passes([(corpus, 1.0)], 2000) == pytest.approx(2.0)
    assert budget.passes([(corpus, 1.0), (corpus, 3.0)], 2000) == pytest.approx(1.5)


def depths(minutes: Sequence[float], chip: Chip, tokens: int, **more: Any) -> list[int]:
    """Of the models that --minutes chooses where the text has so many tokens."""
    corpus = SimpleNamespace(vocab_size=16384, tokens=tokens)
    corpora: Any = [(corpus, 1.0)]
    return [budget.depth_for(BaseConfig(minutes=each, **more), corpora, chip) for each in minutes]


def test_minutes_choose_the_depth() -> None:
    h200, little, much = find("H200"), 50_000_000, 10**10
    assert depths([3, 10], h200, little, fp8=True) == [12, 20]  # that were tried
    short, long = depths([1, 600], h200, little)
    assert budget.MIN_DEPTH <= short < 12
    shape = budget.shape_of(BaseConfig(), 16384, long + 1)
    assert shape.total_parameters > budget.MAX_PARAMETERS * little  # what ends it is the text, not the time
    found = depths([1, 10, 100, 1000], h200, much)
    assert found == sorted(set(found))
    for minutes, depth in zip([1, 10, 100, 1000], found):
        config = BaseConfig(minutes=minutes)
        shape = budget.shape_of(config, 16384, depth)
        deeper = budget.shape_of(config, 16384, depth + 1)
        assert budget.token_budget(config, shape) <= budget.expected_token_budget(config, shape, h200)
        assert budget.token_budget(config, deeper) > budget.expected_token_budget(config, deeper, h200)
    small = replace(h200, memory=2**33)
    assert depths([10**6], small, much)[0] < depths([10**6], h200, much)[0]
    assert depths([0.001], this_cpu(), little) == [budget.MIN_DEPTH]


def test_minutes_choose_rows_of_which_there_is_time_for_many_steps() -> None:
    corpora: Any = [(SimpleNamespace(vocab_size=2048, tokens=2_000_000), 1.0)]

    def rows(minutes: float, chip: Chip, **more: Any) -> int:
        return budget.sizes_for(BaseConfig(minutes=minutes, **more), corpora, chip)[1]

    cpu = replace(this_cpu(), flops=69e9)  # two cores of a Neoverse N1
    found = [rows(minutes, cpu, depth=2) for minutes in (0.1, 1, 4, 15, 60)]
    assert found == [512, 512, 512, 1024, 2048]
    assert rows(4, cpu, max_seq_len=2048) == rows(4, cpu, total_batch_size=2048) == 2048
    assert rows(4, cpu, gradient_accumulation_steps=2) == 2048
    assert rows(4, cpu, depth=4) == 1024  # by more of which the optimizer would have more of the time
    assert rows(60, cpu, depth=6) == rows(3, find("Ascend910B3"), depth=20) == 2048
    assert rows(1, find("H200")) == 2048
    for row, minutes in ((512, 4), (1024, 15)):
        short, long = (budget.shape_of(BaseConfig(max_seq_len=each), 2048, 2) for each in (row, 2 * row))
        times = [budget.expected_token_budget(BaseConfig(minutes=minutes), each, cpu) for each in (short, long)]
        assert times[0] >= budget.MIN_STEPS * budget.FEW_ROWS * row
        assert times[1] < budget.MIN_STEPS * budget.FEW_ROWS * 2 * row


def test_depths_that_other_flags_do_not_allow_are_passed_over() -> None:
    """Depth 5 has 3 heads of 128, which two key-value heads cannot divide among them; depth 2 has one."""
    h200 = find("H200")
    (found,) = depths([10], h200, 10**10, kv_heads=2)
    assert found > 5
    assert budget.shape_of(BaseConfig(kv_heads=2), 16384, found).kv_heads == 2
    assert depths([0.001], this_cpu(), 10**10, kv_heads=2) == [3]
    assert depths([0.001], this_cpu(), 10**10, head_dim=96) == [5]
    pretrain.check_embedded(BaseConfig(minutes=1, head_dim=96))  # which the usual depth does not allow


def test_the_speed_is_measured_with_as_many_rows_as_fit(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def speed(train_model: Any, batch: Any) -> float:
        tried.append(len(batch.inputs))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError
        return 100.0

    monkeypatch.setattr(budget, "measured_speed", speed)
    device: Any = SimpleNamespace(responds=lambda: True, release=lambda: None)
    train_model: Any = SimpleNamespace(place=torch.device("cpu"), model=torch.nn.Linear(1, 1), device=device)
    split, said = Split(1, 8, 1, 32), list[str]()
    tokens = budget.measured_token_budget(
        BaseConfig(minutes=0.5), train_model, [(Corpus.open(words), 1.0)], split, said.append
    )
    assert tried == [8, 4, 2]
    assert tokens == int(100 * 30 * budget.KEPT_SPEED)
    assert len(said) == 2


@pytest.mark.slow
def test_a_run_that_goes_on_in_its_last_tenth_has_the_bits_of_one_that_was_never_stopped(
    words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mean of the last weights has begun when it is stopped."""

    class Killed(BaseException):
        pass

    def after_step(stage: Any, step: int) -> None:
        averaged(stage, step)
        if step == 28:
            raise Killed

    averaged, sizes = (
        pretrain.RowStage.after_step,
        [*SIZES[:-4], "--device-batch-size", "1", "--total-batch-size", "32"],
    )
    where = ["--data", str(words), "--device-type", "cpu", "--sample-every", "0", "--save-every", "1"]
    command = ["base", *sizes, *where, "--num-iterations", "30"]
    assert main([*command, "--run", "whole"]) == 0
    monkeypatch.setattr(pretrain.RowStage, "after_step", after_step)
    with pytest.raises(Killed):
        main([*command, "--run", "cut"])
    monkeypatch.setattr(pretrain.RowStage, "after_step", averaged)
    assert main([*command, "--run", "cut"]) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    whole, cut = (
        load_file(words.parent / f"runs/{name}/base/step_000030/model.safetensors") for name in ("whole", "cut")
    )
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


@pytest.mark.slow
def test_a_depth_that_was_chosen_is_said_and_kept_and_no_other_run_is_taken_over(
    words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run has the name d2 where nobody named it, and may have days to go."""
    where = ["--data", str(words), "--device-type", "cpu", "--sample-every", "0", "--max-seq-len", "32"]
    assert main(["base", *where, "--depth", "2", "--steps", "2", "--total-batch-size", "32"]) == 0
    assert main(["base", *where, "--minutes", "0.001"]) == 2
    assert "holds another run, with --minutes None; name this one (--run NAME)" in capsys.readouterr().err
    assert main(["base", *where, "--minutes", "0.001", "--resume", "never"]) == 0
    assert "--minutes 0.001: depth 2, the most for which time and text are enough" in capsys.readouterr().out
    assert main(["base", *where, "--minutes", "1000", "--run", "d2"]) == 0  # whatever the time would allow now
    said = capsys.readouterr().out
    assert "is finished" in said
    assert "the most for which" not in said
