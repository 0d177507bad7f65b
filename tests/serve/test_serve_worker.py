"""What a worker on a CPU sets up before it answers, and what it does while a grammar is compiled."""

from __future__ import annotations

import gc
import json
import os
import pickle
import select
import socket
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engine_models as make
import pytest

from ascendchat.device import pick
from ascendchat.engine import grammar as module
from ascendchat.engine.grammar import compiled
from ascendchat.engine.request import Grammar, Request, Sampling
from ascendchat.nn.attention import Sdpa
from ascendchat.serve.worker import Worker, threads
from ascendchat.serve.worker_messages import LENGTH, Cancel, FrontSocket, Generate, Refused, pack


def test_one_core_is_left_to_the_front_unless_the_user_has_named_a_number() -> None:
    assert [threads(cores, 1, named=False) for cores in (1, 2, 8)] == [1, 1, 7]
    assert threads(8, 2, named=False) == 3
    assert threads(8, 2, named=True) == 4
    assert threads(2, 16, named=True) == 1


class Front:
    """A worker in this process, and the front's end of its socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.worker = Worker(FrontSocket(theirs), make.engine(make.model(), pick("cpu"), Sdpa(), slots=2, context=1024))
        self.heard = b""

    def ask(self, key: int, grammar: Grammar | None = None) -> None:
        sampling = Sampling(max_tokens=1000, stop_tokens=(), tools=False, grammar=grammar)
        self.socket.send(pack(Generate(key, Request([1, 2, 3], sampling), True)))

    def step(self) -> list[Any]:
        """What the worker says in a round of its loop."""
        worker = self.worker
        worker.listen()
        worker.admit()
        worker.engine.step()
        worker.send(now=True)
        while chunk := self._read():
            self.heard += chunk
        said = []
        while self.heard:
            end = LENGTH.size + LENGTH.unpack_from(self.heard)[0]
            said += pickle.loads(self.heard[LENGTH.size : end])
            self.heard = self.heard[end:]
        return said

    def _read(self) -> bytes:
        try:
            return self.socket.recv(1 << 20)
        except BlockingIOError:
            return b""


@pytest.fixture
def front() -> Iterator[Front]:
    """One answer is under way."""
    made = Front()
    made.ask(1)
    made.step()
    yield made
    made.socket.close()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars are compiled when this is set; what has "bad" in it cannot be used."""
    event = threading.Event()

    def slow(tokens: Any, grammar: Grammar) -> Any:
        assert event.wait(60)
        if "bad" in grammar.text:
            raise ValueError("it is bad")
        return compiled(tokens, grammar)

    monkeypatch.setattr(module, "compiled", slow)
    yield event
    event.set()


def until_told(front: Front, key: int) -> Any:
    for _ in range(900):
        for part in front.step():
            if part.key == key:
                return part
        os.sched_yield()
    raise AssertionError("nothing was said of it")


@pytest.mark.slow
def test_answers_go_on_while_a_large_grammar_is_compiled(front: Front) -> None:
    """Five thousand properties: twenty tokens of another answer come before a word of this one."""
    keys = [f"p{number}" for number in range(5000)]
    properties: dict[str, Any] = {key: {"type": "integer"} for key in keys}
    front.ask(2, Grammar("json_schema", json.dumps({"type": "object", "properties": properties, "required": keys})))
    meanwhile = 0
    while meanwhile < 20:
        said = front.step()
        assert [part.key for part in said] == [1] * len(said)
        meanwhile += sum(len(part.ids) for part in said)
    assert select.select([front.worker.compiled], [], [], 60)[0]
    assert until_told(front, 2).ids


def test_a_request_may_be_cancelled_while_its_grammar_is_compiled(front: Front, stuck: threading.Event) -> None:
    front.ask(2, Grammar("regex", "never"))
    front.step()
    front.socket.send(pack(Cancel(2)))
    assert until_told(front, 2).finish_reason == "cancelled"
    stuck.set()
    front.ask(3, Grammar("regex", "then"))
    assert until_told(front, 3).ids
    assert not front.worker.compiling


def test_nothing_is_kept_of_a_grammar_that_nobody_waits_for(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matcher, tens of megabytes for a large one, stayed with the worker when its request was cancelled before."""
    cancelled, made = threading.Event(), []

    def matcher(*_: Any, **__: Any) -> Any:
        assert cancelled.wait(60)
        found = set[int]()  # an object that a weak reference can name
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr("ascendchat.serve.worker.grammars", lambda tokens: SimpleNamespace(matcher=matcher))
    before = set(threading.enumerate())
    front.ask(2, Grammar("regex", "never"))
    front.step()
    front.socket.send(pack(Cancel(2)))
    assert until_told(front, 2).finish_reason == "cancelled"
    compiling = set(threading.enumerate()) - before
    cancelled.set()
    for thread in compiling:
        thread.join(60)
    front.step()
    gc.collect()
    assert [reference() for reference in made] == [None]


def test_a_grammar_that_the_worker_cannot_use_is_refused(front: Front, stuck: threading.Event) -> None:
    stuck.set()
    front.ask(2, Grammar("regex", "bad"))
    assert until_told(front, 2) == Refused(2, "the grammar (regex) cannot be used: it is bad")
