"""Runs a Python program that nobody has checked, such as the answer of a model, and reports how it ended.

    result = sandbox.run("print(6 * 7)", seconds=5.0)      # `ascendchat eval chat` judges HumanEval with it
    result.ok, result.stdout, result.reason
    sandbox.capabilities()                                 # which layers work on this machine

Every program has its own process, group and empty folder, a scrubbed environment, and limits on time, memory, output,
file sizes, open files and processes. On Linux layers come on top, each tried before it is relied on:

    namespaces   its own root folder (Python and nothing else, read-only), network (none), processes, message queues
    landlock     without namespaces: reads Python and nothing else, no file of another process
    seccomp      no sockets, no new processes, no signals to others, no tracing, no mounting; without namespaces it
                 may not change any file either
    user         when we are root, the program is a user that owns nothing

`ok` means that the program reached its last line: `sys.exit(0)` in the middle is not ok, because the tests after it did
not run. An answer that runs before them is kept from the word that tells the end, from tracing, and from memory; it
shares their interpreter all the same, so modules that it patches stay patched. inside.py shows how.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ascendchat.sandbox import seccomp

__all__ = ["LAYERS", "ProgramResult", "capabilities", "run"]

LAYERS = ("namespaces", "landlock", "seccomp", "user")
INSIDE = Path(__file__).with_name("inside.py")
GRACE = 10.0  # seconds beyond the program's own, for starting and ending on a busy machine
# Ends the process {pid} by `kill`, and as the owner of a pipe; `capabilities` looks whether it still lives.
SIGNALS = """
import contextlib, fcntl, os, signal
with contextlib.suppress(OSError):
    os.kill({pid}, signal.SIGKILL)
with contextlib.suppress(OSError):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, {pid})
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b"x")
"""


# A socket between a virtual machine and its host, which namespaces do not contain. Few kernels have none.
VSOCK = "socket.socket(40, socket.SOCK_STREAM)"
# What a program tries to get out, by danger. Each line is one attack; {ear} is a datagram socket of somebody else.
ATTACKS: dict[str, tuple[str, ...]] = {
    "memory": ("bytearray(1 << 30)", "for _ in range(24): os.posix_fallocate(os.memfd_create('x'), 0, 12 << 20)"),
    "processes": ("for _ in range(64): os.fork() or time.sleep(9)",),
    "network": (
        "socket.create_connection({server}, timeout=5)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {server})",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', {ear})",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {ear})",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect({ear})",
        VSOCK,
    ),
    "writing": (
        "open({written}, 'w').close()",
        "os.mkdir({written} + '-folder')",
        "os.truncate(os.path.join({folder}, 'secret'), 0)",
        "os.chdir({folder}); socket.socketpair()[0].bind('name')",
    ),
    "reading": ("open({secret}).read()", "os.listdir({folder})", "open('/proc/{victim}/stat').read()"),
}
# A refusal is printed: a program that was ended early has proved nothing.
TRY = """
try:
    {attack}
except (OSError, MemoryError):
    print("refused", flush=True)
"""


@dataclass(frozen=True)
class ProgramResult:
    """The end of a program: verdict, reason, output and times."""

    ok: bool  # it reached its last line
    stdout: str
    stderr: str
    reason: str  # "" or: error, exit, time, memory, output, signal, sandbox (the sandbox itself failed)
    detail: str = ""  # the last line of the traceback, the exit code, the signal
    seconds: float = 0.0  # by the clock
    cpu: float = 0.0  # seconds of processor time


def run(
    code: str,
    *,
    first: str = "",
    seconds: float = 5.0,
    memory: int = 256 << 20,  # bytes
    output: int = 64 << 10,  # bytes per stream
    disk: int = 16 << 20,  # bytes
    processes: int = 32,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    layers: Sequence[str] | None = None,
) -> ProgramResult:
    """Run a program and wait for its end. `first` runs before it and with the same names, but not as __main__, and may
    exit: an answer before its tests. `files` are put into its folder before it starts. `layers`: by default all
    that this machine has. Safe to call from many threads."""
    for name in files or {}:
        if not name or name != os.path.basename(name) or name in (".", ".."):
            raise ValueError(f"{name!r} is not a plain file name")
    chosen = tuple(layers) if layers is not None else _available().layers
    limits = {"seconds": seconds, "memory": memory, "output": output, "disk": disk, "processes": processes}
    order = {
        "code": code,
        "first": first,
        "stdin": stdin,
        "files": dict(files or {}),
        "layers": chosen,
        "open_files": 64,
        **limits,
    }
    return _judge(_execute(order))


def _libraries() -> tuple[str, list[str]]:
    """Read LD_LIBRARY_PATH: (its folders, [libpython, where one of them holds it])."""
    parts = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if os.path.isabs(part)]
    folders = list(dict.fromkeys(os.path.realpath(part) for part in parts if os.path.isdir(part)))
    name = sysconfig.get_config_var("INSTSONAME") or "libpython"
    files = [path for path in (os.path.join(folder, name) for folder in folders) if os.path.isfile(path)]
    return os.pathsep.join(folders), [path for path in files[:1] if not os.path.islink(path)]


def _execute(order: dict[str, Any]) -> dict[str, Any]:
    """Start the watcher with its order and return its report. No process and no file is left behind in any case."""
    word = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="ascendchat-sandbox-")
    python = os.path.realpath(sys.executable)
    libraries, library = _libraries()
    prefixes = [os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    order = {
        **order,
        "word": word,
        "folder": os.path.realpath(folder),
        "python": python,
        "libraries": libraries,
        "python_folders": sorted({*prefixes, *library}),
        "number": secrets.randbelow(100_000_000),
        "filter": seccomp.program(platform.machine(), read_only="namespaces" not in order["layers"]),
    }
    try:
        with subprocess.Popen(
            [python, "-I", "-S", "-B", "-X", "utf8", str(INSIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={"LD_LIBRARY_PATH": libraries} if libraries else {},
        ) as watcher:
            try:
                output, errors = watcher.communicate(json.dumps(order).encode(), timeout=order["seconds"] + GRACE)
            except subprocess.TimeoutExpired:
                output, errors = b"", b"the watcher did not answer"
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(watcher.pid, signal.SIGKILL)  # the program dies with its watcher
        try:
            report: dict[str, Any] = json.loads(output)
        except ValueError:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            report = {"setup": lines[-1] if lines else f"the watcher was killed ({watcher.returncode})"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    done = report.pop("done", "")
    report["finished"] = done == word
    if done.startswith("!"):
        report["setup"] = done[1:]
    return report


def _judge(report: dict[str, Any]) -> ProgramResult:
    """Turn the watcher's report into a verdict."""
    stdout, stderr = report.get("stdout", ""), report.get("stderr", "")
    lines = stderr.strip().splitlines()
    last = lines[-1] if lines else ""
    status = report.get("status")
    if "setup" in report:
        reason, detail = "sandbox", report["setup"]
    elif report.get("stopped"):
        reason, detail = report["stopped"], ""
    elif status is None:
        reason, detail = "sandbox", "the program's end was not seen"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {member.value: member.name for member in signal.Signals}  # not all have one
        reason, detail = "time" if number == signal.SIGXCPU else "signal", names.get(number, f"signal {number}")
    elif os.WEXITSTATUS(status) == 0 and report["finished"]:
        reason, detail = "", ""
    elif last.startswith("MemoryError"):
        reason, detail = "memory", last
    elif os.WEXITSTATUS(status) == 1 and any(line.startswith("Traceback (most recent") for line in lines):
        reason, detail = "error", last
    else:
        reason, detail = ("error", last) if "Error" in last else ("exit", f"exit code {os.WEXITSTATUS(status)}")
    return ProgramResult(
        not reason, stdout, stderr, reason, detail, float(report.get("seconds", 0.0)), float(report.get("cpu", 0.0))
    )


class _Available(NamedTuple):
    """Layers that work together here, the reason why each other one does not, and why nothing runs at all, if so."""

    layers: tuple[str, ...]
    missing: dict[str, str]
    broken: str


_lock = threading.Lock()
_tried: _Available | None = None


def _available() -> _Available:
    """Find out which layers work on this machine, once per process."""
    global _tried
    with _lock:
        if _tried is None:
            _tried = _try_layers()
        return _tried


def _try_layers() -> _Available:
    if sys.platform != "linux":
        return _Available((), dict.fromkeys(LAYERS, f"only Linux has this, not {sys.platform}"), _fails(()))
    root = os.geteuid() == 0
    missing: dict[str, str] = {}
    if not root:
        missing["user"] = "not needed: we are not root"
    if not seccomp.program(platform.machine(), read_only=False):
        missing["seccomp"] = f"the system calls of {platform.machine()} are not known to it"
    # Root may not stay root in a root folder of its own, so the two go together; from most to least.
    tries: list[tuple[str, ...]] = [("namespaces", "user")] if root else [("namespaces",)]
    tries += [("user",)] if root else []
    working: tuple[str, ...] = ()
    for layers in tries:
        failed = _fails(layers)
        if not failed:
            working = layers
            break
        missing[layers[0]] = failed
    if "user" in working:
        missing.pop("user", None)
    if "namespaces" in working:
        missing["landlock"] = "not needed: the program has a root folder of its own"
    for layer in ("landlock", "seccomp"):
        if layer not in missing:
            failed = _fails((*working, layer))
            if failed:
                missing[layer] = failed
            else:
                working = (*working, layer)
    return _Available(tuple(name for name in LAYERS if name in working), missing, "" if working else _fails(()))


def _fails(layers: Sequence[str]) -> str:
    """Run a small program behind these layers; the reason why it fails, or ""."""
    result = run("import json, re\nassert json.loads('[1]') == [1]\nprint('here')", seconds=20.0, layers=layers)
    return "" if result.ok and result.stdout == "here\n" else result.detail or result.stderr.strip() or result.reason


def capabilities() -> dict[str, Any]:
    """Find out by trying what limits a program here: the `layers` that work, the `missing` ones with their reasons,
    and for each danger whether it is contained: memory, processes, network, writing, reading, signals. `broken` is the
    reason why not even a program without layers runs; empty if it does."""
    layers, missing, broken = _available()
    outside = Path(tempfile.mkdtemp(prefix="ascendchat-sandbox-"))
    waiting = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)"]
    victim = subprocess.Popen(waiting, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ear = f"\0ascendchat-sandbox-{secrets.token_hex(8)}"
    contained: dict[str, bool] = {}
    try:
        outside.chmod(0o777)  # only the sandbox can keep the program out
        secret = outside / "secret"
        secret.write_text("secret", encoding="utf-8")
        secret.chmod(0o666)
        with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
            if sys.platform == "linux":  # elsewhere no layer contains the network anyway
                stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(ear)
            places = {"folder": str(outside), "secret": str(secret), "written": str(outside / "written")}
            targets = {"server": server.getsockname(), "ear": ear, "victim": victim.pid, **places}
            names = {name: repr(value) for name, value in targets.items()}
            for danger, attacks in ATTACKS.items():
                tries = (TRY.format(attack=attack.format(**names)) for attack in attacks)
                result = run("import os, socket, time" + "".join(tries), seconds=10.0, layers=layers)
                contained[danger] = result.ok and result.stdout == "refused\n" * len(attacks)
        signals = run(SIGNALS.format(pid=victim.pid), seconds=10.0, layers=layers)
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(timeout=0.2)
        alive = victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
        shutil.rmtree(outside, ignore_errors=True)
    contained["signals"] = signals.ok and alive
    return {"layers": list(layers), "missing": missing, "broken": broken, **contained}
