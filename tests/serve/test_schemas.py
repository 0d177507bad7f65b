"""Schemas are checked beside the event loop: hostile ones hold up nobody, and too many are turned away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import engine_models as make
import pytest
from running_pool import run, until

from ascendchat.config.serve import ServeConfig
from ascendchat.engine.grammar import Grammars
from ascendchat.engine.request import Grammar
from ascendchat.serve import schemas
from ascendchat.serve.pool import Overloaded
from ascendchat.serve.schemas import Schemas

TEXT = make.tokenizer()
HOSTILE = [Grammar("regex", f"hostile {number}") for number in range(40)]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hostile grammars take until this is set."""
    event = threading.Event()

    def check(self: Grammars, grammar: Grammar, salt: str = "") -> None:
        if "hostile" in grammar.text:
            assert event.wait(60)
            raise ValueError(f"{grammar.text} of {salt} takes too long")

    monkeypatch.setattr(Grammars, "check", check)
    yield event
    event.set()


def test_a_schema_does_not_wait_for_those_that_take_long(held: threading.Event) -> None:
    async def test() -> None:
        checks = Schemas(ServeConfig(), TEXT)
        waiting = [asyncio.ensure_future(checks.check(hostile, "mallory")) for hostile in HOSTILE]
        await checks.check(Grammar("regex", "honest"), "alice")
        assert not any(task.done() for task in waiting)
        held.set()
        for hostile, outcome in zip(HOSTILE, await asyncio.gather(*waiting, return_exceptions=True)):
            assert str(outcome) == f"{hostile.text} of mallory takes too long"
        assert checks.under_way == 0

    run(test)


def test_too_many_checks_are_turned_away_and_none_lasts_for_ever(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "MAX_CHECKS", 2)

    async def test() -> None:
        checks = Schemas(ServeConfig(queue_timeout=0.05), TEXT)
        waiting = [asyncio.ensure_future(checks.check(hostile, "")) for hostile in HOSTILE[:3]]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, Overloaded) for outcome in outcomes)
        said = ["in time" in str(outcome) for outcome in outcomes]
        assert said == [True, True, False]
        held.set()
        await until(lambda: checks.under_way == 0)
        await checks.check(Grammar("regex", "honest"), "")

    run(test)
