"""From generated tokens to text, one at a time: whole characters only, stop texts found across token borders.

    stream = TextStream(tokenizer, stop=("END",))
    pieces = stream.feed(token)      # may be empty while a character or a stop text may still be under way
    pieces = stream.close()

engine.py feeds it, so every answer of `ascendchat chat` goes through here.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Piece

Kind = Literal["text", "tool", "output"]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class TextStream:
    """The text of one answer as it grows."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        special = tokenizer.specials
        self.tokens, self.stop = tokenizer.tokens, tuple(stop)
        self.opens: dict[int, Kind] = {special["<|tool_start|>"]: "tool", special["<|output_start|>"]: "output"}
        self.kind: Kind = "text"
        self.text = ""  # visible text so far, what is held back not included
        self.call = ""  # text of the tool call under way
        self.stopped = False
        self._waiting = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> list[Piece]:
        """Add a token; the pieces that can be shown now."""
        if token < len(self.tokens):
            return self._add(self._decoder.decode(self.tokens[token]))
        pieces = self._end_of_span()
        self.kind = self.opens.get(token, "text")
        if self.kind == "tool":
            self.call = ""
        return pieces

    def feed_all(self, tokens: Sequence[int]) -> list[Piece]:
        """Add many tokens at once, in as few pieces as there are spans."""
        pieces: list[Piece] = []
        start, ordinary = 0, len(self.tokens)
        if tokens and max(tokens) < ordinary:
            return self._add(self._decoder.decode(b"".join(map(self.tokens.__getitem__, tokens))))
        for at in [*(i for i, token in enumerate(tokens) if token >= ordinary), len(tokens)]:
            if start < at:
                pieces += self._add(self._decoder.decode(b"".join([self.tokens[token] for token in tokens[start:at]])))
            if at < len(tokens):
                pieces += self.feed(tokens[at])
            start = at + 1
        return pieces

    def close(self) -> list[Piece]:
        """End the answer; the pieces that were held back."""
        return [] if self.stopped else self._end_of_span()

    def _end_of_span(self) -> list[Piece]:
        """End a span, at a special token or the end: an unfinished character is replaced, nothing waits any longer."""
        if not self._waiting and not self._decoder.getstate()[0]:
            return []
        pieces = self._add(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        if self._waiting and not self.stopped:
            pieces.append(Piece("text", self._waiting))
            self.text += self._waiting
        self._waiting = ""
        return pieces

    def _add(self, text: str) -> list[Piece]:
        if self.stopped or not text:
            return []
        if self.kind != "text":
            self.call += text if self.kind == "tool" else ""
            return [Piece(self.kind, text)]
        if not self.stop:
            self.text += text
            return [Piece("text", text)]
        waiting = self._waiting + text
        stops_at = [place for stop in self.stop if (place := waiting.find(stop)) >= 0]
        self.stopped = bool(stops_at)
        cut = min(stops_at) if stops_at else len(waiting) - held_back(waiting, self.stop)
        shown, self._waiting = waiting[:cut], "" if stops_at else waiting[cut:]
        self.text += shown
        return [Piece("text", shown)] if shown else []
