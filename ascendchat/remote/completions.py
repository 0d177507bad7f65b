"""JSON of /v1/completions to and from our Request and Completion; how a cut answer is continued. client.py uses it.

body_of(request, model, context, tokenizer, ours)      # what is posted
answer = PartialAnswer(request, tokenizer, ours)
answer.begin(version); answer.take(event); answer.close(); answer.completion
answer.continue_answer(context)                        # the request for the rest, after an interruption
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.request import Completion, Piece, Request

ID = "token_id:"  # how `return_tokens_as_token_ids` writes a token
NO_PROBABILITY = -9999.0  # what vLLM writes for minus infinity


class Unusable(Exception):
    """An answer that a trainer must not learn from; the text says why."""


def stops_of(request: Request, tokenizer: Tokenizer | None) -> tuple[int, ...] | None:
    """The tokens that end an answer; None: the server chooses them."""
    named = request.sampling.stop_tokens
    if named is not None or tokenizer is None:
        return named
    return tokenizer.stops


def body_of(request: Request, model: str, context: int, tokenizer: Tokenizer | None, ours: bool) -> dict[str, Any]:
    """The request as JSON of OpenAI's API with vLLM's fields; a ValueError if it cannot be expressed so."""
    sampling, room = request.sampling, context - len(request.prompt)
    if not request.prompt:
        raise ValueError("a prompt needs at least one token")
    if room < 1:
        raise ValueError(f"a prompt of {len(request.prompt)} tokens leaves no room for an answer in {context}")
    if (
        not ours
        and tokenizer is not None
        and not 0 <= min(request.prompt) <= max(request.prompt) < tokenizer.vocab_size
    ):
        # vLLM 0.32 without a tokenizer of its own does not check this, and its engine dies
        raise ValueError(f"token ids end at {tokenizer.vocab_size - 1}, found {max(request.prompt)}")
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
    if sampling.processed_logprobs and ours:  # vLLM is started so: --logprobs-mode processed_logprobs
        body["processed_logprobs"] = True
    if sampling.top_logprobs or (sampling.logprobs and not ours):
        body["return_tokens_as_token_ids"] = True
    if sampling.allowed_tokens:
        body["allowed_token_ids"] = list(sampling.allowed_tokens)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if ours:
        body["calculator"] = sampling.tools
        if sampling.keep_stop:
            body["keep_stop"] = True
    return body


class PartialAnswer:
    """Builds one Completion from events of a stream, a whole answer, or several parts of an interrupted one."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, ours: bool, version: int = 0) -> None:
        self.request, self.version, self.tokenizer, self.ours = request, version, tokenizer, ours
        self.completion = Completion(version=version, finish_reason="cancelled")
        self._stops = frozenset(stops_of(request, tokenizer) or ())
        self._restart()

    def _restart(self) -> None:
        """Start detokenizing and the search for calculator results at the first token."""
        text, sampling = self.tokenizer, self.request.sampling
        self._text = TextStream(text, sampling.stop) if text else None
        self._forced = ForcedTokens(text) if text and self.ours and sampling.tools else None

    # ---- interruptions -------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """The next tokens are requested now, of these weights."""
        self.version = version

    @property
    def finished(self) -> bool:
        """True if the model ended it or its tokens are used up; a fragment is not finished."""
        return self.completion.finish_reason != "cancelled"

    def continue_answer(self, context: int) -> Request | None:
        """The request for the rest: the prompt with what was written so far, fewer tokens, the same stops. None: it was
        cut at its very end, and is finished. It is never cut within a calculator call: what was written of one is
        dropped and written again, since a server that is given half a call as its prompt would not run it.

        Our own engine's noise is a hash of seed and position, so the same seed goes on as if nothing had happened.
        Other servers begin their noise anew with every request: the same seed would repeat the noise that chose the
        first tokens, so the seed of a later part follows from the seed and the position."""
        answer, sampling = self.completion, self.request.sampling
        if self._forced is not None and self._forced.midway:
            self._truncate(last_index(answer.ids, self._forced.call))
        written = len(answer.ids)
        if not written:
            return self.request
        if answer.ids[-1] in self._stops:
            answer.finish_reason = "stop"
            return None
        left = min(sampling.max_tokens, context - len(self.request.prompt)) - written
        if left < 1:
            answer.finish_reason = "length"
            return None
        seed = sampling.seed
        if not self.ours:
            seed = int.from_bytes(hashlib.sha256(f"{seed} {written}".encode()).digest()[:7], "big")
        return Request([*self.request.prompt, *answer.ids], replace(sampling, max_tokens=left, seed=seed))

    def _truncate(self, length: int) -> None:
        """Drop all tokens but the first `length`."""
        answer = self.completion
        for column in (answer.ids, answer.logprobs, answer.forced, answer.versions, answer.tops):
            del column[length:]  # type: ignore[attr-defined]
        self._restart()
        if self._forced is not None:
            self._forced.feed(answer.ids)
        if self._text is not None:
            self._text.feed_all(answer.ids)

    # ---- what comes ----------------------------------------------------------------------------

    def take(self, event: dict[str, Any], whole: bool = False) -> list[Piece]:
        """Add an event; the new pieces. A `whole` answer is checked first: if it is Unusable, nothing is added."""
        choices = event.get("choices") or ()
        if whole:
            if not choices:
                raise Unusable("an answer without a choice")
            for choice in choices:
                self._check(choice)
        usage, answer = event.get("usage") or {}, self.completion
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or answer.cached_tokens
        pieces: list[Piece] = []
        for choice in choices:
            pieces += self._choice(choice)
        return pieces

    def _check(self, choice: dict[str, Any]) -> None:
        """Raise Unusable for a choice that a trainer cannot learn from."""
        ids, named = tokens_of(choice), (choice.get("logprobs") or {}).get("tokens") or []
        if choice.get("text") and not ids:
            raise Unusable("text without token ids")
        if named and all(str(name).startswith(ID) for name in named) and [f"{ID}{token}" for token in ids] != named:
            raise Unusable("its token ids are not those of its log-probabilities")
        if not self.request.sampling.logprobs:
            return
        values = list((choice.get("logprobs") or {}).get("token_logprobs") or ())
        if len(values) != len(ids):
            raise Unusable(f"{len(values)} log-probabilities for {len(ids)} tokens")
        for value in values:
            if value is None and self._forced is not None:
                continue  # put there by a calculator
            if value is None or math.isnan(value) or value <= NO_PROBABILITY or value > 1e-3:
                raise Unusable(f"the log-probability {value} of a token that was chosen")

    def _choice(self, choice: dict[str, Any]) -> list[Piece]:
        answer, sampling, ids = self.completion, self.request.sampling, tokens_of(choice)
        reason, logprobs = choice.get("finish_reason"), choice.get("logprobs") or {}
        own = choice.get("ascendchat") or {}
        if reason and own.get("timed_out"):
            answer.finish_reason = "cancelled"
        elif reason:
            answer.finish_reason = reason if reason in ("stop", "length") else "cancelled"
        if reason == "stop" and ids and ids[-1] in self._stops and not sampling.keep_stop:
            ids.pop()  # other servers count it to the answer
        if sampling.stop and self._text is not None and answer.ids:
            ids = self._until_stopped(ids)
        first = not answer.ids
        answer.ids += ids
        answer.forced += [False] * len(ids) if self._forced is None else self._forced.feed(ids)
        if sampling.logprobs:
            answer.logprobs += list(logprobs.get("token_logprobs") or ())
            del answer.logprobs[len(answer.ids) :]
        if sampling.top_logprobs:
            answer.tops += [tops_of(row, sampling.top_logprobs) for row in logprobs.get("top_logprobs") or ()]
            del answer.tops[len(answer.ids) :]
        version = own.get("weight_version", self.version)
        answer.versions += own.get("weight_versions") or [version] * len(ids)
        del answer.versions[len(answer.ids) :]
        if first:
            answer.version = answer.versions[0] if answer.versions else version
        if self._text is not None:
            return self._text.feed_all(ids)
        text = choice.get("text") or ""
        answer.text += text
        return [Piece("text", text)] if text else []

    def _until_stopped(self, ids: list[int]) -> list[int]:
        """Cut new tokens at a stop text: a server that continues an answer cannot see one that began before."""
        assert self._text is not None
        trial = TextStream(self.tokenizer, self.request.sampling.stop)  # type: ignore[arg-type]
        trial.feed_all(self.completion.ids)
        for at, token in enumerate(ids):
            trial.feed(token)
            if trial.stopped:
                self.completion.finish_reason = "stop"
                return ids[: at + 1]
        return ids

    def close(self) -> list[Piece]:
        """End the text; the last pieces. An unfinished answer keeps the reason "cancelled"."""
        if self._text is None:
            return []
        pieces = self._text.close()
        self.completion.text = self._text.text
        return pieces


class ForcedTokens:
    """Finds the tokens that the server's calculator forced: the result behind a call that is not empty."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.specials
        self._ordinary = len(tokenizer.tokens)
        self.call, self._end = special["<|tool_start|>"], special["<|tool_end|>"]
        self._result, self._over = special["<|output_start|>"], special["<|output_end|>"]
        self._length = -1  # tokens of the call under way; -1: there is none
        self._called = self._inside = False

    @property
    def midway(self) -> bool:
        """True within a call, or before the end of its result."""
        return self._length >= 0 or self._called or self._inside

    def feed(self, ids: list[int]) -> list[bool]:
        """For each of the next tokens: was it forced?"""
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> bool:
        if self._inside or (self._called and token == self._result):
            self._inside, self._called = token != self._over, False
            return True
        self._called = token == self._end and self._length > 0
        if token == self.call:
            self._length = 0
        elif token >= self._ordinary:
            self._length = -1
        elif self._length >= 0:
            self._length += 1
        return False


def tokens_of(choice: dict[str, Any]) -> list[int]:
    """The token ids of a choice: as `return_token_ids` gives them, else as `return_tokens_as_token_ids` does."""
    ids = choice.get("token_ids")
    if ids is None:
        names = [str(name) for name in (choice.get("logprobs") or {}).get("tokens") or ()]
        ids = [int(name.removeprefix(ID)) for name in names if name.startswith(ID)]
    return list(ids)


def last_index(ids: Sequence[int], token: int) -> int:
    """The last index of a token."""
    return len(ids) - 1 - ids[::-1].index(token)


def tops_of(row: dict[str, float] | None, count: int) -> list[tuple[int, float]]:
    """{"token_id:7": -0.1} -> [(7, -0.1)], likeliest first; the token that was taken may be in it beyond `count`."""
    tops = [(int(name.removeprefix(ID)), value) for name, value in (row or {}).items()]
    return sorted(tops, key=lambda one: -one[1])[:count]
