"""Checks of the machine around the chips, for `ascendchat doctor`: Python, wheels, memory, disk, ports, network."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from ascendchat.doctor.checks import HUB, MIRROR, OPTIONAL, REQUIRED, VENDOR, Check, Machine, cpu_count, gib

DISTRIBUTION = {"yaml": "pyyaml", "attr": "attrs"}  # module -> what pip calls it
HCCL_PORTS = range(60000, 60032)  # host side of HCCL, unless HCCL_IF_BASE_PORT moves it


def python(m: Machine) -> Check:
    version = ".".join(str(n) for n in m.python)
    if m.python[:2] < (3, 10):
        return Check(
            "python",
            "fail",
            version,
            m.say("ascendchat needs Python 3.10 or newer", "ascendchat 需要 Python 3.10 或更高版本"),
            "python3.11 -m venv .venv && . .venv/bin/activate && pip install -e .",
        )
    if m.versions.get("torch_npu") and m.python[:2] > (3, 14):
        return Check(
            "python",
            "warn",
            version,
            m.say("torch_npu is released for Python 3.10 to 3.14", "torch_npu 只发布了 Python 3.10 至 3.14 的版本"),
            "python3.12 -m venv .venv && . .venv/bin/activate && pip install -e '.[npu]'",
        )
    return Check("python", "ok", version)


def wheels(m: Machine) -> Check:
    """Every wheel is imported in a subprocess; a wheel of another architecture is broken, not missing."""
    if not m.wheels.ok:
        return Check(
            "wheels",
            "fail",
            m.wheels.error.splitlines()[-1],
            m.say("the Python packages could not be tried", "无法检查 Python 依赖包"),
            "pip install -e .",
        )
    found = m.wheels.values
    required = REQUIRED + (VENDOR if m.has_chip else [])
    missing = [DISTRIBUTION.get(n, n) for n in required if found.get(n) is None]
    broken = {n: str(v)[1:] for n, v in found.items() if str(v or "").startswith("!")}
    if missing or broken:
        parts = [m.say(f"missing: {', '.join(missing)}", f"缺少：{', '.join(missing)}")] if missing else []
        parts += [m.say(f"{n} cannot be imported: {why}", f"{n} 无法导入：{why}") for n, why in broken.items()]
        names = " ".join(missing + [DISTRIBUTION.get(n, n) for n in broken])
        fatal = any(DISTRIBUTION.get(n, n) in missing or n in broken for n in REQUIRED)
        return Check(
            "wheels",
            "fail" if fatal else "warn",
            "; ".join(parts),
            m.say(
                "data, tokenizer or kernel compilation stops with an import error",
                "数据、分词器或算子编译会因导入错误而中断",
            ),
            f"pip install --force-reinstall {names}" if broken else f"pip install {names}",
        )
    if found.get("rustbpe") is None:
        return Check(
            "wheels",
            "warn",
            m.say("rustbpe is not installed", "未安装 rustbpe"),
            m.say("tokenizers are trained with the slower fallback library", "将使用较慢的备用库训练分词器，结果可用"),
            "pip install rustbpe",
        )
    shown = [f"{n} {found[n]}".strip() for n in ("numpy", "pyarrow", "tiktoken", "tokenizers", *OPTIONAL)]
    return Check("wheels", "ok", ", ".join(shown))


def compiler(m: Machine) -> Check:
    names = [m.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name, path=m.environ.get("PATH")))), None)
    if found:
        return Check("compiler", "ok", found)
    return Check(
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


def memory(m: Machine) -> Check:
    available, total = memory_bytes(m.root)
    kind, _, count = m.choice()
    # A rank holds the model once on the host while it loads, and its share of the data: 4 GiB covers the recipes.
    need = (4 if kind == "cpu" else 4 * count) * 2**30
    found = m.say(
        f"{gib(available)} free of {gib(total)}, {cpu_count()} cores",
        f"可用 {gib(available)} / 共 {gib(total)}，{cpu_count()} 核",
    )
    if available >= need:
        return Check("memory", "ok", found)
    return Check(
        "memory",
        "warn",
        found,
        m.say(
            f"about {gib(need)} free is advised for {count} rank(s); the kernel kills what does not fit",
            f"{count} 个进程建议至少有 {gib(need)} 可用内存；不足时进程会被系统杀死",
        ),
        "ps aux --sort=-rss | head",
    )


def shared_memory(m: Machine) -> Check:
    if m.system != "Linux":
        return Check("/dev/shm", "skip", m.say("not used on this system", "此系统不使用"))
    try:
        usage = shutil.disk_usage(m.root / "dev/shm")
    except OSError as error:
        return Check(
            "/dev/shm",
            "fail",
            str(error.strerror),
            m.say("ranks and data loaders share tensors through it", "各进程与数据加载器通过它共享张量"),
            "docker run --shm-size=16g ...",
        )
    found = m.say(f"{gib(usage.free)} free of {gib(usage.total)}", f"可用 {gib(usage.free)} / 共 {gib(usage.total)}")
    if usage.free >= 2**30:
        return Check("/dev/shm", "ok", found)
    small = usage.total < 2 * 2**30  # docker gives 64 MiB unless told
    return Check(
        "/dev/shm",
        "warn",
        found,
        m.say(
            "data loaders and collectives die with `Bus error` when it is full",
            "写满后数据加载器与集合通信会报 `Bus error` 退出",
        ),
        "docker run --shm-size=16g ...  (or --ipc=host)" if small else "ascendchat clean",
    )


def open_files(m: Machine) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 4096 if m.choice()[2] > 1 else 1024  # every rank keeps sockets to its peers and open shards
    if soft == resource.RLIM_INFINITY or soft >= need:
        return Check("open files", "ok", str(soft))
    return Check(
        "open files",
        "warn",
        f"{soft}",
        m.say(
            f"{need} are advised; more shards and ranks end in `Too many open files`",
            f"建议 {need}；分片和进程多时会报 `Too many open files`",
        ),
        f"ulimit -n {65535 if hard == resource.RLIM_INFINITY else min(65535, hard)}",
    )


def listening(root: Path) -> set[int]:
    """TCP ports somebody listens on (Linux; empty elsewhere)."""
    ports = set()
    for name in ("proc/net/tcp", "proc/net/tcp6"):
        try:
            rows = (root / name).read_text().splitlines()[1:]
        except OSError:
            continue
        ports |= {int(row.split()[1].rpartition(":")[2], 16) for row in rows if row.split()[3] == "0A"}
    return ports


def ports(m: Machine) -> Check:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
    except OSError as error:
        return Check(
            "ports",
            "fail",
            str(error),
            m.say("ranks find each other over a local port", "各进程通过本机端口建立联系"),
            "ip link set lo up",
        )
    taken = sorted(listening(m.root) & set(HCCL_PORTS)) if m.has_chip and "HCCL_IF_BASE_PORT" not in m.environ else []
    if taken:
        return Check(
            "ports",
            "warn",
            m.say(f"in use: {', '.join(map(str, taken))}", f"被占用：{', '.join(map(str, taken))}"),
            m.say(
                "HCCL listens on 60000-60031 of the host and stops with EI0019",
                "HCCL 使用主机端口 60000-60031，被占用时报 EI0019",
            ),
            "export HCCL_IF_BASE_PORT=50000",
        )
    return Check("ports", "ok", m.say(f"free ports available (e.g. {free})", f"有空闲端口（如 {free}）"))


def disk(m: Machine) -> Check:
    folder = m.home
    while not folder.exists():
        folder = folder.parent
    found = m.say(
        f"{gib(shutil.disk_usage(folder).free)} free for {m.home}",
        f"{m.home} 可用 {gib(shutil.disk_usage(folder).free)}",
    )
    if not os.access(folder, os.W_OK):
        return Check(
            "disk",
            "fail",
            m.say(f"{folder} is not writable", f"{folder} 不可写"),
            m.say("data, tokenizers and checkpoints are kept there", "数据、分词器与检查点都存放在那里"),
            "export ASCENDCHAT_HOME=/path/with/space",
        )
    if shutil.disk_usage(folder).free < 10 * 2**30:
        return Check(
            "disk",
            "warn",
            found,
            m.say(
                "data and checkpoints of a small run take about 10 GiB; a full disk stops training",
                "一次小规模训练的数据与检查点约需 10 GiB；磁盘写满会中断训练",
            ),
            "export ASCENDCHAT_HOME=/path/with/space",
        )
    return Check("disk", "ok", found)


def mirror(m: Machine) -> Check:
    url = m.environ.get("HF_ENDPOINT") or HUB
    if m.mirror is None:
        return Check("mirror", "skip", m.say("HF_HUB_OFFLINE is set", "已设置 HF_HUB_OFFLINE"))
    if m.mirror == "":
        return Check("mirror", "ok", m.say(f"{url} answers", f"{url} 可访问"))
    return Check(
        "mirror",
        "warn",
        f"{url}: {m.mirror}",
        m.say(
            "data and models cannot be downloaded from it; training on data already here works",
            "无法从中下载数据和模型；已有数据仍可训练",
        ),
        "export HF_HUB_OFFLINE=1" if url.rstrip("/") == MIRROR else f"export HF_ENDPOINT={MIRROR}",
    )


def proxy(m: Machine) -> Check:
    names = [n for n in ("http_proxy", "https_proxy", "all_proxy") if m.environ.get(n) or m.environ.get(n.upper())]
    if not names:
        return Check("proxy", "ok", m.say("none", "无"))
    parts = [urlsplit(m.environ.get(n) or m.environ.get(n.upper()) or "") for n in names]
    hosts = sorted({f"{p.hostname}:{p.port}" if p.port else str(p.hostname) for p in parts})  # never the password
    skipped = (m.environ.get("no_proxy") or m.environ.get("NO_PROXY") or "").replace(" ", "").split(",")
    if "127.0.0.1" in skipped or "localhost" in skipped or "*" in skipped:
        return Check("proxy", "ok", ", ".join(hosts))
    return Check(
        "proxy",
        "warn",
        ", ".join(hosts),
        m.say(
            "without no_proxy, requests to our own server on this machine go to the proxy",
            "未设置 no_proxy，访问本机服务的请求会被发往代理",
        ),
        "export no_proxy=localhost,127.0.0.1",
    )
