"""Bytes on the wire: clients that are slow, endless, half gone or too many, each of which costs only itself; what is
answered and counted."""

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

from ascendchat.serve.connection import MAX_HEADER_BYTES, SECURITY_HEADERS, Limits, protocol

pytestmark = pytest.mark.slow
MOST = 20  # connections of the server
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


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The endless model behind small limits."""
    flags = ["--client-timeout=3", f"--max-connections={MOST}", "--max-body=50000"]
    with serving(tmp_path_factory.mktemp("narrow"), *flags) as running:
        yield running


def test_a_request_that_does_not_end_is_answered_and_closed(narrow: Server) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(narrow.connect()) for _ in UNFINISHED]
        for connection, begun in zip(connections, UNFINISHED):
            connection.sendall(begun)
        for connection in connections:
            answer = drain(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"type": "invalid_request_error"' in answer


def test_a_connection_without_a_request_is_closed_also_after_an_answer(narrow: Server) -> None:
    """An empty line before a request is allowed; it must not stop the clock."""
    with narrow.connect() as silent, narrow.connect() as empty_lines, narrow.connect() as answered:
        empty_lines.sendall(b"\r\n\r\n\r\n")
        answered.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while b'"live"}' not in seen:
            seen += answered.recv(65536)
        answered.sendall(b"\r\n")
        assert drain(silent) == drain(empty_lines) == drain(answered) == b""


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\nX: ", CHUNKED])
def test_one_byte_now_and_then_does_not_buy_time(narrow: Server, begun: bytes) -> None:
    piece = b"x" if begun != CHUNKED else b"1\r\nx\r\n"
    with narrow.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(begun)
        connection.settimeout(0.2)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            connection.sendall(piece)
            with contextlib.suppress(TimeoutError):
                assert connection.recv(100)[:13] in (b"HTTP/1.1 408 ", b"")
                return
        pytest.fail("it was let go on")


def test_slow_clients_do_not_keep_others_out_nor_cut_running_answers(narrow: Server) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(stream(narrow))
        for _ in range(4 * MOST):
            slow = stack.enter_context(narrow.connect())
            slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        for _ in range(10):
            assert narrow.answers()
        assert b"data: " in running.recv(65536), "the answer goes on"
    wait_until(lambda: narrow.metric("ascendchat_requests_running") == 0)


@pytest.mark.parametrize(
    ("begun", "repeated", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 1000, b" 431 "),
        (CHUNKED + b"1\r\n{\r\n0\r\n", b"X: yyyyyyyyyyyyyyyyyy\r\n" * 50, b" 431 "),
        (CHUNKED + b"1;", b"x" * 1000, b" 431 "),
        (CHUNKED, b"1\r\nx\r\n" * 100, b" 413 "),
    ],
    ids=["value", "trailers", "extension", "body"],
)
def test_what_has_no_end_is_stopped_by_its_size(narrow: Server, begun: bytes, repeated: bytes, status: bytes) -> None:
    with narrow.connect() as connection:
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
    assert narrow.answers()


def test_long_headers_in_one_piece_are_431(narrow: Server) -> None:
    long = b"x" * (MAX_HEADER_BYTES + 1)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + long + b"\r\n\r\n"
    assert narrow.raw(request).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("streams", "how"), [(True, "close"), (True, "reset"), (False, "close"), (False, "half")])
def test_a_client_that_goes_frees_its_slot(narrow: Server, streams: bool, how: str) -> None:
    before = narrow.metric("ascendchat_generated_tokens_total")
    if streams:
        connection = stream(narrow)
    else:
        connection = narrow.connect()
        body = json.dumps(question(CONTEXT)).encode()
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: narrow.metric("ascendchat_requests_running") == 1)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    wait_until(lambda: narrow.metric("ascendchat_requests_running") == 0)
    connection.close()
    assert narrow.metric("ascendchat_generated_tokens_total") - before < CONTEXT / 2, "it was not stopped but finished"


def test_a_second_request_before_the_answer_ends_the_connection(narrow: Server) -> None:
    """uvicorn would forget the first one's disconnect, and its answer would be written for nobody."""
    with stream(narrow) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"[DONE]" not in drain(connection)
    wait_until(lambda: narrow.metric("ascendchat_requests_running") == 0)


def test_a_connection_can_be_used_again_and_an_answered_body_may_still_arrive(narrow: Server) -> None:
    with narrow.connect() as connection:
        connection.sendall(HEAD.replace(b"localhost", b"evil.example") + b"Content-Length: 40000\r\n\r\n")
        assert b" 421 " in connection.recv(65536)
        connection.sendall(b"x" * 40_000 + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert drain(connection).endswith(b'{"status":"live"}')


def test_an_offer_of_http2_does_not_cost_the_body(narrow: Server) -> None:
    """As Java's HttpClient makes it; uvicorn's parser would take the rest for another protocol."""
    body = json.dumps(question()).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    with narrow.connect() as connection:
        connection.sendall(HEAD + offer + f"Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_malformed_requests_and_streams_have_the_security_headers_too(narrow: Server) -> None:
    body = json.dumps(question(stream=True)).encode()
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for answer, status in ((narrow.raw(b"GET / HTTP/9.9\r\n\r\n"), 400), (narrow.raw(request), 200)):
        head = answer.partition(b"\r\n\r\n")[0].decode().lower()
        assert head.startswith(f"http/1.1 {status} ")
        assert "\nserver:" not in head
        for name, value in SECURITY_HEADERS.items():
            assert f"{name}: {value}".lower() in head


def test_nothing_that_a_client_sends_becomes_a_header_or_a_line_of_the_log(narrow: Server) -> None:
    for path in (b"/a%0d%0aSet-Cookie:%20x=1", b"/web/%0d%0aSet-Cookie:%20x=1", b"/a%0a%7b%22id%22:%22forged%22%7d"):
        answer = narrow.raw(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert b"\nset-cookie" not in answer.lower()
    narrow.logged(narrow.ask("GET", "/nowhere"))
    assert "forged" in narrow.said
    assert '\n{"id":"forged"}' not in narrow.said


def test_only_files_of_the_page_can_be_fetched(narrow: Server) -> None:
    for path in (
        ["/web/../app.py", "/web/%2e%2e/app.py", "/web/..%2fapp.py", "/web/..%5capp.py", "/web//etc/passwd", "/web/.."]
        + ["/web/%2fetc%2fpasswd", "/web/", "/web/%00", "/web/index.html%00.js", "/../../../../etc/passwd"]
        + ["/web/%252e%252e%252fapp.py", "/web/%c0%ae%c0%ae/app.py"]
    ):
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        answer = narrow.raw(request)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 ")), path
        assert b"import" not in answer, path
        assert b"root:" not in answer, path


def test_metrics_count_requests_tokens_and_times(narrow: Server) -> None:
    names = ["prompt_tokens_total", "generated_tokens_total", "first_token_seconds_count", "token_gap_seconds_count"]
    before = [narrow.metric(f"ascendchat_{name}") for name in names]
    with stream(narrow, 200) as connection:
        seen = b""
        while b"[DONE]" not in seen:
            seen += connection.recv(65536)
    after = [narrow.metric(f"ascendchat_{name}") for name in names]
    prompt, generated, first, gaps = (b - a for a, b in zip(before, after))
    assert (generated, first) == (200, 1)
    assert prompt > 0
    assert 0 < gaps < 200, "tokens that came with the first have no gap"
    text = narrow.ask("GET", "/metrics").body.decode()
    assert f'ascendchat_requests_total{{route="{CHAT}",status="200"}}' in text
    assert "nowhere" not in text, "a client cannot make new labels"
    for name in ("requests_running 0.0", "requests_waiting 0.0", "workers_ready 1.0", "weight_version 0.0"):
        assert f"ascendchat_{name}" in text
    assert narrow.ask("GET", "/health").json == {"status": "ready", "workers": 1}
    assert narrow.ask("GET", "/health/ready").status == narrow.ask("GET", "/health/live").status == 200


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
