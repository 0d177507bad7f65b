"""`ascendchat rollout-server --model FOLDER`: starts vLLM, or vllm-ascend, for the rollouts of `ascendchat rl`.

    ascendchat rollout-server --model Qwen/Qwen2.5-0.5B-Instruct --device npu --dtype bfloat16 --enforce-eager
    ascendchat rollout-server --config engine.yaml --python ~/vllm/bin/python --port 8001
    ascendchat rollout-server --model FOLDER --dry-run           # shows command and environment, starts nothing

vLLM is looked for, never imported: it may live in an environment of its own. What is known not to work (versions that
do not belong together, settings that exclude each other) is said before anything starts: remote/vllm_env.py. The
server is ready when it says so on /health; signals are passed on, and its exit status is ours.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ascendchat.config import UserError, home
from ascendchat.config.rollout import RolloutServerConfig, merged
from ascendchat.launch.rank import die_with_parent
from ascendchat.processes import is_free
from ascendchat.remote.vllm_env import (
    PACKAGES,
    Asked,
    device_flags,
    first_problem,
    found_device,
    installed,
    variables,
    warnings,
)
from ascendchat.tied import status_of

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
class ServerPlan:
    """Everything that is decided before vLLM starts."""

    command: list[str]
    added: dict[str, str]  # to the environment
    url: str
    warnings: list[str]


def run(config: RolloutServerConfig) -> int:
    """The command."""
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
    """To who runs the server."""
    print(f"ascendchat rollout-server: {text}", file=sys.stderr, flush=True)


# ---- before the start ----------------------------------------------------------------------------


def make_plan(config: RolloutServerConfig, environ: Mapping[str, str]) -> ServerPlan:
    """Command and environment; what is known not to work is a UserError."""
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
    device = config.device or found_device(environ)
    asked = Asked(device, config.weight_transfer, config.sleep_mode, config.tensor_parallel_size, config.dtype)
    there = installed(device, versions_in(python), environ)
    if problem := first_problem(asked, there, environ):
        raise UserError(problem)
    added = variables(asked, environ)
    if key := first_key(config.api_key_file, environ):
        added["VLLM_API_KEY"] = key
    flags = [*flags_of(config), *device_flags(asked, there)]
    if (PACKAGE / RECEIVER).is_file():
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [str(receiver_folder()), environ.get("PYTHONPATH", "")]))
        flags += ["--worker-extension-cls", EXTENSION]
    notes = warnings(asked, there, {**environ, **added})
    more = list(config.more[1:] if config.more[:1] == ("--",) else config.more)
    model = [config.model] if program[-1] == "serve" else ["--model", config.model]
    return ServerPlan([*program, *model, *flags, *more], added, f"http://{config.host}:{config.port}", notes)


def find_vllm(python: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """(how vLLM's server is started, the Python of its environment or "")."""
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
    """Versions of the packages that matter in the environment of this Python; nothing when it does not say."""
    if not python:
        return {}
    try:
        asked = [python, "-c", VERSIONS, *PACKAGES]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
        return dict(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"{python} does not run ({type(error).__name__}); name a working one: --python") from None


def flags_of(config: RolloutServerConfig) -> list[str]:
    """Those that do not depend on the device. `--generation-config vllm`: only requests say how to sample."""
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
    """The API key for a server: the first line of a file, else of the variable's keys the first; "" for none."""
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


def serve(plan: ServerPlan, longest_start: float) -> int:
    """Until vLLM ends; its exit status. The first signal is passed on, the second kills."""
    port = int(plan.url.rpartition(":")[2])
    if not is_free(port):
        raise UserError(f"port {port} is in use; choose another with --port")
    received: list[float] = []  # times of signals
    server = subprocess.Popen(
        plan.command,
        env={**os.environ, **plan.added},
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            if len(received) == 1:
                server.send_signal(number)
            else:
                os.killpg(server.pid, signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        ready = wait_ready(server, plan.url, time.monotonic() + longest_start)
        if ready:
            print(f"ready: {plan.url}  (Ctrl-C ends)", file=sys.stderr, flush=True)
        elif server.poll() is None and not received:
            say(f"vLLM was not ready after {longest_start:.0f} s; give it longer: --start-timeout")
            return 1
        while server.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(LOOK)
            if received and time.monotonic() > received[0] + GRACE:
                with contextlib.suppress(ProcessLookupError):  # it may end just now
                    os.killpg(server.pid, signal.SIGKILL)
        if not ready and not received:
            say(f"vLLM ended with status {status_of(server.returncode)} before it was ready; its output stands above")
            return status_of(server.returncode) or 1
        return status_of(server.returncode)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what is left of its processes
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_ready(server: subprocess.Popen[bytes], url: str, until: float) -> bool:
    """Whether /health says 200 before the server ends or the time is over."""
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
