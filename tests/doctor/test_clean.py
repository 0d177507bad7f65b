"""`ascendchat clean` on real child processes, real shared memory and real files."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from python_script import START

from ascendchat.cli import main
from ascendchat.device import smi
from ascendchat.doctor import clean
from ascendchat.doctor.clean import Leftover
from ascendchat.errors import home

SLEEP = "import time; print('up', flush=True); time.sleep(120)"
# argv[1] is a file that stands for a device node
HOLD = "import sys; device = open(sys.argv[1]); "
MAPPED = "import mmap, sys; f = open(sys.argv[1], 'r+b'); device = mmap.mmap(f.fileno(), 0); f.close(); "
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
Child = subprocess.Popen[str]
Start = Callable[..., Child]
Tool = Callable[[int, str], None]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for /dev/davinci0."""
    folder = tmp_path / "dev"
    folder.mkdir()
    (folder / "davinci0").write_bytes(b"x" * 4096)
    monkeypatch.setattr(clean, "DEVICE_NODE", re.compile(re.escape(f"{folder}/") + r"davinci\d"))
    return folder / "davinci0"


@pytest.fixture
def start(node: Path) -> Iterator[Start]:
    """Start real child processes that hold the device; whatever is left of them ends with the test."""
    children: list[Child] = []

    def one(before: str = HOLD, then: str = SLEEP) -> Child:
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
def npu_smi(tmp_path: Path) -> Tool:
    """`npu_smi(pid, name)`: a tool on PATH whose table has this process on NPU 3, with 61700 MB."""
    table = (Path(__file__).parents[1] / "device" / "smi_samples" / "a2_25.txt").read_text()

    def make(pid: int, name: str) -> None:
        row = next(line for line in table.splitlines() if "576490" in line)
        mine = f"| 3       0                 | {pid:<13} | {name:<24} | 61700                   |"
        lines = [mine if line == row else line for line in table.splitlines() if "576489" not in line]
        script = tmp_path / "bin" / "npu-smi"
        script.parent.mkdir()
        script.write_text(f"{START}print({chr(10).join(lines)!r})\n")
        script.chmod(0o755)

    return make


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `ascendchat clean --flags` here: (exit status, what it printed)."""

    def call(*flags: str) -> tuple[int, str]:
        status = main(["clean", "--lang", "en", *flags])
        return status, capsys.readouterr().out

    return call


def old(path: Path, hours: float) -> Path:
    moment = time.time() - 3600 * hours
    os.utime(path, (moment, moment))
    return path


def test_without_yes_or_with_json_it_only_lists(npu_smi: Tool, start: Start, cli: Command) -> None:
    child = start()
    npu_smi(child.pid, "python")
    part = home() / "data" / "shard.parquet.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 8192)
    old(part, 2)
    status, shown = cli()
    assert status == 0
    assert str(child.pid) in shown
    assert str(part) in shown
    assert "ascendchat clean --yes" in shown
    listed = json.loads(cli("--json", "--yes")[1])
    assert listed["bytes"] >= 61700 * 2**20
    (item,) = listed["groups"]["processes"]
    assert (item["pid"], item["devices"], item["keep"]) == (child.pid, [3], "")
    assert part.exists()
    assert child.poll() is None


@pytest.mark.parametrize(("holding", "name"), [(HOLD, ""), (MAPPED, "VLLMWorker_TP")], ids=["open", "mapped"])
def test_yes_ends_a_process_with_the_device_open_whatever_its_name(
    npu_smi: Tool, start: Start, cli: Command, holding: str, name: str
) -> None:
    child = start(holding)
    npu_smi(child.pid, name)
    status, shown = cli("--yes")
    assert child.wait(timeout=60) == -signal.SIGTERM
    assert "freed 1, 60.3 GiB" in shown
    assert status == 0


def test_process_that_ignores_sigterm_is_killed_after_the_grace_period(
    npu_smi: Tool, start: Start, cli: Command
) -> None:
    child = start(STUBBORN + HOLD)
    npu_smi(child.pid, "python")
    began = time.monotonic()
    status, _ = cli("--yes", "--grace", "0.5")
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert time.monotonic() - began >= 0.5
    assert status == 0


@pytest.mark.parametrize("name", ["", "same"])
def test_process_that_only_has_the_listed_pid_and_name_is_left_alone(
    npu_smi: Tool, start: Start, cli: Command, name: str
) -> None:
    child = start("")  # in a container: npu-smi means a process of the host
    npu_smi(child.pid, name and Path(f"/proc/{child.pid}/comm").read_text().strip())
    status, shown = cli("--yes")
    assert f"pid {child.pid} on device 3" in shown
    assert "has no device open" in shown
    assert "freed" not in shown
    assert status == 0
    assert child.poll() is None


def test_process_that_left_the_device_after_it_was_listed_is_left_alone(npu_smi: Tool, start: Start) -> None:
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


def test_process_that_leaves_the_device_on_sigterm_may_go_on_without_it(npu_smi: Tool, start: Start) -> None:
    leaves = "import signal; signal.signal(signal.SIGTERM, lambda *_: (device.close(), print('left', flush=True))); "
    child = start(leaves + HOLD, SLEEP + "; time.sleep(120)")
    npu_smi(child.pid, "python")
    (item,) = clean.processes(smi.read())
    assert clean.end_processes([item], grace=60).freed == [item]
    assert child.stdout.readline() == "left\n"
    assert child.poll() is None


def test_pid_reused_since_it_was_listed_is_left_alone(start: Start) -> None:
    child = start()
    item = Leftover("processes", "python", pid=child.pid, birth="1")  # listed when another process had this pid
    clean.end_processes([item], grace=0.2)
    assert child.poll() is None


def test_only_nodes_of_accelerators_count_as_devices() -> None:
    nodes = ["/dev/davinci7", "/dev/davinci112", "/dev/devmm_svm", "/dev/nvidia0", "/dev/nvidia-uvm"]
    others = ["/dev/davinci_manager", "/dev/nvidiactl", "/dev/null", "/dev/shm/davinci0", "/tmp/dev/davinci0"]
    others += ["/dev/nvidia-modeset"]
    assert [path for path in nodes + others if clean.DEVICE_NODE.fullmatch(path)] == nodes


def test_itself_and_its_parents_are_never_ended(npu_smi: Tool, node: Path, cli: Command) -> None:
    npu_smi(os.getpid(), "python")
    with node.open():
        _, shown = cli("--yes")
    assert "this process or one that started it" in shown
    assert "freed" not in shown


def test_process_of_another_user_is_listed_and_left_alone(
    npu_smi: Tool, start: Start, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start()
    npu_smi(child.pid, "python")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # seen by somebody else
    status, shown = cli("--yes")
    assert (status, "belongs to another user" in shown) == (0, True)
    assert child.poll() is None


def test_process_whose_main_thread_ended_first_still_counts_as_alive_and_on_the_device(
    start: Start, node: Path
) -> None:
    child = start(
        HOLD,
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(120,)).start(); "
        "print('up', flush=True); ctypes.CDLL(None).pthread_exit(None)",
    )
    stat = Path(f"/proc/{child.pid}/stat")
    deadline = time.monotonic() + 60
    while ") Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ") Z " in stat.read_text()
    assert clean.alive(child.pid)
    assert clean.open_devices(child.pid) == [str(node)]
    child.kill()
    child.wait()
    assert not clean.alive(child.pid)


def test_shared_memory_of_a_dead_owner_is_freed_unless_somebody_maps_it(
    start: Start, dead_pid: int, cli: Command
) -> None:
    child = start()
    names = (f"ascendchat-{dead_pid}-test", f"torch_{dead_pid}_2_0", f"ascendchat-{child.pid}-test")
    stale, ancient, used = (clean.SHM / name for name in names)
    recent, mapped = clean.SHM / f"torch_{dead_pid}_1_0", clean.SHM / f"ascendchat-{dead_pid}-mapped"
    for path in (stale, ancient, used, recent, mapped):
        path.write_bytes(b"x" * 65536)
    old(ancient, 2)
    with mapped.open("rb+"):
        _, shown = cli("--yes")
        assert [path.exists() for path in (stale, ancient, used, recent, mapped)] == [False, False, True, True, True]
        assert "freed 2" in shown
    assert str(mapped) in [item.path for item in clean.find_leftovers()]


def test_partial_files_go_when_old_or_their_writer_is_dead_and_nobody_writes(
    start: Start, dead_pid: int, cli: Command
) -> None:
    child = start()
    folder = home() / "data"
    folder.mkdir(parents=True)
    gone = [folder / "a.parquet.part", folder / f"b.json.{dead_pid}.tmp", folder / f"c.bin.tmp-{dead_pid}"]
    kept = [folder / "d.parquet.part", folder / f"e.json.{child.pid}.tmp", folder / "whole.parquet", folder / "f.part"]
    for path in gone + kept:
        path.write_bytes(b"x" * 5000)
    (folder / "step_000100.tmp").mkdir()
    (folder / "step_000100.tmp" / "model.safetensors").write_bytes(b"x" * 9000)
    with kept[3].open("ab"):  # slow, but at work
        for path in (gone[0], *kept[2:], folder / "step_000100.tmp" / "model.safetensors", folder / "step_000100.tmp"):
            old(path, 5)
        assert cli("--yes")[0] == 0
    assert [path for path in gone if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    assert not (folder / "step_000100.tmp").exists()


def test_lock_that_is_held_is_kept_and_one_that_nobody_holds_goes(dead_pid: int, cli: Command) -> None:
    held, free, fresh = (home() / name for name in ("held.lock", "free.lock", "fresh.lock"))
    for path in (held, free):
        path.write_text(str(dead_pid))
    fresh.write_text("")
    with held.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert clean.is_held(held)
        cli("--yes")
    assert [path.exists() for path in (held, free, fresh)] == [True, False, True]
    with held.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ours did not take it


def test_what_compilers_keep_is_left_alone() -> None:
    for folder in ("compiled/torch/locks", "data/locks"):
        (home() / folder).mkdir(parents=True)
        (home() / folder / "kernel.lock").write_text("")
        old(home() / folder / "kernel.lock", 5)
    assert [item.path for item in clean.find_leftovers()] == [str(home() / "data/locks/kernel.lock")]


@pytest.mark.parametrize(("answer", "survives"), [("n", True), ("y", False)])
def test_on_a_terminal_it_asks_and_frees_only_after_yes(
    answer: str, survives: bool, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = home() / f"a.{dead_pid}.part"
    part.write_bytes(b"x" * 4096)
    ours, terminal = pty.openpty()
    with open(terminal, "r+b", buffering=0) as stream:
        monkeypatch.setattr(sys, "stdin", open(os.dup(stream.fileno())))  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", open(os.dup(stream.fileno()), "w"))  # noqa: SIM115
        os.write(ours, answer.encode() + b"\n")
        assert main(["clean", "--lang", "en"]) == 0
        sys.stdout.flush()
        os.set_blocking(ours, False)
        shown = b""
        while b"free 1? [y/N]" not in shown:
            shown += os.read(ours, 65536)  # raises when there is no more
    os.close(ours)
    assert part.exists() is survives
