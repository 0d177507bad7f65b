"""What the server's front and its workers say to each other, over a pipe of their own (pool.py, worker.py).

The front sends Ask, Cancel, Pause, Resume and Load; a worker sends Ready once, then lists of Part and Refused, and
Done after each change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ascendchat.infer.request import Piece, Request

PauseMode = Literal["wait", "abort", "keep"]


class Ask(NamedTuple):
    """Answer this. `streams`: parts as they come; else one at the end."""

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


class Load(NamedTuple):
    """Take the weights of a checkpoint folder, or the bytes of a safetensors file."""

    source: str | bytes
    version: int


class Part(NamedTuple):
    """What came since the last Part of this key; the last one has a finish reason."""

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


class Done(NamedTuple):
    """A Pause, Resume or Load has happened, or `problem` says why not."""

    what: str
    version: int
    checksum: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Ready:
    """The worker answers from now on."""

    device: str  # of this worker, in words
    slots: int
    context: int
    vocab: int
    model: dict[str, Any]  # run, stage, step, chats, tokenizer folder, checkpoint
    checksum: str
