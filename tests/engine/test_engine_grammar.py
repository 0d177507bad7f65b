"""Answers of the engine fit their grammars, whatever the model would rather say, and neighbours do not notice."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any

import engine_models as make
import jsonschema
import pytest

from ascendchat.data import toyworld
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.device import pick
from ascendchat.engine.engine import Completion, Engine, Request, Sampling
from ascendchat.engine.request import Grammar
from ascendchat.nn.attention import Sdpa

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = make.tokenizer()
SPECIAL = TEXT.specials
START = SPECIAL["<|assistant_start|>"]
END = SPECIAL["<|assistant_end|>"]


@cache
def toy_tokenizer() -> Tokenizer:
    """Of the embedded corpus: tokens of several letters, quotes and brackets."""
    return train_tokenizer(toyworld.texts(), 600)


def toy_engine(slots: int) -> Engine:
    """Random weights: a model that never heard of JSON."""
    tokenizer, device = toy_tokenizer(), make.exact("cpu")
    made = make.model(7, vocab=tokenizer.vocab_size).requires_grad_(False)
    return Engine(made, Sdpa(), tokenizer, device, device.bind(0), slots=slots, context=160)


def of(**properties: Any) -> dict[str, Any]:
    """A schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TREE = of(v={"type": "boolean"}, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]})
SCHEMAS: list[dict[str, Any]] = [
    of(age={"type": "integer", "exclusiveMinimum": -7, "maximum": 300}, even={"type": "integer", "multipleOf": 2}),
    of(x={"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}),
    of(**{'q"uote': {"enum": ["red", "你好", 'a "quote"\n', None, -7, 12.5]}, "a b": {"const": {"k": [None, True]}}}),
    of(name={"type": "string", "pattern": "^é?你{1,2}$"}, short={"type": "string", "minLength": 2, "maxLength": 6}),
    of(list={"type": "array", "items": {"type": ["boolean", "integer"]}, "minItems": 1, "maxItems": 3}),
    of(pair={"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1, 2]}], "items": False, "minItems": 1}),
    {"anyOf": [of(a={"type": "null"}), {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    {"$defs": {"tree": TREE}, **of(tree={"$ref": "#/$defs/tree"})},
    {"type": "object", "patternProperties": {"^p[0-9]$": {"type": "boolean"}}, "additionalProperties": False},
]


def check(schema: dict[str, Any], answer: Completion, request: Request) -> bool:
    """Whether it was finished; then it must parse and validate."""
    if answer.finish_reason == "length":
        assert len(answer.ids) == request.sampling.max_tokens
        return False
    assert answer.finish_reason == "stop"
    content = json.loads(answer.text, parse_float=Decimal)  # as written: rounding could pass a border
    jsonschema.Draft202012Validator(schema).validate(content)
    assert answer.text == toy_tokenizer().decode(answer.ids)
    return True


@pytest.mark.slow
def test_answers_validate_whatever_the_schema_and_do_not_depend_on_neighbours() -> None:
    """Greedily and with seeds, from a model that would rather say anything else; between them requests without a
    grammar. Quotes are made likelier: a random model does not end its strings by itself."""
    tokenizer, asked, free = toy_tokenizer(), list[tuple[dict[str, Any], Request]](), list[Request]()
    for number, schema in enumerate(SCHEMAS):
        grammar, prompt = Grammar("json_schema", json.dumps(schema)), [tokenizer.bos, *tokenizer.encode(f"{number}?")]
        usual = Sampling(max_tokens=100, seed=number, grammar=grammar, logit_bias=((ord('"'), 6.0),))
        asked += [(schema, Request(prompt, replace(usual, temperature=heat))) for heat in (0.0, 1.0)]
        free.append(Request(prompt, Sampling(max_tokens=20, seed=number, logprobs=number % 2 == 0)))
    engine = toy_engine(slots=16)
    engine.lag = 1
    answers = engine.generate([*(request for _, request in asked), *free])
    finished = [check(schema, answer, request) for (schema, request), answer in zip(asked, answers)]
    assert sum(finished) > 0.8 * len(asked), "most answers come to their end"
    assert len({answer.text for answer in answers}) > len(SCHEMAS) + len(free), "and they say many things"
    lonely = toy_engine(slots=1)
    for index in (1, 8):
        (same,) = lonely.generate([asked[index][1]])
        assert (same.ids, same.finish_reason) == (answers[index].ids, answers[index].finish_reason)


def scripted(*runs: list[int], slots: int = 2, context: int = 64) -> Engine:
    device = pick("cpu", compiled=False)
    return make.engine(make.scripted(make.script(*runs)), device, slots=slots, context=context)


def one(engine: Engine, grammar: Grammar, **settings: Any) -> Completion:
    usual: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, **settings}
    return engine.generate([Request([START], Sampling(grammar=grammar, **usual))])[0]


ABC = [START, *b"abcdefg", END]  # what the model wants to say


def test_the_first_token_is_bound_as_well_and_the_model_chooses_where_it_may() -> None:
    engine = scripted(ABC)
    for late in (0, 1):
        engine.lag = late
        found = one(engine, Grammar("regex", "[x-z][a-g]{2}"), stop_tokens=())
        assert found.text[0] in "xyz"
        assert (len(found.ids), found.finish_reason) == (3, "stop")
        assert one(engine, Grammar("regex", "a[a-z]{2,9}")).text == "abcdefg"


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
    request = Request([START], Sampling(temperature=0.0, grammar=Grammar("lark", text)))
    for late in (0, 1):
        engine.lag = late
        (found,) = engine.generate([request])
        assert TEXT.decode(found.ids) == "<|tool_start|>17+25<|tool_end|>"
        assert (found.text, found.finish_reason, any(found.forced)) == ("", "stop", False)
        assert "".join(piece.text for piece in engine.stream(request) if piece.kind == "tool") == "17+25"


@pytest.mark.parametrize("late", [0, 1])
def test_calculator_calls_of_neighbours_go_on_beside_a_grammar(late: int) -> None:
    follows, answer = make.calculator_script()
    engine = make.engine(make.scripted(follows), pick("cpu", compiled=False), slots=3, late=late)
    usual = Sampling(temperature=0.0, max_tokens=25)
    bound = replace(usual, grammar=Grammar("regex", "[a-z]{9}"))
    requests = [Request([START], way) for way in (usual, bound, usual, bound, usual)]
    for request, found in zip(requests, engine.generate(requests)):
        assert found.ids == answer if request.sampling.grammar is None else len(found.text) == 9


def test_results_are_late_again_when_no_grammar_is_left() -> None:
    engine = scripted(ABC, slots=2)
    engine.lag = 1
    bound = engine.add(Request([START], Sampling(temperature=0.0, grammar=Grammar("regex", "abc"))))
    engine.add(Request([START], Sampling(temperature=0.0, stop_tokens=(), max_tokens=40)))
    while not bound.done:
        engine.step()
    engine.step()
    assert len(engine._pending) == 1


def test_what_rows_with_a_grammar_must_not_say_goes_to_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = scripted(ABC, slots=3), list[list[int]]()
    usual = engine.decoder.set_token_masks
    monkeypatch.setattr(engine.decoder, "set_token_masks", lambda slots, mask: told.append(slots) or usual(slots, mask))
    bound = Sampling(temperature=0.0, grammar=Grammar("regex", "[a-g]{3}"))
    engine.generate([Request([START], way) for way in (bound, Sampling(temperature=0.0, max_tokens=2), bound)])
    assert told == [[0, 2], [0, 2], [0, 2]]
