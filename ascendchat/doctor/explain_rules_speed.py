"""`ascendchat explain LOG`: rules about speed and compiling."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, NOTE, Rule, Text

RULES = [
    Rule(
        id="cpu-fallback",
        level=NOTE,
        patterns=[
            r"operator '(?P<op>[\w:.]+)' is not currently supported on the NPU backend",
            r"does not support operator '(?P<op>[\w:.]+)', the operator will fall back to CPU",
            r"The operator '(?P<op>[\w:.]+)' is not currently (?:implemented|supported) (?:for|on) the MPS",
        ],
        en=Text(
            title="Slow: the operator {op} runs on the CPU",
            cause="The device has no kernel for {op} in this dtype, so each call copies to the CPU and back.",
            check=[
                "Is float64 involved? Use float32. Can the line be written with another operator (isin, nonzero)?",
                "TORCH_NPU_FALLBACK_CPU_DISABLE=1 turns this warning into an error that shows the line.",
            ],
            symptoms=["slow training", "one operator is slow", "runs on the CPU"],
        ),
        zh=Text(
            title="速度慢：算子 {op} 在 CPU 上执行",
            cause="设备没有该数据类型的 {op} 算子，每次调用都要拷到 CPU 再拷回来。",
            check=[
                "是否用了 float64？请改用 float32。能否换一种写法（如 isin、nonzero）？",
                "TORCH_NPU_FALLBACK_CPU_DISABLE=1 会把警告变成报错，从而显示具体的行。",
            ],
            symptoms=["训练很慢", "速度慢", "算子在 CPU 上跑", "算子慢"],
        ),
        commands=[
            "export TORCH_NPU_FALLBACK_CPU_DISABLE=1",
        ],
    ),
    Rule(
        id="host-bound",
        level=NOTE,
        patterns=[
            # torch_npu ends many errors with the advice to set this variable: that does not say that it is set
            r"""(?<!variable )(?<!set )(?<!with )ASCEND_LAUNCH_BLOCKING["']?\s*[=:]\s*["']?1\b(?!\.\s*$)""",
            r"""TASK_QUEUE_ENABLE["']?\s*[=:]\s*["']?0\b""",
            r"""ASCEND_GLOBAL_LOG_LEVEL["']?\s*[=:]\s*["']?[01]\b""",
            r"AICore.{0,40}(?:idle|usage (?:is )?(?:low|0 ?%))",
            r"low MFU",
            r"MFU is low",
            r"host[- ]bound",
        ],
        en=Text(
            title="Slow: the NPU waits for the host",
            cause=(
                "Debug settings (ASCEND_LAUNCH_BLOCKING=1, TASK_QUEUE_ENABLE=0, log level 0 or 1), a host "
                "synchronisation in every step (.item()), processes not bound to cores, or dynamic shapes with "
                "jit_compile=True (910A)."
            ),
            check=[
                "Are these variables left over from a debugging session?",
                "Does the loop read a number from the device every step?",
            ],
            symptoms=["slow training", "training is slow", "low MFU", "low utilisation", "NPU idle", "low throughput"],
        ),
        zh=Text(
            title="速度慢：NPU 在等待主机",
            cause=(
                "调试设置（ASCEND_LAUNCH_BLOCKING=1、TASK_QUEUE_ENABLE=0、日志级别 0 或 1）；每步都有主机同步（"
                ".item()）；进程没有绑核；或动态形状加 jit_compile=True(910A)。"
            ),
            check=[
                "这些变量是不是调试后忘了去掉？",
                "训练循环是否每步都从设备读取数值？",
            ],
            symptoms=["训练很慢", "训练慢", "速度慢", "利用率低", "MFU 低", "吞吐低", "NPU 空闲"],
        ),
        commands=[
            "unset ASCEND_LAUNCH_BLOCKING ASCEND_GLOBAL_LOG_LEVEL; export TASK_QUEUE_ENABLE=2 CPU_AFFINITY_CONF=1",
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="jit-compile",
        level=NOTE,
        patterns=[
            r"""jit_compile["']?\s*[=:]\s*["']?(?:True|enable)""",
            r"jit_compile is (?:True|enabled|on)",
            r"[Cc]ompiling (?:op|operator|kernel)s?\b.{0,60}(?:slow|wait|minutes|first)",
            r"ACLNN_CACHE_LIMIT.{0,40}(?:exceed|reached)",
            r"aclnn cache.{0,40}(?:full|miss)",
        ],
        en=Text(
            title="Slow first step, or slow at every new length: operators are compiled",
            cause=(
                "With jit_compile on (the default of 910A and 310P) every new shape is compiled; on later chips "
                "very many shapes overflow the operator cache."
            ),
            check=[
                "Pad lengths to a few sizes (buckets).",
                "Call torch.npu.set_compile_mode(jit_compile=False) before the first operator.",
            ],
            symptoms=["first step is slow", "slow start", "slow at new lengths", "slow training"],
        ),
        zh=Text(
            title="第一步慢，或每遇到新长度就慢：正在编译算子",
            cause=(
                "打开 jit_compile 时（910A 和 310P 的默认），每个新形状都要编译；之后的芯片上，形状太多会撑满算子缓存。"
            ),
            check=[
                "把长度补齐到少数几种（分桶）。",
                "在第一个算子之前调用 torch.npu.set_compile_mode(jit_compile=False)。",
            ],
            symptoms=["第一步很慢", "启动很慢", "编译很慢", "训练很慢"],
        ),
        commands=[
            "export ACLNN_CACHE_LIMIT=100000   # for many shapes",
        ],
    ),
    Rule(
        id="compile",
        level=CAUSE,
        patterns=[
            r"Dynamo is not supported on NPU",
            r"triton-ascend is not installed",
            r"NoTritonConfigsError",
            r"(?:torch\._dynamo|torch\._inductor)\.exc\.\w+",
            r"BackendCompilerFailed",
        ],
        en=Text(
            title="torch.compile failed",
            cause=(
                "The compiler could not build a kernel for this model here, or could not run it. Compiling only makes "
                "steps faster: the same command with --no-compile, or with ASCENDCHAT_COMPILE=0, runs eagerly. On an "
                "NPU compiling needs triton-ascend and supports only part of the models."
            ),
            check=[
                "Does the same command work without compiling? If not, look for another error first.",
                "CUDA: are a C compiler (gcc) and the triton that belongs to this torch installed?",
                "NPU: is the upstream package triton installed beside triton-ascend? Remove it.",
            ],
            symptoms=["torch.compile fails", "compiling fails"],
        ),
        zh=Text(
            title="torch.compile 失败",
            cause=(
                "编译器没能为这个模型生成内核，或生成的内核不能运行。编译只是为了更快：同一条命令加上 --no-compile，"
                "或设置 ASCENDCHAT_COMPILE=0，就以即时模式运行。在 NPU 上，编译需要 triton-ascend，且只支持部分模型。"
            ),
            check=[
                "同一条命令不编译时能否正常运行？如果不能，请先找别的错误。",
                "CUDA：是否装有 C 编译器（gcc）以及与当前 torch 配套的 triton？",
                "NPU：除了 triton-ascend 是否还装了上游的 triton？请卸载它。",
            ],
            symptoms=["编译失败", "torch.compile 报错"],
        ),
        commands=[
            "export ASCENDCHAT_COMPILE=0",
            "pip list | grep -i triton",
        ],
    ),
]
