"""The list of checks that `ascendchat doctor` runs. machine.py defines what a check reads and returns.

A check is a function of `Machine` that returns one `CheckResult`. `gather` does everything slow or dangerous (importing
torch, asking npu-smi, reaching a mirror) once and in parallel; checks only judge the results. The texts of the faults
are in faults.json (JSON: the doctor must also work where PyYAML is missing).
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from ascendchat.config.data import HUGGING_FACE
from ascendchat.device import smi
from ascendchat.doctor import probe
from ascendchat.doctor.machine import OPTIONAL, REQUIRED, VENDOR, CheckResult, Machine
from ascendchat.errors import home


def installed() -> dict[str, str]:
    """Versions of the distributions whose pairing matters, without importing them."""
    versions = {}
    for name in ("torch", "torch_npu", "triton", "triton-ascend"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def gather(lang: str, deep: bool = False, root: Path = Path("/")) -> Machine:
    """Ask everything slow in parallel: three interpreters, two vendor tools, one mirror."""
    environ = dict(os.environ)
    versions = installed()
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    with ThreadPoolExecutor(max_workers=8) as pool:
        torch = pool.submit(probe.ask_torch, environ)
        npu = pool.submit(probe.ask_npu, environ) if "torch_npu" in versions else None
        wheels = pool.submit(probe.ask_wheels, [*REQUIRED, *OPTIONAL, *VENDOR], environ)
        npu_smi = pool.submit(smi.read, "npu-smi")
        nvidia_smi = pool.submit(smi.read, "nvidia-smi")
        mirror = None if offline else pool.submit(probe.reach, environ.get("HF_ENDPOINT") or HUGGING_FACE)
        return Machine(
            lang=lang,
            environ=environ,
            home=home(),
            torch=torch.result(),
            npu=npu.result() if npu else None,
            wheels=wheels.result(),
            npu_smi=npu_smi.result(),
            nvidia_smi=nvidia_smi.result(),
            mirror=mirror.result() if mirror else None,
            versions=versions,
            root=root,
            deep=deep,
        )


def run_checks(machine: Machine) -> list[CheckResult]:
    """Run every check, in the order in which a user would mend things."""
    from ascendchat.doctor import checks_npu, checks_system

    functions = [
        checks_system.python,
        checks_npu.torch,
        checks_npu.torch_npu,
        checks_npu.two_accelerators,
        checks_npu.device,
        checks_npu.cann,
        checks_npu.operator_package,
        checks_npu.driver,
        checks_npu.npu_smi,
        checks_npu.device_nodes,
        checks_npu.group,
        checks_npu.visible_devices,
        checks_npu.bf16,
        checks_npu.collectives,
        checks_npu.variables,
        checks_system.wheels,
        checks_system.compiler,
        checks_system.memory,
        checks_system.shared_memory,
        checks_system.open_files,
        checks_system.ports,
        checks_system.disk,
        checks_system.mirror,
        checks_system.proxy,
        checks_system.stored_data,
    ]
    return [function(machine) for function in functions]
