"""Checks of what lies under torch_npu, for `ascendchat doctor`: CANN, operators, driver, npu-smi, /dev, group.

Without an Ascend chip all of them are skipped: a laptop without an NPU has no fault.
"""

from __future__ import annotations

import grp
import os
import re
from pathlib import Path

from ascendchat.chips import KINDS, cpu_count, detected
from ascendchat.device import smi
from ascendchat.device.cann import NEWEST, cann_for, cann_version, fits, install_line, pair_line, read_version
from ascendchat.device.env import AUTOLOAD, harmful_settings, visible_problem
from ascendchat.doctor.machine import CheckResult, Machine, Status, gib, plan_flag
from ascendchat.doctor.probe import last_line

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


def absent(m: Machine, name: str) -> CheckResult:
    return CheckResult(name, "skip", m.say("no Ascend chip here", "此机器没有昇腾芯片"))


def prefixes(m: Machine) -> list[Path]:
    """Folders in which CANN may be installed: system-wide, ModelArts, or in the user's home."""
    user_home = m.environ.get("HOME", "")
    return [m.root / p for p in PREFIXES] + ([Path(user_home) / "Ascend"] if user_home else [])


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


def cann(m: Machine) -> CheckResult:
    """Check that CANN is loaded, complete, and of a version that torch_npu supports."""
    home, script = cann_home(m), set_env(m)
    torch_npu = m.versions.get("torch_npu", "")
    if home is None:
        if m.npus:
            return CheckResult(
                "CANN", "ok", m.say("loaded; ASCEND_HOME_PATH is not set", "已加载；未设置 ASCEND_HOME_PATH")
            )
        if not m.has_chip:
            return absent(m, "CANN")
        if script:
            return m.fault("CANN", "not loaded", script=script)
        return m.fault("CANN", "not installed", wanted=cann_for(torch_npu) or NEWEST)
    if not home.is_dir():
        return m.fault("CANN", "folder missing", home=home, script=script or "/usr/local/Ascend/cann/set_env.sh")
    return _pairing(m, home, torch_npu)


def _pairing(m: Machine, home: Path, torch_npu: str) -> CheckResult:
    version = cann_version(home)
    fitting = cann_for(torch_npu)
    found = f"CANN {version or '?'} ({home})"
    if m.simulated:
        return CheckResult("CANN", "ok", m.say(f"simulated ({home})", f"模拟（{home}）"))
    if not version or not fitting:
        return CheckResult("CANN", "ok", found)
    if fits(torch_npu, version):
        return CheckResult("CANN", "ok", found + (f", torch_npu {torch_npu}" if torch_npu else ""))
    return m.fault(
        "CANN", "other version", found=found, torch_npu=torch_npu, wanted=fitting, line=install_line(version)
    )


def operator_package(m: Machine) -> CheckResult:
    """Check that the operators for this chip are installed; they are a package of their own, one per chip family."""
    home = cann_home(m)
    opp = Path(m.environ.get("ASCEND_OPP_PATH") or (home / "opp" if home else ""))
    if not m.has_chip:
        return absent(m, "operators")
    if home is None or not m.chip_name or m.simulated:
        return CheckResult("operators", "skip", m.say("CANN is simulated or not loaded", "CANN 为模拟或未加载"))
    folder, package = next(((f, p) for pattern, f, p in OPERATORS if re.match(pattern, m.chip_name)), ("", ""))
    kernels = opp / "built-in/op_impl/ai_core/tbe/kernel"
    installed = sorted(p.name for p in kernels.glob("ascend*") if p.is_dir())
    if not folder or folder in installed:
        return CheckResult("operators", "ok" if folder else "skip", ", ".join(installed) or m.chip_name)
    return m.fault(
        "operators",
        "of another chip",
        # CANN moves its folders between releases: only another chip's operators are a certain fault.
        status="fail" if installed else "warn",
        chip=m.chip_name,
        folder=folder,
        have=", ".join(installed) or m.say("none", "无"),
        kernels=kernels,
        package=package,
        version=cann_version(home) or "*",
    )


def driver(m: Machine) -> CheckResult:
    if not m.has_chip:
        return absent(m, "driver")
    version = read_version(m.root / "usr/local/Ascend/driver/version.info")
    if version:
        return CheckResult("driver", "ok", version)
    if m.npus:
        return CheckResult("driver", "ok", m.say("works; no version.info", "可用；没有 version.info"))
    return m.fault("driver", "missing")


def npu_smi(m: Machine) -> CheckResult:
    reply = m.npu_smi
    if isinstance(reply, smi.Readings):
        sick = [f"{d.index} {d.health}" for d in reply.devices if d.health.upper() not in ("OK", "UNKNOWN", "")]
        sizes = {d.memory_total for d in reply.devices if d.memory_total}
        found = f"{len(reply.devices)} x {reply.devices[0].name}" + (f", {gib(min(sizes))}" if sizes else "")
        if not sick:
            return CheckResult("npu-smi", "ok", f"{found} (npu-smi {reply.version})")
        return m.fault("npu-smi", "unhealthy", found=found, sick=", ".join(sick), device=sick[0].split()[0])
    if reply.missing and not m.has_chip:
        return absent(m, "npu-smi")
    if reply.missing:
        return m.fault("npu-smi", "missing", found=reply.text)
    if "-8020" in reply.text:
        return m.fault("npu-smi", "held", found=reply.text)
    if "did not answer" in reply.text:
        return m.fault("npu-smi", "hangs", found=reply.text)
    nodes = " ".join(f"--device /dev/{n}" for n in ("davinci0", *MANAGERS))
    return m.fault("npu-smi", "not mounted", found=reply.text, nodes=nodes)


def device_nodes(m: Machine) -> CheckResult:
    name = "/dev/davinci*"
    if not m.has_chip:
        return absent(m, name)
    managers = [n for n in MANAGERS if not (m.root / "dev" / n).exists()]
    if m.nodes and not managers:
        return CheckResult(name, "ok", ", ".join(m.nodes))
    if m.npus:
        return CheckResult(name, "ok", m.say("not visible, but torch sees the devices", "不可见，但 torch 能看到设备"))
    missing = managers if m.nodes else ["davinci0", *managers]
    return m.fault(
        name,
        "missing",
        missing=", ".join("/dev/" + n for n in missing),
        fix="docker run " + " ".join(f"--device /dev/{n}" for n in missing) + " ...",
    )


def group(m: Machine) -> CheckResult:
    """Check that this user may open the device files, which belong to HwHiAiUser; root needs no group."""
    if not m.has_chip or not m.nodes:
        return absent(m, "group")
    closed = [n for n in m.nodes if not os.access(m.root / "dev" / n, os.R_OK | os.W_OK)]
    if not closed:
        return CheckResult("group", "ok", m.say("the device files can be opened", "设备文件可以打开"))
    gid = (m.root / "dev" / closed[0]).stat().st_gid
    try:
        owner = grp.getgrgid(gid).gr_name
    except KeyError:
        owner = "HwHiAiUser"
    return m.fault("group", "no access", node=closed[0], owner=owner)


# Checks of torch, torch_npu and the devices torch sees, for `ascendchat doctor`: judged from what the probes said.


def base(version: str) -> str:
    """Version number without its suffix: 2.13.0+cpu -> 2.13.0, 2.10.0.post4 -> 2.10.0."""
    return ".".join(version.split("+")[0].split(".")[:3])


def torch(m: Machine) -> CheckResult:
    if m.torch.ok:
        build = m.torch.values.get("cuda_build")
        return CheckResult("torch", "ok", f"{m.torch.values['version']}" + (f" (CUDA {build})" if build else ""))
    if "torch" not in m.versions:
        return m.fault("torch", "not installed")
    return m.fault("torch", "broken", version=m.versions["torch"], said=last_line(m.torch.error))


def torch_npu(m: Machine) -> CheckResult:
    """Check that torch_npu is installed, pairs with torch, and that its libraries load."""
    if m.npu is None:
        return _torch_npu_absent(m)
    installed, torch_version = m.versions.get("torch_npu", ""), m.versions.get("torch", "")
    if base(installed) != base(torch_version):
        status: Status = "fail" if m.has_chip else "warn"
        line = pair_line(installed.split("+")[0])
        return m.fault("torch_npu", "other version", status, have=installed, torch=torch_version or "-", line=line)
    if m.npu.ok:
        return CheckResult(
            "torch_npu", "ok", f"{m.npu.values['version']} " + m.say("with torch ", "配合 torch ") + torch_version
        )
    message = last_line(m.npu.error)
    if "Two accelerators" in m.npu.error:
        return CheckResult("torch_npu", "skip", m.say("see the next line", "见下一项"))
    source = f"source {set_env(m) or '/usr/local/Ascend/cann/set_env.sh'}"
    if m.has_chip:
        return m.fault("torch_npu", "does not load", have=installed, said=message, source=source)
    if m.environ.get(AUTOLOAD) == "0":
        found = m.say(
            f"{installed}, left alone ({AUTOLOAD}=0); for an NPU: ", f"{installed}，未加载（{AUTOLOAD}=0）；使用 NPU："
        )
        return CheckResult("torch_npu", "ok", found + source)
    return m.fault("torch_npu", "does not load, no chip", have=installed, said=message, source=source)


def _torch_npu_absent(m: Machine) -> CheckResult:
    if not m.has_chip:
        return CheckResult("torch_npu", "skip", m.say("not installed, no NPU here", "未安装，此机器没有 NPU"))
    home = cann_home(m)
    return m.fault("torch_npu", "not installed", line=install_line(cann_version(home) if home else ""))


def two_accelerators(m: Machine) -> CheckResult:
    build = str(m.torch.values.get("cuda_build", ""))
    if m.npu is None or (not build and "Two accelerators" not in m.npu.error):
        return CheckResult("two accelerators", "ok" if m.npu else "skip", m.say("no conflict", "无冲突"))
    clash = "Two accelerators" in m.npu.error
    return m.fault(
        "two accelerators",
        "conflict",
        status="fail" if clash and m.has_chip else "warn",
        build=build,
        fix=f"pip install --force-reinstall torch=={base(m.versions.get('torch', ''))}+cpu"
        if m.has_chip
        else "pip uninstall -y torch_npu",
    )


def device(m: Machine) -> CheckResult:
    """Check which device training would run on, and that it is the one that was asked for."""
    kind, name, count = m.choice()
    wanted = m.environ.get("ASCENDCHAT_DEVICE", "")
    found = f"{kind}: {name} x {count}" if kind != "cpu" else f"cpu: {name}, {cpu_count()} " + m.say("cores", "核")
    if wanted not in ("", "auto", kind):
        return m.fault("device", "not there", wanted=wanted, found=found)
    if kind == "cpu" and isinstance(m.nvidia_smi, smi.Readings) and m.torch.ok:
        return m.fault(
            "device", "GPU not seen", gpu=m.nvidia_smi.devices[0].name, version=base(m.versions.get("torch", ""))
        )
    if m.npus and m.npu and m.npu.values.get("problem"):
        message = next(iter(str(m.npu.values["problem"]).strip().splitlines()), "")
        return m.fault("device", "does not start", found=found, said=message)
    if m.has_chip and not m.npus and wanted in ("", "auto"):
        return m.fault("device", "NPU not seen", found=found, script=set_env(m) or "/usr/local/Ascend/cann/set_env.sh")
    if m.simulated:
        found += m.say(" (simulated: proves wiring, never speed)", "（模拟设备：只验证功能，不代表速度）")
    return CheckResult("device", "ok", m.say(f"training uses {found}", f"训练将使用 {found}"))


def visible_devices(m: Machine) -> CheckResult:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    value = m.environ.get(name)
    if value is None:
        return CheckResult(
            "visible devices", "ok" if m.has_chip else "skip", m.say(f"{name} not set: all", f"未设置 {name}：全部可见")
        )
    problem = visible_problem(value)
    total = len(m.npu_smi.devices) if isinstance(m.npu_smi, smi.Readings) else len(m.nodes)
    if problem:
        ids = sorted({int(part) for part in value.replace(" ", ",").split(",") if part.isdigit()})
        right = ",".join(map(str, ids)) or "0"
        return CheckResult("visible devices", "fail", f"{name}={value!r}", m.say(*problem), f"export {name}={right}")
    beyond = [part for part in value.split(",") if total and int(part) >= total]
    if beyond:
        valid = ",".join(part for part in value.split(",") if part not in beyond) or "0"
        return m.fault("visible devices", "beyond", value=value, total=total, beyond=beyond[0], kept=valid)
    return CheckResult("visible devices", "ok", f"{name}={value}")


def bf16(m: Machine) -> CheckResult:
    kind, name, _ = m.choice()
    if kind == "cpu" and not m.chip_name:
        return CheckResult("bf16", "skip", m.say("computes in fp32 on a CPU", "CPU 使用 fp32 计算"))
    if not m.chip_name and m.torch.values.get("cuda"):
        has = bool(m.torch.values.get("cuda_bf16"))
    else:
        name = m.chip_name or name
        chip = detected(name, "npu" if m.chip_name else kind, 0)
        probed = m.npu.values.get("bf16") if m.npu else None
        if not chip.known and probed is None:
            return CheckResult("bf16", "skip", m.say(f"{name} is not in the chip table", f"芯片表中没有 {name}"))
        has = chip.bf16 if chip.known else bool(probed)
    if has:
        return CheckResult("bf16", "ok", m.say(f"{name}: yes", f"{name}：支持"))
    return m.fault("bf16", "none", chip=name, flag=plan_flag(name))


def collectives(m: Machine) -> CheckResult:
    kind, _, count = m.choice()
    probed = {**m.torch.values, **(m.npu.values if m.npu else {})}
    available = [name for name in dict.fromkeys(k.collective for k in KINDS.values()) if probed.get(name)]
    needed = KINDS[kind].collective
    if not m.torch.ok:
        return CheckResult("collectives", "skip", m.say("torch cannot be asked", "无法查询 torch"))
    if needed in available:
        return CheckResult("collectives", "ok", f"{needed} ({', '.join(available)})")
    return m.fault(
        "collectives",
        "missing",
        status="fail" if count > 1 else "warn",
        need=needed,
        have=", ".join(available) or m.say("none", "无"),
        version=base(m.versions.get("torch", "")),
    )


def variables(m: Machine) -> CheckResult:
    """Report settings copied from elsewhere that cost speed, hide faults or do nothing; they are never changed."""
    harmful = [h for h in harmful_settings(m.environ) if h.name != "ASCEND_RT_VISIBLE_DEVICES"]  # has its own line
    if not harmful:
        return CheckResult("variables", "ok", m.say("none that harm", "没有有害的环境变量"))
    return m.fault(
        "variables",
        "harmful",
        status="fail" if any(h.kind == "breaks" for h in harmful) and m.has_chip else "warn",
        found=", ".join(f"{h.name}={h.value}" for h in harmful),
        why=" | ".join(h.sentence(m.lang) for h in harmful),
        fix="unset " + " ".join(dict.fromkeys(h.name for h in harmful)),
    )
