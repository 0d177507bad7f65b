"""What `ascendchat launch` decides before it starts anything: program, devices, nodes, ports, names."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ascendchat import processes
from ascendchat.config import parse
from ascendchat.config.commands import LaunchConfig
from ascendchat.errors import NotSaved, OutOfMemory, UserError, home
from ascendchat.launch import command, plan, rank, torchrun

SLURM = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}


def resolve(words: str, environ: dict[str, str] | None = None) -> plan.LaunchPlan:
    return plan.make_plan(parse(LaunchConfig, words.split()), environ or {})


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
    found = resolve(words)
    assert found.program == program
    assert found.devices == 2


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
    monkeypatch.setattr(plan, "_cores", lambda: 64)
    assert resolve("--devices 8 base").environment["OMP_NUM_THREADS"] == "8"
    assert resolve("--devices 100 base").environment["OMP_NUM_THREADS"] == "1"
    assert resolve("--devices 8 base", {"OMP_NUM_THREADS": "3"}).environment["OMP_NUM_THREADS"] == "3"


def test_logs_go_to_the_folder_of_the_run() -> None:
    runs = home() / "runs"
    assert resolve("--devices 1 --run mine base").logs == runs / "mine" / "logs"
    assert resolve("--devices 1 base --run=theirs").logs == runs / "theirs" / "logs"
    assert resolve("--devices 1 -m scripts.sft").logs.parent.name.startswith("scripts.sft-")


def test_one_node_never_uses_a_fixed_port_and_several_meet_where_the_flags_say() -> None:
    found = resolve("--devices 2 base", {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"})
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 0)
    found = resolve("--devices 8 --nnodes 2 --node-rank 1 --master node0:20123 base")
    assert (found.nodes, found.node_rank, found.master_addr, found.master_port) == (2, 1, "node0", 20123)
    first, second = (resolve(f"--nnodes 2 --node-rank {n} --master a --run r --devices 1 base") for n in (0, 1))
    assert first.master_port == second.master_port != 29500


def test_slurm_fills_in_what_the_flags_leave_open() -> None:
    found = resolve("--devices 8 base", {**SLURM, "SLURM_STEP_ID": "0"})
    assert (found.nodes, found.node_rank, found.master_addr, found.master_port) == (2, 1, "n1", 20042)
    assert found.logs.parent.name == "base-42"


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


def failures(**ranks: tuple[int, float]) -> dict[int, Any]:
    """What torchrun's agent says of failed ranks: r0=(exit code, time)."""
    return {
        int(name[1:]): SimpleNamespace(exitcode=code, timestamp=when, error_file_data={"message": "<NONE>"})
        for name, (code, when) in ranks.items()
    }


def write_logs(folder: Path, *times: float) -> None:
    for number, when in enumerate(times):
        log = folder / f"rank_{number}.log"
        log.write_text(f"last words of {number}\n")
        os.utime(log, (when, when))


def test_the_rank_that_fell_silent_first_is_the_cause(tmp_path: Path) -> None:
    write_logs(tmp_path, 300, 200, 100)
    ended = failures(r0=(1, 5), r1=(9, 5), r2=(-signal.SIGTERM, 5))  # 2 was stopped by torchrun: a victim
    failed = torchrun.first_failure(ended, tmp_path, console=True)
    assert (failed.rank, failed.status, failed.others, failed.shown) == (1, 9, (0,), False)
    text = torchrun.failure_text(failed)
    assert "rank 1 failed with status 9; so did 0 after it; the last lines" in text
    assert "last words of 1" in text
    assert str(tmp_path / "rank_1.log") in text


@pytest.mark.parametrize(("status", "ended"), [(3, 3), (2, 2), (-9, 137)])
def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path: Path, status: int, ended: int) -> None:
    """It did not heed SIGTERM and had waited for the rank that failed: its log is older."""
    write_logs(tmp_path, 100, 200, 300)
    failed = torchrun.first_failure(failures(r0=(-9, 40), r1=(status, 10), r2=(-15, 10)), tmp_path, console=True)
    assert (failed.rank, failed.status, failed.others, failed.shown) == (1, ended, (), False)
    assert "last words of 1" in torchrun.failure_text(failed)


def test_a_rank_that_the_system_killed_may_have_had_too_little_memory(tmp_path: Path) -> None:
    failed = torchrun.first_failure(failures(r0=(-9, 1)), tmp_path, console=True)
    assert "killed by SIGKILL (often: out of host memory); its output is above" in torchrun.failure_text(failed)
    assert "(no log)" in torchrun.failure_text(torchrun.first_failure(failures(r0=(-9, 1)), tmp_path, console=False))
    assert "rank 0 failed with status 200;" in torchrun.failure_text(torchrun.Failed(200, tmp_path, 0, shown=True))


@pytest.mark.parametrize("error", [UserError("a batch of 0; give 1"), RuntimeError("no\nlink")])
def test_the_error_of_a_rank_is_named_by_torchruns_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "rank_0.json"))
    processes.record_error(error)
    write_logs(tmp_path, 1)
    status = getattr(error, "status", 1)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file=str(tmp_path / "rank_0.json"))
    text = torchrun.failure_text(torchrun.first_failure({0: failure}, tmp_path, console=False))
    log = tmp_path / "rank_0.log"
    if status == UserError.status:
        assert text == f"rank 0 failed with status 2: a batch of 0; give 1 (log: {log})"
    else:
        assert (
            text == f"rank 0 failed with status 1: RuntimeError: no link; the last lines of {log}:\n  last words of 0"
        )


def test_an_error_without_torchrun_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    processes.record_error(UserError("no"))
    assert not list(tmp_path.iterdir())


def test_a_log_of_an_earlier_launch_is_kept_and_its_error_is_not(tmp_path: Path) -> None:
    found = resolve("--devices 1 --nnodes 2 --node-rank 1 --master a:20123 base")
    found.logs = tmp_path
    logs, folder = torchrun._Logs(found), tmp_path / "attempt_1"
    folder.mkdir()
    (folder / "rank_1.log").write_text("before")
    (folder / "rank_1.json").write_text("{}")
    logs.smaller = 3
    environment = {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    places = logs.reify({0: environment})
    assert [path.read_text() for path in folder.iterdir()] == ["before"]
    assert not (folder / "rank_1.log").exists()
    assert (places.stdouts, places.tee_stdouts) == ({0: str(folder / "rank_1.log")}, {}), "only node 0 shows its rank 0"
    assert environment["ASCENDCHAT_RESTART"] == "1"
    assert environment["ASCENDCHAT_SMALLER"] == "3"
    assert environment["ASCENDCHAT_RANK_FILES"] == str(folder / "node_1_rank_")
    assert environment["TORCHELASTIC_ERROR_FILE"] == str(folder / "rank_1.json")


@pytest.mark.parametrize("setting", [None, "1"])
def test_the_launcher_imports_torch_without_plug_ins_and_the_ranks_have_the_users_setting(
    setting: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    if setting is None:
        monkeypatch.delenv(command.AUTOLOAD, raising=False)
    else:
        monkeypatch.setenv(command.AUTOLOAD, setting)

    def imported(name: str) -> Any:
        seen.append(os.environ[command.AUTOLOAD])
        return SimpleNamespace(run_ranks=lambda *_: seen.append(os.environ.get(command.AUTOLOAD)) or 3)

    monkeypatch.setattr(command.importlib, "import_module", imported)
    assert command.run(parse(LaunchConfig, ["--devices", "1", "base"])) == 3
    assert seen == ["0", setting]
    assert "1 process; logs in" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", "/proc/nothing")
    with pytest.raises(UserError, match="cannot write the logs to /proc/nothing"):
        command.run(parse(LaunchConfig, ["--devices", "1", "base"]))


def test_the_system_itself_is_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(rank.os, "killpg", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(rank, "started", lambda pid: "5")
    (tmp_path / "attempt_0").mkdir()
    for pid in (0, 1, 2):
        (tmp_path / "attempt_0" / f"rank_{pid}.pid").write_text(f"{pid} 5")
    rank.end_groups(tmp_path, "")
    assert killed == [2]


def test_a_rank_whose_whole_group_is_gone_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "attempt_0").mkdir()
    (tmp_path / "attempt_0" / "rank_0.pid").write_text("4194305 5")  # above all numbers of processes
    rank.end_groups(tmp_path, "")
    assert not list((tmp_path / "attempt_0").iterdir())


# A rank with a child; both hold the pipe, so its end says that both are gone.
RANK = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], close_fds=False)
sys.stdin.read()
os.write(int(sys.argv[1]), b"+")
time.sleep(300 if sys.argv[2] == "stays" else 0)
"""


@pytest.fixture(params=["stays", "went"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A real rank of node 1 whose first process stays, or went and left its child; and the pipe that they hold."""
    ours, theirs = os.pipe()
    (tmp_path / "attempt_0").mkdir()
    words = [sys.executable, "-m", "ascendchat.launch.rank", "begin", "-c", RANK, str(theirs), request.param]
    environ = {**os.environ, "RANK": "5", processes.RANK_FILES: str(tmp_path / "attempt_0" / "node_1_rank_")}
    process = subprocess.Popen(words, env=environ, pass_fds=[theirs], stdin=subprocess.PIPE, start_new_session=True)
    os.close(theirs)
    try:
        assert os.read(ours, 1) == b"+", "it waits for input"
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


linux = pytest.mark.skipif(sys.platform != "linux", reason="start times are read from /proc")


@linux
def test_the_group_of_a_rank_is_ended(group: tuple[subprocess.Popen[bytes], int], tmp_path: Path) -> None:
    rank.end_groups(tmp_path, "node_1_")
    assert ends(group[1], 10.0)
    assert not list((tmp_path / "attempt_0").iterdir())


@linux
def test_ranks_of_other_nodes_and_a_number_that_another_process_has_now_are_left_alone(
    group: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    path = tmp_path / "attempt_0" / "node_1_rank_5.pid"
    for node in ("", "node_11_"):
        rank.end_groups(tmp_path, node)
        assert path.exists()
    if group[0].poll() is not None:
        return  # the number is nobody's now
    pid, start = path.read_text().split()
    assert int(pid) == group[0].pid
    for text in (f"{pid} {int(start) - 1}", pid, ""):  # older than the process, without a start, half written
        path.write_text(text)
        rank.end_groups(tmp_path, "node_1_")
        assert not path.exists()
    assert not ends(group[1], 0.2)


# Ends in order at SIGTERM, or not at all; its child holds the pipe too.
SAVES = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"],
                 close_fds=False)
def save(*_):
    os.write(int(sys.argv[1]), b"saved")
    if sys.argv[2] == "willing":
        sys.exit()
signal.signal(signal.SIGTERM, save)
os.write(int(sys.argv[1]), b"+")
while True:
    time.sleep(300)
"""


@linux
@pytest.mark.parametrize("mode", ["willing", "stubborn"])
def test_ranks_that_outlive_their_launcher_save_and_end(tmp_path: Path, mode: str) -> None:
    (tmp_path / "attempt_0").mkdir()
    ours, theirs = os.pipe()
    module = [sys.executable, "-m", "ascendchat.launch.rank"]
    environ = {**os.environ, "RANK": "0", processes.RANK_FILES: str(tmp_path / "attempt_0" / "rank_")}
    words = [*module, "begin", "-c", SAVES, str(theirs), mode]
    one = subprocess.Popen(words, env=environ, pass_fds=[theirs], start_new_session=True)
    guard = subprocess.Popen([*module, "guard", str(tmp_path), "", "1.5"], stdin=subprocess.PIPE)
    os.close(theirs)
    try:
        assert os.read(ours, 1) == b"+"
        assert not ends(ours, 0.2)
        guard.stdin.close()  # type: ignore[union-attr]
        assert os.read(ours, 9) == b"saved"
        assert one.wait(60) == (0 if mode == "willing" else -signal.SIGKILL)
        assert guard.wait(60) == 0
        assert ends(ours, 10.0), "its child is left"
        assert os.read(ours, 9) == b"", "it was told to end a second time"
        assert not list((tmp_path / "attempt_0").iterdir())
    finally:
        guard.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        os.close(ours)


@linux
def test_a_guard_leaves_the_ranks_of_a_later_launch_alone(tmp_path: Path) -> None:
    (tmp_path / "attempt_0").mkdir()
    file = tmp_path / "attempt_0" / "rank_0.pid"
    module = [sys.executable, "-m", "ascendchat.launch.rank"]
    environ = {**os.environ, "RANK": "0", processes.RANK_FILES: str(tmp_path / "attempt_0" / "rank_")}
    deaf = (
        "import signal, time; signal.signal(15, lambda *_: print('told', flush=True)); print('+', flush=True); "
        "time.sleep(300)"
    )
    ranks = []
    guard = subprocess.Popen([*module, "guard", str(tmp_path), "", "4"], stdin=subprocess.PIPE)
    try:
        for _ in range(2):
            ranks.append(
                subprocess.Popen(
                    [*module, "begin", "-c", deaf], env=environ, stdout=subprocess.PIPE, start_new_session=True
                )
            )
            assert ranks[-1].stdout.readline() == b"+\n"  # type: ignore[union-attr]
            if len(ranks) == 1:
                guard.stdin.close()  # type: ignore[union-attr]
                assert ranks[0].stdout.readline() == b"told\n"  # type: ignore[union-attr]  # the guard has seen it
                rank.forget_ranks(tmp_path, "")  # as the next launch does it
                assert not file.exists()
        assert guard.wait(60) == 0
        assert ranks[0].wait(60) == -signal.SIGKILL
        assert ranks[1].poll() is None
        assert file.read_text().split()[0] == str(ranks[1].pid)
    finally:
        guard.kill()
        for one in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


def test_ranks_of_an_earlier_launch_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = resolve("--devices 1 base")
    planned.logs = tmp_path
    (tmp_path / "attempt_0").mkdir()
    (tmp_path / "attempt_0" / "rank_3.pid").write_text("4194305 5")  # of more devices; above all numbers of processes
    monkeypatch.setenv(processes.RANK_FILES, str(tmp_path / "attempt_0" / "rank_"))
    assert processes.lost_ranks() == {3}
    with torchrun._surroundings(planned, 1.0):
        assert processes.lost_ranks() == set()


def attempts(words: str, status: int) -> int:
    """The number of attempts when each of them ends with this status; at most a hundred."""
    config = parse(LaunchConfig, words.split())
    agent = torchrun._Agent(plan.make_plan(config, {}), 20123, config.max_restarts, config.grace)
    count = 1
    while agent._starts_again(torchrun.Failed(status, Path(os.devnull), 0, shown=True)):
        count += 1
        assert count < 100, "for ever"
    assert count <= 1 + agent._remaining_restarts, "torchrun would end it before"
    return count


def test_a_program_that_always_ends_with_the_status_of_too_large_a_batch_is_given_up() -> None:
    """A program that is not ours may end with it, too."""
    assert attempts("--devices 1 base", OutOfMemory.status) == torchrun.MAX_SMALLER + 1
    assert attempts("--devices 1 --max-restarts 2 base", OutOfMemory.status) == torchrun.MAX_SMALLER + 3


def test_one_node_of_several_does_not_start_again_alone() -> None:
    """The others see a lost connection, no status of ours, and count it: both must come to the same number."""
    words = "--devices 1 --nnodes 2 --node-rank 1 --master a:20123 --max-restarts 2 base"
    assert attempts(words, OutOfMemory.status) == attempts(words, 1) == 3


def test_a_run_that_could_not_save_is_started_again_as_often_as_allowed_with_its_batch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert NotSaved.status == 75
    assert [attempts(f"--devices 1 --max-restarts {allowed} base", 75) for allowed in (0, 2)] == [1, 3]
    assert "smaller device batch" not in capfd.readouterr().err


def test_wrong_input_is_never_started_again() -> None:
    assert attempts("--devices 1 --max-restarts 9 base", UserError.status) == 1
