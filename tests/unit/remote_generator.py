"""A Generator whose engine lives in another process: what a rollout server will be, as small as it can be.

`serve` runs there and pushes pieces and completions over the connection as they come; `Remote` is what a trainer, an
examiner or a chat holds. Weights travel as arrays: the other process shares no memory with this one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import engine_models as make
import torch

from ascendchat.device import pick
from ascendchat.infer.engine import Engine, Job
from ascendchat.infer.generator import Weights
from ascendchat.infer.request import Completion, Piece, Request
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.plan.shape import Shape


def serve(connection: Connection) -> None:
    """Answer until a message says "end". Every answer is (key, content)."""
    torch.set_num_threads(1)
    engine: Engine
    jobs: dict[int, Job] = {}
    while True:
        while not jobs or connection.poll():
            name, *content = connection.recv()
            if name == "end":
                return
            if name == "open":
                shape, slots, context = content
                made = GPT(Shape.from_dict(shape))
                engine = make.engine(made, pick("cpu", compiled=False), Sdpa(), slots=slots, context=context)
            elif name == "ask":
                jobs |= ask(engine, connection, content[0])
            elif name == "cancel" and content[0] in jobs:
                engine.cancel(jobs[content[0]])
            elif name == "load":
                connection.send(("loaded", load(engine, *content)))
            elif name == "busy":
                connection.send(("busy", sum(job is not None for job in engine.running)))
        engine.step()
        for key, job in list(jobs.items()):
            for piece in job.take():
                connection.send((key, piece))
            if job.done:
                connection.send((key, job.completion))
                del jobs[key]


def ask(engine: Engine, connection: Connection, requests: dict[int, Request]) -> dict[int, Job]:
    """All of them, or none and the reason."""
    jobs: dict[int, Job] = {}
    try:
        for key, request in requests.items():
            jobs[key] = engine.add(request)
    except ValueError as error:
        for job in jobs.values():
            engine.cancel(job)
        connection.send((next(iter(requests)), error))
        return {}
    return jobs


def load(engine: Engine, arrays: dict[str, Any], version: int) -> int | ValueError:
    try:
        engine.load({name: torch.from_numpy(array) for name, array in arrays.items()}, version)
    except ValueError as error:
        return error
    return engine.version


class Remote:
    """The Generator on this side. `made` is copied: what happens to it later is not seen there."""

    def __init__(self, connection: Connection, made: GPT, *, slots: int, context: int) -> None:
        self.connection, self.context, self.version = connection, context, 0
        self._keys = itertools.count()
        self._inbox: dict[Any, deque[Any]] = defaultdict(deque)
        connection.send(("open", made.shape.to_dict(), slots, context))
        self.load(made.state_dict(), 0)

    def receive(self, key: object) -> Any:
        """The next message for `key`; those for others are kept."""
        while not self._inbox[key]:
            other, content = self.connection.recv()
            self._inbox[other].append(content)
        found = self._inbox[key].popleft()
        if isinstance(found, Exception):
            raise found
        return found

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        keys = [next(self._keys) for _ in requests]
        self.connection.send(("ask", dict(zip(keys, requests))))
        return [self._completion(key) for key in keys]

    def _completion(self, key: int) -> Completion:
        while not isinstance(found := self.receive(key), Completion):
            pass  # its pieces, which nobody asked for
        return found

    def stream(self, request: Request) -> RemoteStream:
        key = next(self._keys)
        self.connection.send(("ask", {key: request}))
        return RemoteStream(self, key)

    def load(self, weights: Weights, version: int) -> None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}
        self.connection.send(("load", arrays, version))
        self.version = self.receive("loaded")

    def busy(self) -> int:
        """Slots in use there."""
        self.connection.send(("busy",))
        return int(self.receive("busy"))


class RemoteStream:
    def __init__(self, remote: Remote, key: int) -> None:
        self._remote, self._key, self._over = remote, key, False
        self.completion = Completion()

    def __iter__(self) -> RemoteStream:
        return self

    def __next__(self) -> Piece:
        if not self._over and isinstance(found := self._remote.receive(self._key), Piece):
            return found
        if not self._over:
            self.completion, self._over = found, True
        raise StopIteration

    def close(self) -> None:
        if not self._over:
            self._remote.connection.send(("cancel", self._key))
