"""A process of the server and the socket to it, as the server's event loop sees them.

child = await Child.start(); child.open(Open(config, 0), take); child.send(Ask(...)); await child.end()

A worker (worker.py) imports torch and then waits for Open: one that is started before it is needed opens a model at
once. Large requests are read by another kind of process (reader.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

from ascendchat.serve.messages import LENGTH, pack

ENDING = 1  # seconds that a process which has closed its socket gets to end by itself
UNKILLABLE = 10  # seconds after which a killed process is left alone: its driver holds it


class Child(asyncio.Protocol):
    """One process that runs worker.py, or another module with a Link (link.py)."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.gone = asyncio.Event()  # its end of the socket is closed
        self._take: Callable[[Any], None] = lambda message: None
        self._buffer = bytearray()

    @classmethod
    async def start(cls, module: str = "ascendchat.serve.worker") -> Child:
        ours, theirs = socket.socketpair()
        # The front decides when a worker ends: neither Ctrl-C nor a SIGTERM to all processes of a service reaches it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        child = cls(process)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        return child

    def open(self, message: Any, take: Callable[[Any], None]) -> None:
        """Give it what it begins with; `take` is called with everything it says."""
        self._take = take
        self.send(message)

    def listen(self, take: Callable[[Any], None]) -> None:
        """Call `take` from now on."""
        self._take = take

    def send(self, message: Any) -> None:
        """Never waits."""
        if not self.gone.is_set():
            self._transport.write(pack(message))

    def kill(self) -> None:
        """End it and whatever it has started, now."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self) -> int | None:
        """Wait until it has ended, a moment by itself and then by force: its exit status, below 0 for a signal; None
        when it cannot be ended."""
        if self.gone.is_set():  # on its way out; so the status is its own
            with contextlib.suppress(subprocess.TimeoutExpired):
                return await asyncio.to_thread(self.process.wait, ENDING)
        self.kill()
        self._transport.abort()
        try:
            return await asyncio.to_thread(self.process.wait, UNKILLABLE)
        except subprocess.TimeoutExpired:
            return None

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= LENGTH.size:
            end = begin + LENGTH.size + LENGTH.unpack_from(buffer, begin)[0]
            if end > len(buffer):
                break
            with memoryview(buffer) as view, view[begin + LENGTH.size : end] as content:  # it may be megabytes
                message = pickle.loads(content)
            begin = end
            self._take(message)
        del buffer[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
