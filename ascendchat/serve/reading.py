"""The body of a request, from bytes to what the engine is asked: everything that takes as long as a client likes.

    read("/v1/chat/completions", content, model)         # Asked, or a Problem is raised

What cannot fit the context is refused before anything else looks at it. Small bodies are read in the event loop; large
ones in a process of their own (reader.py), since json and pydantic hold the interpreter's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from ascendchat.data.tokenizer.storage import OWN
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.grammar import MAX_CHARACTERS
from ascendchat.serve.errors import Problem, explained
from ascendchat.serve.prompts import Asked, Model, chat_prompts, completion_prompts, rendered
from ascendchat.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ascendchat.serve.responses import ResponsesRequest, chat_request
from ascendchat.serve.tools import Tools

PIECE = 1 << 18  # bytes of an answer that are sent at once

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class AskedResponse:
    """What the Responses API asks for, and the request without its input, which the answer repeats."""

    asked: Asked
    body: ResponsesRequest


class Begin(NamedTuple):
    """What the process needs first."""

    tokenizer: Path
    model: Model  # without its tokenizer
    seconds: float  # of processor time for one request


class Piece(NamedTuple):
    """Some bytes of an answer that is ready, with more to come: a large one is sent while others are."""

    content: bytes


class Job(NamedTuple):
    """One request; `model` as in Begin."""

    path: str
    content: bytes
    name: str
    chats: bool


def open_tokenizer(path: Path) -> Tokenizer:
    """Ours, or that of a Hugging Face model."""
    if (path / OWN).is_file() or not path.exists():
        return Tokenizer.load(path)
    from ascendchat.models.folder import HFFolder

    return HFFolder.at(path).load_tokenizer()


def read(path: str, content: bytes, model: Model) -> Any:
    """What the route of this path goes on with."""
    return ROUTES[path](content, model)


def parsed(kind: type[Body], content: bytes, model: Model) -> Body:
    """The request; a Problem names the field that is to blame."""
    try:
        given = json.loads(content)
    except ValueError as error:
        raise Problem(400, f"the body must be a JSON object (Content-Type: application/json): {error}") from None
    if isinstance(given, dict):
        check_size(given, model)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise explained(error.errors(), given) from None


def check_size(given: dict[str, Any], model: Model) -> None:
    """Lists that are too long for the context, whatever is in them: a message has a token at least."""
    for param in ("messages", "input", "prompt", "tokens"):
        entries = given.get(param)
        if not isinstance(entries, list) or not entries:
            continue
        texts = param == "prompt" and isinstance(entries[0], (str, list))  # several prompts, each of which must fit
        for row in entries if texts else [entries]:
            if isinstance(row, list) and len(row) >= model.context + (param == "tokens"):
                raise model.too_long(param, f"{len(row)} entries" if param in ("messages", "input") else str(len(row)))


def read_chat(content: bytes, model: Model) -> Asked:
    """POST /v1/chat/completions"""
    return chat_prompts(model, parsed(ChatRequest, content, model))


def read_text(content: bytes, model: Model) -> Asked:
    """POST /v1/completions"""
    return completion_prompts(model, parsed(CompletionRequest, content, model))


def read_response(content: bytes, model: Model) -> AskedResponse:
    """POST /v1/responses"""
    body = parsed(ResponsesRequest, content, model)
    if body.tools and len(json.dumps([tool.parameters for tool in body.tools])) > MAX_CHARACTERS:
        raise Problem(400, f"tools: at most {MAX_CHARACTERS} characters are read", param="tools")
    return AskedResponse(chat_prompts(model, chat_request(body)), body.model_copy(update={"input": ""}))


def read_tokens(content: bytes, model: Model) -> list[bytes]:
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
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.context, "tokens": ids}
    if body.return_token_strs:
        texts = {token: tokenizer.decode([token]) for token in set(ids)}
        found["token_strs"] = [texts[token] for token in ids]
    return in_pieces(found)


def read_ids(content: bytes, model: Model) -> list[bytes]:
    """POST /detokenize: the answer, in pieces."""
    body, size = parsed(DetokenizeRequest, content, model), model.tokenizer.vocab_size
    model.check_name(body.model)
    if body.tokens and max(body.tokens) >= size:
        raise Problem(400, f"tokens: ids end at {size - 1}", param="tokens")
    return in_pieces({"prompt": model.tokenizer.decode(body.tokens)})


def in_pieces(answer: dict[str, Any]) -> list[bytes]:
    """Its JSON text."""
    text = json.dumps(answer, separators=(",", ":")).encode()
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


ROUTES: dict[str, Callable[[bytes, Model], Any]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_text,
    "/v1/responses": read_response,
    "/tokenize": read_tokens,
    "/detokenize": read_ids,
}
