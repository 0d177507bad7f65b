"""Messages between the server's front (pool.py) and its workers (worker.py), and the workers' end of the socket.

The front sends Open first, then Generate, Cancel and Change; a worker sends Ready once, then lists of Begun, Chunk and
Refused (an empty list says that it is still at work), and Done after each Change. On the wire a message is its length
and its pickle: both ends are the same program, of the same user.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ascendchat.config.serve import ServeConfig
from ascendchat.engine.request import Piece, Request

LENGTH = struct.Struct("<Q")  # of the pickle that follows, in bytes

PauseMode = Literal["wait", "abort", "keep"]


def pack(message: Any) -> bytes:
    """Pack a message for the wire."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(content)) + content


class Open(NamedTuple):
    """Open the model on the device with this number."""

    config: ServeConfig
    place: int


class Generate(NamedTuple):
    """Answer this request. `streams`: chunks as they come; else one at the end."""

    key: int
    request: Request
    streams: bool


class Cancel(NamedTuple):
    key: int


class Pause(NamedTuple):
    """Stop: running answers are finished first, cut short, or kept for after Resume."""

    mode: PauseMode


class Resume(NamedTuple):
    pass


class CheckWeights(NamedTuple):
    """Read these weights (a checkpoint folder or a safetensors file) and see whether they fit, and whether the worker
    has other weights of this version; change nothing. Nothing ("") forgets what was read."""

    source: str
    version: int = -1


class LoadWeights(NamedTuple):
    """Answer with these weights from now on."""

    source: str
    version: int


class Change(NamedTuple):
    """Something that the front waits for; Done has the same number."""

    number: int
    what: Pause | Resume | CheckWeights | LoadWeights


class Done(NamedTuple):
    """A Change has happened, or `problem` says why not."""

    number: int
    version: int
    checksum: str = ""
    problem: str = ""
    model: dict[str, Any] | None = None  # of new weights: stage and step, and where they are known, chats


class Begun(NamedTuple):
    """The first token is there, of an answer that comes in one chunk."""

    key: int


class Chunk(NamedTuple):
    """The piece of an answer since the last Chunk of this key; the last one has a finish reason."""

    key: int
    pieces: list[Piece]
    ids: list[int]
    logprobs: list[float | None]
    tops: list[list[tuple[int, float]]]
    versions: list[int]
    finish_reason: str = ""
    cached_tokens: int = 0


class Refused(NamedTuple):
    """This request cannot be answered, and why."""

    key: int
    reason: str


@dataclass(frozen=True)
class Ready:
    """The worker answers from now on."""

    device: str  # of this worker, in words
    slots: int
    context: int
    vocab: int
    model: dict[str, Any]  # run, stage, step, chats, tokenizer folder, checkpoint
    checksum: str
    parameters: int = 0
    dtypes: dict[str, str] = field(default_factory=dict)  # of each weight, as it lies in memory


# A child's end of the socket to the server's front (pool.py): messages in, messages out, and the end with the front.
#
# front = FrontSocket(socket.socket(fileno=fd)); front.stay_while_front_does(); front.send(front.receive())


class FrontSocket:
    """The child's end of the socket."""

    def __init__(self, socket: socket.socket) -> None:
        self._socket = socket
        self.fileno = socket.fileno()  # for select, which says when there is a message

    def stay_while_front_does(self) -> None:
        """End the process when the front ends, from now on, whatever it is doing."""
        threading.Thread(target=self._end_with_front, daemon=True).start()

    def send(self, message: Any) -> None:
        try:
            self._socket.sendall(pack(message))
        except OSError:
            self._leave()

    def receive(self) -> Any:
        """The next message; waits for it."""
        return pickle.loads(self._read(LENGTH.unpack(self._read(LENGTH.size))[0]))

    def _read(self, size: int) -> bytes:
        try:
            content = self._socket.recv(size, socket.MSG_WAITALL)
        except OSError:
            content = b""
        if len(content) < size:
            self._leave()
        return content

    def _end_with_front(self) -> None:
        """Wait for the end of the front, in a thread: the main one may be in the middle of a long step, or compile,
        when the front goes."""
        poll = select.poll()
        poll.register(self._socket, 0)  # no event but the end
        poll.poll()
        self._leave()

    def _leave(self) -> None:
        """End at once: nobody waits for an orderly end. What torch.compile has started goes too."""
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)
