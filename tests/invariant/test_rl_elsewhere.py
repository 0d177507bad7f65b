"""`ascendchat rl` with answers from servers: it learns the same as with the engine in its own process, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import rl_runs as runs
from rl_runs import Server, done, finish, kill_in, rows_of, run_here, start, transcripts, wait_until, words
from torch import Tensor
from warm_process import ServerPopen

from ascendchat.checkpoint import read_file
from ascendchat.runs.run import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

STEPS = 4
EXAMINED = "--eval-every", "2", "--eval-examples", "4"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, and functions that judge."""
    return runs.make_home(tmp_path_factory.mktemp("elsewhere"), runs.talkative())


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    """A server of somebody else's; tests that kill it start it again."""
    with runs.serving(home) as serving:
        yield serving


@pytest.fixture(scope="module")
def local(home: Path) -> str:
    """The name of a run with the engine in the trainer's process."""
    run_here(home, words("local", *EXAMINED, steps=STEPS))
    return "local"


@pytest.fixture(scope="module")
def stream(home: Path, server: Server) -> str:
    """The name of a run that trains on groups as they finish."""
    finish(home, words("stream", "--rollout-mode", "stream", "--rollouts", server.url, steps=STEPS))
    return "stream"


def assert_same(home: Path, one: str, other: str) -> None:
    """The same answers, and weights that differ by what rounding makes of them: a batch is put together as requests
    arrive, so log-probabilities differ in their last digit, and Adam makes steps of equal size of tiny gradients."""
    assert_near(home, one, other)
    scores = [[row["accuracy"] for row in accuracies(home, run)] for run in (one, other)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2


def assert_near(home: Path, one: str, other: str) -> None:
    assert transcripts(home, one) == transcripts(home, other)
    last = f"rl/step_{STEPS:06d}"
    mine, theirs, before = (
        read_file(home / "runs" / name / "model.safetensors")
        for name in (f"{one}/{last}", f"{other}/{last}", "tiny/sft/step_000001")
    )
    assert distance(mine, theirs) < 1e-3 * distance(mine, before)


def accuracies(home: Path, run: str) -> list[dict[str, float]]:
    """What the examinations of a run have found."""
    return [row for row in read_metrics(home / "runs" / run / "rl") if "accuracy" in row]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5


def servers_of(run: str) -> list[int]:
    """Processes of the server that a run has started for itself, with its wrapper."""
    return [pid for pid, words in commands().items() if f"/{run}/rl/rollouts/key" in words]


def front_of(run: str) -> int:
    """`ascendchat serve` itself."""
    (pid,) = (pid for pid in servers_of(run) if (tied := "ascendchat.processes") not in commands().get(pid, tied))
    return pid


def commands() -> dict[int, str]:
    """The command line of every process there is."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_bytes().decode(errors="replace")
        except OSError:  # it has just ended
            continue
    return found


def test_a_server_teaches_what_the_engine_here_does(home: Path, server: Server, local: str) -> None:
    run_here(home, words("there", "--rollouts", server.url, *EXAMINED, steps=STEPS))
    assert_same(home, local, "there")
    assert server.running, "it is somebody else's"


def test_two_ranks_share_a_server_of_their_own_which_is_started_again_when_it_dies(home: Path, local: str) -> None:
    command = ["launch", "--devices", "2", *words("own", "--rollout-devices", "1", steps=STEPS)]
    process = start(home, command, how=ServerPopen)
    wait_until(lambda: process.poll() is not None or done(home, "own") >= 1)
    os.kill(front_of("own"), signal.SIGKILL)
    assert process.wait(runs.PATIENCE) == 0, (home / "log").read_text(errors="replace")[-3000:]
    said = (home / "log").read_text(errors="replace")
    for sentence in ("starting 1 server(s) for rollouts", "it is started again", "is in service again"):
        assert sentence in said
    one, own = rows_of(home, local), rows_of(home, "own")
    assert own[0]["reward"] == pytest.approx(one[0]["reward"], abs=1e-6), "the same answers"
    assert own[0]["gradient_norm"] == pytest.approx(one[0]["gradient_norm"], rel=1e-3)
    assert len(own) == STEPS
    assert all(row["logprob_gap"] < 1e-4 for row in own), "other weights have answered"
    assert len(list((home / "runs/own/rl/transcripts").iterdir())) == STEPS * 2
    folder = home / "runs/own/rl/rollouts"
    assert (folder / "key").stat().st_mode & 0o077 == 0
    assert {path.name for path in folder.iterdir()} <= {"key", "server-0.log", f"weights-{STEPS}.safetensors"}
    assert not servers_of("own"), "it ends with the command"


def test_stream_trains_on_the_same_answers_at_first(home: Path, local: str, stream: str) -> None:
    """One update from the same weights: the sum of the gradients in another order, and nothing else."""
    here, there = rows_of(home, local)[0], rows_of(home, stream)[0]
    assert there["reward"] == here["reward"]
    assert there["gradient_norm"] == pytest.approx(here["gradient_norm"], rel=1e-3)
    assert there["rollout_tokens_per_second"] > 0


def test_a_killed_trainer_of_a_server_goes_on_with_the_same_answers(home: Path, server: Server, stream: str) -> None:
    command = words("killed", "--rollout-mode", "stream", "--rollouts", server.url, steps=STEPS)
    kill_in(home, command, step=3)
    finish(home, command)
    assert_near(home, "killed", stream)
    assert [row["reward"] for row in rows_of(home, "killed")] == [row["reward"] for row in rows_of(home, stream)]


def test_async_keeps_the_bound_and_finishes_whoever_is_killed(home: Path, server: Server, local: str) -> None:
    """The trainer in the middle, later its server, which comes back with the weights that it was started with."""
    steps = 6
    command = words("async", "--rollout-mode", "async", "--staleness", "2", "--rollouts", server.url, steps=steps)
    kill_in(home, command, step=2)
    process = start(home, command)
    wait_until(lambda: process.poll() is not None or done(home, "async") >= 3)
    server.kill()
    server.start()
    assert process.wait(runs.PATIENCE) == 0, (home / "log").read_text(errors="replace")[-3000:]
    rows = rows_of(home, "async")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert max(row["staleness_max"] for row in rows) > 0, "nothing was generated ahead"
    assert rows[0]["reward"] == rows_of(home, local)[0]["reward"], "the first answers are of the first weights"
    lines = transcripts(home, "async")
    assert len(lines) == steps * 4 * 4
    assert {line["finish"] for line in lines} <= {"stop", "length"}


def test_a_workflow_is_asked_of_a_server(home: Path, server: Server) -> None:
    flags = "--rollout-mode", "stream", "--rollouts", server.url, "--workflow", "judges:twice"
    run_here(home, words("turns", *flags, steps=2))
    rows = rows_of(home, "turns")
    assert len(rows) == 2
    assert all(row["staleness_max"] == 0 for row in rows)
    assert all(row["logprob_gap"] < 1e-4 for row in rows), "other weights have answered"
    assert sum(row["rejected"] for row in rows) > 0
    assert all("[user] again" in line["answer"] for line in transcripts(home, "turns"))


def test_what_cannot_work_is_one_sentence(home: Path) -> None:
    block = "inference_engine: {type: vllm, vllm_config: {device: cpu, %s: bfloat16}}\n"
    (home / "engine.yaml").write_text(block % "dtype", encoding="utf-8")
    (home / "typo.yaml").write_text(block % "dtyp", encoding="utf-8")
    nobody = "--rollouts", "http://127.0.0.1:1"
    cases: list[tuple[list[str], str]] = [
        (["--config", "engine.yaml"], "vLLM opens models of Hugging Face"),
        (["--config", "typo.yaml"], "unknown setting dtyp; did you mean dtype?"),
        ([*nobody, "--rollout-devices", "1"], "exclude each other"),
        (["--rollout-devices", "1", "--batch-invariant"], "--batch-invariant holds for answers of this process only"),
        ([*nobody, "--rollout-patience", "1"], "no answer from http://127.0.0.1:1"),
        (["--rollout-key-file", "nowhere", *nobody], "--rollout-key-file nowhere"),
    ]
    for flags, sentence in cases:
        said = run_here(home, words("x", *flags), status=2)
        assert sentence in said
        assert "Traceback" not in said
