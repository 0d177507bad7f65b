"""Reads large requests in a process of its own, so that no other answer waits for them; several wait, smallest first.

    reader = LargeRequests(config, folder of the tokenizer); wanted = await reader.read(path, content, model)

The process (`python -m ascendchat.serve.large_requests FD`) is started with the first large request and stays. A
request may take SECONDS of processor time to read; one that takes more ends the process, and the next begins anew.

On the wire: first (tokenizer, model without it, seconds), then for each request (path, content, name, chats); back come
any number of bytes, pieces of an answer that is ready, and at last what prompts.read made, or its ApiError.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendchat.config.serve import ServeConfig
from ascendchat.serve.errors import ApiError
from ascendchat.serve.pool import Child
from ascendchat.serve.prompts import ServedModel, open_tokenizer, read
from ascendchat.serve.worker_messages import FrontSocket

NICE = 5  # of the process: answers under way come first
LargeRequest = tuple[str, bytes, str, bool]  # path, content, and of the model name and `chats`, which may change
SECONDS = 10.0  # of processor time for one request
MAX_WAITING = 64 << 20  # bytes of requests


class LargeRequests:
    """The front's side. Everything is called from the event loop."""

    def __init__(self, config: ServeConfig, tokenizer: Path, seconds: float = SECONDS) -> None:
        self.config, self.tokenizer, self.seconds = config, tokenizer, seconds
        self.waiting: list[tuple[int, int, LargeRequest, asyncio.Future[Any]]] = []  # a heap: the smallest comes first
        self._numbers = itertools.count()
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None

    async def read(self, path: str, content: bytes, model: ServedModel) -> Any:
        """Read a request by prompts.read in the other process; raises its ApiError."""
        if sum(size for size, *_ in self.waiting) + len(content) > MAX_WAITING:
            raise ApiError.busy("too many large requests wait to be read; try again later", 1)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        job = path, content, model.name, model.chats
        heapq.heappush(self.waiting, (len(content), next(self._numbers), job, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work(model))
        try:
            result = await asyncio.wait_for(answer, self.config.queue_timeout)
        except asyncio.TimeoutError:
            raise ApiError.busy("the request could not be read in time; try again later", 1) from None
        if isinstance(result, ApiError):
            raise result
        return result

    async def _work(self, model: ServedModel) -> None:
        """Until nothing waits."""
        while self.waiting:
            *_, job, answer = heapq.heappop(self.waiting)
            if answer.done():  # nobody waits for it any more
                continue
            try:
                result = await self._ask(job, model)
            except OSError as error:
                print(f"no process can be started that reads large requests: {error}", file=sys.stderr, flush=True)
                result = ApiError.busy("large requests cannot be read now; try again later", 1)
            if not answer.done():
                answer.set_result(result)

    async def _ask(self, job: LargeRequest, model: ServedModel) -> Any:
        """The process's answer. A process that was killed is followed by another, once: it may have been dead before it
        was asked."""
        for _ in range(2):
            answer, status = await self._try(job, model)
            if status is None or status >= 0 or status == -signal.SIGPROF:
                break
        if status == -signal.SIGPROF:
            return ApiError(
                400,
                f"the request takes more than {self.seconds:g} s of processor time to read",
                code="request_too_large",
            )
        return answer

    async def _try(self, job: LargeRequest, model: ServedModel) -> tuple[Any, int | None]:
        """The answer and None; or an ApiError, and how the process has ended."""
        if self._child is None or self._child.gone.is_set():
            self._child = await Child.start("ascendchat.serve.large_requests")
            bare = replace(model, tokenizer=None)  # type: ignore[arg-type]
            self._child.open((self.tokenizer, bare, self.seconds), lambda message: None)
        child, answer = self._child, asyncio.get_running_loop().create_future()
        pieces: list[bytes] = []

        def take(message: Any) -> None:
            if isinstance(message, bytes):
                pieces.append(message)
            else:
                answer.set_result(pieces or message)

        child.listen(take)
        child.send(job)
        gone = asyncio.ensure_future(child.gone.wait())
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if answer.done():
            return answer.result(), None
        return ApiError.busy("the process that read this request has died; try again", 1), await child.end()

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
        if self._child is not None:
            self._child.kill()
            await self._child.end()


# The process: `python -m ascendchat.serve.large_requests FD`.


def main(fd: int) -> None:
    """Read one request after the other, until the front goes."""
    os.nice(NICE)
    link = FrontSocket(socket.socket(fileno=fd))
    link.stay_while_front_does()
    tokenizer, bare, seconds = link.receive()
    model = replace(bare, tokenizer=open_tokenizer(tokenizer))
    while True:
        path, content, name, chats = link.receive()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        answer = answer_to(path, content, replace(model, name=name, chats=chats))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if isinstance(answer, list):
            for piece in answer:
                link.send(piece)
            answer = []
        link.send(answer)


def answer_to(path: str, content: bytes, model: ServedModel) -> Any:
    """The answer to send back. An error of ours ends the process: it stands in the log, and the client is told."""
    try:
        return read(path, content, model)
    except ApiError as problem:
        return problem
    except RecursionError:
        return ApiError(400, "the request is nested too deeply")


if __name__ == "__main__":
    main(int(sys.argv[1]))
