"""Signals that end a run."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_loop import ToyStage, checkpoints, start

from ascendchat.device import pick
from ascendchat.train import signals
from ascendchat.train.loop import Options, fit
from ascendchat.train.stage import Loss


def test_a_signal_that_is_sent_twice_at_once_is_one(tmp_path: Path) -> None:
    """As `timeout` does it, and job managers: to the process, and to its group."""

    class Stopped(ToyStage):
        def loss(self, batch: int, scale: float = 1.0) -> Loss:
            if batch == 3:
                for _ in range(2):
                    signal.raise_signal(signal.SIGTERM)
                time.sleep(0.1)  # the listener has seen both
            return super().loss(batch, scale)

    with start(tmp_path) as run:
        result = fit(Stopped(), pick("cpu"), run, Options(save_every=100))
    assert result.stopped_by == signal.SIGTERM
    assert checkpoints(tmp_path) == [result.step]


def test_ranks_that_have_ended_do_not_end_one_that_writes_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, left = threading.Event(), threading.Event()

    def monotonic() -> float:
        noted.set()  # the listener keeps the first signal in mind, and lets the run end by itself
        return 0.0

    monkeypatch.setattr(signals, "lost_ranks", lambda: {1})
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    monkeypatch.setattr(signals.StopSignals, "_end_alone", lambda self, number: left.set())
    with start(tmp_path) as run, signals.StopSignals(run) as stop:
        stop.unsaved = stop.last_save = True
        signal.raise_signal(signal.SIGTERM)
        assert noted.wait(60)
        assert not left.is_set()
        stop.last_save = False
        signal.raise_signal(signal.SIGTERM)
        assert left.wait(60)
