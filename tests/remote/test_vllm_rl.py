"""`ascendchat rl` with the answers of a server like vLLM whose checksums do not say it all: log-probabilities do."""

from __future__ import annotations

import sys
from pathlib import Path

import engine_models as make
import pytest
from vllm_stand_in import StandIn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "invariant"))
from rl_runs import make_home, rows_of, run_here, words

pytestmark = pytest.mark.usefixtures("one_thread")


def probes(server: StandIn) -> int:
    return sum(path == "/v1/completions" and "prompt_logprobs" in body for path, body in server.asked)


@pytest.mark.slow
def test_weights_are_verified_by_a_probe_after_every_step(tmp_path: Path) -> None:
    home = make_home(tmp_path, make.model(3, seq_len=160))
    with StandIn(make.model(3, seq_len=160), packed=True, context=160) as server:
        sizes = ["--prompts-per-step", "2", "--max-new-tokens", "8", "--rollouts", server.url, "--refill", "0"]
        run_here(home, words("it", *sizes, steps=2))
        assert probes(server) == 3, "the weights of the start, and those of every step"
        rows = [row for row in rows_of(home, "it") if "logprob_gap" in row]
        assert len(rows) == 2
        assert max(row["logprob_gap"] for row in rows) < 1e-5
        server.stale = True
        more = [*sizes, "--lr-multiplier", "3", "--rollout-patience", "1"]
        assert "has other weights than it was sent" in run_here(home, words("stale", *more, steps=2), status=2)
