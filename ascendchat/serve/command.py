"""`ascendchat serve`: a web chat and an OpenAI-compatible API for one model.

    ascendchat serve                                 # the model trained last, http://127.0.0.1:8000
    ascendchat serve --devices 4 --port 9000         # one process per device
    python -m scripts.chat_web --num-gpus=4          # the same, as in nanochat

pool.py starts the workers, api.py is the application; uvicorn speaks HTTP.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys

import uvicorn

from ascendchat.config import UserError
from ascendchat.config.serve import ServeConfig
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.serve import metrics
from ascendchat.serve.api import Service, application
from ascendchat.serve.connection import Limits, protocol
from ascendchat.serve.guard import AccessLog, Guard
from ascendchat.serve.keys import Keys, admission
from ascendchat.serve.pool import Pool


def run(config: ServeConfig) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    keys, log = admission(config), AccessLog(config.access_log)
    listener = listen(config.host, config.port)
    allow_files(config.max_connections)
    return asyncio.run(serve(config, listener, keys, log))


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


async def serve(config: ServeConfig, listener: socket.socket, keys: Keys, log: AccessLog) -> int:
    """Start the workers, answer, and end in order: the server stops taking requests, answers finish, workers go."""
    pool = Pool(config)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    starting, stop = asyncio.ensure_future(pool.start()), asyncio.ensure_future(stopping.wait())
    await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
    if stopping.is_set():
        await pool.close(0)
        return 0
    await starting
    tokenizer = Tokenizer.load(pool.ready[0].model["tokenizer"])
    app = application(Service(config, pool, tokenizer))
    app.include_router(metrics.routes(pool))
    settings = uvicorn.Config(
        Guard(app, config, keys, log),
        http=protocol(Limits(config.client_timeout, config.max_connections)),
        ws="none",
        log_config=None,
        log_level="critical",  # Guard logs what matters; a client that sends nonsense is not worth a line
        server_header=False,
        lifespan="off",
    )
    server = Server(settings)
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    print(f"ready: http://{f'[{shown}]' if ':' in shown else shown}:{port}  (Ctrl-C ends)", file=sys.stderr, flush=True)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await asyncio.wait([serving, stop], return_when=asyncio.FIRST_COMPLETED)
    await pool.close(config.drain)
    server.should_exit = True
    await serving
    return 0


class Server(uvicorn.Server):
    """uvicorn's, without its own signal handlers: ours let answers finish first."""

    def install_signal_handlers(self) -> None:
        return
