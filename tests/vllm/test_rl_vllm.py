"""`ascendchat rl` of a Qwen2 with the answers of a real vLLM server: `make vllm-test`; docs/log.md has a run of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_vllm import PYTHON, Served, open_qwen2, qwen2, scorer_of

from ascendchat.cli import main
from ascendchat.errors import home
from ascendchat.remote.client import RemoteGenerator
from ascendchat.remote.vllm import VllmServer
from ascendchat.remote.weights import gap
from ascendchat.runs.run import read_metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="needs a virtual environment with vLLM: make vllm-test"),
]

STEPS, MAX_GAP = 20, 1e-3
REWARD = '''
def vowels(prompt, completion, **row):
    """Share of the letters that are vowels."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
'''
SIZES = "--data toy_arithmetic_en --prompts-per-step 4 --samples 4 --max-new-tokens 16 --max-seq-len 128"
MORE = "--learning-rate 0.0015 --device-batch-size 4 --save-every -1 --eval-every -1 --log-every 1 --device-type cpu"


def test_twenty_steps_of_grpo_against_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "judges.py").write_text(REWARD, encoding="utf-8")
    folder = qwen2(tmp_path / "qwen2")
    words = ["rl", "--model", str(folder), "--run", "it", "--reward", "judges:vowels", "--preset", "grpo"]
    with Served(folder, tmp_path) as server:
        words += ["--rollouts", server.url, "--steps", str(STEPS), *SIZES.split(), *MORE.split()]
        assert main(words) == 0
        rows = [row for row in read_metrics(home() / "runs" / "it" / "rl") if "reward" in row]
        rewards, gaps = [row["reward"] for row in rows], [row["logprob_gap"] for row in rows]
        print(f"rewards {[round(value, 3) for value in rewards]}, largest mean |dlogp| of a step {max(gaps):.2g}")
        assert len(rows) == STEPS
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
        assert max(gaps) < MAX_GAP
        assert main(["export", "--run", "it", "--out", str(tmp_path / "out"), "--device-type", "cpu"]) == 0
        tokens = list(range(5, 45))
        with RemoteGenerator.open(server.url) as remote:  # what it has in the end is the model that was exported
            assert isinstance(remote.server, VllmServer)
            assert remote.version == STEPS
            theirs = remote._wait(remote.server.score(tokens))
        assert gap(theirs, scorer_of(open_qwen2(tmp_path / "out"))(tokens)) < MAX_GAP
        assert gap(theirs, scorer_of(open_qwen2(folder))(tokens)) > 10 * MAX_GAP
