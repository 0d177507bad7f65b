"""Checks of torch, torch_npu and the devices torch sees, for `ascendchat doctor`: judged from what the probes said."""

from __future__ import annotations

from ascendchat.chips import KINDS, detected
from ascendchat.device import smi
from ascendchat.device.env import AUTOLOAD, folklore, visible_problem
from ascendchat.doctor.checks import Check, Machine, cpu_count, plan_flag
from ascendchat.doctor.checks_cann import set_env
from ascendchat.doctor.probe import last_line


def base(version: str) -> str:
    """2.13.0+cpu -> 2.13.0; 2.10.0.post4 -> 2.10.0"""
    return ".".join(version.split("+")[0].split(".")[:3])


def torch(m: Machine) -> Check:
    if m.torch.ok:
        build = m.torch.values.get("cuda_build")
        return Check("torch", "ok", f"{m.torch.values['version']}" + (f" (CUDA {build})" if build else ""))
    if "torch" not in m.versions:
        return Check(
            "torch",
            "fail",
            m.say("not installed", "未安装"),
            m.say("every command that computes needs it", "所有计算命令都需要它"),
            "pip install torch",
        )
    return Check(
        "torch",
        "fail",
        f"torch {m.versions['torch']}: {last_line(m.torch.error)}",
        m.say("`import torch` fails even without vendor extensions", "即使不加载厂商扩展，`import torch` 也会失败"),
        f"pip install --force-reinstall torch=={m.versions['torch']}",
    )


def torch_npu(m: Machine) -> Check:
    """torch_npu is installed, pairs with torch, and its libraries load."""
    if m.npu is None:
        return _torch_npu_absent(m)
    have, torch_version = m.versions.get("torch_npu", ""), m.versions.get("torch", "")
    if base(have) != base(torch_version):
        return Check(
            "torch_npu",
            "fail" if m.has_chip else "warn",
            f"torch_npu {have}, torch {torch_version or '-'}",
            m.say(
                "the two must have the same version, else symbols are undefined and `import torch` fails",
                "两者版本必须一致，否则会出现未定义符号，`import torch` 失败",
            ),
            f"pip install torch=={base(have)} torch_npu=={have}",
        )
    if m.npu.ok:
        return Check(
            "torch_npu", "ok", f"{m.npu.values['version']} " + m.say("with torch ", "配合 torch ") + torch_version
        )
    said = last_line(m.npu.error)
    if "Two accelerators" in m.npu.error:
        return Check("torch_npu", "skip", m.say("see the next line", "见下一项"))
    source = f"source {set_env(m) or '/usr/local/Ascend/cann/set_env.sh'}"
    if m.has_chip:
        return Check(
            "torch_npu",
            "fail",
            f"torch_npu {have}: {said}",
            m.say(
                f"its libraries do not load, so `import torch` itself fails; the NPU needs CANN "
                f"({AUTOLOAD}=0 would do without the NPU)",
                f"动态库加载失败，`import torch` 本身会报错；使用 NPU 需要 CANN（{AUTOLOAD}=0 可不使用 NPU）",
            ),
            source,
        )
    if m.environ.get(AUTOLOAD) == "0":
        found = m.say(f"{have}, left alone ({AUTOLOAD}=0); for an NPU: ", f"{have}，未加载（{AUTOLOAD}=0）；使用 NPU：")
        return Check("torch_npu", "ok", found + source)
    return Check(
        "torch_npu",
        "warn",
        f"torch_npu {have}: {said}",
        m.say(
            f"there is no NPU here and a plain `import torch` fails; ascendchat leaves torch_npu alone by itself, "
            f"other programs need {AUTOLOAD}=0 (with an NPU: {source})",
            f"此机器没有 NPU，直接 `import torch` 会失败；ascendchat 会自动跳过 torch_npu，其他程序需设置 {AUTOLOAD}=0"
            f"（有 NPU 时：{source}）",
        ),
        f"export {AUTOLOAD}=0",
    )


def _torch_npu_absent(m: Machine) -> Check:
    if not m.has_chip:
        return Check("torch_npu", "skip", m.say("not installed, no NPU here", "未安装，此机器没有 NPU"))
    pair = base(m.versions.get("torch", "")) or "2.13.0"
    return Check(
        "torch_npu",
        "fail",
        m.say("not installed, but an Ascend chip is here", "未安装，但检测到昇腾芯片"),
        m.say("torch cannot use the NPU without it", "没有它 torch 无法使用 NPU"),
        f"pip install torch_npu=={pair} decorator attrs scipy psutil cloudpickle",
    )


def two_accelerators(m: Machine) -> Check:
    build = str(m.torch.values.get("cuda_build", ""))
    if m.npu is None or (not build and "Two accelerators" not in m.npu.error):
        return Check("two accelerators", "ok" if m.npu else "skip", m.say("no conflict", "无冲突"))
    clash = "Two accelerators" in m.npu.error
    return Check(
        "two accelerators",
        "fail" if clash and m.has_chip else "warn",
        m.say(
            f"torch is a CUDA {build} build and torch_npu is installed",
            f"torch 为 CUDA {build} 版本，同时安装了 torch_npu",
        ),
        m.say(
            "torch refuses two accelerators in one process (ERR00007)", "torch 不允许一个进程使用两种加速器（ERR00007）"
        ),
        f"pip install --force-reinstall torch=={base(m.versions.get('torch', ''))}+cpu"
        if m.has_chip
        else "pip uninstall -y torch_npu",
    )


def device(m: Machine) -> Check:
    """What training would run on."""
    kind, name, count = m.choice()
    wanted = m.environ.get("ASCENDCHAT_DEVICE", "")
    found = f"{kind}: {name} x {count}" if kind != "cpu" else f"cpu: {name}, {cpu_count()} " + m.say("cores", "核")
    if wanted not in ("", "auto", kind):
        return Check(
            "device",
            "fail",
            m.say(f"ASCENDCHAT_DEVICE={wanted}, found {found}", f"ASCENDCHAT_DEVICE={wanted}，实际为 {found}"),
            m.say("the device asked for is not there", "指定的设备不存在"),
            "unset ASCENDCHAT_DEVICE",
        )
    if kind == "cpu" and isinstance(m.nvidia_smi, smi.Readings) and m.torch.ok:
        return Check(
            "device",
            "warn",
            m.say(
                f"{m.nvidia_smi.devices[0].name} is here, torch sees only the CPU",
                f"有 {m.nvidia_smi.devices[0].name}，但 torch 只看到 CPU",
            ),
            m.say("training would run on the CPU, far slower", "训练会在 CPU 上运行，慢得多"),
            f"pip install --force-reinstall torch=={base(m.versions.get('torch', ''))}",
        )
    if m.npus and m.npu and m.npu.values.get("problem"):
        said = next(iter(str(m.npu.values["problem"]).strip().splitlines()), "")
        return Check(
            "device",
            "fail",
            f"{found}: {said}",
            m.say(
                "the devices are counted but do not start: another process holds them, or driver and CANN differ",
                "能数到设备但无法启动：被其他进程或容器占用，或驱动与 CANN 不匹配",
            ),
            "ascendchat clean",
        )
    if m.has_chip and not m.npus and wanted in ("", "auto"):
        return Check(
            "device",
            "fail",
            m.say(f"an Ascend chip is here, training would use {found}", f"有昇腾芯片，但训练会使用 {found}"),
            m.say(
                "torch sees no NPU; the failed lines around this one say why",
                "torch 看不到 NPU，原因见其他失败项",
            ),
            f"source {set_env(m) or '/usr/local/Ascend/cann/set_env.sh'} && ascendchat doctor",
        )
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
        kept = [part for part in value.split(",") if part not in beyond]
        return Check(
            "visible devices",
            "fail",
            m.say(f"{name}={value}, {total} devices here", f"{name}={value}，实际有 {total} 个设备"),
            m.say(
                f"the list is cut at the first id that does not exist ({beyond[0]})",
                f"列表会在第一个不存在的编号（{beyond[0]}）处截断",
            ),
            f"export {name}={','.join(kept) or '0'}",
        )
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
    return Check(
        "bf16",
        "warn",
        m.say(f"{name}: no", f"{name}：不支持"),
        m.say(
            "this chip has no bf16; ascendchat computes in fp16, trains with loss scaling where the chip is made for "
            "training, and converts models saved in bf16",
            "该芯片不支持 bf16；ascendchat 用 fp16 计算，训练芯片上加损失缩放训练，bf16 模型会被转换",
        ),
        f"ascendchat plan{plan_flag(name)}",
    )


def collectives(m: Machine) -> Check:
    kind, _, count = m.choice()
    told = {**m.torch.values, **(m.npu.values if m.npu else {})}
    have = [name for name in dict.fromkeys(k.collective for k in KINDS.values()) if told.get(name)]
    need = KINDS[kind].collective
    if not m.torch.ok:
        return Check("collectives", "skip", m.say("torch cannot be asked", "无法查询 torch"))
    if need in have:
        return Check("collectives", "ok", f"{need} ({', '.join(have)})")
    return Check(
        "collectives",
        "fail" if count > 1 else "warn",
        m.say(
            f"{need} is missing (found {', '.join(have) or 'none'})", f"缺少 {need}（现有 {', '.join(have) or '无'}）"
        ),
        m.say("several devices cannot work together without it", "没有它多个设备无法协同"),
        f"pip install --force-reinstall torch=={base(m.versions.get('torch', ''))}",
    )


def variables(m: Machine) -> Check:
    """Settings copied from elsewhere that cost speed, hide faults or do nothing; they are reported, never changed."""
    harmful = [h for h in folklore(m.environ) if h.name != "ASCEND_RT_VISIBLE_DEVICES"]  # has its own line
    if not harmful:
        return Check("variables", "ok", m.say("none that harm", "没有有害的环境变量"))
    return Check(
        "variables",
        "fail" if any(h.kind == "breaks" for h in harmful) and m.has_chip else "warn",
        ", ".join(f"{h.name}={h.value}" for h in harmful),
        " | ".join(h.sentence(m.lang) for h in harmful),
        "unset " + " ".join(dict.fromkeys(h.name for h in harmful)),
    )
