"""Settings of the environment that cost something and help nothing, found by `ascendchat doctor` and at every start on
an NPU. They are reported with their cost, in English and Chinese, and never changed: the user may have a reason.

The kinds: "slow", "memory", "hides faults", "breaks", "no effect", "does not exist".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise


@dataclass(frozen=True)
class Harmful:
    """One setting that should go, and why."""

    name: str
    value: str
    kind: str
    cost: str
    advice: str
    cost_zh: str
    advice_zh: str

    def sentence(self, lang: str = "en") -> str:
        """One line for the console, in `en` or `zh`."""
        if lang == "zh":
            return f"{self.name}={self.value}：{self.cost_zh}；{self.advice_zh}"
        return f"{self.name}={self.value}: {self.cost}; {self.advice}"


Environ = Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    """When a variable of this name is set to such a value, say this."""

    name: str
    when: Callable[[str, Environ], bool]
    kind: str
    cost: str
    advice: str
    cost_zh: str
    advice_zh: str


def visible_problem(value: str) -> tuple[str, str] | None:
    """What is wrong with a list of visible NPUs, in English and Chinese, or None. The driver wants "0,1,2": digits and
    commas, strictly ascending; it stops reading at any other character and finds no device when the order is wrong."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        return "only digits and commas are read, and reading stops at a space", "只认数字和逗号，遇到空格即停止解析"
    ids = [int(part) for part in value.split(",")]
    if any(a >= b for a, b in pairwise(ids)):
        return (
            "the ids must be strictly ascending, otherwise no device is found",
            "编号必须严格递增，否则找不到任何设备",
        )
    return None


def _is(*values: str) -> Callable[[str, Environ], bool]:
    return lambda value, environ: value.strip() in values


def _always(value: str, environ: Environ) -> bool:
    return True


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


def _at_least(limit: float) -> Callable[[str, Environ], bool]:
    return lambda value, environ: _number(value, 0) >= limit


def _connect_invalid(value: str, environ: Environ) -> bool:
    return not (value.strip().isdigit() and 120 <= int(value) <= 7200)


def _exec_below_connect(value: str, environ: Environ) -> bool:
    return 0 < _number(value, 1836) <= _number(environ.get("HCCL_CONNECT_TIMEOUT"), 120)  # 0 waits for ever


def _event_below_exec(value: str, environ: Environ) -> bool:
    return 0 < _number(value, 1868) <= _number(environ.get("HCCL_EXEC_TIMEOUT"), 1836)


_UNSET, _UNSET_ZH = "unset it", "请取消该变量"
_DEBUG, _DEBUG_ZH = "unset it, and use --npu-debug when looking for a fault", "请取消，排查故障时使用 --npu-debug"

RULES = (
    Rule("ASCEND_LAUNCH_BLOCKING", _is("1"), "slow",
         "every operator waits for the one before and the task queue is off, training is several times slower", _DEBUG,
         "每个算子同步下发且任务队列被关闭，训练会慢数倍", _DEBUG_ZH),
    Rule("TASK_QUEUE_ENABLE", _is("0"), "slow",
         "operators are launched from Python's own thread, so the NPU waits for the host",
         "unset it (2 is set for training)",
         "算子由 Python 主线程下发，NPU 会等待主机", "请取消该变量（训练时默认设为 2）"),
    Rule("ASCEND_GLOBAL_LOG_LEVEL", _is("0", "1"), "slow",
         "0 is debug and 1 is info, which log every launch; the default 3 logs errors", _DEBUG,
         "0 为 debug、1 为 info，每次下发都写日志；默认 3 只记录错误", _DEBUG_ZH),
    Rule("ASCEND_SLOG_PRINT_TO_STDOUT", _is("1"), "slow",
         "the log of CANN is written between the lines of the program", _DEBUG,
         "CANN 日志会混入程序输出", _DEBUG_ZH),
    Rule("TORCH_HCCL_BLOCKING_WAIT", _is("1"), "slow",
         "every collective blocks the host, so communication no longer overlaps with computation", _UNSET,
         "每次集合通信都阻塞主机，通信与计算无法重叠", _UNSET_ZH),
    Rule("HCCL_CONNECT_TIMEOUT", _connect_invalid, "breaks",
         "the value must be a whole number of seconds from 120 to 7200 (error EI0001)", "use 600",
         "取值必须是 120 到 7200 之间的整数秒（报错 EI0001）", "建议设为 600"),
    Rule("HCCL_CONNECT_TIMEOUT", _at_least(3600), "hides faults",
         "a rank that never starts is noticed only after that many seconds", "use 600 (1200 for very large clusters)",
         "未启动的进程要等这么多秒才会被发现", "建议设为 600（超大集群 1200）"),
    Rule("HCCL_EXEC_TIMEOUT", _exec_below_connect, "hides faults",
         "not above HCCL_CONNECT_TIMEOUT, so the first error names the wrong cause",
         "unset it (1836 seconds) or keep it above HCCL_CONNECT_TIMEOUT",
         "不大于 HCCL_CONNECT_TIMEOUT，首个报错会指向错误的原因",
         "请取消（默认 1836 秒）或使其大于 HCCL_CONNECT_TIMEOUT"),
    Rule("HCCL_EXEC_TIMEOUT", _at_least(7200), "hides faults",
         "a dead or hung rank is noticed only after that many seconds", "unset it (1836 seconds)",
         "进程挂死后要等这么多秒才会被发现", "请取消该变量（默认 1836 秒）"),
    Rule("HCCL_EXEC_TIMEOUT", _is("0"), "hides faults",
         "0 waits for ever, so a dead rank is never noticed", "unset it (1836 seconds)",
         "0 表示永久等待，进程挂死永远不会被发现", "请取消该变量（默认 1836 秒）"),
    Rule("HCCL_EVENT_TIMEOUT", _event_below_exec, "hides faults",
         "not above HCCL_EXEC_TIMEOUT, so the wait ends before the useful error is written", _UNSET,
         "不大于 HCCL_EXEC_TIMEOUT，等待会在有用的报错写出之前结束", _UNSET_ZH),
    Rule("HCCL_ASYNC_ERROR_HANDLING", _is("0"), "hides faults",
         "switches off the watchdog that ends a hung run (and is the old name of TORCH_HCCL_ASYNC_ERROR_HANDLING)",
         _UNSET,
         "关闭看门狗，挂死的任务不会退出（且为 TORCH_HCCL_ASYNC_ERROR_HANDLING 的旧名）", _UNSET_ZH),
    Rule("TORCH_HCCL_ASYNC_ERROR_HANDLING", _is("0"), "hides faults",
         "switches off the watchdog that ends a hung run", _UNSET, "关闭看门狗，挂死的任务不会退出", _UNSET_ZH),
    Rule("PYTORCH_NPU_ALLOC_CONF", lambda value, environ: "PYTORCH_ALLOC_CONF" in environ, "breaks",
         "PYTORCH_ALLOC_CONF is set too, and torch_npu ends with an error when both are", "unset one of the two",
         "同时设置了 PYTORCH_ALLOC_CONF，torch_npu 会报错退出", "请取消其中一个"),
    Rule("ASCEND_RT_VISIBLE_DEVICES", lambda value, environ: visible_problem(value) is not None, "breaks",
         "devices are missing: the ids must be ascending, with commas and no spaces", "write it like 0,1,2,3",
         "会丢失设备：编号必须递增，用逗号分隔且不含空格", "请写成 0,1,2,3 的形式"),
    Rule("INF_NAN_MODE_ENABLE", _is("0"), "breaks",
         "overflow becomes a number instead of inf, so diverging runs look healthy; chips with bf16 refuse it", _UNSET,
         "溢出被饱和成有限值，发散的训练看似正常；支持 bf16 的芯片会直接报错", _UNSET_ZH),
    Rule("TORCH_TRANSFER_TO_NPU", _is("1"), "breaks",
         "rewrites torch.cuda behind the program's back; ascendchat needs no such porting", _UNSET,
         "会在后台改写 torch.cuda；ascendchat 无需这种迁移", _UNSET_ZH),
    Rule("HCCL_BUFFSIZE", _at_least(401), "memory",
         "every communicator takes twice that many MB of device memory (the default is 200)", _UNSET,
         "每个通信域占用两倍该数值（MB）的显存（默认 200）", _UNSET_ZH),
    Rule("MULTI_STREAM_MEMORY_REUSE", _is("2"), "memory",
         "this mode is not recommended by its vendor; 1 is the default", _UNSET,
         "官方不推荐该模式，默认值为 1", _UNSET_ZH),
    Rule("HCCL_OP_EXPANSION_MODE", _is("AIV"), "hides faults",
         "meant for inference with a single communicator, and shortens the longest wait to 1091 s", "unset it to train",
         "面向推理且只支持单个通信域，最长等待缩短为 1091 秒", "训练时请取消"),
    Rule("HCCL_INTRA_ROCE_ENABLE", _is("1"), "no effect",
         "only read on Atlas 200T A2 Box16 and 300T Pro", "unset it elsewhere",
         "仅 Atlas 200T A2 Box16 与 300T Pro 读取", "其他机型请取消"),
    Rule("HCCL_WHITELIST_DISABLE", _is("1"), "no effect",
         "1 is already the default", _UNSET, "默认值已经是 1", _UNSET_ZH),
    Rule("ASCEND_VISIBLE_DEVICES", _always, "no effect",
         "only the container runtime reads it, PyTorch does not", "choose devices with ASCEND_RT_VISIBLE_DEVICES=0,1",
         "只有容器运行时读取，PyTorch 不读取", "请用 ASCEND_RT_VISIBLE_DEVICES=0,1 选择设备"),
    Rule("NPU_VISIBLE_DEVICES", _always, "does not exist",
         "nothing reads it, so all devices stay visible", "choose devices with ASCEND_RT_VISIBLE_DEVICES=0,1",
         "没有任何组件读取，所有设备依然可见", "请用 ASCEND_RT_VISIBLE_DEVICES=0,1 选择设备"),
    Rule("ASCEND_DEVICE_ID", _always, "no effect",
         "only TensorFlow and the ModelArts starter read it", "choose devices with ASCEND_RT_VISIBLE_DEVICES=0,1",
         "只有 TensorFlow 与 ModelArts 启动器读取", "请用 ASCEND_RT_VISIBLE_DEVICES=0,1 选择设备"),
    Rule("TORCH_NPU_ALLOC_CONF", _always, "does not exist",
         "nothing reads it, so the allocator keeps its defaults", "the name is PYTORCH_NPU_ALLOC_CONF",
         "没有任何组件读取，分配器仍用默认值", "正确的名称是 PYTORCH_NPU_ALLOC_CONF"),
)  # fmt: skip

# Copied from script to script; neither torch_npu nor the open parts of CANN read any of them.
NOT_THERE = (
    "NPU_CALCULATE_DEVICE", "ASCEND_DISABLE_MEM_SWAP", "NPU_DISABLE_RECORD", "ASCEND_COMPILE_OPT_LEVEL",
    "TORCH_NPU_LAZY_COMPILE", "PYTORCH_NPU_ALLOC_MAX_SIZE", "ASCEND_ENABLE_CACHE", "ASCEND_CACHE_POLICY",
    "ASCEND_FUSION_ENABLE", "ASCEND_GEMM_*[Tt]iling", "ASCEND_OPP_LEVEL", "NPU_PERF_MODE", "TORCH_NPU_ENABLE_NUMA",
    "ASCEND_MEMORY_REUSE_MODE", "WITHOUT_JIT_COMPILE", "HCCL_OP_BASE_FFTS_MODE_ENABLE", "PTCOPY_ENABLE", "DYNAMIC_OP",
    "BMMV2_ENABLE",
)  # fmt: skip


def folklore(environ: Environ) -> list[Harmful]:
    """Every harmful, useless or misspelt setting in `environ`; changes nothing."""
    found = []
    for rule in RULES:
        value = environ.get(rule.name)
        if value is not None and rule.when(value, environ):
            found.append(Harmful(rule.name, value, rule.kind, rule.cost, rule.advice, rule.cost_zh, rule.advice_zh))
    for name in sorted(environ):
        if any(fnmatchcase(name, pattern) for pattern in NOT_THERE):
            cost, cost_zh = "no such setting exists, nothing reads it", "并不存在这个设置，没有任何组件读取"
            found.append(Harmful(name, environ[name], "does not exist", cost, _UNSET, cost_zh, _UNSET_ZH))
    return found
