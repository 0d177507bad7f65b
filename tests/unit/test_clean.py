"""`ascendchat clean` on real child processes, real shared memory and real files."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendchat.cli import main
from ascendchat.config import home
from ascendchat.device import smi
from ascendchat.doctor import clean, proc
from ascendchat.doctor.clean import Leftover

SLEEP = "import time; print('up', flush=True); time.sleep(120)"
# argv[1] is a file that stands for a device node
HOLD = "import sys; device = open(sys.argv[1]); "
MAPPED = "import mmap, sys; f = open(sys.argv[1], 'r+b'); device = mmap.mmap(f.fileno(), 0); f.close(); "
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for /dev/davinci0."""
    folder = tmp_path / "dev"
    folder.mkdir()
    (folder / "davinci0").write_bytes(b"x" * 4096)
    monkeypatch.setattr(proc, "DEVICE_NODE", re.compile(re.escape(f"{folder}/") + r"davinci\d"))
    return folder / "davinci0"


@pytest.fixture
def start(node: Path) -> Iterator:
    """Start real child processes that hold the device; whatever is left of them ends with the test."""
    children: list[subprocess.Popen[str]] = []

    def one(before: str = HOLD, then: str = SLEEP) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", before + then, str(node)]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        child.stdout.readline()  # its signal handler is installed
        children.append(child)
        return child

    yield one
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def dead_pid() -> int:
    """The number of a process that has just ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture(autouse=True)
def _no_real_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of this machine may be freed by a test: its tools are hidden, and we have our own folder of /dev/shm."""
    monkeypatch.setattr(smi, "EXTRA_PATH", ())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    folder = Path(tempfile.mkdtemp(prefix="ascendchat-tests-", dir="/dev/shm"))
    monkeypatch.setattr(clean, "SHM", folder)
    yield
    shutil.rmtree(folder)


@pytest.fixture
def nvidia_smi(tmp_path: Path):
    """`nvidia_smi([(pid, name), ...])`: a tool on PATH that lists these processes, 1000 MiB each, on GPU 0."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(processes: list[tuple[int, str]]) -> None:
        apps = "".join(f"{pid}, {name}, 1000, GPU-aa\\n" for pid, name in processes)
        gpu = "0, NVIDIA H200, 0, 30, 80.0, 5000, 143771, GPU-aa\\n"
        script = folder / "nvidia-smi"
        script.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) printf "{gpu}";; *) printf "{apps}";; esac\n')
        script.chmod(0o755)

    return make


@pytest.fixture
def npu_smi(tmp_path: Path):
    """`npu_smi(pid, name)`: a tool on PATH whose table has this process on NPU 3, with 61700 MB."""
    folder = tmp_path / "bin"
    folder.mkdir()
    table = (Path(__file__).parent / "smi_samples" / "a2_25.txt").read_text()

    def make(pid: int, name: str) -> None:
        row = next(line for line in table.splitlines() if "576490" in line)
        mine = f"| 3       0                 | {pid:<13} | {name:<24} | 61700                   |"
        lines = [mine if line == row else line for line in table.splitlines() if "576489" not in line]
        script = folder / "npu-smi"
        script.write_text(f"#!{sys.executable}\nprint({chr(10).join(lines)!r})\n")
        script.chmod(0o755)

    return make


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run `ascendchat clean --flags` here: (exit status, what it printed)."""

    def call(*flags: str) -> tuple[int, str]:
        status = main(["clean", "--lang", "en", *flags])
        return status, capsys.readouterr().out

    return call


def name_of(child: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{child.pid}/comm").read_text().strip()


def old(path: Path, hours: float) -> Path:
    moment = time.time() - 3600 * hours
    os.utime(path, (moment, moment))
    return path


def test_without_a_terminal_it_only_lists(nvidia_smi, start, cli) -> None:
    child = start()
    nvidia_smi([(child.pid, name_of(child))])
    part = home() / "data" / "shard.parquet.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 8192)
    old(part, 2)
    status, shown = cli()
    assert status == 0
    assert str(child.pid) in shown
    assert str(part) in shown
    assert "ascendchat clean --yes" in shown
    assert part.exists()
    assert child.poll() is None


def test_yes_ends_own_process_on_the_device_and_says_what_it_freed(nvidia_smi, start, cli) -> None:
    child = start()
    nvidia_smi([(child.pid, name_of(child))])
    status, shown = cli("--yes")
    assert child.wait(timeout=60) == -signal.SIGTERM
    assert "freed 1, 1000 MiB" in shown
    assert status == 0


def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(nvidia_smi, start, cli) -> None:
    child = start(STUBBORN + HOLD)
    nvidia_smi([(child.pid, name_of(child))])
    began = time.monotonic()
    status, _ = cli("--yes", "--grace", "0.7")
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert time.monotonic() - began >= 0.7
    assert status == 0


@pytest.mark.parametrize("name", ["", "python", "python3", "same"])
def test_process_that_only_has_the_listed_pid_and_name_is_left_alone(npu_smi, start, cli, name: str) -> None:
    child = start("")  # in a container: npu-smi means a process of the host
    npu_smi(child.pid, name_of(child) if name == "same" else name)
    status, shown = cli("--yes")
    assert f"pid {child.pid} on device 3" in shown
    assert "has no device open" in shown
    assert "freed" not in shown
    assert status == 0
    assert child.poll() is None


@pytest.mark.parametrize("holding", [HOLD, MAPPED], ids=["open", "mapped"])
@pytest.mark.parametrize("name", ["", "VLLMWorker_TP"])
def test_process_with_the_device_open_is_ended_whatever_its_name(npu_smi, start, cli, holding: str, name: str) -> None:
    child = start(holding)
    npu_smi(child.pid, name)
    _, shown = cli("--yes")
    assert child.wait(timeout=60) == -signal.SIGTERM
    assert "freed 1, 60.3 GiB" in shown


def test_process_that_left_the_device_after_it_was_listed_is_left_alone(npu_smi, start) -> None:
    leaves = "print('up', flush=True); input(); device.close(); print('left', flush=True); input()"
    child = start(HOLD, leaves)
    npu_smi(child.pid, "python")
    (item,) = clean.processes(smi.read())
    assert item.keep == ""
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "left\n"
    assert clean.end_processes([item], grace=0.2).freed == []
    assert child.poll() is None


def test_process_that_leaves_the_device_on_sigterm_may_go_on_without_it(npu_smi, start) -> None:
    leaves = "import signal; signal.signal(signal.SIGTERM, lambda *_: (device.close(), print('left', flush=True))); "
    child = start(leaves + HOLD, SLEEP + "; time.sleep(120)")
    npu_smi(child.pid, "python")
    (item,) = clean.processes(smi.read())
    assert clean.end_processes([item], grace=60).freed == [item]
    assert child.stdout.readline() == "left\n"
    assert child.poll() is None


def test_only_nodes_of_accelerators_count_as_devices() -> None:
    nodes = ["/dev/davinci7", "/dev/davinci112", "/dev/devmm_svm", "/dev/nvidia0", "/dev/nvidia-uvm"]
    others = [
        "/dev/davinci_manager",
        "/dev/nvidiactl",
        "/dev/null",
        "/dev/shm/davinci0",
        "/tmp/dev/davinci0",
        "/dev/nvidia-modeset",
    ]
    assert [bool(proc.DEVICE_NODE.fullmatch(path)) for path in nodes + others] == [True] * 5 + [False] * 6


def test_itself_and_its_parents_are_never_ended(nvidia_smi, node: Path, cli) -> None:
    nvidia_smi([(os.getpid(), Path("/proc/self/comm").read_text().strip())])
    with node.open():
        _, shown = cli("--yes")
    assert "this process or one that started it" in shown
    assert "freed" not in shown


def test_process_of_another_user_is_listed_and_left_alone(
    start, nvidia_smi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = start()
    nvidia_smi([(child.pid, name_of(child))])
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # seen by somebody else
    assert clean.run(clean.CleanConfig(yes=True, lang="en")) == 0
    assert "belongs to another user" in capsys.readouterr().out
    assert child.poll() is None


def test_process_whose_main_thread_ended_first_still_counts_as_alive_and_on_the_device(node: Path) -> None:
    code = HOLD + (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(120,)).start(); "
        "print('up', flush=True); ctypes.CDLL(None).pthread_exit(None)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(node)], stdout=subprocess.PIPE)
    try:
        stat = Path(f"/proc/{child.pid}/stat")
        deadline = time.monotonic() + 60
        while ") Z " not in stat.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ") Z " in stat.read_text()
        assert clean.alive(child.pid)
        assert proc.open_devices(child.pid) == [str(node)]
    finally:
        child.kill()
        child.wait()
    assert not clean.alive(child.pid)


def test_pid_reused_since_it_was_listed_is_left_alone(start) -> None:
    child = start()
    item = Leftover("processes", "python", pid=child.pid, birth="1")  # listed when another process had this pid
    clean.end_processes([item], grace=0.2)
    assert child.poll() is None


def test_shared_memory_of_a_dead_owner_is_freed_and_of_a_live_one_is_not(start, dead_pid: int, cli) -> None:
    child = start()
    stale, used = clean.SHM / f"ascendchat-{dead_pid}-test", clean.SHM / f"ascendchat-{child.pid}-test"
    recent, ancient = clean.SHM / f"torch_{dead_pid}_1_0", clean.SHM / f"torch_{dead_pid}_2_0"
    try:
        for path in (stale, used, recent, ancient):
            path.write_bytes(b"x" * 65536)
        old(ancient, 2)
        _, shown = cli("--yes")
        assert [p.exists() for p in (stale, used, recent, ancient)] == [False, True, True, False]
        assert "freed 2" in shown
    finally:
        for path in (stale, used, recent, ancient):
            path.unlink(missing_ok=True)


def test_shared_memory_that_a_live_process_maps_is_kept(dead_pid: int) -> None:
    path = clean.SHM / f"ascendchat-{dead_pid}-mapped"
    try:
        with path.open("wb+") as stream:
            stream.write(b"x" * 4096)
            stream.flush()
            assert str(path) not in [i.path for i in clean.find_leftovers()]
        assert str(path) in [i.path for i in clean.find_leftovers()]
    finally:
        path.unlink(missing_ok=True)


def test_partial_files_go_when_old_or_their_writer_is_dead(start, dead_pid: int, cli) -> None:
    child = start()
    folder = home() / "data"
    folder.mkdir(parents=True)
    gone = [folder / "a.parquet.part", folder / f"b.json.{dead_pid}.tmp", folder / f"c.bin.tmp-{dead_pid}"]
    kept = [folder / "d.parquet.part", folder / f"e.json.{child.pid}.tmp", folder / "whole.parquet"]
    for path in gone + kept:
        path.write_bytes(b"x" * 5000)
    old(gone[0], 2)
    old(kept[2], 99)
    (folder / "step_000100.tmp").mkdir()
    (folder / "step_000100.tmp" / "model.safetensors").write_bytes(b"x" * 9000)
    old(folder / "step_000100.tmp" / "model.safetensors", 2)
    old(folder / "step_000100.tmp", 2)
    assert cli("--yes")[0] == 0
    assert [p.exists() for p in gone] == [False] * 3
    assert [p.exists() for p in kept] == [True] * 3
    assert not (folder / "step_000100.tmp").exists()


def test_old_partial_file_that_is_open_for_writing_is_kept(start) -> None:
    folder = home() / "data"
    folder.mkdir(parents=True)
    with (folder / "slow.parquet.part").open("wb") as stream:
        old(folder / "slow.parquet.part", 5)
        assert clean.find_leftovers() == []
        stream.write(b"x")


def test_lock_that_is_held_is_kept_and_one_that_nobody_holds_goes(dead_pid: int, cli) -> None:
    home().mkdir(parents=True, exist_ok=True)
    held, free, fresh = home() / "held.lock", home() / "free.lock", home() / "fresh.lock"
    for path in (held, free):
        path.write_text(str(dead_pid))
    fresh.write_text("")
    script = f"import fcntl; f = open({str(held)!r}); fcntl.flock(f, fcntl.LOCK_EX); " + SLEEP
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert clean.is_held(held)
        cli("--yes")
        assert [p.exists() for p in (held, free, fresh)] == [True, False, True]
    finally:
        child.kill()
        child.wait()
    with held.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ours did not take it


def test_what_compilers_keep_is_left_alone() -> None:
    for folder in ("compiled/torch/locks", "data/locks"):
        (home() / folder).mkdir(parents=True)
        (home() / folder / "kernel.lock").write_text("")
        old(home() / folder / "kernel.lock", 5)
    assert [item.path for item in clean.find_leftovers()] == [str(home() / "data/locks/kernel.lock")]


def test_json_lists_sizes_and_frees_nothing_even_with_yes(nvidia_smi, start, cli) -> None:
    child = start()
    nvidia_smi([(child.pid, name_of(child))])
    listed = json.loads(cli("--json", "--yes")[1])
    assert listed["bytes"] == 1000 * 2**20
    (item,) = listed["groups"]["processes"]
    assert (item["pid"], item["devices"], item["keep"]) == (child.pid, [0], "")
    assert child.poll() is None


@pytest.mark.parametrize(("answer", "survives"), [("n", True), ("y", False)])
def test_on_a_terminal_it_asks_and_frees_only_after_yes(answer: str, survives: bool, dead_pid: int) -> None:
    part = home() / f"a.{dead_pid}.part"
    part.write_bytes(b"x" * 4096)
    script = (
        "import sys; from pathlib import Path; from ascendchat.cli import main; from ascendchat.device import smi; "
        f"from ascendchat.doctor import clean; smi.EXTRA_PATH = (); clean.SHM = Path({str(clean.SHM)!r}); "
        "sys.exit(main(['clean', '--lang', 'en']))"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    shown = b""
    deadline = time.monotonic() + 120
    while b"[y/N]" not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096)
    assert b"free 1?" in shown
    os.write(terminal, answer.encode() + b"\n")
    os.waitpid(pid, 0)
    os.close(terminal)
    assert part.exists() is survives
