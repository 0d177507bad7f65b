"""`ascendchat base` on simulated NPUs: four ranks under torchrun, and a run that moves from CPU to NPU and back."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from warm_process import Popen
from warm_process import run as run_warm

import cannsim
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer import train_tokenizer
from ascendchat.record import read_metrics

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
SIZES = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 64 --total-batch-size 512 --eval-every 0 --sample-every 0"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npu_base")
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) + "." for _ in range(300)]
    source = folder / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    prepare([str(source)], folder / "tokenizer", folder / "words", val_fraction=0.1, workers=1)
    return folder


def run(home: Path, command: list[str], *, npu: bool, **more: str) -> str:
    environment = cannsim.environment(devices=4, state=str(home / "state")) if npu else dict(os.environ)
    environment |= {"ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
    if not npu:
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    result = run_warm(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


def base(home: Path, name: str, steps: int, *more: str) -> list[str]:
    return [
        "base",
        *SIZES.split(),
        "--data",
        str(home / "words"),
        "--run-name",
        name,
        "--num-iterations",
        str(steps),
        *more,
    ]


def losses(home: Path, name: str, stage: str = "base") -> list[float]:
    return [row["loss"] for row in read_metrics(home / "runs" / name / stage) if "loss" in row]


@pytest.mark.slow
def test_ranks_under_torchrun_train_like_one_cpu(home: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    flags = base(home, "two", 12, "--device-type=npu", "--device-batch-size=4")[1:]
    output = run(home, [*torchrun, "scripts.base_train", *flags], npu=True, ASCENDCHAT_DTYPE="fp32")
    assert "npu: Ascend910B3" in output
    assert "attention: npu_fusion" in output
    assert "2 device(s) x 4 rows x 1 micro-batch(es) x 64" in output
    run(home, [sys.executable, "-m", "ascendchat", *base(home, "one", 12, "--device-type", "cpu")], npu=False)
    assert losses(home, "two") == pytest.approx(losses(home, "one"), abs=2e-3)


@pytest.mark.slow
def test_a_run_moves_from_cpu_to_npu_and_back(home: Path) -> None:
    """Stopped by a signal on one device, continued on the other: the losses are those of a run that never moved."""
    program = [sys.executable, "-m", "ascendchat"]
    run(home, [*program, *base(home, "stay", 24, "--device-type", "cpu")], npu=False)
    for device, last in (("cpu", 8), ("npu", 16), ("cpu", 24)):
        command = [*program, *base(home, "move", 24, "--device-type", device, "--log-every", "1", "--save-every", "8")]
        environment = {"ASCENDCHAT_DTYPE": "fp32"}
        output = run_until(home, command, last, npu=device == "npu", **environment)
        assert re.search(rf"step {last}/24", output), output
    assert losses(home, "move") == pytest.approx(losses(home, "stay"), abs=2e-3)


def run_until(home: Path, command: list[str], last: int, *, npu: bool, **more: str) -> str:
    """Run, and kill -9 once the checkpoint of step `last` is there."""
    environment = cannsim.environment(devices=4, state=str(home / "state")) if npu else dict(os.environ)
    environment |= {"ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}
    if not npu:
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    process = Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen, saved = "", home / "runs" / "move" / "base" / f"step_{last:06d}"
    for line in process.stdout:
        seen += line
        if last < 24 and saved.is_dir():
            process.kill()
            break
    process.wait()
    return seen


def test_a_model_answers_on_the_npu_with_the_environment_of_the_command(home: Path) -> None:
    """TASK_QUEUE_ENABLE=2 is best for training and forbids captured graphs: `chat` sets 1, and lives with 2."""
    python = [sys.executable, "-m", "ascendchat"]
    run(home, [*python, *base(home, "answers", 2), "--device-type", "npu"], npu=True)
    chat = [*python, "chat", "--run", "answers", "-p", "the red tree", "--max-tokens", "8", "-t", "0"]
    plain = run(home, [*chat, "--device-type", "cpu"], npu=False)
    assert plain.strip()
    assert run(home, [*chat, "--device-type", "npu"], npu=True)
    assert run(home, [*chat, "--device-type", "npu"], npu=True, TASK_QUEUE_ENABLE="2")


@pytest.mark.slow
def test_conversations_that_see_only_themselves_train_on_the_npu_as_on_the_cpu(home: Path) -> None:
    """The default of `sft`: the fused kernel with its layout for documents on one, a mask over rows on the other."""
    python, rng = [sys.executable, "-m", "ascendchat"], random.Random(1)
    said = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 8))) for _ in range(200)]
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": a[::-1]}] for a in said]
    (home / "chats.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows), encoding="utf-8")
    run(home, [*python, *base(home, "talks", 2), "--device-type", "cpu"], npu=False)
    sft = [*python, "sft", "--data", str(home / "chats.jsonl"), "--start", "talks", "--steps", "6", "--lr-multiplier=1"]
    for device in ("cpu", "npu"):
        flags = f"--total-batch-size 512 --eval-every 0 --sample-every 0 --run {device} --device-type {device}".split()
        output = run(home, [*sft, *flags], npu=device == "npu", ASCENDCHAT_DTYPE="fp32")
        assert "a token sees its own document only" in output
    assert "attention: npu_fusion" in output
    assert losses(home, "npu", "sft") == pytest.approx(losses(home, "cpu", "sft"), abs=2e-3)


def test_going_on_without_the_npu_is_said(home: Path) -> None:
    code = "from ascendchat.device import pick; print(pick().type)"
    environment = cannsim.environment(devices=2, state=str(home / "state")) | {"ASCEND_RT_VISIBLE_DEVICES": "7"}
    # Not a warm process: in one, torch_npu 2.6 was seen to stay silent.
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "cpu"
    assert "no NPU" in result.stderr


@pytest.mark.slow
def test_a_profile_of_an_npu_run_has_the_launches_and_says_what_is_missing(home: Path) -> None:
    """torch_npu's own profiler really runs; the simulator has no times of the device to give."""
    command = [sys.executable, "-m", "ascendchat", *base(home, "profiled", 6, "--profile", "2"), "--device-type", "npu"]
    shown = run(home, command, npu=True)
    (folder,) = (home / "runs" / "profiled" / "base" / "profile").iterdir()
    found = json.loads((folder / "profile.json").read_text())
    assert found["steps"] == 2
    assert found["launches"] > 100, "enqueued operators of two steps"
    assert found["host_bound"] is None
    assert "The profiler gave no times of the device" in shown
    assert list(folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))


def test_what_is_dropped_on_an_npu_follows_from_the_step(home: Path) -> None:
    found = {}
    for name, share in (("drops", "0.2"), ("again", "0.2"), ("plain", "0")):
        told = base(home, name, 4, "--device-type", "npu", "--dropout", share)
        run(home, [sys.executable, "-m", "ascendchat", *told], npu=True)
        found[name] = [row["loss"] for row in read_metrics(home / "runs" / name / "base") if "loss" in row]
    assert found["drops"] == found["again"]
    assert found["drops"][-1] != found["plain"][-1]
