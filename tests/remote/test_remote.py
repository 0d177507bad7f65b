"""The Generator over HTTP against scripted answers: vLLM's words, busy and broken servers, what is sent and understood.

A real server is asked in tests/remote/test_remote_generator.py.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import engine_models as make
import pytest

from ascendchat.engine.request import Grammar, Piece, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.remote.client import RemoteGenerator
from ascendchat.remote.completions import ForcedTokens
from ascendchat.remote.weights import checksum

TEXT = make.tokenizer()
END = TEXT.specials["<|assistant_end|>"]
CARD = {"id": "m", "max_model_len": 64}
HELLO = TEXT.encode("hello")


def reply(ids: list[int], reason: str = "stop", **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "as the server writes it", "token_ids": ids, "finish_reason": reason, **fields}
    return {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": len(ids)}}


class Scripted:
    """A server that gives the answers it was told to, one after the other, then the last one for ever."""

    def __init__(self) -> None:
        self.answers: list[Callable[[http.server.BaseHTTPRequestHandler], None]] = []
        self.asked: list[tuple[str, dict[str, str], Any]] = []  # path, headers, body
        self.card: dict[str, Any] = CARD
        self.weights: dict[str, Any] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                said(200, outer.weights if self.path == "/weights" else {"data": [outer.card]})(self)

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                kind = self.headers["Content-Type"]
                outer.asked.append((self.path, dict(self.headers), json.loads(content) if "json" in kind else content))
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                answer(self)

            def log_message(self, *_: Any) -> None:
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def said(status: int, content: Any, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    """A whole answer."""

    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return send


def streamed(*events: Any, whole: bool = True) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    """Server-sent events; the connection ends behind them, without a word when not `whole`."""

    def send(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for event in events:
            data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if whole:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return send


def dropped(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Nothing at all."""
    handler.close_connection = True


BUSY = {"error": {"message": "the server is busy", "type": "server_error", "param": None, "code": "overloaded"}}


@pytest.fixture
def server() -> Iterator[Scripted]:
    """A server without any answers yet."""
    scripted = Scripted()
    yield scripted
    scripted.server.shutdown()
    scripted.server.server_close()


def opened(server: Scripted, **settings: Any) -> RemoteGenerator:
    return RemoteGenerator.open(server.url + "/v1/", **{"tokenizer": TEXT, "patience": 30.0, **settings})


def test_an_answer_that_took_the_server_too_long_is_asked_for_the_rest(server: Scripted) -> None:
    """Nobody learns from a length that the clock has set."""
    cut, rest = [65, 66], [67]
    server.answers = [
        said(200, reply(cut, "length", ascendchat={"weight_version": 0, "timed_out": True})),
        said(200, reply(rest)),
    ]
    with opened(server) as remote:
        (found,) = remote.generate([Request([1, 2], Sampling(seed=3))])
    assert (found.ids, found.finish_reason) == ([*cut, *rest], "stop")
    assert server.asked[-1][2]["prompt"] == [1, 2, *cut]


def test_the_answer_of_another_server(server: Scripted) -> None:
    """vLLM counts the stop token to the answer, and has log-probabilities for it too."""
    logprobs = {
        "token_logprobs": [-0.5] * (len(HELLO) + 1),
        "top_logprobs": [{"token_id:7": -0.1, "token_id:3": -2.0, "token_id:9": -3.5}] * (len(HELLO) + 1),
    }
    server.answers = [said(200, reply([*HELLO, END], logprobs=logprobs))]
    with opened(server, api_key="sk-1") as remote:
        more: Any = {"stop": ("x",), "logit_bias": ((5, -100.0),)}
        sampling = Sampling(seed=3, temperature=0.5, logprobs=True, top_logprobs=2, **more)
        (found,) = remote.generate([Request([1, 2], sampling)])
        assert (remote.model, remote.context, remote.ours, remote.version) == ("m", 64, False, 0)
    assert (found.ids, found.text, found.finish_reason) == (HELLO, "hello", "stop")
    assert found.logprobs == [-0.5] * len(HELLO)
    assert found.tops == [[(7, -0.1), (3, -2.0)]] * len(HELLO)
    assert (found.forced, found.versions) == ([False] * len(HELLO), [0] * len(HELLO))
    path, headers, body = server.asked[0]
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer sk-1")
    usual = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    stops = {"ignore_eos": True, "stop_token_ids": [END, TEXT.bos], "stop": ["x"]}
    told = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2, "logit_bias": {"5": -100.0}}
    asked = {"model": "m", "prompt": [1, 2], "max_tokens": 62, "temperature": 0.5, "top_k": -1, "seed": 3}
    assert body == {**asked, **usual, **stops, **told}


def test_without_a_tokenizer_the_text_is_the_servers(server: Scripted) -> None:
    server.answers = [said(200, reply([7, 8], "length")), streamed(reply([7], None), reply([8], "stop"), b"[DONE]")]  # type: ignore[arg-type]
    with opened(server, tokenizer=None) as remote:
        (found,) = remote.generate([Request([1])])
        assert (found.ids, found.text, found.finish_reason) == ([7, 8], "as the server writes it", "length")
        assert "ignore_eos" not in server.asked[0][2], "which tokens end an answer is for the server to know"
        stream = remote.stream(Request([1]))
        assert [piece.text for piece in stream] == ["as the server writes it"] * 2
        assert (stream.completion.ids, stream.completion.finish_reason) == ([7, 8], "stop")


@pytest.mark.parametrize("bad", [said(503, BUSY, Retry_After="0"), said(429, b"slow down"), said(502, b""), dropped])
def test_a_busy_or_broken_server_is_asked_again(server: Scripted, bad: Any) -> None:
    server.answers = [bad, bad, said(200, reply(HELLO))]
    with opened(server) as remote:
        assert remote.generate([Request([1])])[0].text == "hello"
        assert len(server.asked) == 3
        end = reply([*HELLO[1:], END], "stop")
        server.answers = [bad, streamed(reply(HELLO[:1], None), end, b"[DONE]")]  # type: ignore[arg-type]
        stream = remote.stream(Request([1]))
        assert "".join(piece.text for piece in stream) == "hello" == stream.completion.text
        assert (stream.completion.ids, stream.completion.finish_reason) == (HELLO, "stop")
        assert len(server.asked) == 5
        assert server.asked[-1][2]["stream_options"] == {"include_usage": True}


def test_retry_after_is_obeyed(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pause of ours would be a quarter of a second."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("ascendchat.remote.http.asyncio.sleep", noted)
    server.answers = [said(503, BUSY, Retry_After="7"), said(200, reply(HELLO))]
    with opened(server) as remote:
        remote.generate([Request([1])])
    assert 7 in pauses


@pytest.mark.parametrize(
    ("bad", "error", "said_"),
    [
        (said(503, BUSY), UserError, "the server is busy; is the server running"),
        (dropped, UserError, "no answer from http"),
        (said(400, {"error": {"message": "token ids end at 99"}}), ValueError, "token ids end at 99"),
        (said(401, {"error": {"message": "no such key"}}), UserError, "no such key; give an API key"),
        (said(404, {"detail": "Not Found"}), UserError, "cannot do this: Not Found"),
        (said(500, b"oops"), UserError, "status 500 for /v1/completions"),
        (said(200, b"<html>"), UserError, "does not speak OpenAI's API"),
    ],
)
def test_what_does_not_help_is_one_sentence(server: Scripted, bad: Any, error: type, said_: str) -> None:
    server.answers = [bad]
    with opened(server, patience=0.1) as remote:
        for ask in (lambda: remote.generate([Request([1])]), lambda: list(remote.stream(Request([1])))):
            with pytest.raises(error, match=said_):
                ask()


def test_a_server_that_is_not_there(server: Scripted) -> None:
    with pytest.raises(UserError, match="is the server running"):
        RemoteGenerator.open("127.0.0.1:1", patience=0.1)
    server.card = {"id": "gpt"}
    with pytest.raises(UserError, match="how long the context"):
        opened(server)
    server.card = {}  # as of something else that speaks JSON
    with pytest.raises(UserError, match=r"is no server with OpenAI's API.*rollout-server"):
        opened(server)


def test_a_stream_that_breaks_is_not_begun_anew_and_keeps_what_has_come(server: Scripted) -> None:
    server.answers = [streamed(reply(HELLO, None), whole=False)]  # type: ignore[arg-type]
    with opened(server) as remote:
        stream = remote.stream(Request([1]))
        assert next(stream) == Piece("text", "hello")
        with pytest.raises(UserError, match="no answer from"):
            next(stream)
        assert (stream.completion.ids, stream.completion.finish_reason) == (HELLO, "cancelled")
        assert list(stream) == []
        server.answers = [streamed({"error": {"message": "the worker has died"}})]
        with pytest.raises(UserError, match="the worker has died"):
            next(remote.stream(Request([1])))
    assert len(server.asked) == 2


def test_a_closed_stream_ends_and_what_was_read_before_stays(server: Scripted) -> None:
    gone = threading.Event()

    def slow(handler: http.server.BaseHTTPRequestHandler) -> None:
        streamed(reply(HELLO, None), whole=False)(handler)  # type: ignore[arg-type]
        handler.wfile.flush()
        while not gone.is_set():  # the client's end of the connection goes away
            try:
                handler.wfile.write(b"5\r\n: .\n\n\r\n")
                time.sleep(0.02)
            except OSError:
                gone.set()

    server.answers = [slow]
    with opened(server) as remote:
        with closing(remote.stream(Request([1]))) as stream:
            first = next(stream)
        assert gone.wait(30), "the server learns of it"
        assert (first, list(stream)) == (Piece("text", "hello"), [])
        assert (stream.completion.text, stream.completion.finish_reason) == ("hello", "cancelled")


def test_an_error_ends_the_other_requests(server: Scripted) -> None:
    gone = threading.Event()

    def silent(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.connection.settimeout(30)
        if handler.connection.recv(1) == b"":
            gone.set()

    server.answers = [silent, said(400, {"error": {"message": "no"}})]
    with opened(server) as remote:
        with pytest.raises(ValueError, match="no"):
            remote.generate([Request([1]), Request([2]), Request([3])])
        assert gone.wait(30), "the one that was under way is cancelled"


def test_no_more_requests_are_under_way_than_allowed(server: Scripted) -> None:
    under_way, most, lock = [0], [0], threading.Lock()

    def counted(handler: http.server.BaseHTTPRequestHandler) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.02)
        with lock:
            under_way[0] -= 1
        said(200, reply(HELLO))(handler)

    server.answers = [counted]
    with opened(server, concurrency=3) as remote:
        assert len(remote.generate([Request([n]) for n in range(1, 13)])) == 12
    assert 2 <= most[0] <= 3


@pytest.mark.parametrize(
    ("request_", "said_"),
    [
        (Request([]), "at least one token"),
        (Request([0] * 64), "leaves no room for an answer in 64"),
        (Request([0], Sampling(grammar=Grammar("json"))), "a grammar cannot be sent"),
    ],
)
def test_what_cannot_be_asked_is_known_before_anything_is_sent(server: Scripted, request_: Request, said_: str) -> None:
    server.answers = [said(200, reply(HELLO))]
    with opened(server) as remote:
        for ask in (lambda: remote.generate([Request([1]), request_]), lambda: remote.stream(request_)):
            with pytest.raises(ValueError, match=said_):
                ask()
    assert not server.asked


def test_weights_are_sent_to_a_server_of_ours_only(server: Scripted) -> None:
    from safetensors.torch import load

    server.answers = [said(503, BUSY, Retry_After="0"), said(200, {"status": "loaded"})]
    weights = dict(make.model(1).state_dict())
    with opened(server) as remote, pytest.raises(UserError, match="not a server of ascendchat"):
        remote.load(weights, 3)
    server.card = {**CARD, "ascendchat": {"version": 2}}
    dtypes = dict.fromkeys(weights, "bfloat16")
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    server.weights = {"version": 3, "checksum": checksum(halves), "dtypes": dtypes}
    with opened(server) as remote:
        assert (remote.version, remote.ours) == (2, True)
        remote.load(weights, 3)
        assert remote.version == 3
        server.weights = {"version": 4, "checksum": "0123456789abcdef", "dtypes": dtypes}
        server.answers = [said(200, {"status": "loaded"})]
        with pytest.raises(UserError, match="other weights than it was sent: version 4 with the checksum 0123456789"):
            remote.load(weights, 4)
        assert remote.version == 3
        server.answers = [said(400, {"error": {"message": "smear is missing"}})]
        with pytest.raises(ValueError, match="smear is missing"):
            remote.load(weights, 4)
        assert remote.version == 3
    path, _, content = server.asked[1]
    assert path == "/update_weights?version=3"
    assert server.asked[0][2] == content, "once more from the beginning"
    found = load(content)
    assert all((found[name] == tensor).all() for name, tensor in weights.items())
    assert found.keys() == weights.keys()


def test_versions_of_tokens_and_of_the_server(server: Scripted) -> None:
    server.card = {**CARD, "ascendchat": {"version": 2}}
    own = [{"weight_version": 4}, {"weight_version": 4, "weight_versions": [4] * (len(HELLO) - 1) + [5]}]
    server.answers = [said(200, reply(HELLO, ascendchat=one)) for one in own]
    with opened(server) as remote:
        first, second = (remote.generate([Request([1])])[0] for _ in own)
        assert (first.version, first.versions) == (4, [4] * len(HELLO))
        assert (second.version, second.versions[-2:]) == (4, [4, 5])
        assert remote.version == 5
    assert server.asked[0][2]["calculator"] is True


def test_a_proxy_of_the_environment_is_not_used(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with opened(server) as remote:
        assert remote.model == "m"


def test_what_a_calculator_has_put_there_is_known_by_its_place() -> None:
    _, whole = make.calculator_script()
    special = TEXT.specials
    start, result, over = (special[f"<|{name}|>"] for name in ("tool_start", "output_start", "output_end"))
    call, result_at, end = special["<|tool_end|>"], whole.index(result), whole.index(over)
    expected = [result_at <= at <= end for at in range(len(whole))]
    assert ForcedTokens(TEXT).feed(whole) == expected
    parts = ForcedTokens(TEXT)
    assert [parts.feed([token])[0] for token in whole] == expected
    assert ForcedTokens(TEXT).feed(whole[: result_at + 2])[-2:] == [True, True], "cut short"
    assert not any(ForcedTokens(TEXT).feed([start, call, result, 65, over])), "an empty call has no result"
    assert not any(ForcedTokens(TEXT).feed([65, result, 65, over, call, result]))


def test_a_thread_that_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(threading.Thread):
        def run(self) -> None:
            time.sleep(0.2)
            super().run()

    monkeypatch.setattr(threading, "Thread", Late)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        RemoteGenerator.open("http://127.0.0.1:9", patience=0.1)
