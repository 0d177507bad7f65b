"""From requests of the API to requests of the engine: messages to tokens, fields to Sampling.

    asked = chat_prompts(model, ChatRequest(...))            # Asked: one engine request per choice
    asked = completion_prompts(model, CompletionRequest(...))

A prompt is never shortened here: one that does not fit is an error with the code context_length_exceeded, before its
tokens are counted where its characters say enough. Whether its grammar can be used is seen later (app.py).
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascendchat.config.serve import ServeConfig
from ascendchat.data.chat import template
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.grammar import MAX_CHARACTERS, too_long, unusable
from ascendchat.engine.request import Grammar, Request, Sampling
from ascendchat.serve.errors import Problem, cut
from ascendchat.serve.protocol import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Message,
    RefusalPart,
    SamplingFields,
    TemplateOptions,
    ToolMessage,
)
from ascendchat.serve.tools import Tools, call_text, text_grammar

TEXT_TOKENS = 16  # of a text completion where nothing is said, as in the original
LEAST_TOP_P = 1e-6  # 0 is allowed in the API and means the likeliest token
NO_MODEL = "model_not_found"


@dataclass(frozen=True)
class Model:
    """The model that is served, as far as a request must fit it."""

    config: ServeConfig
    tokenizer: Tokenizer
    name: str
    chats: bool  # it has learned to
    context: int
    vocab: int
    most: int  # answers at once

    def check_name(self, name: str | None) -> None:
        """There is one model; nothing or its name must be asked for."""
        if name is not None and name != self.name:
            message = f"the model {cut(name)!r} is not here; this is {self.name!r}"
            raise Problem(404, message, param="model", code=NO_MODEL)

    def check_chats(self) -> None:
        """A base model has no form for messages."""
        if not self.chats:
            message = f"{self.name} is a base model that has not learned to chat; use /v1/completions"
            raise Problem(400, message, param="model", code="model_does_not_chat")

    def check_count(self, answers: int) -> None:
        """More answers than slots and queue together are never taken."""
        if answers > self.most:
            message = f"n: this server takes {self.most} answers at once at most"
            raise Problem(400, message, param="n", code="invalid_value")

    def too_long(self, param: str, count: str) -> Problem:
        """A prompt does not fit."""
        message = f"this model's context is {self.context} tokens, prompt and answer together; {param} has {count}"
        return Problem(400, message, param=param, code="context_length_exceeded")

    def check_characters(self, count: int, param: str) -> None:
        """Refuse a text before it is encoded that does not fit even if each of its tokens is the longest."""
        if count > self.context * self.tokenizer.longest_token:
            raise self.too_long(param, "more")


@dataclass(frozen=True)
class Asked:
    """What the engine is asked: one request per choice, `n` for each prompt in turn; and how the answer is written."""

    requests: Sequence[Request]
    n: int = 1
    calls: bool = False  # of the client's tools may be in the answer
    streams: bool = False
    include_usage: bool = False
    token_ids: bool = False  # tell them
    as_ids: bool = False  # log-probabilities name tokens by their ids


def chat_prompts(model: Model, body: ChatRequest) -> Asked:
    """A conversation, `n` times."""
    model.check_name(body.model)
    model.check_chats()
    model.check_count(body.n or 1)
    model.check_characters(sum(map(characters, body.messages)), "messages")
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    grammar = text_grammar(body.response_format)
    if tools is not None and not model.tokenizer.calls_tools:
        raise Problem(400, "tools: calls of this model's kind are not read here; leave them out", param="tools")
    if tools is not None:
        grammar = tools.grammar(model.tokenizer, grammar)
    if grammar is not None and len(grammar.text) > MAX_CHARACTERS:
        raise bad_grammar(asked_by(tools is not None), unusable(grammar, too_long(grammar)))
    prompt = rendered(model, body.messages, tools, body.chat_template_kwargs)
    check_room(model, prompt, "messages")
    most = body.max_completion_tokens or body.max_tokens or model.config.max_tokens
    tops = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(model, body, most, tops, grammar, calculator=tools is None and grammar is None)
    return asked_for(body, choices([prompt], sampling, body), calls=tools is not None)


def completion_prompts(model: Model, body: CompletionRequest) -> Asked:
    """Texts or token ids, each `n` times."""
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
    return asked_for(body, choices(prompts, sampling, body), as_ids=body.return_tokens_as_token_ids)


def asked_for(body: SamplingFields, requests: Sequence[Request], calls: bool = False, as_ids: bool = False) -> Asked:
    """With what the fields say of the form of the answer."""
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return Asked(requests, body.n or 1, calls, bool(body.stream), usage, bool(body.return_token_ids), as_ids)


def choices(prompts: Sequence[list[int]], sampling: Sampling, body: SamplingFields) -> list[Request]:
    """Each prompt with n seeds. As an array a prompt takes hardly any time on its way from process to process."""
    seeded = [replace(sampling, seed=sampling.seed + i) for i in range(body.n or 1)]
    packed = [array("i", prompt) for prompt in prompts]
    return [Request(prompt, one, body.cache_salt or "") for prompt in packed for one in seeded]


def check_room(model: Model, prompt: Sequence[int], param: str) -> None:
    """A prompt must be one, and leave room for a token."""
    if not prompt:
        raise Problem(400, f"{param}: a prompt needs at least one token", param=param, code="invalid_value")
    if max(prompt) >= model.vocab:
        raise Problem(400, f"{param}: token ids end at {model.vocab - 1}", param=param, code="invalid_value")
    if len(prompt) >= model.context:
        raise model.too_long(param, str(len(prompt)))


def sampling_of(
    model: Model, body: SamplingFields, most: int, tops: int | None, grammar: Grammar | None, calculator: bool
) -> Sampling:
    """The engine's settings; `tops`: likeliest tokens to report, None for no log-probabilities at all."""
    config, vocab = model.config, model.vocab
    bias = tuple((int(token), float(value)) for token, value in (body.logit_bias or {}).items())
    named = {"stop_token_ids": body.stop_token_ids, "allowed_token_ids": body.allowed_token_ids}
    for param, ids in {"logit_bias": [token for token, _ in bias], **named}.items():
        if ids and len(ids) > vocab:
            raise Problem(400, f"{param}: there are {vocab} tokens", param=param, code="invalid_value")
        if ids and max(ids) >= vocab:
            raise Problem(400, f"{param}: token ids end at {vocab - 1}", param=param, code="invalid_value")
    if len(dict(bias)) < len(bias):  # "5" and "05"
        raise Problem(400, "logit_bias: a token is named twice", param="logit_bias", code="invalid_value")
    top_k = config.top_k if body.top_k is None else max(0, body.top_k)
    stops = body.stop_token_ids or []
    if not body.ignore_eos:
        stops = [*model.tokenizer.stops, *stops]
    return Sampling(
        max_tokens=min(most, model.context),
        temperature=config.temperature if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=1.0 if body.top_p is None else max(LEAST_TOP_P, body.top_p),
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


def asked_by(tools: bool) -> str:
    """The field that a grammar comes from."""
    return "tools" if tools else "response_format"


def bad_grammar(param: str, reason: str) -> Problem:
    """A schema that cannot be used."""
    return Problem(400, f"{param}: {reason}", param=param, code="invalid_schema")


# ---- messages ----------------------------------------------------------------------------------


def rendered(
    model: Model,
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
        return template.render(tokenizer, talk).ids
    ids = template.render_prompt(tokenizer, talk)
    goes_on = model.tokenizer.calls_tools and isinstance(messages[-1], ToolMessage)
    return ids[:-2] if goes_on else ids  # <|assistant_end|> <|assistant_start|>


def conversation(messages: Sequence[Message]) -> template.Conversation:
    """In the form of data/chat/template.py: a result stands behind its call."""
    talk: template.Conversation = []
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
                raise Problem(400, f"{name}: no earlier message has this call", param=name, code="invalid_value")
            call_part = places.pop(message.tool_call_id)
            parts = talk[-1]["content"] if talk[-1]["role"] == "assistant" else []
            where = next((i for i, part in enumerate(parts) if part is call_part), None)
            if where is None:
                raise Problem(400, f"{name}: the call is not in the turn before", param=name, code="invalid_value")
            parts.insert(where + 1, {"type": "output", "text": text_of(message.content)})
        else:
            role = "system" if message.role == "developer" else message.role
            talk.append({"role": role, "content": text_of(message.content)})
    return talk


def characters(message: Message) -> int:
    """Of all its texts."""
    content = message.content or (message.refusal if isinstance(message, AssistantMessage) else None) or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.refusal if isinstance(part, RefusalPart) else part.text) for part in content)


def text_of(content: str | Sequence[object]) -> str:
    """Text parts are one text."""
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
