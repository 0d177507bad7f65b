"""One connection of the server: uvicorn's protocol, with limits on time, bytes and number.

    uvicorn.Config(app, http=protocol(Limits(seconds=30, connections=1000)), ...)

uvicorn bounds neither how long a request may take to arrive nor how long its headers may become. Here a request must
arrive whole within `seconds`, an answer must be taken as fast, and when too many connections are open the one that has
waited longest without a whole request gives way: clients that send nothing (slow loris) cannot keep others out.
"""

from __future__ import annotations

import functools
import json
import re
import socket
from asyncio import TimerHandle, Transport
from collections import OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ascendchat.serve import counters

MAX_HEADER_BYTES = 32768
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
CHUNK_OVERHEAD = 8  # bytes on the wire for each byte of a body: enough for chunks of one byte
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def error_body(status: int, message: str, code: str | None) -> bytes:
    """An error as OpenAI writes it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


class _Unfit(Exception):
    """Raised while a request is parsed: it is answered with `status` and the connection closed."""


@dataclass
class Limits:
    """Limits on all connections together."""

    seconds: float
    connections: int
    arriving: OrderedDict[_ServerConnection, None] = field(
        default_factory=OrderedDict
    )  # request not whole, oldest first


def protocol(limits: Limits) -> Any:
    """For uvicorn.Config(http=...)."""
    return functools.partial(_ServerConnection, limits=limits)


async def full(scope: Any, receive: Any, send: Any) -> None:
    """The application of connections beyond the limit."""
    body = error_body(503, "too many connections; try again later", "too_many_connections")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    counters.request("other", 503, 0.0)


def without_upgrade(data: bytes) -> bytes:
    """The beginning of a request without offers to speak another protocol: the parser would skip its body.

    Java's client offers HTTP/2 with each first request.
    """
    head, blank, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"", head) + blank + rest if UPGRADE.search(head) else data


class _ServerConnection(HttpToolsProtocol):
    """The callbacks of uvicorn's protocol, each with its check."""

    def __init__(self, *arguments: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.limits = limits
        self.deadline: TimerHandle | None = None  # until when a whole request must be here
        self.stall: TimerHandle | None = None  # until when the client must take in what it was sent
        self.begun = False  # a request has begun to arrive and is not whole
        self.received = self.body_bytes = 0  # of it
        self.unfit = (400, "this is not valid HTTP")

    # ---- time and number -----------------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so only for sockets made with proto=IPPROTO_TCP; else each token waits for the ACK of the last.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.connections:
            if self.limits.arriving:
                next(iter(self.limits.arriving)).give_way()
            else:
                self.app = full
        self.expect_request()

    def connection_lost(self, error: Exception | None) -> None:
        self.request_is_here()
        self.resume_writing()
        super().connection_lost(error)

    def expect_request(self) -> None:
        self.request_is_here()
        self.deadline = self.loop.call_later(self.limits.seconds, self.too_slow)
        self.limits.arriving[self] = None

    def request_is_here(self) -> None:
        self.limits.arriving.pop(self, None)
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def give_way(self) -> None:
        self.request_is_here()
        self.transport.abort()

    def too_slow(self) -> None:
        if self.begun:
            self.refuse(408, f"the request did not arrive within {self.limits.seconds:g} seconds")
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stall = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self.stall is not None:
            self.stall.cancel()
            self.stall = None
        super().resume_writing()

    # ---- what arrives --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if not self.begun:
            data = without_upgrade(data)
        super().data_received(data)
        # Everything but the body counts: endless headers, trailers and chunk extensions.
        if self.begun and self.received > MAX_HEADER_BYTES + CHUNK_OVERHEAD * self.body_bytes:
            self.refuse(431, f"the headers are longer than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            raise _Unfit("a second request before the first is answered")  # no client of today does this
        super().on_message_begin()
        self.begun, self.received, self.body_bytes = True, 0, 0
        self.expect_request()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self.unfit = 431, f"the headers are longer than {MAX_HEADER_BYTES} bytes"
            raise _Unfit
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.begun = False
        if self.cycle.response_complete:
            self.expect_request()
        else:
            self.request_is_here()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.deadline is None and not self.transport.is_closing():
            self.expect_request()

    # ---- what is answered without the application ----------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self.refuse(*self.unfit)

    def refuse(self, status: int, message: str) -> None:
        """Answer and close; in the midst of an answer only close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = error_body(status, message, None)
            headers = {"Content-Type": "application/json", "Content-Length": len(body), "_ServerConnection": "close"}
            lines = [f"{name}: {value}" for name, value in {**headers, **SECURITY_HEADERS}.items()]
            phrase = HTTPStatus(status).phrase
            self.transport.write("\r\n".join([f"HTTP/1.1 {status} {phrase}", *lines, "", ""]).encode() + body)
            counters.request("other", status, 0.0)
        self.transport.close()
