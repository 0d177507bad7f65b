"""`ascendchat serve` as a process of its own, with a tiny model that never stops talking, and plain sockets to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import engine_models as make

from ascendchat.checkpoint import Writer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds after which a test gives up, on however busy a machine
CONTEXT = 16384
CHAT = "/v1/chat/completions"


def endless_model(home: Path) -> None:
    """A run `endless/sft` whose answer to everything is "abababab" to the end of its context."""
    follows = make.script([make.tokenizer().specials["<|assistant_start|>"], ord("a"), ord("b"), ord("a")])
    model = make.scripted(follows, CONTEXT)
    folder = home / "runs" / "endless" / "sft"
    writer = Writer(folder)
    state = {"stage": "sft", "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer.save(1, model=dict(model.state_dict()), shards={}, state=state)
    writer.wait()
    make.tokenizer().save(home / "tokenizer")


def question(tokens: int = 3, **fields: Any) -> dict[str, Any]:
    return {
        "model": "endless/sft",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "temperature": 0,
        **fields,
    }


class Answer:
    """Status, headers (lower case) and body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.body = response.status, response.read()
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The whole envelope is checked."""
        assert set(self.json) == {"error"}, self.body
        assert set(self.json["error"]) == {"message", "type", "param", "code"}, self.body
        return self.json["error"]


class Server:
    """A running one."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.process, self.log, self.port = process, log, port

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own; a header's _ is a -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"Content-Type": "application/json", **named})
            return Answer(connection.getresponse())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def raw(self, data: bytes) -> bytes:
        """Send bytes, read until the server closes. A reset is an end, too."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return drain(connection)

    def metric(self, name: str, **headers: str) -> float:
        """Sum over its labels."""
        text = self.ask("GET", "/metrics", **headers).body.decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, flags=re.M))

    def logged(self, answer: Answer, log: Path | None = None) -> dict[str, Any]:
        """Its line of the access log, which is written when the client has its answer already."""
        file, name = log or self.log, answer.headers["x-request-id"]
        wait_until(lambda: f'"id": "{name}"' in file.read_text())
        return next(json.loads(line) for line in file.read_text().splitlines() if f'"id": "{name}"' in line)

    def answers(self, **headers: str) -> bool:
        return self.ask("POST", CHAT, question(), **headers).status == 200

    def resident(self) -> int:
        """Bytes of memory of the front process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def drain(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def stream(server: Server, tokens: int = CONTEXT, **headers: str) -> socket.socket:
    """A connection on which a long answer has begun to arrive."""
    connection = server.connect()
    body = json.dumps(question(tokens, stream=True)).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    seen = b""
    while b'"content":"a' not in seen.replace(b" ", b""):
        chunk = connection.recv(4096)
        assert chunk, seen
        seen += chunk
    return connection


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """Start, and end it as a service manager would."""
    if not (folder / "tokenizer").exists():
        endless_model(folder)
    log = folder / f"log{time.monotonic_ns()}"
    env = {**os.environ, "ASCENDCHAT_HOME": str(folder), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "ascendchat", "serve", "--device-type", "cpu", "--port", "0", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=file, stdout=file)
    try:
        wait_until(lambda: process.poll() is not None or b"ready: " in log.read_bytes())
        found = re.search(r"ready: http://\S+:(\d+)", log.read_text(errors="replace"))
        assert found, log.read_text(errors="replace")
        yield Server(process, log, int(found[1]))
        assert process.poll() is None, f"the server has ended: {log.read_text(errors='replace')[-3000:]}"
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
