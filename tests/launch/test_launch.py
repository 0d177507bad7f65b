"""What `ascendchat launch` decides before it starts anything: program, devices, nodes, ports, names."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendchat import processes
from ascendchat.config import NotSaved, parse
from ascendchat.config.commands import LaunchConfig
from ascendchat.errors import OutOfMemory, UserError, home
from ascendchat.launch import agent, command, supervise
from ascendchat.launch.supervise import AttemptResult

SLURM = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}


def resolve(words: str, environ: dict[str, str] | None = None) -> command.LaunchPlan:
    return command.make_plan(parse(LaunchConfig, words.split()), environ or {})


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("--devices 2 base --depth 4", ["-m", "ascendchat", "base", "--depth", "4"]),
        ("--npus 2 base --device_batch_size=8", ["-m", "ascendchat", "base", "--device_batch_size=8"]),
        ("--gpus=2 -- base --depth=4", ["-m", "ascendchat", "base", "--depth=4"]),
        ("--nproc_per_node=2 -m scripts.base_train -- --depth=4", ["-m", "scripts.base_train", "--", "--depth=4"]),
        ("--nproc-per-node 2 python -m scripts.sft", ["-m", "scripts.sft"]),
        ("--devices 2 base --devices 5", ["-m", "ascendchat", "base", "--devices", "5"]),
    ],
)
def test_the_command_is_passed_on_as_written(words: str, program: list[str]) -> None:
    plan = resolve(words)
    assert plan.program == program
    assert plan.devices == 2


def test_a_script_is_run_as_a_file(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert resolve(f"--devices 1 {script} --x").program == [str(script), "--x"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--devices 2 --", "what to run is missing"),
        ("--devices 2 -m", "what to run is missing"),
        ("--devices 2 launch base", "cannot launch itself"),
        ("--devices 2 nowhere.py", "there is no file nowhere.py"),
        ("--devices 0 base", "--devices must be at least 1"),
        ("--devices 1 --nnodes 2 base", "add --master HOST:PORT"),
        ("--devices 1 --nnodes 2 --node-rank 2 --master a base", "from 0 to 1"),
        ("--devices 1 --nnodes 2 --master a:b base", "is not HOST or HOST:PORT"),
        ("--devices 1 --max-restarts -1 base", "--max-restarts must be at least 0"),
        ("--devices 1 --run a/../b base", "use letters"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(words)


def test_on_cpu_one_process_is_the_default() -> None:
    assert resolve("--device-type cpu base").devices == 1
    assert resolve("base --device_type=cpu").devices == 1
    assert resolve("base", {"ASCENDCHAT_DEVICE": "cpu"}).devices == 1
    assert resolve("--device-type cpu base").environment["ASCENDCHAT_DEVICE"] == "cpu"


def test_threads_are_shared_out_unless_the_user_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_cores", lambda: 64)
    assert resolve("--devices 8 base").environment["OMP_NUM_THREADS"] == "8"
    assert resolve("--devices 100 base").environment["OMP_NUM_THREADS"] == "1"
    assert resolve("--devices 8 base", {"OMP_NUM_THREADS": "3"}).environment["OMP_NUM_THREADS"] == "3"


def test_variables_that_would_steer_torchrun_are_dropped_and_visible_devices_kept() -> None:
    plan = resolve("--devices 2 base", {"PET_MASTER_PORT": "1", "ASCEND_RT_VISIBLE_DEVICES": "4,5"})
    assert "PET_MASTER_PORT" not in plan.environment
    assert plan.environment["ASCEND_RT_VISIBLE_DEVICES"] == "4,5"


def test_logs_go_to_the_folder_of_the_run() -> None:
    runs = home() / "runs"
    assert resolve("--devices 1 --run mine base").logs == runs / "mine" / "logs"
    assert resolve("--devices 1 base --run=theirs").logs == runs / "theirs" / "logs"
    assert resolve("--devices 1 -m scripts.sft").logs.parent.name.startswith("scripts.sft-")


def test_one_node_never_uses_a_fixed_port_and_several_meet_where_the_flags_say() -> None:
    plan = resolve("--devices 2 base", {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"})
    assert (plan.master_addr, plan.master_port) == ("127.0.0.1", 0)
    plan = resolve("--devices 8 --nnodes 2 --node-rank 1 --master node0:20123 base")
    assert (plan.nodes, plan.node_rank, plan.master_addr, plan.master_port) == (2, 1, "node0", 20123)
    first, second = (resolve(f"--nnodes 2 --node-rank {n} --master a --run r --devices 1 base") for n in (0, 1))
    assert first.master_port == second.master_port != 29500


def test_slurm_fills_in_what_the_flags_leave_open() -> None:
    plan = resolve("--devices 8 base", {**SLURM, "SLURM_STEP_ID": "0"})
    assert (plan.nodes, plan.node_rank, plan.master_addr, plan.master_port) == (2, 1, "n1", 20042)
    assert plan.logs.parent.name == "base-42"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "start it on all of them with `srun"),
        ({"SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}, "more than one launcher"),
    ],
)
def test_a_wrong_number_of_launchers_under_slurm_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve("--devices 8 base", {**SLURM, **change})


def test_other_cards_of_modelarts_leave_the_work_to_card_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv("ASCEND_DEVICE_ID", "3")
    assert command.run(parse(LaunchConfig, ["--devices", "8", "base"])) == 0
    assert "card 0" in capsys.readouterr().err
    assert not (home() / "runs").exists()


def test_a_busy_port_is_noticed_on_node_0() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        busy = server.getsockname()[1]
        assert not processes.is_free(busy)
        for words in (f"--master-port {busy} --devices 1 base", f"--nnodes 2 --master a:{busy} --devices 1 base"):
            with pytest.raises(UserError, match=f"port {busy} for the rendezvous is in use"):
                resolve(words)
        resolve(f"--nnodes 2 --node-rank 1 --master a:{busy} --devices 1 base")  # it listens on node 0 only
    assert processes.is_free(busy)
    picked = processes.free_port()
    assert processes.is_free(picked)
    assert picked not in processes.RESERVED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", 0)),
        ("h:12", ("h", 12)),
        ("[::1]:12", ("::1", 12)),
        ("fe80::1", ("fe80::1", 0)),
        ("[::1]", ("::1", 0)),
    ],
)
def test_addresses_are_split(text: str, expected: tuple[str, int]) -> None:
    assert processes.split_address(text) == expected


def test_the_rank_that_fell_silent_first_is_the_cause(tmp_path: Path) -> None:
    for rank, when in ((0, 300), (1, 200), (2, 100)):
        log = tmp_path / f"rank_{rank}.log"
        log.write_text(f"last words of {rank}\n")
        os.utime(log, (when, when))
    result = {"failed": {"0": 1, "1": 9, "2": -signal.SIGTERM}}  # 2 was stopped by torchrun: a victim
    outcome = supervise.attempt_result(result, tmp_path, tmp_path / "torchrun.log", 1, 0, True)
    assert (outcome.rank, outcome.status, outcome.others, outcome.shown) == (1, 9, (0,), False)
    text = command.failure_text(outcome)
    assert "rank 1 failed with status 9" in text
    assert "last words of 1" in text
    assert str(tmp_path / "rank_1.log") in text


@pytest.mark.parametrize(("status", "ended"), [(3, 3), (2, 2), (-9, 137)])
def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path: Path, status: int, ended: int) -> None:
    """It did not heed SIGTERM and had waited for the rank that failed: its log is older."""
    for rank, when in ((0, 100), (1, 200), (2, 300)):
        log = tmp_path / f"rank_{rank}.log"
        log.write_text(f"last words of {rank}\n")
        os.utime(log, (when, when))
    result = {"failed": {"0": -9, "1": status, "2": -15}, "killed": [0]}
    outcome = supervise.attempt_result(result, tmp_path, tmp_path / "torchrun.log", 1, 0, True)
    assert (outcome.rank, outcome.status, outcome.others, outcome.shown) == (1, ended, (), False)
    assert "last words of 1" in command.failure_text(outcome)


@pytest.mark.parametrize(
    ("result", "code", "stopped", "status", "said"),
    [
        ({"failed": {"0": -9}}, 1, 0, 137, "killed by SIGKILL (often: out of host memory); its output is above"),
        ({"failed": {"0": 1}}, 143, 15, 143, "stopped by SIGTERM"),
        ({"error": "DistNetworkError: no route"}, 1, 0, 1, "could not be started: DistNetworkError: no route"),
        ({"error": "in use", "port_taken": True}, 1, 0, 1, "the port of the rendezvous was taken by another program"),
        ({}, -9, 0, 137, "torchrun ended with status -9"),
        ({}, 3, 0, 3, "torchrun ended with status 3"),
        ({}, 0, 0, 0, ""),
    ],
)
def test_how_an_attempt_ended_is_known_from_torchruns_report(
    tmp_path: Path, result: dict[str, Any], code: int, stopped: int, status: int, said: str
) -> None:
    (tmp_path / "torchrun.log").write_text("cannot resolve node0\n")
    outcome = supervise.attempt_result(result, tmp_path, tmp_path / "torchrun.log", code, stopped, True)
    assert outcome.status == status
    text = command.failure_text(outcome)
    assert said in text
    assert ("cannot resolve node0" in text) == (outcome.rank is None and not stopped and not outcome.port_taken)


def test_torchrun_tells_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failure = ProcessFailure(local_rank=1, pid=2, exitcode=7, error_file="<none>")
    endings = {}
    for rank, exitcode, when in ((0, -9, 40), (1, 7, 10), (2, -9, 10), (3, 1, 11)):
        endings[rank] = ProcessFailure(local_rank=rank, pid=2, exitcode=exitcode, error_file="<none>")
        endings[rank].timestamp = when
    busy = {"error": "RuntimeError: EADDRINUSE at 29500", "port_taken": True}
    for error, status, told in (
        (None, 0, {}),
        (ChildFailedError("x", {1: failure}), 1, {"failed": {"1": 7}, "killed": []}),
        (ChildFailedError("x", endings), 1, {"failed": {"0": -9, "1": 7, "2": -9, "3": 1}, "killed": [0]}),
        (SignalException("x", signal.SIGTERM), 128 + signal.SIGTERM, {"signal": 15}),
        (RuntimeError("EADDRINUSE at 29500"), 1, busy),
        (ValueError("odd"), 1, {"error": "ValueError: odd", "port_taken": False}),
    ):

        def ends(_: object, error: BaseException | None = error) -> None:
            if error:
                raise error

        monkeypatch.setattr(run, "run", ends)
        monkeypatch.setattr(agent, "die_with_parent", lambda _: None)  # these tests shall not
        assert agent.main([str(tmp_path / "result.json"), "script.py"]) == status
        assert json.loads((tmp_path / "result.json").read_text()) == told
    assert "ValueError: odd" in capsys.readouterr().err, "the whole error is in torchrun's log"


def test_what_is_appended_to_a_log_is_shown_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", console)
    (tmp_path / "old").write_text("before ")
    for name in ("new", "old"):
        follower = supervise.Follower(tmp_path / name)
        follower.pump()
        for text in ("步骤 1\n".encode()[:4], "步骤 1\n".encode()[4:], b"step 2\n"):  # cut inside a letter
            with open(tmp_path / name, "ab") as log:
                log.write(text)
            follower.pump()
    assert console.buffer.getvalue().decode() == "步骤 1\nstep 2\n" * 2  # type: ignore[attr-defined]


class Torchrun:
    """A torchrun of which a test says what happens at each look at it, until it ends by itself or is killed."""

    def __init__(self, *looks: Callable[[], object]) -> None:
        self.looks, self.got, self.status = list(looks), list[int](), 0

    def poll(self) -> int | None:
        if not self.looks:
            return self.status
        self.looks.pop(0)()
        return None if self.looks else self.status

    def wait(self) -> int:
        return self.status

    def send_signal(self, number: int) -> None:
        self.got.append(number)

    def kill(self) -> None:
        self.looks, self.status = [], -signal.SIGKILL


@pytest.mark.parametrize("show", [True, False])
def test_rank_0_is_shown_while_it_runs_and_files_of_processes_go(
    show: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    log, result = tmp_path / "rank_0.log", tmp_path / "node_0_result.json"

    def begins(*_: object) -> Torchrun:
        assert not result.exists(), "of a launcher that was killed"
        assert [path.name for path in tmp_path.glob("*.pid")] == ["node_1_rank_5.pid"], "another node's is not ours"
        (tmp_path / "node_0_rank_0.pid").write_text("0 0")
        return Torchrun(
            lambda: log.write_text("step 1\n"),
            lambda: None,
            lambda: seen.append(capsys.readouterr().out),
            lambda: (log.write_text("step 1\nstep 2\n"), result.write_text("{}")),
        )

    for name in ("node_0_result.json", "node_0_rank_3.pid", "node_1_rank_5.pid"):
        (tmp_path / name).write_text("7 7")
    monkeypatch.setattr(supervise, "start_agent", begins)
    monkeypatch.setattr(supervise, "POLL", 0.0)
    outcome = supervise.run_torchrun([], tmp_path, {}, 0.0, show=show, node="node_0_")
    assert (outcome.status, outcome.stopped) == (0, 0), "nobody has asked for its end"
    assert [*seen, capsys.readouterr().out] == (["step 1\n", "step 2\n"] if show else ["", ""])
    assert [path.name for path in tmp_path.glob("*.pid")] == ["node_1_rank_5.pid"]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_torchrun_that_does_not_end_is_killed_after_the_grace_or_at_a_second_signal(
    signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = Torchrun(*[lambda: signal.raise_signal(signal.SIGTERM)] * signals, *[lambda: None] * 1000)
    monkeypatch.setattr(supervise, "start_agent", lambda *_: torchrun)
    monkeypatch.setattr(supervise, "SLACK", 0.0 if signals == 1 else 1e6)
    monkeypatch.setattr(supervise, "POLL", 0.001)
    outcome = supervise.run_torchrun([], tmp_path, {}, 0.0, show=False)
    assert torchrun.got == [signal.SIGTERM]
    assert torchrun.status == -signal.SIGKILL, "it was left alone"
    assert (outcome.status, outcome.stopped) == (128 + signal.SIGTERM, signal.SIGTERM)


def test_the_system_itself_is_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(supervise.os, "killpg", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(supervise, "started", lambda pid: "5")
    for pid in (0, 1, 2):
        (tmp_path / f"rank_{pid}.pid").write_text(f"{pid} 5")
    supervise.end_groups(tmp_path, "")
    assert killed == [2]


def test_a_rank_whose_whole_group_is_gone_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process that is looked at ends meanwhile."""

    def ended(_: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(supervise.os, "killpg", lambda *_: pytest.fail("another group was killed"))
    monkeypatch.setattr(supervise.os, "getpgid", ended)
    (tmp_path / "rank_0.pid").write_text("4194305 5")  # above all numbers of processes
    supervise.end_groups(tmp_path, "")
    assert not list(tmp_path.iterdir())


# A rank with a child; both hold the pipe, so its end says that both are gone.
RANK = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], close_fds=False)
os.write(int(sys.argv[1]), b"+")
time.sleep(300 if sys.argv[2] == "stays" else 0)
"""


@pytest.fixture(params=["stays", "went"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A real rank of node 1 whose first process stays, or went and left its child; and the pipe that they hold."""
    ours, theirs = os.pipe()
    (tmp_path / "node_1_program.json").write_text(json.dumps(["-c", RANK, str(theirs), request.param]))
    words = [sys.executable, str(Path(command.__file__).with_name("rank.py")), str(tmp_path), "node_1_"]
    environ = {**os.environ, "RANK": "5"}
    process = subprocess.Popen(words, env=environ, pass_fds=[theirs], start_new_session=True)
    os.close(theirs)
    try:
        assert os.read(ours, 1) == b"+"
        if request.param == "went":
            process.wait()
        yield process, ours
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


def ends(pipe: int, seconds: float) -> bool:
    return bool(select.select([pipe], [], [], seconds)[0])


linux = pytest.mark.skipif(sys.platform != "linux", reason="start times and marks are read from /proc")


@linux
def test_the_group_of_a_rank_is_ended(group: tuple[subprocess.Popen[bytes], int], tmp_path: Path) -> None:
    supervise.end_groups(tmp_path, "node_1_")
    assert ends(group[1], 10.0)
    assert not list(tmp_path.glob("*.pid"))


@linux
def test_ranks_of_other_nodes_and_a_number_that_another_process_has_now_are_left_alone(
    group: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    path = tmp_path / "node_1_rank_5.pid"
    for node in ("", "node_11_"):
        supervise.end_groups(tmp_path, node)
        assert path.exists()
    pid, start = path.read_text().split()
    assert int(pid) == group[0].pid
    for text in (f"{pid} {int(start) - 1}", pid, ""):  # older than the process, without a start, half written
        path.write_text(text)
        supervise.end_groups(tmp_path, "node_1_")
        assert not path.exists()
    assert not ends(group[1], 0.2)


def ending(monkeypatch: pytest.MonkeyPatch, status: int) -> list[int]:
    """The numbers of the attempts, of which each ends with this status; at most a hundred."""
    numbers: list[int] = []

    def attempt(plan: command.LaunchPlan, number: int, grace: float) -> AttemptResult:
        numbers.append(number)
        assert len(numbers) < 100, "for ever"
        return AttemptResult(status, Path(os.devnull), rank=0, shown=True)

    monkeypatch.setattr(command, "attempt", attempt)
    return numbers


def test_a_program_that_always_ends_with_the_status_of_too_large_a_batch_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that is not ours may end with it, too."""
    numbers = ending(monkeypatch, OutOfMemory.status)
    assert command.run(parse(LaunchConfig, ["--devices", "1", "base"])) == OutOfMemory.status
    assert numbers == [*range(command.MAX_SMALLER + 1)]


def test_one_node_of_several_does_not_start_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others see a lost connection, no status of ours, and count it: both must come to the same number."""
    words = "--devices 1 --nnodes 2 --node-rank 1 --master a:20123 --max-restarts 2 base".split()
    counts = []
    for status in (OutOfMemory.status, 1):
        counts.append(ending(monkeypatch, status))
        assert command.run(parse(LaunchConfig, words)) == status
    assert counts[0] == counts[1] == [0, 1, 2]


def test_a_run_that_could_not_save_is_started_again_as_often_as_allowed_with_its_batch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = []
    for allowed in (0, 2):
        counts.append(ending(monkeypatch, NotSaved.status))
        words = ["--devices", "1", "--max-restarts", str(allowed), "base"]
        assert command.run(parse(LaunchConfig, words)) == NotSaved.status == 75
    assert counts == [[0], [0, 1, 2]]
    assert "smaller device batch" not in capfd.readouterr().err


def test_wrong_input_is_never_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ending(monkeypatch, UserError.status)
    assert command.run(parse(LaunchConfig, ["--devices", "1", "--max-restarts", "9", "base"])) == UserError.status
    assert numbers == [0]
