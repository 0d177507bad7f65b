"""`ascendchat finetune` on two simulated NPUs: the losses of one CPU, by the chip's fused operators."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest

from ascendchat.cli import main
from ascendchat.runs.run import read_metrics

LAYERS, STEPS, RANKS, ROWS = 2, 3, 2, 4
PASSES = STEPS + 1  # backward passes, with that of the dry run
PROGRAM = """
import json, os
import cannsim
from ascendchat.cli import main

assert main({words!r}) == 0
print("LAUNCHES " + json.dumps(cannsim.launches()))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face, and sums to learn."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "dtype", "close", "asked", "npu"),
    [("full", "fp32", 1e-3, (), ()), ("shared", "fp16", 0.02, ("--lora", "--lora-rank", "4"), ("--shard", str(RANKS)))],
    ids=["full", "shared"],
)
def test_the_command_trains_on_two_npus_as_on_a_cpu_by_fused_operators(
    on_npu: Callable[..., list[Any]],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: str,
    dtype: str,
    close: float,
    asked: tuple[str, ...],
    npu: tuple[str, ...],
) -> None:
    program = PROGRAM.format(words=words(place, run, RANKS, "--device-type", "npu", *asked, *npu))
    environment = {"ASCENDCHAT_HOME": place, "ASCENDCHAT_DTYPE": dtype}
    ranks = on_npu(program, RANKS, timeout=900, **environment)
    for said in ("npu: Ascend910B3", "attention: npu_fusion", "fused operators: Qwen2", f"{RANKS} device(s)"):
        assert said in ranks[0].output, ranks[0]
    for rank in ranks:
        launched = json.loads(rank.output.rpartition("LAUNCHES ")[2].splitlines()[0])

        def count(word: str, without: str = "-", launched: dict[str, int] = launched) -> int:
            return sum(n for name, n in launched.items() if word in name and without not in name)

        assert count("FlashAttentionVarLen", "Grad") >= PASSES * LAYERS, launched
        wanted = {"FlashAttentionUnpaddingScoreGrad": 1, "SwiGluGrad": 1, "RotaryPositionEmbeddingGrad": 2}
        for name, each in {**wanted, "RmsNormGrad": 2}.items():
            assert count(name) >= PASSES * LAYERS * each, (name, launched)
        assert count("HcclAllGather" if npu else "HcclAllReduce") > 0, launched
        assert not count("SoftmaxBackward"), "no attention by parts"
    monkeypatch.setenv("ASCENDCHAT_HOME", str(place))
    monkeypatch.setenv("ASCENDCHAT_DTYPE", "fp32")
    assert main(words(place, f"{run}-cpu", 1, "--device-type", "cpu", *asked)) == 0
    expected = losses(place, f"{run}-cpu")
    assert expected[-1] < expected[0] - 0.1, "it learns, so the updates are compared too"
    assert losses(place, run) == pytest.approx(expected, abs=close)
