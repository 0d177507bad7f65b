"""Answers of the engine fit their grammars, whatever the model would rather say, and neighbours do not notice."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any

import engine_models as make
import jsonschema
import pytest
import torch
from random_schemas import SchemaMaker

from ascendchat.data import toyworld
from ascendchat.data.tokenizer import Tokenizer, train_tokenizer
from ascendchat.device import Device, pick
from ascendchat.infer.engine import Completion, Engine, Request, Sampling
from ascendchat.infer.request import Grammar
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.plan.shape import Shape

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = make.tokenizer()
SPECIAL = TEXT.specials
START = SPECIAL["<|assistant_start|>"]
END = SPECIAL["<|assistant_end|>"]


@cache
def toy_tokenizer() -> Tokenizer:
    """Of the embedded corpus, as `ascendchat base` makes it."""
    return train_tokenizer(toyworld.texts(), 1536)


def toy_engine(slots: int = 16, late: int = 0, context: int = 320, **sizes: Any) -> Engine:
    """Random weights: a model that never heard of JSON."""
    tokenizer, device = toy_tokenizer(), pick("cpu", dtype="fp32", compiled=False)
    made = make.model(7, vocab=tokenizer.vocab_size, **sizes).requires_grad_(False)
    engine = Engine(made, Sdpa(), tokenizer, device, device.bind(0), slots=slots, context=context)
    engine.ahead = late
    return engine


def asked_for(numbers: range, tokens: int) -> list[tuple[dict[str, Any] | None, Request]]:
    """For each number a schema, greedily and with a seed; between them requests without a grammar. Quotes are made
    likelier in most: a random model does not end its strings by itself."""
    tokenizer, quote = toy_tokenizer(), ord('"')
    found: list[tuple[dict[str, Any] | None, Request]] = []
    for number in numbers:
        schema = SchemaMaker(number).schema()
        usual = Sampling(max_tokens=tokens, seed=number, grammar=Grammar("json_schema", json.dumps(schema)))
        prompt = [tokenizer.bos, *tokenizer.encode(f"{number}?")]
        bias = ((quote, 6.0),) if number % 4 else ()
        found.append((schema, Request(prompt, replace(usual, logit_bias=bias))))
        found.append((schema, Request(prompt, replace(usual, logit_bias=bias, temperature=0.0))))
        if number % 3 == 0:
            found.append((None, Request(prompt, Sampling(max_tokens=20, seed=number, logprobs=number % 2 == 0))))
    return found


def check(schema: dict[str, Any] | None, answer: Completion, request: Request) -> bool:
    """Whether it was finished; then it must parse and validate."""
    if schema is None or answer.finish_reason == "length":
        assert len(answer.ids) == request.sampling.max_tokens or schema is None
        return False
    assert answer.finish_reason == "stop"
    content = json.loads(answer.text, parse_float=Decimal)  # as written: rounding could pass a border
    jsonschema.Draft202012Validator(schema).validate(content)
    assert answer.text == toy_tokenizer().decode(answer.ids)
    return True


@pytest.mark.parametrize(
    ("numbers", "alone"), [(range(12), 3), pytest.param(range(100, 200), 10, marks=pytest.mark.slow)], ids=["12", "100"]
)
def test_finished_answers_to_random_schemas_validate_and_do_not_depend_on_neighbours(
    numbers: range, alone: int
) -> None:
    pairs = asked_for(numbers, tokens=150)
    requests = [request for _, request in pairs]
    answers = toy_engine(late=1).generate(requests)
    finished = [check(schema, answer, request) for (schema, request), answer in zip(pairs, answers)]
    with_grammar = sum(schema is not None for schema, _ in pairs)
    assert sum(finished) > 0.6 * with_grammar, "most answers come to their end"
    assert len({answer.text for answer in answers}) > len(numbers), "and they say many things"
    some = sorted(range(len(requests)), key=lambda index: (index * 7919) % len(requests))[:alone]
    lonely = toy_engine(slots=1)
    for index in some:
        (same,) = lonely.generate([requests[index]])
        assert same.ids == answers[index].ids
        assert same.finish_reason == answers[index].finish_reason


def scripted(*runs: list[int], slots: int = 2, context: int = 64) -> Engine:
    device = pick("cpu", compiled=False)
    return make.engine(make.scripted(make.script(*runs)), device, slots=slots, context=context)


def one(engine: Engine, grammar: Grammar, **settings: Any) -> Completion:
    usual: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, **settings}
    return engine.generate([Request([START], Sampling(grammar=grammar, **usual))])[0]


ABC = [START, *b"abcdefg", END]  # what the model wants to say


def test_the_first_token_is_bound_as_well() -> None:
    engine = scripted(ABC)
    for late in (0, 1):
        engine.ahead = late
        found = one(engine, Grammar("regex", "[x-z][a-g]{2}"), stop_tokens=())
        assert found.text[0] in "xyz"
        assert (len(found.ids), found.finish_reason) == (3, "stop")


def test_the_model_chooses_where_the_grammar_lets_it() -> None:
    assert one(scripted(ABC), Grammar("regex", "a[a-z]{2,9}")).text == "abcdefg"


@pytest.mark.parametrize(("limit", "text", "reason"), [(2, "ab", "length"), (3, "abc", "stop"), (9, "abc", "stop")])
def test_an_answer_that_is_cut_says_so(limit: int, text: str, reason: str) -> None:
    found = one(scripted(ABC), Grammar("regex", "abc"), max_tokens=limit)
    assert (found.text, found.finish_reason) == (text, reason)


def test_the_end_is_the_end_whatever_stop_tokens_says() -> None:
    found = one(scripted([START, *b"ab", END]), Grammar("regex", "[a-b]+"), stop_tokens=())
    assert (found.text, found.ids, found.finish_reason) == ("ab", [97, 98], "stop")


def test_allowed_tokens_and_a_grammar_hold_together() -> None:
    engine = scripted(ABC)
    letters = tuple(b"acxyz0123")
    found = one(engine, Grammar("regex", "[a-f]{4}"), allowed_tokens=letters)
    assert len(found.text) == 4
    assert set(found.text) <= set("ac")
    with pytest.raises(ValueError, match="allowed_tokens"):
        one(engine, Grammar("regex", "[u-w]"), allowed_tokens=letters)
    dead = one(engine, Grammar("regex", "ab"), allowed_tokens=letters)
    assert (dead.text, dead.finish_reason) == ("a", "length"), "nothing may follow, and it is not complete"


def test_a_grammar_at_its_limit_ends_the_answer_and_only_that() -> None:
    endless = {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}
    grammar = Grammar("json_schema", json.dumps({"$defs": {"a": endless}, "$ref": "#/$defs/a"}))
    requests = [
        Request([START], Sampling(temperature=0.0, max_tokens=20, grammar=which))
        for which in (None, grammar, Grammar("regex", "[a-g]{3}"))
    ]
    free, bound, other = scripted(ABC, slots=3).generate(requests)
    assert (free.text, other.text) == ("abcdefg", "abc")
    assert (bound.finish_reason, set(bound.text)) == ("length", {"["})


def test_a_bad_grammar_begins_nothing() -> None:
    engine = scripted(ABC)
    good = Request([START], Sampling(temperature=0.0))
    with pytest.raises(ValueError, match="unclosed"):
        engine.generate([good, Request([START], Sampling(grammar=Grammar("regex", "(")))])
    assert not engine.waiting


def test_a_call_that_the_grammar_asks_for_is_not_calculated() -> None:
    """The caller reads it: what it names is his."""
    follows, _ = make.calculator_script()
    engine = make.engine(make.scripted(follows), pick("cpu", compiled=False), slots=2)
    text = "start: <|tool_start|> /[0-9+]+/ <|tool_end|>"
    for late in (0, 1):
        engine.ahead = late
        request = Request([START], Sampling(temperature=0.0, grammar=Grammar("lark", text)))
        (found,) = engine.generate([request])
        assert TEXT.decode(found.ids) == "<|tool_start|>17+25<|tool_end|>"
        assert (found.text, found.finish_reason, any(found.forced)) == ("", "stop", False)
        assert "".join(piece.text for piece in engine.stream(request) if piece.kind == "tool") == "17+25"


@pytest.mark.parametrize("late", [0, 1])
def test_calculator_calls_of_neighbours_go_on_beside_a_grammar(late: int) -> None:
    follows, answer = make.calculator_script()
    engine = make.engine(make.scripted(follows), pick("cpu", compiled=False), slots=3)
    engine.ahead = late
    usual = Sampling(temperature=0.0, max_tokens=25)
    bound = replace(usual, grammar=Grammar("regex", "[a-z]{9}"))
    requests = [Request([START], way) for way in (usual, bound, usual, bound, usual)]
    for request, found in zip(requests, engine.generate(requests)):
        assert found.ids == answer if request.sampling.grammar is None else len(found.text) == 9


def test_results_are_late_again_when_no_grammar_is_left() -> None:
    engine = scripted(ABC, slots=2)
    engine.ahead = 1
    bound = engine.add(Request([START], Sampling(temperature=0.0, grammar=Grammar("regex", "abc"))))
    engine.add(Request([START], Sampling(temperature=0.0, stop_tokens=(), max_tokens=40)))
    while not bound.done:
        engine.step()
    engine.step()
    assert len(engine._pending) == 1


@pytest.mark.slow
def test_a_grammar_costs_little_of_a_step() -> None:
    """16 rows, the model of the toy world (depth 4, 128 wide, 1,536 ids), processor time of one thread, steps with and
    without a grammar in turn: the same sampling, and what is there only for the grammar. On a quiet machine it is less
    than a tenth; the lower quartile, and once more if need be, because programs beside this one take the caches away.
    """
    tokenizer, device = toy_tokenizer(), pick("cpu", dtype="fp32", compiled=False)
    made = GPT(Shape.from_depth(4, vocab=tokenizer.vocab_size, seq_len=128, dim=128, head_dim=32))
    made.initialise(0)
    for _ in range(3):
        plain, bound = seconds_of_steps(made, tokenizer, device)
        print(f"a step takes {plain * 1e3:.2f} ms, with grammars {bound * 1e3:.2f} ms: {bound / plain - 1:.1%} more")
        if bound < 1.25 * plain:
            return
    pytest.fail(f"{bound / plain - 1:.1%} more, three times")


def seconds_of_steps(made: GPT, tokenizer: Tokenizer, device: Device) -> tuple[float, float]:
    """Without a grammar and with one."""
    text = {"type": "string", "minLength": 100}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": text}, "required": ["a", "b"]}
    engines = []
    for grammar in (None, Grammar("json_schema", json.dumps(schema))):
        engine = Engine(made, Sdpa(), tokenizer, device, device.bind(0), slots=16, context=256)
        for seed in range(16):
            way = Sampling(max_tokens=200, seed=seed, grammar=grammar, stop_tokens=())
            engine.add(Request([tokenizer.bos, seed], way))
        engine.step()
        engines.append(engine)
    spent: list[list[float]] = [[], []]
    with torch.no_grad():
        for _ in range(80):
            for engine, times in zip(engines, spent):
                began = time.thread_time()
                engine.step()
                times.append(time.thread_time() - began)
    assert all(engine.running.count(None) == 0 for engine in engines)
    plain, bound = (sorted(times)[len(times) // 4] for times in spent)
    return plain, bound
