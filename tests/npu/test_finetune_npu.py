"""`ascendchat finetune` on two simulated NPUs, as it is typed: the losses of one CPU, by the chip's fused operators."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ascendchat.cli import main
from ascendchat.record import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import hf_models

ROOT = Path(__file__).resolve().parents[2]
LAYERS, STEPS, RANKS, ROWS = 2, 3, 2, 4
PASSES = RANKS * (STEPS + 1)  # backward passes, with those of the dry run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("finetune-npu"), random.Random(0)
    hf_models.save(folder / "tiny", "qwen2", initializer_range=0.1, num_hidden_layers=LAYERS)
    sums = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(60)]
    rows = [{"prompt": f"What is {a} plus {b}?", "completion": f"The answer is {a + b}."} for a, b in sums]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def words(place: Path, run: str, ranks: int, *more: str) -> list[str]:
    sizes = f"--max-seq-len 96 --total-batch-size {ROWS * 96} --device-batch-size {ROWS // ranks} --steps {STEPS}"
    pace = "--learning-rate 0.01 --val-size 0 --save-every 0 --eval-every -1 --sample-every 0 --log-every 1"
    named = ["finetune", "--model", str(place / "tiny"), "--data", str(place / "sums.jsonl"), "--run", run]
    return [*named, *sizes.split(), *pace.split(), *more]


def losses(place: Path, run: str) -> list[float]:
    return [row["loss"] for row in read_metrics(place / "runs" / run / "hf") if "loss" in row]


def on_two_npus(place: Path, run: str, dtype: str, *more: str) -> dict[str, int]:
    """Train; how often each operator was launched, by both ranks together."""
    environment = {**os.environ, "ASCENDCHAT_HOME": str(place), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"CANNSIM_STATE": str(place / f"state-{run}"), "ASCENDCHAT_DTYPE": dtype}
    (place / f"state-{run}").mkdir()
    machine = [sys.executable, "-m", "cannsim", "run", "--devices", str(RANKS), "--count", "--"]
    command = [sys.executable, "-m", "ascendchat", "launch", "--devices", str(RANKS)]
    done = subprocess.run(
        [*machine, *command, *words(place, run, RANKS, "--device-type", "npu", *more)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for said in ("npu: Ascend910B3", "attention: npu_fusion", "fused operators: Qwen2", f"{RANKS} device(s)"):
        assert said in done.stdout, done.stdout
    found: dict[str, int] = json.loads(done.stderr.rpartition("launches: ")[2].splitlines()[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "dtype", "close", "asked", "npu"),
    [
        ("full", "fp32", 1e-3, (), ()),
        ("shared", "fp16", 0.02, ("--lora", "--lora-rank", "4"), ("--shard", str(RANKS))),
    ],
)
def test_the_command_trains_on_two_npus_as_on_a_cpu_by_fused_operators(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    dtype: str,
    close: float,
    asked: tuple[str, ...],
    npu: tuple[str, ...],
) -> None:
    launched = on_two_npus(place, run, dtype, *asked, *npu)

    def count(word: str, *without: str) -> int:
        return sum(n for name, n in launched.items() if word in name and not any(each in name for each in without))

    assert count("FlashAttentionVarLen", "Grad") >= PASSES * LAYERS, launched
    wanted = {"FlashAttentionUnpaddingScoreGrad": 1, "SwiGluGrad": 1, "RotaryPositionEmbeddingGrad": 2}
    for name, each in wanted.items():
        assert count(name) >= PASSES * LAYERS * each, (name, launched)
    assert count("RmsNormGrad") >= PASSES * 2 * LAYERS, launched
    assert count("HcclAllGather" if npu else "HcclAllReduce") > 0, launched
    assert not count("SoftmaxBackward"), "no attention by parts"
    monkeypatch.setenv("ASCENDCHAT_HOME", str(place))
    monkeypatch.setenv("ASCENDCHAT_DTYPE", "fp32")
    assert main(words(place, f"{run}-cpu", 1, "--device-type", "cpu", *asked)) == 0
    expected = losses(place, f"{run}-cpu")
    assert expected[-1] < expected[0] - 0.1
    assert losses(place, run) == pytest.approx(expected, abs=close)
