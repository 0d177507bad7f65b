"""`ascendchat explain LOG`: rules about imports and installed packages."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, SYMPTOM, Rule, Text

RULES = [
    Rule(
        id="missing-cann-library",
        level=CAUSE,
        patterns=[
            (
                r"(?P<lib>lib(?:hccl|ascendcl|acl_op_compiler|ge_runner|graph|acl_tdt_channel|opapi"
                r"|nnopbase)\.so)[.\d]*: cannot open shared object file"
            ),
        ],
        en=Text(
            title="CANN is not loaded: {lib} was not found",
            cause=(
                "torch_npu needs the CANN libraries on the library path. Either set_env.sh was not sourced in this "
                "shell, or CANN is not installed."
            ),
            check=[
                "Is ASCEND_HOME_PATH set in the shell (or service file, or container) that starts the run?",
                "Without root, CANN lives under ~/Ascend instead of /usr/local/Ascend.",
            ],
            symptoms=["CANN not found", "CANN not loaded", "cannot import torch_npu"],
        ),
        zh=Text(
            title="CANN 没有加载：找不到 {lib}",
            cause=(
                "torch_npu 需要在库路径中找到 CANN 的动态库。要么当前 shell 没有执行 set_env.sh，要么没有安装 CANN。"
            ),
            check=[
                "启动任务的 shell（或服务、容器）里是否设置了 ASCEND_HOME_PATH？",
                "非 root 安装时，CANN 在 ~/Ascend 下，而不在 /usr/local/Ascend 下。",
            ],
            symptoms=["找不到 CANN", "CANN 没有加载", "没有 source set_env"],
        ),
        commands=[
            "source /usr/local/Ascend/cann/set_env.sh || source /usr/local/Ascend/ascend-toolkit/set_env.sh",
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="missing-atb-library",
        level=CAUSE,
        patterns=[
            r"libatb\.so[.\d]*: cannot open shared object file",
            r"libop_plugin_atb\.so: cannot open shared object file",
        ],
        en=Text(
            title="The ATB library (NNAL package) is not loaded",
            cause=(
                "libatb.so belongs to NNAL, a package beside CANN with a set_env.sh of its own. It is not "
                "installed or not sourced."
            ),
            check=[
                "Is /usr/local/Ascend/nnal there? If not, install the NNAL package of the same CANN version.",
            ],
        ),
        zh=Text(
            title="没有加载 ATB 库（NNAL 软件包）",
            cause=(
                "libatb.so 属于 NNAL，它是 CANN 之外的软件包，有自己的 set_env.sh。现在它没有安装，或者没有执行 "
                "set_env.sh。"
            ),
            check=[
                "/usr/local/Ascend/nnal 是否存在？不存在就安装与 CANN 同版本的 NNAL 包。",
            ],
        ),
        commands=[
            "source /usr/local/Ascend/nnal/atb/set_env.sh",
        ],
    ),
    Rule(
        id="driver-library",
        level=CAUSE,
        patterns=[
            r"libascend_hal\.so[.\d]*: cannot open shared object file",
            r"libdcmi\.so[.\d]*: cannot open shared object file",
            r"libdrvdsmi_host\.so[.\d]*: cannot open shared object file",
        ],
        en=Text(
            title="The Ascend driver libraries are not reachable",
            cause=(
                "The driver lives on the host. In a container its lib64 folder must be mounted; on a host its path "
                "must be on LD_LIBRARY_PATH."
            ),
            check=[
                "Does /usr/local/Ascend/driver/lib64 exist where the program runs?",
            ],
        ),
        zh=Text(
            title="找不到昇腾驱动的动态库",
            cause="驱动装在宿主机上。容器里必须挂载驱动的 lib64 目录；宿主机上该目录必须在 LD_LIBRARY_PATH 中。",
            check=[
                "程序运行的环境里是否有 /usr/local/Ascend/driver/lib64？",
            ],
        ),
        commands=[
            (
                "export "
                "LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common:$LD_LIBRARY_PATH"
            ),
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="undefined-symbol",
        level=CAUSE,
        patterns=[
            r"(?P<lib>\S+\.so\S*): undefined symbol: (?P<symbol>\w+)",
        ],
        en=Text(
            title="Two packages do not belong together: undefined symbol in {lib}",
            cause=(
                "{lib} was built against another version of the library that should give it {symbol}. For "
                "torch_npu: its version must equal the version of torch, and CANN must be one it supports."
            ),
            check=[
                "Do torch and torch_npu show the same major.minor.patch?",
                "Was torch upgraded by another package after torch_npu was installed?",
            ],
            symptoms=["torch and torch_npu do not match", "wrong version"],
        ),
        zh=Text(
            title="两个软件包版本不配套：{lib} 中有未定义符号",
            cause=(
                "{lib} 是针对另一个版本的库编译的，而 {symbol} 应由那个库提供。对 torch_npu 来说：它的版本必须与 "
                "torch 相同，CANN 也必须是它支持的版本。"
            ),
            check=[
                "torch 与 torch_npu 的 主.次.修订 版本号是否相同？",
                "安装 torch_npu 之后，torch 是否被别的软件包升级过？",
            ],
            symptoms=["版本不匹配", "版本不配套", "torch 和 torch_npu 版本"],
        ),
        commands=[
            'pip list | grep -iE "^(torch|torch.npu|torchvision|triton)"',
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="backend-extension",
        level=SYMPTOM,
        patterns=[
            r"Failed to load the backend extension: torch_npu",
        ],
        en=Text(
            title="`import torch` fails because torch_npu cannot load",
            cause=(
                "torch loads torch_npu by itself at import. torch_npu fails: CANN is not sourced, or torch and "
                "torch_npu are of different versions. The lines above this one hold the reason."
            ),
            check=[
                (
                    "An ImportError about a lib*.so means CANN is not sourced; an undefined symbol means the "
                    "versions do not match."
                ),
                "To work on the CPU only, switch the automatic loading off.",
            ],
            symptoms=["import torch fails"],
        ),
        zh=Text(
            title="`import torch` 失败，因为 torch_npu 无法加载",
            cause=(
                "torch 在导入时会自动加载 torch_npu，而 torch_npu 加载失败：没有执行 CANN 的 set_env.sh，或者 "
                "torch 与 torch_npu 版本不同。真正的原因在这一行的上方。"
            ),
            check=[
                "若上方是某个 lib*.so 的 ImportError，说明没有加载 CANN；若是 undefined symbol，说明版本不配套。",
                "如果只想用 CPU，可以关闭自动加载。",
            ],
            symptoms=["import torch 报错", "导入 torch 失败"],
        ),
        commands=[
            "source /usr/local/Ascend/cann/set_env.sh || source /usr/local/Ascend/ascend-toolkit/set_env.sh",
            "export TORCH_DEVICE_BACKEND_AUTOLOAD=0   # CPU only",
        ],
    ),
    Rule(
        id="two-accelerators",
        level=CAUSE,
        patterns=[
            r"Two accelerators cannot be used at the same time",
            r"\bERR00007\b.{0,40}cuda",
        ],
        en=Text(
            title="A CUDA build of torch is installed beside torch_npu",
            cause=(
                "torch can drive one kind of accelerator. torch_npu needs the CPU build of torch of the same version."
            ),
            check=[
                "Does torch.__version__ end in +cu…? On Ascend it must end in +cpu (or nothing on aarch64).",
            ],
        ),
        zh=Text(
            title="torch_npu 旁边装了 CUDA 版的 torch",
            cause="一个 torch 只能驱动一种加速器。torch_npu 需要同版本的 CPU 版 torch。",
            check=[
                "torch.__version__ 是否以 +cu… 结尾？在昇腾上应以 +cpu 结尾（aarch64 上可以没有后缀）。",
            ],
        ),
        commands=[
            "pip show torch_npu | grep ^Version",
            'pip uninstall -y torch && pip install "torch==THAT-VERSION+cpu"   # from the CPU index of PyTorch',
        ],
    ),
    Rule(
        id="glibc",
        level=CAUSE,
        patterns=[
            r"version `(?P<version>GLIBC(?:XX)?_[\d.]+)' not found",
            r"(?P<version>CXXABI_[\d.]+)' not found",
        ],
        en=Text(
            title="The system library is too old: {version} is missing",
            cause=(
                "A wheel was built for a newer system. GLIBCXX and CXXABI come with libstdc++ (can be newer in "
                "conda), GLIBC with the operating system itself."
            ),
            check=[
                (
                    "Which libstdc++ is found first? A conda library before the system's, or the reverse, is the "
                    "usual reason."
                ),
            ],
        ),
        zh=Text(
            title="系统库太旧：缺少 {version}",
            cause=(
                "这个 wheel 是为更新的系统编译的。GLIBCXX 和 CXXABI 属于 libstdc++（可由 conda 提供新版），GLIBC 则"
                "属于操作系统本身。"
            ),
            check=[
                "首先被找到的是哪个 libstdc++？常见原因是 conda 的库排在系统库之前，或者相反。",
            ],
        ),
        commands=[
            "ldd --version | head -1; strings $(g++ -print-file-name=libstdc++.so.6) | grep GLIBCXX | tail -1",
            "conda install -c conda-forge libstdcxx-ng   # for GLIBCXX / CXXABI",
        ],
    ),
    Rule(
        id="cuda-library",
        level=CAUSE,
        patterns=[
            (
                r"(?P<lib>lib(?:cudart|cublas|cublasLt|cudnn|nccl|cusparse|nvrtc"
                r"|cuda)\w*\.so)[.\d]*: cannot open shared object file"
            ),
        ],
        en=Text(
            title="A CUDA library is missing: {lib}",
            cause=(
                "torch (or an extension) was built for CUDA and does not find its libraries: a broken "
                "installation, or a CUDA wheel on a machine without CUDA."
            ),
            check=[
                "On an Ascend or CPU machine install the CPU build of torch.",
            ],
        ),
        zh=Text(
            title="缺少 CUDA 动态库：{lib}",
            cause=(
                "torch（或某个扩展）是 CUDA 版，但找不到对应的库：安装不完整，或者在没有 CUDA 的机器上装了 CUDA 版。"
            ),
            check=[
                "在昇腾或纯 CPU 机器上请安装 CPU 版 torch。",
            ],
        ),
        commands=[
            'python -c "import torch; print(torch.__version__, torch.version.cuda)"',
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="missing-package",
        level=CAUSE,
        patterns=[
            r"(?:ModuleNotFoundError|ImportError): No module named '(?!torch_npu\b|flash_attn\b)(?P<module>[\w.]+)'",
            r"(?P<module>transformers|peft|accelerate|safetensors) (?:is|was) not (?:installed|found)",
        ],
        en=Text(
            title="The Python package {module} is not installed in this environment",
            cause=(
                "The program that runs is another Python than the one the package was installed into, or the "
                "package was never installed. The name of a module and of its package can differ (yaml: PyYAML)."
            ),
            check=[
                "Does `which python` point into the environment you expect?",
                (
                    "In your clone of ascendchat: `pip install -e .` brings what it needs itself, "
                    "`pip install -e '.[hf]'` transformers, peft and accelerate, `pip install -e '.[track]'` "
                    "TensorBoard, SwanLab and W&B."
                ),
            ],
            symptoms=["module not found", "package missing", "import error"],
        ),
        zh=Text(
            title="当前环境没有安装 Python 包 {module}",
            cause=(
                "运行程序的 Python 与安装该包的 Python 不是同一个，或者根本没有安装。模块名与包名可能不同（yaml 对应 "
                "PyYAML）。"
            ),
            check=[
                "`which python` 指向的是你想用的环境吗？",
                (
                    "在 ascendchat 的克隆目录里：`pip install -e .` 装它自身需要的包，`pip install -e '.[hf]'` 装 "
                    "transformers、peft、accelerate，`pip install -e '.[track]'` 装 TensorBoard、SwanLab、W&B。"
                ),
            ],
            symptoms=["缺少包", "找不到模块", "导入失败"],
        ),
        commands=[
            "which python; python -m pip list",
            "python -m pip install {module}   # or one of the lines above",
        ],
    ),
    Rule(
        id="python-too-old",
        level=CAUSE,
        patterns=[
            r"requires a different Python: (?P<version>[\d.]+)",
            r"Python (?P<version>[23]\.\d+(?:\.\d+)?) is too old",
            r"requires Python >= ?3\.\d+.{0,40}(?:found|but|have|is) (?P<version>[23]\.\d+)",
        ],
        en=Text(
            title="Python {version} is too old",
            cause="ascendchat needs Python 3.10 or newer.",
            check=[
                "Is a newer Python installed under another name (python3.11)?",
            ],
        ),
        zh=Text(
            title="Python {version} 版本太低",
            cause="ascendchat 需要 Python 3.10 或更高版本。",
            check=[
                "是否装有另一个名字的新版 Python（如 python3.11）？",
            ],
        ),
        commands=[
            "ls /usr/bin/python3* /usr/local/bin/python3* 2>/dev/null",
            "python3.11 -m venv .venv && . .venv/bin/activate && pip install -e .",
        ],
    ),
    Rule(
        id="rustbpe-build",
        level=CAUSE,
        patterns=[
            r"could not compile `?rustbpe",
            r"Failed building wheel for rustbpe",
            r"error: can't find Rust compiler",
            r"cargo.{0,30}not found",
        ],
        en=Text(
            title="The tokenizer trainer rustbpe does not compile",
            cause=(
                "pip tries to build rustbpe from source: there is no wheel for this Python or system, and the Rust "
                "toolchain is missing or too old. Building it is not needed."
            ),
            check=[
                "ascendchat trains tokenizers with the `tokenizers` package when rustbpe is absent.",
            ],
        ),
        zh=Text(
            title="分词器训练库 rustbpe 编译失败",
            cause=(
                "pip 在从源码编译 rustbpe：没有适合当前 Python 或系统的 wheel，且 Rust 工具链缺失或太旧。其实不需要"
                "编译它。"
            ),
            check=[
                "没有 rustbpe 时，ascendchat 会用 `tokenizers` 包训练分词器。",
            ],
        ),
        commands=[
            "pip install --only-binary :all: rustbpe || pip install tokenizers",
        ],
    ),
]
