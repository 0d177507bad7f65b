"""One answer of a server as it comes: the generator.Stream of client.py.

with closing(remote.stream(request)) as stream:
    for piece in stream: ...
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from typing import TYPE_CHECKING, Any

from ascendchat.engine.request import Completion, Piece, Request
from ascendchat.remote.completions import Answer

if TYPE_CHECKING:
    from ascendchat.remote.client import Remote


class RemoteStream:
    """The generator.Stream of one request."""

    def __init__(self, remote: Remote, request: Request, body: dict[str, Any]) -> None:
        self._remote = remote
        self._answer = Answer(request, remote.tokenizer, remote.ours, remote.version)
        self._ready: deque[Piece] = deque()
        self._over = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # may be filled by a signal handler of its reader
        self._task = asyncio.run_coroutine_threadsafe(remote._pieces(body, self._inbox.put), remote._loop)

    @property
    def completion(self) -> Completion:
        return self._answer.completion

    def __iter__(self) -> RemoteStream:
        return self

    def __next__(self) -> Piece:
        while not self._ready and not self._over:
            event = self._inbox.get()
            if isinstance(event, Exception):
                self._over = True
                raise event
            if event is None:
                self._over = True
                self._ready.extend(self._answer.close())
                self._remote._seen(self.completion)
            else:
                self._ready.extend(self._answer.take(event))
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        self._task.cancel()
        self._inbox.put(None)

    def __del__(self) -> None:
        self._task.cancel()
