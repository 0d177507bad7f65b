"""`ascendchat rl` with answers from servers: it learns the same as with the engine in its own process, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import test_rl
from test_rl import finish, rl, start
from torch import Tensor

from ascendchat.checkpoint import read_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
from server_process import KEY, ServerProcess, wait_until

STEPS = 4
home = test_rl.home  # the fixture: a base model that has learnt next to nothing


def servers_of(run: str) -> list[int]:
    """Processes of the server that a run has started for itself, with its wrapper."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if f"/{run}/rl/rollouts/key" in words:
            found.append(int(path.parent.name))
    return found


def fronts_of(run: str) -> list[int]:
    """`ascendchat serve` itself."""
    return [pid for pid in servers_of(run) if b"launch.tied" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def transcripts(home: Path, run: str) -> list[list[dict[str, object]]]:
    paths = sorted((home / "runs" / run / "rl" / "transcripts").iterdir())
    return [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths]


def assert_same(home: Path, one: str, other: str, steps: int = STEPS) -> None:
    """The same answers, and weights that differ by what rounding makes of them: a batch is put together as requests
    arrive, so log-probabilities differ in their last digit, and Adam makes steps of equal size of tiny gradients."""
    assert transcripts(home, one) == transcripts(home, other)
    last = f"rl/step_{steps:06d}"
    mine, theirs, before = (
        read_file(home / "runs" / name / "model.safetensors")
        for name in (f"{one}/{last}", f"{other}/{last}", "tiny/base/step_000030")
    )
    assert distance(mine, theirs) < 1e-3 * distance(mine, before)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


@pytest.fixture(scope="module")
def local(home: Path) -> str:
    """A run with the engine in the trainer's process."""
    finish(home, rl("local", "vowels", "--eval-every", "2", "--eval-examples", "8", steps=STEPS))
    return "local"


def elsewhere(run: str, *more: str, steps: int = STEPS) -> list[str]:
    return rl(run, "vowels", "--eval-every", "2", "--eval-examples", "8", *more, steps=steps)


def wait_for_step(process: subprocess.Popen[str], number: int) -> list[str]:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if f" step {number}" in line or f"step {number}/" in line:
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.slow
def test_a_server_of_its_own_learns_what_the_engine_here_does(home: Path, local: str) -> None:
    output = finish(home, elsewhere("own", "--rollout-devices", "1"))
    assert_same(home, local, "own")
    rows = [test_rl.read_metrics(home / "runs" / run / "rl") for run in (local, "own")]
    scores = [[row["accuracy"] for row in mine if "accuracy" in row] for mine in rows]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
    assert "starting 1 server(s) for rollouts" in output
    folder = home / "runs" / "own" / "rl" / "rollouts"
    assert (folder / "key").stat().st_mode & 0o077 == 0
    assert {path.name for path in folder.iterdir()} <= {"key", "server-0.log", f"weights-{STEPS}.safetensors"}
    assert not servers_of("own"), "it ends with the command"


@pytest.mark.slow
def test_the_server_ends_when_its_trainer_is_killed_and_the_run_goes_on(home: Path, local: str) -> None:
    process = start(home, elsewhere("orphan", "--rollout-devices", "1", "--save-every", "1"))
    wait_for_step(process, 2)
    assert servers_of("orphan")
    process.kill()
    process.wait()
    wait_until(lambda: not servers_of("orphan"), "the end of the server")
    finish(home, elsewhere("orphan", "--rollout-devices", "1", "--save-every", "1"))
    assert_same(home, local, "orphan")


@pytest.mark.slow
def test_a_server_of_its_own_that_dies_is_started_again(home: Path, local: str) -> None:
    process = start(home, elsewhere("revived", "--rollout-devices", "1"))
    wait_for_step(process, 1)
    (front,) = fronts_of("revived")
    os.kill(front, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "it is started again" in output
    assert "is in service again" in output
    assert_same(home, local, "revived")
    assert not servers_of("revived")


@pytest.mark.slow
def test_two_ranks_share_one_server(home: Path) -> None:
    finish(home, ["launch", "--devices", "2", *rl("both-here", "vowels", steps=3)])
    finish(home, ["launch", "--devices", "2", *rl("both", "vowels", "--rollout-devices", "1", steps=3)])
    assert_same(home, "both-here", "both", steps=3)
    assert not servers_of("both")


@pytest.mark.slow
def test_of_two_servers_one_is_killed_and_comes_back(home: Path, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--run", "tiny", "--slots", "16")
    servers = [ServerProcess(home, *flags).start() for _ in range(2)]
    monkeypatch.setenv("ASCENDCHAT_API_KEYS", KEY)
    try:
        urls = ",".join(server.ready().url for server in servers)
        process = start(home, elsewhere("two-servers", "--rollouts", urls))
        wait_for_step(process, 1)
        servers[0].kill()
        servers[0].start()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert_same(home, local, "two-servers")
        assert all(server.process.poll() is None for server in servers), "they are somebody else's"
    finally:
        for server in servers:
            server.kill()


@pytest.mark.slow
def test_what_cannot_work_is_one_sentence(home: Path) -> None:
    block = "inference_engine: {type: vllm, vllm_config: {device: cpu, %s: bfloat16}}\n"
    (home / "engine.yaml").write_text(block % "dtype", encoding="utf-8")
    (home / "typo.yaml").write_text(block % "dtyp", encoding="utf-8")
    cases: list[tuple[list[str], str]] = [
        (["--config", "engine.yaml"], "vLLM opens models of Hugging Face"),
        (["--config", "typo.yaml"], "unknown setting dtyp; did you mean dtype?"),
        (["--rollouts", "http://127.0.0.1:1", "--rollout-devices", "1"], "exclude each other"),
        (["--rollout-devices", "1", "--batch-invariant"], "--batch-invariant holds for answers of this process only"),
        (["--rollouts", "http://127.0.0.1:1", "--rollout-patience", "1"], "no answer from http://127.0.0.1:1"),
        (["--rollout-key-file", "nowhere", "--rollouts", "http://127.0.0.1:1"], "--rollout-key-file nowhere"),
    ]
    for flags, sentence in cases:
        output = finish(home, rl("x", "vowels", *flags), status=2)
        assert sentence in output
        assert "Traceback" not in output
