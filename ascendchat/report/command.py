"""Report on runs in one file, with curves, tables, samples and environment: `ascendchat report --run demo`. No torch.

gather.py reads the run folders, content.py chooses what is shown, plots.py draws, html.py writes HTML and Markdown.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from ascendchat.config.commands import ReportConfig
from ascendchat.errors import UserError
from ascendchat.files import write_atomic
from ascendchat.report.content import Section
from ascendchat.report.html import body, content_hash, page
from ascendchat.runs.run import run_folder

if TYPE_CHECKING:
    from ascendchat.report.content import Section


def run(config: ReportConfig) -> int:
    """Run `ascendchat report`."""
    from ascendchat.report.content import content
    from ascendchat.report.gather import gather, newest_run
    from ascendchat.report.html import page, write_markdown

    names = config.run or (newest_run(),)
    title = ", ".join(names)

    def make() -> list[Section]:
        return content([gather(name) for name in names], config.price)

    if config.watch:
        return watch(title, make, config)
    path = Path(config.out).expanduser() if config.out else run_folder(names[0], "report.html")
    if path.suffix not in (".html", ".md"):
        raise UserError(f"{path}: a report is written as .html or .md; give --out such an ending")
    sections = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            write_markdown(path, title, sections)
        else:
            write_atomic(path, page(title, sections))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file: --out") from None
    print(path)
    return 0


def watch(title: str, make: Callable[[], list[Section]], config: ReportConfig) -> int:
    """Serve the report until Ctrl-C."""

    with server(LiveReport(title, make), config.host, config.port) as listening:
        print(f"the report of {title}: http://{config.host}:{listening.server_address[1]} (Ctrl-C ends it)", flush=True)
        try:
            listening.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


# `ascendchat report --watch`: the report of a run while it trains, on this machine; the page follows by itself.

MAX_AGE = 2.0  # seconds; older sections are made anew on request


class LiveReport:
    """The sections of the report, made anew on request when the last ones are old."""

    def __init__(self, title: str, make: Callable[[], list[Section]]) -> None:
        self.title, self.make = title, make
        self._lock, self._made, self._at = threading.Lock(), make(), time.monotonic()

    def sections(self) -> list[Section]:
        with self._lock:
            if time.monotonic() - self._at > MAX_AGE:
                with contextlib.suppress(UserError, OSError):  # the run is being moved away: the last sections stay
                    self._made = self.make()
                self._at = time.monotonic()
            return self._made


def server(report: LiveReport, host: str, port: int) -> ThreadingHTTPServer:
    """Build the server, which does not run yet: call serve_forever()."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            if address.path == "/":
                return self.answer(page(report.title, report.sections(), follows=True))
            if address.path != "/content":
                return self.send_error(404)
            inner = body(report.sections())
            if parse_qs(address.query).get("seen") == [content_hash(inner)]:
                self.send_response(204)
                return self.end_headers()
            return self.answer(inner, content_hash(inner))

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
