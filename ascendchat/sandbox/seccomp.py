"""Lists the system calls that a program in the sandbox may not make, as a filter for the Linux kernel.

    instructions = program("x86_64", read_only=False)       # (code, jt, jf, k) each; inside.py hands them to the kernel

What Python needs to compute is allowed; what reaches other processes, the network or the machine is refused with an
error the program can see; a call newer than this list does not exist for it. New processes are refused, threads are
not. `read_only` also refuses every change of files: for machines where the program cannot be given a root folder of its
own.
"""

from __future__ import annotations

import errno

Instruction = tuple[int, int, int, int]

OWN_PID = -1  # stands for the number of the filtered process, which is known only when it runs
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # opcodes of classic BPF
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in what the filter sees; arguments are 8 bytes each, low half first
CLONE_THREAD, PR_SET_PDEATHSIG = 0x10000, 1
WRITES = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
NEWEST = 462  # the last call that was looked at here; the numbers of later ones are the same on both processors
X32 = 0x40000000  # the second numbering of x86_64
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

Numbers = dict[str, tuple[int | None, int | None]]  # of a system call on (x86_64, aarch64); None: there is no such call


def _table(text: str) -> Numbers:
    """`socket 41 198, fork 57 -` -> {"socket": (41, 198), "fork": (57, None)}"""
    rows = [row.split() for row in text.split(",")]
    return {name: (None if a == "-" else int(a), None if b == "-" else int(b)) for name, a, b in rows}


REFUSED = _table("""
    socket 41 198,  ptrace 101 117,  process_vm_readv 310 270,  process_vm_writev 311 271,  mount 165 40,
    umount2 166 39,  pivot_root 155 41,  chroot 161 51,  unshare 272 97,  setns 308 268,  fork 57 -,  vfork 58 -,
    rt_sigqueueinfo 129 138,  rt_tgsigqueueinfo 297 240,  tkill 200 130,  pidfd_open 434 434,
    pidfd_send_signal 424 424,  pidfd_getfd 438 438,  keyctl 250 219,  add_key 248 217,  request_key 249 218,
    bpf 321 280,  perf_event_open 298 241,  userfaultfd 323 282,  kexec_load 246 104,  kexec_file_load 320 294,
    init_module 175 105,  finit_module 313 273,  delete_module 176 106,  reboot 169 142,  swapon 167 224,
    swapoff 168 225,  sethostname 170 161,  setdomainname 171 162,  iopl 172 -,  ioperm 173 -,  acct 163 89,
    quotactl 179 60,  syslog 103 116,  settimeofday 164 170,  clock_settime 227 112,  adjtimex 159 171,
    clock_adjtime 305 266,  personality 135 92,  open_by_handle_at 304 265,  fanotify_init 300 262,
    open_tree 428 428,  move_mount 429 429,  fsopen 430 430,  fsconfig 431 431,  fsmount 432 432,  fspick 433 433,
    mount_setattr 442 442,  memfd_create 319 279,  memfd_secret 447 447,  shmget 29 194,  shmat 30 196,
    shmctl 31 195,  semget 64 190,  semop 65 193,  semtimedop 220 192,  semctl 66 191,  msgget 68 186,
    msgsnd 69 189,  msgrcv 70 188,  msgctl 71 187,  mq_open 240 180,  mq_unlink 241 181,  setsid 112 157,
    setpgid 109 154,  setpriority 141 140,  sched_setscheduler 144 119,  sched_setparam 142 118,
    sched_setattr 314 274,  sched_setaffinity 203 122,  ioprio_set 251 30,  migrate_pages 256 238,
    move_pages 279 239,  bind 49 200,  connect 42 203,  listen 50 201,  accept 43 202,  accept4 288 242,
    sendmmsg 307 269,  io_uring_setup 425 425,  io_uring_enter 426 426,  io_uring_register 427 427,  mknod 133 -,
    mknodat 259 33,  kcmp 312 272,  process_madvise 440 440,  quotactl_fd 443 443,  process_mrelease 448 448,
    lsm_set_self_attr 460 460
""")
# These change files. They are refused when the program has no root folder of its own.
CHANGES = _table("""
    creat 85 -,  mkdir 83 -,  mkdirat 258 34,  rmdir 84 -,  unlink 87 -,  unlinkat 263 35,  rename 82 -,
    renameat 264 38,  renameat2 316 276,  link 86 -,  linkat 265 37,  symlink 88 -,  symlinkat 266 36,
    truncate 76 45,  ftruncate 77 46,  chmod 90 -,  fchmod 91 52,  fchmodat 268 53,  fchmodat2 452 452,  chown 92 -,
    lchown 94 -,  fchown 93 55,  fchownat 260 54,  utime 132 -,  utimes 235 -,  utimensat 280 88,  futimesat 261 -,
    setxattr 188 5,  lsetxattr 189 6,  fsetxattr 190 7,  removexattr 197 14,  lremovexattr 198 15,
    fremovexattr 199 16
""")
# These are refused or not by their arguments.
JUDGED = _table("""
    clone 56 220,  clone3 435 435,  kill 62 129,  tgkill 234 131,  prctl 157 167,  prlimit64 302 261,  open 2 -,
    openat 257 56,  openat2 437 437,  fcntl 72 25,  ioctl 16 29,  socketpair 53 199,
    sendto 44 206
""")
# Commands by which a pipe or socket sends any signal to any process of the same user.
OWNERS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
# What Python asks of its own files. Every other command is refused: a driver, such as that of an NPU, obeys whoever has
# opened its device for reading, and so do a terminal and the attributes of a file.
QUESTIONS = (
    *(0x5401, 0x802C542A, 0x5413, 0x541B),  # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD
    *(0x5421, 0x5450, 0x5451, 0x40049409),  # FIONBIO, FIONCLEX, FIOCLEX, FICLONE (a copy into a file open for writing)
)
# asyncio cannot start without a pair of sockets. A pair of streams is connected for good and reaches nobody; one of
# datagrams sends to every socket of the machine whose name it knows.
AF_UNIX = 1
STREAMS = (1, 0x801, 0x80001, 0x80801)  # SOCK_STREAM, alone or with SOCK_NONBLOCK, SOCK_CLOEXEC


def program(machine: str, read_only: bool) -> list[Instruction]:
    """Build the filter for this kind of processor; an empty list for one whose system calls are not listed here."""
    if machine not in ARCHES:
        return []
    column = list(ARCHES).index(machine)
    no, unknown = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
    steps: list[Instruction] = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHES[machine]), (RETURN, 0, 0, KILL)]
    steps.append((LOAD, 0, 0, NUMBER))
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, no)]
    steps += [(AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, unknown)]

    def call(name: str, *then: Instruction) -> None:
        """Add a rule for one call; `then` ends in a return on every path."""
        number = (REFUSED.get(name) or CHANGES.get(name) or JUDGED[name])[column]
        if number is not None:
            steps.extend([(EQUAL, 0, len(then), number), *then])

    def only(argument: int, opcode: int, value: int, yes: int, otherwise: int) -> tuple[Instruction, ...]:
        """Return `yes` if the test of an argument holds, else the other verdict."""
        load = (LOAD, 0, 0, ARGUMENTS + 8 * argument)
        return load, (opcode, 0, 1, value), (RETURN, 0, 0, yes), (RETURN, 0, 0, otherwise)

    def one_of(argument: int, values: tuple[int, ...], yes: int, otherwise: int) -> tuple[Instruction, ...]:
        """Return `yes` if the argument is one of these, else the other verdict."""
        tests = [(EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
        return ((LOAD, 0, 0, ARGUMENTS + 8 * argument), *tests, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, yes))

    def nothing_at(argument: int, otherwise: int) -> tuple[Instruction, ...]:
        """Allow a null pointer, both halves of which are compared."""
        low = ARGUMENTS + 8 * argument
        halves = ((LOAD, 0, 0, low), (EQUAL, 0, 2, 0), (LOAD, 0, 0, low + 4), (EQUAL, 1, 0, 0))
        return (*halves, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, ALLOW))

    for name in [*REFUSED, *(CHANGES if read_only else ())]:
        call(name, (RETURN, 0, 0, no))
    call("clone", *only(0, ANY_BIT, CLONE_THREAD, ALLOW, no))
    call("clone3", (RETURN, 0, 0, unknown))  # its flags are in memory, out of sight: libraries fall back to clone
    call("kill", *only(0, EQUAL, OWN_PID, ALLOW, no))
    call("tgkill", *only(0, EQUAL, OWN_PID, ALLOW, no))
    call("prctl", *only(0, EQUAL, PR_SET_PDEATHSIG, no, ALLOW))
    call("prlimit64", *only(0, EQUAL, 0, ALLOW, no))
    call("fcntl", *one_of(1, OWNERS, no, ALLOW))
    call("ioctl", *one_of(1, QUESTIONS, ALLOW, no))
    family = ((LOAD, 0, 0, ARGUMENTS), (EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, no))
    call("socketpair", *family, *one_of(1, STREAMS, ALLOW, no))
    call("sendto", *nothing_at(4, no))  # without an address it is `send`
    if read_only:
        call("open", *only(1, ANY_BIT, WRITES, no, ALLOW))
        call("openat", *only(2, ANY_BIT, WRITES, no, ALLOW))
        call("openat2", (RETURN, 0, 0, unknown))
    return [*steps, (RETURN, 0, 0, ALLOW)]
