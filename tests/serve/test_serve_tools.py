"""Calls read from token ids, however they arrive; tokens reported with the text they belong to; messages of errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import engine_models as make
import pytest
from pydantic import ValidationError

from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.grammar import compiled, vocabulary
from ascendchat.engine.request import Grammar, Piece
from ascendchat.serve.answers import TokenReport, chat_logprobs, text_logprobs
from ascendchat.serve.errors import explained
from ascendchat.serve.protocol import ChatRequest, Function, Tool
from ascendchat.serve.tools import CallReader, Tools, native, whole_calls
from ascendchat.serve.worker_messages import Chunk

TEXT = make.tokenizer()
SPECIAL = TEXT.specials


def call(text: str) -> list[int]:
    return [SPECIAL["<|tool_start|>"], *TEXT.encode(text), SPECIAL["<|tool_end|>"]]


def cuts(ids: list[int], size: int) -> Iterator[list[int]]:
    for at in range(0, len(ids), size):
        yield ids[at : at + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_the_same_however_they_are_cut(size: int) -> None:
    arguments = '{"a":"}{你好\\"","b":[1,{}]}'
    answer = [*TEXT.encode("text {"), *call(f'{{"name":"first","arguments":{arguments}}}'), *call("'\"你'*2")]
    answer += call('{"name":"last","arguments":{}}')
    reader, deltas = CallReader(TEXT), []
    for part in cuts(answer, size):
        deltas += reader.feed(part)
    deltas += reader.feed([], over=True)
    calls = whole_calls(deltas)
    assert [one["function"]["name"] for one in calls] == ["first", "calculator", "last"]
    assert calls[0]["function"]["arguments"] == arguments
    assert json.loads(calls[1]["function"]["arguments"]) == {"expression": "'\"你'*2"}
    assert calls[2]["function"]["arguments"] == "{}"
    assert len({one["id"] for one in calls}) == reader.count == reader.complete == 3


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_is_cut_short_is_told_as_far_as_it_goes(size: int) -> None:
    ids = call('{"name":"first","arguments":{"a":"xy')[:-1]
    reader, deltas = CallReader(TEXT), []
    for part in cuts(ids, size):
        deltas += reader.feed(part)
    deltas += reader.feed([], over=True)
    assert whole_calls(deltas)[0]["function"]["arguments"] == '{"a":"xy'
    assert (reader.count, reader.complete) == (1, 0)


def test_a_calculator_with_rules_of_its_own_is_not_the_models() -> None:
    def tool(**schema: object) -> Function:
        return Function(name="calculator", parameters={"type": "object", "properties": {"expression": schema}})

    assert native(tool(type="string", description="a sum"))
    assert not native(tool(type="string", pattern="^1"))
    assert not native(tool(type="number"))
    assert not native(Function(name="calculator"))


@pytest.mark.parametrize("where", ["arguments", "an answer beside tools"])
def test_exclusive_borders_are_outside_where_tools_are(where: str) -> None:
    """They go into another kind of grammar than an answer alone."""
    number = {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}
    schema = {"type": "object", "properties": {"v": number}, "required": ["v"], "additionalProperties": False}
    called = where == "arguments"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema if called else {}}}
    tools = Tools.of([Tool.model_validate(tool)], "auto", None)
    assert tools is not None
    grammar = tools.grammar(TEXT, None if called else Grammar("json_schema", json.dumps(schema)))
    start = compiled(vocabulary(TEXT), grammar)

    def fits(value: str) -> bool:
        matcher, text = start.deep_copy(), f'{{"v":{value}}}'
        ids = call(f'{{"name":"f","arguments":{text}}}') if called else TEXT.encode(text)
        return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()

    assert [value for value in ("5", "5.25", "5.5", "6") if fits(value)] == ["5.25", "5.5"]


def parts_of(ids: list[int], stop: tuple[str, ...], size: int) -> Iterator[Chunk]:
    stream = TextStream(TEXT, stop)
    for ids_of_part in cuts(ids, size):
        yield Chunk(0, stream.feed_all(ids_of_part), ids_of_part, [-1.0] * len(ids_of_part), [], [])
    yield Chunk(0, stream.close(), [], [], [], [], "stop")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reported_tokens_are_those_of_the_text(size: int) -> None:
    ids = [*TEXT.encode("hello 你"), *call("1+1"), *TEXT.encode("好 END"), *TEXT.encode(" more")]
    report, rows, shown = TokenReport(TEXT, everything=False, held=True), [], ""
    for part in parts_of(ids, ("END",), size):
        rows += report.feed(part)
        shown += "".join(piece.text for piece in part.pieces if piece.kind == "text")
    assert shown == "hello 你好 "
    assert b"".join(bytes(entry["bytes"]) for entry in chat_logprobs(TEXT, rows)["content"]).decode() == shown
    everything = TokenReport(TEXT, everything=True, held=False)
    told = text_logprobs(TEXT, [row for part in parts_of(ids, (), size) for row in everything.feed(part)])
    assert len(told["tokens"]) == len(ids)
    assert "<|tool_start|>" in told["tokens"]
    assert told["text_offset"][-1] == len("hello 你好 END mor")


def test_half_a_character_is_told_as_bytes_and_infinity_as_a_number() -> None:
    report = TokenReport(TEXT, everything=True, held=False)
    part = Chunk(0, [Piece("text", "")], [0xE4], [float("-inf")], [[(0xE5, -0.5)]], [])
    rows = report.feed(part)
    assert text_logprobs(TEXT, rows)["top_logprobs"] == [{"bytes:\\xe4": -9999.0, "bytes:\\xe5": -0.5}]
    assert chat_logprobs(TEXT, rows)["content"][0]["bytes"] == [0xE4]


def test_the_error_that_is_nearest_to_what_was_meant_is_told() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    problem = explained([{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()], body)
    assert problem.param == "messages[0].content[0].text"
