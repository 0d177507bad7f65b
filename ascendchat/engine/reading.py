"""Prompts on their way into the cache: who begins where, and what the next pass reads. Host only; engine.py uses it.

    reading.enter(job, free, top)               # gives the job a slot
    reading.begin(free)                         # whoever need not wait for another begins behind what the cache has
    reading.next_pass(left, whole)              # -> [Part, ...], the prompts or pieces of prompts of one pass

First come, first served: slots are given in that order, and the first of the list is in every pass. A prompt that
shares a long beginning with one before it waits until that has been read, and then goes on behind a copy: so of n
samples of one prompt, or of prompts with one system message, the common part is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ascendchat.engine.padding import padded_length
from ascendchat.engine.prefix import BLOCK, LEAST_REUSE, Copy, Hit, Prefixes, Tokens

PASS_TOKENS = 16384  # of one pass over prompts, padding included
UNDECIDED = -1  # `cached` of a job that waits for another's prompt


class Entrant(Protocol):
    """What is to be known of a request."""

    slot: int
    tokens: Tokens  # its prompt
    salt: str  # it goes on behind prompts of the same one only
    head: bytes  # of the tokens and the salt, see prefix.head_of
    cached: int  # tokens of the prompt that are in its slot, or UNDECIDED

    def begin(self, cached: int) -> None:
        """It will be read behind so many tokens."""


class Part(NamedTuple):
    """Read the tokens of a prompt from start to end - 1."""

    job: Any
    start: int
    end: int


class Reading:
    """The requests that have a slot and whose prompts are not read to the end, in the order in which they came."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self.jobs: list[Entrant] = []
        self.copies: list[list[Copy]] = []  # to be done before the next pass, in this order

    def enter(self, job: Entrant, free: Sequence[int], top: int) -> None:
        """Give the job one of the free slots; `top` is the highest slot that is busy, or -1."""
        hit = self.prefixes.find(job.tokens, job.salt)
        job.slot = self.prefixes.choose(hit, free, top)
        self._begin(job, hit, self.jobs, free)
        if job.cached == UNDECIDED:  # what lies in its slot must be out of the way
            self._copy(self.prefixes.take(job.slot, None, free))
        self.jobs.append(job)

    def begin(self, free: Sequence[int]) -> None:
        """Who waited for a prompt that is read now begins."""
        for number, job in enumerate(self.jobs):
            if job.cached == UNDECIDED:
                self._begin(job, self.prefixes.find(job.tokens, job.salt), self.jobs[:number], free)

    def _begin(self, job: Entrant, hit: Hit | None, before: Sequence[Entrant], free: Sequence[int]) -> None:
        length = 0 if hit is None else hit.length
        for other in before if self.prefixes.may_share(job.tokens) else ():
            if other.head != job.head:
                continue
            begun = max(0, other.cached)
            worth = LEAST_REUSE if begun else BLOCK  # tokens that outweigh a pass more
            if self.prefixes.promised(other.slot, begun, other.tokens, job.tokens, job.salt) >= length + worth:
                return
        self._copy(self.prefixes.take(job.slot, hit, free))
        job.begin(length)

    def _copy(self, copies: list[Copy]) -> None:
        if copies:
            self.copies.append(copies)

    def next_pass(self, left: int, whole: bool) -> list[Part]:
        """Up to `left` tokens, padding included; `whole`: this is all that may be read before the rows that run go on,
        so a prompt with more is cut. Prompts that begin and prompts that go on are read in different passes."""
        parts: list[Part] = []
        width = 0
        for job in self.jobs:
            start, end = job.cached, len(job.tokens)
            if start == UNDECIDED or (parts and bool(start) != bool(parts[0].start)):
                continue
            size = padded_length(end - start)
            if not parts and size > left:
                if not whole:
                    break
                end = min(end, start + max(1, left // 16 * 16))
                return [Part(job, start, end)]
            width = max(width, size)
            if width * (len(parts) + 1) > (min(left, PASS_TOKENS) if parts else left):
                break
            parts.append(Part(job, start, end))
        return parts

    def restart(self) -> None:
        """Other weights: what was read of the prompts, or is to be copied for them, is no longer theirs."""
        self.copies.clear()
        for job in self.jobs:
            job.cached = UNDECIDED

    def done(self, part: Part) -> bool:
        """A part was read; whether it was the last of its prompt."""
        job = part.job
        self.prefixes.read(job.slot, job.tokens, part.start, part.end, job.salt)
        job.cached = part.end
        if part.end < len(job.tokens):
            return False
        self.leave(job)
        return True

    def leave(self, job: Entrant) -> None:
        """A request that is over, however far it came."""
        if job in self.jobs:
            self.jobs.remove(job)
