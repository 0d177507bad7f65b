"""`ascendchat selftest` on the simulated NPU: everything holds, and each of ten seeded faults is found."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from warm_process import ServerPopen

import cannsim
from ascendchat.cli import main
from ascendchat.doctor import selftest, selftest_case
from ascendchat.processes import ChildProcess

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]

ITEMS = """
import os
from ascendchat.device import pick
from ascendchat.doctor.selftest_device import perform
from ascendchat.doctor.selftest_operators import SelftestBench

device = pick("npu")
bench = SelftestBench(device, device.bind(0), quick=True)
for name in os.environ["ITEMS"].split(","):
    found = perform(bench, name)
    print("VERDICT", name, found.verdict, found.said, found.facts, flush=True)
"""
SHARED = """
import torch
from ascendchat.device import pick
from ascendchat.doctor.selftest_device import perform
from ascendchat.doctor.selftest_operators import SelftestBench

device = pick("npu")
bench = SelftestBench(device, device.bind(0), quick=True)
held = torch.empty(3 * 2**29, dtype=torch.uint8, device=bench.torch_device)  # as another process would
print(perform(bench, "memory"))
"""
COLLECTIVES = """
import sys
from ascendchat.doctor.collective import main

sys.exit(main([{answer!r}]))
"""
# fault: (items that look for it, environment, what the verdict says)
ALONE: dict[str, tuple[str, dict[str, object], str]] = {
    "wrong mask": ("mask", {"CANNSIM_HARDWARE": "mask-past-512"}, "mask of one query: off by"),
    "dead queue": (
        "queue",
        {"CANNSIM_WORKSPACE": "aclnnInplaceTanh:20000000000,aclnnTanh:20000000000", "CANNSIM_MEMORY_GB": 1},
        "the device does nothing any more",
    ),
    "out of memory": ("memory", {"CANNSIM_OOM_AT": 300_000_000, "CANNSIM_MEMORY_GB": 2}, "out of memory at 0."),
    "nan kernel": ("attention", {"CANNSIM_HARDWARE": "nan-gradient"}, "nan"),
    "AICPU operator": ("hot-path", {"CANNSIM_AICPU": "aclnnMul", "TASK_QUEUE_ENABLE": 1}, "aclnnMul on the AICPU"),
}


def test_every_item_holds_without_a_fault(many_on_npu: Callable[..., list[list[Any]]]) -> None:
    """In the environment of training and in that of generation, as selftest.py sets them."""
    environments = [
        {"ITEMS": ",".join(selftest.TRAINING), "TASK_QUEUE_ENABLE": "2"},
        {"ITEMS": ",".join(selftest.GENERATION), "TASK_QUEUE_ENABLE": "1"},
    ]
    settings = {"CANNSIM_MEMORY_GB": 2, "LAUNCH_COUNTER": "cannsim", "timeout": 500}
    (training,), (generation,) = many_on_npu(ITEMS, 1, environments, **settings)
    for names, rank in ((selftest.TRAINING, training), (selftest.GENERATION, generation)):
        missing = [name for name in names if f"VERDICT {name} held" not in rank.output]
        assert not missing, rank
    assert "'queue_dies_of_workspace': True" in training.output, "a fact about torch_npu, not a fault"


@pytest.mark.parametrize("fault", ALONE)
def test_a_fault_of_one_device_is_found(on_npu: Callable[..., list[Any]], fault: str) -> None:
    items, env, said = ALONE[fault]
    settings = {"TASK_QUEUE_ENABLE": 2, "LAUNCH_COUNTER": "cannsim", **env}
    (rank,) = on_npu(ITEMS, ITEMS=items, timeout=500, **settings)
    (verdict,) = [line for line in rank.output.splitlines() if line.startswith("VERDICT")]
    assert f"VERDICT {items} failed" in verdict, rank
    assert said in verdict, rank


def test_a_device_that_others_use_is_not_called_broken(on_npu: Callable[..., list[Any]]) -> None:
    (rank,) = on_npu(SHARED, CANNSIM_MEMORY_GB=2)
    assert "verdict='skipped', said='only 0.5 of 2.0 GiB are free: other processes" in rank.output, rank


def collectives(on_npu: Callable[..., list[Any]], folder: Path, hardware: str) -> dict[str, Any]:
    answer = folder / "answer.json"
    env = {"ASCENDCHAT_DEVICE": "npu", "CANNSIM_HARDWARE": hardware, "HCCL_BUFFSIZE": 1}
    on_npu(COLLECTIVES.format(answer=str(answer)), 2, timeout=500, **env)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def test_collectives_hold_without_a_fault(on_npu: Callable[..., list[Any]], tmp_path: Path) -> None:
    found = collectives(on_npu, tmp_path, "")
    assert (found["ok"], found["faults"]) == (True, []), found
    assert [row["link"] for row in found["links"]] == ["0 -> 1", "1 -> 0"]


def test_faults_between_devices_are_found(on_npu: Callable[..., list[Any]], tmp_path: Path) -> None:
    found = collectives(on_npu, tmp_path, "wrong-reduce,stale-broadcast,slow-link")
    for said in ("all_reduce of", "leaves old values", "slow link 1 -> 0"):
        assert [text for text in found["faults"] if said in text], found
    assert not found["ok"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two NPUs for the command in this process; its own processes start warm."""
    (tmp_path / "state").mkdir()
    environment = cannsim.environment(devices=2, state=str(tmp_path / "state"))
    for name, value in {**environment, "OMP_NUM_THREADS": "1", "HCCL_BUFFSIZE": "1", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)

    class Warm(ChildProcess):
        """Starts warm, and so ends with the tests alone."""

        @classmethod
        def start(
            cls, words: Sequence[str], *, log: Path | None = None, tied: bool = False, **more: Any
        ) -> ChildProcess:
            assert log is not None
            cold = "versions" in words and "norm" in words  # torch_npu asks for the version of CANN when it is imported
            with log.open("ab") as file:
                how = {"cwd": ROOT, "stdout": file, "stderr": file, "start_new_session": True, **more}
                return cls((subprocess.Popen if cold else ServerPopen)(words, stdin=subprocess.DEVNULL, **how))

    monkeypatch.setattr(selftest_case, "ChildProcess", Warm)
    return monkeypatch


def test_a_crash_is_a_verdict_and_not_the_end(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    """The last two faults, versions that do not fit and a lost rank, and a process that is killed in an item: the
    command goes on, and says it all."""
    machine.setenv("CANNSIM_FAULT", "aclnnRmsNorm:1:kill,HcclAllReduce:3:kill@1")
    machine.setenv("CANNSIM_CANN_VERSION", "8.3.RC1")
    flags = ["--only", "versions,norm,rotary,collectives", "--quick", "--out", str(tmp_path / "sent.json")]
    assert main(["selftest", "--device-type", "npu", *flags]) == 1
    text = (tmp_path / "sent.json").read_text(encoding="utf-8")
    found = json.loads(text)
    verdicts = {item["name"]: item for item in found["items"]}
    assert [verdicts[name]["verdict"] for name in ("versions", "norm", "rotary", "collectives")] == [
        "failed", "failed", "held", "failed",
    ], found  # fmt: skip
    assert "belongs to CANN" in verdicts["versions"]["said"]
    assert "signal 9" in verdicts["norm"]["said"]
    assert "rank 1 was killed by SIGKILL" in verdicts["collectives"]["said"]
    assert (found["chip"], found["devices"], found["simulated"]) == ("Ascend910B3", 2, True)
    assert not [name for name in (str(tmp_path), socket.gethostname(), str(ROOT)) if name in text]


@pytest.mark.usefixtures("machine")
def test_more_devices_than_there_are_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--devices", "3", "--only", "versions,collectives", "--out", str(tmp_path / "sent.json")]
    assert main(["selftest", "--device-type", "npu", *flags]) == 2
    said = capsys.readouterr()
    assert "--devices 3: 2 can be seen here; ask for at most 2" in said.err
    assert not said.out
