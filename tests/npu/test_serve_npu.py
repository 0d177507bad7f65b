"""`ascendchat serve --devices 2` on two simulated NPUs: one worker on each, and the answers are the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import cannsim
from ascendchat.device import smi

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
import running_server as real

pytestmark = pytest.mark.slow


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


def answer(server: real.Server, answers: list[str]) -> None:
    answers.append(server.chat(max_tokens=30, temperature=0).json()["choices"][0]["message"]["content"])


def test_each_worker_has_a_device_of_its_own(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    environment = cannsim.environment(devices=2, chip="Ascend910B3", state=str(state))
    real.save(tmp_path, real.make.model(seq_len=128, dim=64, head_dim=16))
    flags = ("--device-type=npu", "--devices=2", "--slots=1")
    with real.serving(tmp_path, *flags, **environment) as server:
        held = holders(environment)
        assert sorted(held) == [0, 1]
        assert all(len(pids) == 1 for pids in held.values()), "the process that waits holds no device"
        assert held[0] != held[1]
        assert held[0] | held[1] <= set(server.workers)
        answers: list[str] = []
        threads = [threading.Thread(target=answer, args=(server, answers)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(real.PATIENCE)
        assert len(answers) == 4
        assert len(set(answers)) == 1
        assert len(answers[0]) > 5
