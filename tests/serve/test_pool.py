"""Requests and real worker processes: routing, limits, timeouts, cancelling, workers that die or hang."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import running_pool as real
import running_server as served

from ascendchat.config.serve import ServeConfig
from ascendchat.errors import UserError
from ascendchat.serve import pool as child
from ascendchat.serve.pool import MAX_ATTEMPTS, AnswerFailed, Child, Process, WorkerPool
from ascendchat.serve.worker_messages import Chunk, Open

pytestmark = pytest.mark.slow


def test_only_the_first_worker_that_cannot_open_the_model_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    """Both say why before the command has ended; whatever comes after the first sentence is not said."""

    async def test() -> None:
        pool = WorkerPool(ServeConfig(device_type="cpu", run="none", devices=2))
        pool.processes = []  # what they would say comes from here
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(0)
        for text in ("first", "second"):
            pool.take(Process(pool, 0), UserError(text))
        with pytest.raises(UserError, match="first"):
            await starting

    real.run(test)
    assert "second" not in capfd.readouterr().err


@pytest.mark.parametrize("kills", [2, 3])
def test_a_worker_that_is_killed_while_it_opens_the_model_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """It is started again, as one that has answered would be; but not for ever."""
    opened, begin = [], Child.open

    def struck(child: Child, message: Open, take: Callable[[Any], None]) -> None:
        begin(child, message, take)
        opened.append(child)
        if len(opened) <= kills:
            os.kill(child.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Child, "open", struck)

    async def test() -> None:
        async with real.pool(tmp_path) as pool:
            assert len(pool.ready) == 1
            assert len(opened) == 3

    if kills == 3:
        with pytest.raises(UserError, match=r"while it opened the model \(signal 9\)"):
            real.run(test)
    else:
        real.run(test)


def test_a_worker_that_hangs_while_it_opens_the_model_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pool itself has killed it, after twenty minutes as a rule: two more would say nothing new."""
    opened: list[Child] = []
    monkeypatch.setattr(Child, "open", lambda child, message, take: opened.append(child))  # it hears nothing

    async def test() -> None:
        pool = WorkerPool(ServeConfig(device_type="cpu", run="none", devices=1), patience=0.05)
        try:
            with pytest.raises(UserError, match="while it opened the model"):
                await pool.start()
        finally:
            await pool.close(drain=0)

    real.run(test)
    assert len(opened) == 1
    assert "has work and has said nothing" in capfd.readouterr().err


class Shared:
    """A pool for several tests, on a loop of its own; each leaves it as it was."""

    def __init__(self, home: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.context = real.pool(home, slots=2, max_queue=5)
        self.pool = self.loop.run_until_complete(self.context.__aenter__())

    def run(self, test: Callable[[WorkerPool], Coroutine[Any, Any, None]]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(test(self.pool), served.PATIENCE))

    def close(self) -> None:
        self.loop.run_until_complete(self.context.__aexit__(None, None, None))
        self.loop.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """One for the whole file."""
    made = Shared(tmp_path_factory.mktemp("shared"))
    yield made
    made.close()


def of_shared_pool(test: Callable[[WorkerPool], Coroutine[Any, Any, None]]) -> Callable[[Shared], None]:
    """A test that is given the pool which several share."""

    def run(shared: Shared) -> None:
        shared.run(test)

    return run


@of_shared_pool
async def test_a_killed_worker_is_replaced_and_nothing_that_waited_is_lost(pool: WorkerPool) -> None:
    """Under load: what nobody has seen is asked again, what somebody has seen gets a clear error. The process that
    waited takes its place, which saves the import of torch."""
    expected = (await real.whole(pool.submit(real.request(40), streams=False))).ids
    before = pool.processes[0].restarts
    for _ in range(2):
        await real.until(lambda: pool._spare is not None and bool(pool.ready))
        assert pool._spare is not None
        spare = pool._spare.process.pid
        seen = pool.submit(real.request(4000), streams=True)
        assert (await seen.__anext__()).ids
        unseen = [pool.submit(real.request(40), streams=bool(n % 2)) for n in range(6)]
        await real.until(lambda: pool.processes[0].room <= 0)
        os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
        answers = await real.gather(*(real.whole(pending) for pending in unseen))
        assert [answer.ids for answer in answers] == [expected] * 6
        with pytest.raises(AnswerFailed, match="the worker that wrote this answer has died; please ask again"):
            await real.whole(seen)
        assert real.pid(pool.processes[0]) == spare
    assert pool.processes[0].restarts == before + 2


def test_the_end_of_a_worker_leaves_no_zombie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that has nothing to do with ours, and so starts at once."""
    wait = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]

    def popen(command: list[str], **settings: Any) -> Any:
        return subprocess.Popen(wait, **settings)

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))

    async def test() -> None:
        first = await Child.start()
        os.kill(first.process.pid, signal.SIGKILL)
        await first.gone.wait()
        second = await Child.start()
        for one in (first, second):
            assert await one.end() == -signal.SIGKILL
            with pytest.raises(ChildProcessError):
                os.waitpid(one.process.pid, os.WNOHANG)

    real.run(test)


@of_shared_pool
async def test_a_request_that_kills_workers_is_given_up(pool: WorkerPool) -> None:
    await real.whole(pool.submit(real.request(), streams=False))
    poison = pool.submit(real.request(4000), streams=False)
    task = asyncio.ensure_future(real.outcome(poison))
    for attempt in range(1, MAX_ATTEMPTS + 1):
        await real.until(lambda n=attempt: poison.attempts == n and poison.first_token is not None)
        os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
    failure = await task
    assert isinstance(failure, AnswerFailed), failure
    assert not failure.refused
    assert poison.attempts == MAX_ATTEMPTS
    assert (await real.whole(pool.submit(real.request(), streams=False))).finish_reason == "length"


def test_a_worker_that_dies_at_every_start_is_tried_until_it_lives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with real.pool(tmp_path, queue_timeout=3.0) as pool:
            await real.until(lambda: pool._spare is not None)
            (tmp_path / "runs" / "tiny").rename(tmp_path / "runs" / "gone")
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
            answer = await real.outcome(pool.submit(real.request(), streams=False))
            assert isinstance(answer, AnswerFailed)
            assert re.search(r"no answer could begin within \d+ s", str(answer))  # 3, or more on a busy machine
            await real.until(lambda: pool.processes[0].early_deaths >= 2)
            (tmp_path / "runs" / "gone").rename(tmp_path / "runs" / "tiny")
            await real.until(lambda: bool(pool.ready))
            assert (await real.whole(pool.submit(real.request(), streams=False))).ids

    real.run(test)
    said = capfd.readouterr().err
    assert "worker 0 has died (exit status 2); it is started again" in said
    assert f"worker 0: {tmp_path}" in said


def be_patient(pool: WorkerPool, seconds: float) -> None:
    """From now on; the start of a worker may take longer on a busy machine."""
    pool.patience = seconds
    for process in pool.processes:
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None


@of_shared_pool
async def test_a_worker_that_hangs_is_killed_and_its_work_done_by_another(pool: WorkerPool) -> None:
    expected = (await real.whole(pool.submit(real.request(20), streams=False))).ids
    worker, hanging = pool.processes[0], real.pid(pool.processes[0])
    usual, before = pool.patience, worker.restarts
    be_patient(pool, 0.05)
    worker.watch()
    await asyncio.sleep(0.5)
    assert worker.restarts == before, "a worker without work may be silent"
    be_patient(pool, 1.0)
    os.kill(hanging, signal.SIGSTOP)
    answer = asyncio.ensure_future(real.whole(pool.submit(real.request(20), streams=False)))
    await real.until(lambda: not served.running(hanging))
    be_patient(pool, usual)
    assert (await answer).ids == expected
    assert worker.restarts == before + 1


def test_a_worker_that_dies_while_the_server_stops_is_not_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with real.pool(tmp_path) as pool:
            pending = pool.submit(real.request(4000), streams=True)
            assert (await pending.__anext__()).ids
            closing = asyncio.ensure_future(pool.close(drain=100 * served.PATIENCE))
            await real.until(lambda: pool.closing)
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
            with pytest.raises(AnswerFailed, match="has died"):
                await real.whole(pending)
            await asyncio.wait_for(closing, 60)

    real.run(test)


def test_time_limits(tmp_path: Path) -> None:
    async def test() -> None:
        async with real.pool(tmp_path, slots=1, queue_timeout=1.0, request_timeout=1.5) as pool:
            await real.outcome(pool.submit(real.request(), streams=False))  # the first step of a process is slow
            long = [pool.submit(real.request(4000), streams=n == 0) for n in range(4)]
            outcomes = await real.gather(*(real.outcome(pending) for pending in long))
            assert isinstance(outcomes[0], Chunk)
            assert (outcomes[0].finish_reason, 0 < len(outcomes[0].ids) < 4000) == ("timeout", True)
            late = [one for one in outcomes if isinstance(one, AnswerFailed) and not one.refused]
            assert re.fullmatch(r"no answer could begin within \d+ s; try again later", str(late[0]))
            await real.until(lambda: not pool.processes[0].requests)
            assert (await real.whole(pool.submit(real.request(), streams=False))).ids

    real.run(test)


@of_shared_pool
async def test_what_cannot_be_answered_is_refused_with_the_reason(pool: WorkerPool) -> None:
    outcome = await real.outcome(pool.submit(real.request(prompt=(10**6,)), streams=False))
    assert isinstance(outcome, AnswerFailed)
    assert outcome.refused
    assert "a prompt needs at least one token" in str(outcome)


@of_shared_pool
async def test_cancelling_frees_the_slot_wherever_the_request_is(pool: WorkerPool) -> None:
    second, running, at_hand, waiting = (pool.submit(real.request(4000), streams=True) for _ in range(4))
    await second.__anext__()
    await running.__anext__()
    assert (at_hand.worker, waiting.worker) == (pool.processes[0], None)
    for pending in (waiting, at_hand, running, second):
        pending.cancel()
    assert [part async for part in running] == []
    await real.until(lambda: not pool.processes[0].requests)
    kept, queued = pool.submit(real.request(4000), streams=True), pool.submit(real.request(4000), streams=True)
    await kept.__anext__()
    await pool.pause("keep")
    kept.cancel()
    queued.cancel()
    await real.until(lambda: not pool.processes[0].requests)
    await pool.resume()
    assert (await real.whole(pool.submit(real.request(), streams=False))).ids


@of_shared_pool
async def test_a_client_that_does_not_read_stalls_nobody_and_holds_little(pool: WorkerPool) -> None:
    expected = (await real.whole(pool.submit(real.request(150), streams=False))).ids
    lazy = pool.submit(real.request(150), streams=True)
    others = [await real.whole(pool.submit(real.request(20), streams=True)) for _ in range(5)]
    assert all(len(answer.ids) == 20 for answer in others)
    await real.until(lambda: lazy.closed)
    assert len(lazy._chunks) <= 65
    parts = [part async for part in lazy]
    assert len(parts) == 1
    assert parts[0].ids == expected


def test_two_workers_share_the_work_and_turns_of_a_conversation_stay_together(tmp_path: Path) -> None:
    async def test() -> None:
        async with real.pool(tmp_path, devices=2, slots=4) as pool:
            assert len({real.pid(process) for process in pool.processes}) == 2
            requests = [pool.submit(real.request(40, (n + 1,)), streams=True) for n in range(8)]
            assert sorted(len(process.requests) for process in pool.processes) == [4, 4]
            answers: list[Chunk] = await real.gather(*(real.whole(pending) for pending in requests))
            assert len({tuple(answer.ids) for answer in answers}) > 1
            for conversation in range(3):
                prompt = tuple((7 * conversation + n) % 200 for n in range(80))
                places = []
                for _ in range(3):
                    pending = pool.submit(real.request(30, prompt), streams=True)
                    places.append(pending.worker.index)
                    prompt = (*prompt, *(await real.whole(pending)).ids)
                assert len(set(places)) == 1

    real.run(test)


@of_shared_pool
async def test_restarted_workers_open_the_checkpoint_of_the_others(pool: WorkerPool) -> None:
    """Not the newer one that a trainer has written in the meantime."""
    first = pool.ready[0]
    newer = served.save(Path(pool.config.checkpoint).parents[3], served.make.model(9, seq_len=real.CONTEXT), step=2)
    os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
    await real.until(lambda: not pool.ready)
    await real.until(lambda: bool(pool.ready))
    assert (pool.ready[0].checksum, pool.ready[0].model) == (first.checksum, first.model)
    shutil.rmtree(newer)
