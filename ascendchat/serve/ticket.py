"""One request under way, as the routes see it: parts to iterate over, or the reason why there are no more.

ticket = pool.submit(request, streams=True)            # or Overloaded
async for part in ticket: ...                          # messages.Part, the last with a finish reason; or Failure
ticket.cancel()                                        # the client has gone
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ascendchat.engine.request import Request
from ascendchat.serve import metrics
from ascendchat.serve.messages import Part

MOST_PARTS = 64  # that lie unread before they are put together, as for a client that does not read


class Overloaded(Exception):
    """Too many requests wait already; `retry_after` seconds are a good time to come again."""

    def __init__(self, retry_after: int, reason: str = "the server is busy; try again later") -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Failure(Exception):
    """This answer cannot be finished; the text is for the client. `refused`: because of what was asked, else it is the
    server's trouble (503), and `retry_after` seconds are a good time to come again."""

    def __init__(self, reason: str, refused: bool = False, retry_after: int = 1) -> None:
        super().__init__(reason)
        self.refused, self.retry_after = refused, retry_after


class Ticket:
    """One request: iterate over its parts. The pool's side is `give`, `restart` and `close`."""

    def __init__(self, key: int, request: Request, streams: bool, cancel: Callable[[Ticket], None]) -> None:
        self.key, self.request, self.streams = key, request, streams
        self.worker: Any = None  # the pool's Process that answers; None while the request waits
        self.attempts = 0  # workers it was given to
        self.begun = False  # something was given to the client
        self.stopped = False  # its time is over: the next part is the last
        self.over = False  # the client has the last part, or wants no more
        self.closed = False  # nothing more will come
        self.since = time.monotonic()
        self.meter = metrics.Meter(len(request.prompt))
        self.first_token: float | None = None  # when it was there, by the same clock
        self.end = self.until = math.inf  # of the answer, and of what comes next, by the clock of the pool
        self.timer: asyncio.TimerHandle | None = None  # of the pool
        self._cancel = cancel
        self._parts: deque[Part | Failure] = deque()
        self._arrived = asyncio.Event()

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Part:
        while not self._parts:
            if self.over or self.closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self.begun = True
        whole = list(itertools.takewhile(lambda part: isinstance(part, Part), self._parts))
        if not whole:
            failure = self._parts.popleft()
            self.over = True
            raise failure  # type: ignore[misc]
        for _ in whole:
            self._parts.popleft()
        part = joined(whole)  # type: ignore[arg-type]
        self.over = bool(part.finish_reason)
        return part

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self.over = True
        self._parts.clear()
        self._cancel(self)

    # ---- the pool's side -----------------------------------------------------------------------

    def give(self, part: Part | Failure) -> None:
        """The next part; after the last one, or a failure, nothing is taken any more."""
        if self.closed:
            return
        if isinstance(part, Part):
            self.meter.part(part)
        if len(self._parts) >= MOST_PARTS:
            self._parts = deque([joined(self._parts)])  # type: ignore[arg-type]  # a failure would have closed it
        self._parts.append(part)
        if isinstance(part, Failure) or part.finish_reason:
            self.close()
        self._arrived.set()

    def restart(self) -> bool:
        """Forget what has come, for another worker to begin anew; False when the client has seen some of it."""
        if self.begun or self.closed:
            return False
        self._parts.clear()
        self.worker = self.first_token = None
        return True

    def close(self) -> None:
        """Take nothing more."""
        self.closed = True
        if self.timer is not None:
            self.timer.cancel()
        self._arrived.set()


def joined(parts: Iterable[Part]) -> Part:
    """Several parts of one answer as one."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    return parts[-1]._replace(
        pieces=[piece for part in parts for piece in part.pieces],
        ids=[token for part in parts for token in part.ids],
        logprobs=[number for part in parts for number in part.logprobs],
        tops=[top for part in parts for top in part.tops],
        versions=[version for part in parts for version in part.versions],
    )
