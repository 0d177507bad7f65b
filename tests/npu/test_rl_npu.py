"""The recipe rl-npu on simulated NPUs: two train, with HCCL between them, a server generates on the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from warm_process import Popen

import cannsim
from ascendchat.record import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900  # seconds, on however busy a machine
SMALL = {
    "data": ["toy_arithmetic_en"],
    "prompts_per_step": 4,
    "samples": 4,
    "max_new_tokens": 16,
    "num_iterations": 2,
    "device_batch_size": 4,
    "eval_every": -1,
    "sample_every": 0,
    "log_every": 1,
}

pytestmark = pytest.mark.slow


def command(home: Path, words: list[str], *, npu: bool) -> subprocess.Popen[str]:
    environment = cannsim.environment(devices=4, state=str(home / "state")) if npu else dict(os.environ)
    environment |= {"ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not npu:
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    words = [sys.executable, "-m", "ascendchat", *words]
    out = subprocess.PIPE
    start = subprocess.Popen if npu else Popen
    return start(words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    return output


def devices_by_process(home: Path) -> dict[str, set[str]]:
    """NPUs that each kind of process of this run may use, as long as it runs."""
    found: dict[str, set[str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            variables = dict(
                pair.split(b"=", 1) for pair in (path / "environ").read_bytes().split(b"\0") if b"=" in pair
            )
        except OSError:  # it has just ended, or is somebody else's
            continue
        if variables.get(b"ASCENDCHAT_HOME") == str(home).encode():
            kind = next((name for name in ("ascendchat.serve.worker", "rl") if name.encode() in words), "")
            found.setdefault(kind, set()).add(variables.get(b"ASCEND_RT_VISIBLE_DEVICES", b"").decode())
    return found


def test_two_npus_train_while_two_generate(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    finish(command(tmp_path, ["tokenizer", "train", "--vocab-size", "320"], npu=False))
    sizes = "--depth 2 --dim 64 --head-dim 16 --max-seq-len 96 --device-batch-size 8 --total-batch-size 768"
    often = "--steps 10 --eval-every -1 --sample-every 0 --device-type cpu --run d12"
    finish(command(tmp_path, ["base", *sizes.split(), *often.split()], npu=False))
    recipe = yaml.safe_load((ROOT / "ascendchat/recipes/rl-npu.yaml").read_text(encoding="utf-8"))
    assert (recipe["devices"], recipe["stages"][0]["rl"]["rollout_devices"]) == (2, 2)
    recipe["stages"][0]["rl"] |= SMALL
    (tmp_path / "rl-npu.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    process = command(
        tmp_path, ["speedrun", "--recipe", str(tmp_path / "rl-npu.yaml"), "--device-type", "npu"], npu=True
    )
    seen: dict[str, set[str]] = {}
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until and "ascendchat.serve.worker" not in seen:
        seen = devices_by_process(tmp_path)
        time.sleep(0.5)
    output = finish(process)
    assert seen["ascendchat.serve.worker"] == {"2,3"}, seen
    assert "hccl" in output
    folder = tmp_path / "runs" / "d12" / "rl"
    rows = [row for row in read_metrics(folder) if "reward" in row]
    assert len(rows) == 2
    assert all(row["logprob_gap"] < 0.05 for row in rows), "bf16 on both sides"
    assert len(list((folder / "transcripts").iterdir())) == 2 * 2
    said = (folder / "rollouts" / "server-0.log").read_text(encoding="utf-8")
    assert said.count("npu") >= 1, said
    until = time.monotonic() + 60
    while "ascendchat.serve.worker" in devices_by_process(tmp_path):
        assert time.monotonic() < until, "the server ends with the run"
        time.sleep(0.2)
