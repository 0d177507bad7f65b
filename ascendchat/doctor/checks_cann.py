"""Checks of what lies under torch_npu, for `ascendchat doctor`: CANN, operators, driver, npu-smi, /dev, group.

Without an Ascend chip all of them are skipped: a laptop without an NPU has no fault.
"""

from __future__ import annotations

import grp
import os
import re
from pathlib import Path

from ascendchat.device import smi
from ascendchat.device.cann import NEWEST, cann_for, cann_version, fits, install_line, read_version
from ascendchat.doctor.checks import Check, Machine, gib

PREFIXES = ("usr/local/Ascend", "home/ma-user/Ascend")
SCRIPTS = ("cann/set_env.sh", "ascend-toolkit/set_env.sh")
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")  # device files that every NPU process opens
# Folder of the compiled operators per chip name: opp/built-in/op_impl/ai_core/tbe/kernel/<folder>
OPERATORS = (
    (r"Ascend910B\d", "ascend910b", "910b"),
    (r"Ascend910(_93\d\d|C)", "ascend910_93", "a3"),
    (r"Ascend310P", "ascend310p", "310p"),
    (r"Ascend950", "ascend950", "950"),
    (r"Ascend910(A|ProA|ProB|PremiumA|B)?$", "ascend910", "910"),
)


def absent(m: Machine, name: str) -> Check:
    return Check(name, "skip", m.say("no Ascend chip here", "此机器没有昇腾芯片"))


def prefixes(m: Machine) -> list[Path]:
    """Where CANN is installed: system-wide, ModelArts, or in the user's home."""
    own = m.environ.get("HOME", "")
    return [m.root / p for p in PREFIXES] + ([Path(own) / "Ascend"] if own else [])


def set_env(m: Machine) -> str:
    """Path of the script that loads CANN, as the user would type it; empty when none is installed."""
    for prefix in prefixes(m):
        for script in SCRIPTS:
            if (prefix / script).is_file():
                path = prefix / script
                return f"/{path.relative_to(m.root)}" if path.is_relative_to(m.root) else str(path)
    return ""


def cann_home(m: Machine) -> Path | None:
    value = m.environ.get("ASCEND_HOME_PATH") or m.environ.get("ASCEND_TOOLKIT_HOME") or ""
    return Path(value) if value else None


def cann(m: Machine) -> Check:
    """Loaded or not, whole or not, and the pairing with torch_npu."""
    home, script = cann_home(m), set_env(m)
    torch_npu = m.versions.get("torch_npu", "")
    if home is None:
        if m.npus:
            return Check("CANN", "ok", m.say("loaded; ASCEND_HOME_PATH is not set", "已加载；未设置 ASCEND_HOME_PATH"))
        if not m.has_chip:
            return absent(m, "CANN")
        if script:
            return m.fault("CANN", "not loaded", script=script)
        return m.fault("CANN", "not installed", wanted=cann_for(torch_npu) or NEWEST)
    if not home.is_dir():
        return m.fault("CANN", "folder missing", home=home, script=script or "/usr/local/Ascend/cann/set_env.sh")
    return _pairing(m, home, torch_npu)


def _pairing(m: Machine, home: Path, torch_npu: str) -> Check:
    version = cann_version(home)
    wanted = cann_for(torch_npu)
    found = f"CANN {version or '?'} ({home})"
    if m.simulated:
        return Check("CANN", "ok", m.say(f"simulated ({home})", f"模拟（{home}）"))
    if not version or not wanted:
        return Check("CANN", "ok", found)
    if fits(torch_npu, version):
        return Check("CANN", "ok", found + (f", torch_npu {torch_npu}" if torch_npu else ""))
    return m.fault("CANN", "other version", found=found, torch_npu=torch_npu, wanted=wanted, line=install_line(version))


def operator_package(m: Machine) -> Check:
    """The operators are a package of their own, one per chip family."""
    home = cann_home(m)
    opp = Path(m.environ.get("ASCEND_OPP_PATH") or (home / "opp" if home else ""))
    if not m.has_chip:
        return absent(m, "operators")
    if home is None or not m.chip_name or m.simulated:
        return Check("operators", "skip", m.say("CANN is simulated or not loaded", "CANN 为模拟或未加载"))
    folder, package = next(((f, p) for pattern, f, p in OPERATORS if re.match(pattern, m.chip_name)), ("", ""))
    kernels = opp / "built-in/op_impl/ai_core/tbe/kernel"
    have = sorted(p.name for p in kernels.glob("ascend*") if p.is_dir())
    if not folder or folder in have:
        return Check("operators", "ok" if folder else "skip", ", ".join(have) or m.chip_name)
    return m.fault(
        "operators",
        "of another chip",
        # CANN moves its folders between releases: only another chip's operators are a certain fault.
        status="fail" if have else "warn",
        chip=m.chip_name,
        folder=folder,
        have=", ".join(have) or m.say("none", "无"),
        kernels=kernels,
        package=package,
        version=cann_version(home) or "*",
    )


def driver(m: Machine) -> Check:
    if not m.has_chip:
        return absent(m, "driver")
    version = read_version(m.root / "usr/local/Ascend/driver/version.info")
    if version:
        return Check("driver", "ok", version)
    if m.npus:
        return Check("driver", "ok", m.say("works; no version.info", "可用；没有 version.info"))
    return m.fault("driver", "missing")


def npu_smi(m: Machine) -> Check:
    said = m.npu_smi
    if isinstance(said, smi.Readings):
        sick = [f"{d.index} {d.health}" for d in said.devices if d.health.upper() not in ("OK", "UNKNOWN", "")]
        sizes = {d.memory_total for d in said.devices if d.memory_total}
        found = f"{len(said.devices)} x {said.devices[0].name}" + (f", {gib(min(sizes))}" if sizes else "")
        if not sick:
            return Check("npu-smi", "ok", f"{found} (npu-smi {said.version})")
        return m.fault("npu-smi", "unhealthy", found=found, sick=", ".join(sick), device=sick[0].split()[0])
    if said.missing and not m.has_chip:
        return absent(m, "npu-smi")
    if said.missing:
        return m.fault("npu-smi", "missing", found=said.text)
    if "-8020" in said.text:
        return m.fault("npu-smi", "held", found=said.text)
    if "did not answer" in said.text:
        return m.fault("npu-smi", "hangs", found=said.text)
    nodes = " ".join(f"--device /dev/{n}" for n in ("davinci0", *MANAGERS))
    return m.fault("npu-smi", "not mounted", found=said.text, nodes=nodes)


def device_nodes(m: Machine) -> Check:
    name = "/dev/davinci*"
    if not m.has_chip:
        return absent(m, name)
    managers = [n for n in MANAGERS if not (m.root / "dev" / n).exists()]
    if m.nodes and not managers:
        return Check(name, "ok", ", ".join(m.nodes))
    if m.npus:
        return Check(name, "ok", m.say("not visible, but torch sees the devices", "不可见，但 torch 能看到设备"))
    missing = managers if m.nodes else ["davinci0", *managers]
    return m.fault(
        name,
        "missing",
        missing=", ".join("/dev/" + n for n in missing),
        fix="docker run " + " ".join(f"--device /dev/{n}" for n in missing) + " ...",
    )


def group(m: Machine) -> Check:
    """The device files belong to HwHiAiUser; root needs no group."""
    if not m.has_chip or not m.nodes:
        return absent(m, "group")
    closed = [n for n in m.nodes if not os.access(m.root / "dev" / n, os.R_OK | os.W_OK)]
    if not closed:
        return Check("group", "ok", m.say("the device files can be opened", "设备文件可以打开"))
    gid = (m.root / "dev" / closed[0]).stat().st_gid
    try:
        owner = grp.getgrgid(gid).gr_name
    except KeyError:
        owner = "HwHiAiUser"
    return m.fault("group", "no access", node=closed[0], owner=owner)
