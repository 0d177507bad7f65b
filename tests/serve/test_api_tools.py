"""Tools of a client: calls whose arguments fit their schema, whole and streamed, and their results sent back."""

from __future__ import annotations

import json
from typing import Any

import engine_models as make
import jsonschema
import openai
import pytest
from running_server import CHAT, SPECIAL, Server, error_of

pytestmark = pytest.mark.slow

TEXT = make.tokenizer()
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR: list[Any] = [{"type": "function", "function": {"name": "calculator", "parameters": EXPRESSION}}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
START = str(SPECIAL["<|tool_start|>"])


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """The answer of the official client, one call at most and 150 tokens where nothing else is said; a stream is read
    to its end."""
    settings = {"messages": HI, "parallel_tool_calls": False, "max_tokens": 150, **fields}
    answer: Any = client.chat.completions.create(model=client.models.list().data[0].id, **settings)
    return list(answer) if fields.get("stream") else answer.choices[0]


def check(call: Any) -> None:
    """A call of one of TOOLS."""
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("weather", "now")
    if call.function.name == "now":
        assert arguments == {}
    else:
        jsonschema.validate(arguments, WEATHER)


def test_a_named_tool_is_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    for seed in range(3):
        choice = ask(client, tools=TOOLS, tool_choice=NAMED, temperature=1, seed=seed)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        check(call)


def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI) -> None:
    choice = ask(client, tools=TOOLS, tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    check(call)


def test_several_calls_may_be_made(client: openai.OpenAI) -> None:
    """A bias makes the model open further calls; without parallel_tool_calls it must not."""
    for parallel in (True, False):
        fields = {"tools": [TOOLS[1]], "tool_choice": "required", "logit_bias": {START: 60}}
        calls = ask(client, **fields, parallel_tool_calls=parallel).message.tool_calls
        assert (len(calls) > 1) == parallel
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            check(call)


def test_a_streamed_call_comes_in_the_originals_steps(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 1, "seed": 4}
    whole, chunks = ask(client, **fields), ask(client, stream=True, **fields)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "weather")
    assert deltas[0].id.startswith("call_")
    assert deltas[0].function.arguments == ""
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert len(deltas) > 3
    arguments = "".join(delta.function.arguments for delta in deltas)
    assert arguments == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_model_speaks_or_calls_unless_it_must_not(client: openai.OpenAI) -> None:
    spoken = ask(client, tools=TOOLS, max_tokens=8, logit_bias={START: -100})
    assert spoken.message.content
    assert (spoken.message.tool_calls, spoken.finish_reason) == (None, "length")
    called = ask(client, tools=TOOLS, tool_choice="auto", logit_bias={START: 100})
    assert called.finish_reason == "tool_calls"
    check(called.message.tool_calls[0])
    assert ask(client, tools=TOOLS, tool_choice="none", max_tokens=8).message.tool_calls is None


def test_the_models_own_call_is_that_of_the_clients_calculator(sums_client: openai.OpenAI) -> None:
    for choice in ("auto", "required"):
        answer = ask(sums_client, tools=CALCULATOR, tool_choice=choice)
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "calculator"
        assert json.loads(call.function.arguments) == {"expression": "17+25"}
    chunks = ask(sums_client, tools=CALCULATOR, stream=True)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"expression": "17+25"}


def test_behind_a_result_the_assistants_turn_goes_on(sums_client: openai.OpenAI) -> None:
    first = ask(sums_client, tools=CALCULATOR)
    (call,) = first.message.tool_calls
    talk: list[Any] = [*HI, first.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    answer = ask(sums_client, messages=talk, tools=CALCULATOR)
    assert (answer.message.content, answer.finish_reason) == ("你好!", "stop")


def test_calls_and_results_are_rendered_in_the_models_form(server: Server) -> None:
    def call(key: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("a", "calculator", '{"expression": "1+1"}'), call("b", "weather", '{"city": "Xi"}')]
    talk = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    ids = server.post("/tokenize", {"messages": talk}).json()["tokens"]

    def span(kind: str, text: str) -> list[int]:
        return [SPECIAL[f"<|{kind}_start|>"], *TEXT.encode(text), SPECIAL[f"<|{kind}_end|>"]]

    turn = [SPECIAL["<|assistant_start|>"], *span("tool", "1+1"), *span("output", "2")]
    turn += [*span("tool", '{"name":"weather","arguments":{"city":"Xi"}}'), *span("output", "rain")]
    assert ids[-len(turn) :] == turn
    unasked = {"messages": [*HI, {"role": "tool", "tool_call_id": "z", "content": ""}]}
    assert error_of(server.post(CHAT, unasked), 400)["param"] == "messages[1].tool_call_id"


def test_tools_are_told_to_the_model(server: Server) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *HI]
    ids = server.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": ids})
    words = "Be brief.\nTools:\nweather(city: string, days: integer, unit) A forecast.\nnow()"
    assert f"<|system_start|>{words}<|system_end|>" in text.json()["prompt"]
