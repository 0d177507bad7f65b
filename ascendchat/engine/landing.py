"""Brings an answer that must fit a grammar to its end before its tokens run out.

    landing = Landing(tokenizer)
    landing.narrow(matcher, row, left)       # row: (V,) bool, what the grammar allows next; `left` tokens remain

A model that does not know when to close a string would write to its limit, and half a JSON object is of no use. So
when what is left is just enough, only tokens that lead to the end are allowed: quotes, brackets, commas where a
required field is missing. How much is enough is tried out on a copy of the matcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ascendchat.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ascendchat.engine.grammar import Matcher

FAR = 512  # tokens left above which nobody looks
SPARE = 2  # tokens more than the shortest end needs


class Landing:
    """The tokens that lead to an end, of one tokenizer: a single byte is always a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.specials
        self.end, self.tools = special["<|assistant_end|>"], tokenizer.calls_tools
        self.call, self.call_end = special["<|tool_start|>"], special["<|tool_end|>"]
        self.quote, self.brace, self.letter, bracket, comma = (tokenizer.byte_id(byte) for byte in b'"}z],')
        self.closers = [self.brace, bracket, self.quote, comma]

    def narrow(self, matcher: Matcher, row: np.ndarray, left: int) -> None:
        """Take away what leads too far, when it is time."""
        if self.tools and row[self.call] and row[self.end] and left <= FAR:  # text, behind which a call may begin
            if matcher.call_needs is None:
                matcher.call_needs = self.shortest(matcher, FAR, self.call)
            row[self.call] = left - SPARE > matcher.call_needs
        if not matcher.landing and left <= min(matcher.look_at, FAR):
            spare = left - SPARE - self.shortest(matcher, left)
            matcher.landing = spare <= 0
            matcher.look_at = left - max(1, spare // 4)  # a token can make the end longer, by a nested object for one
        if matcher.landing:
            self.steer(row)

    def steer(self, row: np.ndarray) -> None:
        """Leave only what is nearest to the end."""
        if row[self.end]:
            if not row[self.letter]:  # free text may be cut anywhere
                only(row, self.end)
        elif self.tools and row[self.call_end]:
            only(row, self.call_end)
        elif row[self.brace] and row[self.letter]:  # inside a string, which a brace does not end
            if row[self.quote]:
                only(row, self.quote)
        else:
            nearest = next((token for token in self.closers if row[token]), None)
            if nearest is not None:
                only(row, nearest)

    def shortest(self, matcher: Matcher, most: int, first: int | None = None) -> int:
        """Tokens to the end from here, or from behind a `first` one, as `steer` goes; `most` if they do not suffice."""
        inner = matcher.inner.deep_copy()
        if first is not None:
            inner.consume_token(first)
        for count in range(most):
            if inner.is_stopped() or inner.is_accepting():
                return count
            row = np.unpackbits(np.frombuffer(inner.compute_bitmask(), np.uint8), bitorder="little").view(np.bool_)
            self.steer(row)
            if not row.any() or not inner.consume_token(int(row.argmax())):
                return most
        return most


def only(row: np.ndarray, token: int) -> None:
    row[:] = False
    row[token] = True
