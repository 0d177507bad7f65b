"""What `ascendchat launch` decides before it starts anything: program, devices, nodes, ports, names."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendchat import launch
from ascendchat.config import UserError, home, parse
from ascendchat.config.commands import LaunchConfig
from ascendchat.launch import port, supervise
from ascendchat.launch.rank import node_prefix
from ascendchat.launch.supervise import AttemptResult

SLURM = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}


def resolve(words: str, environ: dict[str, str] | None = None) -> launch.LaunchPlan:
    return launch.make_plan(parse(LaunchConfig, words.split()), environ or {})


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


def test_the_device_type_reaches_the_ranks() -> None:
    assert resolve("--device-type cpu base").environment["ASCENDCHAT_DEVICE"] == "cpu"


def test_threads_are_shared_out_unless_the_user_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_cores", lambda: 64)
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


def test_one_node_never_uses_a_fixed_port() -> None:
    plan = resolve("--devices 2 base", {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"})
    assert (plan.master_addr, plan.master_port) == ("127.0.0.1", 0)


def test_several_nodes_meet_where_the_flags_say() -> None:
    plan = resolve("--devices 8 --nnodes 2 --node-rank 1 --master node0:20123 base")
    assert (plan.nodes, plan.node_rank, plan.master_addr, plan.master_port) == (2, 1, "node0", 20123)


def test_several_nodes_derive_the_same_port_from_the_run() -> None:
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
    assert launch.run(parse(LaunchConfig, ["--devices", "8", "base"])) == 0
    assert "card 0" in capsys.readouterr().err
    assert not (home() / "runs").exists()


def test_a_busy_port_is_noticed_on_node_0() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        busy = server.getsockname()[1]
        assert not port.is_free(busy)
        for words in (f"--master-port {busy} --devices 1 base", f"--nnodes 2 --master a:{busy} --devices 1 base"):
            with pytest.raises(UserError, match=f"port {busy} for the rendezvous is in use"):
                resolve(words)
        resolve(f"--nnodes 2 --node-rank 1 --master a:{busy} --devices 1 base")  # it listens on node 0 only
    assert port.is_free(busy)


def test_a_picked_port_is_free() -> None:
    picked = port.free_port()
    assert port.is_free(picked)
    assert picked not in port.RESERVED


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
    assert port.split_address(text) == expected


def test_the_rank_that_fell_silent_first_is_the_cause(tmp_path: Path) -> None:
    for rank, when in ((0, 300), (1, 200), (2, 100)):
        log = tmp_path / f"rank_{rank}.log"
        log.write_text(f"last words of {rank}\n")
        os.utime(log, (when, when))
    result = {"failed": {"0": 1, "1": 9, "2": -signal.SIGTERM}}  # 2 was stopped by torchrun: a victim
    outcome = supervise.attempt_result(result, tmp_path, tmp_path / "torchrun.log", 1, 0, True)
    assert (outcome.rank, outcome.status, outcome.others, outcome.shown) == (1, 9, (0,), False)
    text = launch.failure_text(outcome)
    assert "rank 1 failed with status 9" in text
    assert "last words of 1" in text
    assert str(tmp_path / "rank_1.log") in text


def test_a_killed_rank_is_said_to_be_killed(tmp_path: Path) -> None:
    outcome = supervise.attempt_result({"failed": {"0": -9}}, tmp_path, tmp_path / "torchrun.log", 1, 0, True)
    assert outcome.status == 137
    assert "killed by SIGKILL (often: out of host memory)" in launch.failure_text(outcome)


def test_a_failure_before_any_rank_shows_torchruns_own_log(tmp_path: Path) -> None:
    (tmp_path / "torchrun.log").write_text("cannot resolve node0\n")
    text = launch.failure_text(AttemptResult(1, tmp_path / "torchrun.log", detail="DistNetworkError: no route"))
    assert "could not be started: DistNetworkError: no route" in text
    assert "cannot resolve node0" in text


def test_files_of_one_node_have_plain_names_and_of_several_the_number_of_the_node() -> None:
    assert node_prefix(1, 0) == ""
    assert [node_prefix(12, node) for node in (0, 11)] == ["node_0_", "node_11_"]


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
    words = [sys.executable, str(Path(launch.__file__).with_name("rank.py")), str(tmp_path), "node_1_"]
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
def test_a_number_that_another_process_has_now_is_not_killed(
    group: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    path = tmp_path / "node_1_rank_5.pid"
    pid, start = path.read_text().split()
    assert int(pid) == group[0].pid
    for text in (f"{pid} {int(start) - 1}", pid, ""):  # older than the process, without a start, half written
        path.write_text(text)
        supervise.end_groups(tmp_path, "node_1_")
        assert not path.exists()
    assert not ends(group[1], 0.2)


@linux
@pytest.mark.parametrize("node", ["", "node_0_", "node_11_"])
def test_ranks_of_other_nodes_are_not_touched(
    group: tuple[subprocess.Popen[bytes], int], tmp_path: Path, node: str
) -> None:
    supervise.end_groups(tmp_path, node)
    assert not ends(group[1], 0.2)
    assert (tmp_path / "node_1_rank_5.pid").exists()


def ending(monkeypatch: pytest.MonkeyPatch, status: int) -> list[int]:
    """The numbers of the attempts, of which each ends with this status; at most a hundred."""
    numbers: list[int] = []

    def attempt(plan: launch.LaunchPlan, number: int, grace: float) -> AttemptResult:
        numbers.append(number)
        assert len(numbers) < 100, "for ever"
        return AttemptResult(status, Path(os.devnull), rank=0, shown=True)

    monkeypatch.setattr(launch, "attempt", attempt)
    return numbers


def test_a_program_that_always_ends_with_the_status_of_too_large_a_batch_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """75 is a usual status of programs that are not ours, too."""
    numbers = ending(monkeypatch, 75)
    assert launch.run(parse(LaunchConfig, ["--devices", "1", "base"])) == 75
    assert numbers == [*range(launch.MOST_SMALLER + 1)]


def test_one_node_of_several_does_not_start_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others see a lost connection, no status 75, and count it: both must come to the same number."""
    words = "--devices 1 --nnodes 2 --node-rank 1 --master a:20123 --max-restarts 2 base".split()
    counts = []
    for status in (75, 1):
        counts.append(ending(monkeypatch, status))
        assert launch.run(parse(LaunchConfig, words)) == status
    assert counts[0] == counts[1] == [0, 1, 2]
