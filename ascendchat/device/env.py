"""The environment of a run, set once, before torch is imported, and only where the user has set nothing.

`ascendchat COMMAND --device-type npu --npu-debug` calls `prepare_environment("npu", debug=True)`; processes started by
torchrun run the same code. env.py reports the user's own settings that do harm; nothing changes them. No torch.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from ascendchat.chips import KINDS
from ascendchat.errors import UserError, nearest
from ascendchat.version import install_command

# Prints "type count". In its own process: importing torch is slow, and this one must not hold a device.
COUNT_PROGRAM = """
import sys
from ascendchat.errors import UserError
from ascendchat.device import pick
from ascendchat.device.env import prepare_environment
kind = sys.argv[1] or None
try:
    prepare_environment(kind)
    device = pick(kind)
except UserError as error:
    sys.exit(str(error))
print("\\n", device.type, device.count())
"""


def count_devices(kind: str | None) -> int:
    """Visible devices of this type (None: of the best type found); on CPU one process."""
    if kind == "cpu":
        return 1
    counted = subprocess.run(
        [sys.executable, "-c", COUNT_PROGRAM, kind or ""], capture_output=True, text=True, check=False
    )
    if counted.returncode:
        last = (counted.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the devices could not be counted: {last}")
    return max(1, int(counted.stdout.split()[-1]))


AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # "0": `import torch` leaves torch_npu alone
INSTALL_NPU = install_command("npu")
SOURCE_CANN = "source /usr/local/Ascend/cann/set_env.sh (or /usr/local/Ascend/ascend-toolkit/set_env.sh)"

NPU_DEBUG = {
    **KINDS["npu"].environment,
    "ASCEND_LAUNCH_BLOCKING": "1",  # the Python line that fails is the line that is shown
    "TASK_QUEUE_ENABLE": "0",
    "ASCEND_GLOBAL_LOG_LEVEL": "1",  # info, written to $ASCEND_PROCESS_LOG_PATH or ~/ascend/log
    "ASCEND_GLOBAL_EVENT_ENABLE": "1",
    "TORCH_HCCL_DESYNC_DEBUG": "1",  # a hung collective names the ranks that differ
}
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK_ID", "RANK_SIZE")
PLACE = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
PLACE_OF_JOB = ("TORCHELASTIC_", "ROLE_", "GROUP_WORLD_", "SLURM_", "PET_", "MA_NUM_", "VC_")  # how they begin
ALLOCATORS = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # both give way to PYTORCH_ALLOC_CONF


@dataclass(frozen=True)
class MachineFacts:
    """Facts about the machine that need no import of torch."""

    torch_npu: bool  # the package is installed
    cann: bool  # the libraries torch_npu links to can be found by the loader
    driver: bool  # and the driver under them is there
    nodes: tuple[str, ...]  # /dev/davinci0 ...
    nvidia: bool  # an NVIDIA driver is loaded

    def has(self, device_type: str) -> bool:
        """True if devices of this type can be seen without torch."""
        return {"npu": bool(self.nodes) or (self.cann and self.driver), "cuda": self.nvidia}.get(device_type, False)

    def may_have(self, device_type: str) -> bool:
        """True if torch is worth asking for numbered devices of this type."""
        seen = {"npu": self.torch_npu and self.cann and self.driver, "cuda": self.nvidia}
        return seen.get(device_type, bool(KINDS[device_type].visible))


@dataclass(frozen=True)
class PreparedEnvironment:
    """Result of `prepare_environment`."""

    device_type: str | None  # asked for, or None: `device.pick` decides
    set: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # the user's own values where the profile has another
    warnings: list[str] = field(default_factory=list)


def requested(device_type: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The device type named by the argument, else by $ASCENDCHAT_DEVICE, else None."""
    name = device_type or environ.get("ASCENDCHAT_DEVICE") or None
    if name in (None, "auto"):
        return None
    if name not in KINDS:
        origin = "--device-type" if device_type else "ASCENDCHAT_DEVICE"
        raise UserError(f"{origin}: {name!r} is not a device type; {nearest(str(name), list(KINDS))}")
    return name


def look(environ: Mapping[str, str] = os.environ) -> MachineFacts:
    """Look at the machine from the outside, without importing torch."""
    nodes = tuple(sorted(glob.glob("/dev/davinci[0-9]*")))
    acl = _where("libascendcl.so", environ)
    cann = bool(acl and _where("libhccl.so", environ))
    # An image with CANN on a machine without the driver: libascendcl.so is there but cannot be loaded.
    driver = bool(nodes) or bool(_where("libascend_hal.so", environ)) or (cann and _loads(acl))
    return MachineFacts(
        torch_npu=importlib.util.find_spec("torch_npu") is not None,
        cann=cann,
        driver=driver,
        nodes=nodes,
        nvidia=os.path.exists("/proc/driver/nvidia/version"),
    )


def _where(library: str, environ: Mapping[str, str]) -> str:
    """Find a library as the loader would: its path in LD_LIBRARY_PATH, its name in the cache of ldconfig, or ""."""
    for folder in environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and (Path(folder) / library).is_file():
            return str(Path(folder) / library)
    cache = Path("/etc/ld.so.cache")
    return library if cache.is_file() and f"/{library}\0".encode() in cache.read_bytes() else ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def prepare_environment(
    device_type: str | None,
    debug: bool = False,
    generates: bool = False,
    environ: MutableMapping[str, str] = os.environ,
    machine: MachineFacts | None = None,
) -> PreparedEnvironment:
    """Set the variables of the device's profile in `environ`, where they are not set yet. Call before `import torch`.

    `generates`: the command decodes with captured graphs. `machine` is what `look` returned; tests give their own.
    """
    requested_type = requested(device_type, environ)
    machine_facts = machine or look(environ)
    warnings: list[str] = []
    profile: dict[str, str] = {}
    npu = _npu_expected(requested_type, machine_facts, environ, warnings)
    kind = "npu" if npu else requested_type or ("cuda" if machine_facts.nvidia else "cpu")
    profile |= KINDS[kind].environment | (KINDS[kind].generating if generates else {})
    if npu:
        profile |= NPU_DEBUG if debug else {}
        general = environ.get("PYTORCH_ALLOC_CONF")
        if general is not None and environ.get("PYTORCH_NPU_ALLOC_CONF", general) != general:
            raise UserError(
                "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set, and torch_npu stops when they are; "
                "unset one of them: unset PYTORCH_NPU_ALLOC_CONF"
            )
    if not (npu and machine_facts.cann and machine_facts.driver):
        # `import torch` must not fail over a torch_npu that cannot load. device/npu.py imports it by name when an NPU
        # was asked for, and turns a failure into one sentence.
        profile[AUTOLOAD] = "0"
    if debug and not npu:
        warnings.append(f"--npu-debug changes nothing here: no NPU is used ({requested_type or 'none was found'})")
    prepared = PreparedEnvironment(requested_type, warnings=warnings)
    for name, value in profile.items():
        if name in ALLOCATORS and "PYTORCH_ALLOC_CONF" in environ:
            prepared.kept["PYTORCH_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"]
        elif name not in environ:
            environ[name] = prepared.set[name] = value
        elif environ[name] != value:
            prepared.kept[name] = environ[name]
    if npu:
        ours = NPU_DEBUG if debug else {}
        warnings += [h.sentence() for h in harmful_settings(environ) if ours.get(h.name) != h.value]
        if debug:
            kept = [f"{name}={value}" for name, value in prepared.kept.items() if name in NPU_DEBUG]
            warnings += [f"{text} was already set and stays, so --npu-debug is not complete" for text in kept]
    return prepared


def without_own_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that prepares its own: without what a profile here may have set, and without the
    place of this process among its ranks and of this machine in its job, as torchrun or a scheduler told it."""
    profiles = [setting for row in KINDS.values() for setting in (*row.environment.items(), *row.generating.items())]
    profiles += NPU_DEBUG.items()
    return {
        name: value
        for name, value in environ.items()
        if (name, value) not in profiles and name not in PLACE and not name.startswith(PLACE_OF_JOB)
    }


def devices_behind(
    device_type: str, used: int, count: int, there: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variable by which a process sees the `count` devices behind the first `used` of the `there` that this one
    sees; none where devices have no numbers."""
    variable = KINDS[device_type].visible
    if not variable:
        return {}
    listed = environ.get(variable, "")
    names = listed.split(",") if listed else [str(number) for number in range(there)]
    if used + count > min(there, len(names)):
        raise UserError(
            f"{used} device(s) for training and {count} for rollouts are asked for, and {min(there, len(names))} "
            f"{KINDS[device_type].title}(s) are visible; lower --rollout-devices, or train on fewer devices"
        )
    return {variable: ",".join(names[used : used + count])}


def _npu_expected(asked: str | None, machine: MachineFacts, environ: Mapping[str, str], warnings: list[str]) -> bool:
    """Decide, before torch is imported, if this run will use an NPU."""
    if asked == "npu":
        if not machine.torch_npu:
            raise UserError(torch_npu_missing(machine))
        return True
    if asked is not None or environ.get(AUTOLOAD) == "0":
        return False
    if not machine.torch_npu:
        if machine.nodes:
            warnings.append(
                f"{len(machine.nodes)} NPU(s) are here ({machine.nodes[0]}) but torch_npu is not installed, so they "
                f"are not used: {INSTALL_NPU}"
            )
        return False
    if machine.cann and machine.driver:
        return True
    if machine.nodes:
        raise UserError(cann_missing(machine))
    what = "the NPU driver is not" if machine.cann else "CANN is not loaded and no /dev/davinci* is"
    warnings.append(f"torch_npu is installed but {what} there, so it is left alone ({AUTOLOAD}=0)")
    return False


def torch_npu_missing(machine: MachineFacts) -> str:
    """The sentence for an NPU without its PyTorch plug-in."""
    nodes = f"{len(machine.nodes)} device(s) in /dev/davinci*" if machine.nodes else "no /dev/davinci* either"
    return (
        f"no NPU can be used: torch_npu is not installed (found {nodes}); "
        f"{INSTALL_NPU}, or choose another device, for example --device-type cpu"
    )


def cann_missing(machine: MachineFacts) -> str:
    """The sentence for an NPU whose CANN libraries are not loaded."""
    nodes = f"{len(machine.nodes)} device(s) in /dev/davinci*" if machine.nodes else "no /dev/davinci*"
    return (
        f"torch_npu is installed but the CANN libraries are not loaded (found {nodes}); first run: {SOURCE_CANN}, "
        f"or do without the NPU: --device-type cpu (for other programs: {AUTOLOAD}=0)"
    )


def load_problem(error: BaseException, machine: MachineFacts) -> str:
    """Why torch_npu could not be loaded, as one sentence, from the error (and its causes) that loading it raised."""
    causes: list[str] = []
    link: BaseException | None = error
    while link is not None:
        causes.append(str(link))
        link = link.__cause__ or link.__context__
    text = " ".join(causes)
    if "libascend_hal.so" in text or "libdrvdsmi" in text:
        return (
            "torch_npu cannot load the NPU driver (libascend_hal.so was not found); start the container with the "
            "driver's folders and devices mounted, then run: ascendchat doctor"
        )
    if "cannot open shared object file" in text:
        return cann_missing(machine)
    if "undefined symbol" in text:
        return (
            "torch_npu does not fit the installed torch (undefined symbol); their versions must be equal: "
            "pip install --force-reinstall torch==2.13.0 torch_npu==2.13.0, or go on with --device-type cpu"
        )
    if "Two accelerators" in text:
        return (
            "torch_npu was installed beside a CUDA build of torch, and they cannot be used together; install the CPU "
            "build of torch for the NPU, or go on with --device-type cuda"
        )
    first = next((line for cause in reversed(causes) for line in cause.splitlines() if line.strip()), "no message")
    return f"torch_npu cannot be loaded ({first.strip()}); run: ascendchat doctor, or go on with --device-type cpu"


def announce(
    prepared: PreparedEnvironment, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ
) -> None:
    """Print the warnings, once per node: only the first local rank speaks."""
    if environ.get("LOCAL_RANK", "0").split(",")[0].strip() == "0":
        for line in prepared.warnings:
            print(f"ascendchat: {line}", file=stream or sys.stderr)


# Environment variables that cost something and help nothing: `harmful_settings(os.environ)` lists those that are set.
#
# `ascendchat doctor` and every start on an NPU report them with their cost, in English and Chinese. They are never
# changed: the user may have a reason. The list is harmful_env.json, read once. A rule applies to one of its `values`,
# to numbers that are `at_least` so large, to what the named `check` below says, or else to any value. The kinds:
# "slow", "memory", "hides faults", "breaks", "no effect", "does not exist".

Environ = Mapping[str, str]


@dataclass(frozen=True)
class _HarmfulSetting:
    """One variable that should be unset or changed, and why."""

    name: str
    value: str
    kind: str
    cost: str
    advice: str
    cost_zh: str
    advice_zh: str

    def sentence(self, lang: str = "en") -> str:
        """One line for the console, in `en` or `zh`."""
        if lang == "zh":
            return f"{self.name}={self.value}：{self.cost_zh}；{self.advice_zh}"
        return f"{self.name}={self.value}: {self.cost}; {self.advice}"


@functools.cache
def known_harmful() -> dict[str, Any]:
    """harmful_env.json: `rules`, and `nonexistent` names (patterns) that scripts copy but no part of CANN reads."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("harmful_env.json").read_text(encoding="utf-8"))
    return table


def visible_problem(value: str) -> tuple[str, str] | None:
    """Check a list of visible NPUs: the fault in English and Chinese, or None. The driver wants "0,1,2": digits and
    commas, strictly ascending. It stops reading at any other character, and finds no device when the order is wrong."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        return "only digits and commas are read, and reading stops at a space", "只认数字和逗号，遇到空格即停止解析"
    ids = [int(part) for part in value.split(",")]
    if any(a >= b for a, b in pairwise(ids)):
        return (
            "the ids must be strictly ascending, otherwise no device is found",
            "编号必须严格递增，否则找不到任何设备",
        )
    return None


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


# Timeouts are in seconds; where one is not set, CANN's default counts. 0 waits for ever.
CHECKS: dict[str, Callable[[str, Environ], bool]] = {
    "outside_connect_range": lambda value, environ: not (value.strip().isdigit() and 120 <= int(value) <= 7200),
    "exec_not_above_connect": lambda value, environ: (
        0 < _number(value, 1836) <= _number(environ.get("HCCL_CONNECT_TIMEOUT"), 120)
    ),
    "event_not_above_exec": lambda value, environ: (
        0 < _number(value, 1868) <= _number(environ.get("HCCL_EXEC_TIMEOUT"), 1836)
    ),
    "two_allocator_settings": lambda value, environ: "PYTORCH_ALLOC_CONF" in environ,
    "visible_devices": lambda value, environ: visible_problem(value) is not None,
}


def _applies(rule: dict[str, Any], value: str, environ: Environ) -> bool:
    if "values" in rule:
        return value.strip() in rule["values"]
    if "at_least" in rule:
        return _number(value, 0) >= rule["at_least"]
    return CHECKS[rule["check"]](value, environ) if "check" in rule else True


def harmful_settings(environ: Environ) -> list[_HarmfulSetting]:
    """Every harmful, useless or misspelt setting in `environ`; changes nothing."""
    settings = []
    for rule in known_harmful()["rules"]:
        value = environ.get(rule["name"])
        if value is not None and _applies(rule, value, environ):
            texts = {key: rule[key] for key in ("kind", "cost", "advice", "cost_zh", "advice_zh")}
            settings.append(_HarmfulSetting(rule["name"], value, **texts))
    unread = ("does not exist", "no such setting exists, nothing reads it", "unset it")
    unread_zh = ("并不存在这个设置，没有任何组件读取", "请取消该变量")
    for name in sorted(environ):
        if any(fnmatchcase(name, pattern) for pattern in known_harmful()["nonexistent"]):
            settings.append(_HarmfulSetting(name, environ[name], *unread, *unread_zh))
    return settings
