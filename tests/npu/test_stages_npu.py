"""Every command on every kind of chip, with whichever torch_npu is installed: the heart of `make test-npu NPU=VERSION`.

910B3 has bf16 and the fused kernels, 910A neither; both train, fine-tune, reinforce, evaluate, chat and serve.
310P3 is an inference product, so a model from elsewhere answers there. Old chips saturate: test_fp16_npu.py.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import running_server as real

import cannsim
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.device import smi
from ascendchat.runs.run import read_metrics

OnNpu = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
QUESTION = "a bird walks under the tree."
ANSWER = "the bird sings over the blue river."
STEPS = {"base": 20, "mid": 8, "sft": 18}
RL = "--data toy_arithmetic_en --prompts-per-step 2 --samples 2 --max-new-tokens 8 --eval-every -1 --log-every 1"
EVALUATIONS = ("eval base --eval bpb --eval-tokens 2048", "eval chat --tasks toy_arithmetic_en --max-per-task 8")
SAMPLED = 0.5  # temperature; the model knows one answer, so sampling finds it if its chances are right
CHAIN = """
from ascendchat.cli import main

for words in {commands}:
    status = main(words)
    assert status == 0, (words, status)
"""

pytestmark = pytest.mark.slow


def training(home: Path, device: str, run: str) -> list[list[str]]:
    """Base, mid and sft."""
    sizes = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 64".split()
    common = f"--device-type {device} --total-batch-size 512 --eval-every 0 --sample-every 0 --run {run}".split()
    words = [["base", *sizes, "--data", str(home / "words"), *common, "--num-iterations", str(STEPS["base"])]]
    for stage in ("mid", "sft"):
        data = ["--data", str(home / "chats.jsonl")]
        words.append([stage, *data, *common, "--lr-multiplier", "1", "--num-iterations", str(STEPS[stage])])
    return words


def chat(run: str, device: str, temperature: float = 0) -> list[str]:
    words = f"chat --run {run} --device-type {device} --max-tokens 24 -t {temperature} -p".split()
    return [*words, QUESTION]


def evaluations(device: str) -> list[list[str]]:
    return [[*words.split(), "--run", "cpu", "--device-type", device] for words in EVALUATIONS]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, on_npu: OnNpu) -> Path:
    """Text, conversations that all end alike, and the run "cpu": a model trained on the CPU in fp32, and evaluated."""
    folder, rng = tmp_path_factory.mktemp("stages"), random.Random(0)
    sentences = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 40))) + "." for _ in range(300)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences), encoding="utf-8")
    talks = [[("user", text[:60]), ("assistant", ANSWER)] for text in sentences]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    train_tokenizer([*sentences, ANSWER], 300).save(folder / "tokenizer")
    prepare([str(folder / "text.jsonl")], folder / "tokenizer", folder / "words", val_fraction=0.1, workers=1)
    commands = [*training(folder, "cpu", "cpu"), chat("cpu", "cpu"), *evaluations("cpu")]
    (rank,) = on_npu(CHAIN.format(commands=commands), timeout=300, ASCENDCHAT_HOME=folder)
    assert ANSWER in rank.output
    return folder


def losses(home: Path, run: str, stage: str) -> list[float]:
    found = [row["loss"] for row in read_metrics(home / "runs" / run / stage) if "loss" in row]
    assert len(found) == STEPS[stage]
    return found


def results(home: Path) -> dict[str, dict[str, Any]]:
    """The newest of each evaluation."""
    lines = (home / "runs" / "cpu" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["evaluation"]: row for row in map(json.loads, lines)}


def test_base_mid_and_sft_train_in_bf16(home: Path, on_npu: OnNpu) -> None:
    """The losses are those of the CPU in fp32, as near as bf16 goes."""
    program = CHAIN.format(commands=[*training(home, "npu", "bf16"), chat("bf16", "npu")])
    (rank,) = on_npu(program, timeout=600, ASCENDCHAT_HOME=home)
    assert "npu: Ascend910B3" in rank.output
    for stage in STEPS:
        assert losses(home, "bf16", stage) == pytest.approx(losses(home, "cpu", stage), rel=0.05, abs=0.05)
    assert ANSWER in rank.output


def test_base_mid_sft_and_chat_in_fp16_follow_fp32(home: Path, on_npu: OnNpu) -> None:
    """Within 4 % of the losses of the CPU in fp32 at every step (0.002 where they are nearly 0), the same answer.

    Numbers that tensors are multiplied by are rounded to fp16, too, as on the chips: 2.8 % were seen.
    """
    program = CHAIN.format(commands=[*training(home, "npu", "fp16"), chat("fp16", "npu"), chat("cpu", "npu")])
    (rank,) = on_npu(program, chip="Ascend910A", timeout=300, ASCENDCHAT_HOME=home)
    assert "npu: Ascend910A, float16" in rank.output
    assert "attention: eager" in rank.output
    assert "overflowed" not in rank.output
    for stage in STEPS:
        assert losses(home, "fp16", stage) == pytest.approx(losses(home, "cpu", stage), rel=0.04, abs=0.002)
        rows = [row for row in read_metrics(home / "runs" / "fp16" / stage) if "loss" in row]
        assert {(row["loss_scale"], row["skipped_steps"]) for row in rows} == {(2.0**16, 0)}
    assert rank.output.count(ANSWER) == 2, "of its own model and of the CPU's"


def test_steps_that_overflow_are_skipped_and_said_until_the_scale_is_right(home: Path, on_npu: OnNpu) -> None:
    """The overflow is real: with this scale the gradients leave the range of float16."""
    (words, *_) = training(home, "npu", "high")
    words[-1] = "14"  # steps
    program = f"""
from ascendchat.cli import main
from ascendchat.train import loop

loop.FIRST_SCALE = 2.0**22
assert main({words}) == 0
"""
    (rank,) = on_npu(program, chip="Ascend910B", timeout=200, ASCENDCHAT_HOME=home)
    assert "step 1: float16 overflowed, no update; loss scale 4.1943e+06 -> 2.09715e+06" in rank.output
    rows = [row for row in read_metrics(home / "runs" / "high" / "base") if "loss" in row]
    skipped = [row["skipped_steps"] for row in rows]
    assert skipped[0] == 1
    assert 1 < skipped[-1] < 10
    assert rows[-1]["loss_scale"] == 2.0 ** (22 - skipped[-1])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1


def test_rl_trains_on_an_old_chip(home: Path, on_npu: OnNpu) -> None:
    """On newer ones: test_speedrun_npu.py."""
    words = ["rl", "--start", "cpu", "--run", "rl", *RL.split(), "--steps", "2", "--device-type", "npu"]
    on_npu(CHAIN.format(commands=[words]), chip="Ascend910A", timeout=600, ASCENDCHAT_HOME=home)
    rows = [row for row in read_metrics(home / "runs" / "rl" / "rl") if "reward" in row]
    assert len(rows) == 2
    assert all(row["logprob_gap"] < 0.05 for row in rows), "what generates and what trains are one model"


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend310P3"])
def test_chat_and_eval_answer_like_the_cpu(chip: str, home: Path, on_npu: OnNpu) -> None:
    """A program of its own: training sets TASK_QUEUE_ENABLE=2, with which no graph is captured."""
    before = results(home)
    asked = [chat("cpu", "npu"), chat("cpu", "npu", SAMPLED), *evaluations("npu")]
    (rank,) = on_npu(CHAIN.format(commands=asked), chip=chip, timeout=600, ASCENDCHAT_HOME=home)
    assert rank.output.count(ANSWER) == 2, rank.output
    after = results(home)
    assert {row["chip"] for row in after.values()} == {chip}
    bits = [row["bpb"]["result"]["bits_per_byte"] for row in (before, after)]
    assert bits[1] == pytest.approx(bits[0], rel=0.01)
    assert after["chat"]["examined"] == 8


def test_310p_is_not_trained_on(home: Path, on_npu: OnNpu) -> None:
    program = f"""
from ascendchat.cli import main

print("STATUS", *[main(words) for words in {training(home, "npu", "refused")}])
"""
    (rank,) = on_npu(program, chip="Ascend310P3", timeout=120, ASCENDCHAT_HOME=home)
    assert "STATUS 2 2 2" in rank.output
    assert rank.output.count("Ascend310P3 is an inference product: CANN lists no gradients") == 3
    assert not (home / "runs" / "refused").exists()


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend310P3"])
def test_the_model_is_served(chip: str, home: Path, tmp_path: Path) -> None:
    environment = cannsim.environment(devices=1, chip=chip, state=str(tmp_path))
    with real.serving(home, "--device-type=npu", "--run=cpu", "--slots=2", **environment) as server:
        for temperature in (0, SAMPLED):
            answer = server.chat(QUESTION, max_tokens=24, temperature=temperature).json()
            assert answer["choices"][0]["message"]["content"] == ANSWER


def holders(environment: dict[str, str]) -> dict[int, set[int]]:
    """Processes with memory on each device, by npu-smi."""
    texts = [
        subprocess.run(["npu-smi", *words], env=environment, capture_output=True, text=True, check=True).stdout
        for words in (["info", "-m"], ["info"])
    ]
    found: dict[int, set[int]] = {}
    for process in smi.parse_npu_table(texts[1], smi.parse_npu_map(texts[0])).processes:
        found.setdefault(process.device, set()).add(process.pid)
    return found


def test_each_worker_of_a_server_has_a_device_of_its_own(home: Path, tmp_path: Path) -> None:
    environment = cannsim.environment(devices=2, chip="Ascend910B3", state=str(tmp_path))
    with real.serving(home, "--device-type=npu", "--run=cpu", "--devices=2", "--slots=1", **environment) as server:
        held = holders(environment)
        assert sorted(held) == [0, 1]
        assert all(len(pids) == 1 for pids in held.values()), "the process that waits holds no device"
        assert held[0] != held[1]
        assert held[0] | held[1] <= set(server.workers)
        answers: list[str] = []

        def ask() -> None:
            answers.append(
                server.chat(QUESTION, max_tokens=24, temperature=0).json()["choices"][0]["message"]["content"]
            )

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(real.PATIENCE)
        assert answers == [ANSWER] * 4
