"""An answer on its way to one client: the tickets it waits for, and the end when the client goes away.

    return Reply(tickets, answers, streams=True)           # from a route; an ASGI response

Before the first byte an error has its HTTP status; later it is an event of the stream, which then ends. A client that
goes away, streaming or not, cancels what is being generated for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ascendchat.serve.errors import Problem, error_event
from ascendchat.serve.messages import Part
from ascendchat.serve.pool import Failure, Ticket

EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a reverse proxy passes events on at once
]


class Writer(Protocol):
    """How answers are written (answers.py, responses.py)."""

    def opening(self) -> bytes: ...
    def part(self, index: int, part: Part) -> bytes: ...
    def closing(self) -> bytes: ...
    def whole(self, parts: Sequence[Sequence[Part]]) -> dict[str, Any]: ...


class Reply(Response):
    """Sends what the tickets bring."""

    def __init__(self, tickets: Sequence[Ticket], answers: Writer, *, streams: bool) -> None:
        super().__init__()
        self.tickets, self.answers, self.streams = tickets, answers, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future((self._stream if self.streams else self._whole)(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer  # its exception, if any
        finally:
            gone.cancel()
            answer.cancel()
            for ticket in self.tickets:
                if not ticket.over:
                    ticket.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            parts: list[list[Part]] = []
            for ticket in self.tickets:
                parts.append([part async for part in ticket])
        except Failure as failure:
            response = Problem.of(failure).response()
        else:
            content = json.dumps(self.answers.whole(parts), separators=(",", ":")).encode()
            response = Response(content, media_type="application/json")
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers, begun = self.answers, False
        try:
            async for index, part in merged(self.tickets):
                data = answers.part(index, part)
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                    data = answers.opening() + data
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = answers.closing()
        except Failure as failure:
            problem = Problem.of(failure)
            if not begun:
                await problem.response()(scope, receive, send)
                return
            last = error_event(problem)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Part]]:
    """The parts of all tickets as they come, with the ticket's place."""
    if len(tickets) == 1:
        async for part in tickets[0]:
            yield 0, part
        return
    arrived: asyncio.Queue[tuple[int, Part | Failure]] = asyncio.Queue()

    async def pump(index: int, ticket: Ticket) -> None:
        try:
            async for part in ticket:
                arrived.put_nowait((index, part))
        except Failure as failure:
            arrived.put_nowait((index, failure))

    pumps = [asyncio.ensure_future(pump(index, ticket)) for index, ticket in enumerate(tickets)]
    left = len(pumps)
    try:
        while left:
            index, news = await arrived.get()
            if isinstance(news, Failure):
                raise news
            left -= bool(news.finish_reason)
            yield index, news
    finally:
        for one in pumps:
            one.cancel()
