"""A pool in the test's own process, with real worker processes, and ways to ask it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from running_server import PATIENCE, make, save
from warm_process import warm_workers

from ascendchat.config.serve import ServeConfig
from ascendchat.engine.request import Request, Sampling
from ascendchat.serve import pool as children
from ascendchat.serve.pool import AnswerFailed, PendingRequest, Process, WorkerPool, joined
from ascendchat.serve.worker_messages import Chunk

CONTEXT = 4096


def request(tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Request:
    """Never ends by itself."""
    settings = {"temperature": 0.0, "stop_tokens": (), "tools": False, **sampling}
    return Request(list(prompt), Sampling(tokens, **settings))


async def whole(pending: PendingRequest) -> Chunk:
    """The answer in one part."""
    return joined([part async for part in pending])


async def outcome(pending: PendingRequest) -> Chunk | AnswerFailed:
    try:
        return await whole(pending)
    except AnswerFailed as failure:
        return failure


async def gather(*awaitables: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*awaitables))


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


def pid(process: Process) -> int:
    assert process.child is not None
    return process.child.process.pid


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """An asynchronous test, with an end in any case."""
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@contextlib.asynccontextmanager
async def pool(home: Path, **settings: Any) -> AsyncIterator[WorkerPool]:
    """A pool whose workers answer, by default with random weights."""
    if not (home / "runs").exists():
        save(home, make.model(seq_len=CONTEXT))
    made = WorkerPool(ServeConfig(device_type="cpu", run="tiny", stage="sft", **{"slots": 4, **settings}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCENDCHAT_HOME", str(home))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(children, "subprocess", warm_workers())
        try:
            await made.start()
            yield made
        finally:
            await made.close(0)
