"""A small HTTP/1.1 client for `ascendchat bench serve`: posts JSON and hands out server-sent events as they arrive.

    connection = await connect(Address.parse("http://127.0.0.1:8000"))
    reply = await connection.post("/v1/completions", {"stream": True, ...}, on_event)    # on_event(b'{"id": ...}')

A load generator must not be slower than what it measures: here an event costs a search for line ends and a call, no
task switch and no object of its own. One request at a time per connection, which is used again and again.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ascendchat.errors import UserError

OnEvent = Callable[[bytes], None]


@dataclass(frozen=True)
class Address:
    """Address of a server, and its API key."""

    host: str
    port: int
    secure: bool
    base: str = ""  # path in front of /v1
    api_key: str = ""

    @classmethod
    def parse(cls, url: str, api_key: str = "") -> Address:
        """`http://127.0.0.1:8000`, with or without /v1 behind it."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            port, parts = None, urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url} is not the address of a server; write it like http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, base, api_key)

    def head(self, method: str, path: str, length: int) -> bytes:
        """The request line and headers as bytes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {length}"]
        lines += ["Content-Type: application/json", "Accept: application/json, text/event-stream"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class ClientReply:
    """A whole answer; of a stream of events only what was no event."""

    status: int
    headers: dict[str, str]  # names in small letters
    body: bytearray = field(default_factory=bytearray)


class Lost(Exception):
    """The connection ended before the answer did. `begun`: some of the answer had come."""

    def __init__(self, begun: bool) -> None:
        super().__init__("the server closed the connection" + (" in the middle of an answer" if begun else ""))
        self.begun = begun


class ClientConnection(asyncio.Protocol):
    """One connection; `post` and `get` one after the other."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.closed = False
        self.used = 0  # requests it has carried
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._waiting: asyncio.Future[ClientReply] | None = None

    async def post(self, path: str, content: Any, on_event: OnEvent | None = None) -> ClientReply:
        """Send JSON; every event of a streamed answer goes to `on_event` at once."""
        return await self._exchange("POST", path, json.dumps(content).encode(), on_event)

    async def get(self, path: str) -> ClientReply:
        return await self._exchange("GET", path, b"", None)

    async def _exchange(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> ClientReply:
        if self.closed:
            raise Lost(begun=False)
        self._reply: ClientReply | None = None
        self._on_event = on_event
        self._left = 0  # bytes to come: of the body, or of this chunk and its line end
        self._chunked = self._events = False
        self._line = bytearray()  # of an event, its end still missing
        self._waiting = asyncio.get_running_loop().create_future()
        self.used += 1
        self._transport.write(self.address.head(method, path, len(body)) + body)
        try:
            return await self._waiting
        except asyncio.CancelledError:
            self.close()  # what still comes belongs to nobody
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._waiting is not None and not self._waiting.done():
            if self._reply is not None and not self._chunked and self._left < 0:
                self._finish()  # an answer without a length ends with the connection
            else:
                self._waiting.set_exception(Lost(begun=self._reply is not None))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while self._buffer and self._waiting is not None and not self._waiting.done():
                if not (self._read_head() if self._reply is None else self._read_body()):
                    return
        except (ValueError, IndexError):  # no HTTP: what follows cannot be read either
            self.close()

    # ---- reading -------------------------------------------------------------------------------

    def _read_head(self) -> bool:
        """Status and headers, once they are whole."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split(" ")[1])
        if status < 200:  # 100 Continue: the answer is still to come
            return True
        self._reply = ClientReply(status, headers)
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._events = headers.get("content-type", "").startswith("text/event-stream") and self._on_event is not None
        self._left = 0 if self._chunked else int(headers.get("content-length", -1))
        if not self._chunked and not self._left:
            self._finish()
        return True

    def _read_body(self) -> bool:
        """Take what has come of the body; False when more is needed first."""
        if self._chunked and not self._left:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            size = int(self._buffer[:end].split(b";")[0], 16)
            if not size:
                if len(self._buffer) < end + 4:  # the empty line behind the last chunk; nobody sends trailers
                    return False
                del self._buffer[: end + 4]
                self._finish()
                return True
            del self._buffer[: end + 2]
            self._left = size + 2
        taken = self._buffer if self._left < 0 else self._buffer[: self._left]
        count = len(taken)
        if self._chunked:  # the line end behind a chunk is not content
            taken = taken[: max(0, min(count, self._left - 2))]
        self._content(taken)
        del self._buffer[:count]
        if self._left > 0:
            self._left -= count
            if not self._left and not self._chunked:
                self._finish()
        return True

    def _content(self, data: bytearray) -> None:
        assert self._reply is not None
        if not self._events:
            self._reply.body += data
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and self._on_event is not None:
                self._on_event(bytes(line[5:].strip()))

    def _finish(self) -> None:
        assert self._reply is not None
        assert self._waiting is not None
        if self._reply.headers.get("connection", "").lower() == "close":
            self.close()
        self._waiting.set_result(self._reply)


def first_key(file: str) -> str:
    """The key that a client sends: of a file's first line, else the first of $ASCENDCHAT_API_KEYS, else none."""
    if not file:
        return os.environ.get("ASCENDCHAT_API_KEYS", "").split(",")[0].strip()
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the API key in {file}: {getattr(error, 'strerror', None) or error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"{file} is empty; its first line is the API key")
    return keys[0]


async def connect(address: Address) -> ClientConnection:
    """Open a connection to the server; OSError when there is none to be had."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if address.secure else None
    _, connection = await loop.create_connection(
        lambda: ClientConnection(address), address.host, address.port, ssl=context
    )
    return connection
