"""`ascendchat launch` end to end on small scripts: real torchrun, real processes, real signals."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_process

from ascendchat import processes
from ascendchat.cli import main
from ascendchat.errors import home

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 240.0  # on however busy a machine

TALK = """
import os, sys
print("rank", os.environ["RANK"], sys.argv[1:], "sees", os.environ.get("ASCEND_RT_VISIBLE_DEVICES"), flush=True)
print("warning of rank", os.environ["RANK"], file=sys.stderr)
"""
FAIL_ONCE = """
import os, sys, time
from pathlib import Path
said = Path(__file__).with_suffix(".said")
if os.environ["RANK"] == "1" and os.environ.get("ASCENDCHAT_RESTART", "0") == "0":
    while not said.exists():  # a rank that has failed takes the other along, and that one shall have spoken
        time.sleep(0.05)
    print("the disk is full, says rank 1")
    sys.exit(7)
print("rank", os.environ["RANK"], "restart", os.environ.get("ASCENDCHAT_RESTART"), flush=True)
said.touch()
time.sleep(0 if os.environ.get("ASCENDCHAT_RESTART") else 60)
"""
TOO_LARGE = """
import os, sys
print("smaller by", os.environ.get("ASCENDCHAT_SMALLER"), flush=True)
sys.exit(0 if "ASCENDCHAT_SMALLER" in os.environ else 71)
"""
STOP = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, stubborn = Path(sys.argv[1]), sys.argv[2] == "stubborn"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(folder)])
def stop(number, frame):
    with open(folder / f"got_{os.environ['RANK']}", "a") as file:
        file.write(signal.Signals(number).name + " ")
    if not stubborn:
        time.sleep(0.3)
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
(folder / f"up_{os.environ['RANK']}").write_text("")
while True:
    time.sleep(0.05)
"""
SUM = """
import os, torch
from ascendchat.parallel import collectives
from ascendchat.device import pick
world = collectives.init(pick("cpu"), connect_timeout=60)
value = torch.tensor([world.rank + 1.0])
collectives.all_reduce(value)
os.write(1, f"sum {value.item()} of {world.size}\\n".encode())  # one write: under torchrun the ranks share a pipe
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where a test writes the program of its ranks."""
    return tmp_path / "script.py"


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`ascendchat launch` in this process; the ranks are processes that start warm."""
    module = importlib.import_module(warm_process.TORCHRUNS_OWN)
    monkeypatch.setattr(module, "Popen", warm_process.ServerPopen)
    return lambda *words: main(["launch", *map(str, words)])


def alive(folder: Path) -> list[str]:
    """Processes whose command line names this test's folder."""
    lines = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(folder) in line]


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"waited {LIMIT} s for: {what}"
        time.sleep(0.05)


def start_stoppable(script: Path, mode: str, grace: float) -> subprocess.Popen[str]:
    """A launcher and all below it, none of them warm: they shall end with their parents."""
    folder = script.parent
    script.write_text(STOP)
    words = ["launch", "--devices", 2, "--grace", grace, "--max-restarts", 2, script, folder, mode]
    environ = {**os.environ, "ASCENDCHAT_HOME": str(folder / "home")}  # so that its guard's command line names it, too
    process = subprocess.Popen(
        [sys.executable, "-m", "ascendchat", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environ,
    )  # fmt: skip
    try:
        wait_until("both ranks are up", lambda: (folder / "up_0").exists() and (folder / "up_1").exists())
        assert len(alive(folder)) >= 6, "the launcher, its guard, two ranks and their two children"
    except BaseException:
        process.kill()
        raise
    return process


def test_only_rank_0_is_on_the_console_and_every_rank_has_its_log(
    script: Path, launch: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(TALK)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("PET_NNODES", "1")  # these would steer the command torchrun
    monkeypatch.setenv("PET_MASTER_PORT", "1")
    # the command torchrun would refuse --run as an abbreviation of its own --run-path
    assert launch("--npus=2", "--run", "talk", script, "--run", "own", "--", "--cost=$$5 for ${local_rank}") == 0
    said, errors = capfd.readouterr()
    assert "rank 0 ['--run', 'own', '--', '--cost=$$5 for ${local_rank}'] sees 4,5" in said
    assert "warning of rank 0" in said
    assert "rank 1" not in said + errors
    logs = home() / "runs" / "talk" / "logs" / "attempt_0"
    for rank in (0, 1):
        text = (logs / f"rank_{rank}.log").read_text()
        assert f"rank {rank} [" in text
        assert f"warning of rank {rank}" in text
    assert not list(logs.glob("*.pid"))


def test_a_failed_job_shows_the_failing_rank_and_starts_again(
    script: Path, launch: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(FAIL_ONCE)
    assert launch("--gpus", 2, "--run", "again", "--max_restarts", 1, script) == 0
    said, errors = capfd.readouterr()
    log = home() / "runs" / "again" / "logs" / "attempt_0" / "rank_1.log"
    assert f"rank 1 failed with status 7; the last lines of {log}" in errors
    assert "the disk is full, says rank 1" in errors
    assert "rank 0 restart None" in said
    assert "rank 0 restart 1" in said
    assert (log.parent.parent / "attempt_1" / "rank_1.log").read_text() == "rank 1 restart 1\n"


def test_a_device_that_died_of_too_large_a_batch_is_tried_with_a_smaller_one(
    script: Path, launch: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """train/loop.py; whatever --max-restarts says."""
    script.write_text(TOO_LARGE)
    assert launch("--devices", 1, "--run", "large", script) == 0
    said, errors = capfd.readouterr()
    assert [line for line in said.splitlines() if "smaller by" in line] == ["smaller by None", "smaller by 1"]
    assert errors.count("starting again with the next smaller device batch") == 1


def test_wrong_input_is_not_tried_again_and_its_status_is_passed_on(
    launch: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("--devices", 2, "--run", "wrong", "--max-restarts", 3, "no-such-command") == 2
    said = "".join(capfd.readouterr())
    assert re.search("rank [01] failed with status 2: there is no command 'no-such-command'", said)
    assert [p.name for p in (home() / "runs" / "wrong" / "logs").glob("attempt_*")] == ["attempt_0"]


def test_a_signal_reaches_every_rank_once_and_leaves_nothing(script: Path) -> None:
    process = start_stoppable(script, "willing", 20.0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "stopped by SIGINT" in output
    assert [(script.parent / f"got_{rank}").read_text().split() for rank in (0, 1)] == [["SIGINT"]] * 2
    wait_until("no process is left", lambda: not alive(script.parent))


@pytest.mark.parametrize("signals", [1, 2])
def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_or_at_a_second_signal(
    script: Path, signals: int
) -> None:
    process = start_stoppable(script, "stubborn", 1.0 if signals == 1 else 600.0)
    process.terminate()
    if signals == 2:
        wait_until("the first signal is there", lambda: len([*script.parent.glob("got_*")]) == 2)
        process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert [(script.parent / f"got_{rank}").read_text().split() for rank in (0, 1)] == [["SIGTERM"]] * 2
    wait_until("no process is left", lambda: not alive(script.parent))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_killing_the_launcher_leaves_no_orphans(script: Path) -> None:
    process = start_stoppable(script, "willing", 5.0)
    process.kill()
    process.communicate(timeout=LIMIT)
    wait_until("no process is left", lambda: not alive(script.parent))


def test_a_port_that_was_taken_meanwhile_is_chosen_again(
    script: Path, launch: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(TALK)
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        really, picks = processes.free_port, [server.getsockname()[1]]
        monkeypatch.setattr(processes, "free_port", lambda: picks.pop() if picks else really())
        assert launch("--devices", 1, script) == 0
    assert not picks, "the busy port was never tried"
    assert "rank 0 []" in capfd.readouterr().out


def test_plain_torchrun_gives_the_ranks_the_same_world(script: Path) -> None:
    script.write_text(SUM)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how = warm_process.ServerPopen
    done = warm_process.run(words, how=how, capture_output=True, text=True, env=environ, cwd=ROOT, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0 of 2") == 2


def test_two_nodes_with_one_home_and_run_meet_and_meet_again_after_a_failure(script: Path) -> None:
    lost = 'import os\nif world.rank == 1 and not os.environ.get("ASCENDCHAT_RESTART"): os._exit(9)\n'
    script.write_text(SUM.replace("value = torch", lost + "value = torch"))
    shared = [
        "--nnodes",
        2,
        "--master",
        f"127.0.0.1:{processes.free_port()}",
        "--run",
        "both",
        "--devices",
        1,
        "--max-restarts",
        1,
    ]
    environ, nodes = {**os.environ, "PYTHONPATH": str(ROOT)}, []
    for rank in (0, 1):
        words = [sys.executable, "-m", "ascendchat", "launch", *map(str, shared), "--node-rank", str(rank), str(script)]
        nodes.append(warm_process.ServerPopen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ))
    shown = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "sum 3.0 of 2" in shown[0]
    assert shown[1] == "", "only node 0 shows its rank"
    logs = home() / "runs" / "both" / "logs" / "attempt_1"
    for rank in (0, 1):
        assert "sum 3.0 of 2" in (logs / f"rank_{rank}.log").read_text()
    assert sorted(path.name for path in logs.iterdir()) == ["rank_0.log", "rank_1.log"]
    own = {f"node_{node}_torchrun.log" for node in (0, 1)}
    assert own <= {path.name for path in logs.parent.iterdir()}
