"""`ascendchat launch` end to end on small scripts: real torchrun, real processes, real signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascendchat import launch
from ascendchat.config import home, parse
from ascendchat.config.commands import LaunchConfig
from ascendchat.launch import port

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 240.0  # on however busy a machine

TALK = """
import os, sys
print("rank", os.environ["RANK"], sys.argv[1:], "OMP", os.environ["OMP_NUM_THREADS"], flush=True)
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
sys.exit(75 if int(os.environ.get("ASCENDCHAT_SMALLER", "0")) < 2 else 0)
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
from ascendchat import dist
from ascendchat.device import pick
world = dist.init(pick("cpu"), connect_timeout=60)
value = torch.tensor([world.rank + 1.0])
dist.all_reduce(value)
os.write(1, f"sum {value.item()} of {world.size}\\n".encode())  # one write: under torchrun the ranks share a pipe
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def ascendchat(*words: object) -> list[str]:
    return [sys.executable, "-m", "ascendchat", *map(str, words)]


def finish(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(ascendchat(*words), capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=False)


def alive(folder: Path) -> list[str]:
    """Processes whose command line names this test's folder."""
    lines = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(folder) in line]


def wait_until(what: str, condition: object, seconds: float = LIMIT) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(0.05)


def start_stoppable(script: Path, mode: str, grace: float) -> subprocess.Popen[str]:
    folder = script.parent
    script.write_text(STOP)
    words = ascendchat("launch", "--devices", 2, "--grace", grace, "--max-restarts", 2, script, folder, mode)
    environ = {**os.environ, "ASCENDCHAT_HOME": str(folder / "home")}  # so that torchrun's command line names it too
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environ
    )
    try:
        wait_until("both ranks are up", lambda: (folder / "up_0").exists() and (folder / "up_1").exists())
        assert len(alive(folder)) >= 6, "the launcher, torchrun, two ranks and their two children"
    except BaseException:
        process.kill()
        raise
    return process


@pytest.mark.slow
def test_only_rank_0_is_on_the_console_and_every_rank_has_its_log(script: Path) -> None:
    script.write_text(TALK)
    # torchrun would refuse --run as an abbreviation of its own --run-path
    done = finish("launch", "--npus=2", "--run", "talk", script, "--run", "own", "--", "--device_batch_size=8")
    assert done.returncode == 0, done.stderr
    assert "rank 0 ['--run', 'own', '--', '--device_batch_size=8']" in done.stdout
    assert "warning of rank 0" in done.stdout
    assert "rank 1" not in done.stdout + done.stderr
    logs = home() / "runs" / "talk" / "logs" / "attempt_0"
    for rank in (0, 1):
        text = (logs / f"rank_{rank}.log").read_text()
        assert f"rank {rank} [" in text
        assert f"warning of rank {rank}" in text
    assert not list(logs.glob("*.pid"))


@pytest.mark.slow
def test_a_failed_job_shows_the_failing_rank_and_starts_again(script: Path) -> None:
    script.write_text(FAIL_ONCE)
    done = finish("launch", "--gpus", 2, "--run", "again", "--max_restarts", 1, script)
    assert done.returncode == 0, done.stderr
    log = home() / "runs" / "again" / "logs" / "attempt_0" / "rank_1.log"
    assert f"rank 1 failed with status 7; the last lines of {log}" in done.stderr
    assert "the disk is full, says rank 1" in done.stderr
    assert "rank 0 restart None" in done.stdout
    assert "rank 0 restart 1" in done.stdout
    assert (log.parent.parent / "attempt_1" / "rank_1.log").read_text() == "rank 1 restart 1\n"


@pytest.mark.slow
def test_a_device_that_died_of_too_large_a_batch_is_tried_with_smaller_ones(script: Path) -> None:
    """train/dry_run.py; as often as it takes, whatever --max-restarts says."""
    script.write_text(TOO_LARGE)
    done = finish("launch", "--devices", 1, "--run", "large", script)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "smaller by" in line] == [
        f"smaller by {n}" for n in (None, 1, 2)
    ]
    assert done.stderr.count("starting again with the next smaller device batch") == 2


@pytest.mark.slow
def test_the_status_of_the_failing_rank_is_passed_on(script: Path) -> None:
    script.write_text(FAIL_ONCE)
    assert finish("launch", "--devices", 2, script).returncode == 7
    assert not alive(script.parent)


@pytest.mark.slow
def test_a_process_that_an_old_pid_file_names_is_left_alone(script: Path) -> None:
    script.write_text(TALK)
    logs = home() / "runs" / "old" / "logs" / "attempt_0"
    logs.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True) as other:
        try:
            for name in ("rank_0.pid", "rank_5.pid", "node_1_rank_5.pid"):  # left by a launcher that was killed
                (logs / name).write_text(str(other.pid))
            done = finish("launch", "--devices", 1, "--run", "old", script)
            assert done.returncode == 0, done.stderr
            assert other.poll() is None
        finally:
            other.kill()
    assert [path.name for path in logs.glob("*.pid")] == ["node_1_rank_5.pid"], "another node's file is not ours"


@pytest.mark.slow
def test_wrong_input_is_not_tried_again() -> None:
    done = finish("launch", "--devices", 2, "--run", "wrong", "--max-restarts", 3, "no-such-command")
    assert done.returncode == 2
    assert "there is no command 'no-such-command'" in done.stdout + done.stderr
    assert [p.name for p in (home() / "runs" / "wrong" / "logs").glob("attempt_*")] == ["attempt_0"]


@pytest.mark.slow
def test_a_killed_rank_gives_128_plus_its_signal(script: Path) -> None:
    script.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL)\n")
    done = finish("launch", "--devices", 1, script)
    assert done.returncode == 128 + 9
    assert "killed by SIGKILL" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_reaches_every_rank_once_and_leaves_nothing(script: Path, number: signal.Signals) -> None:
    process = start_stoppable(script, "willing", 20.0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number, output
    assert f"stopped by {number.name}" in output
    for rank in (0, 1):
        assert (script.parent / f"got_{rank}").read_text().split() == [number.name]
    wait_until("no process is left", lambda: not alive(script.parent))


@pytest.mark.slow
def test_ranks_that_ignore_the_signal_are_killed_after_the_grace(script: Path) -> None:
    process = start_stoppable(script, "stubborn", 1.0)
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30.0, "torchrun's own patience is 30 s"
    wait_until("no process is left", lambda: not alive(script.parent))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_killing_the_launcher_leaves_no_orphans(script: Path) -> None:
    process = start_stoppable(script, "willing", 5.0)
    process.kill()
    process.communicate(timeout=LIMIT)
    wait_until("no process is left", lambda: not alive(script.parent))


@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile_is_chosen_again(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(TALK)
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        really, picks = port.free_port, [server.getsockname()[1]]
        monkeypatch.setattr(port, "free_port", lambda: picks.pop() if picks else really())
        assert launch.run(parse(LaunchConfig, ["--devices", "1", str(script)])) == 0
    assert not picks, "the busy port was never tried"
    assert "rank 0 []" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["launch", "torchrun", "python"])
def test_launch_torchrun_and_python_give_the_ranks_the_same_world(script: Path, starter: str) -> None:
    script.write_text(SUM)
    words = {
        "launch": ascendchat("launch", "--devices", 2, script),
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)],
        "python": [sys.executable, str(script)],
    }[starter]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, cwd=ROOT, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert ("sum 1.0 of 1" if starter == "python" else "sum 3.0 of 2") in done.stdout


@pytest.mark.slow
def test_two_nodes_with_one_home_and_run_meet_and_meet_again_after_a_failure(script: Path) -> None:
    lost = 'import os\nif world.rank == 1 and not os.environ.get("ASCENDCHAT_RESTART"): os._exit(9)\n'
    script.write_text(SUM.replace("value = torch", lost + "value = torch"))
    first = next(number for number in iter(port.free_port, 0) if port.is_free(number + 1))  # the second attempt's
    meet = f"127.0.0.1:{first}"
    nodes = []
    for rank in (0, 1):
        words = ["launch", "--nnodes", 2, "--node-rank", rank, "--master", meet, "--run", "both", "--devices", 1]
        words += ["--max-restarts", 1]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = ascendchat(*words, script)
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ))
    shown = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert "sum 3.0 of 2" in shown[0]
    assert shown[1] == "", "only node 0 shows its rank"
    logs = home() / "runs" / "both" / "logs" / "attempt_1"
    for rank in (0, 1):
        assert "sum 3.0 of 2" in (logs / f"rank_{rank}.log").read_text()
    own = [f"node_{node}_{name}" for node in (0, 1) for name in ("program.json", "torchrun.log")]
    assert sorted(path.name for path in logs.iterdir()) == sorted([*own, "rank_0.log", "rank_1.log"])
