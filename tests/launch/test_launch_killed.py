"""The launcher of a training is killed: its ranks save and end. Restarts of a training: tests/npu/rank_kills.py"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SIZES = "--depth 1 --dim 32 --head-dim 16 --max-seq-len 32 --total-batch-size 128 --steps 100000 --log-every 1"
PATIENCE = 120.0


def of(home: Path) -> list[int]:
    """Processes that were started with this $ASCENDCHAT_HOME and still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not dead and f"ASCENDCHAT_HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_ranks_of_a_training_save_and_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    texts = [f"the number {n} is red and {n + 1} is blue" for n in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    train_tokenizer(texts, 300).save(tmp_path / "tokenizer")
    prepare([str(tmp_path / "text.jsonl")], tmp_path / "tokenizer", tmp_path / "words", workers=1)
    words = ["launch", "--devices", "2", "--max-restarts", "2", "base", *SIZES.split(), "--device-type", "cpu"]
    words += ["--data", str(tmp_path / "words"), "--run", "killed", "--eval-every=-1", "--sample-every=0"]
    environment = {**os.environ, "ASCENDCHAT_HOME": str(tmp_path)}
    log = tmp_path / "runs" / "killed" / "logs" / "attempt_0" / "rank_0.log"
    with subprocess.Popen(
        [sys.executable, "-m", "ascendchat", *words], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            until = time.monotonic() + PATIENCE
            while not log.exists() or " step 3/" not in log.read_text():
                assert launcher.poll() is None, log.read_text() if log.exists() else "no log"
                assert time.monotonic() < until
                time.sleep(0.05)
            assert len(of(tmp_path)) == 4, "the launcher, its guard and two ranks"
        finally:
            launcher.kill()
        launcher.communicate(timeout=PATIENCE)
    until = time.monotonic() + PATIENCE
    while of(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert not of(tmp_path)
    assert list((tmp_path / "runs" / "killed" / "base").glob("step_*")), "they had got SIGTERM"
