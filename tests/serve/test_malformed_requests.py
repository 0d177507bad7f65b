"""Nonsense: bytes on the socket and requests that break the OpenAPI document. Nothing but 4xx, 503 and answers comes
back, the memory does not grow, and the server answers a normal request right afterwards.

A failure names the seed and the request; `SEED=7 REQUESTS=2400 pytest -k nonsense` tries more.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from running_server import CHAT, PATIENCE, Server, question, serving

SEED = int(os.environ.get("SEED", "0"))
REQUESTS = int(os.environ.get("REQUESTS", "300"))
GROWTH = 48 << 20  # bytes by which the front may grow
FIELDS = """model messages prompt input max_tokens max_completion_tokens temperature top_p top_k n seed stop stream
    stream_options logprobs top_logprobs logit_bias presence_penalty frequency_penalty response_format tools tool_choice
    echo tokens best_of user no_such_field""".split()
LONG_VALUES = ["1" * 5000, "9" * 400, "[" * 3000 + "]" * 3000, "[" * 9000, '{"a":' * 900 + "1" + "}" * 900, '"é' * 3000]
VALUES = (
    LONG_VALUES
    + r"""
null true -1 0 1.5 1e999 -1e999 0.1e-400 NaN Infinity -Infinity 'x' // "" [] {} [[]] ["a"] {"a":1} [null] "1" [-1]
"\ud800" "\udfff\ud800" "\u0000" "\u202e" "\x" ["\n","","\ud800"] [18446744073709551616] {"-1":1} {"1":1e999} {"a":NaN}
[{"role":"user","content":null}] [{"role":"user","content":"\ud83d"}] [{"role":[],"content":{}}] {"type":"grammar"}
[{"role":"user","content":[{"type":"text","text":7}]}] {"99999999999999999999":1} {"type":"json_schema"}
{"type":"json_schema","json_schema":{"schema":7}}
{"type":"json_schema","json_schema":{"name":"a","schema":{"$ref":"#"}}}
[{"type":"function","function":{"name":"\u0000","parameters":{"type":[]}}}] {"include_usage":[]}
""".split()
)
VALID = {
    CHAT: json.dumps(question(2)),
    "/v1/completions": '{"prompt": "hi", "max_tokens": 2}',
    "/v1/responses": '{"input": "hi", "max_output_tokens": 2}',
    "/tokenize": '{"prompt": "hi"}',
    "/detokenize": '{"tokens": [1]}',
}
OTHERS = ["/v1/models", "/", "/metrics", "/web/x", "/openapi.json", "/nowhere"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Whatever it is asked, its answers are short."""
    flags = ["--client-timeout", "2", "--max-tokens", "4", "--context", "64", "--max-body", "50000"]
    with serving(tmp_path_factory.mktemp("fuzz"), *flags) as running:
        yield running


def request(chance: random.Random) -> bytes:
    """Valid, but for what body() and mutated() do to it."""
    method, path = chance.choice(["POST"] * 6 + ["GET", "PUT", "HEAD"]), chance.choice([*VALID, *VALID, CHAT, *OTHERS])
    content = body(chance, VALID.get(path, "{}"))
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"]
    if chance.random() < 0.15:
        size = chance.randint(1, 3000)
        chunks = [content[at : at + size] for at in range(0, len(content), size)]
        content = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        lines.append("Transfer-Encoding: chunked")
    else:
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def body(chance: random.Random, valid: str) -> bytes:
    """JSON with values that do not belong there, cut short, or with bytes that are not UTF-8."""
    fields = {name: json.dumps(value) for name, value in json.loads(valid).items()}
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        fields[chance.choice(FIELDS)] = chance.choice(VALUES)
    data = ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()
    if chance.random() < 0.1:
        data = data[: chance.randrange(len(data))]
    if chance.random() < 0.1:
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\x80" * 9]) + data[at:]
    return data


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Half of them: a few bytes replaced, removed or doubled; lone CR and LF; or random bytes instead."""
    kind = chance.random()
    if kind < 0.06:
        return chance.randbytes(chance.randint(0, 2000))
    for _ in range(chance.randint(1, 4) if kind < 0.5 else 0):
        head = max(1, data.find(b"\r\n\r\n"))
        at = chance.randrange(head if chance.random() < 0.7 else len(data) or 1)
        end = at + chance.choice([0, 1, chance.randint(1, 200)])
        odd = [b"\r", b"\n", b"\x00", b":", b" ", b"\xff", b"\r\n", b"\t", b"%00", b"\r\n\r\n", b"\x7f", b""]
        data = data[:at] + chance.choice([*odd, data[at:end] * 2]) + data[end:]
    return data


def exchange(server: Server, data: bytes, chance: random.Random) -> bytes:
    """Send it, in one piece or two; then end or go."""
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        cut = chance.randrange(len(data) + 1) if chance.random() < 0.1 else len(data)
        connection.sendall(data[:cut])
        connection.sendall(data[cut:])
        if chance.random() < 0.05:
            return b""  # gone without waiting
        if incomplete(data) or chance.random() < 0.03:
            with contextlib.suppress(OSError):  # it was refused and closed already
                connection.shutdown(socket.SHUT_WR)
        seen = b""
        while chunk := connection.recv(65536):
            seen += chunk
        return seen
    return b""


def incomplete(data: bytes) -> bool:
    """The server may rightly wait for more: do not wait with it."""
    head, _, rest = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d{1,9})\r\n", head + b"\r\n")
    return not data.startswith(b"POST") or b"chunked" in head or length is None or int(length[1]) > len(rest)


def faults(server: Server) -> str:
    """Traces in the log: requests that met a mistake of ours and were answered with 503."""
    text = server.log.read_text(errors="replace")
    return text[at - 200 : at + 3000] if (at := text.find("Traceback")) >= 0 else ""


@pytest.mark.slow
def test_nonsense_on_the_socket_is_refused_and_forgotten(server: Server) -> None:
    """A number stands for a request."""
    statuses: Counter[int] = Counter()
    memory = 0
    for number in range(REQUESTS):
        chance = random.Random(f"{SEED} {number}")
        data = mutated(chance, request(chance))
        answer = exchange(server, data, chance)
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        assert status < 500 or status == 503, (SEED, number, data, answer)
        assert answer == b"" or status, (SEED, number, data, answer)
        assert b"Traceback" not in answer
        statuses[status] += 1
        if number == REQUESTS // 2:
            memory = server.resident()
    assert statuses[200] > REQUESTS / 40, "some must be valid, or only the parser is tested"
    assert statuses[400] > REQUESTS / 5, statuses
    assert server.answers()
    assert server.resident() - memory < GROWTH, f"the memory grew from {memory} to {server.resident()}"
    assert not faults(server)


@pytest.mark.slow
def test_no_value_of_any_documented_field_is_a_fault(server: Server) -> None:
    document = server.get("/openapi.json").json()
    with httpx.Client(base_url=server.url, headers={"Content-Type": "application/json"}, timeout=PATIENCE) as client:
        for path, valid in VALID.items():
            body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            schema = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
            for name in schema["properties"]:
                others = {other: value for other, value in json.loads(valid).items() if other != name}
                for value in random.Random(f"{SEED} {name}").sample(VALUES, 12):
                    text = json.dumps(others)[:-1] + (", " if others else "") + f'"{name}": {value}}}'
                    answer = client.post(path, content=text.encode())
                    assert answer.status_code in (200, 400, 404), (text, answer.text)
    assert server.answers()
    assert not faults(server)


@pytest.mark.long(short="test_no_value_of_any_documented_field_is_a_fault")
def test_requests_made_from_the_openapi_document(server: Server, tmp_path: Path) -> None:
    """By schemathesis: every 5xx is a failure, and so is a trace in the log."""
    before, memory = server.metric("ascendchat_requests_total"), server.resident()
    url = f"http://127.0.0.1:{server.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", url, "--checks", "not_a_server_error"]
    command += ["--max-examples=60", f"--seed={SEED + 1}", "--phases=coverage,fuzzing"]
    command += ["--mode", "all", "--request-timeout", "60", "--no-color", "--suppress-health-check=all"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.metric("ascendchat_requests_total") - before > 600
    assert server.resident() - memory < 4 * GROWTH
    assert server.answers()
    assert not faults(server)
