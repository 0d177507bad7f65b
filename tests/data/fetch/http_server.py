"""A local HTTP server that misbehaves on demand, and speaks enough of the two hubs' APIs to be fetched from.

with Server() as server:
    url = server.add("/a.bin", content, "truncate", "503:1")   # two bad answers, then good ones
    server.hugging_face("owner/name", {"data/x.parquet": content})
"""

from __future__ import annotations

import hashlib
import http.server
import json
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from ascendchat.data.fetch import Policy

CHUNK = 64 << 10
# Its server is a thread of the test, which a busy machine may let wait for seconds: then nothing may be asked twice.
FAST = Policy(chunk=CHUNK, attempts=4, connect_attempts=2, backoff=0.01, max_backoff=0.05, timeout=30)
HASTY = replace(FAST, timeout=0.5)  # for servers that fall silent
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


DATA = noise(0, 10 * CHUNK + 123)


def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """For a fixture: a running server that is both hubs, and an environment without proxies and tokens."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DOWNLOAD_TIMEOUT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", running.url)
        yield running


@dataclass
class File:
    """One path: its content, the faults of the next answers (one each), and faults of every answer."""

    content: bytes
    faults: list[str] = field(default_factory=list)
    always: str = ""
    changed: bytes | None = None  # what "change" puts in place


@dataclass
class Asked:
    """One request as the server saw it; `sent` counts bytes of content that left."""

    path: str
    span: str
    sent: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class Server:
    """Listens on 127.0.0.1 from `with` to its end."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.json: dict[str, tuple[Any, dict[str, str]]] = {}
        self.asked: list[Asked] = []
        self.rate = 0.0  # bytes per second of one connection; 0: no limit
        self.answering: set[int] = set()  # threads that are sending content
        self.closing = threading.Event()
        self._http = _Listener(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()

    def add(self, path: str, content: bytes, *faults: str, always: str = "", changed: bytes | None = None) -> str:
        self.files[path] = File(content, list(faults), always, changed)
        return self.url + quote(path)

    def encrypt(self, context: ssl.SSLContext) -> None:
        """From here on https://localhost."""
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://localhost:{self._http.server_address[1]}"

    def sent(self, path: str = "") -> int:
        """Bytes of content sent, over all requests or those for one path."""
        return sum(a.sent for a in self.asked if not path or a.path == path)

    def settle(self) -> None:
        """Wait until no answer is under way any more: those to a killed process end when a write fails."""
        while self.answering:
            time.sleep(0.002)

    def hugging_face(self, repo: str, files: dict[str, bytes], *, small: tuple[str, ...] = (), page: int = 99) -> None:
        """The API of the Hugging Face hub for one data set; files in `small` are plain git blobs, the rest is LFS.
        Files are served from a second path after a redirect, as the hub does."""
        api = f"/api/datasets/{repo}"
        self.json[f"{api}/revision/main"] = ({"sha": COMMIT}, {})
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "data", "size": 0, "oid": "0" * 40}]
        for path, content in files.items():
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
            if path not in small:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            entries.append(entry)
            self.add(f"/cdn/{repo}/{path}", content)
            there = f"/datasets/{repo}/resolve/{COMMIT}/{path}"
            self.files[there] = File(b"", always=f"redirect:{quote(f'/cdn/{repo}/{path}')}")
        folders = {"", *(path.rpartition("/")[0] for path in files)}
        for folder in folders:
            inside = [e for e in entries if not folder or e["path"].startswith(folder + "/")]
            base = f"{api}/tree/{COMMIT}" + (f"/{folder}" if folder else "")
            for start in range(0, max(1, len(inside)), page):
                link = f'<{self.url}{base}?recursive=true&cursor={start + page}>; rel="next"'
                headers = {"Link": link} if start + page < len(inside) else {}
                key = base if start == 0 else f"{base}?cursor={start}"
                self.json[key] = (inside[start : start + page], headers)

    def modelscope(self, repo: str, files: dict[str, bytes]) -> None:
        """The API of ModelScope for one data set, which lists one folder at a time."""
        base = f"/api/v1/datasets/{repo}/repo"
        folders: dict[str, list[dict[str, Any]]] = {"": []}
        for path, content in files.items():
            folder = path.rpartition("/")[0]
            if folder and folder not in folders:
                folders[folder] = []
                folders[""].append({"Path": folder, "Type": "tree", "Size": 0})
            sha = hashlib.sha256(content).hexdigest()
            folders[folder].append({"Path": path, "Type": "blob", "Size": len(content), "Sha256": sha})
            self.add(f"{base}?FilePath={path}", content)
        for folder, entries in folders.items():
            self.json[f"{base}/tree?Root={folder}"] = ({"Code": 200, "Data": {"Files": entries}}, {})


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    owner: Server

    def handle_error(self, *_: Any) -> None:
        return  # a client that hangs up, or does not trust us, is what these tests are about


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every small answer waits 40 ms for an acknowledgement
    server: _Listener

    def log_message(self, *_: Any) -> None:
        return

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError, ssl.SSLError):
            self.close_connection = True

    def do_GET(self) -> None:
        owner = self.server.owner
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        path = unquote(parts.path)
        for key in ("FilePath", "Root", "cursor"):
            if key in query:
                path += f"?{key}={query[key]}"
        asked = Asked(path, self.headers.get("Range", ""), headers={k.lower(): v for k, v in self.headers.items()})
        owner.asked.append(asked)
        if path in owner.json:
            document, headers = owner.json[path]
            return self._small(200, json.dumps(document).encode(), headers)
        file = owner.files.get(unquote(self.path)) or owner.files.get(path)  # the first: content chosen by a query
        if file is None:
            return self._small(404, b"not found")
        fault = file.faults.pop(0) if file.faults else file.always
        return self._answer(asked, file, fault)

    def _small(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, asked: Asked, file: File, fault: str) -> None:
        kind, _, value = fault.partition(":")
        if kind.isdigit():
            return self._small(int(kind), b"no", {"Retry-After": value} if value else {})
        if kind == "redirect":
            return self._small(302, b"", {"Location": value})
        if kind == "html":
            return self._small(200, b"<!DOCTYPE html><html>please log in</html>")
        content, tag = file.content, f'"{hashlib.md5(file.content).hexdigest()}"'
        if kind == "change" and file.changed is not None:
            file.content = file.changed
        start, end, status = 0, len(content), 200
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.span)
        if found and kind != "whole" and self.headers.get("If-Range", tag) == tag:
            start, end, status = int(found[1]), min(end, int(found[2] or end) + 1), 206
            if start >= len(content):
                return self._small(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        if kind == "wrong-range" and status == 206:
            start, end = max(0, start - 7), max(1, end - 7)
        body = bytearray(content[start:end])
        if kind == "flip" and body:
            body[len(body) // 2] ^= 0x10
        announced = len(body)
        if kind == "short-length":
            announced = max(1, announced - 100)
            body = body[:announced]
        if kind == "long-length":
            announced += 100
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(announced))
        if kind not in ("no-tag", "chunked"):
            self.send_header("ETag", tag)
        self.end_headers()
        me = threading.get_ident()
        self.server.owner.answering.add(me)
        try:
            self._send(asked, bytes(body), kind)
        finally:
            self.server.owner.answering.discard(me)

    def _send(self, asked: Asked, body: bytes, kind: str) -> None:
        owner = self.server.owner
        stop = len(body) // 2 if kind in ("truncate", "stall") else len(body)
        step = 1 if kind == "drip" else 16 << 10
        for at in range(0, stop, step):
            piece = body[at : min(at + step, stop)]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if kind == "chunked" else piece)
            asked.sent += len(piece)
            if owner.rate:
                time.sleep(len(piece) / owner.rate)
            if kind == "drip" and owner.closing.wait(0.05):
                break
        if kind == "chunked":
            self.wfile.write(b"0\r\n\r\n")
        if kind == "stall":
            owner.closing.wait(30)
        if kind in ("truncate", "stall", "long-length", "drip"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
