"""Counters of the server: requests, seconds, tokens. Plain numbers, changed in the event loop only."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, field

from ascendchat.serve.worker_messages import Chunk

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _Histogram:
    """Counts of values between bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus wants them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class _Numbers:
    """All of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (route, status)
        self.request_seconds: dict[str, _Histogram] = defaultdict(lambda: _Histogram(SECONDS))  # by route
        self.first_token, self.gap = _Histogram(SECONDS), _Histogram(GAPS)
        self.prompt = self.generated = self.cached = 0  # tokens


NUMBERS = _Numbers()


@dataclass
class RequestTally:
    """Tokens of one HTTP request so far, for its line in the access log."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    text: list[str] | None = field(default=None)  # of the answer, kept when messages are logged


TALLY: ContextVar[RequestTally | None] = ContextVar("tally", default=None)  # of the request that is being answered


class Meter:
    """Counts one answer while it comes."""

    def __init__(self, prompt_tokens: int) -> None:
        self.tally = TALLY.get() or RequestTally()
        self.since, self.last, self.cached = time.monotonic(), 0.0, 0
        NUMBERS.prompt += prompt_tokens
        self.tally.prompt += prompt_tokens

    def chunk(self, chunk: Chunk) -> None:
        """Its tokens have come now; the gap of tokens that come together is their share of the time since the last."""
        now, count = time.monotonic(), len(chunk.ids)
        if count:
            if self.last:
                NUMBERS.gap.observe((now - self.last) / count, count)
            else:
                NUMBERS.first_token.observe(now - self.since)
            self.last = now
        NUMBERS.generated += count
        self.tally.completion += count
        NUMBERS.cached += chunk.cached_tokens - self.cached
        self.tally.cached += chunk.cached_tokens - self.cached
        self.cached = chunk.cached_tokens
        if self.tally.text is not None:
            self.tally.text += [piece.text for piece in chunk.pieces]


def request(route: str, status: int, seconds: float) -> None:
    """A request has been answered, with `route` as the application spells it or "other" (never what a client sent)."""
    NUMBERS.requests[route, str(status)] += 1
    NUMBERS.request_seconds[route].observe(seconds)
