"""Signals that end a run."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from test_loop import ToyStage, checkpoints, start

from ascendchat.device import pick
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
