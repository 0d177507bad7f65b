"""Runs one untrusted program and watches it: the process between the evaluator and the program.

    python -I -S -B inside.py < order.json > result.json       # started by program.py, never by hand

This file stands alone: only the standard library, and none of our modules. The order says which layers to use; a layer
that was ordered and cannot be had ends the run with a message, never without it.

evaluator -> watcher (this process: clock, output) -> init (first of its process namespace) -> the program
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import struct
import sys
import time
from typing import Any, NoReturn

try:
    import ctypes
except ImportError:  # a Python built without it still has the limits
    ctypes = None  # type: ignore[assignment]

Order = dict[str, Any]

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MOUNT_FLAGS = {
    8: MS_NOEXEC,
    1024: 1 << 10,
    2048: 1 << 11,
    4096: 1 << 21,
}  # as statvfs names them: as mount does; no access times
NEW_NAMESPACES = 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # host name, message queues, processes, network
CLONE_NEWNS, CLONE_NEWUSER, MNT_DETACH = 0x00020000, 0x10000000, 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # system calls, on every processor
# Rights over files that the first five versions of landlock know, each more than the one before.
LANDLOCK_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
LANDLOCK_READ, LANDLOCK_OF_A_FILE = 0b1101, 0b1100000000000111  # execute, read files and folders; what files have
LANDLOCK_DEVICES = 1 << 6 | 1 << 11  # make a device
LANDLOCK_TCP, LANDLOCK_SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
INNER_USER = 1000  # the program's number inside a user namespace
OUTER_USER = 2_000_000_000  # and without one, when we are root: nobody has it, each run its own
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf.d")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
CODE_FD, DONE_FD = 3, 4

# The program runs as __main__ of a fresh interpreter, behind what was ordered to run first, whose exit is ignored.
# After its last line a secret word is written, which the program was not given. So leaving early, with any exit code,
# does not count as reaching the end. An answer may look for that word, or for a way around its tests, so
# - the steps stand in an iterator that no frame names, and what runs them is C or has nothing to find;
# - tests are compiled before the answer runs, and have a copy of the builtins as they were;
# - what would show that iterator or the memory, or lets a function skip lines of its caller, is refused to answers by
#   an audit hook, which nothing can take away and no name leads to.
BOOT = f"""
def start():
    import builtins, functools, os, sys, types
    os.environ.pop("LD_LIBRARY_PATH", None)
    with open({CODE_FD}, encoding="utf-8", newline="") as file:
        word, letters = file.readline().split()
        first, code = file.read(int(letters)), file.read()
    main = types.ModuleType("answer")
    names, partial = main.__dict__, functools.partial
    names["__builtins__"] = builtins
    sys.modules["__main__"] = sys.modules["answer"] = main
    sys.argv[:] = ["program"]
    steps = [
        partial(until_exit, partial(exec, compile(first, "<program>", "exec"), names)),
        partial(names.update, __name__="__main__", __builtins__=dict(vars(builtins)) if first else builtins),
        partial(exec, compile(code, "<program>", "exec"), names),
        partial(os.write, {DONE_FD}, word.encode()),
    ]
    def settrace(function):
        if function is not None:  # doctest switches it off
            raise PermissionError("sys.settrace is refused to an answer")
    refused = "_ctypes", "_interpreters", "_test", "_xxsubinterpreters"
    files = (str, str.endswith, "mem"), (bytes, bytes.endswith, b"mem")  # /proc/self/mem, and relative to it
    def reads_memory(path, files=files, kind_of=type, below=issubclass, number=int):
        for kind, ends, name in files:
            if below(kind_of(path), kind):
                return ends(path, name)
        return not below(kind_of(path), number)  # another object may say another name when it is asked again
    own = frozenset(path for path in sys.path if path.endswith("lib-dynload"))  # others, as numpy, read any memory
    def refuse(event, arguments, split=str.rpartition, begins=str.startswith, refused=refused, own=own):
        if (
            event in {{"gc.get_objects", "gc.get_referents", "gc.get_referrers", "sys.settrace"}}
            or begins(event, ("ctypes.", "sys.monitoring.", "cpython.PyInterpreterState_New"))
            or event == "import" and begins(split(arguments[0], ".")[2], refused)
            or event == "import" and arguments[1] is not None and split(arguments[1], "/")[0] not in own
            or event == "open" and reads_memory(arguments[0])
        ):
            raise (ImportError if event == "import" else PermissionError)(event + " is refused to an answer")
    if first:
        sys.settrace = settrace
        sys.addaudithook(refuse)
    return iter(steps)
def until_exit(run):
    try:
        run()
    except SystemExit:
        pass
for step in start():
    step()
"""


class LayerUnavailable(Exception):
    """A layer that was ordered cannot be had."""


def libc() -> Any:
    if ctypes is None:
        raise LayerUnavailable("this Python was built without ctypes")
    return ctypes.CDLL(None, use_errno=True)


def check_result(result: int, what: str) -> None:
    if result != 0:
        raise LayerUnavailable(f"{what}: {os.strerror(ctypes.get_errno())}")


def kill_with_parent() -> None:
    """Die with the parent: on Linux by the kernel; elsewhere evaluator and watcher kill what they have started."""
    if sys.platform == "linux":
        with contextlib.suppress(LayerUnavailable):
            check_result(libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with the parent")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [text.encode() for text in (source, target, kind)]
    check_result(libc().mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def leave_namespaces() -> None:
    """Leave the machine's network, processes and message queues. Without root this needs a user namespace first."""
    user, group = os.geteuid(), os.getegid()
    if user != 0:
        check_result(libc().unshare(CLONE_NEWUSER), "user namespace")
        maps = {"setgroups": "deny", "uid_map": f"{INNER_USER} {user} 1", "gid_map": f"{INNER_USER} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check_result(libc().unshare(NEW_NAMESPACES), "namespaces")


def bind(source: str, root: str) -> None:
    """Show a folder or file of the machine at the same place below `root`, read-only."""
    target = root + source
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    try:
        mount(source, target, "", MS_BIND)
    except LayerUnavailable:  # in a user namespace, what is mounted below must stay where it is
        mount(source, target, "", MS_BIND | MS_REC)
    present = os.statvfs(target).f_flag  # those that a user namespace may not take away
    flags = sum(flag for bit, flag in MOUNT_FLAGS.items() if present & bit)
    device = source in DEVICES
    mount("", target, "", MS_REMOUNT | MS_BIND | MS_NOSUID | flags | (0 if device else MS_RDONLY | MS_NODEV))


def own_root(order: Order, user: int) -> None:
    """Make a root folder of Python, its libraries, four devices and an empty /tmp, and nothing else; enter it."""
    root = order["folder"]
    check_result(libc().unshare(CLONE_NEWNS), "mount namespace")  # here: the watcher still needs the machine's /proc
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    os.mkdir(f"{root}/tmp")  # before the others, for Python may lie below the machine's /tmp
    owned = f"size={order['disk']},nr_inodes=4096,mode=0700,uid={user},gid={user}"
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, owned)
    shown: list[str] = []
    for source in (*SYSTEM, *order["python_folders"]):
        inside = any(source.startswith(before + "/") and not os.path.islink(before) for before in shown)
        if os.path.lexists(source) and not inside:
            bind(source, root)
            shown.append(source)
    for device in DEVICES:
        bind(device, root)
    os.chdir(root)
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise LayerUnavailable("own root folder: not known for this processor")
    check_result(libc().syscall(number, b".", b"."), "pivot_root")
    check_result(libc().umount2(b".", MNT_DETACH), "leave the old root")
    mount("", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/tmp")


def write_files(order: Order, user: int) -> None:
    """Write the files of the order into the working folder."""
    for name, text in order["files"].items():
        with open(name, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        if os.geteuid() == 0:
            os.chown(name, user, user)


def landlock(order: Order) -> None:
    """Hide all files but Python, its libraries and four devices, which can be read, and the program's own folder. This
    needs no rights, so it works where namespaces are forbidden."""

    def call(number: int, *arguments: Any) -> int:
        result: int = libc().syscall(number, *arguments)
        if result < 0:
            raise LayerUnavailable(f"landlock: {os.strerror(ctypes.get_errno())}")
        return result

    version = call(LANDLOCK_CREATE, None, 0, 1)
    rights = LANDLOCK_RIGHTS[min(version, max(LANDLOCK_RIGHTS))]
    rules = struct.pack("QQQ", rights, LANDLOCK_TCP, LANDLOCK_SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call(LANDLOCK_CREATE, rules, len(rules), 0)
    allowed = dict.fromkeys((*SYSTEM, *order["python_folders"]), LANDLOCK_READ)
    allowed.update(dict.fromkeys(DEVICES, LANDLOCK_READ | 0b10))  # and write
    allowed[order["folder"]] = rights & ~LANDLOCK_DEVICES
    for path, some in allowed.items():
        if os.path.exists(path):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            wanted = some & rights & (~0 if os.path.isdir(path) else LANDLOCK_OF_A_FILE)
            call(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", wanted, place), 0)
            os.close(place)
    call(LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def limit(order: Order, alone: bool) -> None:
    """Set hard limits. `alone`: no other process has our user number, so the number of processes can be limited too."""
    seconds = int(order["seconds"]) + 2
    wanted = {
        **dict.fromkeys(("RLIMIT_AS", "RLIMIT_DATA"), order["memory"]),
        **dict.fromkeys(("RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"), 0),
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": order["disk"],
        "RLIMIT_NOFILE": order["open_files"],
    }
    if alone:
        wanted["RLIMIT_NPROC"] = order["processes"]
    for name, most in wanted.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            with contextlib.suppress(ValueError, OSError):  # macOS refuses some; the evaluator tests what holds
                resource.setrlimit(kind, (most, most))


def forbid(instructions: list[list[int]]) -> None:
    """Hand the filter of system calls to the kernel; it holds for this process and all it starts, for ever."""
    own = os.getpid()
    packed = b"".join(struct.pack("HBBI", code, jt, jf, own if k == -1 else k) for code, jt, jf, k in instructions)
    steps = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    whole = Program(len(instructions), ctypes.cast(steps, ctypes.c_void_p))
    check_result(libc().prctl(PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0), "seccomp")


def become_program(order: Order, user: int, fds: dict[str, int]) -> NoReturn:
    """Give up all rights, then become a fresh Python that runs the program."""
    layers, linux = order["layers"], sys.platform == "linux"
    os.setsid()
    for number, name in enumerate(("stdin", "stdout", "stderr", "code", "done")):
        os.dup2(fds[name], number)
    limit(order, alone=linux and ("user" in layers or ("namespaces" in layers and os.geteuid() != 0)))
    if "user" in layers:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kill_with_parent()
    if linux and (layers or ctypes is not None):
        check_result(libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    if "landlock" in layers:
        landlock(order)
    os.closerange(DONE_FD + 1, 4096)
    if "seccomp" in layers:
        forbid(order["filter"])
    here = os.getcwd()
    environment = {"HOME": here, "TMPDIR": here, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    if order["libraries"]:  # for the loader, which may find libpython only so; BOOT takes it away again
        environment["LD_LIBRARY_PATH"] = order["libraries"]
    os.execve(order["python"], ["python", "-I", "-S", "-B", "-X", "utf8", "-c", BOOT], environment)


def start_program(order: Order, fds: dict[str, int]) -> NoReturn:
    """Prepare the folder, start the program, wait for it and report its end; the namespace ends with this process."""
    user = OUTER_USER + order["number"] if "user" in order["layers"] else os.geteuid()
    report = fds["report"]
    try:
        kill_with_parent()
        if "namespaces" in order["layers"]:
            own_root(order, user)
        else:
            os.chdir(order["folder"])
            if "user" in order["layers"]:
                os.chown(".", user, user)
        write_files(order, user)
        program = os.fork()
        if program == 0:
            try:
                become_program(order, user, fds)
            except (OSError, LayerUnavailable, ValueError) as error:
                os.write(DONE_FD, f"!{error}".encode())
                os._exit(126)
        for name in ("stdin", "stdout", "stderr", "code", "done"):
            os.close(fds[name])
        os.write(report, json.dumps({"program": program}).encode() + b"\n")
        _, status, usage = os.wait4(program, 0)
        ended = {"status": status, "cpu": usage.ru_utime + usage.ru_stime}
        os.write(report, json.dumps(ended).encode() + b"\n")
        os._exit(0)
    except (OSError, LayerUnavailable, ValueError) as error:
        os.write(report, json.dumps({"setup": str(error)}).encode() + b"\n")
        os._exit(1)


def descendants() -> list[int]:
    """Find the processes whose parent we are: orphans come to us."""
    children = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    children.append(int(name))
    return children


def end_everything(first: int, program: int) -> None:
    """Kill init, the program's group, and on Linux whatever was orphaned to us, until nothing is left."""
    for number, kill in ((first, os.kill), (program, os.killpg)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number > 0:
                kill(number, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(first, 0)
    until = time.monotonic() + 2.0
    while sys.platform == "linux" and (left := descendants()) and time.monotonic() < until:
        for number in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(number, os.WNOHANG)
        time.sleep(0.001)


def collect_output(order: Order, first: int, streams: dict[str, int], stdin: int) -> dict[str, Any]:
    """Read the output of the program until it ends, the time is up or it is too much; then end everything."""
    began, most = time.monotonic(), order["output"]
    output: dict[str, bytearray] = {name: bytearray() for name in streams}
    unsent = memoryview(order["stdin"].encode(errors="replace"))
    stopped = ""
    with selectors.DefaultSelector() as ready:
        for name, fd in streams.items():
            os.set_blocking(fd, False)
            ready.register(fd, selectors.EVENT_READ, name)
        if len(unsent):
            os.set_blocking(stdin, False)
            ready.register(stdin, selectors.EVENT_WRITE, "stdin")
        else:
            os.close(stdin)
        ended = 0.0
        while ready.get_map() and not stopped:
            left = began + order["seconds"] - time.monotonic()
            if left <= 0 or (ended and time.monotonic() > ended + 0.2):  # an orphan may hold the pipes open
                stopped = "" if ended else "time"
                break
            for key, _ in ready.select(min(left, 0.05) if ended else left):
                if key.data == "stdin":
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:65536]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not len(unsent):
                        ready.unregister(key.fd)
                        os.close(key.fd)
                    continue
                piece = os.read(key.fd, 65536)
                output[key.data] += piece
                if not piece:
                    ready.unregister(key.fd)
                    ended = ended or (time.monotonic() if key.data == "report" else 0.0)
                elif len(output[key.data]) > most:
                    stopped = "output"
    report: dict[str, Any] = {}
    for line in output.pop("report").splitlines():
        report.update(json.loads(line))
    end_everything(first, report.get("program", 0) if "namespaces" not in order["layers"] else 0)
    texts = {name: bytes(text[:most]).decode("utf-8", "replace") for name, text in output.items()}
    return {**texts, **report, "stopped": stopped, "seconds": time.monotonic() - began}


def main() -> int:
    order: Order = json.load(sys.stdin.buffer)
    kill_with_parent()
    if sys.platform == "linux" and ctypes is not None:
        libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    inner: dict[str, int] = {}
    outer: dict[str, int] = {}
    for name in ("stdin", "code"):
        inner[name], outer[name] = os.pipe()
    for name in ("stdout", "stderr", "done", "report"):
        outer[name], inner[name] = os.pipe()
    for name, fd in list(inner.items()):  # out of the way of the numbers the program will have
        inner[name] = fd if fd > 20 else _above(fd)
    try:
        if "namespaces" in order["layers"]:
            leave_namespaces()
        first = os.fork()
    except (OSError, LayerUnavailable) as error:
        print(json.dumps({"setup": str(error)}))
        return 0
    if first == 0:
        for fd in outer.values():
            os.close(fd)
        start_program(order, inner)
    for fd in inner.values():
        os.close(fd)
    with contextlib.suppress(BrokenPipeError), os.fdopen(outer["code"], "wb") as file:
        text = f"{order['word']} {len(order['first'])}\n{order['first']}{order['code']}"
        file.write(text.encode(errors="replace"))
    report = collect_output(
        order, first, {name: outer[name] for name in ("stdout", "stderr", "done", "report")}, outer["stdin"]
    )
    print(json.dumps(report))
    return 0


def _above(fd: int) -> int:
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 21)
    os.close(fd)
    return moved


if __name__ == "__main__":
    sys.exit(main())
