"""The pool's side of requests and starts, with workers whose words come from here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ascendchat.config.serve import ServeConfig
from ascendchat.engine.request import Piece, Request
from ascendchat.serve.pool import AnswerFailed, PendingRequest, WorkerPool
from ascendchat.serve.worker_messages import Begun, Cancel, Change, Chunk, Done, Ready, Resume

SLOTS = 2


class Worker:
    """The process of a worker: what it is sent, and Done after each change."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool, self.sent = pool, list[Any]()
        self.gone = asyncio.Event()

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Change):
            self.pool.loop.call_soon(self.say, Done(message.number, 0))

    def say(self, message: Any) -> None:
        self.pool.processes[0].take(message)


@asynccontextmanager
async def answering(**settings: Any) -> AsyncIterator[tuple[WorkerPool, Worker]]:
    """A pool with one such worker."""
    pool = WorkerPool(ServeConfig(device_type="cpu", **settings))
    pool.loop = asyncio.get_running_loop()
    pool.started = pool.loop.create_future()
    pool.started.set_result(None)
    worker = Worker(pool)
    (process,) = pool.processes
    process.child = worker  # type: ignore[assignment]
    process.ready = Ready("CPU", SLOTS, 64, 256, {}, "")
    yield pool, worker
    for pending in pool.requests:
        pending.close()
    if process.timer is not None:
        process.timer.cancel()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def written(key: int, text: str, reason: str = "") -> Chunk:
    return Chunk(key, [Piece("text", text)], [1] * len(text), [], [], [0] * len(text), reason)


async def outcome(pending: PendingRequest) -> list[tuple[str, str]] | str:
    """Texts with finish reasons, or why there is no more."""
    found = []
    try:
        async for part in pending:
            found.append(("".join(piece.text for piece in part.pieces), part.finish_reason))
    except AnswerFailed as failure:
        return str(failure)
    return found


def test_a_fault_of_ours_ends_the_start_instead_of_keeping_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_thread(self: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WorkerPool, "child", no_thread)

    async def test() -> None:
        with pytest.raises(RuntimeError, match="new thread"):
            await asyncio.wait_for(WorkerPool(ServeConfig(device_type="cpu")).start(), 60)

    run(test)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the pool takes for the time."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("ascendchat.serve.pool.time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.mark.parametrize("begun", [True, False])
def test_the_time_of_a_pause_is_not_that_of_the_requests(clock: SimpleNamespace, begun: bool) -> None:
    """Ten seconds have passed, then a pause of an hour: what is left to each is what was left before."""

    async def test() -> None:
        async with answering(queue_timeout=60.0, request_timeout=600.0) as (pool, worker):
            pending = pool.submit(Request([1]), streams=False)
            if begun:
                worker.say([Begun(pending.key)])
            clock.now += 10
            await pool.pause("keep")
            clock.now += 3600
            pool._timeout(pending)
            late = pool.submit(Request([2]), streams=False)
            assert (pending.closed, late.worker) == (False, None)
            await pool.resume()
            assert isinstance(worker.sent[-2].what, Resume)
            left = [one.until - pool._clock.now() for one in (pending, late)]
            assert left == [590.0 if begun else 50.0, 60.0]
            when = [one.timer.when() - pool.loop.time() for one in (pending, late) if one.timer]
            assert when == pytest.approx(left, abs=5)

    run(test)


@pytest.mark.parametrize("streams", [True, False])
def test_what_was_written_when_the_time_of_an_answer_is_over_is_given_to_the_client(
    clock: SimpleNamespace, streams: bool
) -> None:
    async def test() -> None:
        async with answering(request_timeout=600.0) as (pool, worker):
            pending, other = (pool.submit(Request([1]), streams=streams) for _ in range(2))
            worker.say([written(pending.key, "a") if streams else Begun(pending.key), Begun(other.key)])
            clock.now += 600
            pool._timeout(pending)
            assert worker.sent[-1] == Cancel(pending.key)
            worker.say([written(pending.key, "bc", "cancelled"), written(other.key, "d", "stop")])
            assert await outcome(pending) == [("abc" if streams else "bc", "timeout")]
            assert await outcome(other) == [("d", "stop")], "it came to its end at that moment"

    run(test)


@pytest.mark.parametrize("dies", [True, False])
def test_a_worker_that_does_not_hand_over_what_it_has_written_is_not_waited_for(
    clock: SimpleNamespace, dies: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with answering(request_timeout=600.0) as (pool, worker):
            pending = pool.submit(Request([1]), streams=False)
            worker.say([Begun(pending.key)])
            clock.now += 600
            pool._timeout(pending)
            if dies:
                pool.lost(pool.processes[0], "signal 9")
                assert "has died; please ask again" in await outcome(pending)
                assert not pool.waiting, "its time is over elsewhere, too"
            else:
                clock.now += 30
                pool._timeout(pending)
                assert await outcome(pending) == "the answer took longer than 600 s and was ended"

    run(test)
