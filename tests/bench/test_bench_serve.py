"""`ascendchat bench serve`: bytes on the wire, arrivals, what is counted; and a real server under its load."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import Server

from ascendchat import cli
from ascendchat.bench.http_client import Address, ClientReply, Lost, connect, first_key
from ascendchat.bench.serve import Asker, Sample, arrivals, measured, model_of, percentile, run, send, table
from ascendchat.config import parse
from ascendchat.config.serve import BenchServeConfig
from ascendchat.errors import UserError

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split()[0])
    return head, await reader.readexactly(length)


def against(script: Script, ask: Callable[[Address], Awaitable[Any]]) -> Any:
    """What `ask` returns when a server does what `script` says on every connection."""

    async def main() -> Any:
        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await script(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(one, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await asyncio.wait_for(ask(Address.parse(f"http://127.0.0.1:{port}/v1/", "sk-1")), 60)

    return asyncio.run(main())


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
LINES = ': a comment\n\ndata: {"a": "你"}\n\nevent: x\r\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'.encode()
FOUND = ['{"a": "你"}'.encode(), b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("form", ["chunked", "length", "close"])
def test_events_are_read_however_the_bytes_are_cut(form: str, size: int) -> None:
    cuts = [chunk(LINES[at : at + 5]) for at in range(0, len(LINES), 5)]
    wire = (
        EVENTS.encode()
        + {
            "chunked": b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(cuts) + b"0\r\n\r\n",
            "length": b"Content-Length: %d\r\n\r\n" % len(LINES) + LINES,
            "close": b"\r\n" + LINES,
        }[form]
    )
    heads: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not heads or form != "close":
            heads.append((await request_of(reader))[0])
            for at in range(0, len(wire), size):
                writer.write(wire[at : at + size])
                await writer.drain()
                await asyncio.sleep(0)

    async def ask(address: Address) -> Any:
        connection = await connect(address)
        events: list[bytes] = []
        first = await connection.post("/v1/completions", {"stream": True}, events.append)
        if form != "close":
            await connection.post("/v1/completions", {}, events.append)
        return first.status, events, connection.used, connection.closed

    expected = (FOUND, 1, True) if form == "close" else (FOUND * 2, 2, False)
    assert against(script, ask) == (200, *expected)
    assert heads[0].startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer sk-1\r\n" in heads[0]


def config_for(**settings: Any) -> BenchServeConfig:
    return BenchServeConfig(**{"seconds": 0.2, "concurrency": 1, "timeout": 60.0, **settings})


async def first_answer(address: Address, **settings: Any) -> Sample:
    asker = Asker(config_for(**settings), address, "m")
    found = await asker.ask(0, time.monotonic())
    asker.close()
    return found


def answering(wire: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(wire)
        await writer.drain()

    return script


def event(**content: Any) -> bytes:
    return chunk(b"data: " + json.dumps(content).encode() + b"\n\n")


def streamed(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return EVENTS.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(events) + end


PIECE = event(choices=[{"index": 0, "text": "hi", "finish_reason": None}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 9})
BUSY = b'{"error": {"message": "the server is busy"}}'


@pytest.mark.parametrize(
    ("wire", "error"),
    [
        (streamed(PIECE, PIECE, USAGE), ""),
        (streamed(PIECE), "the answer ended without usage"),
        (streamed(PIECE, event(error={"message": "the worker has died"})), "the worker has died"),
        (streamed(PIECE, chunk(b"data: {oops\n\n")), "an event is not JSON"),
        (streamed(PIECE, end=b""), "connection lost after the answer had begun"),
        (b"", "connection lost"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "connection lost"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(BUSY) + BUSY, "http 503: the server is busy"),
        (b'HTTP/1.1 404 No\r\nContent-Length: 22\r\n\r\n{"detail":"Not Found"}', "http 404: Not Found"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>", "http 502"),
    ],
)
def test_failures_are_told_apart(wire: bytes, error: str) -> None:
    found = against(answering(wire), first_answer)
    assert found.error == error
    if not error:
        assert (found.prompt_tokens, found.completion_tokens) == (7, 9), "of usage, not the two pieces"
        assert found.arrived < found.first <= found.last <= found.ended


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def test_an_answer_that_never_ends_is_a_timeout_and_a_missing_server_no_connection() -> None:
    assert against(silent, lambda address: first_answer(address, timeout=0.05)).error == "timeout"
    assert asyncio.run(first_answer(Address("127.0.0.1", 1, False))).error.startswith("no connection: ")


def test_a_connection_that_the_server_closed_between_two_requests_is_no_failure() -> None:
    taken: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(0)
        await request_of(reader)
        writer.write(streamed(PIECE, USAGE))
        await writer.drain()
        if len(taken) == 1:
            await request_of(reader)  # the second request arrives here, and the connection ends without a word

    async def ask(address: Address) -> list[str]:
        asker = Asker(config_for(), address, "m")
        found = [(await asker.ask(number, time.monotonic())).error for number in range(2)]
        asker.close()
        return found

    assert against(script, ask) == ["", ""]
    assert len(taken) == 2


def test_a_cancelled_request_leaves_no_connection_behind() -> None:
    async def ask(address: Address) -> bool:
        connection = await connect(address)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(connection.post("/v1/completions", {}), 0.05)
        with pytest.raises(Lost):
            await connection.post("/v1/completions", {})
        return connection.closed

    assert against(silent, ask)


def test_prompts_are_the_same_for_the_same_seed_and_number_and_differ_otherwise() -> None:
    def prompts(**settings: Any) -> list[Any]:
        asker = Asker(config_for(**settings), Address("h", 1, False), "m")
        return [asker.content(number) for number in range(8)]

    assert prompts() == prompts()
    assert all(len(one["prompt"]) == 64 and max(one["prompt"]) < 256 for one in prompts())
    assert len({str(one) for seed in range(4) for one in prompts(seed=seed)}) == 32
    talk = prompts(api="chat", prompt_tokens=30)[0]
    assert talk["messages"][0]["content"].count("What is") == 3
    assert talk["stream_options"] == {"include_usage": True}


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = [time for index in range(4) for time in arrivals(random.Random(f"0 arrivals {index}"), 25.0, 100.0)]
    pauses = np.diff(np.sort(times))
    assert 9500 < len(times) < 10500, "four processes of 25 per second for 100 seconds; one sigma is 100"
    assert abs(pauses.std() / pauses.mean() - 1) < 0.05, "exponential pauses: as wide as they are long"
    assert abs((pauses > 0.01).mean() - np.exp(-1)) < 0.03


def test_with_poisson_the_time_counts_from_the_arrival_while_others_are_answered() -> None:
    """One at a time, 20 ms each, 100 per second: the last one waits for most of the others."""
    under_way, most = 0, 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        while True:
            await request_of(reader)
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.02)
            under_way -= 1
            writer.write(streamed(PIECE, USAGE))

    async def ask(address: Address) -> list[Sample]:
        asker = Asker(config_for(arrivals="poisson", rate=100.0, seconds=0.5), address, "m")
        return await send(asker, time.monotonic(), 0, 1)

    samples = against(script, ask)
    assert most == 1
    assert len(samples) > 30
    last = max(samples, key=lambda one: one.first)
    assert last.first - last.arrived > 0.02 * len(samples) - 0.5, "what stood in the queue is counted"


def test_percentiles_are_numpys() -> None:
    values = sorted(random.Random(0).random() for _ in range(37))
    for percent in (0, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
        assert percentile([3.0], percent) == 3.0


def test_the_table_holds_what_was_measured() -> None:
    samples = [Sample(n, n * 0.1, n * 0.1 + 0.02, n * 0.1 + 0.08, n * 0.1 + 0.1, 10, 4, 13) for n in range(10)]
    samples.append(Sample(10, 0.95, 0, 0, 9.0, error="http 503: busy"))
    found = measured(samples, [0.01, 0.03])
    assert (found["requests"], found["errors"], found["seconds"]) == (10, {"http 503: busy": 1}, 1.0)
    assert (found["tokens_per_second_in"], found["tokens_per_second_out"]) == (100.0, 130.0)
    assert found["first_token_ms"] == {"p50": 20.0, "p90": 20.0, "p99": 20.0, "max": 20.0}
    assert found["token_gap_ms"]["p50"] == 5.0, "60 ms for twelve gaps"
    assert found["piece_gap_ms"] == {"p50": 20.0, "p90": 28.0, "p99": 29.8, "max": 30.0}
    assert found["request_ms"]["p99"] == 100.0
    about = {"url": "u", "model": "m", "api": "chat", "arrivals": "closed", "concurrency": 4}
    page = table({**about, "prompt_tokens": 1, "max_tokens": 2, **found})
    for text in ("10 answers in 1.0 s", "100 in, 130 out", "1 x http 503: busy", "token gap"):
        assert text in page
    nothing = measured([Sample(0, 0, 0, 0, 1, error="timeout")], [])
    assert (nothing["requests"], nothing["tokens_per_second_out"], nothing["first_token_ms"]) == (0, 0.0, None)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, False)),
        ("localhost:9000/v1", Address("localhost", 9000, False)),
        ("https://chat.example.org/model/v1/", Address("chat.example.org", 443, True, "/model")),
        ("http://[::1]:8000", Address("::1", 8000, False)),
        *((wrong, None) for wrong in ("ftp://h", "http://", "http://h:port", "://")),
    ],
)
def test_addresses_and_what_is_none(url: str, expected: Address | None) -> None:
    if expected:
        assert Address.parse(url) == expected
    else:
        with pytest.raises(UserError, match="is not the address of a server"):
            Address.parse(url)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCENDCHAT_API_KEYS", raising=False)
    assert first_key("") == ""
    monkeypatch.setenv("ASCENDCHAT_API_KEYS", "sk-a, sk-b")
    assert first_key("") == "sk-a"
    (tmp_path / "keys").write_text("# of the tests\n\nsk-c\nsk-d\n")
    assert first_key(str(tmp_path / "keys")) == "sk-c"
    (tmp_path / "empty").write_text("\n")
    for name, said in (("empty", "is empty"), ("none", "cannot read the API key")):
        with pytest.raises(UserError, match=said):
            first_key(str(tmp_path / name))


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "wants an API key"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "does not speak OpenAI's API"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "does not speak OpenAI's API"),
        (b"", "no server answers at"),
    ],
)
def test_what_is_no_server_is_one_sentence(wire: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        against(answering(wire), model_of)
    assert ClientReply(200, {}).body == b""


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_real_server_under_load_from_two_processes(
    server: Server, api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--url {server.url} --api {api} -c 4 --seconds 0.5 --prompt-tokens 20 --max-tokens 24 --processes 2"
    config = parse(BenchServeConfig, [*flags.split(), "--warmup=0.1", "--compare-serial", "--json"])
    assert run(config) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["errors"], found["model"], found["processes"]) == ({}, "random/sft", 2)
    assert found["requests"] >= 4, "at least one of each client"
    assert found["total_completion_tokens"] == 24 * found["requests"], "every answer has its full length"
    if api == "completions":
        assert found["total_prompt_tokens"] == 20 * found["requests"]
    assert found["first_token_ms"]["p50"] <= found["request_ms"]["p50"]
    assert (found["serial"]["errors"], found["times_serial"] > 0) == ({}, True)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 2
    assert "start one with: ascendchat serve" in capsys.readouterr().err
