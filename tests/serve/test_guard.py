"""What the guard lets through to the application and what it answers itself: Host, Origin, keys, rates, sizes, faults.

Most of it is asked without a network: the guard around a small application.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from running_server import CHAT

from ascendchat.config import parse
from ascendchat.config.serve import ServeConfig
from ascendchat.engine.request import Piece
from ascendchat.serve import command, counters
from ascendchat.serve.guard import BODY, AccessLog, Guard, Keys
from ascendchat.serve.worker_messages import Chunk

MODELS = "/v1/models"
MOST = 2000  # bytes of a body
KEY = "first-key-0123456789"
APP = "https://app.example"
LOCAL = ("Host", "localhost:80")
app = FastAPI()


@app.get("/fault")
async def fault() -> None:
    raise ZeroDivisionError("the password is 1234")


@app.get("/status/{status}")
async def answer_with(status: int) -> Any:
    return StreamingResponse(iter([b"words of the application"]), status_code=status)


@app.get("/deep")
async def deep() -> None:
    await deep()


@app.get("/cut")
async def cut() -> Any:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun"
        raise ZeroDivisionError("the password is 1234")

    return StreamingResponse(pieces())


@app.post(CHAT)
async def speak() -> Any:
    counters.Meter(3).chunk(Chunk(0, [Piece("text", "ab")], [1, 2], [], [], []))
    return JSONResponse({})


@app.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS", "HEAD", "DELETE"])
async def count(request: Request) -> Any:
    return JSONResponse({"bytes": len(request.scope[BODY] if BODY in request.scope else await request.body())})


class Reply:
    """What was sent to the client, and the line of the access log."""

    def __init__(self, sent: list[Any], line: dict[str, Any]) -> None:
        starts = [message for message in sent if message["type"] == "http.response.start"]
        assert len(starts) <= 1, "answered twice"
        self.status = starts[0]["status"] if starts else None
        self.headers = {name.decode(): value.decode() for start in starts for name, value in start["headers"]}
        self.body, self.line = b"".join(message.get("body", b"") for message in sent), line

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])

    @property
    def refused(self) -> tuple[int, str]:
        return self.status or 0, self.error["code"]


class Guarded:
    """The guard of a server with these flags and keys, around the application above."""

    def __init__(self, folder: Path, *flags: str, keys: tuple[str, ...] = ()) -> None:
        self.log, self.reached = folder / "log", 0

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.reached += 1
            await app(scope, receive, send)

        self.config = parse(ServeConfig, ["--max-body", str(MOST), *flags])
        self.guard = Guard(counted, self.config, Keys([*keys]), AccessLog(str(self.log)))
        self.server: Any = self.guard

    def ask(
        self,
        path: str,
        *headers: tuple[str, str],
        method: str = "GET",
        body: tuple[bytes, ...] = (b"",),
        host: bool = True,
        client: tuple[str, int] | None = ("127.0.0.1", 1),
        gone: bool = False,
    ) -> Reply:
        """`host`: with the header Host of this machine; `gone`: the client leaves before its request is whole."""
        sent: list[Any] = []
        lines = [(name.lower().encode(), value.encode()) for name, value in (*[LOCAL] * host, *headers)]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": lines, "client": client, "scheme": "http", "root_path": "", "http_version": "1.1"}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "server": ("127.0.0.1", 80)}
        more = [True] * (len(body) - 1) + [False]
        pieces = [{"type": "http.request", "body": piece, "more_body": on} for piece, on in zip(body, more)]
        given = iter([{"type": "http.disconnect"}] if gone else pieces)

        async def receive() -> Any:
            for message in given:
                return message
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(asyncio.wait_for(self.server(scope, receive, send), 60))
        return Reply(sent, json.loads(self.log.read_text().splitlines()[-1]))


@pytest.fixture
def guarded(tmp_path: Path) -> Guarded:
    """A server that listens on this machine only, without keys."""
    return Guarded(tmp_path)


@pytest.fixture
def keyed(tmp_path: Path) -> Guarded:
    """A server that others can reach, with one key, a page that may use it, and a name of its own."""
    flags = ("--host=0.0.0.0", f"--cors-origin={APP}", "--allowed-host=chat.example", "--rate-limit=2")
    return Guarded(tmp_path, *flags, keys=(KEY,))


BEARER = ("Authorization", f"Bearer {KEY}")

# ---- who may ask ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [(name, 200) for name in ("LOCALHOST:80", "localhost.", "127.0.0.1:80", "127.0.0.2", "[::1]:80")]
    + [(name, 421) for name in ("evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1")]
    + [(name, 421) for name in ("[fe80::1]", "localhost@evil.example", "local host", "[::1", "0.0.0.0", "é", "127.1")],
)
def test_a_server_on_this_machine_answers_to_its_own_names_only(guarded: Guarded, host: str, status: int) -> None:
    """Not to one that a page of a stranger has rebound to this machine."""
    for path in (MODELS, "/", "/health"):
        answer = guarded.ask(path, ("Host", host), host=False)
        assert answer.status == status
        assert status == 200 or answer.error["code"] == "host_not_allowed"
    assert guarded.reached == (3 if status == 200 else 0)


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], [""]])
def test_a_request_has_exactly_one_host(guarded: Guarded, hosts: list[str]) -> None:
    answer = guarded.ask(MODELS, *[("Host", host) for host in hosts], host=False)
    assert answer.status == 400
    said = "the header host stands there more than once" if len(hosts) > 1 else "the header Host is missing"
    assert answer.error["message"] == said


@pytest.mark.parametrize("host", ["chat.example", "chat.example:443", "192.168.1.7", "[2001:db8::1]:80", "localhost"])
def test_a_public_server_answers_to_addresses_and_named_hosts(keyed: Guarded, host: str) -> None:
    assert keyed.ask(MODELS, ("Host", host), BEARER, host=False).status == 200
    assert keyed.ask(MODELS, ("Host", "evil.example"), BEARER, host=False).status == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [(name, 403) for name in ("https://evil.example", "null", "http://localhost:1", "http://localhost", "x")]
    + [("http://localhost:80", 200), ("https://LOCALHOST:80", 200)],  # our own page, also behind a TLS proxy
)
def test_a_page_of_another_origin_cannot_make_the_model_work(guarded: Guarded, origin: str, status: int) -> None:
    answer = guarded.ask(CHAT, ("Origin", origin), method="POST")
    assert (answer.status, guarded.reached) == (status, int(status == 200))
    assert status == 200 or answer.error["code"] == "origin_not_allowed"
    for method in ("GET", "OPTIONS"):  # which change nothing; but no page can read the answer
        headers = guarded.ask(MODELS, ("Origin", origin), method=method).headers
        assert not [name for name in headers if name.startswith("access-control")]


def test_pages_of_the_named_origin_may_ask_and_read(keyed: Guarded) -> None:
    wanted = ("Access-Control-Request-Headers", "authorization,content-type,x-stainless-os")
    preflight = keyed.ask(CHAT, ("Origin", APP), wanted, method="OPTIONS")
    assert (preflight.status, preflight.body, keyed.reached) == (200, b"", 0), "answered by the guard, without a key"
    assert preflight.headers["access-control-allow-origin"] == APP
    assert preflight.headers["access-control-allow-headers"] == wanted[1]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["vary"] == "Origin"
    odd = keyed.ask(CHAT, ("Origin", APP), ("Access-Control-Request-Headers", "a\r\nb: c"), method="OPTIONS")
    assert odd.headers["access-control-allow-headers"] == "authorization, content-type"
    answer = keyed.ask(CHAT, ("Origin", APP), BEARER, method="POST")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, APP)
    denied = keyed.ask(CHAT, ("Origin", APP), method="POST")
    assert (denied.status, denied.headers["access-control-allow-origin"]) == (401, APP), "a page can read why"
    for other in ("http://app.example", "https://app.example.evil", "https://evil.app.example", f"{APP}:1"):
        assert keyed.ask(CHAT, ("Origin", other), BEARER, method="POST").status == 403
        assert "access-control-allow-origin" not in keyed.ask(CHAT, ("Origin", other), method="OPTIONS").headers


@pytest.mark.parametrize("path", ["/", "/web/app.js", "/health", "/health/live", "/health/ready"])
def test_the_page_and_health_need_no_key_and_are_not_counted(keyed: Guarded, path: str) -> None:
    for _ in range(3):
        assert keyed.ask(path).status == 200
    assert keyed.ask(path).headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [MODELS, "/metrics", "/openapi.json", "/nowhere", "//", "//health", "/health/", "/HEALTH", "/web/../v1/models"]
    + ["/health/../metrics", "/web/a/b", "/./v1/models", "/health\n", "/web/", "/health/live/x"],
)
def test_everything_else_needs_a_key(keyed: Guarded, path: str) -> None:
    answer = keyed.ask(path)
    assert (answer.refused, answer.headers["www-authenticate"]) == ((401, "invalid_api_key"), "Bearer")
    assert answer.error["message"].startswith("this server needs an API key")
    head = keyed.ask(path, method="HEAD", client=("127.0.0.2", 1))
    assert (head.status, head.body, keyed.reached) == (401, b"", 0)


@pytest.mark.parametrize("sent", [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} "])
def test_a_key_opens_however_its_header_is_spelt(keyed: Guarded, sent: str) -> None:
    answer = keyed.ask(MODELS, ("Authorization", sent))
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")
    assert keyed.ask(MODELS, BEARER, ("Authorization", sent)).status == 400, "only one"


@pytest.mark.parametrize(
    "sent",
    ["Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY} x", f"Bearer {KEY.upper()}"]
    + ["Bearer é", f"Bearer{KEY}"],
)
def test_a_wrong_key_is_401(keyed: Guarded, sent: str) -> None:
    answer = keyed.ask(MODELS, ("Authorization", sent))
    assert (answer.status, answer.error["message"]) == (401, "this API key is not valid")


def test_a_key_that_is_too_busy_waits_and_the_others_do_not(keyed: Guarded) -> None:
    """Two per minute."""
    assert [keyed.ask(MODELS, BEARER).status for _ in range(2)] == [200, 200]
    busy = keyed.ask(MODELS, BEARER)
    assert (busy.refused, keyed.reached) == ((429, "rate_limit_exceeded"), 2)
    assert 1 <= int(busy.headers["retry-after"]) <= 30
    assert [keyed.ask(MODELS, client=("10.0.0.9", 1)).status for _ in range(3)] == [401, 401, 429], "guesses, too"


@pytest.mark.parametrize("proxy", ["", "127.0.0.1"])
def test_who_a_client_is_says_no_header_but_that_of_a_proxy_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", proxy)
    guarded = Guarded(tmp_path, "--rate-limit=2")
    whole = command.settings(guarded.guard, guarded.config)
    whole.load()
    guarded.server = whole.loaded_app
    answers = [guarded.ask(MODELS, ("X-Forwarded-For", f"10.0.0.{i}")) for i in range(3)]
    assert [answer.status for answer in answers] == ([200] * 3 if proxy else [200, 200, 429])
    assert answers[2].line["client"] == ("10.0.0.2" if proxy else "127.0.0.1")
    stranger = guarded.ask(MODELS, ("X-Forwarded-For", "10.0.0.7"), client=("10.9.9.9", 1))
    assert stranger.line["client"] == "10.9.9.9"


# ---- what is asked ----------------------------------------------------------------------------------


def test_a_body_may_have_as_many_bytes_as_allowed_and_no_more(guarded: Guarded) -> None:
    half = b"x" * (MOST // 2)
    fits = guarded.ask("/size", method="POST", body=(half, half))
    assert json.loads(fits.body) == {"bytes": MOST}, "all of its pieces arrive"
    assert guarded.ask("/size", method="POST", body=(half, half, b"x")).refused == (413, "request_too_large")
    for length in (str(MOST + 1), "9" * 5000):
        announced = guarded.ask("/size", ("Content-Length", length), method="POST")
        assert announced.refused == (413, "request_too_large"), "nothing of it is read"
    assert guarded.reached == 1


def test_uploaded_weights_may_be_longer_and_nothing_else(tmp_path: Path) -> None:
    guarded, body = Guarded(tmp_path, "--weight-updates"), (b"x" * MOST, b"y")
    binary = ("Content-Type", "application/octet-stream")
    assert json.loads(guarded.ask("/update_weights", binary, method="POST", body=body).body) == {"bytes": MOST + 1}
    assert guarded.ask("/update_weights", method="POST", body=body).status == 413
    assert guarded.ask(CHAT, binary, method="POST", body=body).status == 413


# ---- what is answered and written down --------------------------------------------------------------

EVERY_ANSWER = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/", LOCAL, 400),
        (MODELS, ("X", "y"), 200),
        ("/status/404", ("X", "y"), 404),
        ("/", ("Content-Length", "9999"), 413),
    ],
)
def test_every_answer_has_the_security_headers(
    guarded: Guarded, path: str, header: tuple[str, str], status: int
) -> None:
    answer = guarded.ask(path, header)
    assert (answer.status, answer.line["status"]) == (status, status)
    assert answer.headers.items() >= EVERY_ANSWER.items()
    assert answer.headers["x-request-id"] == answer.line["id"]
    assert answer.line["id"].startswith("req_")


def test_a_request_id_is_kept_when_it_is_harmless_and_made_otherwise(guarded: Guarded) -> None:
    named = guarded.ask("/health", ("X-Request-Id", "my-id.7"))
    assert named.headers["x-request-id"] == named.line["id"] == "my-id.7"
    for bad in ("a b", "x" * 65, "<script>", "é", '"', ""):
        assert guarded.ask("/health", ("X-Request-Id", bad)).headers["x-request-id"].startswith("req_")


def test_the_access_log_has_tokens_and_the_digest_of_the_key_and_no_contents(keyed: Guarded) -> None:
    answer = keyed.ask(CHAT, BEARER, method="POST", body=(b'"my-secret"',))
    line = {name: value for name, value in answer.line.items() if name not in ("time", "id", "ms")}
    counted = {"prompt_tokens": 3, "completion_tokens": 2}
    asked = {"client": "127.0.0.1", "key": "ed60d752", "method": "POST", "path": CHAT}
    assert line == {**asked, "status": 200, **counted}
    assert answer.line["ms"] > 0
    assert "client" not in keyed.ask("/health", client=None).line


def test_messages_are_logged_when_that_was_asked_for(tmp_path: Path) -> None:
    line = Guarded(tmp_path, "--log-messages").ask(CHAT, method="POST", body=('"你好"'.encode(), b"\xff")).line
    assert (line["request"], line["answer"]) == ('"你好"\ufffd', "ab")


def test_a_fault_of_ours_is_503_without_its_words(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        answer = guarded.ask("/fault")
    assert (answer.status, answer.error["type"], answer.line["status"]) == (503, "server_error", 503)
    assert answer.line["id"] in answer.error["message"], "the client can name it to the operator"
    assert b"password" not in answer.body
    assert "the password is 1234" in caplog.text, "the log has the whole of it"
    assert "Traceback" in caplog.text
    assert answer.line["id"] in caplog.text


@pytest.mark.parametrize(("status", "passed"), [(500, False), (504, False), (503, True), (499, True)])
def test_answers_that_speak_of_faults_are_not_passed_on_but_for_a_busy_server(
    guarded: Guarded, status: int, passed: bool
) -> None:
    answer = guarded.ask(f"/status/{status}")
    assert (answer.status, b"words of the application" in answer.body) == (status if passed else 503, passed)


def test_endless_recursion_is_the_requests_fault(guarded: Guarded) -> None:
    answer = guarded.ask("/deep")
    assert answer.status == 400
    assert "nested" in answer.error["message"]


def test_an_answer_that_breaks_off_is_left_incomplete(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    answer = guarded.ask("/cut")
    assert (answer.status, answer.body, answer.line["status"]) == (200, b"begun", 200)
    assert "the password is 1234" in caplog.text


def test_a_client_that_went_before_its_request_was_whole_is_499_in_the_log(guarded: Guarded) -> None:
    answer = guarded.ask("/fault", gone=True)
    assert (answer.status, answer.body, answer.line["status"]) == (None, b"", 499)
