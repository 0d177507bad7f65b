"""`ascendchat serve`: a web chat and an OpenAI-compatible API for one model.

    ascendchat serve                                 # the model trained last, http://127.0.0.1:8000
    ascendchat serve --devices 4 --port 9000         # one process per device
    python -m scripts.chat_web --num-gpus=4          # the same, as in nanochat

pool.py starts the workers, app.py is the application; uvicorn speaks HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from ascendchat.config.serve import ServeConfig
from ascendchat.errors import UserError
from ascendchat.serve import metrics
from ascendchat.serve.app import application
from ascendchat.serve.connection import Limits, protocol
from ascendchat.serve.guard import AccessLog, Guard, Keys, admission
from ascendchat.serve.large_requests import LargeRequests
from ascendchat.serve.pool import WorkerPool
from ascendchat.serve.prompts import open_tokenizer
from ascendchat.serve.service import Service

BACKLOG = 2048  # connections that may wait to be accepted


def run(config: ServeConfig) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    keys, log = admission(config), AccessLog(config.access_log)
    listener = listen(config.host, config.port)
    allow_files(config.max_connections)
    return int(uvloop.run(serve(config, listener, keys, log)))


def allow_files(connections: int) -> None:
    """Each connection is a file to the system, which by default allows 1024 or fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


def listen(host: str, port: int) -> socket.socket:
    """The socket, taken before the model is loaded: a port in use is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with --host or --port"
        ) from None
    return listener


def settings(guard: Guard, config: ServeConfig) -> uvicorn.Config:
    """Settings of uvicorn. A client is who has connected, whatever its headers say, unless $FORWARDED_ALLOW_IPS, a
    variable of uvicorn's own, names the proxies that are believed."""
    return uvicorn.Config(
        guard,
        http=protocol(Limits(config.client_timeout, config.max_connections)),
        ws="none",
        log_config=None,
        log_level="critical",  # Guard logs what matters; a client that sends nonsense is not worth a line
        server_header=False,
        lifespan="off",
        backlog=BACKLOG,
        proxy_headers=bool(os.environ.get("FORWARDED_ALLOW_IPS")),
    )


async def serve(config: ServeConfig, listener: socket.socket, keys: Keys, log: AccessLog) -> int:
    """Start the workers, answer, and end in order: no new requests, answers finish, workers go. A second signal ends
    at once."""
    pool, signals = WorkerPool(config), _Signals()
    large: LargeRequests | None = None
    try:
        starting = asyncio.ensure_future(pool.start())
        await one_of(starting, signals.first)
        if signals.first.done():
            starting.cancel()
            return 0
        await starting
        folder = Path(pool.ready[0].model["tokenizer"])
        large = LargeRequests(config, folder)
        app = application(Service(config, pool, open_tokenizer(folder), large))
        app.include_router(metrics.routes(pool))
        server = _Server(settings(Guard(app, config, keys, log), config))
        host, port = listener.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"
        listener.listen(BACKLOG)  # who reads the next line and connects must not come too early
        print(f"ready: {address}  (Ctrl-C ends)", file=sys.stderr, flush=True)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await one_of(serving, signals.first)
        until = time.monotonic() + config.drain
        draining = asyncio.ensure_future(pool.close(config.drain))
        await one_of(draining, signals.second)
        server.force_exit = signals.second.done()
        server.config.timeout_graceful_shutdown = max(1, math.ceil(until - time.monotonic()))
        server.should_exit = True
        await one_of(serving, signals.second)
        return signals.status
    finally:
        await pool.close(0)
        if large is not None:
            await large.close()


async def one_of(*futures: asyncio.Future[Any]) -> None:
    """Until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


class _Signals:
    """SIGINT and SIGTERM, as two events."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[int] = loop.create_future()
        self.second: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)

    def _take(self, number: int) -> None:
        event = self.second if self.first.done() else self.first
        if not event.done():
            event.set_result(number)

    @property
    def status(self) -> int:
        """0 after an orderly end."""
        return 128 + self.second.result() if self.second.done() else 0


class _Server(uvicorn.Server):
    """uvicorn's, without its own signal handlers: ours let answers finish first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
