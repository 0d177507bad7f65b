"""`ascendchat explain LOG`: rules about disk, shared memory, files and processes of the host."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, NOTE, SYMPTOM, Rule, Text

RULES = [
    Rule(
        id="disk-full",
        level=CAUSE,
        patterns=[
            r"No space left on device",
            r"\bENOSPC\b",
            r"Disk quota exceeded",
        ],
        en=Text(
            title="The disk is full",
            cause=(
                "A file could not be written; nothing that was complete is lost, because files are renamed only "
                "when whole."
            ),
            check=[
                "Which folder: data, checkpoints, or /tmp? Also look at inodes and quotas.",
                "Keep fewer checkpoints, or set ASCENDCHAT_HOME to a larger disk.",
            ],
            symptoms=["disk full", "no space"],
        ),
        zh=Text(
            title="磁盘已满",
            cause="有文件没能写入；已经完整的文件不会丢失，因为文件写完整之后才改名。",
            check=[
                "是哪个目录：数据、检查点还是 /tmp？也要看 inode 和配额。",
                "少保留几个检查点，或把 ASCENDCHAT_HOME 指向更大的磁盘。",
            ],
            symptoms=["磁盘满了", "磁盘空间不足", "空间不够"],
        ),
        commands=[
            "df -h . /tmp ~; df -i . ~; du -sh ~/.cache/ascendchat/*",
            "ascendchat clean",
        ],
    ),
    Rule(
        id="open-files",
        level=CAUSE,
        patterns=[
            r"[Tt]oo many open files",
            r"received 0 items of ancdata",
        ],
        en=Text(
            title="Too many open files",
            cause="The limit of open files (ulimit -n) is too low for the loader workers and data shards.",
            check=[
                "What does `ulimit -n` say in the shell that starts the run? 65536 is comfortable.",
            ],
            symptoms=["too many files"],
        ),
        zh=Text(
            title="打开的文件太多",
            cause="打开文件数的上限（ulimit -n）对数据加载进程和数据分片来说太低。",
            check=[
                "启动任务的 shell 里 `ulimit -n` 是多少？65536 比较合适。",
            ],
            symptoms=["文件句柄不足", "打开文件过多"],
        ),
        commands=[
            "ulimit -n 65536",
        ],
    ),
    Rule(
        id="shared-memory",
        level=CAUSE,
        patterns=[
            r"[Bb]us error",
            r"unable to (?:open|allocate|mmap|write).{0,60}shared memory",
            r"insufficient shared memory",
            r"exitcode\s*:\s*-7\b",
            r"/dev/shm.{0,60}(?:too small|full|No space)",
        ],
        en=Text(
            title="Shared memory (/dev/shm) is too small",
            cause="Loader workers and collectives pass data through /dev/shm; containers give it 64 MB by default.",
            check=[
                (
                    "Start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir with "
                    "medium Memory at /dev/shm."
                ),
                "Are files of dead runs left there?",
            ],
            symptoms=["shared memory too small", "bus error", "container crashes in the loader"],
        ),
        zh=Text(
            title="共享内存（/dev/shm）太小",
            cause="数据加载进程和集合通信通过 /dev/shm 传数据；容器默认只给 64 MB。",
            check=[
                (
                    "启动容器时加 --shm-size=16g 或 --ipc=host；在 Kubernetes 中把 medium 为 Memory 的 emptyDir 挂"
                    "到 /dev/shm。"
                ),
                "那里是否留有异常退出的任务的文件？",
            ],
            symptoms=["共享内存不足", "共享内存太小", "shm 不足"],
        ),
        commands=[
            "df -h /dev/shm; ls -la /dev/shm | head",
            "ascendchat clean",
        ],
    ),
    Rule(
        id="loader-worker",
        level=SYMPTOM,
        patterns=[
            r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (?:is killed by signal|exited unexpectedly)",
        ],
        en=Text(
            title="A data loader worker died",
            cause=(
                "A worker process was killed: host memory used up (Killed), /dev/shm too small (Bus error), or a "
                "crash while reading (Segmentation fault)."
            ),
            check=[
                "The signal named in the line tells which of the three it was.",
                "Run once with 0 workers: the true error then appears in the main process.",
            ],
        ),
        zh=Text(
            title="数据加载进程退出",
            cause=(
                "工作进程被终止：主机内存用尽（Killed）、/dev/shm 太小（Bus error），或读取数据时崩溃（"
                "Segmentation fault）。"
            ),
            check=[
                "这一行里的信号说明是三者中的哪一种。",
                "用 0 个工作进程运行一次：真正的错误会出现在主进程里。",
            ],
        ),
        commands=[
            "df -h /dev/shm; free -g; dmesg -T | tail -5",
        ],
    ),
    Rule(
        id="segfault",
        level=SYMPTOM,
        patterns=[
            r"[Ss]egmentation fault",
            r"Signal 11 \(SIGSEGV\)",
            r"exitcode\s*:\s*-11\b",
        ],
        en=Text(
            title="A crash in native code (segmentation fault)",
            cause=(
                "A compiled library crashed: packages of different versions, a driver that does not match, or an "
                "extension built for another torch."
            ),
            check=[
                "Run again with PYTHONFAULTHANDLER=1: it prints the Python line.",
            ],
            symptoms=["crash", "core dump", "segfault"],
        ),
        zh=Text(
            title="本地代码崩溃（段错误）",
            cause="某个编译的库崩溃了：软件包版本不配套、驱动不匹配，或扩展是为另一个 torch 编译的。",
            check=[
                "用 PYTHONFAULTHANDLER=1 重跑：会打印出 Python 行。",
            ],
            symptoms=["段错误", "程序崩溃", "核心转储"],
        ),
        commands=[
            "export PYTHONFAULTHANDLER=1",
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="permission",
        level=CAUSE,
        patterns=[
            r"PermissionError: \[Errno 13\]",
            r"[Pp]ermission denied",
            r"\[Errno 30\] Read-only file system",
        ],
        en=Text(
            title="No permission to read or write a file",
            cause=(
                "The file or folder belongs to another user (often root, after a run in a container), or the file "
                "system is read-only."
            ),
            check=[
                "Who owns the path in the message?",
                "Point ASCENDCHAT_HOME to a folder of your own.",
            ],
            symptoms=["permission denied", "cannot write"],
        ),
        zh=Text(
            title="没有读写文件的权限",
            cause="文件或目录属于别的用户（常见于容器内以 root 运行之后），或文件系统只读。",
            check=[
                "报错中的路径属于谁？",
                "把 ASCENDCHAT_HOME 指向自己的目录。",
            ],
            symptoms=["没有权限", "权限不足", "不能写文件"],
        ),
        commands=[
            "id; ls -ld ~/.cache/ascendchat",
            "export ASCENDCHAT_HOME=$HOME/ascendchat",
        ],
    ),
    Rule(
        id="file-missing",
        level=SYMPTOM,
        patterns=[
            r"""FileNotFoundError: \[Errno 2\] No such file or directory: ?['"](?P<path>[^'"]+)['"]""",
        ],
        en=Text(
            title="A file is not there: {path}",
            cause=(
                "The step that makes this file has not been run, or it was run with another ASCENDCHAT_HOME or run "
                "name."
            ),
            check=[
                "Is the path spelt right, and is ASCENDCHAT_HOME the same as in the earlier step?",
            ],
            symptoms=["file not found"],
        ),
        zh=Text(
            title="文件不存在：{path}",
            cause="生成该文件的步骤还没有执行，或者执行时用了另一个 ASCENDCHAT_HOME 或运行名。",
            check=[
                "路径是否正确？ASCENDCHAT_HOME 与前一步是否相同？",
            ],
            symptoms=["找不到文件", "文件不存在"],
        ),
        commands=[
            'echo "$ASCENDCHAT_HOME"; ls ~/.cache/ascendchat',
        ],
    ),
    Rule(
        id="stopped-by-user",
        level=NOTE,
        patterns=[
            r"ascendchat [a-z][a-z -]{0,30}: stopped\b",
            r"^KeyboardInterrupt\b",
        ],
        en=Text(
            title="The run was stopped by hand (Ctrl-C)",
            cause="Someone or a job script sent an interrupt; this is not a fault.",
            check=[
                "Start the same command again: it resumes from the last checkpoint.",
            ],
        ),
        zh=Text(
            title="运行被手动停止（Ctrl-C）",
            cause="有人或作业脚本发送了中断信号；这不是故障。",
            check=[
                "再次执行同一命令即可：会从最近的检查点继续。",
            ],
        ),
        commands=[
            "ascendchat --help",
        ],
    ),
]
