"""One request on its way through the engine (engine.py): what it has so far, and what is still to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.grammar import Matcher
from ascendchat.infer.prefix import as_tokens, head_of
from ascendchat.infer.reading import UNDECIDED
from ascendchat.infer.request import Completion, Piece, Request
from ascendchat.infer.sampling import Mode, mode_of
from ascendchat.infer.text import TextStream

READ_EVERY = 16  # passes


class Job:
    """One request on its way. `allowed`: (V,) bool of its allowed_tokens; `matcher`: of its grammar."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        context: int,
        version: int,
        allowed: np.ndarray | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        sampling, special = request.sampling, tokenizer.specials
        self.request, self.completion = request, Completion(version=version)
        self.text = TextStream(tokenizer, sampling.stop)
        self.limit = min(sampling.max_tokens, context - len(request.prompt))  # tokens to generate at most
        self.mode = mode_of(sampling)
        self.stops = frozenset(tokenizer.stops if sampling.stop_tokens is None else sampling.stop_tokens)
        self.allowed, self.matcher = allowed, matcher
        if matcher is not None:
            self.stops |= {special["<|assistant_end|>"]}
        self.tools = sampling.tools and matcher is None
        self.watched = self.stops | {special["<|tool_end|>"]}  # tokens that mean something
        self.plain = not sampling.stop and not sampling.top_logprobs and matcher is None  # all others need no look
        self.slot = -1
        self.tokens = as_tokens(request.prompt)
        self.head = head_of(self.tokens)
        self.cached = UNDECIDED  # tokens of the prompt that are in its slot
        self.launched = 0  # passes that will bring a token of this row: the prompt's is the first
        self.forced: deque[int] = deque()  # tokens of a tool's result still to be put in
        self.force_from = 0  # pass whose input is the first of them
        self.discard = 0  # coming results that forced tokens replace
        self.done = False
        self._fresh: list[Piece] = []
        self._read = 0  # ids that have become text

    def begin(self, cached: int) -> None:
        """Its prompt will be read behind so many tokens that the cache has."""
        self.cached = self.completion.cached_tokens = cached

    def take(self) -> list[Piece]:
        """The text that came since the last call."""
        self.read()
        fresh, self._fresh = self._fresh, []
        return fresh

    def read(self) -> None:
        """Turn new ids into text; put off, for a batch of hundreds has microseconds per token: see read_some."""
        self._fresh += self.text.feed_all(self.completion.ids[self._read :])
        self._read = len(self.completion.ids)

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self.read()
        self._fresh += self.text.close()
        self.completion.text, self.completion.finish_reason, self.done = self.text.text, reason, True


def together(jobs: Sequence[Job]) -> Mode:
    """What at least one of the rows needs."""
    return Mode(*(any(column) for column in zip(*{job.mode for job in jobs})))


def read_some(rows: Sequence[tuple[Job, int, int]]) -> None:
    """Text of the rows of a PendingPass, of each at every READ_EVERYth pass: the device works meanwhile, and where many
    answers end at once it does not wait for all their text."""
    for job, _, _ in rows[rows[0][1] % READ_EVERY :: READ_EVERY]:
        job.read()


class PendingPass(NamedTuple):
    """A pass whose result has not been looked at: (job, its pass number, column), and how to wait for it."""

    rows: list[tuple[Job, int, int]]
    result: Callable[[], Tensor]  # on the host: what Decoder.step returned
    version: int  # of the weights that it ran with
