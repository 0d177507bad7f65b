"""A rank that is killed costs seconds, and changes nothing. All of it: tests/npu/rank_kills.py

ASCENDCHAT_KILLS=5 python -m cannsim run --devices 4 -- python -m pytest -m '' tests/npu/test_rank_kills.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_kills

KILLS = int(os.environ.get("ASCENDCHAT_KILLS", "1"))
DEVICES = 2
STEPS = 5 + 2 * KILLS
WHOLE = "import sys; from ascendchat.cli import main; sys.exit(main({words!r}))"


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_ends_bit_for_bit_as_if_they_had_not_been(
    tmp_path: Path, on_npu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_kills.make_data(tmp_path)
    monkeypatch.setenv("CANNSIM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("CANNSIM_DEVICES", str(DEVICES))
    words = rank_kills.command(tmp_path, "whole", STEPS)
    on_npu(WHOLE.format(words=words), DEVICES, timeout=300, ASCENDCHAT_HOME=tmp_path)
    kills = rank_kills.killed_run(tmp_path, DEVICES, STEPS, KILLS, rank_kills.PATIENCE)
    assert len(kills) == KILLS
    assert rank_kills.finished(tmp_path, "killed", STEPS)
    assert rank_kills.outcome(tmp_path, "killed") == rank_kills.outcome(tmp_path, "whole")
    losses, saved = rank_kills.outcome(tmp_path, "whole")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert len(saved) == 1 + DEVICES
