"""cannsim is a package of its own: found by its installation, without a line of ascendchat, and built when needed."""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

import cannsim
from cannsim import __main__ as command
from cannsim import build, explain, suites, trace

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted(cannsim.ROOT.glob("*.py"))
with_libraries = pytest.mark.skipif(not cannsim.built(), reason="make cannsim has built no libraries")


def test_in_a_clone_the_installed_package_wins_over_the_folder_of_the_same_name() -> None:
    for code in ("import cannsim; print(cannsim.__file__)", "from cannsim import __main__ as m; print(m.__file__)"):
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()).parent.samefile(cannsim.ROOT)
    assert not (REPOSITORY / "cannsim" / "__init__.py").exists(), "the folder of the project is no package"


def test_it_imports_nothing_of_ascendchat_and_keeps_to_its_size() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(?:import|from) ascendchat\b", text, re.M), path
        assert ast.get_docstring(ast.parse(text)), f"{path} opens with what it is for"
        assert len(text.splitlines()) <= 400, path


FAKE_COMPILER = """#!/bin/sh
# Stands in for g++, whose work takes minutes: makes the file behind -o, and writes down its name.
[ -e "$(dirname "$0")/broken" ] && { echo "x.cpp:1: error: this is no C++"; exit 1; }
while [ "$1" != -o ]; do shift; done
echo "$2" >> "$(dirname "$0")/compiled"; echo x > "$2"
"""


@dataclass
class Installed:
    """A copy of the package as it lies in site-packages: no clone, no build. There are spaces in its paths."""

    folder: Path  # the compiler is beside it

    def build(self, *options: str, **env: str) -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("CANNSIM_")}
        variables |= {"PYTHONPATH": str(self.folder / "site"), "CANNSIM_CACHE": str(self.folder / "cache")}
        variables |= {"CXX": str(self.folder.parent / "g++")} | env
        command = [sys.executable, *options, "-m", "cannsim", "build"]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def compiled(self) -> list[str]:
        return (self.folder.parent / "compiled").read_text().splitlines()


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    """The package as pip leaves it, with a compiler that writes down what it is asked for."""
    ignored = shutil.ignore_patterns("build", "__pycache__")
    shutil.copytree(cannsim.ROOT, tmp_path / "my project" / "site" / "cannsim", ignore=ignored)
    (tmp_path / "g++").write_text(FAKE_COMPILER)
    (tmp_path / "g++").chmod(0o755)
    return Installed(tmp_path / "my project")


linux = pytest.mark.skipif(sys.platform != "linux", reason="torch_npu and cannsim run on Linux")


@linux
@pytest.mark.slow
def test_two_first_uses_build_once_and_a_third_builds_nothing(installed: Installed) -> None:
    first, second = installed.build(), installed.build()
    outputs = [process.communicate(timeout=300) for process in (first, second)]
    folders = {out.strip() for out, _ in outputs}
    assert len(folders) == 1, outputs
    assert first.returncode == second.returncode == 0
    assert sum("building the simulated CANN for torch" in err for _, err in outputs) == 1
    (folder,) = (Path(name) for name in folders)
    assert folder.parent == installed.folder / "cache"
    assert {"libascendcl.so", "libhccl.so", "libopapi.so"} <= {path.name for path in (folder / "lib64").iterdir()}
    assert not [*folder.rglob("*.o"), *folder.rglob("*.gch")], "only what is needed to run is kept"
    compiled = installed.compiled()
    assert len(compiled) == len(set(compiled)), "nothing was compiled twice"
    assert installed.build().communicate(timeout=300) == (f"{folder}\n", "")
    assert installed.compiled() == compiled


@linux
def test_in_a_clone_a_build_for_other_versions_is_left_alone(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects look new to make, and were compiled against other headers."""
    monkeypatch.setattr(build, "ROOT", installed.folder / "site" / "cannsim")
    monkeypatch.setenv("CANNSIM_CACHE", str(installed.folder / "cache"))
    monkeypatch.delenv("CANNSIM_HOME", raising=False)
    source, before = build.ROOT / "src" / "runtime" / "config.cpp", build.key.__wrapped__()
    source.write_text(source.read_text() + "// changed\n")
    assert build.key.__wrapped__() != before, "other sources, another build"
    beside, cached = build.ROOT / "build", installed.folder / "cache" / build.key()
    (installed.folder / "site" / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert build.home() == cached, "a wheel has left its own file in site-packages: this is no clone"
    shutil.copy(cannsim.ROOT.parent / "pyproject.toml", installed.folder / "site")
    assert build.home() == beside
    beside.mkdir()
    (beside / "key").write_text(build.key().rpartition("-")[0] + "-000000000000")
    assert build.home() == beside, "other sources: make compiles what changed"
    (beside / "key").write_text("torch2.1.0-npu2.1.0-x86_64-libc2.36-000000000000")
    assert build.home() == cached
    (beside / "key").write_text(build.key())
    assert build.home() == beside


@linux
def test_a_torch_below_a_folder_with_a_space_is_found_by_the_compiler() -> None:
    folders = {name: f"/home/my user/{name}" for name in ("torch", "npu")}
    given = [f"{name}={folder}" for name, folder in folders.items()]
    command = ["make", "-n", "-B", "-C", cannsim.ROOT, f"PYTHON={sys.executable}", *given, "BUILD=/no"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = [word for line in done.stdout.splitlines() if " -c src/ops/" in line for word in shlex.split(line)]
    for folder in folders.values():
        assert [word for word in words if word.startswith(f"{folder}/include")]


@linux
def test_libraries_in_use_that_do_not_fit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CANNSIM_HOME of a shell that was prepared before another torch was installed, or the cache emptied."""
    monkeypatch.setenv("CANNSIM_HOME", str(tmp_path))
    with pytest.raises(build.CannotBuild, match=r"holds no libraries; type: unset CANNSIM_HOME"):
        build.ensure()
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    assert build.ensure() == tmp_path, "made by hand: it has no key"
    (tmp_path / "key").write_text(build.key().rpartition("-")[0] + "-000000000000")
    assert build.ensure() == tmp_path, "the same versions"
    (tmp_path / "key").write_text("torch2.1.0-npu2.1.0-x86_64-libc2.36-000000000000")
    with pytest.raises(build.CannotBuild, match=r"was built for torch2\.1\.0-npu2\.1\.0.*; type: unset CANNSIM_HOME"):
        build.ensure()


@linux
def test_env_sh_takes_the_build_of_the_python_and_not_any_that_lies_there(tmp_path: Path) -> None:
    """A python3 that says where its libraries are; the one of the shell before is not asked."""
    (tmp_path / "cannsim").mkdir()
    shutil.copy(cannsim.ROOT / "env.sh", tmp_path / "cannsim")
    (tmp_path / "cannsim" / "build").mkdir()
    (tmp_path / "cannsim" / "build" / "key").write_text("torch2.1.0")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    variables = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CANNSIM_HOME": "/before"}

    def home(script: str) -> tuple[str, str]:
        python.write_text(script)
        python.chmod(0o755)
        command = ["bash", "-c", f". '{tmp_path}/cannsim/env.sh' && echo $CANNSIM_HOME"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        return done.stdout.strip(), done.stderr

    assert home('#!/bin/sh\necho "/fits$CANNSIM_HOME"\n') == ("/fits", "")
    taken, said = home("#!/bin/sh\nexit 2\n")
    assert taken == f"{tmp_path}/cannsim/build"
    assert "is taken, which was built for torch2.1.0" in said


COUNTS_SIGNALS = """
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda *_: (got.append(2), print("interrupted", flush=True)))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + len(got)))
print("ready", flush=True)
while True:
    time.sleep(0.05)  # pause() would miss a signal that comes just before it
"""


@linux
def test_a_ctrl_c_reaches_the_command_once_and_other_signals_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    monkeypatch.setenv("CANNSIM_HOME", str(tmp_path))
    keyboard, terminal = os.openpty()
    words = [sys.executable, "-m", "cannsim", "run", "--", sys.executable, "-c", COUNTS_SIGNALS]
    with subprocess.Popen(
        words,
        stdin=terminal,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGSTOP)  # two signals at the same time would be one
        os.write(keyboard, b"\x03")
        assert process.stdout.readline() == b"interrupted\n"
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(60) == 41, "two: the second one came from us"
    os.close(keyboard)
    os.close(terminal)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CANNSIM_DEVICES", "65", "CANNSIM_DEVICES=65 is not a number of NPUs from 0 to 64"),
        ("CANNSIM_MEMORY_GB", "64GB", "CANNSIM_MEMORY_GB=64GB is not a number"),
        ("CANNSIM_PROCESSES_PER_DEVICE", "0", "CANNSIM_PROCESSES_PER_DEVICE=0 is not a number of processes above 0"),
        ("CANNSIM_HARDWARE", "wrong-reduce,nan-grad", "CANNSIM_HARDWARE=nan-grad is not one of mask-past-512, "),
        ("CANNSIM_FAULT", "aclInit:1:507015@one", "CANNSIM_FAULT: cannot read 'aclInit:1:507015@one'"),
        ("CANNSIM_DEVICES", "2", ""),
    ],
)
@with_libraries
def test_a_variable_that_cannot_be_meant_ends_the_process(name: str, value: str, said: str) -> None:
    """Taken as 0, or ignored, it would be a test that tests nothing."""
    code = (
        "import ctypes; acl = ctypes.CDLL('libascendcl.so'); count = ctypes.c_uint32(); free = ctypes.c_size_t()\n"
        "acl.aclInit(None), acl.aclrtGetDeviceCount(ctypes.byref(count)), acl.aclrtSetDevice(0)\n"
        "acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(ctypes.c_size_t()))\n"
    )
    environment = cannsim.environment() | {name: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if said else 0), done
    assert done.stderr.startswith(f"cannsim: {said}") if said else not done.stderr


def test_a_fault_that_cannot_be_read_is_told_and_does_not_end_the_process() -> None:
    for rule in ("aclnnAdd:1:hnag", "aclnnAdd:0:507015", "aclnnAdd:1", "aclnnAdd:1:507015@one"):
        with pytest.raises(ValueError, match="cannot read the fault"):
            cannsim.set_faults(rule)


def test_suites_without_a_test_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suites.main([str(tmp_path)]) == 2
    assert f"cannsim: no test_*.py in {tmp_path}; name a folder that has some" in capsys.readouterr().err


def test_a_trace_is_read_without_a_line_that_was_cut_short(tmp_path: Path) -> None:
    line = '{"seconds": 1, "pid": 7, "rank": -1, "thread": 7, "device": 0, "name": "aclnnAdd", "call": 1}\n'
    (tmp_path / "lines").write_text(f'{line}{{"seconds": 2, "pi\n{line}')
    assert len(trace.read(tmp_path / "lines")) == 2
    assert command.counted(tmp_path / "lines") == 'cannsim: 2 launches: {"aclnnAdd": 2}'


@linux
@pytest.mark.parametrize("lack", ["compiler", "make", "torch", "C++"])
def test_what_a_build_lacks_is_one_sentence_with_the_next_step(installed: Installed, lack: str) -> None:
    if lack == "C++":
        (installed.folder.parent / "broken").touch()
    process = {
        "compiler": lambda: installed.build(CXX="no-such-compiler -O1"),
        "make": lambda: installed.build(PATH=str(installed.folder)),
        "torch": lambda: installed.build("-S"),
        "C++": installed.build,
    }[lack]()
    out, err = process.communicate(timeout=300)
    *before, last = err.splitlines()
    expected = {
        "compiler": "cannsim: the C++ compiler no-such-compiler was not found; install it",
        "make": "cannsim: make was not found; install it",
        "torch": f"cannsim: torch is not installed in {sys.executable}; type: pip install",
        "C++": "cannsim: the build failed: x.cpp:1: error: this is no C++; the whole output is in ",
    }
    assert (process.returncode, out) == (2, ""), err
    assert last.startswith(expected[lack]), err
    assert len(before) == (1 if lack == "C++" else 0), "one sentence when it begins to build, no traceback"


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("aclnnAdd", ["aclnnAdd is simulated in src/ops/binary.cpp; it takes (tensor, tensor, scalar, tensor)"]),
        (
            "aclnnMatmulV9GetWorkspaceSize not in libopapi.so",
            ["aclnnMatmulV9 is not simulated. Simulated: aclnnMatmul"],
        ),
        ("EZ3002: Optype [Identity] of Ops kernel", ["Identity is an operator of the older", "EZ3002: the operator"]),
        ("The error code is 507048\nEI0002: The wait", ["507048: a collective waited", "EI0002: a collective waited"]),
        ("call of rtKernelLaunch failed", ["rtKernelLaunch is not supported"]),
        ("error code 507054", ["507054: Inner Error! ...: hbm Multi-bit ECC error."]),
        ("lstm", ["aten::lstm needs an aclnn operator that is not simulated; with CANNSIM_BOXED=1"]),
        ("all is well", []),
    ],
)
def test_explain_says_what_is_refused_and_what_would_be_needed(text: str, answers: list[str]) -> None:
    given = explain.explain(text).splitlines()
    assert len(given) == len(answers)
    assert all(line.startswith(answer) for line, answer in zip(given, answers)), given


def test_every_code_that_explain_knows_by_heart_has_a_sentence_of_the_runtime() -> None:
    assert set(explain.CODES) - {"EZ3002", "EI0005"} <= set(explain.sentences())


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["run"], "cannsim: no command given; type: cannsim run -- COMMAND"),
        (["run", "--devices", "65", "--", "true"], "argument --devices: 65 is no number of NPUs from 0 to 64"),
        (["run", "--chip", "A100", "--", "true"], "argument --chip: A100 is not known; take one of Ascend910A, "),
        (["run", "--processes-per-device", "0", "--", "true"], "--processes-per-device: 0 is no number of processes"),
        (["trace", "--memory-gb", "0", "--", "true"], "argument --memory-gb: 0 is no number of GiB above 0"),
        pytest.param(
            ["trace", "-o", "/", "--", "true"], "cannsim: -o / cannot be written (Is a dir", marks=with_libraries
        ),
    ],
)
def test_wrong_options_are_told_in_a_sentence(
    arguments: list[str], answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cannsim", *arguments])
    try:
        status = command.main()
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert answer in capsys.readouterr().err.splitlines()[-1]


def test_every_variable_that_the_sources_read_is_in_the_readme() -> None:
    sources = [*cannsim.ROOT.glob("src/*/*.cpp"), *SOURCES, cannsim.ROOT / "npu-smi"]
    read = {name for path in sources for name in re.findall(r'"(CANNSIM_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    told = set(re.findall(r"CANNSIM_[A-Z_]+", (REPOSITORY / "cannsim" / "README.md").read_text(encoding="utf-8")))
    inner = {"CANNSIM_HOME", "CANNSIM_PYTEST_REPORTS", "CANNSIM_PYTEST_MACHINE"}  # set by cannsim for itself
    assert read - inner <= told
