"""`ascendchat setup [--yes]`: what to install on this machine, in order, and why; with --yes the parts that pip does.

    python3 -m ascendchat setup            # in a clone, before anything is installed: the standard library is enough

What is here is judged by the checks of `ascendchat doctor`; pairs of CANN, torch and torch_npu are those of
device/cann.py. The driver and CANN come from the vendor and are not installed from here.
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
from ascendchat.config import in_clone
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

NOT_ASKED = Probe({}, "not asked")
SLOW = 5.0  # seconds in which a hub answers on a network that is good enough
TIMEOUT = "export HF_HUB_DOWNLOAD_TIMEOUT=300"


@dataclass(frozen=True)
class Step:
    """One thing to do. `by_hand`: nobody can do it for you, such as loading CANN into your shell."""

    why: str
    command: str
    by_hand: bool = False


def run(config: SetupConfig) -> int:
    """The command."""
    machine = look(language(config.lang))
    todo = steps(machine, config)
    for line in lines(machine, todo, kind_of(machine, config)):
        print(line)
    return perform(todo) if config.yes else 0


def look(lang: str) -> Machine:
    """What can be seen without importing torch: the vendors' tools, the versions that are installed, the hub."""
    environ = dict(os.environ)
    offline = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return Machine(
        lang=lang,
        environ=environ,
        home=home(),
        torch=NOT_ASKED,
        npu=None,
        wheels=NOT_ASKED,
        npu_smi=smi.read("npu-smi"),
        nvidia_smi=smi.read("nvidia-smi"),
        mirror=None if offline else probe.reach(environ.get("HF_ENDPOINT") or HUGGING_FACE, SLOW),
        versions=installed(),
    )


def kind_of(m: Machine, config: SetupConfig) -> str:
    """For which type of device to install."""
    if config.device_type:
        return config.device_type
    apple = (m.system, platform.machine()) == ("Darwin", "arm64")
    seen = {"npu": m.has_chip, "cuda": isinstance(m.nvidia_smi, smi.Readings), "mps": apple}
    return next((kind for kind in KINDS if seen.get(kind)), "cpu")


def steps(m: Machine, config: SetupConfig) -> list[Step]:
    """Everything that is missing, in order; of Python packages also ours."""
    kind = kind_of(m, config)
    found = system_steps(m) if KINDS[kind].cann else []
    pair = torch_step(m, kind)
    here, extra = in_clone(), "[npu]" if KINDS[kind].cann else ""
    own = "pip install " + "-c constraints.txt " * (here and kind == "cpu") + "-e " * here
    own += shlex.quote(("." if here else "ascendchat") + extra)
    packages = [*pair, Step(m.say("this package and what it needs", "本项目及其依赖"), own)]
    where = " ".join(
        f"{flag} {shlex.quote(url)}"
        for flag, url in (("--index-url", config.index), ("--extra-index-url", config.extra_index))
        if url
    )
    found += [Step(step.why, f"{step.command} {where}".strip()) for step in packages]
    return found + network_steps(m, config)


def system_steps(m: Machine) -> list[Step]:
    """Driver and CANN: what the doctor finds wrong with them, and his remedy."""
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
    """The torch for this device, where it is not there."""
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
    of = f"CANN {version}" if version else m.say(f"CANN {NEWEST} (none was found)", f"CANN {NEWEST}（未找到已安装的）")
    why = m.say(f"torch and torch_npu that belong to {of}", f"与 {of} 配套的 torch 和 torch_npu")
    if "+cpu" in line:
        why += m.say(
            "; this build of torch is on PyTorch's own index: give its address, which pytorch.org shows under CPU, "
            "with --extra-index",
            "；这个 torch 版本在 PyTorch 自己的索引上：用 --extra-index 给出地址（见 pytorch.org 的 CPU 一栏）",
        )
    return [Step(why, line)]


def network_steps(m: Machine, config: SetupConfig) -> list[Step]:
    """Mirrors, where the hub does not answer."""
    if not m.mirror:
        return []
    asked = m.environ.get("HF_ENDPOINT") or HUGGING_FACE
    why = m.say(f"{asked} does not answer ({m.mirror}): ", f"{asked} 没有回应（{m.mirror}）：")
    if asked.rstrip("/") == MIRROR:
        text = m.say("work from what is here, or from a folder", "只用已有的，或用文件夹")
        return [Step(why + text, "export HF_HUB_OFFLINE=1", by_hand=True)]
    text = m.say("models and data from a mirror, with more patience", "改用镜像下载模型和数据，并延长等待")
    found = [Step(why + text, f"export HF_ENDPOINT={MIRROR}; {TIMEOUT}", by_hand=True)]
    if not config.index and not m.environ.get("PIP_INDEX_URL"):
        text = m.say(
            "where pip is slow too: the mirror of your university, company or cloud, once for this and all later "
            "installs",
            "如果 pip 也慢：用学校、公司或云厂商的镜像，设置一次，以后都有效",
        )
        found.append(Step(text, "pip config set global.index-url URL", by_hand=True))
    return found


def lines(m: Machine, todo: Sequence[Step], kind: str) -> list[str]:
    """What is here, then what to do."""
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
    shown = [f"{label:<10} {value}" for label, value in facts]
    if not todo:
        return [*shown, "", m.say("nothing to do", "无需安装")]
    shown.append("")
    for number, step in enumerate(todo, 1):
        shown.append(f"{number}. {step.why}" + m.say(" (by hand)", "（需手动）") * step.by_hand)
        shown.append(f"   $ {without_secrets(step.command)}")
    automatic = ", ".join(str(number) for number, step in enumerate(todo, 1) if not step.by_hand)
    shown.append("")
    if automatic:
        shown.append(m.say(f"ascendchat setup --yes runs {automatic}", f"ascendchat setup --yes 会执行 {automatic}"))
    shown.append(m.say("then: ascendchat doctor", "然后：ascendchat doctor"))
    return shown


def without_secrets(command: str) -> str:
    """To be shown: without the name and password of a private index, which would stay in logs."""
    return re.sub(r"(?<=://)[^\s/]+@", "***@", command)


def clone() -> Path:
    """The folder in which `pip install -e .` works."""
    folder = Path(__file__).resolve().parents[2]
    project = folder / "pyproject.toml"  # in site-packages it may be that of any wheel
    text = project.read_text(encoding="utf-8", errors="replace") if project.is_file() else ""
    if not re.search(r"^name *= *[\"']ascendchat[\"']", text, flags=re.M):
        raise UserError(
            "ascendchat is installed without its sources; run setup in a clone: python3 -m ascendchat setup"
        )
    return folder


def perform(todo: Sequence[Step]) -> int:
    """Run what pip does, in the clone and for this Python; the status of the first that fails."""
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if managed.is_file() and sys.prefix == sys.base_prefix:
        raise UserError(
            "this Python belongs to the system, which forbids pip to change it; make an environment first: "
            "python3 -m venv .venv && .venv/bin/python -m ascendchat setup --yes"
        )
    folder = clone()
    for step in todo:
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
