"""`ascendchat explain LOG`: the last resort. Status codes that no rule names are at least decoded into the part of the
software that reported them and the kind of fault: ERRmmccc (torch_npu), EI/EJ/EE/EH/EL/EZ (CANN), 6-digit ACL and aclnn
codes, HCCL return codes."""

from __future__ import annotations

import re

from ascendchat.doctor.explain_rules import GENERIC, NOTE, Rule, Text

PATTERNS = [
    r"\bERR(?P<err>\d{5})\b",
    *(rf"\b{family}(?P<cann>\d{{4}})(?=[:)\]])" for family in ("EI", "EJ", "EE", "EH", "EL", "EZ", "EK", "E3")),
    r"[Ee]rror code(?: is)?[ :=]*(?P<acl>[1235]\d{5})\b",
    r"\bErrCode[ :=]*(?P<acl>[1235]\d{5})\b",
    r"(?:HCCL|[Hh]ccl).{0,160}error code(?: is)?[ :=]*(?P<hccl>\d{1,2})\b",
    r"errNo\[0x0*5(?P<hccl_hex>[0-9a-f]{6})\]",
]

# mm of ERRmmccc
MODULES = {
    "00": ("torch_npu itself (PTA)", "torch_npu 本身（PTA）"),
    "01": ("an operator (OPS)", "算子（OPS）"),
    "02": ("communication (DIST)", "分布式通信（DIST）"),
    "03": ("graph mode (GRAPH)", "图模式（GRAPH）"),
    "04": ("the profiler (PROF)", "性能分析（PROF）"),
    "99": ("outside torch_npu", "torch_npu 之外"),
}
# ccc of ERRmmccc
REASONS = {
    "001": ("an invalid parameter", "参数无效"),
    "002": ("an invalid type", "类型无效"),
    "003": ("an invalid value", "取值无效"),
    "004": ("an invalid pointer", "指针无效"),
    "005": ("an internal error", "内部错误"),
    "006": ("a memory error", "内存错误"),
    "007": ("a feature that is not supported", "功能不支持"),
    "008": ("something was not found", "资源不存在"),
    "009": ("something is unavailable", "资源不可用"),
    "010": ("a failed system call", "系统调用失败"),
    "011": ("a timeout", "超时"),
    "012": ("a lack of permission", "权限不足"),
    "100": ("a failed ACL call (the runtime of CANN)", "ACL（CANN 运行时）调用失败"),
    "200": ("a failed HCCL call (communication)", "HCCL（集合通信）调用失败"),
    "300": ("a failed GE call (the graph engine)", "GE（图引擎）调用失败"),
    "999": ("an exception of the program", "程序自身的异常"),
}
FAMILIES = {
    "EI": ("HCCL, the communication library", "HCCL（集合通信库）"),
    "EJ": ("HCCP, the communication process on the device", "HCCP（设备侧通信进程）"),
    "EE": ("the runtime of CANN", "CANN 运行时"),
    "EH": ("ACL, the programming interface of CANN", "ACL（CANN 编程接口）"),
    "EL": ("the driver", "驱动"),
    "EZ": ("the operator library (aclnn)", "算子库（aclnn）"),
    "EK": ("the profiler", "性能分析"),
    "E3": ("the device service (TSD) or the AI CPU", "设备服务（TSD）或 AI CPU"),
}
# the first three digits of a six-digit code
RANGES = {
    "100": ("ACL was called in a wrong way or with a wrong argument", "ACL 的调用方式或参数有误"),
    "107": ("the runtime was called with a wrong argument, context or stream", "运行时的参数、上下文或 stream 有误"),
    "148": ("ACL was called in a wrong order or its environment is incomplete", "ACL 的调用顺序有误或环境不完整"),
    "161": ("an operator refused its arguments", "算子拒绝了传入的参数"),
    "200": ("ACL lacks a resource or a feature", "ACL 缺少资源或功能"),
    "207": ("the device lacks a resource, permission or feature", "设备缺少资源、权限或功能"),
    "300": ("a storage limit was reached", "达到了存储上限"),
    "361": ("an operator failed in the runtime", "算子在运行时中失败"),
    "500": ("an inner error of CANN", "CANN 内部错误"),
    "507": ("a task failed on the device or in its scheduler", "任务在设备上或其调度器中失败"),
    "561": ("an inner error of the operator library", "算子库内部错误"),
}
HCCL = {
    1: ("a wrong parameter", "参数错误"),
    2: ("an empty pointer", "空指针"),
    3: ("a memory error", "内存错误"),
    4: ("an inner error", "内部错误"),
    5: ("a call that this driver and CANN do not support", "当前驱动与 CANN 不支持该调用"),
    6: ("something was not found", "资源不存在"),
    7: ("HCCP or the device is unavailable (a stale process?)", "HCCP 或设备不可用（残留进程？）"),
    8: ("a failed system call", "系统调用失败"),
    9: ("a timeout: another rank is missing", "超时：缺少其他 rank"),
    10: ("a file could not be opened", "文件无法打开"),
    11: ("a TCP connection failed", "TCP 连接失败"),
    12: ("a RoCE connection failed", "RoCE 连接失败"),
    13: ("a TCP transfer failed", "TCP 传输失败"),
    14: ("a RoCE transfer failed", "RoCE 传输失败"),
    15: ("the runtime or the device is busy or failed", "运行时或设备忙或出错"),
    16: ("the driver failed", "驱动出错"),
    17: ("the profiler failed", "性能分析出错"),
    18: ("the control interface (CCE) failed", "CCE 接口出错"),
    19: ("the network failed", "网络出错"),
    20: ("the same call must be made again", "需要重试该调用"),
    21: ("a remote error (error CQE): the peer or the link is gone", "远端错误（error CQE）：对端或链路中断"),
    22: ("the communicator is suspended", "通信域处于挂起状态"),
    23: ("an operation could not be tried again after a link fault", "链路故障后无法重试该操作"),
    24: ("no memory left for its buffers", "没有内存分配缓冲"),
}
COMMANDS = [
    "grep -rn ERROR ~/ascend/log/debug/plog | tail -20",
    "ascendchat COMMAND --npu-debug   # your command again, blocking and verbose",
]


def _rule(name: str, en: str, zh: str) -> Rule:
    check = (
        ["The first ERROR line of the plog of this process says more than the last line of the console."],
        ["该进程 plog 中的第一条 ERROR 比控制台的最后一行更有用。"],
    )
    return Rule(
        id=f"code-{name}",
        level=GENERIC,
        patterns=[],
        en=Text(f"The code {name}, decoded", en, check[0]),
        zh=Text(f"错误码 {name} 的含义", zh, check[1]),
        commands=COMMANDS,
    )


def _plain_exception() -> Rule:
    return Rule(
        id="code-ERR99999",
        level=NOTE,
        patterns=[],
        en=Text(
            "ERR99999 is an ordinary Python exception, not a fault of the NPU",
            "torch_npu prints this code at exit after any exception, of whatever library.",
            ["Read the Python traceback above it; its last line is the error."],
        ),
        zh=Text(
            "ERR99999 只是普通的 Python 异常，不是 NPU 故障",
            "任何库抛出异常后，torch_npu 退出时都会打印这个错误码。",
            ["查看它上方的 Python 调用栈；最后一行才是真正的错误。"],
        ),
        commands=['grep -n -B 30 ERR99999 LOG | grep -E "Error|Exception"'],
    )


def decode(match: re.Match[str]) -> Rule | None:
    """The rule, made on the spot, for a code found by one of PATTERNS; None when the number means nothing to us."""
    found = {name: value for name, value in match.groupdict().items() if value}
    if "err" in found:
        number = found["err"]
        if number == "99999":
            return _plain_exception()
        module, reason = MODULES.get(number[:2]), REASONS.get(number[2:])
        if module is None or reason is None:
            return None
        return _rule(f"ERR{number}", f"{module[0]} reports {reason[0]}.", f"{module[1]}报告：{reason[1]}。")
    if "cann" in found:
        en, zh = FAMILIES[match[0][:2]]
        return _rule(match[0], f"The error comes from {en}.", f"该错误来自{zh}。")
    if "acl" in found:
        kind = RANGES.get(found["acl"][:3])
        return kind and _rule(found["acl"], f"CANN says: {kind[0]}.", f"CANN 表示：{kind[1]}。")
    number_of = int(found["hccl"]) if "hccl" in found else int(found["hccl_hex"], 16) & 0xFFFF
    meaning = HCCL.get(number_of)
    return meaning and _rule(f"HCCL-{number_of}", f"HCCL reports {meaning[0]}.", f"HCCL 报告：{meaning[1]}。")
