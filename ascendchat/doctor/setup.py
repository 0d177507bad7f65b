"""Tell what to install on this machine, in order, and why: `ascendchat setup`; with --yes, do the parts that pip does.

    python3 -m ascendchat setup            # in a clone, before anything is installed: the standard library is enough

The checks of `ascendchat doctor` judge what is here; pairs of CANN, torch and torch_npu are those of device/cann.py.
The driver and CANN come from the vendor and are not installed from here.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ascendchat.chips import KINDS
from ascendchat.config.commands import SetupConfig
from ascendchat.config.data import HUGGING_FACE, MIRROR
from ascendchat.config.language import language
from ascendchat.device import smi
from ascendchat.device.cann import NEWEST, cann_version, fits, install_line
from ascendchat.doctor import probe
from ascendchat.doctor.checks import installed
from ascendchat.doctor.checks_npu import cann, cann_home, driver, set_env
from ascendchat.doctor.machine import Machine
from ascendchat.doctor.probe import Probe
from ascendchat.errors import UserError, home
from ascendchat.version import in_clone

NOT_PROBED = Probe({}, "not asked")
HUB_TIMEOUT = 5.0  # seconds; on a usable network a hub answers sooner
TIMEOUT = "export HF_HUB_DOWNLOAD_TIMEOUT=300"


@dataclass(frozen=True)
class Step:
    """One thing to do. `by_hand`: no program can do it for the user, such as loading CANN into a shell."""

    why: str
    command: str
    by_hand: bool = False


def run(config: SetupConfig) -> int:
    """Run `ascendchat setup`."""
    machine = look(language(config.lang))
    pending = steps(machine, config)
    for line in lines(machine, pending, kind_of(machine, config)):
        print(line)
    return run_pip_steps(pending) if config.yes else 0


def look(lang: str) -> Machine:
    """Look at this machine without importing torch: the vendors' tools, the installed versions, the hub."""
    environ = dict(os.environ)
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return Machine(
        lang=lang,
        environ=environ,
        home=home(),
        torch=NOT_PROBED,
        npu=None,
        wheels=NOT_PROBED,
        npu_smi=smi.read("npu-smi"),
        nvidia_smi=smi.read("nvidia-smi"),
        mirror=None if offline else probe.reach(environ.get("HF_ENDPOINT") or HUGGING_FACE, HUB_TIMEOUT),
        versions=installed(),
    )


def kind_of(m: Machine, config: SetupConfig) -> str:
    """Type of device to install for."""
    if config.device_type:
        return config.device_type
    apple = (m.system, platform.machine()) == ("Darwin", "arm64")
    seen = {"npu": m.has_chip, "cuda": isinstance(m.nvidia_smi, smi.Readings), "mps": apple}
    return next((kind for kind in KINDS if seen.get(kind)), "cpu")


def steps(m: Machine, config: SetupConfig) -> list[Step]:
    """List everything that is missing, in order, our own package included."""
    kind = kind_of(m, config)
    result = system_steps(m) if KINDS[kind].cann else []
    pair = torch_step(m, kind)
    cloned, extra = in_clone(), "[npu]" if KINDS[kind].cann else ""
    install_self = "pip install " + "-c constraints.txt " * (cloned and kind == "cpu") + "-e " * cloned
    install_self += shlex.quote(("." if cloned else "ascendchat") + extra)
    packages = [*pair, Step(m.say("this package and what it needs", "本项目及其依赖"), install_self)]
    where = " ".join(
        f"{flag} {shlex.quote(url)}"
        for flag, url in (("--index-url", config.index), ("--extra-index-url", config.extra_index))
        if url
    )
    result += [Step(step.why, f"{step.command} {where}".strip()) for step in packages]
    return result + network_steps(m, config)


def system_steps(m: Machine) -> list[Step]:
    """Steps for driver and CANN: the faults that the doctor finds with them, and their remedies."""
    if not m.has_chip:
        return [
            Step(
                m.say(
                    "no Ascend chip is seen here: is the driver installed, is the device mounted?",
                    "没有看到昇腾芯片：驱动装了吗？设备挂载了吗？",
                ),
                "npu-smi info",
                by_hand=True,
            )
        ]
    faults = [check for check in (driver(m), cann(m)) if check.status == "fail"]
    return [Step(f"{fault.name}: {fault.found}; {fault.why}", fault.fix, by_hand=True) for fault in faults]


def cann_here(m: Machine) -> str:
    """Version of the CANN that is loaded, else of the one that is installed; "" without any."""
    loaded, script = cann_home(m), set_env(m)
    if loaded is not None and loaded.is_dir():
        return cann_version(loaded)
    return cann_version((m.root / script.lstrip("/")).parent) if script else ""


def torch_step(m: Machine, kind: str) -> list[Step]:
    """Step that installs the torch for this device, where it is missing."""
    torch, torch_npu = m.versions.get("torch", ""), m.versions.get("torch_npu", "")
    if not KINDS[kind].cann:
        if torch or kind == "cpu":  # the versions of constraints.txt
            return []
        return [Step(m.say("torch, in a build that fits your driver", "与驱动匹配的 torch"), "pip install torch")]
    version = cann_here(m)
    same = torch.split("+")[0].split(".")[:3] == torch_npu.split("+")[0].split(".")[:3]
    if torch_npu and same and fits(torch_npu, version or NEWEST):
        return []
    line = install_line(version)
    belongs_to = (
        f"CANN {version}" if version else m.say(f"CANN {NEWEST} (none was found)", f"CANN {NEWEST}（未找到已安装的）")
    )
    why = m.say(f"torch and torch_npu that belong to {belongs_to}", f"与 {belongs_to} 配套的 torch 和 torch_npu")
    if "+cpu" in line:
        why += m.say(
            "; this build of torch is on PyTorch's own index: give its address, which pytorch.org shows under CPU, "
            "with --extra-index",
            "；这个 torch 版本在 PyTorch 自己的索引上：用 --extra-index 给出地址（见 pytorch.org 的 CPU 一栏）",
        )
    return [Step(why, line)]


def network_steps(m: Machine, config: SetupConfig) -> list[Step]:
    """Steps that set a mirror, where the hub does not answer."""
    if not m.mirror:
        return []
    hub = m.environ.get("HF_ENDPOINT") or HUGGING_FACE
    why = m.say(f"{hub} does not answer ({m.mirror}): ", f"{hub} 没有回应（{m.mirror}）：")
    if hub.rstrip("/") == MIRROR:
        text = m.say("work from what is here, or from a folder", "只用已有的，或用文件夹")
        return [Step(why + text, "export HF_HUB_OFFLINE=1", by_hand=True)]
    text = m.say("models and data from a mirror, with more patience", "改用镜像下载模型和数据，并延长等待")
    result = [Step(why + text, f"export HF_ENDPOINT={MIRROR}; {TIMEOUT}", by_hand=True)]
    if not config.index and not m.environ.get("PIP_INDEX_URL"):
        text = m.say(
            "where pip is slow too: the mirror of your university, company or cloud, once for this and all later "
            "installs",
            "如果 pip 也慢：用学校、公司或云厂商的镜像，设置一次，以后都有效",
        )
        result.append(Step(text, "pip config set global.index-url URL", by_hand=True))
    return result


def lines(m: Machine, pending: Sequence[Step], kind: str) -> list[str]:
    """Format what is here, then what to do."""
    chips = m.npu_smi if KINDS[kind].cann else m.nvidia_smi
    devices = f"{len(chips.devices)} x {chips.devices[0].name}" if isinstance(chips, smi.Readings) else "-"
    python = ".".join(map(str, m.python))
    facts = [(m.say("machine", "机器"), f"{m.system} {platform.machine()}, Python {python}")]
    facts += [(m.say("device", "设备"), f"{kind}: {devices}" if KINDS[kind].tool else kind)]
    if KINDS[kind].cann:
        loaded = cann_home(m) is not None
        state = "" if loaded or not cann_here(m) else m.say(", not loaded", "，未加载")
        facts.append(("CANN", (cann_here(m) or "-") + state))
    names = ("torch", "torch_npu") if KINDS[kind].cann else ("torch",)
    facts += [(name, m.versions.get(name, "-")) for name in names]
    text = [f"{label:<10} {value}" for label, value in facts]
    if not pending:
        return [*text, "", m.say("nothing to do", "无需安装")]
    text.append("")
    for number, step in enumerate(pending, 1):
        text.append(f"{number}. {step.why}" + m.say(" (by hand)", "（需手动）") * step.by_hand)
        text.append(f"   $ {without_secrets(step.command)}")
    automatic = ", ".join(str(number) for number, step in enumerate(pending, 1) if not step.by_hand)
    text.append("")
    if automatic:
        text.append(m.say(f"ascendchat setup --yes runs {automatic}", f"ascendchat setup --yes 会执行 {automatic}"))
    text.append(m.say("then: ascendchat doctor", "然后：ascendchat doctor"))
    return text


def without_secrets(command: str) -> str:
    """The command without the user name and password of a private index, which would stay in logs."""
    return re.sub(r"(?<=://)[^\s/]+@", "***@", command)


def clone() -> Path:
    """Folder in which `pip install -e .` works."""
    folder = Path(__file__).resolve().parents[2]
    project = folder / "pyproject.toml"  # in site-packages it may be that of any wheel
    text = project.read_text(encoding="utf-8", errors="replace") if project.is_file() else ""
    if not re.search(r"^name *= *[\"']ascendchat[\"']", text, flags=re.M):
        raise UserError(
            "ascendchat is installed without its sources; run setup in a clone: python3 -m ascendchat setup"
        )
    return folder


def run_pip_steps(pending: Sequence[Step]) -> int:
    """Run the steps that pip does, in the clone and for this Python; returns the status of the first that fails."""
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if managed.is_file() and sys.prefix == sys.base_prefix:
        raise UserError(
            "this Python belongs to the system, which forbids pip to change it; make an environment first: "
            "python3 -m venv .venv && .venv/bin/python -m ascendchat setup --yes"
        )
    folder = clone()
    for step in pending:
        if step.by_hand:
            continue
        words = shlex.split(step.command)
        print(f"\n$ {without_secrets(step.command)}", flush=True)
        done = subprocess.run([sys.executable, "-m", *words], cwd=folder, check=False)
        if done.returncode:
            raise UserError(
                f"pip ended with status {done.returncode}; mend what it says above, then: ascendchat setup --yes"
            )
    return 0
