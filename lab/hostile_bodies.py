"""How long a server is silent while strangers send it forty large or nonsensical bodies.

    python lab/hostile_bodies.py [--only TEXT]

Starts `ascendchat serve` with a tiny model (context 16,384), keeps one stream and one connection that asks /health
again and again in a process of their own, and sends the bodies one after the other from another. One line per body:
status, seconds, the longest gap of /health and of the stream meanwhile; first without any body. Status 1 if a gap of
/health is over 50 ms. The stream also waits for the model, which reads the prompts that are valid.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import running_server as real

CHAT, TEXT, RESPONSES = real.CHAT, "/v1/completions", "/v1/responses"
LIMIT = 0.050  # seconds
HI = {"role": "user", "content": "hi"}
BIG = 4_000_000  # bytes, a little under --max-body


def messages(message: Any, count: int) -> dict[str, Any]:
    return {"messages": [message] * count, "max_tokens": 1}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [HI], "max_tokens": 1, **fields}


def names(count: int, value: Any = 1) -> dict[str, Any]:
    return {f"{i}": value for i in range(count)}


def schema(**content: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": content}}
    return chat(response_format=form)


def tool(**parameters: Any) -> dict[str, Any]:
    return chat(tools=[{"type": "function", "function": {"name": "a", "parameters": parameters}}])


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


KEYS = [f"p{i}" for i in range(5000)]
PROPERTIES = {"type": "object", "properties": {key: {"type": "integer"} for key in KEYS}, "required": KEYS}
BODIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "100,000 messages with a number for a text": (CHAT, lambda: messages({"role": "user", "content": 1}, 100_000)),
    "100,000 messages of one letter": (CHAT, lambda: messages({"role": "user", "content": "a"}, 100_000)),
    "10,000 messages of one letter": (CHAT, lambda: messages({"role": "user", "content": "a"}, 10_000)),
    "2,000 messages of one letter": (CHAT, lambda: messages({"role": "user", "content": "a"}, 2_000)),
    "a million numbers for messages": (CHAT, lambda: messages(7, 1_000_000)),
    "200,000 messages without a role": (CHAT, lambda: messages({}, 200_000)),
    "15,000 answers with a missing part": (CHAT, lambda: messages({"role": "assistant", "content": [{}]}, 15_000)),
    "a message with 200,000 wrong parts": (CHAT, lambda: messages({"role": "user", "content": [{}] * 200_000}, 1)),
    "a message with 100,000 empty parts": (
        CHAT, lambda: messages({"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}, 1)),
    "an answer with 90,000 parts of a letter": (
        CHAT, lambda: messages({"role": "assistant", "content": [{"type": "text", "text": "a"}] * 90_000}, 1)),
    "a message with 200,000 unknown fields": (CHAT, lambda: messages({**HI, **names(200_000)}, 1)),
    "200,000 unknown fields": (CHAT, lambda: chat(**names(200_000))),
    "one unknown field with a long name": (CHAT, lambda: chat(**{"x" * BIG: 1})),
    "a message with 50,000 calls": (
        CHAT, lambda: messages({"role": "assistant", "tool_calls": [{"id": "a"}] * 50_000}, 1)),
    "8,000 calls and their results": (CHAT, lambda: {"messages": [
        {"role": "assistant", "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": "a", "arguments": "{}"}} for i in range(1000)]},
        *({"role": "tool", "tool_call_id": f"c{i}", "content": "a"} for i in range(1000))] * 8}),
    "one message of 4 MB of words": (CHAT, lambda: messages({"role": "user", "content": "word " * (BIG // 5)}, 1)),
    "one message of 4 MB of digits": (CHAT, lambda: messages({"role": "user", "content": "1" * BIG}, 1)),
    "one message of 4 MB of one letter": (CHAT, lambda: messages({"role": "user", "content": "a" * BIG}, 1)),
    "one message of 650,000 Chinese characters": (
        CHAT, lambda: messages({"role": "user", "content": "好" * 650_000}, 1)),
    "logit_bias of 200,000 names": (CHAT, lambda: chat(logit_bias=names(200_000))),
    "logit_bias of 200,000 wrong values": (CHAT, lambda: chat(logit_bias=names(200_000, "a"))),
    "a million allowed tokens": (CHAT, lambda: chat(allowed_token_ids=[5] * 1_000_000)),
    "a million stops": (CHAT, lambda: chat(stop=["a"] * 800_000)),
    "one stop of 4 MB": (CHAT, lambda: chat(stop="a" * BIG)),
    "metadata of 200,000 wrong values": (CHAT, lambda: chat(metadata=names(200_000))),
    "100,000 empty tools": (CHAT, lambda: chat(tools=[{}] * 100_000)),
    "a tool whose words are 4 MB": (
        CHAT, lambda: chat(tools=[{"type": "function", "function": {"name": "a", "description": "a" * BIG}}])),
    "a schema of 400 KB": (CHAT, lambda: schema(const="x" * 400_000)),
    "a schema of 5,000 properties": (CHAT, lambda: schema(**PROPERTIES)),
    "a tool of 5,000 properties": (CHAT, lambda: tool(**PROPERTIES)),
    "a schema that nobody can compile": (CHAT, lambda: schema(type="integer", multipleOf=100_000_007)),
    "1.3 million ids": (TEXT, lambda: {"prompt": [1] * 1_300_000}),
    "a million wrong ids": (TEXT, lambda: {"prompt": [-1] * 1_000_000}),
    "2,000 prompts of 600 ids": (TEXT, lambda: {"prompt": [[1] * 600] * 2000, "max_tokens": 1}),
    "200 prompts of 6,000 ids": (TEXT, lambda: {"prompt": [[1] * 6000] * 200, "max_tokens": 1}),
    "900,000 prompts": (TEXT, lambda: {"prompt": [""] * 900_000}),
    "90,000 wrong items of the Responses API": (
        RESPONSES, lambda: {"input": [{"role": "user", "content": 1}] * 90_000}),
    "a million ids to detokenize": ("/detokenize", lambda: {"tokens": [1] * 1_000_000}),
    "4 MB to tokenize, with each token's text": (
        "/tokenize", lambda: {"prompt": "word " * (BIG // 5), "return_token_strs": True}),
    "a list 100,000 deep, and 4 MB of brackets": (CHAT, lambda: nested(100_000) + b" " * 3_000_000),
}  # fmt: skip


def send(port: int, orders: Any) -> None:
    """The process that sends: the name of a body in, status and seconds out."""
    while name := orders.recv():
        path, make = BODIES[name]
        given = make()
        content = given if isinstance(given, bytes) else json.dumps(given).encode()
        orders.send(len(content))
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
            begin = time.perf_counter()
            try:
                connection.request("POST", path, content, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                answer.read()
                status: Any = answer.status
            except OSError as error:
                status = type(error).__name__
            orders.send((status, time.perf_counter() - begin))


class Watcher:
    """Longest gaps since they were asked for last."""

    def __init__(self, port: int) -> None:
        self.port, self.health, self.stream = port, 0.0, 0.0
        self.began = {"health": time.perf_counter(), "stream": time.perf_counter()}

    def took(self, what: str) -> None:
        now = time.perf_counter()
        setattr(self, what, max(getattr(self, what), now - self.began[what]))
        self.began[what] = now

    async def ask_health(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while True:
            self.began["health"] = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(size.partition(b":")[2]))
            self.took("health")
            await asyncio.sleep(0.002)

    async def read_streams(self) -> None:
        while True:
            body = json.dumps(real.question(real.CONTEXT, stream=True)).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await reader.readline()
            self.began["stream"] = time.perf_counter()
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    self.took("stream")
                if line.startswith(b"data: [DONE]"):
                    break
            writer.close()


def watch(port: int, orders: Any) -> None:
    """The process that watches: any word in, the gaps since the last out."""

    async def main() -> None:
        watcher, loop = Watcher(port), asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(watcher.ask_health()), asyncio.ensure_future(watcher.read_streams())]

        def tell() -> None:
            orders.recv()
            now = time.perf_counter()
            stream = max(watcher.stream, now - watcher.began["stream"])
            orders.send((watcher.health, stream))
            watcher.health = watcher.stream = 0.0
            watcher.began["stream"] = now

        loop.add_reader(orders.fileno(), tell)
        await asyncio.gather(*tasks)

    asyncio.run(main())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bodies whose name holds this")
    chosen = [name for name in BODIES if parser.parse_args().only in name]
    spawn, worst = multiprocessing.get_context("spawn"), 0.0
    with tempfile.TemporaryDirectory() as home, real.serving(Path(home), "--access-log=/dev/null") as server:
        ends, helpers = [], []
        for work in (send, watch):
            ours, theirs = spawn.Pipe()
            ends.append(ours)
            helpers.append(spawn.Process(target=work, args=(server.port, theirs), daemon=True))
            helpers[-1].start()
        sender, watcher = ends
        time.sleep(3)  # both have begun
        print(f"{'':48} {'bytes':>9} status  seconds  /health    stream")
        watcher.send("")
        watcher.recv()
        time.sleep(5)
        watcher.send("")
        health, stream = watcher.recv()
        print(f"{'nothing, for 5 s':48} {'':25} {health * 1000:6.1f} ms {stream * 1000:6.1f} ms", flush=True)
        for name in chosen:
            sender.send(name)
            size = sender.recv()  # it is made, and on its way
            watcher.send("")
            watcher.recv()
            status, seconds = sender.recv()
            watcher.send("")
            health, stream = watcher.recv()
            worst = max(worst, health)
            print(
                f"{name:48} {size:9,} {status:>6} {seconds:8.3f} {health * 1000:6.1f} ms {stream * 1000:6.1f} ms",
                flush=True,
            )
        assert server.answers()
        for helper in helpers:
            helper.terminate()
    print(f"{len(chosen)} bodies; longest gap of /health {worst * 1000:.1f} ms (limit {LIMIT * 1000:.0f} ms)")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
