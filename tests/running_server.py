"""`ascendchat serve` as a process of its own, on a tiny model that is made here, and ways to talk to it.

with serving(tmp_path, "--slots=4") as server:           # a model that says "abababab" to the end of its context
    assert server.ask("POST", CHAT, question()).status == 200

Other models: save(tmp_path, model) before, and `--run NAME` where there are several.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_models as make
import httpx
from warm_process import ServerPopen, children

from ascendchat.checkpoint import Writer
from ascendchat.nn.gpt import GPT

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240  # seconds after which a test gives up, on however busy a machine
CONTEXT = 16384  # of the endless model
RANDOM_CONTEXT = 1024
CHAT = "/v1/chat/completions"
SPECIAL = make.tokenizer().specials


def endless(context: int = CONTEXT) -> GPT:
    """Its answer to everything is "abababab"."""
    return make.scripted(make.script([SPECIAL["<|assistant_start|>"], ord("a"), ord("b"), ord("a")]), context)


def random_model() -> GPT:
    """It says anything, and never the end."""
    return make.model(seq_len=RANDOM_CONTEXT)


def save(home: Path, model: GPT, run: str = "tiny", stage: str = "sft", step: int = 1) -> Path:
    """A checkpoint of this model with its tokenizer, in that $ASCENDCHAT_HOME."""
    folder = home / "runs" / run / stage
    state = {"stage": stage, "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer = Writer(folder, keep=100)
    writer.save(step, model=dict(model.state_dict()), shards={}, state=state)
    writer.wait()
    if not (folder / "tokenizer").exists():
        make.tokenizer().save(folder / "tokenizer")
    return folder / f"step_{step:06d}"


def question(tokens: int = 3, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "temperature": 0, **fields}


class Answer:
    """Status, headers (lower case) and body."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.body = response.status, response.read()
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, whose envelope is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in response.text
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    return dict(body["error"])


class Server:
    """A server that was started; it may not be ready yet."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @functools.cached_property
    def url(self) -> str:
        """Waits until it is ready."""
        wait_until(lambda: self.process.poll() is not None or "ready: " in self.said)
        found = re.search(r"ready: (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @functools.cached_property
    def name(self) -> str:
        """Of its model."""
        return str(self.get("/v1/models").json()["data"][0]["id"])

    @property
    def workers(self) -> list[int]:
        return children(self.process.pid)

    def resident(self) -> int:
        """Bytes of memory of the front process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    # ---- by httpx: what an application does ------------------------------------------------------

    def post(self, path: str, body: Any = None, **further: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, **further)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        """A question."""
        return self.post(CHAT, {"messages": [{"role": "user", "content": text}], **fields})

    def ids(self, text: str) -> list[int]:
        """The prompt of a question."""
        found = self.post("/tokenize", {"messages": [{"role": "user", "content": text}]})
        return list(found.json()["tokens"])

    # ---- closer to the socket --------------------------------------------------------------------

    def link(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own; a header's _ is a -."""
        with contextlib.closing(self.link()) as connection:
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

    def metric(self, name: str) -> float:
        """Sum over its labels."""
        text = self.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, flags=re.M))

    def logged(self, answer: Answer, log: Path | None = None) -> dict[str, Any]:
        """Its line of the access log, which is written when the client has its answer already."""
        file, name = log or self.log, answer.headers["x-request-id"]
        wait_until(lambda: f'"id": "{name}"' in file.read_text())
        return next(json.loads(line) for line in file.read_text().splitlines() if f'"id": "{name}"' in line)

    def answers(self) -> bool:
        return self.ask("POST", CHAT, question()).status == 200


def drain(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            data += chunk
    return data


def stream(server: Server, tokens: int = CONTEXT) -> socket.socket:
    """A connection on which a long answer has begun to arrive."""
    connection = server.connect()
    body = json.dumps(question(tokens, stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    seen = b""
    while b'"content":"a' not in seen.replace(b" ", b""):
        chunk = connection.recv(4096)
        assert chunk, seen
        seen += chunk
    return connection


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


# ---- processes -----------------------------------------------------------------------------------


def running(number: int) -> bool:
    """There is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(number: int) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def begin(home: Path, *flags: str, module: str = "ascendchat serve", warm: bool = True, **environment: str) -> Server:
    """Start it; it may not be ready yet. Not warm: where the test is about the processes themselves."""
    if not (home / "runs").exists():
        save(home, endless())
    log = home / f"log{time.monotonic_ns()}"
    env = {**os.environ, **environment, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *module.split(), "--device-type=cpu", "--port=0", *flags]
    start = ServerPopen if warm else subprocess.Popen
    with log.open("wb") as file:
        return Server(start(command, env=env, cwd=ROOT, stderr=file, stdout=file), log)


@contextlib.contextmanager
def serving(home: Path, *flags: str, ends: bool = False, **settings: Any) -> Iterator[Server]:
    """A server that answers, until the end of the block. `ends`: the test itself ends it. `settings`: as of begin()."""
    server = begin(home, *flags, **settings)
    try:
        assert server.url
        yield server
        assert ends or server.process.poll() is None, "the server has ended"
    finally:
        while server.process.poll() is None:  # the second signal ends it whatever is under way
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(1)
        sys.stderr.write(server.said)
