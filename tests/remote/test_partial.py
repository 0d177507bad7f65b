"""Answers in parts are the answers in one piece: tokens, text, calculator calls across any border."""

from __future__ import annotations

import engine_models as make
import pytest

from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.remote.completions import joined, rest

TEXT = make.tokenizer()
START = TEXT.specials["<|assistant_start|>"]


def engine(made: GPT) -> Engine:
    return make.engine(made, pick("cpu", compiled=False), Sdpa(), slots=2, context=64)


def in_parts(generator: Engine, whole: Request, chunk: int, given: str = "length") -> tuple[Completion, int]:
    """An answer asked for chunk by chunk, and the number of requests. `given`: what the generator calls a cut."""
    answer, most = Completion(finish_reason="cancelled"), 0
    while answer.finish_reason == "cancelled":
        most += chunk
        (more,) = generator.generate([rest(whole, answer, TEXT, most)])
        if more.finish_reason == "length":
            more.finish_reason = given  # type: ignore[assignment]
        answer = joined(whole, answer, more, TEXT, generator.context)
    return answer, most // chunk


def test_parts_are_the_whole() -> None:
    """Whether the generator calls the end of a part a limit, as engines do, or cancelled, as it may elsewhere."""
    how = {"max_tokens": 20, "logprobs": True, "keep_stop": True, "tools": False}
    asked = [Request([0, 5, 6, 7 + seed], Sampling(seed=seed, **how)) for seed in range(3)]
    generator = engine(make.model(3))
    for whole, expected in zip(asked, generator.generate(asked)):
        for chunk, given in ((1, "length"), (7, "cancelled"), (40, "length")):
            found, requests = in_parts(generator, whole, chunk, given)
            assert (found.ids, found.text, found.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert requests == -(-len(expected.ids) // chunk)
            assert found.versions == expected.versions


def test_a_call_of_the_calculator_may_lie_across_any_border() -> None:
    follows, ids = make.calculator_script()
    generator = engine(make.scripted(follows))
    whole = Request([0, START], Sampling(temperature=0.0, logprobs=True, max_tokens=40, keep_stop=True))
    (expected,) = generator.generate([whole])
    assert expected.ids[:-1] == ids
    for chunk in range(1, 19):
        found, _ = in_parts(generator, whole, chunk)
        assert (found.ids, found.forced, found.text) == (expected.ids, expected.forced, expected.text), chunk
        assert [value is None for value in found.logprobs] == found.forced


def test_an_answer_that_fills_the_context_is_over() -> None:
    generator = engine(make.model(3))
    whole = Request([0] * 50, Sampling(max_tokens=400, seed=1, logprobs=True, stop_tokens=()))
    found, _ = in_parts(generator, whole, 5)
    assert (len(found.ids), found.finish_reason) == (14, "length")
