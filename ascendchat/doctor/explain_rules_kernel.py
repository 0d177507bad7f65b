"""`ascendchat explain LOG`: rules about kernels, contexts and hardware of a device."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, SYMPTOM, Rule, Text, code

RULES = [
    Rule(
        id="npu-context",
        level=CAUSE,
        patterns=[
            code(107002),
            r"The context is empty",
        ],
        en=Text(
            title="A thread uses the NPU without having chosen its device (107002)",
            cause=(
                "Every thread has its own NPU context. A new thread (data loader, text streamer, server worker, "
                "timer) called the NPU before torch.npu.set_device."
            ),
            check=[
                "Which thread raised it? The last Python frame above names the function.",
                "Call torch.npu.set_device(local_rank) as the first line of that thread.",
            ],
        ),
        zh=Text(
            title="某个线程没有选择设备就使用了 NPU(107002)",
            cause=(
                "每个线程都有自己的 NPU 上下文。新线程（数据加载、流式输出、服务线程、定时器）在调用 "
                "torch.npu.set_device 之前就用了 NPU。"
            ),
            check=[
                "是哪个线程报的错？上方最后一个 Python 栈帧给出了函数名。",
                "在该线程的第一行调用 torch.npu.set_device(local_rank)。",
            ],
        ),
        commands=[
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="npu-stream-failed",
        level=SYMPTOM,
        patterns=[
            r"ACL stream synchronize failed",
        ],
        en=Text(
            title="Waiting for the NPU's queue of work failed",
            cause=(
                "Work is queued and runs later. Something queued earlier failed or never ended, and it shows only "
                "here, where the program waits: the line in the traceback is not the one at fault."
            ),
            check=[
                "Is there an error code (ERR..., EI..., EZ...) nearby, or in the log of another rank? It comes first.",
                "Run again with --npu-debug: each operator is then waited for; the traceback names the right line.",
            ],
        ),
        zh=Text(
            title="等待 NPU 任务队列时失败",
            cause="任务先入队、后执行。之前入队的某个任务失败或一直没有结束，到程序等待时才暴露：栈里这一行并不是出错的那一行。",
            check=[
                "附近或其他 rank 的日志里有没有错误码（ERR…、EI…、EZ…）？先看它。",
                "加上 --npu-debug 重新运行：每个算子都会被等待，栈就会指向真正出错的那一行。",
            ],
        ),
        commands=[
            "export ASCEND_LAUNCH_BLOCKING=1   # what --npu-debug sets; slow, for this one run",
        ],
    ),
    Rule(
        id="npu-fork",
        level=CAUSE,
        patterns=[
            r"Cannot re-initialize NPU in forked subprocess",
            r"Cannot re-initialize CUDA in forked subprocess",
        ],
        en=Text(
            title="The device was used before fork",
            cause="A process that has already opened the device was forked; the child cannot use it.",
            check=[
                (
                    "Use the start method spawn or forkserver, and do not touch the device in the parent (no "
                    "device_count with a tensor, no model on the device)."
                ),
                "With vLLM set VLLM_WORKER_MULTIPROC_METHOD=spawn.",
            ],
        ),
        zh=Text(
            title="在 fork 之前已经使用了设备",
            cause="已经打开设备的进程被 fork，子进程无法使用该设备。",
            check=[
                "使用 spawn 或 forkserver 启动方式，父进程不要碰设备（不要在设备上建张量或放模型）。",
                "使用 vLLM 时设置 VLLM_WORKER_MULTIPROC_METHOD=spawn。",
            ],
        ),
        commands=[
            "export VLLM_WORKER_MULTIPROC_METHOD=spawn",
        ],
    ),
    Rule(
        id="bf16-unsupported",
        level=CAUSE,
        patterns=[
            r"(?:BFLOAT16|bfloat16|BFloat16|bf16).{0,120}not (?:be )?support",
            r"(?:BFLOAT16|bfloat16|BFloat16|bf16).{0,120}unsupported",
            r"(?:BFLOAT16|bfloat16|BFloat16|bf16).{0,120}not implemented",
            r"BFLOAT16.{0,160}dtype support list",
            r"\b(?:910|310P)\w*.{0,80}has no (?:bf16|bfloat16)",
        ],
        en=Text(
            title="This chip has no bf16",
            cause=(
                "910A, 910 ProA/ProB and 310P have no bf16 units (bf16 exists on Ascend910B1 and later; the name "
                "`Ascend910B` without a digit is the old chip)."
            ),
            check=[
                "Use fp16 with torch_npu's own GradScaler, or fp32; ascendchat does unless ASCENDCHAT_DTYPE is bf16.",
            ],
            symptoms=["bf16 not supported", "which dtype"],
        ),
        zh=Text(
            title="该芯片不支持 bf16",
            cause=(
                "910A、910 ProA/ProB 和 310P 没有 bf16 计算单元（bf16 从 Ascend910B1 开始支持；不带数字的 "
                "`Ascend910B` 是老芯片）。"
            ),
            check=[
                "用 fp16 加 torch_npu 自带的 GradScaler，或 fp32；ascendchat 自动选择（除非 ASCENDCHAT_DTYPE=bf16）。",
            ],
            symptoms=["不支持 bf16", "bf16 报错"],
        ),
        commands=[
            'python -c "import torch, torch_npu; print(torch.npu.get_device_name(), torch.npu.is_bf16_supported())"',
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="npu-kernel-fault",
        level=CAUSE,
        patterns=[
            code(507011),
            code(507015),
            code(507016),
            code(507017),
            code(507018),
            code(507035),
            code(507042),
            code(507043),
            code(507014),
            r"\bEZ9999\b",
            r"aicore execution is abnormal",
            r"aicore exception",
            r"vector core (?:execution is abnormal|exception)",
            r"aicore execution times out",
            r"fault kernel_name=",
            r"aicpu (?:execution is abnormal|exception)",
        ],
        en=Text(
            title="A kernel failed on the NPU (aicore / vector core / aicpu exception)",
            cause=(
                "The launch is asynchronous, so the Python line shown is not the guilty one. Usual reasons: a "
                "token id or target outside the vocabulary, an index out of range, a shape or dtype the operator "
                "does not support, a custom kernel that writes out of bounds."
            ),
            check=[
                "Run once more with --npu-debug: every launch then blocks and the traceback shows the true line.",
                "Are all token ids in [0, vocab_size) and all targets in it or equal to the ignore index?",
                (
                    'The plog line "fault kernel_name=" names the operator. On 310P also check that the firmware '
                    "matches the driver."
                ),
            ],
            symptoms=["aicore error", "operator fails on the NPU", "kernel crash"],
        ),
        zh=Text(
            title="NPU 上的算子执行异常（aicore / vector core / aicpu）",
            cause=(
                "算子是异步下发的，所以显示的 Python 行不是真正出错的地方。常见原因：token id 或标签超出词表；索引"
                "越界；算子不支持的形状或数据类型；自定义算子越界写。"
            ),
            check=[
                "加 --npu-debug 重跑一次：此时每次下发都会同步，调用栈指向真正的行。",
                "所有 token id 是否都在 [0, vocab_size) 内，标签是否在其内或等于忽略值？",
                'plog 中 "fault kernel_name=" 一行给出算子名。310P 上还要检查固件与驱动是否配套。',
            ],
            symptoms=["aicore 报错", "算子报错", "算子执行失败"],
        ),
        commands=[
            "ascendchat COMMAND --npu-debug   # your command again, blocking and verbose",
            'grep -rn "fault kernel_name" ~/ascend/log/debug/plog | tail -3',
        ],
    ),
    Rule(
        id="npu-op-parameter",
        level=CAUSE,
        patterns=[
            r"(?:status|ret(?:Code|urn)?|error code|code)[ :=is]*1610(?:01|02)\b",
            r"\bEZ1001\b",
            r"\bEZ000[1-7]\b",
            r"\bEZ3003\b",
            r"ACLNN_ERR_PARAM",
            r"AclNN_Parameter_Error",
            r"aclnn\w+ failed.{0,80}\b(?:161|361|561)\d{3}\b",
        ],
        en=Text(
            title="An NPU operator refused its arguments",
            cause=(
                "161001 is a missing tensor, 161002 a dtype, shape or format that the operator does not support on "
                "this chip, 561xxx an inner error of the operator library."
            ),
            check=[
                "The EZ1001 / EZ0007 line names the tensor and the values it may have.",
                "float64 has no kernels; bf16 needs 910B1 or later; views of NZ-format tensors are refused.",
            ],
        ),
        zh=Text(
            title="NPU 算子拒绝了传入的参数",
            cause=(
                "161001 表示张量为空；161002 表示该芯片上算子不支持这种数据类型、形状或格式；561xxx 表示算子库内部"
                "错误。"
            ),
            check=[
                "EZ1001 / EZ0007 那一行写明了是哪个张量以及允许的取值。",
                "float64 没有算子；bf16 需要 910B1 及以后的芯片；NZ 格式张量的视图会被拒绝。",
            ],
        ),
        commands=[
            "ascendchat COMMAND --npu-debug   # your command again, blocking and verbose",
        ],
    ),
    Rule(
        id="fp16-saturation",
        level=CAUSE,
        patterns=[
            r"INF_NAN_MODE_ENABLE shouldn't be set to 0",
            r"""INF_NAN_MODE_ENABLE\s*[=:]\s*["']?0""",
            r"[Ss]aturation mode",
            r"""INF_NAN_MODE_FORCE_DISABLE\s*[=:]\s*["']?1""",
        ],
        en=Text(
            title="Overflow is hidden: the NPU works in saturation mode",
            cause=(
                "In saturation mode inf becomes 65504 and NaN becomes 0, so the stock GradScaler never sees an "
                "overflow and the loss diverges silently. 910A and 310P always work so; later chips only when "
                "INF_NAN_MODE is switched off."
            ),
            check=[
                (
                    "On 910A/310P use torch_npu.npu.amp.GradScaler, which reads the hardware flag, with an "
                    "optimizer that is not fused."
                ),
                "On later chips remove INF_NAN_MODE_ENABLE=0 and INF_NAN_MODE_FORCE_DISABLE=1.",
            ],
            symptoms=["overflow on 910A", "loss diverges in fp16"],
        ),
        zh=Text(
            title="溢出被掩盖：NPU 处于饱和模式",
            cause=(
                "饱和模式下 inf 变成 65504、NaN 变成 0，标准 GradScaler 看不到溢出，loss 会悄悄发散。910A 和 310P "
                "总是如此；之后的芯片只有关闭 INF_NAN_MODE 才会这样。"
            ),
            check=[
                "在 910A/310P 上使用 torch_npu.npu.amp.GradScaler（读取硬件溢出标志），且优化器不要用 fused。",
                "在之后的芯片上去掉 INF_NAN_MODE_ENABLE=0 和 INF_NAN_MODE_FORCE_DISABLE=1。",
            ],
            symptoms=["fp16 溢出", "910A 溢出"],
        ),
        commands=[
            "unset INF_NAN_MODE_ENABLE INF_NAN_MODE_FORCE_DISABLE",
        ],
    ),
    Rule(
        id="npu-streams",
        level=CAUSE,
        patterns=[
            code(207008),
            r"\bEL0009\b",
            r"[Ss]tream resources are insufficient",
        ],
        en=Text(
            title="The NPU has no streams left",
            cause=(
                "Each captured graph and each communicator takes streams, and the device has a fixed number of them."
            ),
            check=[
                "How many graphs are captured (one per batch size or length)? Capture fewer sizes.",
                "Is another process using the same device?",
            ],
        ),
        zh=Text(
            title="NPU 的 stream 资源不足",
            cause="每个捕获的图和每个通信域都占用 stream，而设备的 stream 数量固定。",
            check=[
                "捕获了多少个图（每个批量或长度一个）？减少捕获的规格。",
                "同一设备上是否有别的进程？",
            ],
        ),
        commands=[
            "npu-smi info; ascendchat clean",
        ],
    ),
    Rule(
        id="npu-hardware",
        level=CAUSE,
        patterns=[
            code(507053),
            code(507054),
            code(107022),
            r"HBM MULTI BIT ECC ERROR",
            r"[Mm]ulti-bit ECC",
            r"SUSPECT MEM ERROR",
            r"FORCE STOP",
        ],
        en=Text(
            title="The NPU reports a hardware fault (memory or ECC), or a task was stopped by force",
            cause=(
                "Uncorrectable memory errors come from the card. Restarting on the same card will fail again "
                "sooner or later."
            ),
            check=[
                (
                    "Do the ECC counters of this card grow? Take it out of use and restart the run on the others "
                    "from the last checkpoint."
                ),
            ],
            symptoms=["broken card", "ECC error", "hardware fault"],
        ),
        zh=Text(
            title="NPU 报告硬件故障（显存或 ECC），或任务被强制停止",
            cause="不可纠正的显存错误来自板卡本身。在同一张卡上重启，迟早会再次失败。",
            check=[
                "这张卡的 ECC 计数是否增长？停用它，在其他卡上从最近的检查点继续。",
            ],
            symptoms=["卡坏了", "硬件故障", "ECC 错误"],
        ),
        commands=[
            "for i in 0 1 2 3 4 5 6 7; do npu-smi info -t ecc -i $i; done",
            "npu-smi info -t health -i 0",
        ],
    ),
]
