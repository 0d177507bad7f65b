"""The simulated npu-smi: layouts of the real tool, processes and memory of the simulated devices."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cannsim
from ascendchat.device import smi

OnNpu = Callable[..., list[Any]]
CHIPS = ["Ascend910B3", "Ascend910_9392", "Ascend310P3", "Ascend910A"]


def npu_smi(*arguments: str, **env: str) -> str:
    variables = (
        cannsim.environment() | {"CANNSIM_DEVICES": "4", "CANNSIM_CHIP": "Ascend910B3", "CANNSIM_STATE": ""} | env
    )
    answer = subprocess.run(
        ["npu-smi", *arguments], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    return answer.stdout


@pytest.mark.parametrize(
    ("chip", "version"), [*zip(CHIPS, ["25.5.1", "26.0.1"] * 2), ("Ascend910B3", "26.0.1"), ("Ascend910A", "25.5.1")]
)
def test_every_layout_is_read_by_our_parser_and_its_lines_are_equally_long(chip: str, version: str) -> None:
    settings = {"CANNSIM_CHIP": chip, "CANNSIM_SMI_VERSION": version}
    logic, table = smi.parse_npu_map(npu_smi("info", "-m", **settings)), npu_smi("info", **settings)
    readings = smi.parse_npu_table(table, logic)
    assert [device.index for device in readings.devices] == [0, 1, 2, 3]
    assert all(device.health == "OK" and (device.memory_total or 0) > 20 * 2**30 for device in readings.devices)
    assert readings.processes == []
    assert len({len(line) for line in table.splitlines()}) == 1, table


def test_an_a3_card_has_two_dies_and_one_power_reading():
    table = npu_smi("info", CANNSIM_CHIP="Ascend910_9392")
    rows = [line for line in table.splitlines() if "Ascend910 " in line]
    assert [row.split()[1] for row in rows] == ["0", "0", "1", "1"]
    assert [row.split("|")[3].split()[0] == "-" for row in rows] == [False, True, False, True]
    assert "Phy-ID" in table


def test_queries_answer_with_key_and_value():
    usages = npu_smi("info", "-t", "usages", "-i", "2", "-c", "0")
    assert re.search(r"Capacity\(MB\)\s*: 65536", usages), usages
    assert "Total Count" in npu_smi("info", "-l")
    assert "No process in device." in npu_smi("info", "-t", "proc-mem", "-i", "0")
    assert "Temperature" in npu_smi("info", "-t", "temp", "-i", "3")


def test_a_machine_without_devices_fails_like_the_driver():
    variables = cannsim.environment() | {"CANNSIM_DEVICES": "0"}
    answer = subprocess.run(["npu-smi", "info"], env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode != 0
    assert "-8005" in answer.stderr


HOLDER = """
import os, signal, subprocess, torch
held = torch.empty(500 * 2**20, dtype=torch.uint8, device="npu:1")
for words in (["info"], ["info", "-t", "proc-mem", "-i", "1"]):
    print(subprocess.run(["npu-smi", *words], capture_output=True, text=True, check=True).stdout, "----", flush=True)
print("PID", os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_are_listed_with_their_memory_and_vanish_with_them(on_npu: OnNpu, tmp_path: Path) -> None:
    (rank,) = on_npu(HOLDER, devices=2, CANNSIM_STATE=tmp_path, check=False)
    table, memory, said = rank.output.split(" ----\n")
    pid, readings = int(said.removeprefix("PID ")), smi.parse_npu_table(table)
    (process,) = readings.processes
    assert (process.pid, process.device) == (pid, 1)
    assert process.memory is not None
    assert 500 * 2**20 <= process.memory < 600 * 2**20
    assert f"id:{pid} " in memory
    idle, busy = readings.devices
    assert (busy.memory_used or 0) - (idle.memory_used or 0) >= 500 * 2**20
    assert smi.parse_npu_table(npu_smi("info", CANNSIM_STATE=str(tmp_path), CANNSIM_DEVICES="2")).processes == []
    assert os.listdir(tmp_path) == [f"{pid}.device"]  # killed: the next process to start removes it


CLEANS = """
import os, pathlib, subprocess, sys, time, torch
state, rank = pathlib.Path(os.environ["CANNSIM_STATE"]), os.environ["RANK"]

def wait_for(name):
    while not (state / name).exists():
        time.sleep(0.01)

(state / f"pid{rank}").write_text(str(os.getpid()))
if rank == "0":
    held = torch.ones(9, device="npu:1")
    held.cpu()
    (state / "ready0").touch()
    wait_for("never")
(state / f"ready{rank}").touch()
if rank == "1":
    wait_for("over")
    sys.exit()
wait_for("ready0"), wait_for("ready1")
on_device, innocent = ((state / f"pid{other}").read_text() for other in (0, 1))
# As in a container: a process of the host has the pid that the bystander has here.
record = bytearray((state / f"{on_device}.device").read_bytes())
record[8:12] = int(innocent).to_bytes(4, "little")
(state / f"{innocent}.device").write_bytes(record)
subprocess.run([sys.executable, "-m", "ascendchat", "clean", "--yes", "--lang", "en"], check=True)
(state / "over").touch()
"""


def test_clean_ends_the_process_on_the_device_and_not_one_that_only_has_a_listed_pid(
    on_npu: OnNpu, tmp_path: Path
) -> None:
    on_device, innocent, cleaning = on_npu(CLEANS, 3, devices=2, CANNSIM_STATE=tmp_path, check=False)
    assert cleaning.ok, cleaning
    for rank in (0, 1):
        assert f"pid {(tmp_path / f'pid{rank}').read_text()} on device 1: " in cleaning.output
    assert "has no device open" in cleaning.output, cleaning
    assert on_device.status in ("signal 15", "signal 9"), on_device
    assert innocent.ok, innocent
