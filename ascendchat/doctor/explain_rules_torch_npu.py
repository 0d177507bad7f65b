"""`ascendchat explain LOG`: rules about code and packages that were written for another device than the NPU."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, Rule, Text

RULES = [
    Rule(
        id="torch-npu-missing",
        level=CAUSE,
        patterns=[
            r"No module named '?torch_npu\b",
            r"torch_npu (?:is|was) not (?:installed|found)",
        ],
        en=Text(
            title="torch_npu is not installed in this environment",
            cause=(
                "torch_npu is the part of torch that drives Ascend NPUs. It is a package of its own, its first three "
                "version numbers must equal those of torch, and it belongs to one release of CANN."
            ),
            check=[
                "Does `which python` point into the environment that torch_npu was installed into?",
                "No NPU in this machine? Then nothing needs it: choose --device-type cpu or cuda.",
                "The pairs of CANN, torch and torch_npu stand in docs/en/install.md.",
            ],
            symptoms=["torch_npu missing", "torch_npu not installed", "NPU not found", "install torch_npu"],
        ),
        zh=Text(
            title="当前环境没有安装 torch_npu",
            cause=(
                "torch_npu 是 torch 驱动昇腾 NPU 的部分，是单独的包；它的前三个版本号必须与 torch 相同，并且对应某一"
                "版 CANN。"
            ),
            check=[
                "`which python` 指向的是装了 torch_npu 的环境吗？",
                "这台机器没有 NPU？那就不需要它：用 --device-type cpu 或 cuda。",
                "CANN、torch、torch_npu 的配套关系见 docs/zh/install.md。",
            ],
            symptoms=["没有安装 torch_npu", "缺少 torch_npu", "找不到 NPU", "安装 torch_npu"],
        ),
        commands=[
            "pip install torch_npu==$(python -c \"import torch; print(torch.__version__.split('+')[0])\")",
            "pip install -e '.[npu]'   # in your clone of ascendchat: also what CANN's Python parts import",
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="flash-attn-missing",
        level=CAUSE,
        patterns=[
            r"No module named '?flash_attn",
            r"FlashAttention2? has been toggled on, but it cannot be used",
            r"flash[_-]attn.{0,40}(?:is|seems to be|was) not installed",
        ],
        en=Text(
            title="The program asks for flash_attn, a package for NVIDIA GPUs",
            cause=(
                "flash_attn runs on CUDA only and cannot be installed for an NPU. ascendchat does not use it: it "
                "chooses npu_fusion on NPUs and torch's own kernels on GPUs."
            ),
            check=[
                'A Hugging Face model: load it with attn_implementation="sdpa" (or "eager").',
                "A script that was written for CUDA: replace the call by torch's scaled_dot_product_attention.",
            ],
            symptoms=["flash_attn", "flash attention missing", "install flash attention on NPU"],
        ),
        zh=Text(
            title="程序要用 flash_attn，它只支持 NVIDIA GPU",
            cause=(
                "flash_attn 只能在 CUDA 上运行，NPU 上无法安装。ascendchat 不用它：在 NPU 上用 npu_fusion，在 GPU 上用 "
                "torch 自带的内核。"
            ),
            check=[
                'Hugging Face 模型：加载时用 attn_implementation="sdpa"（或 "eager"）。',
                "为 CUDA 写的脚本：把调用换成 torch 的 scaled_dot_product_attention。",
            ],
            symptoms=["安装 flash_attn", "缺少 flash_attn", "flash attention 装不上"],
        ),
        commands=[
            "ascendchat doctor",
            "pip install flash-attn --no-build-isolation   # only on NVIDIA GPUs, only if a script insists",
        ],
    ),
    Rule(
        id="torch-npu-call",
        level=CAUSE,
        patterns=[
            r"module 'torch_npu' has no attribute '(?P<name>\w+)'",
            r"\btorch_npu\.(?P<name>is_available|device_count|set_device|current_device|synchronize)\(",
        ],
        en=Text(
            title="torch_npu has no {name}",
            cause=(
                "Functions about devices live in torch.npu, not in torch_npu; guides that write "
                "torch_npu.is_available() are wrong. A name that begins with npu_ is an operator "
                "that this version of torch_npu lacks."
            ),
            check=[
                "Write `import torch, torch_npu`, then torch.npu.{name}(...).",
                "For an operator: which version of torch_npu does the guide use, and which is installed?",
            ],
        ),
        zh=Text(
            title="torch_npu 没有 {name}",
            cause=(
                "与设备有关的函数在 torch.npu 中，不在 torch_npu 中；写 torch_npu.is_available() 的教程是错的。以 npu_ "
                "开头的名字是算子：当前版本的 torch_npu 没有它。"
            ),
            check=[
                "先写 `import torch, torch_npu`，再用 torch.npu.{name}(...)。",
                "如果是算子：教程用的 torch_npu 是什么版本？装的又是什么版本？",
            ],
        ),
        commands=[
            'python -c "import torch, torch_npu; print(torch_npu.__version__, torch.npu.is_available())"',
        ],
    ),
    Rule(
        id="torch-npu-not-imported",
        level=CAUSE,
        patterns=[
            r"module 'torch' has no attribute 'npu'",
            r"torch has no attribute '?npu\b",
        ],
        en=Text(
            title="torch.npu is not there: torch_npu was not imported",
            cause=(
                "torch.npu comes from torch_npu. torch imports it by itself only when it is installed in this "
                "environment and TORCH_DEVICE_BACKEND_AUTOLOAD is not 0."
            ),
            check=[
                "Is TORCH_DEVICE_BACKEND_AUTOLOAD=0 set in this shell? Unset it, or write `import torch_npu`.",
                "Is torch_npu installed in the Python that runs?",
            ],
        ),
        zh=Text(
            title="没有 torch.npu：torch_npu 没有被导入",
            cause=(
                "torch.npu 来自 torch_npu。只有当前环境装了它、且 TORCH_DEVICE_BACKEND_AUTOLOAD 不为 0 时，torch 才会"
                "自动导入它。"
            ),
            check=[
                "当前 shell 是否设置了 TORCH_DEVICE_BACKEND_AUTOLOAD=0？取消它，或写 `import torch_npu`。",
                "运行的 Python 里装了 torch_npu 吗？",
            ],
        ),
        commands=[
            'echo "[$TORCH_DEVICE_BACKEND_AUTOLOAD]"; pip list | grep -i torch',
            'python -c "import torch, torch_npu; print(torch.npu.is_available())"',
        ],
    ),
]
