"""What the API says of single tokens: their text, bytes and log-probabilities.

report = TokenReport(tokenizer, everything=False, held=bool(stop))
rows = report.feed(part)                 # a Row for each token that is part of the text now
chat_logprobs(tokenizer, rows)           # as in chat completions; text_logprobs as in text completions
"""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.serve.messages import Part

LEAST = -9999.0  # instead of minus infinity, which JSON does not have


class Row(NamedTuple):
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
        self._waiting: deque[tuple[int, Row]] = deque()  # with the bytes of text before each

    def feed(self, part: Part) -> list[Row]:
        """The rows that can be shown with this part."""
        for at, token in enumerate(part.ids):
            if token >= len(self.tokens):
                self._text = token not in self._opens
            if self.everything or (self._text and token < len(self.tokens)):
                tops = part.tops[at] if part.tops else ()
                self._waiting.append((self._bytes, Row(token, part.logprobs[at], tops, self._offset)))
            if self._text and token < len(self.tokens):
                self._bytes += len(self.tokens[token])
                self._offset += len(self._decoder.decode(self.tokens[token]))
        self._shown += sum(len(piece.text.encode()) for piece in part.pieces if piece.kind == "text")
        rows = []
        while self._waiting and (not self.held or self._waiting[0][0] < self._shown):
            rows.append(self._waiting.popleft()[1])
        return rows


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """A special token is written by its name."""
    return tokenizer.tokens[token] if token < len(tokenizer.tokens) else tokenizer.decode_bytes([token])


def number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[Row]) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": number(logprob), "bytes": list(raw)}

    content = [{**entry(row.id, row.logprob or 0.0), "top_logprobs": [entry(*top) for top in row.tops]} for row in rows]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, rows: Sequence[Row], as_ids: bool = False) -> dict[str, Any]:
    """The `logprobs` of a text completion's choice; half a character is written as bytes:\\xe4."""

    def name(token: int) -> str:
        if as_ids:
            return f"token_id:{token}"
        raw = token_bytes(tokenizer, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def tops(row: Row) -> dict[str, float] | None:
        if not row.tops:
            return None
        found = {name(token): number(logprob) for token, logprob in row.tops}
        return found if row.logprob is None else {name(row.id): number(row.logprob), **found}

    return {
        "tokens": [name(row.id) for row in rows],
        "token_logprobs": [None if row.logprob is None else number(row.logprob) for row in rows],
        "top_logprobs": [tops(row) for row in rows] if any(row.tops for row in rows) else None,
        "text_offset": [row.offset for row in rows],
    }
