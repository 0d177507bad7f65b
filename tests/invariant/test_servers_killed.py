"""`kill -9` of the servers of `ascendchat rl`, two of them, at random points: it ends as if nothing had happened.

Killed are fronts, their workers, or all at once. ASCENDCHAT_TEST_KILLS=20 takes many minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rl_runs as runs
from rl_runs import MOST, Server, children_of, done, finish, result, rows_of, start, wait_until, words

from ascendchat.checkpoint import verify
from ascendchat.train.buffer import from_tensors
from ascendchat.train.rollout import Question

KILLS = int(os.environ.get("ASCENDCHAT_TEST_KILLS", "2"))
STEPS = max(4, KILLS)
ENDS = runs.make.tokenizer().stops
WITNESS = f'''
from judges import vowels


def whole(prompt, completion, completion_ids, finish, **row):
    """A fragment is not judged: the run counts it."""
    ended = completion_ids[-1] in {ENDS} if finish == "stop" else finish == "length" and len(completion_ids) == {MOST}
    if not ended:
        raise RuntimeError(f"a fragment: {{finish}}, {{len(completion_ids)}} tokens")
    return vowels(prompt, completion, **row)
'''
FLAGS = "--reward", "witness:whole", "--save-every", "1", "--keep", str(STEPS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = runs.make_home(tmp_path_factory.mktemp("killed"), runs.talkative())
    (folder / "witness.py").write_text(WITNESS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def servers(home: Path) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(runs.serving(home)) for _ in range(2)]


@pytest.fixture(scope="module", params=["sync", "stream"])
def whole(request: pytest.FixtureRequest, home: Path, servers: list[Server]) -> str:
    """The rhythm of a run `whole-RHYTHM` that nobody has disturbed."""
    finish(home, words(f"whole-{request.param}", *flags_of(request.param, servers), steps=STEPS))
    return str(request.param)


def flags_of(rhythm: str, servers: list[Server]) -> list[str]:
    return [*FLAGS, "--rhythm", rhythm, "--rollouts", ",".join(server.url for server in servers)]


def strike(front: int, chance: random.Random) -> str | None:
    """Kill the front, a worker of it, or all its processes at once; None where it has no workers."""
    what, workers = chance.choice(["front", "worker", "all"]), children_of(front)
    if not workers:
        return None
    pids = {"front": [front], "worker": workers[:1], "all": [front, *workers]}[what]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return what


def disturb(home: Path, run: str, process: Any, strike: Callable[[random.Random], str | None], seed: int) -> list[str]:
    """Strike at random points of a run, about once a step; what was killed. None: nothing was there to be killed."""
    chance, struck = random.Random(seed), []
    while len(struck) < KILLS and process.poll() is None:
        reached = len(struck) * (STEPS - 2) // KILLS
        wait_until(lambda: process.poll() is not None or done(home, run) >= reached)  # noqa: B023 (called here)
        time.sleep(chance.uniform(0.0, 1.0))
        if process.poll() is None and (what := strike(chance)):
            struck.append(what)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(runs.PATIENCE)
    if process.poll() is None:
        process.kill()
    assert process.returncode == 0, (home / "log").read_text(errors="replace")[-5000:]
    print(f"{run}: killed {len(struck)} times: {', '.join(struck)}")
    assert len(struck) >= max(1, KILLS * 3 // 4), f"it was only struck {len(struck)} times"
    return struck


def of_fleet(servers: list[Server]) -> Callable[[random.Random], str | None]:
    """Of servers that somebody starts again when their front has died."""

    def once(chance: random.Random) -> str | None:
        for server in servers:
            if not server.running:
                server.begin()
        there = [server for server in servers if server.running and server.ready]
        what = strike((server := chance.choice(there)).process.pid, chance) if there else None
        if what in ("front", "all"):
            server.process.wait()
            server.begin()
        return what

    return once


def transcripts(home: Path, run: str) -> list[dict[str, Any]]:
    files = sorted((home / "runs" / run / "rl/transcripts").glob("step_*"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def check_nothing_is_half(home: Path, run: str) -> None:
    """What was judged, and what the checkpoints have of answers that are not trained yet."""
    rows = rows_of(home, run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["unjudged"] for row in rows) == 0, "the witness has seen a fragment"
    assert {line["finish"] for line in transcripts(home, run)} <= {"stop", "length"}
    for folder in (home / "runs" / run / "rl").glob("step_*"):
        slots, _ = from_tensors(verify(folder).extras(), lambda number: Question(number, None, number, []))  # type: ignore[arg-type]
        for slot in slots:
            for answer in slot.group.answers if slot.group else slot.answers:
                if answer.finish_reason == "cancelled":
                    assert slot.group is None, "half an answer in a group"
                else:
                    assert answer.ids[-1] in ENDS if answer.finish_reason == "stop" else len(answer.ids) == MOST


@pytest.mark.slow
def test_a_fleet_that_is_killed_again_and_again_changes_no_byte(home: Path, servers: list[Server], whole: str) -> None:
    run = f"killed-{whole}"
    process = start(home, words(run, *flags_of(whole, servers), steps=STEPS))
    disturb(home, run, process, of_fleet(servers), seed=KILLS)
    check_nothing_is_half(home, run)
    assert transcripts(home, run) == transcripts(home, f"whole-{whole}")
    assert result(home, run, STEPS) == result(home, f"whole-{whole}", STEPS)


@pytest.mark.slow
def test_async_trains_on_nothing_half_or_too_old_though_its_servers_are_killed(
    home: Path, servers: list[Server]
) -> None:
    process = start(home, words("killed-async", *flags_of("async", servers), steps=STEPS))
    disturb(home, "killed-async", process, of_fleet(servers), seed=KILLS)
    check_nothing_is_half(home, "killed-async")
    assert all(row["staleness_max"] <= 2 for row in rows_of(home, "killed-async"))


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["stream"], indirect=True)
def test_the_server_that_rl_has_started_itself_is_killed(home: Path, servers: list[Server], whole: str) -> None:
    """Two processes that answer behind one front, which rl looks after."""
    run = f"own-{whole}"
    process = start(home, words(run, *FLAGS, "--rhythm", whole, "--rollout-devices", "2", steps=STEPS))

    def once(chance: random.Random) -> str | None:
        tied = [pid for pid in children_of(process.pid) if b"launch.tied" in command_of(pid)]
        fronts = [front for pid in tied for front in children_of(pid)]
        there = bool(fronts) and len(children_of(fronts[0])) > 1  # its workers have begun
        return strike(fronts[0], chance) if there else None

    disturb(home, run, process, once, seed=KILLS + 1)
    check_nothing_is_half(home, run)
    assert transcripts(home, run) == transcripts(home, f"whole-{whole}")
    assert result(home, run, STEPS) == result(home, f"whole-{whole}", STEPS)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
