"""Makes engine requests of the body of an API request: bytes to fields, messages to tokens, fields to Sampling.

    wanted = read("/v1/chat/completions", content, model)     # GenerationRequest: one engine request per choice
    wanted = chat_generation(model, ChatRequest(...))

What is wrong with a request is raised as an ApiError. A prompt is never shortened here: one that does not fit is an
error with the code context_length_exceeded, before its tokens are counted where its characters say enough. Whether a
grammar can be used is seen later (service.py).

All this takes as long as a client likes: small bodies are read in the event loop, large ones in a process of its own
(large_requests.py), since json and pydantic hold the interpreter's lock.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ascendchat.config.serve import ServeConfig
from ascendchat.data.chat import render
from ascendchat.data.tokenizer.storage import OWN
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.grammar import MAX_CHARACTERS, too_long, unusable
from ascendchat.engine.request import Grammar, Request, Sampling
from ascendchat.serve.errors import ApiError, cut, explained
from ascendchat.serve.protocol import (
    AssistantMessage,
    ChatRequest,
    ChosenFunctionTool,
    CompletionRequest,
    DetokenizeRequest,
    InputCallOutput,
    InputMessage,
    JsonSchemaText,
    Message,
    RefusalPart,
    ResponsesRequest,
    SamplingFields,
    TemplateOptions,
    TokenizeRequest,
    ToolMessage,
)
from ascendchat.serve.tools import Tools, call_text, text_grammar

PIECE = 1 << 18  # bytes of an answer that are sent at once
TEXT_TOKENS = 16  # of a text completion where nothing is said, as in the original
MIN_TOP_P = 1e-6  # 0 is allowed in the API and means the likeliest token
NO_MODEL = "model_not_found"

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class ServedModel:
    """The model that is served, as far as a request must fit it."""

    config: ServeConfig
    tokenizer: Tokenizer
    name: str
    chats: bool  # it has learned to
    context: int
    vocab: int
    most: int  # answers at once

    def check_name(self, name: str | None) -> None:
        """Refuse the name of another model: there is one."""
        if name is not None and name != self.name:
            message = f"the model {cut(name)!r} is not here; this is {self.name!r}"
            raise ApiError(404, message, param="model", code=NO_MODEL)

    def check_chats(self) -> None:
        """Refuse messages to a base model, which has no form for them."""
        if not self.chats:
            message = f"{self.name} is a base model that has not learned to chat; use /v1/completions"
            raise ApiError(400, message, param="model", code="model_does_not_chat")

    def check_count(self, answers: int) -> None:
        """Refuse more answers than slots and queue take together."""
        if answers > self.most:
            message = f"n: this server takes {self.most} answers at once at most"
            raise ApiError(400, message, param="n", code="invalid_value")

    def too_long(self, param: str, count: str) -> ApiError:
        """The error for a prompt that does not fit."""
        message = f"this model's context is {self.context} tokens, prompt and answer together; {param} has {count}"
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def check_characters(self, count: int, param: str) -> None:
        """Refuse a text before it is encoded that does not fit even if each of its tokens is the longest."""
        if count > self.context * self.tokenizer.longest_token:
            raise self.too_long(param, "more")


@dataclass(frozen=True)
class GenerationRequest:
    """One API request as the engine sees it: one engine request per choice, `n` for each prompt in turn; and how the
    answer is written."""

    requests: Sequence[Request]
    n: int = 1
    calls: bool = False  # of the client's tools may be in the answer
    streams: bool = False
    include_usage: bool = False
    token_ids: bool = False  # tell them
    as_ids: bool = False  # log-probabilities name tokens by their ids
    response: ResponsesRequest | None = None  # what the Responses API asked for, without its input, to be repeated


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer: ours, or that of a Hugging Face model."""
    if (path / OWN).is_file() or not path.exists():
        return Tokenizer.load(path)
    from ascendchat.models.folder import HFFolder

    return HFFolder.at(path).load_tokenizer()


# ---- bodies: from bytes to fields ----------------------------------------------------------------


def read(path: str, content: bytes, model: ServedModel) -> Any:
    """Read the body of a request: what the route of this path goes on with."""
    return ROUTES[path](content, model)


def parsed(kind: type[Body], content: bytes, model: ServedModel) -> Body:
    """Parse a request; an ApiError names the field that is to blame."""
    try:
        given = json.loads(content)
    except ValueError as error:
        raise ApiError(400, f"the body must be a JSON object (Content-Type: application/json): {error}") from None
    if isinstance(given, dict):
        check_size(given, model)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise explained(error.errors(), given) from None


def check_size(given: dict[str, Any], model: ServedModel) -> None:
    """Refuse lists that are too long for the context, whatever is in them: a message has a token at least."""
    for param in ("messages", "input", "prompt", "tokens"):
        entries = given.get(param)
        if not isinstance(entries, list) or not entries:
            continue
        texts = param == "prompt" and isinstance(entries[0], (str, list))  # several prompts, each of which must fit
        for row in entries if texts else [entries]:
            if isinstance(row, list) and len(row) >= model.context + (param == "tokens"):
                raise model.too_long(param, f"{len(row)} entries" if param in ("messages", "input") else str(len(row)))


def read_chat(content: bytes, model: ServedModel) -> GenerationRequest:
    """POST /v1/chat/completions"""
    return chat_generation(model, parsed(ChatRequest, content, model))


def read_text(content: bytes, model: ServedModel) -> GenerationRequest:
    """POST /v1/completions"""
    return text_generation(model, parsed(CompletionRequest, content, model))


def read_response(content: bytes, model: ServedModel) -> GenerationRequest:
    """POST /v1/responses"""
    body = parsed(ResponsesRequest, content, model)
    if body.tools and len(json.dumps([tool.parameters for tool in body.tools])) > MAX_CHARACTERS:
        raise ApiError(400, f"tools: at most {MAX_CHARACTERS} characters are read", param="tools")
    wanted = chat_generation(model, chat_request(body))
    return replace(wanted, response=body.model_copy(update={"input": ""}))


def read_tokens(content: bytes, model: ServedModel) -> list[bytes]:
    """POST /tokenize: the answer, in pieces."""
    body = parsed(TokenizeRequest, content, model)
    model.check_name(body.model)
    tokenizer = model.tokenizer
    if body.messages is not None:
        model.check_chats()
        tools, options = Tools.of(body.tools, None, None), body.chat_template_kwargs
        ids = rendered(model, body.messages, tools, options, body.add_generation_prompt)
    else:
        ids = [*tokenizer.opening] * body.add_special_tokens + tokenizer.encode(body.prompt or "")
    fields: dict[str, Any] = {"count": len(ids), "max_model_len": model.context, "tokens": ids}
    if body.return_token_strs:
        texts = {token: tokenizer.decode([token]) for token in set(ids)}
        fields["token_strs"] = [texts[token] for token in ids]
    return in_pieces(fields)


def read_ids(content: bytes, model: ServedModel) -> list[bytes]:
    """POST /detokenize: the answer, in pieces."""
    body, size = parsed(DetokenizeRequest, content, model), model.tokenizer.vocab_size
    model.check_name(body.model)
    if body.tokens and max(body.tokens) >= size:
        raise ApiError(400, f"tokens: ids end at {size - 1}", param="tokens")
    return in_pieces({"prompt": model.tokenizer.decode(body.tokens)})


def in_pieces(answer: dict[str, Any]) -> list[bytes]:
    """The JSON text of an answer, in pieces."""
    text = json.dumps(answer, separators=(",", ":")).encode()
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


ROUTES: dict[str, Callable[[bytes, ServedModel], Any]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_text,
    "/v1/responses": read_response,
    "/tokenize": read_tokens,
    "/detokenize": read_ids,
}


# ---- fields: from models of protocol.py to engine requests ---------------------------------------


def chat_generation(model: ServedModel, body: ChatRequest) -> GenerationRequest:
    """Engine requests for a conversation, `n` times."""
    model.check_name(body.model)
    model.check_chats()
    model.check_count(body.n or 1)
    model.check_characters(sum(map(characters, body.messages)), "messages")
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls) if body.tools else None
    grammar = text_grammar(body.response_format) if body.response_format else None
    if tools is not None and not model.tokenizer.calls_tools:
        raise ApiError(400, "tools: calls of this model's kind are not read here; leave them out", param="tools")
    if tools is not None:
        grammar = tools.grammar(model.tokenizer, grammar)
    if grammar is not None and len(grammar.text) > MAX_CHARACTERS:
        raise bad_grammar(grammar_field(tools is not None), unusable(grammar, too_long(grammar)))
    prompt = rendered(model, body.messages, tools, body.chat_template_kwargs)
    check_room(model, prompt, "messages")
    most = body.max_completion_tokens or body.max_tokens or model.config.max_tokens
    tops = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(model, body, most, tops, grammar, calculator=tools is None and grammar is None)
    return generation(body, choices([prompt], sampling, body), calls=tools is not None)


def text_generation(model: ServedModel, body: CompletionRequest) -> GenerationRequest:
    """Engine requests for texts or token ids, each `n` times."""
    model.check_name(body.model)
    tokenizer, given = model.tokenizer, body.prompt
    opening = [*tokenizer.opening] if body.add_special_tokens else []
    rows: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given  # type: ignore[assignment]
    model.check_count(len(rows) * (body.n or 1))
    prompts = []
    for row in rows:
        if isinstance(row, str):
            model.check_characters(len(row), "prompt")
            row = opening + tokenizer.encode(row)
        check_room(model, row, "prompt")
        prompts.append(row)
    calculator = model.chats if body.calculator is None else body.calculator
    sampling = sampling_of(model, body, body.max_tokens or TEXT_TOKENS, body.logprobs, None, calculator)
    sampling = replace(sampling, keep_stop=body.keep_stop, processed_logprobs=body.processed_logprobs)
    return generation(body, choices(prompts, sampling, body), as_ids=body.return_tokens_as_token_ids)


def generation(
    body: SamplingFields, requests: Sequence[Request], calls: bool = False, as_ids: bool = False
) -> GenerationRequest:
    """Add the form of the answer to engine requests."""
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return GenerationRequest(
        requests, body.n or 1, calls, bool(body.stream), usage, bool(body.return_token_ids), as_ids
    )


def choices(prompts: Sequence[list[int]], sampling: Sampling, body: SamplingFields) -> list[Request]:
    """Each prompt with n seeds. As an array a prompt takes hardly any time on its way from process to process."""
    seeded = [sampling, *(replace(sampling, seed=sampling.seed + i) for i in range(1, body.n or 1))]
    packed = [array("i", prompt) for prompt in prompts]
    return [Request(prompt, one, body.cache_salt or "") for prompt in packed for one in seeded]


def check_room(model: ServedModel, prompt: Sequence[int], param: str) -> None:
    """Check that a prompt has a token, and leaves room for one."""
    if not prompt:
        raise ApiError(400, f"{param}: a prompt needs at least one token", param=param, code="invalid_value")
    if max(prompt) >= model.vocab:
        raise ApiError(400, f"{param}: token ids end at {model.vocab - 1}", param=param, code="invalid_value")
    if len(prompt) >= model.context:
        raise model.too_long(param, str(len(prompt)))


def sampling_of(
    model: ServedModel, body: SamplingFields, most: int, tops: int | None, grammar: Grammar | None, calculator: bool
) -> Sampling:
    """The engine's settings; `tops`: likeliest tokens to report, None for no log-probabilities at all."""
    config, vocab = model.config, model.vocab
    bias = tuple((int(token), float(value)) for token, value in (body.logit_bias or {}).items())
    named = {"stop_token_ids": body.stop_token_ids, "allowed_token_ids": body.allowed_token_ids}
    for param, ids in {"logit_bias": [token for token, _ in bias], **named}.items():
        if ids and len(ids) > vocab:
            raise ApiError(400, f"{param}: there are {vocab} tokens", param=param, code="invalid_value")
        if ids and max(ids) >= vocab:
            raise ApiError(400, f"{param}: token ids end at {vocab - 1}", param=param, code="invalid_value")
    if len(dict(bias)) < len(bias):  # "5" and "05"
        raise ApiError(400, "logit_bias: a token is named twice", param="logit_bias", code="invalid_value")
    top_k = config.top_k if body.top_k is None else max(0, body.top_k)
    stops = body.stop_token_ids or []
    if not body.ignore_eos:
        stops = [*model.tokenizer.stops, *stops]
    return Sampling(
        max_tokens=min(most, model.context),
        temperature=config.temperature if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=1.0 if body.top_p is None else max(MIN_TOP_P, body.top_p),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        seed=secrets.randbits(31) if body.seed is None else body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_tokens=tuple(stops) if stops or body.ignore_eos else None,
        logprobs=tops is not None,
        top_logprobs=tops or 0,
        tools=calculator,
        allowed_tokens=tuple(body.allowed_token_ids or ()),
        logit_bias=bias,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        grammar=grammar,
    )


def grammar_field(tools: bool) -> str:
    """The field that a grammar comes from."""
    return "tools" if tools else "response_format"


def bad_grammar(param: str, reason: str) -> ApiError:
    """The error for a schema that cannot be used."""
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_schema")


# ---- the Responses API: its requests as chat requests --------------------------------------------


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Rewrite a request of the Responses API as a chat request, which checks the rest in its words."""
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
    """Rewrite `text.format` as `response_format`."""
    form = body.text.format if body.text else None
    if not isinstance(form, JsonSchemaText):
        return None if form is None else {"type": form.type}
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Rewrite `instructions` and `input` as messages; neighbouring calls belong to one answer."""
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


# ---- messages ----------------------------------------------------------------------------------


def rendered(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Tools | None,
    options: TemplateOptions | None,
    opened: bool = True,
) -> list[int]:
    """The tokens of a conversation, open for the assistant; behind a tool's result its turn goes on."""
    asked = options.enable_thinking if options else None
    tokenizer = model.tokenizer.thinking(model.config.enable_thinking if asked is None else asked)
    talk = conversation(messages)
    if tools is not None and (words := tools.described()):
        model.check_characters(len(words), "tools")
        first = talk[0] if talk[0]["role"] == "system" else None
        text = f"{first['content']}\n{words}" if first and first["content"] else words
        talk = [{"role": "system", "content": text}, *(talk[1:] if first else talk)]
    if not opened:
        return render.render(tokenizer, talk).ids
    ids = render.render_prompt(tokenizer, talk)
    goes_on = model.tokenizer.calls_tools and isinstance(messages[-1], ToolMessage)
    return ids[:-2] if goes_on else ids  # without <|assistant_end|> <|assistant_start|>: its turn goes on


def conversation(messages: Sequence[Message]) -> render.Conversation:
    """Bring messages into the form of data/chat/render.py: a result stands behind its call."""
    talk: render.Conversation = []
    places: dict[str, dict[str, str]] = {}  # the part of each call by its id
    for at, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            parts = assistant_parts(message)
            for call in message.tool_calls or []:
                places[call.id] = {"type": "tool", "text": call_text(call)}
                parts.append(places[call.id])
            talk.append({"role": "assistant", "content": parts})
        elif isinstance(message, ToolMessage):
            name = f"messages[{at}].tool_call_id"
            if message.tool_call_id not in places:
                raise ApiError(400, f"{name}: no earlier message has this call", param=name, code="invalid_value")
            call_part = places.pop(message.tool_call_id)
            parts = talk[-1]["content"] if talk[-1]["role"] == "assistant" else []
            where = next((i for i, part in enumerate(parts) if part is call_part), None)
            if where is None:
                raise ApiError(400, f"{name}: the call is not in the turn before", param=name, code="invalid_value")
            parts.insert(where + 1, {"type": "output", "text": text_of(message.content)})
        else:
            role = "system" if message.role == "developer" else message.role
            talk.append({"role": role, "content": text_of(message.content)})
    return talk


def characters(message: Message) -> int:
    """Characters of all texts of a message."""
    content = message.content or (message.refusal if isinstance(message, AssistantMessage) else None) or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.refusal if isinstance(part, RefusalPart) else part.text) for part in content)


def text_of(content: str | Sequence[object]) -> str:
    """Join text parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)  # type: ignore[attr-defined]


def assistant_parts(message: AssistantMessage) -> list[dict[str, str]]:
    content = message.content or message.refusal or ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [
        {"type": "text", "text": part.refusal}
        if isinstance(part, RefusalPart)
        else {"type": part.type, "text": part.text}
        for part in content
    ]
