"""Every error in the envelope of the original, with the field that is to blame; and what a lost client leaves."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from running_server import PATIENCE, Server, error_of

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "odd"}}}},
            "response_format",
        ),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages[0].mood"),
    ],
)
def test_a_wrong_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    error = error_of(server.chat(**fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split(".")[0].split("[")[0] in error["message"]


TOOLS = {"tools": [{"type": "function", "function": {"name": "a"}}]}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"stop": 5}, "stop: expected a string or a list, found 5"),
        ("chat/completions", {"stop": ["a"] * 5}, 'stop: expected at most 4 items, found ["a", "a", "a", "a", "a"]'),
        ("chat/completions", {"stop": ["a", ""]}, 'stop[1]: expected at least 1 character, found ""'),
        ("chat/completions", {"store": True}, "store: expected false, found true"),
        ("chat/completions", {"stream": "yes"}, 'stream: expected true or false, found "yes"'),
        ("chat/completions", {"n": 1.5}, "n: expected a whole number, found 1.5"),
        ("chat/completions", {"temperature": 3}, "temperature: expected at most 2, found 3"),
        ("chat/completions", {"stream": True, "stream_options": 1}, "stream_options: expected an object, found 1"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role is missing"),
        ("chat/completions", {"messages": ["hi"]}, 'messages[0]: expected an object, found "hi"'),
        (
            "chat/completions",
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role: expected one of 'system', 'developer', 'user', 'assistant', 'tool', found \"robot\"",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content: expected a string or a list, found null",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": []}]},
            "messages[0].content: expected at least 1 item, found []",
        ),
        ("chat/completions", {"response_format": {}}, "response_format.type is missing"),
        (
            "chat/completions",
            {**TOOLS, "tool_choice": "maybe"},
            "tool_choice: expected 'none', 'auto' or 'required', or an object, found \"maybe\"",
        ),
        ("chat/completions", {**TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
        ("completions", {"prompt": {}}, "prompt: expected a string or a list, found {}"),
        ("completions", {"prompt": []}, "prompt: expected at least 1 item, found []"),
        ("completions", {"prompt": [1.5]}, "prompt[0]: expected a string, a whole number or a list, found 1.5"),
        ("completions", {"prompt": [1, "a"]}, 'prompt[1]: expected a whole number, found "a"'),
        ("completions", {"prompt": ["a", 1]}, "prompt[1]: expected a string, found 1"),
        ("completions", {"prompt": [7, -1]}, "prompt[1]: expected at least 0, found -1"),
        ("responses", {"input": 5}, "input: expected a string or a list, found 5"),
        ("responses", {"input": [5]}, "input[0]: expected an object, found 5"),
        ("responses", {"input": [{"type": "function_call_output"}]}, "input[0].call_id is missing"),
        (
            "responses",
            {"input": [{"type": "sound"}]},
            "input[0].type: expected one of 'message', 'function_call', 'function_call_output', found \"sound\"",
        ),
    ],
)
def test_the_message_names_the_field_and_says_what_is_expected(
    server: Server, path: str, fields: dict[str, Any], message: str
) -> None:
    asked = {"messages": HI, **fields} if path == "chat/completions" else fields
    error = error_of(server.post(f"/v1/{path}", asked), 400)
    assert error["message"] == message
    assert error["param"] == message.split(": ")[0].split(" is ")[0]


def test_a_list_that_is_too_long_is_not_blamed_on_its_items(server: Server) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": ["a"] * 2049}), 400)
    assert error["message"].startswith("prompt: expected at most 2048 items, found [")


def test_known_fields_that_change_nothing_are_taken(server: Server) -> None:
    fields: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": False,
        "prediction": None,
        "modalities": ["text"],
        "stream_options": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "logit_bias": {},
        "stop": [],
        "n": None,
        "temperature": None,
        "max_tokens": None,
        "max_completion_tokens": 2,
    }
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


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b'"a"', "application/json"),
        (b"", "application/json"),
        (b"null", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"messages": [], "seed": ' + b"9" * 5000 + b"}", "application/json"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": Infinity}', "application/json"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "text/plain"),
        (b"a=b", "application/x-www-form-urlencoded"),
    ],
)
def test_a_body_that_is_no_request(server: Server, content: bytes, kind: str) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions", content=content, headers={"Content-Type": kind}, timeout=PATIENCE
    )
    error_of(response, 400)


def test_text_that_is_no_unicode_is_survived(server: Server) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers).status_code == 200
    body = b'{"messages": [], "model": "\\ud800"}'
    error_of(httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers), 400)
    body = b'{"messages": [{"role": "user", "content": "a"}], "model": "\\ud800"}'
    error_of(httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers), 404)


def test_unknown_places_and_methods(server: Server) -> None:
    error_of(server.get("/v1/embeddings"), 404)
    error_of(server.get("/web/../api.py"), 404)
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


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_slots(server: Server, streams: bool) -> None:
    """More answers than there are slots are left alone. Were they not ended, the next request would wait for one of
    them, nine times as long as the answers take that are made for comparison; three times, if the machine falters."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": HI, "max_tokens": 900, "ignore_eos": True, "stream": streams, "n": 17}).encode()
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if streams:
                assert b"200 OK" in connection.recv(4096)
            else:
                assert server.post("/tokenize", {"prompt": "a"}).status_code == 200  # the request has been read by now
        began = time.monotonic()
        assert server.chat(max_tokens=1).status_code == 200
        quick = time.monotonic() - began
        began = time.monotonic()
        assert server.chat(max_tokens=100, ignore_eos=True, n=16).status_code == 200
        if quick < (long := time.monotonic() - began):
            return
    pytest.fail(f"the next request waited {quick:.2f} s, {long:.2f} s are enough for whole answers")
