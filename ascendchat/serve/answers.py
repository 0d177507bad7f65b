"""From what the engine says (messages.Chunk) to what OpenAI's clients read: chunks of a stream, or one object.

    answers = ChatAnswers(about, wanted)                   # or TextAnswers
    answers.opening(), answers.chunk(index, chunk), answers.closing()     # bytes of a stream of events
    answers.whole(chunks)                                                # the object of an answer at once

Tens of thousands of tokens per second go through here: all of a chunk that does not change is made once, and only the
text is encoded. Text is escaped to ASCII, since some clients take U+2028 for the end of a line.
"""

from __future__ import annotations

import codecs
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Piece
from ascendchat.serve.pool import joined
from ascendchat.serve.prompts import GenerationRequest
from ascendchat.serve.tools import CallReader, whole_calls
from ascendchat.serve.worker_messages import Chunk

# As other servers call an answer that was cut short from outside; and as OpenAI does, whose clients may know no other.
REASONS = {"cancelled": "abort", "timeout": "length"}


@dataclass(frozen=True)
class About:
    """The server's side of an answer, which all its choices share."""

    model: str
    fingerprint: str
    version: int  # of the weights, where an answer has no token that says it
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: secrets.token_hex(12))


class Choice:
    """The state of one choice of an answer."""

    def __init__(self, about: About, wanted: GenerationRequest, index: int, everything: bool) -> None:
        request = wanted.requests[index]
        sampling = request.sampling
        self.prompt, self.index, self.version = request.prompt, index, about.version
        self.report = None
        if sampling.logprobs:
            self.report = TokenReport(about.tokenizer, everything=everything, held=bool(sampling.stop))
        self.calls = CallReader(about.tokenizer) if wanted.calls else None
        self.plain = self.report is None and self.calls is None and not wanted.token_ids
        self.count = self.cached = 0

    def take(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self.count += len(chunk.ids)
        self.cached = chunk.cached_tokens
        if chunk.versions:
            self.version = chunk.versions[-1]

    def finish(self, chunk: Chunk) -> str:
        """The finish reason in OpenAI's words."""
        if self.calls is not None and self.calls.complete and chunk.finish_reason == "stop":
            return "tool_calls"
        return REASONS.get(chunk.finish_reason, chunk.finish_reason)


def texts(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    if len(pieces) < 2:
        return list(pieces)
    return [
        Piece(kind, "".join(piece.text for piece in run)) for kind, run in groupby(pieces, lambda piece: piece.kind)
    ]


def own_fields(chunk: Chunk, before: int) -> dict[str, Any]:
    """The weights that wrote these tokens: one version, or one for each where they differ; and whether the time of the
    answer was over before its end, since "length" may mean that, too."""
    versions = chunk.versions
    fields: dict[str, Any] = {"weight_version": versions[0] if versions else before}
    if len(set(versions)) > 1:
        fields["weight_versions"] = versions
    if chunk.finish_reason == "timeout":
        fields["timed_out"] = True
    return fields


class _Answers:
    """The common half of chat and text completions."""

    object = stream_object = prefix = ""
    everything = False  # log-probabilities also of tokens that are no text

    def __init__(self, about: About, wanted: GenerationRequest) -> None:
        self.about, self.wanted = about, wanted
        self.choices = [Choice(about, wanted, i, self.everything) for i in range(len(wanted.requests))]
        head = json.dumps(self._head(self.stream_object), separators=(",", ":"))
        self._event = f'data: {head[:-1]},"choices":['.encode()
        self._end = b'}],"usage":null}\n\n' if wanted.include_usage else b"}]}\n\n"
        self._tails: dict[int, bytes] = {}  # by version

    def _head(self, name: str) -> dict[str, Any]:
        about = self.about
        return {
            "id": f"{self.prefix}-{about.key}",
            "object": name,
            "created": about.created,
            "model": about.model,
            "system_fingerprint": about.fingerprint,
        }

    def event(self, choice: Choice, inner: bytes, chunk: Chunk, finish: str | None = None, extra: bytes = b"") -> bytes:
        """One chunk; `inner` is what its choice says, `extra` further fields of it."""
        head = b'%b{"index":%d,%b' % (self._event, choice.index, inner)
        if finish is None and not extra and (not chunk.versions or chunk.versions[0] == chunk.versions[-1]):
            return head + self._tail(choice.version) + self._end
        own = json.dumps({"finish_reason": finish, "ascendchat": own_fields(chunk, choice.version)})
        return b"%b,%b%b%b" % (head, own[1:-1].encode(), extra or b',"logprobs":null', self._end)

    def _tail(self, version: int) -> bytes:
        if version not in self._tails:
            own = f'"logprobs":null,"finish_reason":null,"ascendchat":{{"weight_version":{version}}}'
            self._tails[version] = f",{own}".encode()
        return self._tails[version]

    def extras(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """Log-probabilities and ids of the tokens in a chunk."""
        fields: dict[str, Any] = {}
        if choice.report is not None:
            rows = choice.report.feed(chunk)
            fields["logprobs"] = self.logprobs(rows) if rows else None
        if self.wanted.token_ids:
            fields["token_ids"] = chunk.ids
            if choice.count == len(chunk.ids):  # the first one
                fields["prompt_token_ids"] = list(choice.prompt)
        return fields

    def usage(self) -> dict[str, Any]:
        """Tokens; a prompt counts once, however many answers it has."""
        first = self.choices[:: self.wanted.n]
        prompt, completion = sum(len(choice.prompt) for choice in first), sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in first)},
        }

    def opening(self) -> bytes:
        """Bytes to send before anything else."""
        return b""

    def closing(self) -> bytes:
        """The end of a stream."""
        if not self.wanted.include_usage:
            return b"data: [DONE]\n\n"
        usage = json.dumps(self.usage(), separators=(",", ":")).encode()
        return b'%b],"usage":%b}\n\ndata: [DONE]\n\n' % (self._event, usage)

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The chunks that say what a chunk says."""
        choice = self.choices[index]
        choice.take(chunk)
        inners = self.inners(choice, chunk)
        if choice.plain:
            out = [self.event(choice, inner, chunk) for inner in inners]
        else:
            extras = self.extras(choice, chunk)
            if not inners and (extras.get("logprobs") or extras.get("token_ids")):
                inners = [self.empty]
            extra = (", " + json.dumps(extras)[1:-1]).encode() if extras else b""
            if extra and "logprobs" not in extras:
                extra += b',"logprobs":null'
            out = [self.event(choice, inner, chunk, extra=extra if at == 0 else b"") for at, inner in enumerate(inners)]
        if chunk.finish_reason:
            nothing = chunk._replace(versions=[])
            out.append(self.event(choice, self.empty, nothing, finish=choice.finish(chunk)))
        return b"".join(out)

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """The object of an answer at once."""
        choices = []
        for choice, given in zip(self.choices, chunks):
            chunk = joined(given)
            choice.take(chunk)
            one = self.message(choice, chunk)
            one["finish_reason"] = choice.finish(chunk)
            one["logprobs"] = None
            one.update(self.extras(choice, chunk))
            calculations = [{"kind": p.kind, "text": p.text} for p in texts(chunk.pieces) if p.kind != "text"]
            own = own_fields(chunk, choice.version)
            one["ascendchat"] = {**own, "tool": calculations} if calculations and not choice.calls else own
            choices.append(one)
        return {**self._head(self.object), "choices": choices, "usage": self.usage()}

    # ---- what differs --------------------------------------------------------------------------

    empty = b""

    def inners(self, choice: Choice, chunk: Chunk) -> list[bytes]:
        """The contents of the events for one Chunk, as JSON without braces."""
        raise NotImplementedError

    def message(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """The choice of a whole answer."""
        raise NotImplementedError

    def logprobs(self, rows: Any) -> dict[str, Any]:
        """In the form of this API."""
        raise NotImplementedError


class ChatAnswers(_Answers):
    """Answers of /v1/chat/completions."""

    object, stream_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    empty = b'"delta":{}'

    def opening(self) -> bytes:
        """Every choice says first who speaks."""
        nothing = Chunk(0, [], [], [], [], [])
        inner = b'"delta":{"role":"assistant","content":"","refusal":null}'
        return b"".join(self.event(choice, inner, nothing) for choice in self.choices)

    def inners(self, choice: Choice, chunk: Chunk) -> list[bytes]:
        contents = []
        for kind, text in texts(chunk.pieces):
            if kind == "text":
                contents.append(b'"delta":{"content":%b}' % quoted(text).encode())
            elif choice.calls is None:
                own = {"tool": {"kind": kind, "text": text}}
                contents.append(f'"delta":{{"content":"","ascendchat":{json.dumps(own)}}}'.encode())
        if choice.calls is not None:
            for delta in choice.calls.feed(chunk.ids, over=bool(chunk.finish_reason)):
                contents.append(f'"delta":{{"tool_calls":[{json.dumps(delta.json)}]}}'.encode())
        return contents

    def message(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        text = "".join(piece.text for piece in chunk.pieces if piece.kind == "text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls is not None:
            calls = whole_calls(choice.calls.feed(chunk.ids, over=True))
            if calls:
                message["tool_calls"] = calls
                message["content"] = text or None
        return {"index": choice.index, "message": message}

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        answer = super().whole(chunks)
        if self.wanted.token_ids:  # vLLM's clients look for it here
            answer["prompt_token_ids"] = list(self.choices[0].prompt)
        return answer

    def logprobs(self, rows: Any) -> dict[str, Any]:
        return chat_logprobs(self.about.tokenizer, rows)


class TextAnswers(_Answers):
    """Answers of /v1/completions."""

    object = stream_object = "text_completion"
    prefix = "cmpl"
    everything = True
    empty = b'"text":""'

    def inners(self, choice: Choice, chunk: Chunk) -> list[bytes]:
        text = "".join(piece.text for piece in chunk.pieces if piece.kind == "text")
        return [b'"text":%b' % quoted(text).encode()] if text else []

    def message(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        return {"index": choice.index, "text": "".join(p.text for p in chunk.pieces if p.kind == "text")}

    def logprobs(self, rows: Any) -> dict[str, Any]:
        return text_logprobs(self.about.tokenizer, rows, self.wanted.as_ids)


# What the API says of single tokens: their text, bytes and log-probabilities.
#
# report = TokenReport(tokenizer, everything=False, held=bool(stop))
# rows = report.feed(chunk)                 # a Row for each token that is chunk of the text now
# chat_logprobs(tokenizer, rows)           # as in chat completions; text_logprobs as in text completions

MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have


class _Row(NamedTuple):
    """One token: its id, log-probability (None: put there by the calculator), the likeliest, and where it begins."""

    id: int
    logprob: float | None
    tops: Sequence[tuple[int, float]]
    offset: int  # characters of text before it


class TokenReport:
    """The tokens of one answer.

    `everything`: also those of tool calls and special ones; else only what is text. `held`: the answer has stop texts,
    and a token is reported when its text is shown, so that those of a stop text never are.
    """

    def __init__(self, tokenizer: Tokenizer, *, everything: bool, held: bool) -> None:
        special = tokenizer.specials
        self.tokens, self.everything, self.held = tokenizer.tokens, everything, held
        self._opens = {special["<|tool_start|>"], special["<|output_start|>"]}
        self._text = True  # not inside a call or a result
        self._offset = self._bytes = self._shown = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting: deque[tuple[int, _Row]] = deque()  # with the bytes of text before each

    def feed(self, chunk: Chunk) -> list[_Row]:
        """The rows that can be shown with this chunk."""
        for at, token in enumerate(chunk.ids):
            if token >= len(self.tokens):
                self._text = token not in self._opens
            if self.everything or (self._text and token < len(self.tokens)):
                tops = chunk.tops[at] if chunk.tops else ()
                self._waiting.append((self._bytes, _Row(token, chunk.logprobs[at], tops, self._offset)))
            if self._text and token < len(self.tokens):
                self._bytes += len(self.tokens[token])
                self._offset += len(self._decoder.decode(self.tokens[token]))
        self._shown += sum(len(piece.text.encode()) for piece in chunk.pieces if piece.kind == "text")
        rows = []
        while self._waiting and (not self.held or self._waiting[0][0] < self._shown):
            rows.append(self._waiting.popleft()[1])
        return rows


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """A special token is written by its name."""
    return tokenizer.tokens[token] if token < len(tokenizer.tokens) else tokenizer.decode_bytes([token])


def number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[_Row]) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": number(logprob), "bytes": list(raw)}

    content = [{**entry(row.id, row.logprob or 0.0), "top_logprobs": [entry(*top) for top in row.tops]} for row in rows]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, rows: Sequence[_Row], as_ids: bool = False) -> dict[str, Any]:
    """The `logprobs` of a text completion's choice; half a character is written as bytes:\\xe4."""

    def name(token: int) -> str:
        if as_ids:
            return f"token_id:{token}"
        raw = token_bytes(tokenizer, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def tops(row: _Row) -> dict[str, float] | None:
        if not row.tops:
            return None
        likeliest = {name(token): number(logprob) for token, logprob in row.tops}
        return likeliest if row.logprob is None else {name(row.id): number(row.logprob), **likeliest}

    return {
        "tokens": [name(row.id) for row in rows],
        "token_logprobs": [None if row.logprob is None else number(row.logprob) for row in rows],
        "top_logprobs": [tops(row) for row in rows] if any(row.tops for row in rows) else None,
        "text_offset": [row.offset for row in rows],
    }
