"""One answer of an engine as it comes: `for piece in engine.stream(request)`, as `ascendchat chat` does."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ascendchat.engine.request import Completion, Piece

if TYPE_CHECKING:
    from ascendchat.engine.engine import Engine, Job


class EngineStream:
    """The generator.Stream of one job. A step of the engine is never cut in the middle: a signal handler that closes
    the stream during one takes effect right behind it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._pieces: deque[Piece] = deque()
        self._stepping = self._closed = False

    @property
    def completion(self) -> Completion:
        return self._job.completion

    def __iter__(self) -> EngineStream:
        return self

    def __next__(self) -> Piece:
        while not self._pieces and not self._job.done:
            self._stepping = True
            try:
                self._engine.step()
                self._pieces.extend(self._job.take())
            finally:
                self._stepping = False
            if self._closed:
                self.close()
        if not self._pieces:
            raise StopIteration
        return self._pieces.popleft()

    def close(self) -> None:
        self._closed = True
        if not self._stepping:
            self._engine.cancel(self._job)
            self._pieces.extend(self._job.take())

    def __del__(self) -> None:  # forgotten, for instance by a loop that was left: nobody can read on
        self._engine.forgotten.append(self._job)  # the garbage collector may come in the middle of a step
