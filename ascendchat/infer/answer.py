"""Requests and answers of remote.py in JSON: the fields of /v1/completions, and how an answer is put together of them.

body_of(request, model, context, tokenizer, ours)      # what is posted
answer = Answer(request, tokenizer, ours, version); answer.take(event); answer.close(); answer.completion
"""

from __future__ import annotations

from typing import Any

from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.request import Completion, Piece, Request
from ascendchat.infer.text import TextStream

ID = "token_id:"  # how `return_tokens_as_token_ids` writes a token


def stops_of(request: Request, tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """The tokens that end an answer; None: those of the server."""
    named = request.sampling.stop_tokens
    if named is not None or tokenizer is None:
        return named
    return tokenizer.stops


def body_of(request: Request, model: str, context: int, tokenizer: Tokenizer | None, ours: bool) -> dict[str, Any]:
    """The request in OpenAI's and vLLM's words; what cannot be said in them is a ValueError."""
    sampling, room = request.sampling, context - len(request.prompt)
    if not request.prompt:
        raise ValueError("a prompt needs at least one token")
    if room < 1:
        raise ValueError(f"a prompt of {len(request.prompt)} tokens leaves no room for an answer in {context}")
    if sampling.grammar is not None:
        raise ValueError("a grammar cannot be sent to a server like this; use its chat API with response_format")
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": min(sampling.max_tokens, room),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "return_token_ids": True,
    }
    stops = stops_of(request, tokenizer)
    if stops is not None:
        body |= {"ignore_eos": True, "stop_token_ids": list(stops)}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logprobs:
        body["logprobs"] = sampling.top_logprobs
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True
    if sampling.allowed_tokens:
        body["allowed_token_ids"] = list(sampling.allowed_tokens)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if ours:
        body["calculator"] = sampling.tools
    return body


class Answer:
    """One answer as its parts come: events of a stream, or all at once."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, ours: bool, version: int) -> None:
        self.request, self.version = request, version
        self.completion = Completion(version=version, finish_reason="cancelled")
        self._stops = frozenset(stops_of(request, tokenizer) or ())
        self._text = TextStream(tokenizer, request.sampling.stop) if tokenizer else None
        self._forced = Forced(tokenizer) if tokenizer and ours and request.sampling.tools else None

    def take(self, event: dict[str, Any]) -> list[Piece]:
        """What an event adds."""
        usage, answer = event.get("usage") or {}, self.completion
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or answer.cached_tokens
        pieces: list[Piece] = []
        for choice in event.get("choices") or ():
            pieces += self._choice(choice)
        return pieces

    def _choice(self, choice: dict[str, Any]) -> list[Piece]:
        answer, ids = self.completion, list(choice.get("token_ids") or ())
        reason, logprobs = choice.get("finish_reason"), choice.get("logprobs") or {}
        if reason:
            answer.finish_reason = reason if reason in ("stop", "length") else "cancelled"
        if reason == "stop" and ids and ids[-1] in self._stops:  # other servers count it to the answer
            ids.pop()
        first = not answer.ids
        answer.ids += ids
        answer.forced += [False] * len(ids) if self._forced is None else self._forced.feed(ids)
        if self.request.sampling.logprobs:
            answer.logprobs += list(logprobs.get("token_logprobs") or ())
            del answer.logprobs[len(answer.ids) :]
        if self.request.sampling.top_logprobs:
            answer.tops += [
                tops_of(row, self.request.sampling.top_logprobs) for row in logprobs.get("top_logprobs") or ()
            ]
            del answer.tops[len(answer.ids) :]
        own = choice.get("ascendchat") or {}
        version = own.get("weight_version", self.version)
        answer.versions += own.get("weight_versions") or [version] * len(ids)
        if first:
            answer.version = answer.versions[0] if answer.versions else version
        if self._text is not None:
            return self._text.feed_all(ids)
        text = choice.get("text") or ""
        answer.text += text
        return [Piece("text", text)] if text else []

    def close(self) -> list[Piece]:
        """The end, or no more of it will come: then its reason stays "cancelled"."""
        if self._text is None:
            return []
        pieces = self._text.close()
        self.completion.text = self._text.text
        return pieces


class Forced:
    """Which tokens the server's calculator has put there: the result behind a call that is not empty."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.specials
        self._ordinary = len(tokenizer.tokens)
        self._call, self._end = special["<|tool_start|>"], special["<|tool_end|>"]
        self._result, self._over = special["<|output_start|>"], special["<|output_end|>"]
        self._length = -1  # tokens of the call under way; -1: there is none
        self._called = self._inside = False

    def feed(self, ids: list[int]) -> list[bool]:
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> bool:
        if self._inside or (self._called and token == self._result):
            self._inside, self._called = token != self._over, False
            return True
        self._called = token == self._end and self._length > 0
        if token == self._call:
            self._length = 0
        elif token >= self._ordinary:
            self._length = -1
        elif self._length >= 0:
            self._length += 1
        return False


def tops_of(row: dict[str, float] | None, count: int) -> list[tuple[int, float]]:
    """{"token_id:7": -0.1} -> [(7, -0.1)], likeliest first; the token that was taken may be in it beyond `count`."""
    found = [(int(name.removeprefix(ID)), value) for name, value in (row or {}).items()]
    return sorted(found, key=lambda one: -one[1])[:count]
