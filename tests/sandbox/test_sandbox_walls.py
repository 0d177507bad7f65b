"""The sandbox: signals that go out by other ways than `kill`, what it knows of itself, and what its Python needs."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiktoken import _tiktoken

from ascendchat.sandbox import inside, seccomp
from ascendchat.sandbox import program as sandbox

LAYERS = sandbox.capabilities()["layers"] if sys.platform == "linux" else []
needs_seccomp = pytest.mark.skipif("seccomp" not in LAYERS, reason="this machine has no seccomp")


# Answers that are wrong, each with a way to pass its tests all the same. `f` shall add one.
CHEATS = {
    "exec": "import builtins\nbuiltins.exec = print",
    "compile": "import builtins\nbuiltins.compile = lambda *a: (lambda: None).__code__",
    "builtins of the tests": "import builtins\ndef f(x):\n    builtins.abs = lambda x: 0\n    return 2",
    "the word in a frame": """
import os, sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        isinstance(value, (str, bytes)) and len(value) == 32 and os.write(4, os.fsencode(value)) and os._exit(0)
    frame = frame.f_back
f = abs""",
    "the word among all objects": """
import gc, os
for found in gc.get_objects():
    type(found).__name__ == "partial" and found.func is os.write and (found(), os._exit(0))
f = abs""",
    "a jump over the second assert": """
import sys
del sys.modules["sys"]
from sys import settrace
def jump(frame, event, argument):
    if event == "line" and frame.f_lineno == 3:
        frame.f_lineno = 4
    return jump
def f(x):
    sys._getframe(1).f_trace = jump
    settrace(jump)
    return 2""",
    "a jump by what Python 3.12 has beside tracing": """
import sys
def line(code, number):
    frame = sys._getframe(1)
    if code.co_name == "check" and number == 3:
        frame.f_trace, frame.f_lineno = line, 4
def f(x):
    sys.monitoring.use_tool_id(1, "jump")
    sys.monitoring.register_callback(1, sys.monitoring.events.LINE, line)
    sys.monitoring.set_events(1, sys.monitoring.events.LINE)
    return 2""",
    "the memory": """
import importlib.machinery, importlib.util
class Name(str):
    rpartition, startswith = lambda *a: ("", "", ""), lambda *a: False
try:
    path = importlib.util.find_spec("_ctypes").origin
    loader = importlib.machinery.ExtensionFileLoader(Name("_ctypes"), path)
    importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    f = lambda x: x + 1
except ImportError:
    f = abs""",
    "the memory, by a library that Python does not bring": f"""
import importlib.machinery, importlib.util
f = abs
loader = importlib.machinery.ExtensionFileLoader("_tiktoken", {_tiktoken.__file__!r})
try:
    importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    f = lambda x: x + 1
except ImportError:
    pass""",
    "the memory as a file": """
import os, re
from io import FileIO
class Name(str):
    endswith, __eq__, __hash__ = lambda *a: False, lambda *a: False, str.__hash__
class Later:
    __class__, __fspath__ = int, lambda self: "mem"
def words(opened):
    for line in open("/proc/self/maps"):
        low, high = (int(number, 16) for number in line.split()[0].split("-"))
        if " rw" in line:
            opened.seek(low)
            yield from re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", opened.read(high - low))
f = abs
os.chdir("/proc/self")
for name in (Name("mem"), b"/proc/self/mem", Later()):
    try:
        opened = FileIO(name)
    except PermissionError:
        continue
    os.write(4, next(words(opened)))
    os._exit(0)""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_wrong_answer_passes_its_tests_by_no_trick_of_python(cheat: str) -> None:
    tests = "def check(f):\n    assert abs(f(1) - 2) < 1e-6\n    assert abs(f(3) - 4) < 1e-6\n    return\ncheck(f)"
    result = sandbox.run(tests, first=CHEATS[cheat], layers=())
    assert (result.ok, result.reason) == (False, "error"), result


def test_an_answer_may_use_what_python_itself_uses() -> None:
    answer = """
import collections, dataclasses, doctest, enum, functools, gc, pickle, traceback, typing
P = collections.namedtuple("P", "x")
def f(x):
    \"\"\"
    >>> f(1)
    2
    \"\"\"
    gc.collect()
    return pickle.loads(pickle.dumps(P(x + 1))).x
doctest.testmod()"""
    assert (
        sandbox.run("assert f(3) == 4 and f.__doc__\nprint(__name__, abs(-1))", first=answer).stdout == "__main__ 1\n"
    )


def without_namespaces(code: str, *, layers: tuple[str, ...], **way: Any) -> sandbox.ProgramResult:
    """`sandbox.run` where the kernel forbids them, as in many containers."""
    forbidden = sandbox.ProgramResult(False, "", "", "sandbox", "namespaces: Operation not permitted")
    return forbidden if "namespaces" in layers else REAL_RUN(code, layers=layers, **way)


REAL_RUN = sandbox.run
needs_landlock = pytest.mark.skipif(
    sys.platform != "linux" or not sandbox.run("pass", layers=("landlock",)).ok, reason="this kernel has no landlock"
)


@needs_seccomp
@needs_landlock
def test_landlock_holds_reading_where_namespaces_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run", without_namespaces)
    found = sandbox._try_layers()
    assert (found.layers[:2], found.missing["namespaces"]) == (
        ("landlock", "seccomp"),
        "namespaces: Operation not permitted",
    )
    monkeypatch.setattr(sandbox, "_tried", sandbox._Available(("landlock", "seccomp"), {}, ""))
    assert not [name for name, held in sandbox.capabilities().items() if held is False]


@needs_landlock
def test_landlock_shows_python_and_the_own_folder_and_no_process(tmp_path: Path) -> None:
    code = f"""
import json, os, sqlite3
open("own", "w").write(open("a.txt").read())
open("/dev/null", "w").write("x")
for path in {[str(tmp_path), "/etc/passwd", "/proc/self/mem", f"/proc/{os.getpid()}/environ"]}:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        print("refused", open("own").read())
"""
    result = sandbox.run(code, layers=("landlock",), files={"a.txt": "here"})
    assert (result.ok, result.stdout) == (True, "refused here\n" * 4), result


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this")
@pytest.mark.parametrize(("version", "bits", "size"), [(1, 13, 8), (2, 14, 8), (3, 15, 8), (4, 15, 16), (9, 16, 24)])
def test_older_kernels_are_asked_for_what_their_landlock_knows(
    version: int, bits: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = []

    def syscall(number: int, *arguments: Any) -> int:
        said.append((number, *arguments))
        asked = number == inside.LANDLOCK_CREATE and arguments[0] is None
        return version if asked else os.open("/dev/null", os.O_RDONLY) if number == inside.LANDLOCK_CREATE else 0

    monkeypatch.setattr(inside, "libc", lambda: SimpleNamespace(syscall=syscall))
    inside.landlock({"python_folders": [sys.prefix], "folder": str(tmp_path)})
    (_, rules, length, _), *added = [call for call in said if call[1:] != (None, 0, 1)]
    assert (int.from_bytes(rules[:8], "little"), len(rules), length) == ((1 << bits) - 1, size, size)
    assert all(int.from_bytes(call[3][:8], "little") < 1 << bits for call in added[:-1])
    assert added[-1][0] == inside.LANDLOCK_RESTRICT


@needs_seccomp
def test_seccomp_alone_lets_no_attribute_of_a_file_be_changed(tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    code = f"""
import ctypes, errno, fcntl, os, struct
held, libc, at = os.open({str(tmp_path / "held")!r}, os.O_RDONLY), ctypes.CDLL(None, use_errno=True), -100
try:
    fcntl.ioctl(held, 0x40086602, struct.pack("l", 0x40))  # chattr +d
except PermissionError:
    print("refused")
name, arguments = ctypes.create_string_buffer(b"user.x"), ctypes.create_string_buffer(64)
print({{errno.errorcode[libc.syscall(number, held, b"", 0x1000, name, arguments, 16) and ctypes.get_errno()]
       for number in range(463, 480)}})
"""
    assert sandbox.run(code, layers=("seccomp",)).stdout == "refused\n{'ENOSYS'}\n"


@needs_seccomp
def test_seccomp_alone_lets_no_signal_out_by_the_owner_of_a_socket() -> None:
    path = Path(__file__).parent / "hostile" / "signal_by_owner.py"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        try:
            told = json.dumps({"parent": victim.pid}) + "\n"
            result = sandbox.run(path.read_text(encoding="utf-8"), stdin=told, layers=("seccomp",))
            time.sleep(0.2)
            assert (result.reason, result.stdout, victim.poll()) == ("", "", None), result
        finally:
            victim.kill()


@needs_seccomp
def test_the_self_test_sees_signals_that_go_out_by_the_owner_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_tried", sandbox._Available(("seccomp",), {}, ""))
    assert sandbox.capabilities()["signals"] is True
    monkeypatch.setattr(seccomp, "OWNERS", ())
    assert sandbox.capabilities()["signals"] is False


@needs_seccomp
def test_with_all_refusals_what_python_itself_needs_still_works() -> None:
    code = """
import asyncio, concurrent.futures, fcntl, os
async def three():
    await asyncio.sleep(0)
    return 3
reading, writing = os.pipe()
os.set_blocking(reading, False)
fcntl.fcntl(writing, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(asyncio.run(three()), os.isatty(1), sum(pool.map(abs, range(4))))
"""
    result = sandbox.run(code)
    assert (result.ok, result.stdout) == (True, "3 False 6\n"), result


def needy_python(folder: Path) -> str:
    """A Python that starts only when LD_LIBRARY_PATH has this folder, as one whose libpython lies there."""
    path = folder / "python"
    path.write_text(f"""#!/bin/sh
case ":$LD_LIBRARY_PATH:" in *:{folder}:*) ;; *) echo "libpython: cannot open shared object" >&2; exit 127;; esac
exec {os.path.realpath(sys.executable)} "$@"
""")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_needs_its_library_path_runs_and_the_program_does_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", needy_python(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"relative::{tmp_path}")
    result = sandbox.run("import os\nprint(sorted(os.environ))", layers=())
    assert (result.ok, "LD_" in result.stdout, "HOME" in result.stdout) == (True, False, True), result


@pytest.mark.skipif("namespaces" not in LAYERS, reason="this machine has no namespaces")
def test_libpython_alone_is_shown_of_the_library_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libpython-test.so", "secret"):
        (tmp_path / name).touch()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: "libpython-test.so")
    (other := tmp_path.with_name("other")).mkdir(exist_ok=True)
    (other / "libpython-test.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/no-such-folder:{tmp_path}:{tmp_path.parent}:{other}")
    result = sandbox.run(f"import os\nprint(os.listdir({str(tmp_path)!r}), os.listdir({str(tmp_path.parent)!r}))")
    assert result.stdout == f"['libpython-test.so'] [{tmp_path.name!r}]\n", result
    assert sandbox.run("open('own', 'w').write('x')").ok


@pytest.mark.skipif("namespaces" not in LAYERS, reason="this machine has no namespaces")
def test_a_libpython_among_what_is_shown_anyway_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(sys.executable).resolve()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: path.name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path.parent))
    result = sandbox.run("print(1)")
    assert (result.stdout, result.detail) == ("1\n", "")


def test_a_sandbox_that_runs_nothing_is_told_from_one_with_limits_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sandbox.capabilities()["broken"] == ""
    monkeypatch.setattr(sandbox, "_tried", None)
    real = sandbox.run
    bare = sandbox.ProgramResult(False, "", "", "sandbox", "not here")
    monkeypatch.setattr(sandbox, "run", lambda code, **way: bare if way["layers"] else real(code, **way))
    walls = sandbox._try_layers()
    assert (walls.layers, walls.broken) == ((), "")
    monkeypatch.setattr(sandbox, "run", real)
    monkeypatch.setattr(sandbox, "_tried", None)
    needy = needy_python(tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("LD_LIBRARY_PATH", raising=False)
        patch.setattr(sys, "executable", needy)
        found = sandbox.capabilities()
    assert (found["layers"], found["broken"]) == ([], "libpython: cannot open shared object")
    assert not any(held is True for held in found.values())


@needs_seccomp
def test_seccomp_alone_leaves_one_kind_of_socket_which_reaches_nobody() -> None:
    code = """
import ctypes
libc, ends = ctypes.CDLL(None), (ctypes.c_int * 2)()
for family in range(50):
    for kind in range(1, 11):
        if libc.socket(family, kind, 0) >= 0:
            print("socket", family, kind)
        if libc.socketpair(family, kind, 0, ends) == 0:
            print("pair", family, kind)
            address = ctypes.create_string_buffer(b"\\1\\0\\0other", 110)
            print([call(ends[0], address, 8) for call in (libc.connect, libc.bind)], libc.listen(ends[0], 1))
            print(libc.sendto(ends[0], b"x", 1, 0, address, 8), libc.send(ends[0], b"x", 1, 0))
"""
    assert sandbox.run(code, layers=("seccomp",)).stdout == "pair 1 1\n[-1, -1] -1\n-1 1\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these")
def test_every_attack_of_the_self_test_succeeds_where_nothing_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, said = sandbox.run, []

    def run(code: str, **way: Any) -> sandbox.ProgramResult:
        said.append(real(code, **way))
        return said[-1]

    monkeypatch.setattr(sandbox, "run", run)
    monkeypatch.setattr(sandbox, "_tried", sandbox._Available((), {}, ""))
    found = sandbox.capabilities()
    assert not any(held is True for held in found.values())
    refusals = {danger: result.stdout.count("refused") for danger, result in zip(sandbox.ATTACKS, said)}
    try:
        socket.socket(40, socket.SOCK_STREAM).close()
        without = 0
    except OSError:  # this kernel has no such family
        without = 1
    expected = {**dict.fromkeys(sandbox.ATTACKS, 0), "memory": 1, "network": without}
    assert refusals == expected, "a single process has its limit of memory"


@pytest.mark.skipif("namespaces" not in LAYERS, reason="this machine has no namespaces")
def test_namespaces_alone_do_not_claim_the_network_where_they_do_not_hold_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = tuple(name for name in LAYERS if name != "seccomp")
    monkeypatch.setattr(sandbox, "_tried", sandbox._Available(layers, {}, ""))
    vsock = sandbox.run("import socket\nsocket.socket(40, 1)", layers=layers).ok
    found = sandbox.capabilities()
    assert (found["network"], found["writing"], found["reading"], found["signals"]) == (not vsock, True, True, True)


@needs_seccomp
def test_with_seccomp_alone_the_self_test_claims_all_but_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_tried", sandbox._Available(("seccomp",), {}, ""))
    assert [name for name, held in sandbox.capabilities().items() if held is False] == ["reading"]


def test_seccomp_is_missing_where_its_calls_are_not_known_and_tried_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sandbox, "run", lambda code, **way: sandbox.ProgramResult(True, "here\n", "", ""))
    for machine, known in {"x86_64": True, "aarch64": True, "riscv64": False}.items():
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(sandbox, "_tried", None)
        found = sandbox.capabilities()
        assert ("seccomp" in found["layers"], "seccomp" in found["missing"]) == (known, not known)
        assert known or found["missing"]["seccomp"] == "the system calls of riscv64 are not known to it"
    monkeypatch.setattr(sandbox, "_tried", None)


def test_a_layer_that_cannot_be_set_up_ends_as_a_sentence_whoever_notices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = sandbox.run("print(1)", layers=(), files={"a\0b": "x"})  # the process that prepares the folder
    assert (said.reason, said.detail, said.stdout) == ("sandbox", "embedded null byte", "")
    monkeypatch.setattr(seccomp, "program", lambda *_, **__: [(0xFFFF, 0, 0, 0)])
    if sys.platform == "linux":  # the program's own process
        said = sandbox.run("print(1)", layers=("seccomp",))
        assert (said.reason, said.detail, said.stdout) == ("sandbox", "seccomp: Invalid argument", "")

    def refuse() -> None:
        raise inside.LayerUnavailable("namespaces: Operation not permitted")

    order = {"layers": ["namespaces"]}
    monkeypatch.setattr(inside, "leave_namespaces", refuse)  # the watcher
    for name in ("libc", "kill_with_parent"):
        monkeypatch.setattr(inside, name, lambda: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(order).encode())))
    assert inside.main() == 0
    assert json.loads(capsys.readouterr().out) == {"setup": "namespaces: Operation not permitted"}
    verdict = sandbox._judge({"setup": "namespaces: Operation not permitted", "finished": False})
    assert (verdict.ok, verdict.reason, verdict.detail) == (False, "sandbox", "namespaces: Operation not permitted")


def test_of_no_layer_at_all_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(code: str, *, layers: tuple[str, ...], **_: Any) -> sandbox.ProgramResult:
        return sandbox.ProgramResult(False, "", "", "sandbox", f"no {layers[-1]}" if layers else "nothing runs")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sandbox, "run", run)
    found = sandbox._try_layers()
    assert found.broken == "nothing runs"
    assert found.layers == ()
    assert all(re.match("no |not needed", reason) for reason in found.missing.values())
