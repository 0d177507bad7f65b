"""Answers with a grammar end in time, whatever the model would like to say."""

from __future__ import annotations

import json
import random

import engine_models as make
import jsonschema
import numpy as np
import pytest

from ascendchat.engine.grammar import grammars
from ascendchat.engine.request import Grammar

TEXT = make.tokenizer()
SPECIAL = TEXT.specials
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "age": {"type": "integer"},
        "pets": {"type": "array", "items": {"type": "object", "properties": {"kind": {"type": "string"}}}},
        "home": {"type": "object", "properties": {"x": {"type": "number"}, "any": {}}, "required": ["x", "any"]},
        "colour": {"enum": ["red", "blue"]},
    },
    "required": ["name", "age", "pets", "home", "colour"],
    "additionalProperties": False,
}


def written(grammar: Grammar, most: int, seed: int, lands: bool = True) -> tuple[list[int], bool]:
    """What a model of pure chance writes, and whether it came to an end."""
    table, choose = grammars(TEXT), random.Random(seed)
    matcher, ids = table.matcher(grammar), list[int]()
    while len(ids) < most:
        (row,) = table.allowed([matcher], [most - len(ids)] if lands else [])
        likely = np.flatnonzero(row)
        talk = [token for token in likely if chr(token).isalnum()] if choose.random() < 0.9 else []
        token = int(choose.choice(talk or list(likely)))
        if token == SPECIAL["<|assistant_end|>"]:
            return ids, True
        ids.append(token)
        if matcher.take(token):
            return ids, True
    return ids, False


@pytest.mark.parametrize("most", [120, 300])
def test_an_object_is_whole_when_its_tokens_are_spent(most: int) -> None:
    grammar = Grammar("json_schema", json.dumps(PERSON))
    for seed in range(3):
        ids, ended = written(grammar, most, seed)
        assert ended
        jsonschema.validate(json.loads(TEXT.decode(ids)), PERSON)
    assert not all(written(grammar, most, seed, lands=False)[1] for seed in range(3)), "it would not end by chance"


def test_the_end_comes_as_late_as_it_can() -> None:
    """A string goes on until just what closes it is left."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    lengths = [len(written(Grammar("json_schema", json.dumps(schema)), 64, seed)[0]) for seed in range(4)]
    assert max(lengths) <= 64
    assert max(lengths) >= 58


def test_free_text_is_cut_and_not_ended_but_no_call_begins_that_cannot_end() -> None:
    call = f'<[{SPECIAL["<|tool_start|>"]}]> "{{" %json {{"type": "string"}} "}}" <[{SPECIAL["<|tool_end|>"]}]>'
    grammar = Grammar("lark", f"start: TEXT? call*\nTEXT: /(.|\\n)+/\ncall: {call}\n")
    table = grammars(TEXT)
    matcher = table.matcher(grammar)
    (early,) = table.allowed([matcher], [400])
    assert early[SPECIAL["<|tool_start|>"]]
    for token in TEXT.encode("abc"):
        assert matcher.take(token) is None
    for left in (7, 2):  # <|tool_start|> { " " } <|tool_end|> are 6
        (late,) = table.allowed([matcher], [left])
        assert late[ord("z")]
        assert late[SPECIAL["<|assistant_end|>"]]
        assert not late[SPECIAL["<|tool_start|>"]]
