"""`ascendchat explain LOG`: rules about kernels and libraries of CUDA."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, SYMPTOM, Rule, Text

RULES = [
    Rule(
        id="cuda-assert",
        level=CAUSE,
        patterns=[
            r"device-side assert triggered",
            r"Assertion `[^`]*(?:srcIndex < srcSelectDimSize|t >= 0 && t < n_classes|index out of bounds)",
        ],
        en=Text(
            title="A GPU kernel was given an index out of range",
            cause=(
                "A token id or a target lies outside the vocabulary. The launch is asynchronous, so the Python "
                "line shown is not the guilty one."
            ),
            check=[
                "Does the tokenizer belong to this model (same vocabulary size)?",
                "Run again with CUDA_LAUNCH_BLOCKING=1, or once on the CPU, to see the true line.",
            ],
        ),
        zh=Text(
            title="GPU 算子收到了越界的索引",
            cause="某个 token id 或标签超出词表。算子是异步下发的，所以显示的 Python 行不是真正出错的地方。",
            check=[
                "分词器与模型是否配套（词表大小相同）？",
                "用 CUDA_LAUNCH_BLOCKING=1 重跑，或在 CPU 上跑一次，可以看到真正的行。",
            ],
        ),
        commands=[
            "export CUDA_LAUNCH_BLOCKING=1   # then your command again",
        ],
    ),
    Rule(
        id="cuda-fault",
        level=SYMPTOM,
        patterns=[
            r"CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_INITIALIZED|INVALID_VALUE|INTERNAL_ERROR|NOT_SUPPORTED)",
            r"CUDA error: an illegal memory access was encountered",
            r"CUDA error: unspecified launch failure",
            r"CUDNN_STATUS_\w+",
            r"no kernel image is available for execution on the device",
        ],
        en=Text(
            title="A CUDA library call failed",
            cause=(
                "Often a late sign of something earlier: an index out of range, memory used up, or a torch build "
                'that does not know this GPU ("no kernel image").'
            ),
            check=[
                "Is there an assert or an out-of-memory line above? That is the cause.",
                "Run again with CUDA_LAUNCH_BLOCKING=1 to see the true line.",
            ],
        ),
        zh=Text(
            title="CUDA 库调用失败",
            cause='往往是更早问题的后果：索引越界、显存用尽，或者 torch 的版本不支持这种 GPU("no kernel image")。',
            check=[
                "上方是否有 assert 或显存不足？那才是原因。",
                "用 CUDA_LAUNCH_BLOCKING=1 重跑以看到真正的行。",
            ],
        ),
        commands=[
            "export CUDA_LAUNCH_BLOCKING=1   # then your command again",
            'nvidia-smi; python -c "import torch; print(torch.version.cuda, torch.cuda.get_arch_list())"',
        ],
    ),
]
