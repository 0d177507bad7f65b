"""The simulated npu-smi: layouts of the real tool, processes and memory of the simulated devices.

python -m cannsim run -- pytest tests/npu/test_smi_npu.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cannsim
from ascendchat.device import smi

CHIPS = ["Ascend910B3", "Ascend910_9392", "Ascend310P3", "Ascend910A"]


def npu_smi(*arguments: str, **env: str) -> str:
    variables = (
        cannsim.environment() | {"CANNSIM_DEVICES": "4", "CANNSIM_CHIP": "Ascend910B3", "CANNSIM_STATE": ""} | env
    )
    answer = subprocess.run(
        ["npu-smi", *arguments], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    return answer.stdout


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("version", ["25.5.1", "26.0.1"])
def test_every_layout_is_read_by_our_parser(chip, version):
    settings = {"CANNSIM_CHIP": chip, "CANNSIM_SMI_VERSION": version}
    logic = smi.parse_npu_map(npu_smi("info", "-m", **settings))
    readings = smi.parse_npu_table(npu_smi("info", **settings), logic)
    assert [device.index for device in readings.devices] == [0, 1, 2, 3]
    assert all(device.health == "OK" and (device.memory_total or 0) > 20 * 2**30 for device in readings.devices)
    assert readings.processes == []


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("version", ["25.5.1", "26.0.1"])
def test_the_lines_of_the_table_are_equally_long(chip, version):
    lines = npu_smi("info", CANNSIM_CHIP=chip, CANNSIM_SMI_VERSION=version).splitlines()
    assert len({len(line) for line in lines}) == 1, "\n".join(lines)


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


def test_processes_are_listed_with_their_memory_and_vanish_with_them(tmp_path: Path):
    settings = {"CANNSIM_STATE": str(tmp_path), "CANNSIM_DEVICES": "2"}
    program = """
import sys, torch
held = torch.empty(500 * 2**20, dtype=torch.uint8, device="npu:1")
print("ready", flush=True)
sys.stdin.readline()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env=cannsim.environment() | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert "ready" in child.stdout.readline()
        readings = smi.parse_npu_table(npu_smi("info", **settings))
        (process,) = readings.processes
        assert (process.pid, process.device) == (child.pid, 1)
        assert process.memory is not None
        assert 500 * 2**20 <= process.memory < 600 * 2**20
        assert f"id:{child.pid} " in npu_smi("info", "-t", "proc-mem", "-i", "1", **settings)
        idle, busy = readings.devices
        assert (busy.memory_used or 0) - (idle.memory_used or 0) >= 500 * 2**20
    finally:
        child.kill()
        child.wait()
    assert smi.parse_npu_table(npu_smi("info", **settings)).processes == []
    assert os.listdir(tmp_path) == [f"{child.pid}.device"]  # killed: the next process to start removes it


def test_clean_ends_the_process_on_the_device_and_not_one_that_only_has_a_listed_pid(tmp_path: Path):
    settings = cannsim.environment() | {"CANNSIM_STATE": str(tmp_path), "CANNSIM_DEVICES": "2"}
    program = "import sys, torch; held = torch.ones(9, device='npu:1'); print('ready', flush=True); sys.stdin.read()"
    bystander = "import sys; print('ready', flush=True); sys.stdin.read()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for code in (program, bystander)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert "ready" in child.stdout.readline()
        on_device, innocent = children
        # As in a container: a process of the host has the pid that the bystander has here.
        record = bytearray((tmp_path / f"{on_device.pid}.device").read_bytes())
        record[8:12] = innocent.pid.to_bytes(4, "little")
        (tmp_path / f"{innocent.pid}.device").write_bytes(record)
        answer = subprocess.run(
            [sys.executable, "-m", "ascendchat", "clean", "--yes", "--lang", "en"],
            env=settings,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        assert f"pid {on_device.pid} on device 1: {sys.executable}" in answer
        assert f"pid {innocent.pid} on device 1: python" in answer
        assert "has no device open" in answer
        assert on_device.wait(timeout=30) != 0
        assert innocent.poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()
