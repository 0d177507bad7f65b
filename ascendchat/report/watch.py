"""`ascendchat report --watch`: the report of a run while it trains, on this machine; the page follows by itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from ascendchat.config import UserError
from ascendchat.report.content import Section
from ascendchat.report.html import body, mark, page

FRESH = 2.0  # seconds for which a content is not made again


class Watched:
    """The sections of the report, made anew when somebody asks and the last ones are old."""

    def __init__(self, title: str, make: Callable[[], list[Section]]) -> None:
        self.title, self.make = title, make
        self._lock, self._made, self._at = threading.Lock(), make(), time.monotonic()

    def sections(self) -> list[Section]:
        with self._lock:
            if time.monotonic() - self._at > FRESH:
                with contextlib.suppress(UserError, OSError):  # it is being set aside: what was there is shown
                    self._made = self.make()
                self._at = time.monotonic()
            return self._made


def server(watched: Watched, host: str, port: int) -> ThreadingHTTPServer:
    """Not running yet: serve_forever()."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if address.path == "/":
                return self.answer(page(watched.title, watched.sections(), follows=True))
            if address.path != "/content":
                return self.send_error(404)
            inner = body(watched.sections())
            if parse_qs(address.query).get("seen") == [mark(inner)]:
                self.send_response(204)
                return self.end_headers()
            return self.answer(inner, mark(inner))

        def answer(self, text: str, marked: str = "") -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html; charset=utf-8")
            self.send_header("content-length", str(len(data)))
            self.send_header("content-security-policy", "default-src 'self' 'unsafe-inline' data:")
            self.send_header("x-mark", marked)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
