"""The checks of `ascendchat doctor`: every failing path on a machine built for it. The real one: test_doctor_run.py."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendchat.chips import find
from ascendchat.device import smi
from ascendchat.doctor import checks, checks_npu, checks_system, probe
from ascendchat.doctor.command import plain_lines, summarize
from ascendchat.doctor.machine import CheckResult, Machine
from ascendchat.doctor.probe import Probe
from ascendchat.errors import home

SAMPLES = Path(__file__).parents[1] / "device" / "smi_samples"
NO_TOOL = smi.Problem("npu-smi is not installed", "npu-smi", missing=True)
WHEELS = Probe({name: "1.0" for name in [*checks.REQUIRED, *checks.OPTIONAL, *checks.VENDOR]})
CPU_TORCH = Probe({"version": "2.13.0+cpu", "cuda_build": "", "cuda": [], "cuda_bf16": False, "mps": [], "gloo": True})
LIBHCCL = (
    "Traceback (most recent call last):\n"
    "ImportError: libhccl.so: cannot open shared object file: No such file or directory\n"
    "The above exception was the direct cause of the following exception:\n"
    "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0."
)


def laptop(tmp_path: Path, **changes: Any) -> Machine:
    """A healthy machine without an accelerator; `root` is a folder with nothing but /dev/shm."""
    (tmp_path / "dev/shm").mkdir(parents=True, exist_ok=True)
    return replace(
        Machine(
            lang="en",
            environ={"PATH": os.environ["PATH"]},
            home=home(),
            torch=CPU_TORCH,
            npu=None,
            wheels=WHEELS,
            npu_smi=NO_TOOL,
            nvidia_smi=smi.Problem("nvidia-smi is not installed", "nvidia-smi", missing=True),
            mirror="",
            versions={"torch": "2.13.0+cpu"},
            root=tmp_path,
        ),
        **changes,
    )


def atlas(tmp_path: Path, **changes: Any) -> Machine:
    """A healthy Atlas A2 server: eight 910B3, driver, CANN 9.1.0 loaded, its operators installed."""
    for name in [f"davinci{i}" for i in range(8)] + list(checks_npu.MANAGERS):
        put(tmp_path / "dev" / name)
    put(tmp_path / "usr/local/Ascend/driver/version.info", "Version=25.5.1\nascendhal_version=7.35.23\n")
    cann = tmp_path / "usr/local/Ascend/cann"
    put(cann / "set_env.sh", "export ASCEND_HOME_PATH=...\n")
    put(cann / "aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=9.1.0\n")
    put(cann / "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/add/add.json")
    told = {"version": "2.12.0", "count": 8, "available": True, "hccl": True, "names": ["Ascend910B3"] * 8}
    settings: dict[str, Any] = {
        "environ": {"PATH": os.environ["PATH"], "ASCEND_HOME_PATH": str(cann)},
        "npu": Probe({**told, "bf16": True}),
        "npu_smi": smi.parse_npu_table((SAMPLES / "a2_25.txt").read_text().replace("Alarm", "OK   ")),
        "versions": {"torch": "2.12.0+cpu", "torch_npu": "2.12.0"},
    }
    return laptop(tmp_path, **{**settings, **changes})


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def with_env(machine: Machine, **variables: str) -> Machine:
    return replace(machine, environ={**machine.environ, **variables})


def told(check: CheckResult, status: str, *parts: str) -> None:
    """The check has this status, and found, why and fix together say each of these."""
    whole = f"{check.found}\n{check.why}\n{check.fix}"
    assert check.status == status, check
    for part in parts:
        assert part in whole, (part, check)
    if status in ("warn", "fail"):
        assert check.why, check
        assert check.fix, check


# ------------------------------------------------------------------------------------------------ whole machines


def test_machine_without_accelerator_is_ready_on_the_cpu(tmp_path: Path) -> None:
    machine = laptop(tmp_path)
    found = checks.run_checks(machine)
    assert {c.status for c in found} <= {"ok", "skip", "warn"}
    text, following = summarize(machine, found)
    assert "training uses cpu" in text
    assert following == "ascendchat plan --depth 4 --chip cpu"


def test_healthy_atlas_server_passes_every_check(tmp_path: Path) -> None:
    machine = atlas(tmp_path)
    troubled = [c for c in checks.run_checks(machine) if c.status == "fail"]
    assert troubled == []
    text, following = summarize(machine, checks.run_checks(machine))
    assert "npu (Ascend910B3) x 8" in text
    assert following == "ascendchat doctor --devices 8"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_complaint_says_why_and_how_to_mend_it_in_both_languages(tmp_path: Path, lang: str) -> None:
    put(tmp_path / "dev/davinci0")
    sick = replace(
        laptop(tmp_path, lang=lang),
        python=(3, 9, 1),
        torch=Probe({}, "ImportError: libtorch.so"),
        npu=Probe({}, LIBHCCL),
        npu_smi=smi.Problem("npu-smi failed (exit status 1): dcmi ... ret is -8005", "npu-smi"),
        mirror="no answer",
        wheels=Probe({**WHEELS.values, "pyarrow": None}),
        versions={"torch": "2.13.0", "torch_npu": "2.12.0"},
    )
    bad = [c for c in checks.run_checks(sick) if c.status in ("warn", "fail")]
    assert len(bad) >= 8
    for check in bad:
        assert check.found, check
        assert check.why, check
        assert check.fix, check
    chinese = [c for c in bad if any("一" <= ch <= "鿿" for ch in c.why)]
    assert len(chinese) == (len(bad) if lang == "zh" else 0)
    assert len(plain_lines(sick, bad)) >= 3 * len(bad)


# ------------------------------------------------------------------------------------------------ one check each

BROKEN = Probe({}, "Traceback ...\nImportError: libtorch_cpu.so: cannot open shared object file")
TWO = "RuntimeError: Two accelerators cannot be used at the same time in PyTorch: npu and cuda."
HELD = "Initialize:... error code is 507033\n[Error]: Failed to start the device."
SET_ENV = "source /usr/local/Ascend/cann/set_env.sh"


def asked(**variables: str) -> Callable[[Path], Machine]:
    """An Atlas server whose shell has these variables."""
    return lambda path: with_env(atlas(path), **variables)


def visible(numbers: str) -> Callable[[Path], Machine]:
    return asked(ASCEND_RT_VISIBLE_DEVICES=numbers)


def versions(torch: str, torch_npu: str) -> Callable[[Path], Machine]:
    return lambda path: atlas(path, versions={"torch": torch, "torch_npu": torch_npu})


def unloaded(path: Path) -> Machine:
    """CANN is on the disk, and nobody has loaded it."""
    return atlas(path, npu=Probe({}, LIBHCCL), environ={"PATH": os.environ["PATH"]})


def npu_says(path: Path, **values: Any) -> Machine:
    machine = atlas(path)
    assert machine.npu is not None
    return replace(machine, npu=Probe({**machine.npu.values, **values}))


def smi_fails(said: str) -> Callable[[Path], Machine]:
    return lambda path: laptop(path, npu_smi=smi.Problem(said, "npu-smi"))


def without_driver(path: Path) -> Machine:
    """The chip is on the bus, and nothing is installed."""
    put(path / "sys/bus/pci/devices/0000:c1:00.0/vendor", "0x19e5\n")
    put(path / "sys/bus/pci/devices/0000:c1:00.0/class", "0x120000\n")
    return laptop(path)


def old_cann(path: Path) -> Machine:
    """A chip with CANN 8.5, and no torch_npu."""
    put(path / "old/ascend-toolkit/8.5.0/ascend_toolkit_install.info", "version=8.5.0\n")
    machine = atlas(path, npu=None, versions={"torch": "2.13.0+cpu"})
    return with_env(machine, ASCEND_HOME_PATH=str(path / "old/ascend-toolkit/8.5.0"))


def sick(path: Path) -> Machine:
    return atlas(path, npu_smi=smi.parse_npu_table((SAMPLES / "a2_25.txt").read_text()))


def unseen_gpu(path: Path) -> Machine:
    return laptop(path, nvidia_smi=smi.Readings("nvidia-smi", devices=[smi.DeviceReading(0, "NVIDIA H200")]))


def cuda_torch(path: Path) -> Machine:
    return atlas(path, npu=Probe({}, TWO), torch=Probe({**CPU_TORCH.values, "cuda_build": "12.8"}))


def no_torch_npu(path: Path) -> Machine:
    return atlas(path, npu=None, versions={"torch": "2.13.0+cpu"})


PAIR = "pip install torch==2.12.0 torch_npu==2.12.0"
CASES: list[tuple[Callable[[Machine], CheckResult], Callable[[Path], Machine], str, list[str]]] = [
    (checks_npu.torch, lambda path: laptop(path, torch=BROKEN), "fail", ["libtorch_cpu", "pip install --force-reins"]),
    (checks_npu.torch, lambda path: laptop(path, torch=BROKEN, versions={}), "fail", ["pip install torch"]),
    (checks_npu.torch_npu, unloaded, "fail", ["libhccl.so", SET_ENV, "AUTOLOAD=0"]),
    (checks_npu.torch_npu, versions("2.13.0+cpu", "2.12.0"), "fail", [PAIR]),
    (checks_npu.torch_npu, versions("2.10.0+cpu", "2.10.0.post4"), "ok", []),
    (checks_npu.torch_npu, no_torch_npu, "fail", [f"{PAIR} decorator"]),  # the pair of this CANN, not the newest
    (checks_npu.torch_npu, old_cann, "fail", ["torch_npu==2.9.0 decorator"]),
    (checks_npu.two_accelerators, cuda_torch, "fail", ["CUDA 12.8", "torch==2.12.0+cpu"]),
    (checks_npu.device, unloaded, "fail", ["Ascend chip is here"]),
    (checks_npu.device, unseen_gpu, "warn", ["NVIDIA H200", "only the CPU"]),
    (checks_npu.device, lambda path: npu_says(path, problem=HELD), "fail", ["507033", "ascendchat clean"]),
    (checks_npu.device, lambda p: with_env(laptop(p), ASCENDCHAT_DEVICE="npu"), "fail", ["ASCENDCHAT_DEVICE=npu"]),
    (checks_npu.device, asked(ASCENDCHAT_DEVICE="cpu"), "ok", ["cpu"]),
    (checks_npu.device, lambda path: with_env(unloaded(path), ASCENDCHAT_DEVICE="cpu"), "ok", ["cpu"]),
    (checks_npu.visible_devices, visible("0,1,2"), "ok", ["0,1,2"]),
    (checks_npu.visible_devices, visible("2,1"), "fail", ["export ASCEND_RT_VISIBLE_DEVICES=1,2"]),
    (checks_npu.visible_devices, visible("0, 1"), "fail", ["export ASCEND_RT_VISIBLE_DEVICES=0,1"]),
    (checks_npu.visible_devices, visible("0,1,8"), "fail", ["export ASCEND_RT_VISIBLE_DEVICES=0,1"]),
    (checks_npu.collectives, atlas, "ok", ["hccl"]),
    (checks_npu.collectives, lambda path: npu_says(path, hccl=False), "fail", ["hccl is missing", "gloo"]),
    (checks_npu.variables, asked(ASCEND_LAUNCH_BLOCKING="1"), "warn", ["slower", "unset ASCEND_LAUNCH_BLOCKING"]),
    (checks_npu.cann, atlas, "ok", ["9.1.0"]),
    (checks_npu.cann, unloaded, "fail", ["not loaded", SET_ENV]),
    (checks_npu.cann, versions("2.9.0", "2.9.0"), "warn", ["CANN 9.1.0", "CANN 8.5.0"]),
    (checks_npu.cann, asked(ASCEND_HOME_PATH="/nowhere/cann"), "fail", ["/nowhere/cann does not exist", SET_ENV]),
    (checks_npu.driver, without_driver, "fail", ["version.info"]),
    (checks_npu.device_nodes, without_driver, "fail", ["/dev/davinci0"]),
    (checks_npu.npu_smi, sick, "warn", ["5 Alarm", "npu-smi info -t health -i 5"]),
    (checks_npu.npu_smi, smi_fails("dcmi model initialized failed. ret is -8020"), "fail", ["another container"]),
    (checks_npu.npu_smi, smi_fails("dcmi module: ret is -8005"), "fail", ["-8005", "--device /dev/davinci0"]),
    (checks_npu.npu_smi, smi_fails("npu-smi did not answer within 15 s"), "fail", ["dmesg"]),
    (checks_system.mirror, lambda p: laptop(p, mirror="late"), "warn", ["export HF_ENDPOINT=https://hf-mirror.com"]),
    (checks_system.mirror, lambda path: laptop(path, mirror=None), "skip", ["HF_HUB_OFFLINE"]),
]


@pytest.mark.parametrize(("check", "machine", "status", "parts"), CASES)
def test_a_check_tells_what_it_found_and_what_to_do(
    tmp_path: Path,
    check: Callable[[Machine], CheckResult],
    machine: Callable[[Path], Machine],
    status: str,
    parts: list[str],
) -> None:
    told(check(machine(tmp_path)), status, *parts)


def test_a_network_card_of_the_same_maker_is_no_chip(tmp_path: Path) -> None:
    assert without_driver(tmp_path).has_chip
    put(tmp_path / "sys/bus/pci/devices/0000:c1:00.0/class", "0x020000\n")
    assert not laptop(tmp_path).has_chip


def test_next_command_names_the_chip_only_when_the_table_knows_it(tmp_path: Path) -> None:
    for name, ending in (("NVIDIA H200", " --chip 'NVIDIA H200'"), ("NVIDIA Future 1", "")):
        machine = laptop(tmp_path, torch=Probe({**CPU_TORCH.values, "cuda": [name], "cuda_bf16": True, "nccl": True}))
        assert summarize(machine, checks.run_checks(machine))[1] == "ascendchat plan --depth 12" + ending


@pytest.mark.parametrize(("chip", "status"), [("Ascend910B3", "ok"), ("Ascend910B", "warn"), ("Ascend310P3", "warn")])
def test_bf16_is_told_by_the_whole_name_of_the_chip(tmp_path: Path, chip: str, status: str) -> None:
    machine = atlas(tmp_path, npu=Probe({"version": "2.12.0", "count": 1, "names": [chip]}))
    check = checks_npu.bf16(machine)
    told(check, status, chip)
    if check.fix:
        assert check.fix.startswith("ascendchat plan --chip ")
        assert not find(check.fix.split()[-1]).bf16


# ------------------------------------------------------------------------------------------------ CANN, driver, tools


def test_operators_of_another_chip_are_a_failure(tmp_path: Path) -> None:
    machine = atlas(tmp_path)
    told(checks_npu.operator_package(machine), "ok", "ascend910b")
    kernels = tmp_path / "usr/local/Ascend/cann/opp/built-in/op_impl/ai_core/tbe/kernel"
    (kernels / "ascend910b").rename(kernels / "ascend310p")
    told(checks_npu.operator_package(machine), "fail", "needs ascend910b, found ascend310p", "910b-ops_9.1.0")


def test_missing_device_files_are_named_for_docker(tmp_path: Path) -> None:
    machine = replace(atlas(tmp_path), npu=Probe({}, LIBHCCL))
    (tmp_path / "dev/devmm_svm").unlink()
    told(checks_npu.device_nodes(machine), "fail", "docker run --device /dev/devmm_svm")


def test_device_files_closed_to_the_user_name_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: "davinci" not in str(path))  # root may open everything
    told(checks_npu.group(atlas(tmp_path)), "fail", "/dev/davinci0", "usermod -aG")


# ------------------------------------------------------------------------------------------------ around the chips


def test_memory_limit_of_the_container_counts(tmp_path: Path) -> None:
    put(tmp_path / "proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 60000000 kB\n")
    told(checks_system.memory(laptop(tmp_path)), "ok", "64.0 GiB")
    put(tmp_path / "sys/fs/cgroup/memory.max", str(2 * 2**30))
    put(tmp_path / "sys/fs/cgroup/memory.current", str(2**30))
    told(checks_system.memory(laptop(tmp_path)), "warn", "1.0 GiB free of 2.0 GiB")


def test_small_shared_memory_names_the_docker_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    told(checks_system.shared_memory(laptop(tmp_path, system="Linux")), "warn", "64 MiB", "--shm-size=16g")


def test_ports_of_hccl_that_are_taken_are_named(tmp_path: Path) -> None:
    machine = atlas(tmp_path)
    line = "   0: 00000000:EA60 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1\n"
    put(tmp_path / "proc/net/tcp", "  sl  local_address rem_address   st\n" + line)
    told(checks_system.ports(machine), "warn", "60000", "HCCL_IF_BASE_PORT")
    told(checks_system.ports(with_env(machine, HCCL_IF_BASE_PORT="50000")), "ok")


def test_proxy_is_shown_without_its_password(tmp_path: Path) -> None:
    check = checks_system.proxy(with_env(laptop(tmp_path), https_proxy="http://me:secret@proxy.lan:3128"))
    told(check, "warn", "proxy.lan:3128", "no_proxy")
    assert "secret" not in str(check)


def test_reach_gives_up_when_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts the connection, never answers
        assert probe.reach(f"http://127.0.0.1:{server.getsockname()[1]}", seconds=0.2)


# ------------------------------------------------------------------------------------------------ stored files


def test_stored_files_are_compared_with_their_manifest(tmp_path: Path) -> None:
    folder = home() / "data" / "shards"
    content = b"text" * 100
    put(folder / "a.bin").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    put(folder / "manifest.json", json.dumps({"files": {"a.bin": entry}}))
    machine = laptop(tmp_path, home=home())
    told(checks_system.stored_data(machine), "ok", "1 folders, 1 files", "1 checksums right")
    (folder / "a.bin").write_bytes(b"T" + content[1:])
    told(checks_system.stored_data(machine), "fail", "a.bin: checksum differs", f"rm -r {folder}")
    (folder / "a.bin").write_bytes(content[:-1])
    told(checks_system.stored_data(machine), "fail", "399 bytes, expected 400")
    (folder / "a.bin").unlink()
    told(checks_system.stored_data(machine), "fail", "a.bin: missing")
    put(folder / "manifest.json", "{half")
    told(checks_system.stored_data(machine), "fail", "the manifest cannot be read")


def test_without_deep_only_sizes_are_compared_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home() / "data" / "shards"
    put(folder / "a.bin", "x")
    put(folder / "manifest.json", json.dumps({"files": {"a.bin": {"bytes": 1, "sha256": "wrong"}}}))
    told(checks_system.stored_data(laptop(tmp_path, home=home())), "fail", "a.bin: checksum differs")
    monkeypatch.setattr(checks_system, "BUDGET", -1.0)
    unhashed = checks_system.stored_data(laptop(tmp_path, home=home()))
    told(unhashed, "ok", "0 checksums right (all: ascendchat doctor --deep)")
