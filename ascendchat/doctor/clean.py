"""Free what dead or forgotten runs still hold: `ascendchat clean` lists it, asks per group, and frees what is yours.

Four groups: processes that npu-smi or nvidia-smi lists, shared memory in /dev/shm whose owner is dead, partial
downloads under $ASCENDCHAT_HOME, and lock files that no process holds. Never touched: a process that has no device open
itself (in a container the tools print pids of the host, where they mean other processes), what belongs to another user,
this process and its ancestors, and a file that a live process has open.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ascendchat.config.commands import CleanConfig
from ascendchat.config.language import language
from ascendchat.device import smi
from ascendchat.doctor.machine import gib
from ascendchat.errors import home

HOUR = 3600.0
SHM = Path("/dev/shm")
# Shared memory with the pid of its owner in the name: ours (ascendchat-PID-...), and tensors of torch's loaders.
OWN_BLOCK = re.compile(r"ascendchat[-_](\d+)\b")
TORCH_BLOCK = re.compile(r"torch_(\d+)_")
PARTIAL = re.compile(r"\.(?:part|partial|tmp|incomplete)$|\.(?:part|tmp)[.-]\d+$")
WRITER = re.compile(r"[.-](\d+)\.(?:part|partial|tmp)$|\.(?:part|tmp)[.-](\d+)$")
GROUP_TITLES = {
    "processes": ("processes that hold devices", "占用设备的进程"),
    "shared memory": ("shared memory of dead processes", "已退出进程遗留的共享内存"),
    "partial downloads": ("partial files (a download would resume from them)", "未完成的文件（下载可从中续传）"),
    "locks": ("lock files that nobody holds", "无人持有的锁文件"),
}
KEEP_REASONS = {  # why a process is only listed, in English and Chinese
    "not visible here: it runs in another container or is already gone": "此处不可见：在别的容器中运行，或已经退出",
    "this process or one that started it": "本进程或启动它的进程",
    "belongs to another user": "属于其他用户",
    "another process is meant: the one with this pid here has no device open": "此处该 pid 的进程没有打开设备",
}


@dataclass(frozen=True)
class Leftover:
    """A process or file that could be freed. `birth` tells a process from a later one with the same pid."""

    group: str
    what: str
    bytes: int = 0
    pid: int = 0
    path: str = ""
    devices: tuple[int, ...] = ()
    birth: str = ""
    keep: str = ""  # why it is only listed, never freed


@dataclass
class _FreeResult:
    """Items that were freed, and those that could not be, each with the reason."""

    freed: list[Leftover] = field(default_factory=list)
    failed: list[tuple[Leftover, str]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- processes


def reason_to_keep(pid: int, own_pids: set[int]) -> str:
    """Reason why this process must not be ended, a key of KEEP_REASONS; "" when it may be."""
    if not alive(pid):
        return "not visible here: it runs in another container or is already gone"
    if pid in own_pids:
        return "this process or one that started it"
    if owner(pid) != os.getuid():
        return "belongs to another user"
    if not open_devices(pid):
        return "another process is meant: the one with this pid here has no device open"
    return ""


def processes(readings: smi.Readings | smi.Problem) -> list[Leftover]:
    """List the processes on devices, one item per pid; `keep` gives the reason where one may not be ended."""
    if isinstance(readings, smi.Problem):
        return []
    own_pids = ancestors()
    items = []
    for pid in dict.fromkeys(p.pid for p in readings.processes):
        rows = [p for p in readings.processes if p.pid == pid]
        started, keep = birth(pid), reason_to_keep(pid, own_pids)
        items.append(
            Leftover(
                "processes",
                (command_of(pid) if not keep else "") or rows[0].name or "?",
                bytes=sum(p.memory or 0 for p in rows),
                pid=pid,
                devices=tuple(sorted({p.device for p in rows})),
                birth=started,
                keep=keep,
            )
        )
    return items


def on_device(item: Leftover) -> bool:
    """True while the process is the one that was listed and still has a device open."""
    return bool(item.birth) and birth(item.pid) == item.birth and bool(open_devices(item.pid))


def send(item: Leftover, number: signal.Signals) -> None:
    """Signal a listed process, unless it has ended or left the device meanwhile."""
    handle = -1
    with suppress(AttributeError, OSError):  # a kernel before 5.3 knows only pids
        handle = os.pidfd_open(item.pid)  # stands for this process even if its pid is given to another one
    try:
        if not on_device(item):
            return
        if handle >= 0:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(item.pid, number)
    except ProcessLookupError:
        pass
    finally:
        if handle >= 0:
            os.close(handle)


def end_processes(items: list[Leftover], grace: float) -> _FreeResult:
    """Send SIGTERM to all, wait `grace` seconds for them to leave the device, then SIGKILL those that still have it
    open."""
    result = _FreeResult()
    waiting = listed = [item for item in items if on_device(item)]
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        for item in waiting:
            try:
                send(item, number)
            except PermissionError as error:
                result.failed.append((item, str(error)))
        refused = {item.pid for item, _ in result.failed}
        deadline = time.monotonic() + patience
        while True:
            waiting = [item for item in waiting if item.pid not in refused and on_device(item)]
            if not waiting or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        if not waiting:
            break
    result.failed += [(item, "still runs after SIGKILL (waits inside the driver)") for item in waiting]
    stuck = {item.pid for item, _ in result.failed}
    result.freed = [item for item in listed if item.pid not in stuck]
    return result


# -------------------------------------------------------------------------------------------------------- files


def all_open_files() -> set[str]:
    """Files that live processes have open or mapped, as far as this user may see."""
    return set().union(*(open_files_of(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")))


def size_of(path: Path) -> int:
    """Bytes on disk of a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        return sum(size_of(child) for child in path.iterdir())
    return path.lstat().st_blocks * 512


def leftovers_among(paths: Iterable[Path], judge: Callable[[Path], Leftover | None]) -> list[Leftover]:
    """The leftovers among `paths`; a file that vanishes during the check was in use."""
    items = []
    for path in paths:
        try:
            item = judge(path)
        except OSError:
            continue
        if item is not None:
            items.append(item)
    return items


def stale_shared_memory(folder: Path, busy: set[str], now: float) -> list[Leftover]:
    """Blocks named after a process that is dead. Those of torch only after an hour: with --ipc=host another
    container's processes share /dev/shm and are invisible here."""

    def judge(path: Path) -> Leftover | None:
        ours, torch = OWN_BLOCK.match(path.name), TORCH_BLOCK.match(path.name)
        match, status = ours or torch, path.lstat()
        if not match or status.st_uid != os.getuid() or alive(int(match[1])) or str(path) in busy:
            return None
        if torch and now - status.st_mtime < HOUR:
            return None
        return Leftover("shared memory", str(path), size_of(path), int(match[1]), str(path))

    return leftovers_among(sorted(folder.glob("*")), judge)


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield files and folders below, never through links; a partial folder is one item and not entered. The compilers'
    cache (device/accelerator.py) is left alone: it holds hundreds of locks, which the compilers take again
    themselves."""
    for parent, names, files in os.walk(folder):
        partial = [n for n in names if PARTIAL.search(n)]
        names[:] = [n for n in names if n not in partial and Path(parent, n) != home() / "compiled"]
        yield from (Path(parent) / name for name in sorted(files + partial))


def last_change(path: Path) -> float:
    """Time of the newest change in a file or folder."""
    if path.is_dir() and not path.is_symlink():
        return max([path.lstat().st_mtime, *(last_change(child) for child in path.iterdir())])
    return path.lstat().st_mtime


def partial_files(folder: Path, busy: set[str], now: float) -> list[Leftover]:
    """Files and folders that were being written by a process that is dead, or more than an hour ago."""

    def judge(path: Path) -> Leftover | None:
        if not PARTIAL.search(path.name) or path.lstat().st_uid != os.getuid():
            return None
        if str(path) in busy or any(name.startswith(f"{path}/") for name in busy):
            return None
        match = WRITER.search(path.name)
        writer = int(match[1] or match[2]) if match else 0
        if (writer and not alive(writer)) or now - last_change(path) > HOUR:
            return Leftover("partial downloads", str(path), size_of(path), writer, str(path))
        return None

    return leftovers_among(walk_files(folder), judge)


def is_held(path: Path) -> bool:
    """True if a process holds this lock file with flock or fcntl."""
    try:
        with path.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def locks(folder: Path, busy: set[str], now: float) -> list[Leftover]:
    """Lock files that are not held: their pid is dead, or they name none and are older than an hour."""

    def judge(path: Path) -> Leftover | None:
        if path.suffix != ".lock" or path.is_symlink() or not path.is_file():
            return None
        text = path.read_text(errors="replace")[:500]
        elsewhere = "host" in text and socket.gethostname() not in text  # its pid means nothing here
        if path.stat().st_uid != os.getuid() or str(path) in busy or elsewhere or is_held(path):
            return None
        match = re.search(r"\b\d+\b", text)
        owner = int(match[0]) if match else 0
        if (owner and not alive(owner)) or (not owner and now - path.stat().st_mtime > HOUR):
            return Leftover("locks", str(path), size_of(path), owner, str(path))
        return None

    return leftovers_among(walk_files(folder), judge)


def remove(items: list[Leftover]) -> _FreeResult:
    result = _FreeResult()
    for item in items:
        path = Path(item.path)
        try:
            if item.group == "locks" and is_held(path):
                raise OSError("is held now")
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            result.freed.append(item)
        except OSError as error:
            result.failed.append((item, str(error)))
    return result


# ------------------------------------------------------------------------------------------------------ command


def find_leftovers() -> list[Leftover]:
    """Collect everything that could be freed, in the order of the groups."""
    busy, now, folder = all_open_files(), time.time(), home()
    return [
        *processes(smi.read()),
        *stale_shared_memory(SHM, busy, now),
        *partial_files(folder, busy, now),
        *locks(folder, busy, now),
    ]


def describe_leftover(item: Leftover, lang: str) -> str:
    keep = KEEP_REASONS[item.keep] if item.keep and lang == "zh" else item.keep
    where = f"  pid {item.pid} on device {','.join(map(str, item.devices))}: " if item.group == "processes" else "  "
    return f"{where}{item.what[:100]} ({gib(item.bytes)})" + (f" [{keep}]" if keep else "")


def confirmed(config: CleanConfig, question: str) -> bool:
    if config.yes:
        return True
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes", "是")
    except EOFError:  # Ctrl-D
        return False


def run(config: CleanConfig) -> int:
    """Run `ascendchat clean`; exit status 1 when something confirmed could not be freed."""
    items = find_leftovers()
    lang = language(config.lang)
    if config.json:
        groups = {g: [asdict(i) for i in items if i.group == g] for g in GROUP_TITLES}
        print(json.dumps({"bytes": sum(i.bytes for i in items if not i.keep), "groups": groups}, ensure_ascii=False))
        return 0
    if not items:
        print("没有需要清理的内容" if lang == "zh" else "nothing to free")
        return 0
    interactive = config.yes or (sys.stdin.isatty() and sys.stdout.isatty())
    status = 0
    for group, titles in GROUP_TITLES.items():
        members = [i for i in items if i.group == group]
        freeable = [i for i in members if not i.keep]
        if not members:
            continue
        print(f"{titles[lang == 'zh']}: {gib(sum(i.bytes for i in freeable))}")
        for item in members:
            print(describe_leftover(item, lang))
        if config.dry_run or not interactive or not freeable:
            continue
        if confirmed(config, f"释放 {len(freeable)} 项？" if lang == "zh" else f"free {len(freeable)}?"):
            result = end_processes(freeable, config.grace) if group == "processes" else remove(freeable)
            size = gib(sum(i.bytes for i in result.freed))
            print(f"已释放 {len(result.freed)} 项，{size}" if lang == "zh" else f"freed {len(result.freed)}, {size}")
            for item, why in result.failed:
                status = 1
                print(f"{item.path or item.pid}: {why}", file=sys.stderr)
    if not interactive and not config.dry_run:
        print(
            "仅列出；释放请运行：ascendchat clean --yes"
            if lang == "zh"
            else "only listed; to free: ascendchat clean --yes"
        )
    return status


# Facts from /proc about a process: when it started, who owns it, which files and devices it has open.
#
# `ascendchat clean` ends a process only when it has a device open itself: pids and names that npu-smi prints prove
# nothing, because in a container they may be those of the host.

# Device nodes that a process keeps open while it computes. Tools that only read figures open others (nvidiactl,
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
    ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return "" if ended else fields[19]


def alive(pid: int) -> bool:
    """True if some process has this pid, whoever owns it."""
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
    """Pids of this process, its parent, and so on up to init."""
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
    """Targets of the links in /proc/PID/.../fd; one that is closed meanwhile is left out."""
    targets = set()
    for number in os.listdir(folder):
        try:
            targets.add(os.readlink(folder / number))
        except FileNotFoundError:
            continue
    return targets


def open_files_of(pid: int) -> set[str]:
    """Files that a process has open or mapped; empty when it is gone or belongs to another user."""
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
