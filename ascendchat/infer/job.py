"""One request on its way through the engine (engine.py): what it has so far, and what is still to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.grammar import Matcher, grammars
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
        """Turn new ids into text; put off, for a batch of hundreds has microseconds per token: see PendingPass."""
        self._fresh += self.text.feed_all(self.completion.ids[self._read :])
        self._read = len(self.completion.ids)

    def add(self, token: int, logprob: float, version: int) -> bool:
        """A token of the model that means nothing but text, the usual case; or False, and nothing has happened."""
        answer = self.completion
        if not self.plain or token in self.watched or len(answer.ids) + 1 >= self.limit:
            return False
        answer.add(token, version)
        if self.request.sampling.logprobs:
            answer.logprobs.append(logprob)
        return True

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self.read()
        self._fresh += self.text.close()
        self.completion.text, self.completion.finish_reason, self.done = self.text.text, reason, True


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


class Crew:
    """Rows that run on, step after step, until one comes to its limit, ends, enters or calls a tool. What steps need to
    know of all of them is found once: with 256 rows, a look at each takes as long as the device's step."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs, self.slots = jobs, [job.slot for job in jobs]
        self.rows, self.mode = max(self.slots) + 1, together(jobs)
        self.longest = max(len(job.request.prompt) + job.launched for job in jobs)  # tokens of a row at the next step
        self.left = min(job.limit - job.launched for job in jobs)  # steps until the first row has its last token
        self.steady = not any(job.forced or job.matcher is not None for job in jobs)

    @cached_property
    def plain(self) -> bool:
        """Whether no row wants more of a token than its text and probability."""
        return all(job.plain and not job.discard for job in self.jobs)

    @cached_property
    def watched(self) -> frozenset[int]:
        """Tokens that mean something in one of the rows."""
        return frozenset().union(*(job.watched for job in self.jobs))

    @cached_property
    def answers(self) -> list[tuple[Completion, int, bool]]:
        """The answer of each row, its slot, and whether it wants probabilities."""
        return [(job.completion, job.slot, job.request.sampling.logprobs) for job in self.jobs]

    def stepped(self) -> bool:
        """A step was launched; whether the next can be launched without a new look at the rows."""
        self.longest, self.left = self.longest + 1, self.left - 1
        return self.steady and self.left > 0

    def take(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> bool:
        """The tokens of a step, by slot, if none of them means more than text."""
        if not self.plain or not self.watched.isdisjoint(ids[: self.rows]):
            return False
        for answer, slot, logged in self.answers:
            answer.add(ids[slot], version)
            if logged:
                answer.logprobs.append(logprobs[slot])
        return True


class PendingPass(NamedTuple):
    """A pass whose result has not been looked at."""

    jobs: Sequence[Job]
    numbers: Sequence[int]  # which pass of each job it is
    columns: Sequence[int]  # of the result
    result: Callable[[], Tensor]  # waits for it: on the host, what Decoder.step returned
    version: int  # of the weights that it ran with
    crew: Crew | None  # of a decoding step

    def read_some(self, all_last: bool) -> None:
        """Text of the rows, of each at every READ_EVERYth pass, and of `all` whose last pass is launched: the device
        works meanwhile, and where many answers end at once it does not wait for all their text."""
        for job in self.jobs[self.numbers[0] % READ_EVERY :: READ_EVERY]:
            job.read()
        for job in self.jobs if all_last else ():
            if job.launched == job.limit:
                job.read()
