"""`ascendchat rl` with the answers of a server like vLLM whose checksums do not say it all: log-probabilities do."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import engine_models as make
import pytest
import torch
from vllm_asking import TEXT, scorer_of, until
from vllm_stand_in import StandIn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "invariant"))
from rl_runs import make_home, words

from ascendchat.cli import main
from ascendchat.config import home
from ascendchat.infer.fleet import Fleet
from ascendchat.infer.request import Request, Sampling
from ascendchat.record import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def probes(server: StandIn) -> int:
    return sum(path == "/v1/completions" and "prompt_logprobs" in body for path, body in server.asked)


@pytest.mark.slow
def test_weights_are_verified_by_a_probe_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_home(home(), make.model(3, seq_len=160))
    monkeypatch.syspath_prepend(str(home()))
    monkeypatch.chdir(home())
    with StandIn(make.model(3, seq_len=160), packed=True, context=160) as server:
        sizes = ["--prompts-per-step", "2", "--max-new-tokens", "8", "--rollouts", server.url, "--refill", "0"]
        assert main(words("it", *sizes, steps=3)) == 0
        assert probes(server) == 4, "the weights of the start, and those of every step"
        rows = [row for row in read_metrics(home() / "runs/it/rl") if "logprob_gap" in row]
        assert len(rows) == 3
        assert max(row["logprob_gap"] for row in rows) < 1e-5
        server.stale = True
        capsys.readouterr()
        more = [*sizes, "--lr-multiplier", "3", "--rollout-patience", "1"]
        assert main(words("stale", *more, steps=3)) == 2
        assert "has other weights than it was sent" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_comes_back_after_the_weights_of_the_trainer_have_moved_on() -> None:
    """It is verified with the weights that the others have, then with the new ones."""
    model = make.model(3)
    said: list[str] = []
    with StandIn(make.model(3), packed=True) as server:
        settings: dict[str, Any] = {"tokenizer": TEXT, "patience": 60.0, "say": said.append}
        with Fleet.open([server.url], scorer=scorer_of(model), **settings) as fleet:
            fleet.load(dict(model.state_dict()), 1)
            server.die()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            threading.Timer(1.0, server.revive).start()
            fleet.load(dict(model.state_dict()), 2)
            assert fleet.version == 2
            until(lambda: any("is in service again" in line for line in said))
            answer = fleet.generate([Request([5, 6], Sampling(4, seed=1, logprobs=True, stop_tokens=()))])[0]
            assert set(answer.versions) == {2}
            whole = scorer_of(model)([5, 6, *answer.ids])[1:]
            assert max(abs(a - b) for a, b in zip(whole, answer.logprobs, strict=True)) < 1e-4  # type: ignore[operator]
