"""A child's end of the socket to the server's front (child.py): messages in, messages out, and the end with the front.

link = Link(socket.socket(fileno=fd)); link.stay_while_front_does(); message = link.receive(); link.send(answer)
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
from typing import Any

from ascendchat.serve.messages import LENGTH, pack


class Link:
    """The child's end."""

    def __init__(self, socket: socket.socket) -> None:
        self._socket = socket

    def stay_while_front_does(self) -> None:
        """From now on the process ends when the front does, whatever it is doing."""
        threading.Thread(target=self._end_with_front, daemon=True).start()

    def send(self, message: Any) -> None:
        try:
            self._socket.sendall(pack(message))
        except OSError:
            self._leave()

    def receive(self) -> Any:
        """The next message; waits for it."""
        return pickle.loads(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))

    def fileno(self) -> int:
        """For select, which says when there is one."""
        return self._socket.fileno()

    def _read(self, size: int) -> bytes:
        try:
            content = self._socket.recv(size, socket.MSG_WAITALL)
        except OSError:
            content = b""
        if len(content) < size:
            self._leave()
        return content

    def _end_with_front(self) -> None:
        """A thread: the main one may be in the middle of a long step, or compile, when the front goes."""
        poll = select.poll()
        poll.register(self._socket, 0)  # no event but the end
        poll.poll()
        self._leave()

    def _leave(self) -> None:
        """Nobody waits for an orderly end; what torch.compile has started goes too."""
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
