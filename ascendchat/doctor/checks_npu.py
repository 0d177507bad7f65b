"""Checks of torch, torch_npu and the devices torch sees, for `ascendchat doctor`: judged from what the probes said."""

from __future__ import annotations

from ascendchat.chips import KINDS, cpu_count, detected
from ascendchat.device import smi
from ascendchat.device.cann import cann_version, install_line, pair_line
from ascendchat.device.env import AUTOLOAD
from ascendchat.device.harmful_env import harmful_settings, visible_problem
from ascendchat.doctor.checks import Check, Machine, Status, plan_flag
from ascendchat.doctor.checks_cann import cann_home, set_env
from ascendchat.doctor.probe import last_line


def base(version: str) -> str:
    """2.13.0+cpu -> 2.13.0; 2.10.0.post4 -> 2.10.0"""
    return ".".join(version.split("+")[0].split(".")[:3])


def torch(m: Machine) -> Check:
    if m.torch.ok:
        build = m.torch.values.get("cuda_build")
        return Check("torch", "ok", f"{m.torch.values['version']}" + (f" (CUDA {build})" if build else ""))
    if "torch" not in m.versions:
        return m.fault("torch", "not installed")
    return m.fault("torch", "broken", version=m.versions["torch"], said=last_line(m.torch.error))


def torch_npu(m: Machine) -> Check:
    """torch_npu is installed, pairs with torch, and its libraries load."""
    if m.npu is None:
        return _torch_npu_absent(m)
    have, torch_version = m.versions.get("torch_npu", ""), m.versions.get("torch", "")
    if base(have) != base(torch_version):
        status: Status = "fail" if m.has_chip else "warn"
        line = pair_line(have.split("+")[0])
        return m.fault("torch_npu", "other version", status, have=have, torch=torch_version or "-", line=line)
    if m.npu.ok:
        return Check(
            "torch_npu", "ok", f"{m.npu.values['version']} " + m.say("with torch ", "配合 torch ") + torch_version
        )
    said = last_line(m.npu.error)
    if "Two accelerators" in m.npu.error:
        return Check("torch_npu", "skip", m.say("see the next line", "见下一项"))
    source = f"source {set_env(m) or '/usr/local/Ascend/cann/set_env.sh'}"
    if m.has_chip:
        return m.fault("torch_npu", "does not load", have=have, said=said, source=source)
    if m.environ.get(AUTOLOAD) == "0":
        found = m.say(f"{have}, left alone ({AUTOLOAD}=0); for an NPU: ", f"{have}，未加载（{AUTOLOAD}=0）；使用 NPU：")
        return Check("torch_npu", "ok", found + source)
    return m.fault("torch_npu", "does not load, no chip", have=have, said=said, source=source)


def _torch_npu_absent(m: Machine) -> Check:
    if not m.has_chip:
        return Check("torch_npu", "skip", m.say("not installed, no NPU here", "未安装，此机器没有 NPU"))
    home = cann_home(m)
    return m.fault("torch_npu", "not installed", line=install_line(cann_version(home) if home else ""))


def two_accelerators(m: Machine) -> Check:
    build = str(m.torch.values.get("cuda_build", ""))
    if m.npu is None or (not build and "Two accelerators" not in m.npu.error):
        return Check("two accelerators", "ok" if m.npu else "skip", m.say("no conflict", "无冲突"))
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


def device(m: Machine) -> Check:
    """What training would run on."""
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
        said = next(iter(str(m.npu.values["problem"]).strip().splitlines()), "")
        return m.fault("device", "does not start", found=found, said=said)
    if m.has_chip and not m.npus and wanted in ("", "auto"):
        return m.fault("device", "NPU not seen", found=found, script=set_env(m) or "/usr/local/Ascend/cann/set_env.sh")
    if m.simulated:
        found += m.say(" (simulated: proves wiring, never speed)", "（模拟设备：只验证功能，不代表速度）")
    return Check("device", "ok", m.say(f"training uses {found}", f"训练将使用 {found}"))


def visible_devices(m: Machine) -> Check:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    value = m.environ.get(name)
    if value is None:
        return Check(
            "visible devices", "ok" if m.has_chip else "skip", m.say(f"{name} not set: all", f"未设置 {name}：全部可见")
        )
    problem = visible_problem(value)
    total = len(m.npu_smi.devices) if isinstance(m.npu_smi, smi.Readings) else len(m.nodes)
    if problem:
        ids = sorted({int(part) for part in value.replace(" ", ",").split(",") if part.isdigit()})
        right = ",".join(map(str, ids)) or "0"
        return Check("visible devices", "fail", f"{name}={value!r}", m.say(*problem), f"export {name}={right}")
    beyond = [part for part in value.split(",") if total and int(part) >= total]
    if beyond:
        kept = ",".join(part for part in value.split(",") if part not in beyond) or "0"
        return m.fault("visible devices", "beyond", value=value, total=total, beyond=beyond[0], kept=kept)
    return Check("visible devices", "ok", f"{name}={value}")


def bf16(m: Machine) -> Check:
    kind, name, _ = m.choice()
    if kind == "cpu" and not m.chip_name:
        return Check("bf16", "skip", m.say("computes in fp32 on a CPU", "CPU 使用 fp32 计算"))
    if not m.chip_name and m.torch.values.get("cuda"):
        has = bool(m.torch.values.get("cuda_bf16"))
    else:
        name = m.chip_name or name
        chip = detected(name, "npu" if m.chip_name else kind, 0)
        told = m.npu.values.get("bf16") if m.npu else None
        if not chip.known and told is None:
            return Check("bf16", "skip", m.say(f"{name} is not in the chip table", f"芯片表中没有 {name}"))
        has = chip.bf16 if chip.known else bool(told)
    if has:
        return Check("bf16", "ok", m.say(f"{name}: yes", f"{name}：支持"))
    return m.fault("bf16", "none", chip=name, flag=plan_flag(name))


def collectives(m: Machine) -> Check:
    kind, _, count = m.choice()
    told = {**m.torch.values, **(m.npu.values if m.npu else {})}
    have = [name for name in dict.fromkeys(k.collective for k in KINDS.values()) if told.get(name)]
    need = KINDS[kind].collective
    if not m.torch.ok:
        return Check("collectives", "skip", m.say("torch cannot be asked", "无法查询 torch"))
    if need in have:
        return Check("collectives", "ok", f"{need} ({', '.join(have)})")
    return m.fault(
        "collectives",
        "missing",
        status="fail" if count > 1 else "warn",
        need=need,
        have=", ".join(have) or m.say("none", "无"),
        version=base(m.versions.get("torch", "")),
    )


def variables(m: Machine) -> Check:
    """Settings copied from elsewhere that cost speed, hide faults or do nothing; they are reported, never changed."""
    harmful = [h for h in harmful_settings(m.environ) if h.name != "ASCEND_RT_VISIBLE_DEVICES"]  # has its own line
    if not harmful:
        return Check("variables", "ok", m.say("none that harm", "没有有害的环境变量"))
    return m.fault(
        "variables",
        "harmful",
        status="fail" if any(h.kind == "breaks" for h in harmful) and m.has_chip else "warn",
        found=", ".join(f"{h.name}={h.value}" for h in harmful),
        why=" | ".join(h.sentence(m.lang) for h in harmful),
        fix="unset " + " ".join(dict.fromkeys(h.name for h in harmful)),
    )
