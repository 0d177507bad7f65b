"""Clients that are slow, endless, half gone or too many: each costs only itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from running_server import CHAT, CONTEXT, PATIENCE, Server, drain, question, serving, stream, wait_until

from ascendchat.serve.connection import MOST_HEADER_BYTES, Limits, protocol

MOST = 20  # connections of the real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--client-timeout", "3", "--max-connections", str(MOST), "--max-body", "50000"]
    with serving(tmp_path_factory.mktemp("slow"), *flags) as running:
        yield running


HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


UNFINISHED = [
    b"GET",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    HEAD + b"Content-Length: 100\r\n\r\n{",
    CHUNKED + b"1\r\n{\r\n",
    CHUNKED + b"1\r\n{\r\n0\r\nTrailer: ",
    CHUNKED + b"ff;extension=",
]


@pytest.mark.slow
def test_a_request_that_does_not_end_is_answered_and_closed(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in UNFINISHED]
        for connection, begun in zip(connections, UNFINISHED):
            connection.sendall(begun)
        for connection in connections:
            answer = drain(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"type": "invalid_request_error"' in answer


@pytest.mark.slow
def test_a_connection_without_a_request_is_closed(server: Server) -> None:
    with server.connect() as silent, server.connect() as empty_lines:
        empty_lines.sendall(b"\r\n\r\n\r\n")
        assert drain(silent) == drain(empty_lines) == b""


@pytest.mark.slow
def test_an_idle_connection_that_sends_empty_lines_is_closed(server: Server) -> None:
    """An empty line before a request is allowed; it must not stop the clock after the last answer."""
    with server.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"\r\n")
        drain(connection)


@pytest.mark.slow
@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\nX: ", CHUNKED])
def test_one_byte_now_and_then_does_not_buy_time(server: Server, begun: bytes) -> None:
    piece = b"x" if begun != CHUNKED else b"1\r\nx\r\n"
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(begun)
        connection.settimeout(0.2)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            connection.sendall(piece)
            with contextlib.suppress(TimeoutError):
                assert connection.recv(100).startswith((b"HTTP/1.1 408 ", b""))
                return
        pytest.fail("it was let go on")


def test_slow_clients_do_not_keep_others_out_nor_cut_running_answers(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(stream(server))
        for _ in range(4 * MOST):
            slow = stack.enter_context(server.connect())
            slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        for _ in range(10):
            assert server.answers()
        assert b"data: " in running.recv(65536), "the answer goes on"
    wait_until(lambda: server.metric("ascendchat_requests_running") == 0)


@pytest.mark.parametrize(
    ("begun", "repeated", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 1000, b" 431 "),
        (b"GET / HTTP/1.1\r\n", b"X: yyyyyyyyyyyyyyyyyy\r\n" * 50, b" 431 "),
        (b"GET /", b"x" * 1000, b" 431 "),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"X: yyyyyyyyyyyyyyyyyy\r\n" * 50, b" 431 "),
        (CHUNKED + b"1;", b"x" * 1000, b" 431 "),
        (CHUNKED, b"1\r\nx\r\n" * 100, b" 413 "),
    ],
    ids=["value", "headers", "path", "trailers", "extension", "body"],
)
def test_what_has_no_end_is_stopped_by_its_size(server: Server, begun: bytes, repeated: bytes, status: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(begun)
        connection.setblocking(False)
        sent, answer = 0, b""
        with contextlib.suppress(ConnectionError):
            while not answer and sent < 20_000_000:
                with contextlib.suppress(BlockingIOError):
                    sent += connection.send(repeated)
                with contextlib.suppress(BlockingIOError):
                    answer = connection.recv(65536)
    assert sent < 20_000_000
    assert status in answer or not answer, "a reset may overtake the answer"
    assert server.answers()


def test_long_headers_in_one_piece_are_431(server: Server) -> None:
    long = b"x" * (MOST_HEADER_BYTES + 1)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + long + b"\r\n\r\n"
    assert server.raw(request).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_goes_frees_its_slot(server: Server, streams: bool, how: str) -> None:
    before = server.metric("ascendchat_generated_tokens_total")
    if streams:
        connection = stream(server)
    else:
        connection = server.connect()
        body = json.dumps(question(CONTEXT)).encode()
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.metric("ascendchat_requests_running") == 1)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    wait_until(lambda: server.metric("ascendchat_requests_running") == 0)
    connection.close()
    assert server.metric("ascendchat_generated_tokens_total") - before < CONTEXT / 2, "it was not stopped but finished"


def test_a_second_request_before_the_answer_ends_the_connection(server: Server) -> None:
    """uvicorn would forget the first one's disconnect, and its answer would be written for nobody."""
    with stream(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"[DONE]" not in drain(connection)
    wait_until(lambda: server.metric("ascendchat_requests_running") == 0)


def test_a_connection_can_be_used_again_and_an_answered_body_may_still_arrive(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(HEAD.replace(b"localhost", b"evil.example") + b"Content-Length: 40000\r\n\r\n")
        assert b" 421 " in connection.recv(65536)
        connection.sendall(b"x" * 40_000 + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert drain(connection).endswith(b'{"status":"live"}')


def test_an_offer_of_http2_does_not_cost_the_body(server: Server) -> None:
    """As Java's HttpClient makes it; uvicorn's parser would take the rest for another protocol."""
    body = json.dumps(question()).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    with server.connect() as connection:
        connection.sendall(HEAD + offer + f"Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


# ---- connections around an application of our own: events say when, not the clock ----


class Small:
    """uvicorn with our connections, in a thread; /wait answers when `go` is set, /flood never ends."""

    def __init__(self, seconds: float, connections: int) -> None:
        self.go, self.flooded = threading.Event(), threading.Event()
        settings = uvicorn.Config(
            self.answer,
            interface="asgi3",
            http=protocol(Limits(seconds, connections)),
            lifespan="off",
            log_config=None,
            ws="none",
        )
        self.server = uvicorn.Server(settings)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] == "/wait" and not self.go.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/flood":
            watch = asyncio.ensure_future(self.until_disconnect(receive))
            while not watch.done():
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            self.flooded.set()
        await send({"type": "http.response.body", "body": b"done"})

    async def until_disconnect(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    def ask(self, path: str) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return connection

    def __enter__(self) -> Small:
        self.thread = threading.Thread(target=asyncio.run, args=(self.server.serve(sockets=[self.listener]),))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(PATIENCE)


def test_beyond_the_most_connections_that_are_being_answered_there_is_503() -> None:
    with Small(seconds=60, connections=3) as small, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(small.ask("/wait")) for _ in range(3)]
        wait_until(lambda: len(small.server.server_state.tasks) == 3)
        refused = drain(stack.enter_context(small.ask("/quick")))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        small.go.set()
        assert all(drain(connection).endswith(b"done\r\n0\r\n\r\n") for connection in waiting)
        assert drain(stack.enter_context(small.ask("/quick"))).startswith(b"HTTP/1.1 200 ")


def test_small_answers_are_sent_at_once() -> None:
    """With Nagle's algorithm the second of two small writes waits for the client's delayed ACK, 40 ms per token."""
    with Small(seconds=60, connections=3) as small, small.ask("/wait"):
        wait_until(lambda: bool(small.server.server_state.connections))
        for connection in small.server.server_state.connections:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_answer_that_takes_longer_than_a_request_may_is_not_cut() -> None:
    with Small(seconds=0.3, connections=10) as small, small.ask("/wait") as connection:
        time.sleep(1)
        small.go.set()
        assert drain(connection).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with Small(seconds=1, connections=10) as small, small.ask("/flood"):
        assert small.flooded.wait(PATIENCE)
