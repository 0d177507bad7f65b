"""`ascendchat explain LOG`: rules about HCCL."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, CONSEQUENCE, SYMPTOM, Rule, Text, code

RULES = [
    Rule(
        id="hccp-busy",
        level=CAUSE,
        patterns=[
            r"\bEJ0001\b",
            r"Failed to initialize the HCCP process",
        ],
        en=Text(
            title="Another process still uses this NPU for communication (EJ0001)",
            cause=(
                "A process of the last run is still alive, or two ranks were put on one device. HCCP serves one "
                "process per device."
            ),
            check=[
                "Does npu-smi list processes from an earlier run? End them and wait ten seconds.",
                "One rank per NPU. If two must share one (RL on the same card), set HCCL_NPU_SOCKET_PORT_RANGE=auto.",
            ],
            symptoms=["stale process on the NPU", "second run fails to start"],
        ),
        zh=Text(
            title="仍有进程在用这块 NPU 通信（EJ0001）",
            cause="上一次运行的进程还活着，或者两个 rank 用了同一设备。HCCP 每块设备只服务一个进程。",
            check=[
                "npu-smi 是否列出了上次运行的进程？结束它们并等待十秒。",
                "每块 NPU 一个 rank。如果必须共用（同卡 RL），设置 HCCL_NPU_SOCKET_PORT_RANGE=auto。",
            ],
            symptoms=["残留进程", "第二次启动失败"],
        ),
        commands=[
            "npu-smi info; ascendchat clean",
            "export HCCL_NPU_SOCKET_PORT_RANGE=auto   # only when processes share an NPU",
        ],
    ),
    Rule(
        id="hccl-connect-timeout",
        level=CONSEQUENCE,
        patterns=[
            r"\bEI0006\b",
            r"Getting socket times out",
            r"wait socket establish timeout",
        ],
        en=Text(
            title="HCCL: some ranks never connected (EI0006)",
            cause=(
                "This rank waited for others that came too late, crashed, or cannot be reached (wrong network "
                "card, firewall, TLS switched on at one end only)."
            ),
            check=[
                "Find the rank whose log has no EI0006: its own error is the cause.",
                "Is slow work done on rank 0 only (download, tokenizing) before the first collective?",
                (
                    "Several nodes: HCCL_SOCKET_IFNAME must name the same, existing network card on all; the TLS "
                    "switch must be equal on all."
                ),
            ],
            symptoms=["ranks cannot connect", "multi-node does not start", "HCCL connection timeout"],
        ),
        zh=Text(
            title="HCCL：有的 rank 一直没有连上（EI0006）",
            cause=(
                "本 rank 在等其他 rank，但它们来得太晚、已经崩溃，或网络不通（网卡选错、防火墙、只有一端开启 TLS）。"
            ),
            check=[
                "找到日志里没有 EI0006 的那个 rank：它自己的错误才是原因。",
                "第一次集合通信之前，是否有只在 rank 0 上做的慢操作（下载、分词）？",
                "多机：所有节点的 HCCL_SOCKET_IFNAME 要指向同一块存在的网卡；TLS 开关要一致。",
            ],
            symptoms=["多机连不上", "多机训练起不来", "HCCL 连接超时"],
        ),
        commands=[
            "grep -L EI0006 ~/ascend/log/debug/plog/*.log",
            "export HCCL_CONNECT_TIMEOUT=600",
            "for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -tls -g; hccn_tool -i $i -link -g; done",
        ],
    ),
    Rule(
        id="hccl-rootinfo",
        level=CONSEQUENCE,
        patterns=[
            r"\bEI0015\b",
            r"topo exchange server get socket timeout",
            r"Failed to connect agent",
            r"Failed to collect cluster information",
        ],
        en=Text(
            title="HCCL: not all ranks reported to rank 0 (EI0015)",
            cause=(
                "While the group was formed, rank 0 did not hear from every rank. The missing ranks are listed in "
                "the log; they crashed, or cannot reach the host network card and port of rank 0."
            ),
            check=[
                "Read the logs of the ranks named as missing.",
                "Host network card: HCCL_SOCKET_IFNAME; ports 60000-60031 must be free and open between the hosts.",
            ],
        ),
        zh=Text(
            title="HCCL：不是所有 rank 都向 rank 0 报到（EI0015）",
            cause=(
                "建立通信组时，rank 0 没有收到所有 rank 的消息。缺少的 rank 列在日志中；它们已崩溃，或者连不上 "
                "rank 0 的主机网卡和端口。"
            ),
            check=[
                "查看被列为缺失的 rank 的日志。",
                "主机网卡：HCCL_SOCKET_IFNAME；主机之间 60000-60031 端口必须空闲且放行。",
            ],
        ),
        commands=[
            'ip -br addr; echo "$HCCL_SOCKET_IFNAME $HCCL_IF_BASE_PORT"',
            "sudo sysctl -w net.ipv4.ip_local_reserved_ports=60000-60031",
        ],
    ),
    Rule(
        id="hccl-port",
        level=CAUSE,
        patterns=[
            r"\bEI0019\b",
            r"\bEJ0003\b",
            r"listen on ip.{0,80}port.{0,20}fail",
            r"Failed to bind the IP port",
        ],
        en=Text(
            title="HCCL's port is already in use",
            cause=(
                "HCCL listens on ports 60000-60031 on the host and 16666 on the NPU. Another run, or another "
                "program, holds one of them."
            ),
            check=[
                "Is an earlier run still alive? Do two jobs share this host?",
            ],
        ),
        zh=Text(
            title="HCCL 的端口已被占用",
            cause="HCCL 在主机上监听 60000-60031，在 NPU 上监听 16666。别的任务或程序占用了其中之一。",
            check=[
                "上一次运行是否还在？本机是否有两个作业？",
            ],
        ),
        commands=[
            'ss -ltnp | grep -E ":600[0-3][0-9]"',
            "export HCCL_IF_BASE_PORT=50000   # or HCCL_HOST_SOCKET_PORT_RANGE=auto HCCL_NPU_SOCKET_PORT_RANGE=auto",
        ],
    ),
    Rule(
        id="hccl-exec-timeout",
        level=CONSEQUENCE,
        patterns=[
            r"\bEI0002\b",
            r"\bEE1002\b",
            code(507048),
            code(507046),
            code(107020),
            r"Notify register (?:times out|has not received)",
            r"[Ss]tream synchronize timeout",
            r"[Nn]otify ?[Ww]ait.{0,30}(?:time ?out|timed out)",
        ],
        en=Text(
            title="A collective waited for a rank that never came (EI0002)",
            cause=(
                "A peer died, hangs, or runs another sequence of collectives (uneven batches, a collective in `if "
                "rank == 0`, a long evaluation or checkpoint on rank 0)."
            ),
            check=[
                (
                    'Which rank stopped first? Look for "Cluster Exception Location" and "HeartbeatAbnormal" in '
                    "the plogs."
                ),
                "Do all ranks run the same number of steps and the same collectives?",
                "Raise HCCL_EXEC_TIMEOUT only when the wait is legitimate.",
            ],
            symptoms=["training hangs", "communication timeout", "HCCL timeout", "rank waits"],
        ),
        zh=Text(
            title="集合通信在等一个没有到来的 rank(EI0002)",
            cause=(
                "某个对端已经死掉、卡住，或者执行了不同的通信序列（批次数不等、`if rank == 0` 里有通信、rank 0 上长"
                "时间评测或保存）。"
            ),
            check=[
                '哪个 rank 最先停下？在 plog 里找 "Cluster Exception Location" 和 "HeartbeatAbnormal"。',
                "所有 rank 的步数和通信序列是否相同？",
                "只有在等待确实合理时才增大 HCCL_EXEC_TIMEOUT。",
            ],
            symptoms=["训练卡住", "通信超时", "HCCL 超时", "多卡卡住"],
        ),
        commands=[
            'grep -rnE "Cluster Exception Location|HeartbeatAbnormal" ~/ascend/log/debug/plog | tail -5',
        ],
    ),
    Rule(
        id="hccl-if-ip",
        level=CAUSE,
        patterns=[
            r"HCCL_IF_IP\b.{0,160}(?:invalid|[Ff]ail|[Ee]rror|not |mismatch|inconsistent)",
            r"(?:[Ii]nvalid|[Ff]ailed|EI0001|cannot|can't).{0,160}HCCL_IF_IP\b",
        ],
        en=Text(
            title="HCCL_IF_IP does not name an address of this machine",
            cause=(
                "HCCL_IF_IP must be the address of a network card of the very machine it is set on, so it differs "
                "from node to node. It wins over HCCL_SOCKET_IFNAME; one value copied to all nodes fails."
            ),
            check=[
                "Does `ip -br addr` show this address here, and can the other nodes reach it?",
                "Simpler: unset it and name the card, which is the same on all nodes, in HCCL_SOCKET_IFNAME.",
            ],
            symptoms=["HCCL_IF_IP", "wrong network card", "HCCL uses the wrong network"],
        ),
        zh=Text(
            title="HCCL_IF_IP 不是本机的地址",
            cause=(
                "HCCL_IF_IP 必须是设置它的那台机器自己网卡的地址，因此每个节点各不相同。它优先于 "
                "HCCL_SOCKET_IFNAME；把同一个值拷到所有节点就会失败。"
            ),
            check=[
                "`ip -br addr` 在本机能看到这个地址吗？其他节点能连上它吗？",
                "更简单：取消它，改用 HCCL_SOCKET_IFNAME 指定网卡名（各节点相同）。",
            ],
            symptoms=["HCCL_IF_IP", "网卡选错", "HCCL 网卡"],
        ),
        commands=[
            'ip -br addr; echo "[$HCCL_IF_IP]"',
            "unset HCCL_IF_IP; export HCCL_SOCKET_IFNAME==eth0   # the name of your network card; `=` means exactly",
        ],
    ),
    Rule(
        id="hccl-inconsistent",
        level=CAUSE,
        patterns=[
            r"\bEI0005\b",
            r"\bEI0008\b",
            r"\bEI0016\b",
            r"\bEI0001\b",
            r"\bEI0004\b",
            r"\bEI0014\b",
            r"arguments for collective communication are inconsistent",
            r"HCCL versions are inconsistent",
            r"get host ip fail by socket [Ii]fname",
        ],
        en=Text(
            title=(
                "The ranks do not agree: arguments, HCCL versions, TLS or environment (EI0005 / EI0008 / EI0016 / "
                "EI0001)"
            ),
            cause=(
                "EI0005: ranks called different collectives or sizes. EI0008: CANN differs between nodes. EI0016: "
                "a setting such as TLS differs. EI0001: an HCCL_* variable has an invalid value. EI0004 and "
                "EI0014: the rank table is wrong."
            ),
            check=[
                "The message names the parameter with its local and remote value.",
                "Use the same image and the same environment on all nodes.",
            ],
        ),
        zh=Text(
            title="各 rank 不一致：参数、HCCL 版本、TLS 或环境变量（EI0005 / EI0008 / EI0016 / EI0001）",
            cause=(
                "EI0005：各 rank 调用的集合通信或数据大小不同。EI0008：节点间 CANN 版本不同。EI0016:TLS 等配置不同"
                "。EI0001：某个 HCCL_* 变量的值无效。EI0004 和 EI0014:rank table 有误。"
            ),
            check=[
                "报错信息里有参数名及本端、对端的值。",
                "所有节点使用相同的镜像和环境变量。",
            ],
        ),
        commands=[
            'env | grep -E "^HCCL_|^RANK_TABLE"',
            "for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -tls -g; done",
        ],
    ),
    Rule(
        id="hccl-link",
        level=CAUSE,
        patterns=[
            r"\bEI0013\b",
            r"\bEI0012\b",
            r"\bEI0010\b",
            r"\bEJ0002\b",
            r"error cqe",
            r"An error CQE occurred",
            r"SDMA memory copy task exception",
            r"P2P communication failed",
        ],
        en=Text(
            title="A link between NPUs failed (error CQE, SDMA or P2P)",
            cause=(
                "The network port went down or dropped packets, the peer process exited, or a buffer was freed "
                "while it was being sent."
            ),
            check=[
                "Did the peer named in the message die first? Then its error is the cause.",
                "Are all network ports up and healthy?",
            ],
        ),
        zh=Text(
            title="NPU 之间的链路出错（error CQE、SDMA 或 P2P）",
            cause="网口断开或丢包、对端进程退出，或缓冲区在发送过程中被释放。",
            check=[
                "信息中指出的对端是否先退出？若是，它的错误才是原因。",
                "所有网口是否连通、健康？",
            ],
        ),
        commands=[
            "for i in 0 1 2 3 4 5 6 7; do hccn_tool -i $i -link -g; hccn_tool -i $i -net_health -g; done",
        ],
    ),
    Rule(
        id="hccl-init",
        level=SYMPTOM,
        patterns=[
            r"initialize hccl failed",
            r"[Hh]ccl(?:Comm)?InitRootInfo(?:Config)?\b.{0,120}(?:error|fail|ret)",
            r"HcclGetRootInfo.{0,80}(?:error|fail)",
        ],
        en=Text(
            title="HCCL could not start",
            cause=(
                "Error 7: HCCP is not available, a stale process holds the NPU. Error 15: the runtime or device is "
                "busy. Error 5: this driver and CANN do not support the call. Error 9 or 4: other ranks are "
                "missing. 500000: an inner error, usually no usable device or a driver that does not match CANN."
            ),
            check=[
                (
                    "Is a process of an earlier run on the device? Is torch.npu.set_device(local_rank) called "
                    "before init_process_group?"
                ),
                "Does one real collective work alone?",
            ],
        ),
        zh=Text(
            title="HCCL 初始化失败",
            cause=(
                "错误 7:HCCP 不可用，有残留进程占用 NPU。错误 15：运行时或设备忙。错误 5：当前驱动与 CANN 的组合不"
                "支持该调用。错误 9 或 4：缺少其他 rank。500000：内部错误，通常是没有可用设备，或驱动与 CANN 不配套"
                "。"
            ),
            check=[
                "设备上是否有上次运行的进程？是否在 init_process_group 之前调用了 torch.npu.set_device(local_rank)？",
                "单独执行一次集合通信是否正常？",
            ],
        ),
        commands=[
            "npu-smi info; ascendchat clean",
            "ascendchat doctor --devices 2",
        ],
    ),
    Rule(
        id="hccl-contiguous",
        level=CAUSE,
        patterns=[
            r"Tensors must be contiguous",
            r"\bERR02002\b",
        ],
        en=Text(
            title="A collective was given a tensor that is not contiguous",
            cause="HCCL and NCCL send memory as it lies; a transposed or sliced view must be copied first.",
            check=[
                "Call .contiguous() on the tensor before the collective.",
            ],
        ),
        zh=Text(
            title="集合通信收到了不连续的张量",
            cause="HCCL 和 NCCL 按内存原样发送；转置或切片得到的视图要先复制。",
            check=[
                "在集合通信之前对张量调用 .contiguous()。",
            ],
        ),
        commands=[
            "ascendchat doctor --devices 2",
        ],
    ),
]
