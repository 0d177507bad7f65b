"""/v1/responses through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from running_server import Server

pytestmark = pytest.mark.slow

TOOL: Any = {
    "type": "function",
    "name": "calculator",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def test_a_response_says_what_a_chat_completion_says(client: openai.OpenAI, server: Server) -> None:
    answer = client.responses.create(model=server.name, input="hi", max_output_tokens=9)
    chat = server.chat("hi", max_tokens=9).json()
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert (answer.object, answer.status) == ("response", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.total_tokens == chat["usage"]["total_tokens"]


def test_the_events_of_a_stream(client: openai.OpenAI, sums_client: openai.OpenAI, sums: Server) -> None:
    events = list(sums_client.responses.create(model=sums.name, input="hi", stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first = ["created", "in_progress", "output_item.added", "content_part.added"]
    last = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [kinds[:4], kinds[-4:]] == [[f"response.{name}" for name in names] for names in (first, last)]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "你好!"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "你好!"


def test_a_call_and_its_result(sums_client: openai.OpenAI, sums: Server) -> None:
    first = sums_client.responses.create(model=sums.name, input="hi", tools=[TOOL], parallel_tool_calls=False)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("calculator", {"expression": "17+25"})
    talk: list[Any] = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True)]
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
    second = sums_client.responses.create(model=sums.name, input=talk, tools=[TOOL])
    assert second.output_text == "你好!"
    assert second.status == "completed"
    fields: dict[str, Any] = {"tools": [TOOL], "parallel_tool_calls": False}
    events = list(sums_client.responses.create(model=sums.name, input="hi", stream=True, **fields))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"expression": "17+25"}]


class Answer(BaseModel):
    ok: bool
    text: str


def test_structured_output(client: openai.OpenAI, server: Server) -> None:
    answer = client.responses.parse(model=server.name, input="hi", text_format=Answer, max_output_tokens=80)
    assert isinstance(answer.output_parsed, Answer)


def test_earlier_answers_are_taken_back(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(model=server.name, input="hi", max_output_tokens=4)
    talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    talk += [item.model_dump(exclude_none=True) for item in first.output] + [{"role": "user", "content": "and?"}]
    assert client.responses.create(model=server.name, input=talk, instructions="Be brief.").status
