"""Requests and real worker processes: routing, limits, timeouts, cancelling, workers that die or hang."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import running_pool as real
import running_server as served
from warm_process import nursery

from ascendchat.config import UserError
from ascendchat.config.serve import ServeConfig
from ascendchat.serve import child
from ascendchat.serve.child import Child
from ascendchat.serve.messages import Open, Part
from ascendchat.serve.pool import MOST_ATTEMPTS, Failure, Overloaded, Pool, Process

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_only_the_first_worker_that_cannot_open_the_model_is_heard(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both say why before the command has ended; whatever comes after the first sentence is not said."""

    async def test() -> None:
        pool = Pool(ServeConfig(device_type="cpu", run="none", devices=2))
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
    home: Path, monkeypatch: pytest.MonkeyPatch, kills: int
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
        async with real.pool(home) as pool:
            assert len(pool.ready) == 1
            assert len(opened) == 3

    if kills == 3:
        with pytest.raises(UserError, match=r"while it opened the model \(signal 9\)"):
            real.run(test)
    else:
        real.run(test)


def test_a_worker_that_hangs_while_it_opens_the_model_is_not_tried_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pool itself has killed it, after twenty minutes as a rule: two more would say nothing new."""
    opened: list[Child] = []
    monkeypatch.setattr(Child, "open", lambda child, message, take: opened.append(child))  # it hears nothing

    async def test() -> None:
        pool = Pool(ServeConfig(device_type="cpu", run="none", devices=1), patience=0.05)
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
        self.loop, self.home = asyncio.new_event_loop(), home
        self.context = real.pool(home, slots=2, max_queue=5)
        self.pool = self.loop.run_until_complete(self.context.__aenter__())

    def run(self, test: Callable[[Pool], Coroutine[Any, Any, None]]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(test(self.pool), served.PATIENCE))

    def close(self) -> None:
        self.loop.run_until_complete(self.context.__aexit__(None, None, None))
        self.loop.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("shared")
        patch.setenv("ASCENDCHAT_HOME", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Shared(folder)
    yield made
    made.close()


def has_spare(pool: Pool) -> bool:
    return pool._spare is not None


def test_a_killed_worker_is_replaced_and_nothing_that_waited_is_lost(shared: Shared) -> None:
    """Ten times, under load: what nobody has seen is asked again, what somebody has seen gets a clear error."""

    async def test(pool: Pool) -> None:
        expected = (await real.whole(pool.submit(real.request(40), streams=False))).ids
        before = pool.processes[0].restarts
        for _ in range(10):
            await real.until(lambda: has_spare(pool) and bool(pool.ready))
            seen = pool.submit(real.request(4000), streams=True)
            assert (await seen.__anext__()).ids
            unseen = [pool.submit(real.request(40), streams=bool(n % 2)) for n in range(6)]
            await real.until(lambda: pool.processes[0].room <= 0)
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
            began = time.monotonic()
            answers = await real.gather(*(real.whole(ticket) for ticket in unseen))
            print(f"all that waited answered {time.monotonic() - began:.2f} s after the end of their worker")
            assert [answer.ids for answer in answers] == [expected] * 6
            with pytest.raises(Failure, match="the worker that wrote this answer has died; please ask again"):
                await real.whole(seen)
        assert pool.processes[0].restarts == before + 10

    shared.run(test)


def quiet(number: int) -> bool:
    """The process has done nothing for a second."""
    before = served.cpu_seconds(number)
    time.sleep(1)
    return served.cpu_seconds(number) == before


def test_the_process_at_hand_saves_the_import_of_torch(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "subprocess", subprocess)  # from here on nothing starts warm

    async def again(pool: Pool) -> float:
        os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
        began = time.monotonic()
        await real.whole(pool.submit(real.request(), streams=False))
        return time.monotonic() - began

    async def test(pool: Pool) -> None:
        await real.until(lambda: has_spare(pool))
        assert pool._spare is not None
        await pool._spare.end()
        without = await again(pool)
        await real.until(lambda: has_spare(pool))
        spare = pool._spare.process.pid
        await real.until(lambda: quiet(spare))
        with_it = await again(pool)
        assert real.pid(pool.processes[0]) == spare
        print(f"answered again after {with_it:.2f} s with a process at hand, {without:.2f} s without")
        assert with_it < without

    shared.run(test)


def test_a_request_that_kills_workers_is_given_up(shared: Shared) -> None:
    async def test(pool: Pool) -> None:
        await real.whole(pool.submit(real.request(), streams=False))
        poison = pool.submit(real.request(4000), streams=False)
        task = asyncio.ensure_future(real.outcome(poison))
        for attempt in range(1, MOST_ATTEMPTS + 1):
            await real.until(lambda n=attempt: poison.attempts == n and poison.first_token is not None)
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
        failure = await task
        assert isinstance(failure, Failure), failure
        assert not failure.refused
        assert poison.attempts == MOST_ATTEMPTS
        assert (await real.whole(pool.submit(real.request(), streams=False))).finish_reason == "length"

    shared.run(test)


def test_a_worker_that_dies_at_every_start_is_tried_until_it_lives(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with real.pool(home, queue_timeout=3.0) as pool:
            await real.until(lambda: has_spare(pool))
            (home / "runs" / "tiny").rename(home / "runs" / "gone")
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
            answer = await real.outcome(pool.submit(real.request(), streams=False))
            assert isinstance(answer, Failure)
            assert re.search(r"no answer could begin within \d+ s", str(answer))  # 3, or more on a busy machine
            await real.until(lambda: pool.processes[0].early_deaths >= 2)
            (home / "runs" / "gone").rename(home / "runs" / "tiny")
            await real.until(lambda: bool(pool.ready))
            assert (await real.whole(pool.submit(real.request(), streams=False))).ids

    real.run(test)
    said = capfd.readouterr().err
    assert "worker 0 has died (exit status 2); it is started again" in said
    assert f"worker 0: {home}" in said


def be_patient(pool: Pool, seconds: float) -> None:
    """From now on; the start of a worker may take longer on a busy machine."""
    pool.patience = seconds
    for process in pool.processes:
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None


def test_a_worker_that_hangs_is_killed_and_its_work_done_by_another(shared: Shared) -> None:
    async def test(pool: Pool) -> None:
        expected = (await real.whole(pool.submit(real.request(20), streams=False))).ids
        worker, hanging = pool.processes[0], real.pid(pool.processes[0])
        usual, before = pool.patience, worker.restarts
        be_patient(pool, 1.0)
        worker.watch()
        await asyncio.sleep(3.0)
        assert worker.restarts == before, "a worker without work may be silent"
        be_patient(pool, 3.0)
        os.kill(hanging, signal.SIGSTOP)
        answer = asyncio.ensure_future(real.whole(pool.submit(real.request(20), streams=False)))
        await real.until(lambda: not served.running(hanging))
        be_patient(pool, usual)
        assert (await answer).ids == expected
        assert worker.restarts == before + 1

    shared.run(test)


def test_a_worker_that_dies_while_the_server_stops_is_not_waited_for(home: Path) -> None:
    async def test() -> None:
        async with real.pool(home) as pool:
            ticket = pool.submit(real.request(4000), streams=True)
            assert (await ticket.__anext__()).ids
            closing = asyncio.ensure_future(pool.close(drain=100 * served.PATIENCE))
            await real.until(lambda: pool.closing)
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
            with pytest.raises(Failure, match="has died"):
                await real.whole(ticket)
            await asyncio.wait_for(closing, 60)

    real.run(test)


def test_too_many_requests_are_turned_away_and_none_hang(shared: Shared) -> None:
    async def test(pool: Pool) -> None:
        tickets, refused = [], []
        for _ in range(208):
            try:
                tickets.append(pool.submit(real.request(30), streams=True))
            except Overloaded as error:
                refused.append(error.retry_after)
        assert len(tickets) == 2 + 1 + 5  # one is at hand in the worker
        assert len(refused) == 200
        assert all(1 <= seconds <= 60 for seconds in refused)
        answers = await real.gather(*(real.whole(ticket) for ticket in tickets))
        assert all(len(answer.ids) == 30 for answer in answers)
        assert (await real.whole(pool.submit(real.request(), streams=False))).ids

    shared.run(test)


def test_time_limits(home: Path) -> None:
    async def test() -> None:
        async with real.pool(home, slots=1, queue_timeout=1.0, request_timeout=4.0) as pool:
            await real.outcome(pool.submit(real.request(), streams=False))  # the first step of a process is slow
            long = [pool.submit(real.request(4000), streams=n == 0) for n in range(4)]
            outcomes = await real.gather(*(real.outcome(ticket) for ticket in long))
            texts = [str(one) for one in outcomes]
            assert texts[0] == "the answer took longer than 4 s and was ended"
            assert any(re.fullmatch(r"no answer could begin within \d+ s; try again later", text) for text in texts[1:])
            assert all(isinstance(one, Failure) and not one.refused for one in outcomes)
            await real.until(lambda: not pool.processes[0].tickets)
            assert (await real.whole(pool.submit(real.request(), streams=False))).ids

    real.run(test)


def test_what_cannot_be_answered_is_refused_with_the_reason(shared: Shared) -> None:
    async def test(pool: Pool) -> None:
        outcome = await real.outcome(pool.submit(real.request(prompt=(10**6,)), streams=False))
        assert isinstance(outcome, Failure)
        assert outcome.refused
        assert "a prompt needs at least one token" in str(outcome)

    shared.run(test)


def test_cancelling_frees_the_slot_wherever_the_request_is(shared: Shared) -> None:
    async def test(pool: Pool) -> None:
        second, running, at_hand, waiting = (pool.submit(real.request(4000), streams=True) for _ in range(4))
        await second.__anext__()
        await running.__anext__()
        assert (at_hand.worker, waiting.worker) == (pool.processes[0], None)
        began = time.monotonic()
        for ticket in (waiting, at_hand, running, second):
            ticket.cancel()
        assert [part async for part in running] == []
        await real.until(lambda: not pool.processes[0].tickets)
        print(f"all slots free after {time.monotonic() - began:.2f} s")
        kept, queued = pool.submit(real.request(4000), streams=True), pool.submit(real.request(4000), streams=True)
        await kept.__anext__()
        await pool.pause("keep")
        kept.cancel()
        queued.cancel()
        await real.until(lambda: not pool.processes[0].tickets)
        await pool.resume()
        assert (await real.whole(pool.submit(real.request(), streams=False))).ids

    shared.run(test)


def test_a_client_that_does_not_read_stalls_nobody_and_holds_little(shared: Shared) -> None:
    async def test(pool: Pool) -> None:
        expected = (await real.whole(pool.submit(real.request(300), streams=False))).ids
        lazy = pool.submit(real.request(300), streams=True)
        others = [await real.whole(pool.submit(real.request(20), streams=True)) for _ in range(5)]
        assert all(len(answer.ids) == 20 for answer in others)
        await real.until(lambda: lazy.closed)
        assert len(lazy._parts) <= 65
        parts = [part async for part in lazy]
        assert len(parts) == 1
        assert parts[0].ids == expected

    shared.run(test)


def test_two_workers_share_the_work_and_turns_of_a_conversation_stay_together(home: Path) -> None:
    async def test() -> None:
        async with real.pool(home, devices=2, slots=4) as pool:
            assert len({real.pid(process) for process in pool.processes}) == 2
            tickets = [pool.submit(real.request(40, (n + 1,)), streams=True) for n in range(8)]
            assert sorted(len(process.tickets) for process in pool.processes) == [4, 4]
            answers: list[Part] = await real.gather(*(real.whole(ticket) for ticket in tickets))
            assert len({tuple(answer.ids) for answer in answers}) > 1
            for conversation in range(4):
                prompt = tuple((7 * conversation + n) % 200 for n in range(80))
                places = []
                for _ in range(4):
                    ticket = pool.submit(real.request(70, prompt), streams=True)
                    places.append(ticket.worker.index)
                    prompt = (*prompt, *(await real.whole(ticket)).ids)
                assert len(set(places)) == 1

    real.run(test)


def test_a_model_that_cannot_be_opened_is_one_sentence(home: Path) -> None:
    async def test() -> None:
        served.save(home, served.make.model(seq_len=real.CONTEXT))
        (home / "runs" / "tiny" / "sft" / "step_000001" / "model.safetensors").unlink()
        with pytest.raises(UserError, match=r"no checkpoint in .*; train one first"):
            async with real.pool(home, devices=2):
                raise AssertionError

    nursery()  # is one of them from now on
    others = served.children(os.getpid())
    real.run(test)
    assert set(served.children(os.getpid())) <= set(others)


def test_restarted_workers_open_the_checkpoint_of_the_others(home: Path) -> None:
    async def test() -> None:
        async with real.pool(home) as pool:
            first = pool.ready[0]
            served.save(home, served.make.model(9, seq_len=real.CONTEXT), step=2)
            os.kill(real.pid(pool.processes[0]), signal.SIGKILL)
            await real.until(lambda: not pool.ready)
            await real.until(lambda: bool(pool.ready))
            assert (pool.ready[0].checksum, pool.ready[0].model) == (first.checksum, first.model)

    real.run(test)
