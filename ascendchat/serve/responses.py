"""OpenAI's Responses API on top of chat completions: what a request may hold, and the chat request it is.

    chat = chat_request(ResponsesRequest(...))            # then as /v1/chat/completions
    ResponseAnswers(...)                                  # responses.py writes the answer

Nothing is stored: a client sends the whole conversation with every request, and `store: true`, `previous_response_id`
and `conversation` are refused.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ascendchat.serve.answers import About, Choice
from ascendchat.serve.errors import explained
from ascendchat.serve.messages import Part
from ascendchat.serve.pool import joined
from ascendchat.serve.prompts import Asked
from ascendchat.serve.protocol import (
    MAX_TOOLS,
    ChatRequest,
    Label,
    Listed,
    Metadata,
    Model,
    Salt,
    Text,
    TextFormat,
    ToolName,
)
from ascendchat.serve.tools import CallDelta


class _InputText(Model):
    """Some text of a message, a client's or an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _InputMessage(Model):
    """A message; an earlier answer may be sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[_InputText]
    id: str | None = None
    status: str | None = None


class _InputCall(Model):
    """An earlier call of a tool."""

    type: Literal["function_call"]
    call_id: Text
    name: ToolName
    arguments: str
    id: str | None = None
    status: str | None = None


class _InputCallOutput(Model):
    """Its result."""

    type: Literal["function_call_output"]
    call_id: Text
    output: str
    id: str | None = None
    status: str | None = None


def with_type(item: Any) -> Any:
    """What names no type is a message."""
    return {"type": "message", **item} if isinstance(item, dict) else item


InputItem = Annotated[
    _InputMessage | _InputCall | _InputCallOutput, Field(discriminator="type"), BeforeValidator(with_type)
]


class _FunctionTool(Model):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChosenFunctionTool(Model):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName


class _JsonObject(Model):
    """Some JSON object."""

    type: Literal["json_object"]


class _JsonSchemaText(Model):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class _TextOptions(Model):
    """The form of the text."""

    format: Annotated[TextFormat | _JsonObject | _JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: None = None


class ResponsesRequest(Model):
    """POST /v1/responses"""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    text: _TextOptions | None = None
    tools: Annotated[list[_FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ChosenFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    cache_salt: Salt | None = None
    # harmless
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], Field(max_length=0, fail_fast=True)] | None = None
    top_logprobs: Literal[0] | None = None
    # not supported
    conversation: None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None
    stream_options: None = None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The same as a chat request; what only that one checks is refused in its words."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages_of(body),
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": format_of(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": body.tool_choice,
        "cache_salt": body.cache_salt,
    }
    if isinstance(body.tool_choice, _ChosenFunctionTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise explained(error.errors(), fields) from None


def format_of(body: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as `response_format`."""
    form = body.text.format if body.text else None
    if not isinstance(form, _JsonSchemaText):
        return None if form is None else {"type": form.type}
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """`instructions` and `input` as messages; neighbouring calls belong to one answer."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        if isinstance(item, _InputMessage):
            content = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
            messages.append({"role": item.role, "content": content})
        elif isinstance(item, _InputCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        else:
            function = {"name": item.name, "arguments": item.arguments}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
    return messages


# The answers of /v1/responses: one object, or typed events.
#
# ResponseAnswers(about, asked, body) is what app.py writes with, as ChatAnswers is for chat completions.

Item = dict[str, Any]


class ResponseAnswers:
    """One answer: a message, calls of tools, or both."""

    def __init__(self, about: About, asked: Asked, body: ResponsesRequest) -> None:
        self.about, self.body = about, body
        self.choice = Choice(about, asked, 0, everything=False)
        self.sampling = asked.requests[0].sampling
        self.items: list[Item] = []
        self.reason = ""
        self.number = 0  # of the next event
        self._message: Item | None = None
        self._texts: list[str] = []

    def response(self, status: str) -> dict[str, Any]:
        """The object."""
        body, done = self.body, status != "in_progress"
        prompt, count = len(self.choice.prompt), self.choice.count
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.choice.cached},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + count,
        }
        choice = body.tool_choice or "auto"
        form = body.text.format if body.text and body.text.format else None
        return {
            "id": f"resp_{self.about.key}",
            "object": "response",
            "created_at": self.about.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.about.model,
            "output": self.items if done else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": self.sampling.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage if done else None,
            "user": body.user,
            "ascendchat": {
                "weight_version": self.choice.version,
                "system_fingerprint": self.about.fingerprint,
                **({"timed_out": True} if self.reason == "timeout" else {}),
            },
        }

    @property
    def status(self) -> str:
        """How it ended."""
        return "completed" if self.reason == "stop" else "incomplete"

    # ---- a stream ------------------------------------------------------------------------------

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event with its number."""
        content = json.dumps({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return f"event: {kind}\ndata: {content}\n\n".encode()

    def opening(self) -> bytes:
        """Nothing: the first part brings the first events, which are numbered."""
        return b""

    def part(self, index: int, part: Part) -> bytes:
        """The events that say what a part says."""
        out = []
        if not self.number:
            started = self.response("in_progress")
            out += [self.event(f"response.{kind}", response=started) for kind in ("created", "in_progress")]
        self.choice.take(part)
        self.reason = part.finish_reason
        if text := "".join(piece.text for piece in part.pieces if piece.kind == "text"):
            out += [self._open_message(), self._text(text)]
        if self.choice.calls is not None:
            out += [self._call(delta) for delta in self.choice.calls.feed(part.ids, over=bool(part.finish_reason))]
        if part.finish_reason:
            if not self.items:
                out.append(self._open_message())
            out.append(self._close())
        return b"".join(out)

    def closing(self) -> bytes:
        """The whole answer once more."""
        return self.event(f"response.{self.status}", response=self.response(self.status))

    def _open_message(self) -> bytes:
        if self._message is not None:
            return b""
        closed = self._close()
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self.items.append(self._message)
        place = {"item_id": self._message["id"], "output_index": len(self.items) - 1, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self.event("response.output_item.added", output_index=len(self.items) - 1, item=self._message)
        begun = self.event("response.content_part.added", **place, part=empty)
        head = json.dumps({"type": "response.output_text.delta", **place, "logprobs": []})
        self._delta = f"event: response.output_text.delta\ndata: {head[:-1]}".encode()
        return closed + added + begun

    def _text(self, text: str) -> bytes:
        self._texts.append(text)
        self.number += 1
        return b'%b, "sequence_number": %d, "delta": %b}\n\n' % (self._delta, self.number - 1, quoted(text).encode())

    def _call(self, delta: CallDelta) -> bytes:
        if not delta.id:
            item = self.items[-1]
            item["arguments"] += delta.arguments
            place = {"item_id": item["id"], "output_index": len(self.items) - 1}
            return self.event("response.function_call_arguments.delta", **place, delta=delta.arguments)
        closed = self._close()
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        item.update({"call_id": delta.id, "name": delta.name, "arguments": ""})
        self.items.append(item)
        return closed + self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self) -> bytes:
        """The item under way is done."""
        if not self.items:
            return b""
        item, at = self.items[-1], len(self.items) - 1
        item["status"] = "completed" if self.reason in ("", "stop") else "incomplete"
        place = {"item_id": item["id"], "output_index": at}
        out = []
        if item is self._message:
            text = {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": []}
            item["content"], self._message, self._texts = [text], None, []
            place["content_index"] = 0
            out.append(self.event("response.output_text.done", **place, text=text["text"], logprobs=[]))
            out.append(self.event("response.content_part.done", **place, part=text))
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            out.append(self.event("response.function_call_arguments.done", **place, **given))
        out.append(self.event("response.output_item.done", output_index=at, item=item))
        return b"".join(out)

    # ---- all at once ---------------------------------------------------------------------------

    def whole(self, parts: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """The object of an answer at once."""
        self.part(0, joined(parts[0]))
        return self.response(self.status)
