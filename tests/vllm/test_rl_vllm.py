"""`ascendchat rl` of a Qwen2 with the answers of a real vLLM server: `make vllm-test`; docs/log.md has a run of it."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from real_vllm import PYTHON, Served, open_qwen2, scorer_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import hf_models

from ascendchat.cli import main
from ascendchat.config import home
from ascendchat.infer.remote import Remote
from ascendchat.infer.verify import Scores, compare, gap
from ascendchat.infer.vllm import VllmServer
from ascendchat.record import read_metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="needs a virtual environment with vLLM: make vllm-test"),
]

STEPS, MOST_GAP = 20, 1e-3
REWARD = '''
def vowels(prompt, completion, **row):
    """Share of the letters that are vowels."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
'''
SIZES = "--data toy_arithmetic_en --prompts-per-step 4 --samples 4 --max-new-tokens 16 --max-seq-len 128"
MORE = "--learning-rate 0.0015 --device-batch-size 4 --save-every -1 --eval-every -1 --log-every 1 --device-type cpu"


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[Scores]:
    """Of every sync that was verified by log-probabilities, those of trainer and server."""
    found: list[Scores] = []
    verify = VllmServer.verify

    async def noted(self: VllmServer, *args: Any) -> None:
        await verify(self, *args)
        assert not self.proven, "on a CPU checksums cannot say it all"
        assert self._before is not None
        found.append(self._before)

    monkeypatch.setattr(VllmServer, "verify", noted)
    return found


def test_twenty_steps_of_grpo_against_a_real_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: list[Scores]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "judges.py").write_text(REWARD, encoding="utf-8")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}  # heads of 32
    hf_models.save(tmp_path / "qwen2", "qwen2", initializer_range=0.1, use_sliding_window=False, **sizes)
    words = ["rl", "--model", str(tmp_path / "qwen2"), "--run", "it", "--reward", "judges:vowels", "--preset", "grpo"]
    with Served(tmp_path / "qwen2", tmp_path) as server:
        words += ["--rollouts", server.url, "--steps", str(STEPS), *SIZES.split(), *MORE.split()]
        assert main(words) == 0
        rows = [row for row in read_metrics(home() / "runs" / "it" / "rl") if "reward" in row]
        rewards, gaps = [row["reward"] for row in rows], [row["logprob_gap"] for row in rows]
        probes = [gap(scores.trainer, scores.server) for scores in syncs]
        print(f"rewards {[round(value, 3) for value in rewards]}")
        print(
            f"largest mean |dlogp| of a step {max(gaps):.2g}; of the probe after {len(probes)} syncs {max(probes):.2g}"
        )
        assert len(rows) == STEPS
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
        assert max(gaps) < MOST_GAP
        assert len(syncs) == STEPS + 1, "the weights of the start, and those of every step"
        assert max(probes) < MOST_GAP
        assert all(gap(a.server, b.server) > 2 * max(probes) for a, b in pairwise(syncs)), "each moved it"
        assert main(["export", "--run", "it", "--out", str(tmp_path / "out"), "--device-type", "cpu"]) == 0
        trained = open_qwen2(tmp_path / "out")
        with Remote.open(server.url) as remote:  # what it has in the end is the model that was exported
            assert isinstance(remote.server, VllmServer)
            assert remote.version == STEPS
            link = remote.server.link
            told = remote._wait(link.command("POST", "/weight_checker", json={"action": "checksum"}))["checksums"]
            wrong, unknown = compare(told, trained.state_dict())
            tokens = list(range(5, 45))
            theirs = remote._wait(remote.server.score(tokens))
        print(f"{len(told) - unknown} of {len(told)} weights compared by digest")
        assert wrong == []
        assert unknown < len(told)
        assert gap(theirs, scorer_of(trained)(tokens)) < MOST_GAP
        before = open_qwen2(tmp_path / "qwen2")
        assert gap(theirs, scorer_of(before)(tokens)) > 10 * MOST_GAP
        assert not torch.equal(before.lm_head.weight, trained.lm_head.weight)
