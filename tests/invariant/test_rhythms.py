"""The rhythms of `ascendchat rl` against a real server: killed at any point they end in the same bytes, or finish."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rl_runs as runs
from rl_runs import Server, done, finish, result, rows_of, start, wait_until, words

STEPS = 6
KILLS = int(os.environ.get("ASCENDCHAT_TEST_KILLS", "4"))  # 20 take many minutes


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make_home(tmp_path_factory.mktemp("rhythms"), runs.talkative())


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    with runs.serving(home) as serving:
        yield serving


def killed(home: Path, run: str, *flags: str, kills: int, seed: int) -> None:
    """Kill a run at random moments of its life, then let it end. Files may stay behind that were not renamed yet."""
    chance, command = random.Random(seed), words(run, *flags, steps=STEPS)
    for _ in range(kills):
        until = min(STEPS - 1, done(home, run) + chance.choice([0, 0, 1, 2]))
        process = start(home, command)
        wait_for_step(home, run, process, until)
        time.sleep(chance.uniform(0.0, 1.5))
        process.kill()
        process.wait()
    finish(home, command)


def wait_for_step(home: Path, run: str, process: Any, step: int) -> None:
    wait_until(lambda: process.poll() is not None or done(home, run) >= step)


def check_killed(home: Path, server: Server | None, rhythm: str, kills: int) -> None:
    flags = ["--rhythm", rhythm, *(["--rollouts", server.url] if server else [])]
    name = f"{rhythm}-{'there' if server else 'here'}-{kills}"
    finish(home, words(f"{name}-whole", *flags, steps=STEPS))
    killed(home, f"{name}-killed", *flags, kills=kills, seed=kills)
    assert result(home, f"{name}-whole", STEPS) == result(home, f"{name}-killed", STEPS)
    whole, again = ([row["reward"] for row in rows_of(home, f"{name}-{how}")] for how in ("whole", "killed"))
    assert whole == again
    assert len(whole) == STEPS


@pytest.mark.slow
def test_sync_killed_ends_in_the_same_bytes(home: Path) -> None:
    check_killed(home, None, "sync", KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("rhythm", ["sync", "stream"])
def test_kills_of_the_trainer_of_a_server_end_in_the_same_bytes(home: Path, server: Server, rhythm: str) -> None:
    check_killed(home, server, rhythm, KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4])
def test_async_keeps_the_bound_and_finishes_however_often_it_is_killed(home: Path, server: Server, kills: int) -> None:
    flags = "--rhythm", "async", "--staleness", "2", "--rollouts", server.url
    killed(home, "async", *flags, kills=kills, seed=1)
    rows = rows_of(home, "async")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert max(row["staleness_max"] for row in rows) > 0, "nothing was generated ahead"
    lines = [
        json.loads(line)
        for file in sorted((home / "runs/async/rl/transcripts").glob("step_*"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert len(lines) == STEPS * 4 * 4
    assert {line["finish"] for line in lines} <= {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("rhythm", ["stream", "async"])
def test_a_run_outlives_its_server(home: Path, rhythm: str) -> None:
    """It is killed again and again and comes back with the weights that it was started with."""
    chance = random.Random(0)
    with runs.serving(home) as server:
        process = start(home, words(f"outlives-{rhythm}", "--rhythm", rhythm, "--rollouts", server.url, steps=STEPS))
        for kill in range(3):
            wait_for_step(home, f"outlives-{rhythm}", process, kill + 1)
            time.sleep(chance.uniform(0.0, 0.5))
            server.kill()
            server.start()
        assert process.wait(runs.PATIENCE) == 0, (home / "log").read_text(errors="replace")[-3000:]
    rows = rows_of(home, f"outlives-{rhythm}")
    assert len(rows) == STEPS
    assert all(row["staleness_max"] <= (2 if rhythm == "async" else 0) for row in rows)
    assert all(row["logprob_gap"] < (1e-4 if rhythm == "stream" else 10) for row in rows), "other weights have answered"


@pytest.mark.slow
@pytest.mark.parametrize("rhythm", ["sync", "stream", "async"])
def test_a_workflow_is_asked_of_servers_in_every_rhythm(home: Path, rhythm: str) -> None:
    """Also when the server is lost in between and comes back with other weights."""
    run, bound = f"turns-{rhythm}", 2 if rhythm == "async" else 0
    with runs.serving(home) as server:
        flags = "--rhythm", rhythm, "--staleness", "2", "--rollouts", server.url, "--workflow", "judges:twice"
        process = start(home, words(run, *flags, steps=STEPS))
        wait_for_step(home, run, process, 2)
        server.kill()
        server.start()
        assert process.wait(runs.PATIENCE) == 0, (home / "log").read_text(errors="replace")[-3000:]
    rows = rows_of(home, run)
    assert len(rows) == STEPS
    assert all(row["staleness_max"] <= bound for row in rows)
    assert all(row["logprob_gap"] < (10 if bound else 1e-4) for row in rows), "other weights have answered"
    assert sum(row["rejected"] for row in rows) > 0
    files = sorted((home / "runs" / run / "rl/transcripts").glob("step_*"))
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert all("[user] again" in line["answer"] for line in lines)
    assert rows[0]["rollout_tokens_per_second"] > 0


@pytest.mark.slow
def test_several_updates_of_a_batch_go_on_in_the_middle(home: Path) -> None:
    flags = "--updates", "3", "--prompts-per-step", "6", "--save-every", "1"
    finish(home, words("updates-whole", *flags, steps=STEPS))
    killed(home, "updates-killed", *flags, kills=3, seed=2)
    assert result(home, "updates-whole", STEPS) == result(home, "updates-killed", STEPS)
    rows = rows_of(home, "updates-whole")
    assert ["reward" in row for row in rows] == [True, False, False] * 2
    assert all(row["logprob_gap"] < 1e-5 for row in rows), "the weights that answered are those of the batch"
    assert rows[0]["max_ratio"] < 1 + 1e-4 < rows[2]["max_ratio"], "and no longer those that are trained"


@pytest.mark.slow
def test_other_rhythms_train_on_the_same_answers_at_first(home: Path, server: Server) -> None:
    """One update from the same weights: the sum of the gradients in another order, and nothing else."""
    for rhythm in ("sync", "stream", "async"):
        finish(home, words(f"one-{rhythm}", "--rhythm", rhythm, "--rollouts", server.url, steps=1))
    finish(home, words("one-here", steps=1))
    first = [rows_of(home, f"one-{how}")[0] for how in ("here", "sync", "stream", "async")]
    for row in first[1:]:
        assert row["reward"] == first[0]["reward"]
        assert row["gradient_norm"] == pytest.approx(first[0]["gradient_norm"], rel=1e-3)


def test_a_generator_in_the_trainers_process_only_answers_in_turn(home: Path) -> None:
    for rhythm in ("stream", "async"):
        output = finish(home, words("x", "--rhythm", rhythm), status=2)
        assert f"--rhythm {rhythm}" in output
        assert "--rollouts" in output
        assert "Traceback" not in output
