"""Every command on every kind of chip, with whichever torch_npu is installed: the heart of `make test-npu NPU=VERSION`.

910B3 has bf16 and the fused kernels, 910A neither; both train, fine-tune, reinforce, evaluate, chat and serve.
310P3 is an inference product, so a model from elsewhere answers there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_chat
from tiny_chat import ANSWER, CHAIN, QUESTION, ROOT, STEPS, chat, losses, training

import cannsim
from ascendchat.record import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
import running_server as real

OnNpu = Callable[..., Any]
RL = "--data toy_arithmetic_en --prompts-per-step 2 --samples 2 --max-new-tokens 8 --eval-every -1 --log-every 1"
EVALUATIONS = ("eval base --eval bpb --eval-tokens 2048", "eval chat --tasks toy_arithmetic_en --max-per-task 8")
SAMPLED = 0.5  # temperature; the model knows one answer, so sampling finds it if its chances are right

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_chat.make(tmp_path_factory.mktemp("stages"))
    tiny_chat.on_cpu(folder, evaluations("cpu"))
    return folder


def evaluations(device: str) -> list[list[str]]:
    return [[*words.split(), "--run", "cpu", "--device-type", device] for words in EVALUATIONS]


def results(home: Path) -> dict[str, dict[str, Any]]:
    """The newest of each evaluation."""
    lines = (home / "runs" / "cpu" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["evaluation"]: row for row in map(json.loads, lines)}


def test_base_mid_and_sft_train_in_bf16(home: Path, on_npu: OnNpu) -> None:
    """The losses are those of the CPU in fp32, as near as bf16 goes. In fp16, on 910A: test_fp16_npu.py."""
    program = CHAIN.format(commands=[*training(home, "npu", "bf16"), chat("bf16", "npu")])
    (rank,) = on_npu(program, timeout=600, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT)
    assert "npu: Ascend910B3" in rank.output
    for stage in STEPS:
        assert losses(home, "bf16", stage) == pytest.approx(losses(home, "cpu", stage), rel=0.05, abs=0.05)
    assert ANSWER in rank.output


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910A"])
def test_rl_trains(chip: str, home: Path, on_npu: OnNpu) -> None:
    words = ["rl", "--start", "cpu", "--run", chip, *RL.split(), "--steps", "2", "--device-type", "npu"]
    on_npu(CHAIN.format(commands=[words]), chip=chip, timeout=600, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT)
    rows = [row for row in read_metrics(home / "runs" / chip / "rl") if "reward" in row]
    assert len(rows) == 2
    assert all(row["logprob_gap"] < 0.05 for row in rows), "what generates and what trains are one model"


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910A", "Ascend310P3"])
def test_chat_and_eval_answer_like_the_cpu(chip: str, home: Path, on_npu: OnNpu) -> None:
    """A program of its own: training sets TASK_QUEUE_ENABLE=2, with which no graph is captured."""
    before = results(home)
    asked = [chat("cpu", "npu"), chat("cpu", "npu", SAMPLED), *evaluations("npu")]
    (rank,) = on_npu(CHAIN.format(commands=asked), chip=chip, timeout=600, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT)
    assert rank.output.count(ANSWER) == 2, rank.output
    after = results(home)
    assert {row["chip"] for row in after.values()} == {chip}
    bits = [row["bpb"]["result"]["bits_per_byte"] for row in (before, after)]
    assert bits[1] == pytest.approx(bits[0], rel=0.01)
    assert after["chat"]["examined"] == 8


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910A", "Ascend310P3"])
def test_the_model_is_served(chip: str, home: Path, tmp_path: Path) -> None:
    environment = cannsim.environment(devices=1, chip=chip, state=str(tmp_path))
    with real.serving(home, "--device-type=npu", "--run=cpu", "--slots=2", **environment) as server:
        for temperature in (0, SAMPLED):
            answer = server.chat(QUESTION, max_tokens=24, temperature=temperature).json()
            assert answer["choices"][0]["message"]["content"] == ANSWER
