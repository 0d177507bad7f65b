"""Instruments of the simulated CANN, for tests and benchmarks inside a process that runs on it.

    cannsim run -- python -c "import torch, cannsim; torch.ones(2).npu() + 1; print(cannsim.launches())"

Importing this package changes nothing: a process runs on cannsim only when `cannsim run`, the pytest plugin or
`source env.sh` has prepared its environment. Needs no torch.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import sys

from cannsim import build
from cannsim.build import ROOT

__version__ = "0.1.0"


def built() -> bool:
    """True when the libraries are there; `cannsim build` makes them."""
    try:
        return all((build.home() / "lib64" / f"lib{name}.so").exists() for name in build.LIBRARIES)
    except build.CannotBuild:
        return False


def active() -> bool:
    """True when this process was started in the environment of cannsim."""
    home = os.environ.get("CANNSIM_HOME", "")
    return bool(home) and os.path.join(home, "lib64") in os.environ.get("LD_LIBRARY_PATH", "").split(":")


def environment(
    *,
    devices: int | None = None,
    chip: str | None = None,
    memory_gb: float | None = None,
    processes_per_device: int | None = None,
    state: str | None = None,
) -> dict[str, str]:
    """The environment variables (a full copy of os.environ) in which a child process runs on cannsim."""
    env = dict(os.environ)
    home = build.home()
    lib = str(home / "lib64")
    paths = [p for p in env.get("LD_LIBRARY_PATH", "").split(":") if p and p != lib]
    env["LD_LIBRARY_PATH"] = ":".join([lib, *paths])
    env["CANNSIM_HOME"] = env["ASCEND_HOME_PATH"] = env["ASCEND_TOOLKIT_HOME"] = str(home)
    env["ASCEND_OPP_PATH"] = str(home / "opp")
    env["LAUNCH_COUNTER"] = "cannsim"  # for programs that ask some module how much they have launched
    tools = str(ROOT)  # npu-smi lies here
    env["PATH"] = ":".join([tools, *(p for p in env.get("PATH", "").split(":") if p != tools)])
    if build.in_clone():  # `import cannsim` works in the child also where the clone is not installed
        parent = str(ROOT.parent)
        env["PYTHONPATH"] = ":".join([parent, *(p for p in env.get("PYTHONPATH", "").split(":") if p and p != parent)])
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    if devices is not None:
        env["CANNSIM_DEVICES"] = str(devices)
    if chip is not None:
        env["CANNSIM_CHIP"] = chip
    if memory_gb is not None:
        env["CANNSIM_MEMORY_GB"] = str(memory_gb)
    if processes_per_device is not None:
        env["CANNSIM_PROCESSES_PER_DEVICE"] = str(processes_per_device)
    if state is not None:
        env["CANNSIM_STATE"] = state
    return env


@functools.cache
def _runtime() -> ctypes.CDLL:
    if not active():
        raise RuntimeError("this process does not run on cannsim; start it with: cannsim run -- COMMAND")
    library = ctypes.CDLL("libascendcl.so")
    library.cannsim_counters_json.restype = ctypes.c_char_p
    library.cannsim_allocated.restype = ctypes.c_uint64
    library.cannsim_peak.restype = ctypes.c_uint64
    return library


def _settle() -> None:
    """Wait for torch_npu's own launch queue and the device, so that everything launched so far is counted."""
    torch = sys.modules.get("torch")
    if torch is not None and "torch_npu" in sys.modules and torch.npu.is_initialized():
        torch.npu.synchronize()


def counters() -> dict[str, tuple[int, int]]:
    """(calls, bytes) of every simulated function called since reset(), by name."""
    _settle()
    text = _runtime().cannsim_counters_json().decode()
    return {name: (calls, moved) for name, (calls, moved) in json.loads(text).items()}


def is_launch(name: str) -> bool:
    """Whether this function launches work: an operator (aclnn*, or aclop/* of the older interface) or a collective."""
    setup = ("HcclComm", "HcclGet", "HcclSet", "HcclCreate", "HcclGroup")
    return name.startswith(("aclnn", "aclop/")) or (name.startswith("Hccl") and not name.startswith(setup))


def launches() -> dict[str, int]:
    """Operators and collectives launched since reset(): how often each. Replays of a graph count once."""
    return {name: calls for name, (calls, _) in counters().items() if calls and is_launch(name)}


def aicpu() -> dict[str, int]:
    """Operators among `launches` that the chip runs on its AICPU, in the dtype they had: how often each."""
    return _marked("aicpu/")


def inner() -> dict[str, int]:
    """Kernels that operators launch before their own, to make their arguments contiguous; not in `launches`."""
    return _marked("inner/")


def boxed() -> dict[str, int]:
    """Operators that are not simulated and ran on the CPU instead (`run --boxed`): how often each."""
    return _marked("boxed/")


def _marked(mark: str) -> dict[str, int]:
    return {
        name.removeprefix(mark): calls for name, (calls, _) in counters().items() if calls and name.startswith(mark)
    }


def reset() -> None:
    """Start counting anew (also the peak of memory)."""
    _settle()
    _runtime().cannsim_reset()


def set_faults(rules: str) -> None:
    """From now on these faults and no others, in the words of CANNSIM_FAULT; "" takes all away.

    The n-th call is counted from here on.
    """
    for rule in rules.split(",") if rules else []:
        if not re.fullmatch(r"[^:,@]+:[1-9]\d*:([1-9]\d*|hang|kill)(@\d+)?", rule):
            raise ValueError(
                f"cannot read the fault {rule!r}; expected name:nth:action[@rank], action = error code, hang or kill"
            )
    _settle()
    _runtime().cannsim_set_faults(rules.encode())


def allocated(device: int = 0) -> int:
    """Bytes of device memory that this process holds (segments of the caching allocator included)."""
    return int(_runtime().cannsim_allocated(device))


def peak_allocated(device: int = 0) -> int:
    """The most bytes that this process held on the device since reset()."""
    return int(_runtime().cannsim_peak(device))


def pending(device: int = 0) -> int:
    """Tasks queued on the streams of the device and not yet done. Does not wait."""
    return int(_runtime().cannsim_pending(device))
