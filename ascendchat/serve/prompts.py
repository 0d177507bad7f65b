"""From requests of the API to requests of the engine: messages to tokens, fields to Sampling.

    asked = chat_prompts(service, ChatRequest(...))            # Asked: one engine request per choice
    asked = completion_prompts(service, CompletionRequest(...))

A prompt is never shortened here: one that does not fit is an error with the code context_length_exceeded.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ascendchat.data import chat
from ascendchat.infer.grammar import grammars
from ascendchat.infer.request import Grammar, Request, Sampling
from ascendchat.serve.errors import Problem
from ascendchat.serve.protocol import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Message,
    RefusalPart,
    SamplingFields,
    ToolMessage,
)
from ascendchat.serve.tools import Tools, call_text, text_grammar

if TYPE_CHECKING:
    from ascendchat.serve.api import Service

TEXT_TOKENS = 16  # of a text completion where nothing is said, as in the original
LEAST_TOP_P = 1e-6  # 0 is allowed in the API and means the likeliest token


@dataclass(frozen=True)
class Asked:
    """What the engine is asked: one request per choice, `n` for each prompt in turn."""

    requests: Sequence[Request]
    tools: Tools | None = None


def chat_prompts(service: Service, body: ChatRequest) -> Asked:
    """A conversation, `n` times."""
    service.check_model(body.model)
    check_chats(service)
    tools = Tools.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    grammar = text_grammar(body.response_format)
    if tools is not None and not service.tokenizer.calls_tools:
        raise Problem(400, "tools: calls of this model's kind are not read here; leave them out", param="tools")
    if tools is not None:
        grammar = tools.grammar(service.tokenizer, grammar)
    if grammar is not None:
        check_grammar(service, grammar, "tools" if tools else "response_format")
    prompt = rendered(service, body.messages, tools)
    check_room(service, prompt, "messages")
    most = body.max_completion_tokens or body.max_tokens or service.config.max_tokens
    tops = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_of(service, body, most, tops, grammar, calculator=tools is None and grammar is None)
    return Asked(choices([prompt], sampling, body.n or 1), tools)


def completion_prompts(service: Service, body: CompletionRequest) -> Asked:
    """Texts or token ids, each `n` times."""
    service.check_model(body.model)
    tokenizer, given = service.tokenizer, body.prompt
    opening = [tokenizer.bos] if body.add_special_tokens else []
    if isinstance(given, str):
        prompts = [opening + tokenizer.encode(given)]
    else:
        rows = [given] if isinstance(given[0], int) else given
        prompts = [opening + tokenizer.encode(row) if isinstance(row, str) else list(row) for row in rows]  # type: ignore[arg-type]
    for prompt in prompts:
        check_room(service, prompt, "prompt")
    calculator = service.chats if body.calculator is None else body.calculator
    sampling = sampling_of(service, body, body.max_tokens or TEXT_TOKENS, body.logprobs, None, calculator)
    sampling = replace(sampling, keep_stop=body.keep_stop, processed_logprobs=body.processed_logprobs)
    return Asked(choices(prompts, sampling, body.n or 1))


def choices(prompts: Sequence[list[int]], sampling: Sampling, n: int) -> list[Request]:
    """Each prompt with n seeds."""
    return [Request(prompt, replace(sampling, seed=sampling.seed + i)) for prompt in prompts for i in range(n)]


def check_room(service: Service, prompt: Sequence[int], param: str) -> None:
    """A prompt must be one, and leave room for a token."""
    if not prompt:
        raise Problem(400, f"{param}: a prompt needs at least one token", param=param, code="invalid_value")
    if max(prompt) >= service.about.vocab:
        raise Problem(400, f"{param}: token ids end at {service.about.vocab - 1}", param=param, code="invalid_value")
    if len(prompt) >= service.about.context:
        raise Problem(
            400,
            f"this model's context is {service.about.context} tokens, prompt and answer together; "
            f"{param} has {len(prompt)}",
            param=param,
            code="context_length_exceeded",
        )


def sampling_of(
    service: Service, body: SamplingFields, most: int, tops: int | None, grammar: Grammar | None, calculator: bool
) -> Sampling:
    """The engine's settings; `tops`: likeliest tokens to report, None for no log-probabilities at all."""
    config, vocab = service.config, service.about.vocab
    bias = tuple((int(token), float(value)) for token, value in (body.logit_bias or {}).items())
    named = {"stop_token_ids": body.stop_token_ids, "allowed_token_ids": body.allowed_token_ids}
    for param, ids in {"logit_bias": [token for token, _ in bias], **named}.items():
        if ids and max(ids) >= vocab:
            raise Problem(400, f"{param}: token ids end at {vocab - 1}", param=param, code="invalid_value")
    if len(dict(bias)) < len(bias):  # "5" and "05"
        raise Problem(400, "logit_bias: a token is named twice", param="logit_bias", code="invalid_value")
    top_k = config.top_k if body.top_k is None else max(0, body.top_k)
    stops = body.stop_token_ids or []
    if not body.ignore_eos:
        stops = [*service.tokenizer.stops, *stops]
    return Sampling(
        max_tokens=min(most, service.about.context),
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


def check_grammar(service: Service, grammar: Grammar, param: str) -> None:
    """A schema that cannot be used is refused here, and not in the queue."""
    try:
        grammars(service.tokenizer).matcher(grammar)
    except ValueError as error:
        raise Problem(400, f"{param}: {error}", param=param, code="invalid_schema") from None


def check_chats(service: Service) -> None:
    """A base model has no form for messages."""
    if not service.chats:
        message = f"{service.name} is a base model that has not learned to chat; use /v1/completions"
        raise Problem(400, message, param="model", code="model_does_not_chat")


# ---- messages ----------------------------------------------------------------------------------


def rendered(service: Service, messages: Sequence[Message], tools: Tools | None, opened: bool = True) -> list[int]:
    """The tokens of a conversation, open for the assistant; behind a tool's result its turn goes on."""
    talk = conversation(messages)
    if tools is not None and (words := tools.described()):
        first = talk[0] if talk[0]["role"] == "system" else None
        text = f"{first['content']}\n{words}" if first and first["content"] else words
        talk = [{"role": "system", "content": text}, *(talk[1:] if first else talk)]
    if not opened:
        return chat.render(service.tokenizer, talk).ids
    ids = chat.render_prompt(service.tokenizer, talk)
    goes_on = service.tokenizer.calls_tools and isinstance(messages[-1], ToolMessage)
    return ids[:-2] if goes_on else ids  # <|assistant_end|> <|assistant_start|>


def conversation(messages: Sequence[Message]) -> chat.Conversation:
    """In the form of data/chat.py: a result stands behind its call."""
    talk: chat.Conversation = []
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
