"""`ascendchat serve --weight-updates` of a tiny model that can be killed, stopped, and started again on its port."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from running_server import ROOT
from warm_process import ServerPopen

from ascendchat.processes import free_port

KEY = "a-key-of-the-tests-1234"
PATIENCE = 180  # seconds after which a test gives up, on however busy a machine


def wait_until(true: Callable[[], object], what: str = "it") -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, f"{what} never happened"
        time.sleep(0.02)


def listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


class ServerProcess:
    """One server, of the model in `home`."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home, self.flags, self.port = home, flags, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home / f"server-{self.port}.log"

    def start(self) -> ServerProcess:
        variables = {"ASCENDCHAT_HOME": str(self.home), "OMP_NUM_THREADS": "1", "ASCENDCHAT_API_KEYS": KEY}
        command = [sys.executable, "-m", "ascendchat", "serve", "--device-type=cpu", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = ServerPopen(
                [*command, "--weight-updates", "--drain", "1", *self.flags],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )
        return self

    def ready(self) -> ServerProcess:
        wait_until(lambda: self.process.poll() is not None or listening(self.port), "the start of a server")
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        return self

    def asked(self) -> int:
        """Requests for answers so far, by the access log."""
        return self.log.read_text(encoding="utf-8").count("/v1/completions")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
