"""A server compiles before its first request, and never while somebody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat.device import pick
from ascendchat.engine import decode
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Request, Sampling
from ascendchat.nn.attention import Sdpa


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[Any]]:
    """An engine that thinks it compiles, and what it compiled."""
    device, done = pick("cpu", dtype="fp32", compiled=False), list[Any]()
    monkeypatch.setattr(device, "compiles", True)

    def compile_function(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            key = function.__name__, *(arg for arg in args if not isinstance(arg, torch.Tensor))
            if key not in done:  # a compiler looks at numbers as at constants
                done.append(key)
            return function(*args)

        return compiled

    monkeypatch.setattr(device, "compile", compile_function)
    place = device.bind(0)
    engine = Engine(make.model(), Sdpa(), make.tokenizer(), device, place, slots=4, context=256, compiled=True)
    return engine, done


def test_after_preparing_nothing_is_compiled_and_answers_are_the_same(
    compiled: tuple[Engine, list[Any]],
) -> None:
    engine, done = compiled
    requests = [
        Request(list(range(5, 5 + length)), Sampling(12, temperature=heat, top_k=top_k, seed=length))
        for length, heat, top_k in [(3, 1.0, 0), (40, 0.7, 5), (150, 0.0, 0), (7, 1.0, 3), (90, 0.5, 0), (4, 0.0, 0)]
    ]
    wanted = make.engine(make.model(), pick("cpu", dtype="fp32", compiled=False), Sdpa(), context=256)
    expected = [answer.ids for answer in wanted.generate(requests)]
    said: list[str] = []
    engine.prepare(said.append)
    count = len(done)
    assert len(said) == 2, "one row and all rows, one length"
    assert count == 2 + 2 * 2, "the model for each, and two plain ways to choose"
    assert [answer.ids for answer in engine.generate(requests)] == expected
    assert engine.generate(requests[3:4])[0].ids == expected[3]
    assert len(done) == count


def test_without_preparing_every_new_shape_is_compiled(compiled: tuple[Engine, list[Any]]) -> None:
    engine, done = compiled
    engine.generate([Request([5, 6, 7], Sampling(4, temperature=1.0))])
    assert len(done) == 2, "the model, and the choice"


def test_a_step_that_could_not_be_recorded_leaves_rows_that_go_on(
    compiled: tuple[Engine, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is recorded steps change nothing. Had that lasted, a row would write its token again and again."""
    engine, _ = compiled
    request = Request([5, 6, 7], Sampling(8, temperature=1.0, seed=1, stop_tokens=()))
    expected = engine.generate([request])[0].ids
    assert len(set(expected)) > 1

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    again = Engine(make.model(), Sdpa(), make.tokenizer(), engine.device, engine.device.bind(0), slots=4, context=256)
    with monkeypatch.context() as patch:
        patch.setattr(again.decoder, "graphs", True)
        patch.setattr(engine.device, "graph", fails)
        job = again.add(request)
        with pytest.raises(RuntimeError, match="out of memory"):
            again.step()
    while not job.done:
        again.step()
    assert job.completion.ids == expected


def test_of_many_captured_steps_those_used_last_are_kept(device_graphs: tuple[Engine, list[Any]]) -> None:
    """Every length and every number of rows is a graph with memory of its own; the answers are the same."""
    engine, captured = device_graphs
    requests = [Request([5] * length, Sampling(3, temperature=0.0, stop_tokens=())) for length in (5, 140, 5, 5, 140)]
    plain = make.engine(make.model(), engine.device, Sdpa(), context=256)
    for request in requests:
        assert engine.generate([request])[0].ids == plain.generate([request])[0].ids
        assert len(engine.decoder.steps) == 1
    assert [key.span for key in captured] == [128, 256, 128, 256], "the third and the fourth request share one"


@pytest.fixture
def device_graphs(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[Any]]:
    """An engine with room for one captured step, and what it captured."""
    device, captured = pick("cpu", dtype="fp32", compiled=False), list[Any]()
    engine = Engine(make.model(), Sdpa(), make.tokenizer(), device, device.bind(0), slots=4, context=256)
    monkeypatch.setattr(engine.decoder, "graphs", True)
    monkeypatch.setattr(decode, "MAX_STEPS", 1)

    def graph(step: Any, updates: Any = None) -> Any:
        captured.append(step.args[0])
        return step

    monkeypatch.setattr(device, "graph", graph)
    return engine, captured
