"""A server with the page's routes and scripted answers: a trained model does not write `<script>` on demand.

with StandIn() as server:
    server.say("Hello", WAIT, " world")      # the next answer: streamed up to WAIT, the rest after server.go()
    server.refuse(429, {"Retry-After": "7"}) # the one after that

Its headers are stricter than those of `ascendchat serve`: with trusted types, no string can become HTML or a script.
"""

from __future__ import annotations

import http.server
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ascendchat

WEB = Path(ascendchat.__file__).parent / "serve" / "web"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'; base-uri 'none'"
POLICY += "; object-src 'none'"
MODEL: dict[str, Any] = {
    "context": 2048,
    "device": "Ascend 910B",
    "devices": 1,
    "stage": "sft",
    "chats": True,
    "step": 400,
}
MODEL |= {"version": 0, "defaults": {"temperature": 0.6, "top_k": 50, "max_tokens": 512}}
WAIT = object()
Piece = Any  # str: text; bytes: sent as they are; dict: fields of the delta; WAIT


@dataclass
class Answer:
    pieces: tuple[Piece, ...] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    finish: str = "stop"
    code: str = ""  # of the error


class StandIn:
    """Listens on 127.0.0.1 from `with` to its end."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []  # bodies of the chat requests
        self.left = threading.Event()  # a reader hung up in the middle of an answer
        self.key = ""  # what Authorization must carry, if anything
        self.model: dict[str, Any] = {**MODEL}
        self.name = "d12/sft"
        self.named = threading.Event()  # until then nobody hears of the model
        self.named.set()
        self._gate = threading.Semaphore(0)
        self._http = _Listener(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.release(1000)
        self.named.set()
        self._http.shutdown()
        self._http.server_close()

    def say(self, *pieces: Piece, finish: str = "stop") -> None:
        self.answers.append(Answer(pieces, finish=finish))

    def refuse(self, status: int, headers: dict[str, str] | None = None, code: str = "") -> None:
        self.answers.append(Answer(("not today",), status, headers or {}, code=code))

    def go(self) -> None:
        """Past one WAIT."""
        self._gate.release()

    def wait(self) -> None:
        self._gate.acquire()


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    owner: StandIn


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Listener

    def log_message(self, *_: object) -> None:
        return

    def reply(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        fixed = {"Content-Type": kind, "Content-Length": str(len(body)), "X-Content-Type-Options": "nosniff"}
        for name, value in {**fixed, "Content-Security-Policy": POLICY, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reply_json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.reply(status, "application/json", json.dumps(body).encode(), headers)

    def allowed(self) -> bool:
        owner = self.server.owner
        if not owner.key or self.headers.get("Authorization") == f"Bearer {owner.key}":
            return True
        self.reply_json(401, {"error": {"message": "a key is needed", "type": "invalid_request_error"}})
        return False

    def do_GET(self) -> None:
        owner = self.server.owner
        path = self.path.partition("?")[0]
        if path == "/v1/models":
            owner.named.wait()
            if self.allowed():
                card = {"id": owner.name, "object": "model", "created": 0, "owned_by": "ascendchat"}
                self.reply_json(200, {"object": "list", "data": [{**card, "ascendchat": owner.model}]})
            return
        name = "index.html" if path == "/" else path.removeprefix("/web/")
        found = {file.name: file for file in WEB.iterdir()}.get(name)
        if found is None:
            self.reply(404, "text/plain", b"")
        else:
            self.reply(200, f"{TYPES[found.suffix]}; charset=utf-8", found.read_bytes())

    def do_POST(self) -> None:
        owner = self.server.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if self.path == "/tokenize":
            self.reply_json(200, {"count": sum(len(message["content"].split()) for message in body["messages"])})
            return
        owner.asked.append(body)
        answer = owner.answers.pop(0) if owner.answers else Answer(("nothing was scripted",))
        if answer.status != 200:
            error = {"message": answer.pieces[0], "code": answer.code}
            self.reply_json(answer.status, {"error": error}, answer.headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(answer)
        except (BrokenPipeError, ConnectionResetError):
            owner.left.set()

    def stream(self, answer: Answer) -> None:
        count = 0
        for piece in answer.pieces:
            if piece is WAIT:
                self.server.owner.wait()
            elif isinstance(piece, bytes):
                self.wfile.write(piece)
            else:
                delta = piece if isinstance(piece, dict) else {"content": piece}
                self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                count += 1
            self.wfile.flush()
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
        usage = {"prompt_tokens": 100, "completion_tokens": count + 48, "total_tokens": count + 148}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")


def tool(kind: str, text: str) -> dict[str, Any]:
    """A piece of a calculator call, or of its result ("output")."""
    return {"content": "", "ascendchat": {"tool": {"kind": kind, "text": text}}}
