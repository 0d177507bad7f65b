"""TensorBoard for real, and trackers that fail: `pytest tests/runs/test_trackers.py`."""

from __future__ import annotations

import importlib.util
import math
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ascendchat.errors import UserError
from ascendchat.runs.run import open_run, read_metrics
from ascendchat.runs.trackers import SINKS, check_track, numbers


@dataclass(frozen=True)
class SampleConfig:
    """A config."""

    depth: int = 12


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A home without accounts: nothing is ever sent from a test."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("user")))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "NETRC", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)


def train(folder: Path, track: str, resume_step: int | None = None, first: int = 1) -> list[str]:
    said: list[str] = []
    with open_run(folder, SampleConfig(), track=(track,), resume_step=resume_step, say=said.append) as run:
        for step in range(first, first + 5):
            run.log(step, loss=10.0 * first + step, mfu=math.nan, sample="text", core={"arc": 0.5})
    return said


def test_tensorboard_reads_the_values_back_and_forgets_superseded_steps(tmp_path: Path) -> None:
    EventAccumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    assert train(tmp_path, "tensorboard") == []
    train(tmp_path, "tensorboard", resume_step=3, first=4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["core/arc", "loss", "mfu"]
    got = [(e.step, e.value) for e in events.Scalars("loss")]
    assert got == [(1, 11), (2, 12), (3, 13), (4, 44), (5, 45), (6, 46), (7, 47), (8, 48)]
    assert "torch" not in sys.modules or "torch.utils.tensorboard" not in sys.modules


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in SINKS:
        with pytest.raises(UserError, match=f"pip install {name}"):
            open_run(tmp_path / "r", SampleConfig(), track=(name,), main=False)  # every rank stops
    assert not (tmp_path / "r").exists()


def test_an_unknown_tracker_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean tensorboard"):
        check_track(("tensorbord",))
    check_track(())


def test_a_tracker_cannot_take_over_the_signals_of_the_training_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Greedy(Flaky):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(SINKS, "swanlab", Greedy)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(tmp_path, "swanlab")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Flaky:
    """A tracker whose network fails at the third row."""

    def __init__(self, folder: Path, run_id: str, config: Any, resume_step: int | None) -> None:
        self.rows = 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows += 1
        if self.rows == 3:
            raise ConnectionError("network is gone")
        assert self.rows < 3, "used after it failed"

    def close(self) -> None:
        raise AssertionError("closed after it failed")


def test_a_tracker_that_fails_is_reported_once_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(SINKS, "wandb", Flaky)
    said = train(tmp_path, "wandb")
    assert said == ["wandb failed and is dropped from this run: ConnectionError: network is gone"]
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_tracker_that_cannot_start_is_reported_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> Any:
        raise RuntimeError("quota")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(SINKS, "swanlab", refuses)
    assert train(tmp_path, "swanlab") == ["swanlab failed and is dropped from this run: RuntimeError: quota"]
    assert len(read_metrics(tmp_path)) == 5


def test_only_numbers_are_plotted() -> None:
    got = numbers({"loss": 1, "ok": True, "text": "x", "none": None, "list": [1], "core": {"arc": {"easy": 0.5}}})
    assert got == {"loss": 1.0, "ok": 1.0, "core/arc/easy": 0.5}
