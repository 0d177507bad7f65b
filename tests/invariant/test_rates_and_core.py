"""Learning rates that are asked for, and CORE during pretraining: by the commands, down to the run's record."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest
from core_bundle import write_bundle

from ascendchat.cli import main
from ascendchat.runs.run import read_metrics
from ascendchat.sizes.schedule import lr_scale, rates

SIZES = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 64 --device-batch-size 4 --total-batch-size 256".split()
QUIET = "--device-type cpu --eval-every -1 --sample-every -1 --save-every -1 --run h".split()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a tokenizer, a prepared corpus and conversations."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    texts = [f"the {a} tree and the {b} bird saw one old dog" for a in "abcdefgh" for b in "stuvwxyz"]
    chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}] for t in texts]
    commands.write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    commands.prepare_texts(tmp_path, texts)
    return tmp_path


def base(home: Path, *more: str) -> int:
    return main(["base", *SIZES, *QUIET, "--data", str(home / "words"), "--steps", "6", *more])


def record(home: Path, stage: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((home / "runs" / "h" / stage / "run.json").read_text())
    return found


def scales(home: Path, stage: str) -> list[float]:
    return [row["lr_scale"] for row in read_metrics(home / "runs" / "h" / stage) if "loss" in row]


def test_rates_and_schedule_that_are_asked_for_are_used_and_recorded(home: Path) -> None:
    asked = "--matrix-lr 0.03 --embedding-lr 0.2 --unembedding-lr 0.004 --scalar-lr 0.4 --lr-multiplier 0.5".split()
    curve = "--warmup-steps 2 --warmdown-ratio 0.5 --final-lr-frac 0.1".split()
    assert base(home, *asked, *curve) == 0
    full = rates(32, 256, matrix=0.03, embedding=0.2, unembedding=0.004, scalar=0.4)
    assert record(home, "base")["learning_rates"] == {name: rate * 0.5 for name, rate in full.items()}
    assert (record(home, "base")["packaged"], record(home, "base")["software"]) == ([], {})
    assert record(home, "base")["schedule"] == {"warmup": 2, "warmdown": 0.5, "final": 0.1}
    assert scales(home, "base") == [lr_scale(step, 6, warmup=2, warmdown=0.5, final=0.1) for step in range(6)]
    sft = ["sft", "--data", str(home / "chats.jsonl"), "--device-batch-size", "4", "--total-batch-size", "256", *QUIET]
    assert main([*sft, "--steps", "4", "--warmup-ratio", "0.5", "--matrix-lr", "0.01"]) == 0
    assert record(home, "sft")["learning_rates"]["matrices"] == 0.5 * rates(32, 256, matrix=0.01)["matrices"]  # type: ignore[index]
    assert record(home, "sft")["schedule"] == {"warmup": 2, "warmdown": 0.5, "final": 0.0}
    assert scales(home, "sft") == [0.5, 1.0, 1.0, 0.5]


def test_two_ways_to_say_the_warm_up_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert base(home, "--warmup-steps", "2", "--warmup-ratio", "0.1") == 2
    assert "--warmup-steps and --warmup-ratio" in capsys.readouterr().err


@pytest.mark.slow
def test_target_flops_set_the_horizon(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["base", *SIZES, *QUIET, "--data", str(home / "words")]
    assert main([*words, "--target-flops", "1e9"]) == 0
    steps = len(scales(home, "base"))
    assert main([*words, "--target-flops", "3e9", "--resume", "never"]) == 0
    assert steps > 3
    assert len(scales(home, "base")) == pytest.approx(3 * steps, abs=2)


def test_core_is_scored_while_pretraining_and_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(home / "data" / "core")
    assert base(home, "--core-metric-every", "4", "--core-metric-max-per-task", "4") == 0
    rows = [row for row in read_metrics(home / "runs" / "h" / "base") if "core" in row]
    assert [row["step"] for row in rows] == [4, 6]
    shown = capsys.readouterr().out
    assert f"step 6: core {rows[-1]['core']:.4f}" in shown
    # The last score is that of the finished model.
    assert main("eval base --run h --eval core --max-per-task 4 --device-type cpu --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["core"]["core"] == pytest.approx(rows[-1]["core"])


def test_without_the_core_tasks_the_next_step_is_said_before_anything_is_trained(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert base(home, "--core-metric-every", "4") == 2
    said = capsys.readouterr()
    assert "ascendchat data fetch core" in said.err
    assert "parameters" not in said.out
