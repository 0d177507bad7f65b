"""`kill -9` of the servers of `ascendchat rl`, two of them or its own: it ends as if nothing had happened.

Killed are fronts, their workers, or all at once; ASCENDCHAT_TEST_KILLS=20 of them at random points take many minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rl_runs as runs
from rl_runs import MOST, Server, children_of, done, finish, result, rows_of, start, transcripts, wait_until, words

from ascendchat.checkpoint import verify
from ascendchat.rl.buffer import from_tensors
from ascendchat.rl.rollout import TaskQuestion

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("ASCENDCHAT_TEST_KILLS", "0"))  # at random points, after those of the test
STEPS = max(4, KILLS + 2)
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
Strike = Callable[[int, str], bool]  # at a server of that trainer; False: none is there to be struck


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model, and a reward that counts what it should not be given."""
    folder = runs.make_home(tmp_path_factory.mktemp("killed"), runs.talkative())
    (folder / "witness.py").write_text(WITNESS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def servers(home: Path) -> Iterator[list[Server]]:
    """Two of them, with that model."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(runs.serving(home)) for _ in range(2)]


@pytest.fixture(scope="module")
def whole(home: Path, servers: list[Server]) -> str:
    """A run that nobody has disturbed."""
    finish(home, command("whole", "sync", servers))
    return "whole"


def command(run: str, rhythm: str, servers: list[Server]) -> list[str]:
    """Of a run that asks these servers, or one of its own where there are none."""
    where = ["--rollouts", ",".join(server.url for server in servers)] if servers else ["--rollout-devices", "1"]
    flags = ["--reward", "witness:whole", "--save-every", "1", "--keep", str(STEPS), "--rollout-mode", rhythm]
    return words(run, *flags, *where, steps=STEPS)


def kill(what: str, front: int) -> bool:
    """The front, a worker of it, or all its processes at once; False where it has no workers yet."""
    workers = children_of(front)
    if not workers:
        return False
    for pid in {"front": [front], "worker": workers[:1], "all": [front, *workers]}[what]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return True


def disturb(home: Path, run: str, words: list[str], strike: Strike, *kinds: str) -> None:
    """Start a run and strike after every step, while the next answers are written; it must end well."""
    chance, process, struck = random.Random(KILLS), start(home, words), 0
    kinds += tuple(chance.choice(["front", "worker", "all"]) for _ in range(KILLS))
    while struck < len(kinds) and process.poll() is None:
        wait_until(lambda: process.poll() is not None or done(home, run) > struck)  # noqa: B023 (called here)
        time.sleep(chance.uniform(0.0, 1.0) if KILLS else 0.02)
        struck += process.poll() is None and strike(process.pid, kinds[struck])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(runs.PATIENCE)
    if process.poll() is None:
        process.kill()
    assert process.returncode == 0, (home / "log").read_text(errors="replace")[-5000:]
    assert struck == len(kinds), f"it was only struck {struck} times"


def at_fleet(servers: list[Server]) -> Strike:
    """At one after the other; somebody starts again what has ended."""
    turn = itertools.count()

    def once(_: int, what: str) -> bool:
        server = servers[next(turn) % len(servers)]
        struck = server.running and server.ready and kill(what, server.process.pid)
        if struck and what != "worker":
            server.process.wait()
            server.begin()
        return struck

    return once


def at_its_own(trainer: int, what: str) -> bool:
    """At the server that the trainer has started, when its worker answers and another waits for its death."""
    tied = [pid for pid in children_of(trainer) if b"ascendchat.processes" in command_of(pid)]
    fronts = [front for pid in tied for front in children_of(pid)]
    return bool(fronts) and len(children_of(fronts[0])) > 1 and kill(what, fronts[0])


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def check_nothing_is_half(home: Path, run: str) -> None:
    """What was judged, and what the checkpoints have of answers that are not trained yet."""
    rows = rows_of(home, run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["unjudged"] for row in rows) == 0, "the witness has seen a fragment"
    assert all(row["staleness_max"] <= 2 for row in rows)
    assert {line["finish"] for line in transcripts(home, run)} <= {"stop", "length"}
    for folder in (home / "runs" / run / "rl").glob("step_*"):
        slots, _ = from_tensors(verify(folder).extras(), lambda number: TaskQuestion(number, None, number, []))  # type: ignore[arg-type]
        for slot in slots:
            for answer in slot.group.answers if slot.group else ():
                assert answer.ids[-1] in ENDS if answer.finish_reason == "stop" else len(answer.ids) == MOST


def check_same(home: Path, run: str, whole: str) -> None:
    """Not a byte is different."""
    check_nothing_is_half(home, run)
    assert transcripts(home, run) == transcripts(home, whole)
    assert result(home, run, STEPS) == result(home, whole, STEPS)


def test_a_fleet_that_is_killed_changes_no_byte(home: Path, servers: list[Server], whole: str) -> None:
    """First all of one server, then a worker of the other."""
    disturb(home, "killed", command("killed", "sync", servers), at_fleet(servers), "all", "worker")
    check_same(home, "killed", whole)


def test_async_trains_on_nothing_half_or_too_old_though_a_server_is_killed(home: Path, servers: list[Server]) -> None:
    disturb(home, "async", command("async", "async", servers), at_fleet(servers), "front")
    check_nothing_is_half(home, "async")


def test_the_server_that_rl_has_started_itself_is_killed(home: Path, whole: str) -> None:
    """Which rl looks after: it starts a new one and gives it the weights."""
    disturb(home, "own", command("own", "sync", []), at_its_own, "front")
    check_same(home, "own", whole)
