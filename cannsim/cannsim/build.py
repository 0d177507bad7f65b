"""Building the libraries of the simulated CANN against the torch and torch_npu of this Python, once.

    cannsim build            # prints the folder; `cannsim run` does the same by itself

The result lies in $CANNSIM_CACHE (else $XDG_CACHE_HOME/cannsim, else ~/.cache/cannsim), in a folder named by the
versions and by the sources; in a clone it lies beside the sources, where a change compiles only what it concerns.
Needs no torch to be imported.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LIBRARIES = ("ascendcl", "hccl", "opapi")


class CannotBuild(RuntimeError):
    """What is missing, and the next step, in one sentence."""


def in_clone() -> bool:
    """Whether the package lies beside its own pyproject.toml. In site-packages it may be that of another wheel."""
    try:
        text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^name *= *[\"']cannsim[\"']", text, flags=re.M) is not None


def versions() -> dict[str, str]:
    """The versions of torch and torch_npu in this Python."""
    found = {}
    for name in ("torch", "torch_npu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            install = "pip install torch_npu decorator attrs scipy psutil cloudpickle (it brings its torch)"
            raise CannotBuild(f"{name} is not installed in {sys.executable}; type: {install}") from None
        if importlib.util.find_spec(name) is None:
            raise CannotBuild(f"{name} {found[name]} is installed but cannot be found; type: pip install -I {name}")
    return found


@functools.cache
def key() -> str:
    """Names one build: the versions that it was made for, and the sources that it was made from."""
    digest = hashlib.sha256()
    for path in [ROOT / "Makefile", *sorted(ROOT.glob("src/**/*.h")), *sorted(ROOT.glob("src/**/*.cpp"))]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    found = versions()
    system = f"{platform.machine()}-libc{platform.libc_ver()[1]}"
    return f"torch{found['torch']}-npu{found['torch_npu']}-{system}-{digest.hexdigest()[:12]}"


def cache() -> Path:
    """The folder of all builds of this user."""
    named = os.environ.get("CANNSIM_CACHE")
    return Path(named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cannsim").absolute()


def complete(folder: Path) -> bool:
    """Whether the folder holds a whole build of these sources for these versions."""
    try:
        return (folder / "key").read_text() == key()
    except OSError:
        return False


def home() -> Path:
    """The folder of the libraries: the one in use, else one that is complete, else where they would be built."""
    if in_use := os.environ.get("CANNSIM_HOME"):
        return Path(in_use)
    beside = ROOT / "build"
    if not in_clone():
        return cache() / key()
    try:
        fits = complete(beside) or (not complete(cache() / key()) and _same_versions(beside))
    except CannotBuild:
        return beside
    return beside if fits else cache() / key()


def _same_versions(folder: Path) -> bool:
    """Whether the folder is of these versions, if of other sources: then only what changed is compiled there."""
    try:
        return (folder / "key").read_text().rpartition("-")[0] == key().rpartition("-")[0]
    except OSError:
        return True


def ensure(verbose: bool = False) -> Path:
    """The folder of the libraries, built first if need be. Processes that come at the same time wait for the first."""
    folder = home()
    if os.environ.get("CANNSIM_HOME"):
        _check_in_use(folder)
        return folder
    if complete(folder):
        return folder
    _check_tools()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not complete(folder):
                _make(folder, verbose)
    except OSError as error:
        raise CannotBuild(
            f"{folder} cannot be written ({error.strerror}); set CANNSIM_CACHE to another folder"
        ) from None
    return folder


def _check_in_use(folder: Path) -> None:
    """CANNSIM_HOME may be of a shell in which another torch was installed since. Libraries that were made by hand
    have no key: they are taken as they are."""
    if not (folder / "lib64" / "libascendcl.so").exists():
        raise CannotBuild(f"CANNSIM_HOME={folder} holds no libraries; type: unset CANNSIM_HOME")
    try:
        made, wanted = ((folder / "key").read_text().rpartition("-")[0], key().rpartition("-")[0])
    except (OSError, CannotBuild):
        return
    if made != wanted:
        raise CannotBuild(f"CANNSIM_HOME={folder} was built for {made}, and this is {wanted}; type: unset CANNSIM_HOME")


def _check_tools() -> None:
    if sys.platform != "linux":
        raise CannotBuild("torch_npu and cannsim run on Linux only; use a Linux machine or container")
    if shutil.which("make") is None:
        raise CannotBuild("make was not found; install it, e.g. apt-get install make g++")
    compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
    if shutil.which(compiler) is None:
        hint = "install it (e.g. apt-get install make g++), or set CXX to a compiler for C++20"
        raise CannotBuild(f"the C++ compiler {compiler} was not found; {hint}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    import fcntl

    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("cannsim: waiting for another process that builds the same libraries", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _readable_by_make(folder: Path) -> Iterator[str]:
    """A path of the folder in which make finds no space and none of its own signs: it knows no quotes for targets."""
    if re.fullmatch(r"[\w./+@,~-]+", str(folder)):
        yield str(folder)
    elif folder == ROOT / "build":
        yield "build"  # what make finds there later has the same name again
    else:
        with tempfile.TemporaryDirectory(prefix="cannsim-", dir="/tmp") as short:
            link = Path(short, "build")
            link.symlink_to(folder)
            yield str(link)


def _make(folder: Path, verbose: bool) -> None:
    """Compile into the folder. The file `key` comes last: a folder without it is unfinished, and is gone on with."""
    found = versions()
    log = folder / "build.log"
    said = f"torch {found['torch']} and torch_npu {found['torch_npu']} in {folder} (once; some minutes)"
    print(f"cannsim: building the simulated CANN for {said}", file=sys.stderr, flush=True)
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    command = ["make", "--no-print-directory", "-C", str(ROOT), jobs, f"PYTHON={sys.executable}"]
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    with open(log, "w") as output, _readable_by_make(folder) as named:
        command.append(f"BUILD={named}")
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            if verbose:
                print(line, end="", file=sys.stderr)
    if process.wait():
        lines = log.read_text().splitlines()
        reason = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "make failed")
        raise CannotBuild(f"the build failed: {reason.strip()}; the whole output is in {log}")
    unfinished = folder / f"key.{os.getpid()}"
    unfinished.write_text(key())
    unfinished.replace(folder / "key")
    if folder.parent == cache():  # never compiled again, since another source has another folder
        for pattern in ("**/*.o", "**/*.d", "*.gch"):
            for path in folder.glob(pattern):
                path.unlink()
