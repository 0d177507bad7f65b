"""Checks of the machine around the chips, for `ascendchat doctor`: Python, wheels, memory, disk, ports, network,
and what is stored under $ASCENDCHAT_HOME."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from ascendchat.chips import cpu_count
from ascendchat.config.data import HUGGING_FACE, MIRROR
from ascendchat.data import verify
from ascendchat.doctor.machine import OPTIONAL, REQUIRED, VENDOR, CheckResult, Machine, Status, gib

DISTRIBUTION = {"yaml": "pyyaml", "attr": "attrs"}  # module -> what pip calls it
HCCL_PORTS = range(60000, 60032)  # host side of HCCL, unless HCCL_IF_BASE_PORT moves it
BUDGET = 2.0  # seconds of hashing stored data without --deep


def python(m: Machine) -> CheckResult:
    version = ".".join(str(n) for n in m.python)
    if m.python[:2] < (3, 10):
        return m.fault("python", "too old", version=version)
    if m.versions.get("torch_npu") and m.python[:2] > (3, 14):
        return m.fault("python", "too new", version=version)
    return CheckResult("python", "ok", version)


def wheels(m: Machine) -> CheckResult:
    """Report wheels that a subprocess could not import; one built for another architecture is broken, not missing."""
    if not m.wheels.ok:
        return m.fault("wheels", "not tried", said=m.wheels.error.splitlines()[-1])
    versions = m.wheels.values
    absent = [n for n in [*REQUIRED, *(VENDOR if m.has_chip else []), *OPTIONAL] if versions.get(n) is None]
    missing = [DISTRIBUTION.get(n, n) for n in absent]
    broken = {n: str(v)[1:] for n, v in versions.items() if str(v or "").startswith("!")}
    if missing or broken:
        parts = [m.say(f"missing: {', '.join(missing)}", f"缺少：{', '.join(missing)}")] if missing else []
        parts += [m.say(f"{n} cannot be imported: {why}", f"{n} 无法导入：{why}") for n, why in broken.items()]
        names = " ".join(missing + [DISTRIBUTION.get(n, n) for n in broken])
        fix = f"pip install --force-reinstall {names}" if broken else f"pip install {names}"
        found, wrong = "; ".join(parts), [*absent, *broken]
        if any(n not in OPTIONAL for n in wrong):
            status: Status = "fail" if any(n in REQUIRED for n in wrong) else "warn"
            return m.fault("wheels", "missing", status=status, found=found, fix=fix)
        if wrong == ["rustbpe"]:
            return m.fault("wheels", "no rustbpe", found=found, fix=fix)
        return m.fault("wheels", "optional", found=found, uses=", ".join(OPTIONAL[n] for n in wrong), fix=fix)
    shown = [f"{n} {versions[n]}".strip() for n in ("numpy", "pyarrow", "tiktoken", "tokenizers", "rustbpe")]
    return CheckResult("wheels", "ok", ", ".join(shown))


def compiler(m: Machine) -> CheckResult:
    names = [m.environ.get("CXX", ""), "c++", "g++", "clang++"]
    paths = [path for name in names if name and (path := shutil.which(name, path=m.environ.get("PATH")))]
    if paths:
        return CheckResult("compiler", "ok", paths[0])
    return CheckResult(
        "compiler",
        "skip",
        m.say(
            "no C++ compiler; only torch.compile and the simulated NPU need one",
            "没有 C++ 编译器；只有 torch.compile 和模拟 NPU 需要它",
        ),
    )


def memory_bytes(root: Path) -> tuple[int, int]:
    """(available, total) RAM in bytes, within the limit of the container."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
        available, total = fields["MemAvailable"], fields["MemTotal"]
    except (OSError, KeyError, ValueError):  # macOS
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            cap, now = (root / limit).read_text().strip(), (root / used).read_text().strip()
        except OSError:
            continue
        if cap.isdigit() and now.isdigit() and int(cap) < total:
            total, available = int(cap), min(available, int(cap) - int(now))
    return available, total


def memory(m: Machine) -> CheckResult:
    available, total = memory_bytes(m.root)
    kind, _, count = m.choice()
    # While it loads, a rank holds the model and its part of the data in host memory: 4 GiB covers the recipes.
    need = (4 if kind == "cpu" else 4 * count) * 2**30
    found = m.say(
        f"{gib(available)} free of {gib(total)}, {cpu_count()} cores",
        f"可用 {gib(available)} / 共 {gib(total)}，{cpu_count()} 核",
    )
    if available >= need:
        return CheckResult("memory", "ok", found)
    return m.fault("memory", "low", found=found, need=gib(need), count=count)


def shared_memory(m: Machine) -> CheckResult:
    if m.system != "Linux":
        return CheckResult("/dev/shm", "skip", m.say("not used on this system", "此系统不使用"))
    try:
        usage = shutil.disk_usage(m.root / "dev/shm")
    except OSError as error:
        return m.fault("/dev/shm", "absent", error=str(error.strerror))
    found = m.say(f"{gib(usage.free)} free of {gib(usage.total)}", f"可用 {gib(usage.free)} / 共 {gib(usage.total)}")
    if usage.free >= 2**30:
        return CheckResult("/dev/shm", "ok", found)
    small = usage.total < 2 * 2**30  # docker gives 64 MiB unless told
    return m.fault(
        "/dev/shm",
        "small",
        found=found,
        fix="docker run --shm-size=16g ...  (or --ipc=host)" if small else "ascendchat clean",
    )


def open_files(m: Machine) -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 4096 if m.choice()[2] > 1 else 1024  # every rank keeps sockets to its peers and open shards
    if soft == resource.RLIM_INFINITY or soft >= need:
        return CheckResult("open files", "ok", str(soft))
    return m.fault(
        "open files", "low", soft=soft, need=need, limit=65535 if hard == resource.RLIM_INFINITY else min(65535, hard)
    )


def listening(root: Path) -> set[int]:
    """TCP ports on which some process listens (Linux; empty elsewhere)."""
    ports = set()
    for name in ("proc/net/tcp", "proc/net/tcp6"):
        try:
            rows = (root / name).read_text().splitlines()[1:]
        except OSError:
            continue
        ports |= {int(row.split()[1].rpartition(":")[2], 16) for row in rows if row.split()[3] == "0A"}
    return ports


def ports(m: Machine) -> CheckResult:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
    except OSError as error:
        return m.fault("ports", "none", error=str(error))
    occupied = (
        sorted(listening(m.root) & set(HCCL_PORTS)) if m.has_chip and "HCCL_IF_BASE_PORT" not in m.environ else []
    )
    if occupied:
        return m.fault("ports", "taken", taken=", ".join(map(str, occupied)))
    return CheckResult("ports", "ok", m.say(f"free ports available (e.g. {free})", f"有空闲端口（如 {free}）"))


def disk(m: Machine) -> CheckResult:
    folder = m.home
    while not folder.exists():
        folder = folder.parent
    found = m.say(
        f"{gib(shutil.disk_usage(folder).free)} free for {m.home}",
        f"{m.home} 可用 {gib(shutil.disk_usage(folder).free)}",
    )
    if not os.access(folder, os.W_OK):
        return m.fault("disk", "not writable", folder=folder)
    if shutil.disk_usage(folder).free < 10 * 2**30:
        return m.fault("disk", "low", found=found)
    return CheckResult("disk", "ok", found)


def mirror(m: Machine) -> CheckResult:
    url = m.environ.get("HF_ENDPOINT") or HUGGING_FACE
    if m.mirror is None:
        return CheckResult("mirror", "skip", m.say("HF_HUB_OFFLINE is set", "已设置 HF_HUB_OFFLINE"))
    if m.mirror == "":
        return CheckResult("mirror", "ok", m.say(f"{url} answers", f"{url} 可访问"))
    return m.fault(
        "mirror",
        "unreachable",
        url=url,
        said=m.mirror,
        fix="export HF_HUB_OFFLINE=1" if url.rstrip("/") == MIRROR else f"export HF_ENDPOINT={MIRROR}",
    )


def proxy(m: Machine) -> CheckResult:
    names = [n for n in ("http_proxy", "https_proxy", "all_proxy") if m.environ.get(n) or m.environ.get(n.upper())]
    if not names:
        return CheckResult("proxy", "ok", m.say("none", "无"))
    parts = [urlsplit(m.environ.get(n) or m.environ.get(n.upper()) or "") for n in names]
    hosts = sorted({f"{p.hostname}:{p.port}" if p.port else str(p.hostname) for p in parts})  # never the password
    skipped = (m.environ.get("no_proxy") or m.environ.get("NO_PROXY") or "").replace(" ", "").split(",")
    if "127.0.0.1" in skipped or "localhost" in skipped or "*" in skipped:
        return CheckResult("proxy", "ok", ", ".join(hosts))
    return m.fault("proxy", "local requests", hosts=", ".join(hosts))


def stored_data(m: Machine) -> CheckResult:
    """Compare folders with their manifest.json: sizes always, checksums within BUDGET; `doctor --deep` compares all of
    them."""
    deadline = None if m.deep else time.monotonic() + BUDGET
    verdicts = verify.verify_folders(list(verify.stored_folders(m.home)), deadline=deadline)
    faults = [fault for verdict in verdicts for fault in verdict.faults]
    files, size, hashed = (sum(getattr(v, name) for v in verdicts) for name in ("files", "bytes", "hashed"))
    if not verdicts:
        return CheckResult("stored data", "skip", m.say(f"nothing in {m.home} yet", f"{m.home} 中尚无数据"))
    if faults:
        more = f" (+{len(faults) - 3})" if len(faults) > 3 else ""
        return m.fault(
            "stored data",
            "damaged",
            found="; ".join(f"{fault.file}: {fault.what}" for fault in faults[:3]) + more,
            fix="\n".join(dict.fromkeys(fault.fix for fault in faults[:3])),
        )
    found = m.say(
        f"{len(verdicts)} folders, {files} files, {gib(size)}: sizes right, {hashed} checksums right",
        f"{len(verdicts)} 个目录，{files} 个文件，{gib(size)}：大小正确，{hashed} 个校验和正确",
    )
    if hashed < files:
        found += m.say(" (all: ascendchat doctor --deep)", "（全部校验：ascendchat doctor --deep）")
    return CheckResult("stored data", "ok", found)
