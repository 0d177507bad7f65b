"""`ascendchat explain LOG`: rules about the driver, CANN and access to the NPU."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, Rule, Text, code

RULES = [
    Rule(
        id="npu-not-visible",
        level=CAUSE,
        patterns=[
            r"npu\.is_available\(?\)?\W{0,6}(?:is|returns)?\s*False",
            r"NPUs? available\W{1,4}(?:False|0)\b",
            r"[Nn]o (?:available )?NPU(?: devices?)? (?:is |are |was |were )?(?:found|available|detected)",
            r"NPU is not available",
            r"npu device is not available",
            r"[Nn]either NPU nor (?:CUDA|GPU) (?:is|are) available",
            r"ASCEND_RT_VISIBLE_DEVICES.{0,60}(?:invalid|not ascending|must be|ascending order)",
        ],
        en=Text(
            title="torch sees no NPU",
            cause=(
                "Usual reasons: torch_npu is not installed or not imported, CANN's set_env.sh was not sourced, "
                "ASCEND_RT_VISIBLE_DEVICES is not ascending or has spaces (then the count is 0), the driver libraries "
                "are not on the path, /dev/davinci* is not mounted, or the user is not in the group HwHiAiUser."
            ),
            check=[
                "Does `npu-smi info` list the cards? If not, mend the driver or the mounts of the container first.",
                "ASCEND_RT_VISIBLE_DEVICES must look like 0,1,2,3: ascending, digits and commas only.",
                "In a container: are /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc present?",
            ],
            symptoms=[
                "NPU not found",
                "no NPU",
                "cannot see the NPU",
                "NPU not detected",
                "NPU not available",
                "runs on CPU instead of NPU",
                "wrong number of NPUs",
            ],
        ),
        zh=Text(
            title="torch 看不到 NPU",
            cause=(
                "常见原因：没有安装或没有导入 torch_npu；没有 source CANN 的 set_env.sh；ASCEND_RT_VISIBLE_DEVICES "
                "不是升序或含有空格（此时数量为 0）；驱动库不在路径中；没有挂载 /dev/davinci*；用户不在 HwHiAiUser 组。"
            ),
            check=[
                "`npu-smi info` 能列出卡吗？不能的话，先解决驱动或容器挂载的问题。",
                "ASCEND_RT_VISIBLE_DEVICES 必须形如 0,1,2,3：升序，只有数字和逗号。",
                "容器内：/dev/davinci*、/dev/davinci_manager、/dev/devmm_svm、/dev/hisi_hdc 是否存在？",
            ],
            symptoms=[
                "找不到 NPU",
                "NPU not found",
                "没有 NPU",
                "检测不到 NPU",
                "识别不到 NPU",
                "看不到卡",
                "NPU 不可用",
                "用了 CPU 没用 NPU",
                "卡数不对",
            ],
        ),
        commands=[
            'npu-smi info; ls -l /dev/davinci*; id; echo "[$ASCEND_RT_VISIBLE_DEVICES]"',
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="device-start",
        level=CAUSE,
        patterns=[
            r"Failed to start the device",
            code(107001),
            code(507033),
            r"\bEL0003\b",
            r"\bEL0005\b",
            r"\bE30006\b",
            r"Failed to verify the OPP",
            r"Invalid device ID",
        ],
        en=Text(
            title="The device could not be opened",
            cause=(
                "The device number is wrong, another container or process holds the device, or the driver and CANN "
                "do not match. A dead process can also leave the device service (TSD) behind."
            ),
            check=[
                "Is the device number smaller than the number of visible devices?",
                "Does npu-smi show another process on this device?",
                "Are the driver/firmware the ones named in the release notes of this CANN?",
            ],
            symptoms=["device busy", "NPU is in use", "cannot open the device"],
        ),
        zh=Text(
            title="设备无法打开",
            cause=(
                "设备编号不对；设备被别的容器或进程占用；或者驱动与 CANN 不配套。异常退出的进程也可能留下设备侧服务"
                "（TSD）。"
            ),
            check=[
                "设备编号是否小于可见设备的数量？",
                "npu-smi 是否显示该设备上有别的进程？",
                "驱动和固件是否是该 CANN 发行说明中要求的版本？",
            ],
            symptoms=["设备被占用", "卡被占用", "NPU 被占用", "设备打不开"],
        ),
        commands=[
            "npu-smi info; cat /usr/local/Ascend/driver/version.info",
            "ascendchat clean",
        ],
    ),
    Rule(
        id="npu-smi-container",
        level=CAUSE,
        patterns=[
            r"dcmi module initialize failed",
            r"dcmi model initialized failed",
            r"ret is -80(?:05|20)\b",
            r"DrvMngGetConsoleLogLevel failed",
        ],
        en=Text(
            title="npu-smi cannot reach the driver (-8005 / -8020)",
            cause=(
                "-8005: no device or driver files in this container. -8020: another container already uses the "
                "device, and an ordinary container cannot share it."
            ),
            check=[
                (
                    "Was the container started with --device /dev/davinciN, /dev/davinci_manager, /dev/devmm_svm, "
                    "/dev/hisi_hdc and with the driver folder mounted?"
                ),
                "Which other containers run on this host? Stop the one that holds the device.",
            ],
            symptoms=["npu-smi fails", "npu-smi does not work in the container", "NPU not found in container"],
        ),
        zh=Text(
            title="npu-smi 无法访问驱动（-8005 / -8020）",
            cause="-8005：容器内没有设备或驱动文件。-8020：设备已被另一个容器占用，普通容器不能共享设备。",
            check=[
                (
                    "启动容器时是否带了 --device /dev/davinciN、/dev/davinci_manager、/dev/devmm_svm、/dev/hisi_hdc"
                    "，并挂载了驱动目录？"
                ),
                "宿主机上还有哪些容器？停掉占用该设备的那个。",
            ],
            symptoms=["npu-smi 报错", "npu-smi 用不了", "容器里找不到 NPU", "容器看不到卡"],
        ),
        commands=[
            "ls -l /dev/davinci* /dev/hisi_hdc /usr/local/dcmi /usr/local/Ascend/driver/lib64",
            "docker ps   # on the host",
        ],
    ),
    Rule(
        id="npu-permission",
        level=CAUSE,
        patterns=[
            code(207006),
            r"\bEL0007\b",
            r"[Pp]ermission denied.{0,40}/dev/davinci",
            r"/dev/(?:davinci\w*|hisi_hdc|devmm_svm).{0,60}[Pp]ermission denied",
        ],
        en=Text(
            title="No permission to use the NPU",
            cause=(
                "The device files belong to the group HwHiAiUser and this user is not in it (or the container runs "
                "as another user id)."
            ),
            check=[
                "Does `id` list HwHiAiUser? A new group counts only after logging in again.",
            ],
            symptoms=["no permission for the NPU", "NPU only works as root"],
        ),
        zh=Text(
            title="没有使用 NPU 的权限",
            cause="设备文件属于 HwHiAiUser 组，而当前用户不在该组（或者容器以另一个用户 ID 运行）。",
            check=[
                "`id` 的输出里有 HwHiAiUser 吗？加入新组后要重新登录才生效。",
            ],
            symptoms=["NPU 没有权限", "没有权限使用 NPU", "只有 root 能用 NPU"],
        ),
        commands=[
            "ls -l /dev/davinci*; id",
            "sudo usermod -aG HwHiAiUser $USER   # then log in again",
        ],
    ),
    Rule(
        id="driver-mismatch",
        level=CAUSE,
        patterns=[
            code(207000),
            r"driver and firmware packages do not match",
            r"\bEE1015\b",
            r"driver version capability is insufficient",
            r"driver version is too old or does not match CANN",
        ],
        en=Text(
            title="Driver, firmware and CANN do not match",
            cause="A function that CANN asks for is missing in the driver or firmware of this host.",
            check=[
                (
                    "Compare the driver version with the release notes of the CANN version in use; the driver is "
                    "on the host, not in the image."
                ),
            ],
            symptoms=["wrong driver version", "driver does not match CANN"],
        ),
        zh=Text(
            title="驱动、固件与 CANN 不配套",
            cause="CANN 要用的某个功能，本机的驱动或固件没有。",
            check=[
                "对照所用 CANN 的发行说明检查驱动版本；驱动在宿主机上，不在镜像里。",
            ],
            symptoms=["驱动版本不匹配", "驱动不配套", "固件版本不匹配"],
        ),
        commands=[
            "cat /usr/local/Ascend/driver/version.info; npu-smi info -t board -i 0",
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="cann-init",
        level=CAUSE,
        patterns=[
            code(500001),
            code(500002),
            r"AclSetCompileopt.{0,80}(?:fail|error)",
            r"\bEH9999\b.{0,200}init env",
            r"init env failed",
            r"GEInitialize.{0,40}fail",
        ],
        en=Text(
            title="CANN's compiler could not start",
            cause=(
                "The graph engine failed while starting: Python packages that CANN's compiler imports are missing, "
                "the operator package is for another chip or version, or the user cannot write to HOME or to "
                "kernel_meta."
            ),
            check=[
                "Are the Python packages of the command below installed in this environment?",
                "Can this user write to $HOME and to the current folder?",
            ],
        ),
        zh=Text(
            title="CANN 的编译器无法启动",
            cause=(
                "图引擎启动失败：缺少 CANN 编译器要导入的 Python 包；算子包属于别的芯片或版本；或者用户对 HOME 或 "
                "kernel_meta 没有写权限。"
            ),
            check=[
                "下面命令里的 Python 包是否已装在当前环境？",
                "当前用户能否写 $HOME 和当前目录？",
            ],
        ),
        commands=[
            (
                "pip install attrs decorator sympy cffi pyyaml pathlib2 psutil protobuf scipy requests absl-py "
                "cloudpickle"
            ),
            "touch ~/.write-test && rm ~/.write-test; echo $ASCEND_OPP_PATH",
        ],
    ),
    Rule(
        id="missing-op-binary",
        level=CAUSE,
        patterns=[
            r"Cannot find bin of op (?P<op>\w+)",
        ],
        en=Text(
            title="The operator {op} has no binary for this chip",
            cause=(
                "CANN's operator (ops/kernels) package for this chip is not installed, or this dtype and shape is "
                "not supported on the chip."
            ),
            check=[
                (
                    "Is the ops package of the right chip (910b, a3, 310p) and of the same version as the toolkit "
                    "installed?"
                ),
                "bf16 exists on 910B1 and later only; on 910A and 310P use fp16 or fp32.",
            ],
        ),
        zh=Text(
            title="算子 {op} 没有该芯片的二进制",
            cause="没有安装该芯片对应的 CANN 算子包（ops/kernels），或者该芯片不支持这种数据类型和形状。",
            check=[
                "是否安装了对应芯片（910b、a3、310p）且与 toolkit 同版本的算子包？",
                "只有 910B1 及以后的芯片支持 bf16;910A 和 310P 请用 fp16 或 fp32。",
            ],
        ),
        commands=[
            "ls $ASCEND_OPP_PATH/built-in/op_impl/ai_core/tbe/kernel/",
            "ascendchat doctor",
        ],
    ),
]
