"""One request on its way through the engine (engine.py): what it has so far, and what is still to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.batch_state import Ints, Rows, Sheet
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.grammar import Matcher, grammars
from ascendchat.engine.prefix import as_tokens, head_of
from ascendchat.engine.reading import UNDECIDED
from ascendchat.engine.request import Completion, Piece, Request
from ascendchat.engine.sampling import Mode, mode_of


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
        self.request, self._answer = request, Completion(version=version)
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
        self.sheet: Sheet | None = None  # while it has a slot
        self.tokens = as_tokens(request.prompt)
        self.salt = request.salt
        self.head = head_of(self.tokens, self.salt)
        self.cached = UNDECIDED  # tokens of the prompt that are in its slot
        self._launched = 0  # when it is over
        self.forced: deque[int] = deque()  # tokens of a tool's result still to be put in
        self.force_from = 0  # pass whose input is the first of them
        self.discard = 0  # coming results that forced tokens replace
        self.done = False
        self._fresh: list[Piece] = []
        self._read = 0  # ids that have become text

    def begin(self, cached: int) -> None:
        """Its prompt will be read behind so many tokens that the cache has."""
        self.cached = self._answer.cached_tokens = cached

    def take(self) -> list[Piece]:
        """The text that came since the last call."""
        self.read()
        fresh, self._fresh = self._fresh, []
        return fresh

    def enter(self, sheet: Sheet) -> None:
        """It has a slot."""
        self.sheet, bound = sheet, self.matcher is not None
        sheet.enter(self.slot, len(self.tokens), self.limit, self.mode.bits, self.watched, bound=bound)
        self.mark()

    def mark(self) -> None:
        """Say whether its coming tokens need a look."""
        if self.sheet is not None:
            self.sheet.forced[self.slot] = bool(self.forced)
            self.sheet.plain[self.slot] = self.plain and not self.forced and not self.discard

    @property
    def launched(self) -> int:
        """Passes that will bring a token of this row: the prompt's is the first."""
        return self._launched if self.sheet is None else int(self.sheet.launched[self.slot])

    @property
    def completion(self) -> Completion:
        """The answer, with all tokens that are known."""
        answer, sheet, slot = self._answer, self.sheet, self.slot
        if sheet is not None and (have := len(answer.ids)) < (known := int(sheet.written[slot])):
            answer.ids += sheet.ids[slot, have:known].tolist()
            answer.versions += sheet.versions[slot, have:known].tolist()
            answer.forced += [False] * (known - have)
            if self.request.sampling.logprobs:
                answer.logprobs += sheet.logprobs[slot, have:known].tolist()
        return answer

    def add(self, token: int, version: int, forced: bool) -> None:
        """The next token of the answer."""
        answer, sheet = self.completion, self.sheet
        if sheet is not None:
            sheet.ids[self.slot, len(answer.ids)] = token
            sheet.written[self.slot] = len(answer.ids) + 1
        answer.add(token, version, forced)

    def read(self) -> None:
        """Turn new ids into text; put off, for a batch of hundreds has microseconds per token: see Sheet.to_read."""
        ids = self.completion.ids
        if self._read < len(ids):
            self._fresh += self.text.feed_all(ids[self._read :])
            self._read = len(ids)

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self.read()
        self._fresh += self.text.close()
        self._answer.text, self._answer.finish_reason, self.done = self.text.text, reason, True
        if self.sheet is not None:
            self._launched = self.launched
            self.sheet.leave(self.slot)
            self.sheet = None


def together(jobs: Sequence[Job]) -> Mode:
    """What at least one of the rows needs."""
    return Mode(*(any(column) for column in zip(*{job.mode for job in jobs})))


def allowed_next(jobs: Sequence[Job], tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """(jobs, V) bool: what each may choose next, by its grammar and its allowed_tokens."""
    if any(job.matcher is not None for job in jobs):
        left = [job.limit - len(job.completion.ids) for job in jobs]
        allowed = grammars(tokenizer).allowed([job.matcher for job in jobs], left)
    else:
        allowed = np.ones((len(jobs), vocab), dtype=np.bool_)
    for row, job in zip(allowed, jobs):
        if job.allowed is not None:
            row &= job.allowed
    return allowed


class PendingPass(NamedTuple):
    """A pass whose result has not been looked at."""

    rows: Rows
    columns: Ints | None  # of the result; None: the slots
    result: Callable[[], Tensor]  # waits for it: on the host, what Decoder.step returned
    version: int  # of the weights that it ran with
