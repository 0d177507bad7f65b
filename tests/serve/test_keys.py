"""API keys, rates, CORS and further names on a server that other machines can reach; what it refuses to start with."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import CHAT, Server, question, serving

from ascendchat.config import UserError, parse
from ascendchat.config.serve import ServeConfig
from ascendchat.serve import command, guard, keys

FIRST, SECOND, BUSY = "first-key-0123456789", "second-key-0123456789", "third-key-0123456789"
BEARER = {"Authorization": f"Bearer {FIRST}"}
APP = "https://app.example"
PER_MINUTE = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    file = folder / "keys"
    file.write_text(f"# of the team\n{FIRST}\n\n  {SECOND}  \n{BUSY}\n")
    file.chmod(0o600)
    flags = ["--host", "0.0.0.0", "--api-key-file", str(file), "--cors-origin", APP, "--allowed-host", "chat.example"]
    flags += ["--rate-limit", str(PER_MINUTE), "--log-messages", "--access-log", str(folder / "access")]
    with serving(folder, *flags) as running:
        yield running


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/web/nothing", "/"])
def test_health_and_the_page_need_no_key(server: Server, path: str) -> None:
    assert server.ask("GET", path).status != 401


@pytest.mark.parametrize(
    "path",
    ["/v1/models", CHAT, "/metrics", "/openapi.json", "/version", "/nowhere", "//", "//health", "/health/", "/HEALTH"]
    + ["/web/../v1/models", "/web/%2e%2e/v1/models", "/health/../metrics", "/health%2f..%2fmetrics", "/web/a/b"]
    + ["/./v1/models", "/%2fv1/models", "/health%0a", "/metrics/", "/web/", "/health/live/x", "/v1/models?x=/health"],
)
def test_everything_else_needs_one(server: Server, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
        answer = server.ask(method, path)
        assert answer.status == 401, method
        assert answer.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert (answer.error["code"], answer.error["type"]) == ("invalid_api_key", "invalid_request_error")


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer ", f"Basic {FIRST}", FIRST, f"Bearer {FIRST}x", f"Bearer {FIRST[:-1]}", f"Bearer {FIRST} x"]
    + [
        "Bearer #",
        f"Bearer {FIRST.upper()}",
        "Bearer é",
        f"Bearer {FIRST},{SECOND}",
        f"Bearer{FIRST}",
        "Bearer # of the",
    ],
)
def test_a_wrong_key_is_401(server: Server, sent: str) -> None:
    assert server.ask("GET", "/v1/models", Authorization=sent).status == 401


def test_two_authorization_headers_are_refused(server: Server) -> None:
    lines = f"Host: localhost\r\nAuthorization: Bearer {FIRST}\r\nAuthorization: Bearer wrong\r\nConnection: close"
    assert server.raw(f"GET /v1/models HTTP/1.1\r\n{lines}\r\n\r\n".encode()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("sent", [f"Bearer {FIRST}", f"Bearer {SECOND}", f"bearer {FIRST}", f"Bearer  {FIRST} "])
def test_every_key_of_the_file_opens(server: Server, sent: str) -> None:
    assert server.ask("GET", "/v1/models", Authorization=sent).status == 200


def test_a_key_that_is_too_busy_waits_and_the_others_do_not(server: Server) -> None:
    mine = {"Authorization": f"Bearer {BUSY}"}
    for _ in range(20 * PER_MINUTE):  # refilled while we ask
        answer = server.ask("GET", "/v1/models", **mine)
        if answer.status != 200:
            break
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    assert server.ask("GET", "/v1/models", **BEARER).status == 200
    assert server.ask("GET", "/health", **mine).status == 200, "health is not counted"


def test_pages_of_the_named_origin_may_ask_and_read(server: Server) -> None:
    preflight = server.ask(
        "OPTIONS",
        CHAT,
        Origin=APP,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,content-type,x-stainless-os",
    )
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == APP
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["vary"] == "Origin"
    answer = server.ask("POST", CHAT, question(), Origin=APP, **BEARER)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, APP)
    denied = server.ask("POST", CHAT, question(), Origin=APP)
    assert (denied.status, denied.headers["access-control-allow-origin"]) == (401, APP), "a page can read why"


@pytest.mark.parametrize(
    "origin",
    ["http://app.example", "https://app.example.evil", "https://evil.app.example", "https://app.example:1", "*"],
)
def test_origins_are_compared_exactly(server: Server, origin: str) -> None:
    assert server.ask("POST", CHAT, question(), Origin=origin, **BEARER).status == 403
    preflight = server.ask("OPTIONS", CHAT, Origin=origin, Access_Control_Request_Method="POST", **BEARER)
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("host", ["chat.example", "chat.example:443", "192.168.1.7", "[2001:db8::1]:80", "localhost"])
def test_a_public_server_answers_to_addresses_and_named_hosts(server: Server, host: str) -> None:
    assert server.ask("GET", "/v1/models", Host=host, **BEARER).status == 200


def test_other_names_are_misdirected_on_a_public_server_too(server: Server) -> None:
    assert server.ask("GET", "/v1/models", Host="evil.example", **BEARER).status == 421


def test_the_log_has_the_keys_digest_and_contents_when_asked_and_never_the_key(server: Server, folder: Path) -> None:
    body = question(4, messages=[{"role": "user", "content": "你好\nhello"}])
    answer = server.ask("POST", CHAT, body, **BEARER)
    line = server.logged(answer, folder / "access")
    assert line["key"] == hashlib.sha256(FIRST.encode()).hexdigest()[:8]
    assert json.loads(line["request"]) == body
    assert line["answer"] == "abab"
    for key in (FIRST, SECOND, BUSY):
        assert key not in (folder / "access").read_text() + server.log.read_text()


def test_keys_are_not_in_the_environment_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDCHAT_API_KEYS", f"{FIRST}, {SECOND}")
    loaded = keys.admission(parse(ServeConfig, ["--host", "0.0.0.0"]))
    assert loaded.owner(f"Bearer {SECOND}".encode())
    assert not loaded.owner(b"Bearer wrong")
    assert "ASCENDCHAT_API_KEYS" not in os.environ


def test_every_key_is_compared_in_constant_time_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", counted)
    three = keys.Keys([FIRST, SECOND, BUSY])
    for sent in (FIRST, SECOND, BUSY, "wrong", "", "x" * 10_000):
        compared.clear()
        assert bool(three.owner(f"Bearer {sent}".encode())) == (sent in (FIRST, SECOND, BUSY))
        assert compared == [(32, 32)] * 3, "digests of equal length, all of them, also after one has fitted"


def test_a_flood_of_addresses_is_not_remembered_without_bound() -> None:
    rates = guard.Rates(60)
    for number in range(guard.CLIENTS + 500):
        assert rates.take(str(number), now=0.0) == 0
    assert len(rates.buckets) == guard.CLIENTS
    for _ in range(60):
        rates.take("one", now=1.0)
    assert rates.take("one", now=1.0) == pytest.approx(1.0)
    assert rates.take("one", now=2.0) == 0
    assert rates.take("two", now=2.0) == 0


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    first, second = ({"client": (f"2001:db8::{n}", 1)} for n in (1, 2))
    assert guard.network(first) == guard.network(second) != guard.network({"client": ("2001:db8:0:1::1", 1)})
    assert guard.network({"client": ("10.0.0.1", 1)}) != guard.network({"client": ("10.0.0.2", 1)})
    assert guard.network({"client": None}) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", "::"], "--no-auth"),
        (["--host", "192.168.0.1"], "--no-auth"),
        (["--host", "example.org"], "--no-auth"),
        (["--weight-updates"], "--api-key-file"),
        (["--api-key-file", "/no/such/file"], "No such file"),
        (["--api-key-file", "{empty}"], "no key"),
        (["--api-key-file", "{short}"], "16 characters"),
        (["--api-key-file", "{good}", "--no-auth"], "exclude each other"),
        (["--cors-origin", "*"], "https://example.org"),
        (["--cors-origin", "https://a.example/"], "https://example.org"),
        (["--access-log", "/no/such/folder/log"], "--access-log"),
    ],
)
def test_a_server_that_would_be_open_by_accident_does_not_start(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASCENDCHAT_API_KEYS", raising=False)
    contents = {"empty": "\n# none\n", "short": "short\n", "good": FIRST}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    named = [flag.format(**{name: tmp_path / name for name in contents}) for flag in flags]
    with pytest.raises(UserError, match=said) as caught:
        command.run(parse(ServeConfig, ["--port", "0", *named]))
    assert "\n" not in str(caught.value)
    assert "short\n" not in str(caught.value), "no key is shown"


def test_warnings_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys.admission(parse(ServeConfig, ["--host", "0.0.0.0", "--no-auth"]))
    assert capsys.readouterr().err.count("\n") == 1
    file = tmp_path / "keys"
    file.write_text(FIRST)
    file.chmod(0o644)
    keys.admission(parse(ServeConfig, ["--api-key-file", str(file)]))
    assert f"chmod 600 {file}" in capsys.readouterr().err
    file.chmod(stat.S_IRUSR)
    keys.admission(parse(ServeConfig, ["--api-key-file", str(file)]))
    assert capsys.readouterr().err == ""
