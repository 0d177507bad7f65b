"""OpenAI's Responses API on top of chat completions: what a request may hold, and the chat request it is.

    chat = chat_request(ResponsesRequest(...))            # then as /v1/chat/completions
    ResponseAnswers(...)                                  # response_events.py writes the answer

Nothing is stored: a client sends the whole conversation with every request, and `store: true`, `previous_response_id`
and `conversation` are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ascendchat.serve.errors import explained
from ascendchat.serve.protocol import (
    MOST_TOOLS,
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


class InputText(Model):
    """Some text of a message, a client's or an earlier answer's."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Model):
    """A message; an earlier answer may be sent back as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Listed[InputText]
    id: str | None = None
    status: str | None = None


class InputCall(Model):
    """An earlier call of a tool."""

    type: Literal["function_call"]
    call_id: Text
    name: ToolName
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Model):
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
    InputMessage | InputCall | InputCallOutput, Field(discriminator="type"), BeforeValidator(with_type)
]


class FunctionTool(Model):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunctionTool(Model):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName


class JsonObject(Model):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchemaText(Model):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Model):
    """The form of the text."""

    format: Annotated[TextFormat | JsonObject | JsonSchemaText, Field(discriminator="type")] | None = None
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
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool | None = None
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
    if isinstance(body.tool_choice, ChosenFunctionTool):
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
    if not isinstance(form, JsonSchemaText):
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
        if isinstance(item, InputMessage):
            content = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
            messages.append({"role": item.role, "content": content})
        elif isinstance(item, InputCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        else:
            function = {"name": item.name, "arguments": item.arguments}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
    return messages
