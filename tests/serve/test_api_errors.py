"""Every error in the envelope of the original, with the field that is to blame and what was expected of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from running_server import CHAT, PATIENCE, Server, error_of

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
# Field -> values that are refused, with the field as the one to blame.
CHAT_FIELDS: dict[str, list[Any]] = {
    "temperature": ["hot", True], "top_p": [-0.1], "n": [0, 129], "max_tokens": [0], "seed": [2**70], "stop": [""],
    "top_logprobs": [3], "logit_bias": [{"99999": 1}, {"5": 1, "05": 2}], "stop_token_ids": [[99999]], "best_of": [2],
    "presence_penalty": [3], "audio": [{"voice": "a"}], "modalities": [["text", "audio"]], "reasoning_effort": ["low"],
    "prediction": [{"type": "content", "content": "a"}], "service_tier": ["flex"], "functions": [[{"name": "a"}]],
    "stream_options": [{"include_usage": True}], "tool_choice": ["required"], "messages": [[]],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "odd"}}}],
}  # fmt: skip
TEXT_FIELDS: dict[str, list[Any]] = {
    "echo": [True], "suffix": ["x"], "best_of": [2], "prompt": [[[]], [10**6], [[10**6]], None, 3],
}  # fmt: skip
RESPONSE_FIELDS: dict[str, list[Any]] = {
    "store": [True], "previous_response_id": ["resp_1"], "background": [True], "reasoning": [{"effort": "low"}],
    "truncation": ["auto"], "tools": [[{"type": "web_search"}]], "odd": [1], "tool_choice": ["required"],
}  # fmt: skip
ALL = [(CHAT, CHAT_FIELDS), ("/v1/completions", TEXT_FIELDS), ("/v1/responses", RESPONSE_FIELDS)]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [(path, name, value) for path, f in ALL for name, values in f.items() for value in values],
)
def test_a_wrong_field_is_named(server: Server, path: str, field: str, value: Any) -> None:
    body = {"messages": HI} if path == CHAT else {"prompt": "a"} if path == "/v1/completions" else {"input": "hi"}
    error = error_of(server.post(path, {**body, field: value}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] == field
    assert field in error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "a"}}
FUNCTION: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "odd"}}}]}, "tools"),
    ],
)
def test_the_place_in_a_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    error = error_of(server.chat(**fields), 400)
    assert error["param"] == param
    assert param.split(".")[0].split("[")[0] in error["message"]


# What is posted to /v1/... (chat: to chat/completions, with a question and a tool), and the message of the error.
MESSAGES = """
chat {"stop": 5} -> stop: expected a string or a list, found 5
chat {"stop": ["a", "a", "a", "a", "a"]} -> stop: expected at most 4 items, found ["a", "a", "a", "a", "a"]
chat {"stop": ["a", ""]} -> stop[1]: expected at least 1 character, found ""
chat {"store": true} -> store: expected false, found true
chat {"stream": "yes"} -> stream: expected true or false, found "yes"
chat {"n": 1.5} -> n: expected a whole number, found 1.5
chat {"temperature": 3} -> temperature: expected at most 2, found 3
chat {"stream": true, "stream_options": 1} -> stream_options: expected an object, found 1
chat {"messages": [{"content": "a"}]} -> messages[0].role is missing
chat {"messages": ["hi"]} -> messages[0]: expected an object, found "hi"
chat {"messages": [{"role": "robot", "content": "a"}]} -> messages[0].role: expected one of 'system', 'developer', \
'user', 'assistant', 'tool', found "robot"
chat {"messages": [{"role": "user", "content": null}]} -> messages[0].content: expected a string or a list, found null
chat {"messages": [{"role": "user", "content": []}]} -> messages[0].content: expected at least 1 item, found []
chat {"response_format": {}} -> response_format.type is missing
chat {"tool_choice": "maybe"} -> tool_choice: expected 'none', 'auto' or 'required', or an object, \
found "maybe"
chat {"tool_choice": {"type": "function"}} -> tool_choice.function is missing
completions {"prompt": {}} -> prompt: expected a string or a list, found {}
completions {"prompt": []} -> prompt: expected at least 1 item, found []
completions {"prompt": [1.5]} -> prompt[0]: expected a string, a whole number or a list, found 1.5
completions {"prompt": [1, "a"]} -> prompt[1]: expected a whole number, found "a"
completions {"prompt": ["a", 1]} -> prompt[1]: expected a string, found 1
completions {"prompt": [7, -1]} -> prompt[1]: expected at least 0, found -1
responses {"input": 5} -> input: expected a string or a list, found 5
responses {"input": [5]} -> input[0]: expected an object, found 5
responses {"input": [{"type": "function_call_output"}]} -> input[0].call_id is missing
responses {"input": [{"type": "sound"}]} -> input[0].type: expected one of 'message', 'function_call', \
'function_call_output', found "sound"
"""


@pytest.mark.parametrize("line", MESSAGES.strip().splitlines())
def test_the_message_names_the_field_and_says_what_is_expected(server: Server, line: str) -> None:
    asked, _, message = line.partition(" -> ")
    path, _, fields = asked.partition(" ")
    body = json.loads(fields)
    if path == "chat":
        body = {"messages": HI, "tools": [{"type": "function", "function": {"name": "a"}}], **body}
    error = error_of(server.post(CHAT if path == "chat" else f"/v1/{path}", body), 400)
    assert error["message"] == message
    assert error["param"] == message.split(": ")[0].split(" is ")[0]


def test_a_list_that_is_too_long_is_not_blamed_on_its_items(server: Server) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": ["a"] * 2049}), 400)
    assert error["message"].startswith("prompt: expected at most 2048 items, found [")


def test_known_fields_that_change_nothing_are_taken(server: Server) -> None:
    fields: dict[str, Any] = {"user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": True, "store": False}
    fields |= {
        "service_tier": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tool_choice": "auto",
    }
    fields |= {"tools": [], "logit_bias": {}, "stop": [], "max_completion_tokens": 2}
    fields |= dict.fromkeys(("prediction", "stream_options", "n", "temperature", "max_tokens"))
    assert server.chat(**fields).status_code == 200


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=server.name, messages=HI, temperature=9)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HI)  # type: ignore[arg-type]
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as streamed:  # before the first byte: a status
        client.chat.completions.create(model=server.name, messages=HI, stream=True, seed=2**80)  # type: ignore[arg-type]
    assert streamed.value.param == "seed"


QUESTION = b'{"messages": [{"role": "user", "content": "a"}]}'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        *((content, "json") for content in (b"{", b"[]", b'"a"', b"", b"null", b"\xff\xfe", b"[" * 100_000)),
        (b'{"messages": [], "seed": ' + b"9" * 5000 + b"}", "json"),
        *((QUESTION[:-1] + b', "temperature": %s}' % number, "json") for number in (b"NaN", b"Infinity", b"1e99999")),
        (QUESTION, "plain"),
        (b"a=b", "x-www-form-urlencoded"),
    ],
)
def test_a_body_that_is_no_request(server: Server, content: bytes, kind: str) -> None:
    headers = {"Content-Type": f"{'text' if kind == 'plain' else 'application'}/{kind}"}
    error_of(httpx.post(f"{server.url}{CHAT}", content=content, headers=headers, timeout=PATIENCE), 400)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}', 200),
        (b'{"messages": [], "model": "\\ud800"}', 400),
        (QUESTION[:-1] + b', "model": "\\ud800"}', 404),
    ],
)
def test_text_that_is_no_unicode_is_survived(server: Server, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{CHAT}", content=body, headers=headers, timeout=PATIENCE)
    assert (answer.status_code, "Traceback" in answer.text) == (status, False)


def test_unknown_places_and_methods(server: Server) -> None:
    error_of(server.get("/v1/embeddings"), 404)
    error_of(server.get("/web/../app.py"), 404)
    error_of(server.get("/web/nothing.js"), 404)
    error_of(httpx.request("DELETE", f"{server.url}/v1/chat/completions"), 405)


def test_the_document_describes_what_is_there(server: Server) -> None:
    document = server.get("/openapi.json").json()
    routes = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"}
    assert routes <= set(document["paths"])
    for path in routes - {"/v1/models"}:
        operation = document["paths"][path]["post"]
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        assert schema["additionalProperties"] is False
