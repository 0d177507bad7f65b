"""Readers for the vendor tools `npu-smi` and `nvidia-smi`: utilisation, memory, temperature, processes. No torch.

`ascendchat doctor`, `ascendchat doctor --watch` and `ascendchat clean` read the devices here:

    readings = read()                      # the first tool that answers; or read("npu-smi")
    if isinstance(readings, Problem): ...  # the tool is absent, hung, or said why it cannot read

All memory is in bytes (the tools print MiB and call it MB), temperature in degrees Celsius, power in watts,
utilisation in percent; None where the chip does not tell.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ascendchat.chips import KINDS, MIB

VENDOR_TOOLS = tuple(kind.tool for kind in KINDS.values() if kind.tool)
# The driver installs npu-smi into folders that are not on everybody's PATH.
EXTRA_PATH = ("/usr/local/bin", "/usr/local/sbin")
TIMEOUT = 15.0  # seconds; npu-smi needs about one per four cards
# npu-smi has no documented exit codes: these texts mean failure even with exit status 0.
FAILURES = re.compile(
    r"dcmi (module|model) initialize|ret is -?\d{4}|DrvMng\w+ failed|Can't open|"
    r"NVIDIA-SMI has failed|No devices were found|Failed to initialize NVML",
    re.IGNORECASE,
)
PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True)
class DeviceReading:
    """One device, numbered as torch numbers it."""

    index: int
    name: str
    health: str = ""
    utilisation: float | None = None
    temperature: float | None = None
    power: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class ProcessReading:
    """One process on one device, as the tool names it. Inside a container `pid` is the container's only where the tool
    tells it (npu-smi from 26 on); else it is the host's, and here another process may have that number."""

    pid: int
    device: int
    name: str
    memory: int | None = None


@dataclass(frozen=True)
class Readings:
    """Output of one tool: devices and the processes on them."""

    tool: str
    version: str = ""
    devices: list[DeviceReading] = field(default_factory=list)
    processes: list[ProcessReading] = field(default_factory=list)


@dataclass(frozen=True)
class Problem:
    """Why nothing could be read. `missing`: the tool is not installed, which is no fault on a machine without chips."""

    text: str
    tool: str = ""
    missing: bool = False


def locate(tool: str) -> str | None:
    """Full path of a vendor tool, also where the driver puts it outside PATH."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *EXTRA_PATH]))


def run_tool(tool: str, arguments: list[str], timeout: float = TIMEOUT) -> str | Problem:
    """Output of one call of a vendor tool, or the reason why there is none."""
    path = locate(tool)
    if path is None:
        return Problem(f"{tool} is not installed", tool, missing=True)
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Problem(f"{tool} did not answer within {timeout:.0f} s", tool)
    except OSError as error:
        return Problem(f"{tool} cannot be started: {error}", tool)
    output = f"{done.stdout}\n{done.stderr}"
    failure = next((line.strip() for line in output.splitlines() if FAILURES.search(line)), "")
    if done.returncode != 0 or (failure and "|" not in done.stdout):  # a whole table under a warning is an answer
        text = failure or " ".join(output.split())[:300] or "no output"
        return Problem(f"{tool} failed (exit status {done.returncode}): {text}", tool)
    return done.stdout


def read(tool: str | None = None, timeout: float = TIMEOUT) -> Readings | Problem:
    """Devices and processes from `tool`, or from the first vendor tool that answers."""
    readers = {"npu-smi": _read_npu, "nvidia-smi": _read_nvidia}
    problems = []
    for name in VENDOR_TOOLS if tool is None else (tool,):
        reader = readers.get(name)
        outcome = (
            reader(timeout) if reader else Problem(f"{name} is a tool that cannot be read here", name, missing=True)
        )
        if isinstance(outcome, Readings):
            return outcome
        problems.append(outcome)
    present = [p for p in problems if not p.missing]
    if present:
        return present[0]
    names = " and ".join(p.tool for p in problems)
    return Problem(f"{names} not installed", problems[0].tool if tool else "", missing=True)


# ---------------------------------------------------------------------------------------------------- npu-smi


def _read_npu(timeout: float) -> Readings | Problem:
    text = run_tool("npu-smi", ["info"], timeout)
    if isinstance(text, Problem):
        return text
    readings = parse_npu_table(text, _logic_ids(locate("npu-smi") or "", timeout))
    if not readings.devices:
        return Problem(f"npu-smi listed no device: {' '.join(text.split())[:200] or 'no output'}", "npu-smi")
    return readings


@lru_cache(maxsize=8)
def _logic_ids(path: str, timeout: float) -> dict[tuple[int, int], tuple[int, str]]:
    """The map never changes while the driver is loaded, so one call per process is enough."""
    text = run_tool("npu-smi", ["info", "-m"], timeout)
    return {} if isinstance(text, Problem) else parse_npu_map(text)


def soc_name(name: str) -> str:
    """`910B3` and `Ascend 910B3` -> `Ascend910B3`, the name that torch reports."""
    name = "".join(name.split())
    return f"Ascend{name}" if name[:1].isdigit() else name


def parse_npu_map(text: str) -> dict[tuple[int, int], tuple[int, str]]:
    """`npu-smi info -m`: (NPU ID, Chip ID) -> (logic id, chip name). Rows of the management unit have no logic id."""
    header = next((line for line in text.splitlines() if "Logic ID" in line), "")
    name_column = 4 if "Phy" in header else 3
    logic_ids = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > name_column and all(w.isdigit() for w in words[:3]):
            logic_ids[int(words[0]), int(words[1])] = (int(words[2]), soc_name(" ".join(words[name_column:])))
    return logic_ids


def parse_npu_table(text: str, logic: dict[tuple[int, int], tuple[int, str]] | None = None) -> Readings:
    """`npu-smi info`, in every layout: one or two dies per NPU, with or without HBM, with or without container ids.

    A chip takes two rows, so rows are read in pairs; which is which cannot be told from the row alone (`0  0` may be
    an NPU named 0). `logic` is the map of `info -m`; without it the devices are numbered in their order.
    """
    logic = logic or {}
    version = re.search(r"npu-smi\s+(\S+)", text)
    devices: list[DeviceReading] = []
    processes: list[ProcessReading] = []
    index_of_chip: dict[tuple[int, int], int] = {}  # (npu, chip) -> index
    first: list[str] | None = None
    in_processes = False
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        joined = " ".join(cells)
        if "Process id" in joined:
            in_processes = True
        elif in_processes:
            process = _process_row(cells, index_of_chip)
            if process is not None:
                processes.append(process)
        elif len(cells) >= 3 and not re.search(r"Health|Bus-Id", joined):
            cells = [" ".join(cells[:-2]), *cells[-2:]]  # Ascend950 gives the name a cell of its own
            if first is None:
                first = cells if cells[0][:1].isdigit() else None
                continue
            chip_id, device = _chip_rows(first, cells, len(devices), logic)
            index_of_chip[chip_id] = device.index
            devices.append(device)
            first = None
    return Readings("npu-smi", version.group(1) if version else "", devices, processes)


def _chip_rows(
    upper: list[str], lower: list[str], order: int, logic: dict[tuple[int, int], tuple[int, str]]
) -> tuple[tuple[int, int], DeviceReading]:
    """| 0  910B3 | OK | 97.5  41  0 / 0 |  over  | 0 [phy] | 0000:C1:00.0 | 0  0 / 0  3379 / 65536 |"""
    npu, _, name = upper[0].partition(" ")
    ids = [int(word) for word in lower[0].split() if word.isdigit()]
    chip_id = (int(npu), ids[0] if ids else 0)
    # Without the map: torch counts what is visible from 0, while Phy-ID counts the whole machine (8, 9 in a container).
    index, name = logic.get(chip_id, (order, name))
    pairs = [(int(used), int(total)) for used, total in PAIR.findall(lower[2])]
    # The last pair with a size is the memory tensors live in: HBM where there is some, else the LPDDR of a 310P.
    memory = next((pair for pair in reversed(pairs) if pair[1] > 0), None)
    power, temperature = (upper[2].split() + ["", ""])[:2]
    return chip_id, DeviceReading(
        index=index,
        name=soc_name(name),
        health=upper[1],
        utilisation=_number(lower[2].split(" ")[0]),
        temperature=_number(temperature),
        power=_number(power),
        memory_used=memory[0] * MIB if memory else None,
        memory_total=memory[1] * MIB if memory else None,
    )


def _process_row(cells: list[str], index_of_chip: dict[tuple[int, int], int]) -> ProcessReading | None:
    """| 0  0 | 576489 | python | 60703 | [pid in container] |; the name may be blank."""
    if len(cells) < 4 or not cells[1].isdigit():
        return None  # `No running processes found in NPU 1`
    ids = [int(word) for word in cells[0].split() if word.isdigit()]
    if not ids:
        return None
    chip_id = (ids[0], ids[1] if len(ids) > 1 else 0)
    inside = cells[4] if len(cells) > 4 else ""
    memory = _number(cells[3])
    return ProcessReading(
        pid=_pid_here(int(cells[1]), int(inside)) if inside.isdigit() and int(inside) > 0 else int(cells[1]),
        device=index_of_chip.get(chip_id, chip_id[0]),
        name=cells[2],
        memory=None if memory is None else int(memory) * MIB,
    )


def _pid_here(host: int, inside: int) -> int:
    """Pick the pid of a process that is valid here, the host's or its container's: on the host the kernel says that its
    process `host` is `inside` in a container."""
    try:
        in_container = re.search(r"^NSpid:.*\b(\d+)$", Path(f"/proc/{host}/status").read_text(), re.M)
    except OSError:
        return inside
    return host if in_container and int(in_container.group(1)) == inside else inside


# ------------------------------------------------------------------------------------------------- nvidia-smi

GPU_QUERY = "index,name,utilization.gpu,temperature.gpu,power.draw,memory.used,memory.total,uuid"
APP_QUERY = "pid,process_name,used_memory,gpu_uuid"


def _read_nvidia(timeout: float) -> Readings | Problem:
    gpus = run_tool("nvidia-smi", [f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"], timeout)
    if isinstance(gpus, Problem):
        return gpus
    apps = run_tool("nvidia-smi", [f"--query-compute-apps={APP_QUERY}", "--format=csv,noheader,nounits"], timeout)
    return parse_nvidia(gpus, "" if isinstance(apps, Problem) else apps)


def parse_nvidia(gpus: str, apps: str) -> Readings:
    """The two CSV answers of nvidia-smi; `[N/A]` and `[Not Supported]` become None."""
    devices, index_of = [], {}
    for row in _rows(gpus, 8):
        index, name, use, temperature, power, used, total, uuid = row
        index_of[uuid] = int(index)
        devices.append(
            DeviceReading(
                index=int(index),
                name=name,
                health="OK",
                utilisation=_number(use),
                temperature=_number(temperature),
                power=_number(power),
                memory_used=_mib(used),
                memory_total=_mib(total),
            )
        )
    processes = [
        ProcessReading(int(pid), index_of[uuid], Path(name).name, _mib(used))
        for pid, name, used, uuid in _rows(apps, 4)
        if pid.isdigit() and uuid in index_of
    ]
    return Readings("nvidia-smi", "", devices, processes)


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [row for row in rows if len(row) == width]


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number) * MIB


def _number(text: str) -> float | None:
    """A number, or None for `NA`, `-`, `[N/A]` and blanks."""
    try:
        return float(text)
    except ValueError:
        return None
