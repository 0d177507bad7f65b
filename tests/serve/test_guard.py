"""Who may ask a server that listens on this machine only: Host, Origin, paths, sizes, headers of every answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from running_server import CHAT, Server, question, serving, stream

MOST = 20_000  # bytes of a body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("open"), "--max-body", str(MOST)) as running:
        yield running


def head_and_body(answer: bytes) -> tuple[int, bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:{}", "localhost.", "127.0.0.1:{}", "127.0.0.2", "[::1]:{}"])
def test_a_server_on_this_machine_answers_to_its_own_names(server: Server, host: str) -> None:
    assert server.ask("GET", "/v1/models", Host=host.format(server.port)).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{}", "localhost.evil.example", "10.0.0.1", "[fe80::1]", "127.0.0.1.evil.example"]
    + ["localhost@evil.example", "local host", "[::1", "0.0.0.0", "é", "127.1"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/health"])
def test_a_name_that_was_rebound_to_this_machine_is_misdirected(server: Server, host: str, path: str) -> None:
    answer = server.ask("GET", path, Host=host.format(server.port).encode().decode("latin-1"))
    assert (answer.status, answer.error["code"]) == (421, "host_not_allowed")


@pytest.mark.parametrize("lines", [b"", b"Host: localhost\r\nHost: evil.example\r\n", b"Host:\r\n"])
def test_a_request_has_exactly_one_host(server: Server, lines: bytes) -> None:
    status, _, body = head_and_body(server.raw(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n"))
    assert status == 400
    assert "error" in json.loads(body)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://localhost", "x"])
def test_a_page_of_another_origin_cannot_make_the_model_work(server: Server, origin: str) -> None:
    before = server.metric("ascendchat_prompt_tokens_total")
    answer = server.ask("POST", CHAT, question(), Origin=origin, Host=f"localhost:{server.port}")
    assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
    assert server.metric("ascendchat_prompt_tokens_total") == before


def test_our_own_page_and_clients_without_origin_may_ask(server: Server) -> None:
    own = f"localhost:{server.port}"
    assert server.ask("POST", CHAT, question(), Origin=f"http://{own}", Host=own).status == 200
    assert server.ask("POST", CHAT, question(), Origin=f"https://{own}", Host=own).status == 200, "behind a TLS proxy"
    assert server.answers()


def test_without_cors_origin_no_other_page_can_read_an_answer(server: Server) -> None:
    for method in ("GET", "OPTIONS"):
        answer = server.ask(method, "/v1/models", Origin="https://evil.example", Access_Control_Request_Method="POST")
        assert not [name for name in answer.headers if name.startswith("access-control")]


EVERY_ANSWER = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/models", {}, 200),
        ("GET", "/health", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("PUT", CHAT, {}, 405),
        ("GET", "/v1/models", {"Host": "evil.example"}, 421),
        ("POST", CHAT, {"Origin": "null"}, 403),
        ("POST", CHAT, {"Content-Length": "99999999"}, 413),
    ],
)
def test_every_answer_has_the_security_headers(
    server: Server, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = server.ask(method, path, **headers)
    assert answer.status == status
    assert answer.headers.items() >= EVERY_ANSWER.items()
    assert answer.headers["x-request-id"].startswith("req_")
    assert "server" not in answer.headers


def test_malformed_requests_and_streams_have_the_security_headers_too(server: Server) -> None:
    status, head, _ = head_and_body(server.raw(b"GET / HTTP/9.9\r\n\r\n"))
    assert status == 400
    body = json.dumps(question(stream=True)).encode()
    request = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    streamed = server.raw(f"{request}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert b"data: [DONE]" in streamed
    for answer in (head, head_and_body(streamed)[1]):
        for name, value in EVERY_ANSWER.items():
            assert f"{name}: {value}".encode() in answer.lower()


def test_a_request_id_is_kept_when_it_is_harmless_and_made_otherwise(server: Server) -> None:
    named = server.ask("GET", "/health", X_Request_Id="my-id.7")
    assert named.headers["x-request-id"] == "my-id.7"
    assert server.logged(named)["path"] == "/health"
    for bad in ("a b", "x" * 65, "<script>", "é", '"'):
        assert server.ask("GET", "/health", X_Request_Id=bad).headers["x-request-id"].startswith("req_")


def test_nothing_that_a_client_sends_becomes_a_header_or_a_line_of_the_log(server: Server) -> None:
    server.logged(server.ask("GET", "/health"))  # so that the lines of all tests before are there
    lines = len(server.log.read_text().splitlines())
    for path in (b"/a%0d%0aSet-Cookie:%20x=1", b"/web/%0d%0aSet-Cookie:%20x=1", b"/a%0a%7b%22id%22:%22forged%22%7d"):
        answer = server.raw(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status, head, _ = head_and_body(answer)
        assert status == 404
        assert b"set-cookie" not in head.lower()
    server.logged(server.ask("GET", "/nowhere"))
    added = server.log.read_text().splitlines()[lines:]
    assert len(added) == 4
    assert all(json.loads(line)["status"] == 404 for line in added)


@pytest.mark.parametrize(
    "path",
    ["/web/../api.py", "/web/%2e%2e/api.py", "/web/..%2fapi.py", "/web/%2e%2e%2f%2e%2e%2fcli.py", "/web/..%5capi.py"]
    + ["/web//etc/passwd", "/web/%2fetc%2fpasswd", "/web/..", "/web/.", "/web/", "/web/%00", "/web/index.html%00.js"]
    + ["/../../../../etc/passwd", "/web/....//api.py", "/web/%252e%252e%252fapi.py", "/web/%c0%ae%c0%ae/api.py"],
)
def test_only_files_of_the_page_can_be_fetched(server: Server, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    status, _, body = head_and_body(server.raw(request))
    assert status in (400, 404)
    assert b"import" not in body
    assert b"root:" not in body


def test_a_body_over_the_limit_is_413_however_it_is_sent(server: Server) -> None:
    long = question(messages=[{"role": "user", "content": "x" * MOST}])
    answer = server.ask("POST", CHAT, long)
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    chunked = b"%x\r\n%s\r\n" % (1000, b" " * 1000) * (MOST // 1000 + 1)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, _, body = head_and_body(server.raw(head.encode() + chunked))
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    fits = question(metadata={}, messages=[{"role": "user", "content": "hi"}])
    padded = json.dumps(fits).encode().ljust(MOST)
    assert server.ask("POST", CHAT, padded).status != 413


def test_a_request_that_is_nested_without_end_or_has_endless_numbers_is_400(server: Server) -> None:
    for body in (b"[" * 15_000, b'{"a":' * 3000, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"):
        assert server.ask("POST", CHAT, body).status == 400, body[:20]
    for number in ("1" * 15_000, "1e99999", "-" + "9" * 15_000):
        text = json.dumps(question()).replace('"max_tokens": 3', f'"max_tokens": {number}').encode()
        assert server.ask("POST", CHAT, text).status == 400, number[:20]
    assert server.answers()


def test_the_access_log_counts_tokens_and_keeps_no_contents(server: Server) -> None:
    answer = server.ask("POST", CHAT, question(5, messages=[{"role": "user", "content": "my-secret"}]))
    assert answer.json["usage"]["completion_tokens"] == 5
    line = server.logged(answer)
    assert line["completion_tokens"] == 5
    assert line["prompt_tokens"] == answer.json["usage"]["prompt_tokens"]
    assert (line["method"], line["path"], line["status"], line["client"]) == ("POST", CHAT, 200, "127.0.0.1")
    assert line["ms"] > 0
    assert "my-secret" not in server.log.read_text()


def test_metrics_count_requests_tokens_and_times(server: Server) -> None:
    names = ["prompt_tokens_total", "generated_tokens_total", "first_token_seconds_count", "token_gap_seconds_count"]
    before = [server.metric(f"ascendchat_{name}") for name in names]
    with stream(server, 200) as connection:
        while b"[DONE]" not in connection.recv(65536):
            pass
    after = [server.metric(f"ascendchat_{name}") for name in names]
    prompt, generated, first, gaps = (b - a for a, b in zip(before, after))
    assert (generated, first) == (200, 1)
    assert prompt > 0
    assert 0 < gaps < 200, "tokens that came with the first have no gap"
    text = server.ask("GET", "/metrics").body.decode()
    assert f'ascendchat_requests_total{{route="{CHAT}",status="200"}}' in text
    assert "nowhere" not in text, "a client cannot make new labels"
    for name in ("requests_running 0.0", "requests_waiting 0.0", "workers_ready 1.0", "weight_version 0.0"):
        assert f"ascendchat_{name}" in text


def test_health_says_live_and_ready(server: Server) -> None:
    assert server.ask("GET", "/health").json == {"status": "ready", "workers": 1}
    assert server.ask("GET", "/health/ready").status == server.ask("GET", "/health/live").status == 200


def test_no_answer_holds_a_trace_or_a_path_of_this_machine(server: Server) -> None:
    for method, path, body in (("GET", "/", None), ("POST", CHAT, {}), ("POST", CHAT, b"{"), ("POST", CHAT, [])):
        answer = server.ask(method, path, body)
        assert b"Traceback" not in answer.body
        assert b"site-packages" not in answer.body
        assert answer.status in (200, 400, 404, 503)
