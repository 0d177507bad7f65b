"""Tools of a client: calls whose arguments fit their schema, whole and streamed, and their results sent back."""

from __future__ import annotations

import json
from typing import Any

import engine_models as make
import jsonschema
import openai
import pytest
from running_server import SPECIAL, Server, error_of

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
CALCULATOR: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


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


def test_a_named_tool_is_called_with_arguments_that_fit(client: openai.OpenAI, server: Server) -> None:
    for seed in range(3):
        (choice,) = client.chat.completions.create(
            model=server.name, messages=HI, tools=TOOLS, tool_choice=NAMED, max_tokens=150, temperature=1, seed=seed
        ).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.function.name == "weather"  # type: ignore[union-attr]
        check(call)


def test_a_required_call_is_one_of_the_tools(client: openai.OpenAI, server: Server) -> None:
    (choice,) = client.chat.completions.create(
        model=server.name, messages=HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=150
    ).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    check(call)


def test_several_calls_may_be_made(client: openai.OpenAI, server: Server) -> None:
    """A bias makes the model open further calls; without parallel_tool_calls it must not."""
    bias = {str(SPECIAL["<|tool_start|>"]): 60}
    only: list[Any] = [TOOLS[1]]
    for parallel in (True, False):
        (choice,) = client.chat.completions.create(
            model=server.name,
            messages=HI,
            tools=only,
            tool_choice="required",
            parallel_tool_calls=parallel,
            logit_bias=bias,
            max_tokens=150,
        ).choices
        calls = choice.message.tool_calls or []
        assert (len(calls) > 1) == parallel
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            check(call)


def test_a_streamed_call_comes_in_the_originals_steps(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 150, "temperature": 1, "seed": 4}
    whole = client.chat.completions.create(model=server.name, messages=HI, **fields)
    chunks = list(client.chat.completions.create(model=server.name, messages=HI, stream=True, **fields))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].type, deltas[0].function.name) == (0, "function", "weather")
    assert deltas[0].id.startswith("call_")
    assert deltas[0].function.arguments == ""
    assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    assert len(deltas) > 3
    arguments = "".join(delta.function.arguments for delta in deltas)
    assert arguments == whole.choices[0].message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_auto_lets_the_model_speak_or_call(client: openai.OpenAI, server: Server) -> None:
    spoken = client.chat.completions.create(
        model=server.name, messages=HI, tools=TOOLS, max_tokens=8, logit_bias={str(SPECIAL["<|tool_start|>"]): -100}
    ).choices[0]
    assert spoken.message.content
    assert (spoken.message.tool_calls, spoken.finish_reason) == (None, "length")
    called = client.chat.completions.create(
        model=server.name,
        messages=HI,
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=False,
        max_tokens=150,
        logit_bias={str(SPECIAL["<|tool_start|>"]): 100},
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    check((called.message.tool_calls or [])[0])


def test_none_calls_nothing(client: openai.OpenAI, server: Server) -> None:
    choice = client.chat.completions.create(
        model=server.name, messages=HI, tools=TOOLS, tool_choice="none", max_tokens=8
    ).choices[0]
    assert choice.message.tool_calls is None


def test_the_models_own_call_is_that_of_the_clients_calculator(sums_client: openai.OpenAI, sums: Server) -> None:
    for choice in ("auto", "required"):
        answer = sums_client.chat.completions.create(
            model=sums.name,
            messages=HI,
            tools=CALCULATOR,
            tool_choice=choice,
            parallel_tool_calls=False,  # type: ignore[arg-type]
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls or []
        assert call.function.name == "calculator"  # type: ignore[union-attr]
        assert json.loads(call.function.arguments) == {"expression": "17+25"}  # type: ignore[union-attr]
    chunks = sums_client.chat.completions.create(
        model=sums.name, messages=HI, tools=CALCULATOR, parallel_tool_calls=False, stream=True
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"expression": "17+25"}  # type: ignore[union-attr]


def test_behind_a_result_the_assistants_turn_goes_on(sums_client: openai.OpenAI, sums: Server) -> None:
    first = sums_client.chat.completions.create(
        model=sums.name, messages=HI, tools=CALCULATOR, parallel_tool_calls=False
    ).choices[0]
    (call,) = first.message.tool_calls or []
    talk: list[Any] = [*HI, first.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    answer = sums_client.chat.completions.create(model=sums.name, messages=talk, tools=CALCULATOR).choices[0]
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
    special = SPECIAL

    def span(kind: str, text: str) -> list[int]:
        return [special[f"<|{kind}_start|>"], *TEXT.encode(text), special[f"<|{kind}_end|>"]]

    turn = [special["<|assistant_start|>"], *span("tool", "1+1"), *span("output", "2")]
    turn += [*span("tool", '{"name":"weather","arguments":{"city":"Xi"}}'), *span("output", "rain")]
    assert ids[-len(turn) :] == turn
    error = error_of(
        server.post("/v1/chat/completions", {"messages": [*HI, {"role": "tool", "tool_call_id": "z", "content": ""}]}),
        400,
    )
    assert error["param"] == "messages[1].tool_call_id"


def test_tools_are_told_to_the_model(server: Server) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *HI]
    text = server.post(
        "/detokenize", {"tokens": server.post("/tokenize", {"messages": talk, "tools": TOOLS}).json()["tokens"]}
    )
    words = "Be brief.\nTools:\nweather(city: string, days: integer, unit) A forecast.\nnow()"
    assert f"<|system_start|>{words}<|system_end|>" in text.json()["prompt"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "odd"}}}]}, "tools"),
        ({"functions": [{"name": "a"}]}, "functions"),
    ],
)
def test_wrong_tools_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    assert error_of(server.chat(**fields), 400)["param"] == param
