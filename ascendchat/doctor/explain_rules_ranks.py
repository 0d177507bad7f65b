"""`ascendchat explain LOG`: rules about ranks, launchers, ports, NCCL and Gloo."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, CONSEQUENCE, SYMPTOM, Rule, Text

RULES = [
    Rule(
        id="missing-ranks",
        level=CONSEQUENCE,
        patterns=[
            r"MissingRanks: (?P<message>\S.*)",
        ],
        en=Text(
            title="ascendchat: not all ranks arrived",
            cause="{message}",
            check=["Read the log of the ranks named above first: they ended early, or were never started."],
        ),
        zh=Text(
            title="ascendchat：不是所有 rank 都到达",
            cause="原文：{message}",
            check=["先看上面指出的 rank 的日志：它们提前结束，或根本没有启动。"],
        ),
        commands=[
            "ascendchat explain RUN-FOLDER   # the logs of all ranks together",
        ],
    ),
    Rule(
        id="same-device",
        level=CAUSE,
        patterns=[
            r"reduce_scatter requires inputs to be on the same device",
            r"Corresponding input/output tensors to \w+(?:/\w+)? must all (?:reside )?on the same device",
            r"Expected all tensors to be on the same device",
            r"Expecting all tensors on the same device",
        ],
        en=Text(
            title="Tensors of one operation are on different devices",
            cause=(
                "Part of the input is still on the CPU, or a rank uses device 0 instead of its own. For "
                "reduce_scatter: the output and every input must be on the device of this rank."
            ),
            check=[
                "Does every process select its device from LOCAL_RANK before it makes tensors?",
                "Optimizer state loaded from a checkpoint stays on the CPU until it is moved.",
            ],
        ),
        zh=Text(
            title="同一操作的张量不在同一设备上",
            cause=(
                "部分输入还在 CPU 上，或某个 rank 用了 0 号设备而不是自己的设备。对 reduce_scatter：输出和所有输入"
                "都必须在本 rank 的设备上。"
            ),
            check=[
                "每个进程在创建张量之前是否都按 LOCAL_RANK 选择了设备？",
                "从检查点加载的优化器状态在移动之前一直在 CPU 上。",
            ],
        ),
        commands=[
            "ascendchat doctor --devices 2",
        ],
    ),
    Rule(
        id="port-in-use",
        level=CAUSE,
        patterns=[
            r"[Aa]ddress already in use",
            r"EADDRINUSE",
            r"the port of the rendezvous was taken",
            r"errno: ?98\b",
        ],
        en=Text(
            title="The port is already in use",
            cause=(
                "Another run, often one that was not ended, listens on the same port (29500 is torchrun's fixed "
                "default)."
            ),
            check=[
                "Which process holds the port? Is it yours and of an earlier run?",
                "`ascendchat launch` chooses a free port by itself; with torchrun give another --master_port.",
            ],
            symptoms=["port in use", "address in use"],
        ),
        zh=Text(
            title="端口已被占用",
            cause="别的任务（往往是没有结束的旧任务）在监听同一端口（29500 是 torchrun 的固定默认值）。",
            check=[
                "哪个进程占用端口？是不是你之前的任务？",
                "`ascendchat launch` 会自动选择空闲端口；使用 torchrun 时请换一个 --master_port。",
            ],
            symptoms=["端口被占用", "端口冲突"],
        ),
        commands=[
            'ss -ltnp | grep -E ":(29500|8000)"',
            (
                "export MASTER_PORT=$(python -c \"import socket; s = socket.socket(); s.bind(('', 0)); "
                'print(s.getsockname()[1])")'
            ),
        ],
    ),
    Rule(
        id="nccl-timeout",
        level=CONSEQUENCE,
        patterns=[
            r"Watchdog caught collective operation timeout",
            r"ProcessGroup(?:NCCL|HCCL)'s watchdog (?:got stuck|detected)",
            r"WorkHCCL\(.{0,200}timed out",
            r"Heartbeat monitor timed out",
            r"Some (?:NCCL|HCCL) operations have failed or timed out",
        ],
        en=Text(
            title="The collective watchdog gave up: a rank never came",
            cause=(
                "A rank died, hangs, or runs other collectives. The rank that shows this line is usually not the "
                "guilty one."
            ),
            check=[
                "Find the rank whose log stops first or shows another error.",
                "Does rank 0 evaluate or save for longer than the timeout while the others wait?",
            ],
            symptoms=["training hangs on several GPUs", "NCCL timeout"],
        ),
        zh=Text(
            title="集合通信看门狗超时：有 rank 一直没有到来",
            cause="某个 rank 死掉、卡住或执行了不同的通信。打印这一行的 rank 通常不是出错的那个。",
            check=[
                "找到最先停下、或有其他报错的那个 rank 的日志。",
                "rank 0 是否在评测或保存，时间超过了超时，而其他 rank 在等它？",
            ],
            symptoms=["NCCL 超时", "多卡训练卡住"],
        ),
        commands=[
            "export TORCH_NCCL_TRACE_BUFFER_SIZE=20000 TORCH_HCCL_DESYNC_DEBUG=1   # then run again",
        ],
    ),
    Rule(
        id="nccl-error",
        level=SYMPTOM,
        patterns=[
            r"unhandled system error.{0,60}NCCL",
            r"ncclSystemError",
            r"ncclUnhandledCudaError",
            r"ncclInternalError",
            r"ncclInvalidUsage",
            r"unhandled cuda error.{0,60}NCCL",
            r"ncclRemoteError",
        ],
        en=Text(
            title="NCCL failed",
            cause=(
                "A system call or CUDA call inside NCCL failed: the network card is wrong or down, /dev/shm is too "
                "small, two ranks share a GPU (invalid usage), or a peer has gone (remote error)."
            ),
            check=[
                "Run again with NCCL_DEBUG=INFO; the first WARN line names the failing call.",
                "In a container: --shm-size=16g. Several nodes: NCCL_SOCKET_IFNAME.",
            ],
        ),
        zh=Text(
            title="NCCL 出错",
            cause=(
                "NCCL 内部的系统调用或 CUDA 调用失败：网卡选错或断开；/dev/shm 太小；两个 rank 用了同一块 "
                "GPU(invalid usage)；或对端已退出（remote error）。"
            ),
            check=[
                "用 NCCL_DEBUG=INFO 重跑；第一条 WARN 指出失败的调用。",
                "容器内：--shm-size=16g。多机：NCCL_SOCKET_IFNAME。",
            ],
        ),
        commands=[
            "export NCCL_DEBUG=INFO; df -h /dev/shm; ip -br addr",
        ],
    ),
    Rule(
        id="gloo-connect",
        level=CONSEQUENCE,
        patterns=[
            r"gloo.{0,200}(?:[Cc]onnection refused|[Cc]onnection (?:reset|closed) by peer|[Tt]imed out|SO_ERROR)",
            r"Gloo connectFullMesh failed",
            r"Unable to find (?:address|interface) for:? ?\w+",
        ],
        en=Text(
            title="Gloo lost or could not reach another rank",
            cause=(
                "The other rank ended (its own error is the cause), or the host name resolves to an address the "
                "others cannot reach."
            ),
            check=[
                "Which rank ended first? Read its log.",
                "Does `hostname -i` give an address that the other hosts can reach? If not, set GLOO_SOCKET_IFNAME.",
            ],
        ),
        zh=Text(
            title="Gloo 连不上或失去了另一个 rank",
            cause="另一个 rank 已经结束（它自己的错误才是原因），或主机名解析到了其他节点连不上的地址。",
            check=[
                "哪个 rank 最先结束？查看它的日志。",
                "`hostname -i` 给出的地址其他主机能连上吗？不能就设置 GLOO_SOCKET_IFNAME。",
            ],
        ),
        commands=[
            "hostname -i; ip -br addr",
            "export GLOO_SOCKET_IFNAME=eth0   # the name of your network card",
        ],
    ),
    Rule(
        id="tcpstore",
        level=CONSEQUENCE,
        patterns=[
            r"TCPStore.{0,160}(?:[Tt]imed? ?out|timeout)",
            r"DistStoreError",
            r"DistNetworkError",
            r"The client socket has (?:timed out|failed to connect)",
            r"Timed out after \d+ seconds waiting for clients",
            r"[Ww]ait timeout after \d+ms, keys:",
        ],
        en=Text(
            title="Ranks did not all reach the meeting point (TCPStore)",
            cause=(
                "Fewer ranks started than the world size says, MASTER_ADDR or MASTER_PORT differs between nodes or "
                "is blocked, or rank 0 has already ended."
            ),
            check=[
                (
                    "Was the command started on every node, with the same --nnodes and --master and another "
                    "--node-rank each?"
                ),
                "Can the other nodes reach that address and port?",
            ],
            symptoms=["nodes cannot connect", "multi-node training does not start", "rendezvous timeout"],
        ),
        zh=Text(
            title="不是所有 rank 都到达了汇合点（TCPStore）",
            cause=(
                "启动的 rank 少于 world size；各节点的 MASTER_ADDR 或 MASTER_PORT 不一致或被防火墙拦截；或 rank 0 "
                "已经结束。"
            ),
            check=[
                "是否在每个节点都启动了命令，--nnodes 与 --master 相同，--node-rank 各不相同？",
                "其他节点能否连上该地址和端口？",
            ],
            symptoms=["多机启动不了", "节点连不上", "启动时卡住"],
        ),
        commands=[
            "nc -vz $MASTER_ADDR $MASTER_PORT",
            "ascendchat launch --help",
        ],
    ),
    Rule(
        id="child-failed",
        level=CONSEQUENCE,
        patterns=[
            r"ChildFailedError",
            r"ascendchat launch: rank \d+ (?:failed|was killed)",
            r"exitcode\s*:\s*(?P<code>-?(?!9\b)\d+) \(pid: \d+\)",
            r"torch\.multiprocessing\.spawn\.ProcessExitedException",
        ],
        en=Text(
            title="torchrun reports that a worker failed",
            cause=(
                'This is the messenger, not the cause. The section "Root Cause (first observed failure)" names the '
                "rank; its own traceback stands in that rank's log."
            ),
            check=[
                (
                    "Read the log of the rank named under Root Cause. Exit code -6 is an abort (watchdog), -7 a "
                    "bus error (/dev/shm), -9 killed (memory), -11 a crash in native code, -15 ended because "
                    "another rank failed."
                ),
                "`ascendchat launch` keeps one log per rank in the run folder.",
            ],
            symptoms=["torchrun failed", "worker failed"],
        ),
        zh=Text(
            title="torchrun 报告有工作进程失败",
            cause=(
                '这只是报信的，不是原因。"Root Cause (first observed failure)" 一节指出是哪个 rank；真正的调用栈在'
                "那个 rank 的日志里。"
            ),
            check=[
                (
                    "查看 Root Cause 指出的 rank 的日志。退出码 -6 为中止（看门狗），-7 为总线错误（/dev/shm），-9 "
                    "为被杀（内存），-11 为本地代码崩溃，-15 表示因别的 rank 失败而被结束。"
                ),
                "`ascendchat launch` 会在运行目录中为每个 rank 保存日志。",
            ],
            symptoms=["torchrun 失败", "子进程失败"],
        ),
        commands=[
            'grep -A 12 "Root Cause" LOG   # then: ascendchat explain the log of that rank',
        ],
    ),
    Rule(
        id="rank-ended",
        level=CONSEQUENCE,
        patterns=[
            r"Sending process \d+ closing signal SIGTERM",
            r"Received (?:Signals\.)?SIGTERM death signal",
            r"Signals\.SIGTERM",
            r"[Cc]onnection (?:reset|closed) by (?:remote )?peer",
        ],
        en=Text(
            title="Other ranks were stopped because one failed",
            cause="A rank ended first; the launcher then stopped the rest, or they lost their connection to it.",
            check=[
                "Look for the earliest error of another rank.",
            ],
        ),
        zh=Text(
            title="因一个 rank 失败，其他 rank 被停止",
            cause="有一个 rank 先结束，启动器随后停止了其余 rank，或它们与其断开了连接。",
            check=[
                "找到其他 rank 中最早的报错。",
            ],
        ),
        commands=[
            "ascendchat explain RUN-FOLDER   # the logs of all ranks together",
        ],
    ),
    Rule(
        id="local-rank-list",
        level=CAUSE,
        patterns=[
            r"invalid literal for int\(\) with base 10: '\d+(?:,\d+)+'",
        ],
        en=Text(
            title="LOCAL_RANK is a list (Kubernetes AscendJob)",
            cause=(
                "AscendJob sets RANK to the number of the node and LOCAL_RANK to a list such as 0,1,2,3. A program "
                "that reads them as torchrun's variables fails."
            ),
            check=[
                "Start through `ascendchat launch`: it translates these variables.",
            ],
        ),
        zh=Text(
            title="LOCAL_RANK 是一个列表（Kubernetes AscendJob）",
            cause=(
                "AscendJob 把 RANK 设为节点编号，把 LOCAL_RANK 设为 0,1,2,3 这样的列表。按 torchrun 变量去读的程序"
                "会失败。"
            ),
            check=[
                "通过 `ascendchat launch` 启动：它会转换这些变量。",
            ],
        ),
        commands=[
            'env | grep -E "^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_)"',
            "ascendchat launch --help",
        ],
    ),
]
