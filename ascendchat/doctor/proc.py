"""What /proc says about a process: when it started, who owns it, which files and devices it has open.

`ascendchat clean` ends a process only when it has a device open itself: pids and names that npu-smi prints prove
nothing, because in a container they may be those of the host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# What a process has open as long as it computes on a device. Tools that only read figures open others (nvidiactl,
# davinci_manager).
DEVICE_NODE = re.compile(r"/dev/(?:davinci\d+|devmm_svm|nvidia\d+|nvidia-uvm)")


def birth(pid: int) -> str:
    """Start time of a live process in clock ticks since boot; "" when it is gone or only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    # A main thread that has ended is Z too, while others of its process (fields[17]) still free the device.
    gone = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return "" if gone else fields[19]


def alive(pid: int) -> bool:
    """Some process has this pid, whoever owns it."""
    if Path("/proc/self/stat").exists():
        return bool(birth(pid))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ancestors() -> set[int]:
    """This process, its parent, and so on up to init."""
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            pid = os.getppid() if pid == os.getpid() else 0
    return pids


def command_of(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return " ".join(text.split())
    except OSError:
        return ""


def owner(pid: int) -> int | None:
    """User id of a process; None when it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _links(folder: Path) -> set[str]:
    """Where the links in /proc/PID/.../fd lead; one that is closed meanwhile is left out."""
    targets = set()
    for number in os.listdir(folder):
        try:
            targets.add(os.readlink(folder / number))
        except FileNotFoundError:
            continue
    return targets


def open_files_of(pid: int) -> set[str]:
    """Files that a process has open or mapped; empty when it is gone or we may not look."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return set()
    paths: set[str] = set()
    for thread in threads:
        try:
            paths |= _links(thread / "fd")
            lines = (thread / "maps").read_text(errors="replace").splitlines()
        except OSError:  # this thread has ended, or the process is somebody else's
            continue
        paths |= {line[line.index("/") :] for line in lines if "/" in line}
        if paths:  # threads share files and memory; only a main thread that has ended shows neither
            break
    return paths


def open_devices(pid: int) -> list[str]:
    """Device nodes that a process has open or mapped. On the simulated NPU: the file of its own that it maps."""
    state = os.environ.get("CANNSIM_STATE")
    simulated = f"{state}/{pid}.device" if state else ""
    return sorted(path for path in open_files_of(pid) if DEVICE_NODE.fullmatch(path) or path == simulated)
