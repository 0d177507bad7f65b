"""`ascendchat explain LOG`: rules about memory that ran out, on the device and on the host."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, SYMPTOM, Rule, Text, code

RULES = [
    Rule(
        id="npu-oom",
        level=CAUSE,
        patterns=[
            r"NPU out of memory",
            code(207001),
            code(207018),
            r"\bEL0004\b",
            r"The memory on the device is exhausted",
            r"Failed to allocate memory requested by",
        ],
        en=Text(
            title="The NPU ran out of memory",
            cause=(
                "Weights, gradients, optimizer state, activations and collective buffers together need more than "
                "the device has free. After a long run: fragmentation, or another process on the same device."
            ),
            check=[
                "Does npu-smi show a second process on this device? (About 3 GB in use on an idle device is normal.)",
                (
                    "Halve --device-batch-size (the total batch stays the same by accumulation), then turn on "
                    "activation checkpointing."
                ),
                (
                    "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True fights fragmentation; TASK_QUEUE_ENABLE=1 "
                    "instead of 2 lowers the peak."
                ),
            ],
            symptoms=["out of memory", "oom", "NPU memory full", "not enough device memory"],
        ),
        zh=Text(
            title="NPU 显存不足",
            cause=(
                "权重、梯度、优化器状态、激活和通信缓冲加起来超过了设备的空闲显存。如果是长时间运行后才出现：多为碎"
                "片，或同一设备上有别的进程。"
            ),
            check=[
                "npu-smi 是否显示该设备上有第二个进程？（空闲时占用约 3 GB 属正常。）",
                "把 --device-batch-size 减半（梯度累积会保持总批量不变），再打开激活重计算。",
                (
                    "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True 可减少碎片；TASK_QUEUE_ENABLE 由 2 改为 1 可降"
                    "低峰值。"
                ),
            ],
            symptoms=["显存不足", "显存不够", "爆显存", "显存溢出", "NPU 内存不足", "oom"],
        ),
        commands=[
            "ascendchat plan --help   # what fits: give --depth, --chip and --devices",
            "npu-smi info; ascendchat clean",
            "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        ],
    ),
    Rule(
        id="hccl-oom",
        level=CAUSE,
        patterns=[
            r"\bEI0011\b",
            r"\bEI0007\b",
            r"Failed to allocate \[?\d+\]? bytes of NPU memory",
        ],
        en=Text(
            title="No NPU memory left for HCCL's buffers",
            cause=(
                "Every communicator takes twice HCCL_BUFFSIZE (200 MB by default). The device was already full "
                "when HCCL asked for it."
            ),
            check=[
                "How many process groups does the program make? Each one costs 400 MB by default.",
                "Make the batch smaller, or the buffers: HCCL_BUFFSIZE=100, P2P_HCCL_BUFFSIZE=0.",
            ],
            symptoms=["HCCL out of memory", "communication buffers out of memory"],
        ),
        zh=Text(
            title="NPU 显存不够分配 HCCL 缓冲",
            cause="每个通信域占用两倍的 HCCL_BUFFSIZE（默认 200 MB）。HCCL 申请时显存已经用满。",
            check=[
                "程序建立了多少个通信组？默认每个约占 400 MB。",
                "减小批量，或减小缓冲：HCCL_BUFFSIZE=100,P2P_HCCL_BUFFSIZE=0。",
            ],
            symptoms=["通信显存不足", "HCCL 显存不足"],
        ),
        commands=[
            "export HCCL_BUFFSIZE=100 P2P_HCCL_BUFFSIZE=0",
            "npu-smi info; ascendchat clean",
        ],
    ),
    Rule(
        id="cuda-oom",
        level=CAUSE,
        patterns=[
            r"CUDA out of memory",
            r"CUDA error: out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ],
        en=Text(
            title="The GPU ran out of memory",
            cause="The step needs more memory than is free on the GPU, or another process uses it.",
            check=[
                "Halve --device-batch-size; the total batch stays the same by accumulation.",
                "Does nvidia-smi show another process?",
            ],
            symptoms=["out of memory", "oom", "GPU memory full", "not enough device memory"],
        ),
        zh=Text(
            title="GPU 显存不足",
            cause="这一步需要的显存超过了 GPU 的空闲显存，或者有别的进程在用它。",
            check=[
                "把 --device-batch-size 减半；梯度累积会保持总批量不变。",
                "nvidia-smi 是否显示别的进程？",
            ],
            symptoms=["显存不足", "显存不够", "爆显存", "GPU 显存不足", "GPU 显存不够", "oom"],
        ),
        commands=[
            "nvidia-smi; ascendchat clean",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ],
    ),
    Rule(
        id="mps-oom",
        level=CAUSE,
        patterns=[
            r"MPS backend out of memory",
        ],
        en=Text(
            title="The Mac ran out of memory for its GPU (MPS)",
            cause="The memory is shared with everything else on the machine, and MPS stops at a share of it.",
            check=[
                "Halve --device-batch-size or --max-seq-len; close other programs.",
            ],
            symptoms=["out of memory", "Mac out of memory"],
        ),
        zh=Text(
            title="Mac 的 GPU(MPS)内存不足",
            cause="内存与系统其他程序共用，MPS 只能使用其中一部分。",
            check=[
                "把 --device-batch-size 或 --max-seq-len 减半；关闭其他程序。",
            ],
            symptoms=["Mac 内存不足", "Mac 显存不足"],
        ),
        commands=[
            "ascendchat plan --help",
        ],
    ),
    Rule(
        id="host-oom",
        level=CAUSE,
        patterns=[
            r"std::bad_alloc",
            r"Out of memory: Killed process",
            r"oom-kill:",
            r"oom_reaper",
            r"DefaultCPUAllocator: (?:can't|not enough|could not) (?:allocate )?memory",
            r"^\s*MemoryError\b",
            r"Cannot allocate memory",
            r"host out of memory",
            r"\bEE1013\b",
            r"\bEH0010\b",
        ],
        en=Text(
            title="The host ran out of memory",
            cause=(
                "The memory of the machine (or the limit of the container), not that of the device, was used up. "
                "Loading weights on every rank at once and too many loader workers are the usual reasons."
            ),
            check=[
                "What does the kernel log say, and what is the memory limit of the container?",
                "Fewer loader workers, a smaller batch, fewer processes per host.",
            ],
            symptoms=["out of memory", "not enough RAM", "host memory full", "memory leak"],
        ),
        zh=Text(
            title="主机内存不足",
            cause=(
                "用尽的是机器的内存（或容器的内存上限），不是设备显存。常见原因：每个 rank 同时加载权重，或数据加载"
                "进程过多。"
            ),
            check=[
                "内核日志怎么说？容器的内存上限是多少？",
                "减少数据加载进程、减小批量、减少每台主机的进程数。",
            ],
            symptoms=["内存不足", "主机内存不足", "内存不够", "内存泄漏"],
        ),
        commands=[
            'free -g; dmesg -T | grep -iE "killed process|oom" | tail -3',
        ],
    ),
    Rule(
        id="killed",
        level=SYMPTOM,
        patterns=[
            r"^\s*(?:\S+: line \d+: *\d+ )?Killed\b(?!\w)",
            r"exitcode\s*:\s*-9\b",
            r"[Ss]ignal 9 \(SIGKILL\)",
            r"died with <Signals\.SIGKILL: 9>",
            r"exit(?:ed with)? (?:code|status) 137\b",
        ],
        en=Text(
            title="A process was killed from outside (signal 9)",
            cause=(
                "Almost always the kernel (or the container, or the scheduler) killed it because the host ran out "
                "of memory; sometimes a person or a job limit did."
            ),
            check=[
                "Does the kernel log name the process? Did the job reach a time or memory limit?",
            ],
            symptoms=["process killed", "program disappears", "killed without an error"],
        ),
        zh=Text(
            title="进程被外部强制终止（信号 9）",
            cause="几乎总是内核（或容器、调度器）因主机内存不足而终止了它；偶尔是人为终止或作业限制。",
            check=[
                "内核日志里有这个进程吗？作业是否到了时间或内存上限？",
            ],
            symptoms=["进程被杀", "被杀掉", "进程消失", "程序莫名退出"],
        ),
        commands=[
            'dmesg -T | grep -iE "killed process|oom" | tail -3; free -g',
        ],
    ),
]
