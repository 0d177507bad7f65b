"""An answer that is cut anywhere and continued is the answer in one piece: tokens, text, calculator calls."""

from __future__ import annotations

from typing import Any

import engine_models as make
import pytest

from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.remote.completions import PartialAnswer

TEXT = make.tokenizer()
START = TEXT.specials["<|assistant_start|>"]


def engine(made: GPT) -> Engine:
    return make.engine(made, pick("cpu", compiled=False), Sdpa(), slots=2, context=64)


def cut_short(completion: Completion, end: int) -> dict[str, Any]:
    """What a server of ours says of an answer that was broken off after `end` tokens."""
    ids, over = completion.ids[:end], end >= len(completion.ids)
    choice = {
        "token_ids": ids,
        "logprobs": {"token_logprobs": completion.logprobs[:end]},
        "finish_reason": completion.finish_reason if over else "abort",
        "ascendchat": {"weight_versions": completion.versions[:end]},
    }
    return {"choices": [choice]}


def in_parts(generator: Engine, request: Request, chunk: int) -> tuple[Completion, int]:
    """An answer that is cut whenever it has another `chunk` tokens, and the number of requests."""
    answer, asked, requests = PartialAnswer(request, TEXT, ours=True), request, 0
    while not answer.finished:
        requests += 1
        (more,) = generator.generate([asked])
        cut = requests * chunk - (len(asked.prompt) - len(request.prompt))
        answer.take(cut_short(more, cut), whole=True)
        if (rest := None if answer.finished else answer.continue_answer(generator.context)) is not None:
            asked = rest
    answer.close()
    return answer.completion, requests


def test_parts_are_the_whole() -> None:
    how = {"max_tokens": 20, "logprobs": True, "keep_stop": True, "tools": False}
    requests = [Request([0, 5, 6, 7 + seed], Sampling(seed=seed, **how)) for seed in range(3)]
    generator = engine(make.model(3))
    for request, expected in zip(requests, generator.generate(requests)):
        for chunk in (1, 7, 40):
            found, count = in_parts(generator, request, chunk)
            assert (found.ids, found.text, found.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert count == -(-len(expected.ids) // chunk)
            assert found.versions == expected.versions


def test_a_call_of_the_calculator_may_lie_across_any_border() -> None:
    follows, ids = make.calculator_script()
    generator = engine(make.scripted(follows))
    request = Request([0, START], Sampling(temperature=0.0, logprobs=True, max_tokens=40, keep_stop=True))
    (expected,) = generator.generate([request])
    assert expected.ids[:-1] == ids
    for chunk in range(1, 19):
        found, _ = in_parts(generator, request, chunk)
        assert (found.ids, found.forced, found.text) == (expected.ids, expected.forced, expected.text), chunk
        assert [value is None for value in found.logprobs] == found.forced


def test_an_answer_that_fills_the_context_is_over() -> None:
    generator = engine(make.model(3))
    request = Request([0] * 50, Sampling(max_tokens=400, seed=1, logprobs=True, stop_tokens=()))
    found, _ = in_parts(generator, request, 5)
    assert (len(found.ids), found.finish_reason) == (14, "length")
