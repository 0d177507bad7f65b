"""What the server counts, and GET /metrics in Prometheus' format.

    metrics.Meter(prompt_tokens)      # one answer of the pool: give it every Part
    metrics.request(route, status, seconds)
    app.include_router(metrics.routes(pool))

The numbers are plain Python ones, changed in the event loop only, so that a token costs no lock; they take the form of
prometheus_client's families when somebody asks for them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ascendchat.serve.messages import Part

if TYPE_CHECKING:
    from ascendchat.serve.pool import Pool

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Histogram:
    """How often a value fell between two bounds."""

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


class Numbers:
    """All of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # (route, status)
        self.request_seconds: dict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))  # by route
        self.first_token, self.gap = Histogram(SECONDS), Histogram(GAPS)
        self.prompt = self.generated = self.cached = 0  # tokens


NUMBERS = Numbers()


@dataclass
class Tally:
    """What one HTTP request has cost so far, for its line in the access log."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    text: list[str] | None = field(default=None)  # of the answer, kept when messages are logged


TALLY: ContextVar[Tally | None] = ContextVar("tally", default=None)  # of the request that is being answered


class Meter:
    """Counts one answer while it comes."""

    def __init__(self, prompt_tokens: int) -> None:
        self.tally = TALLY.get() or Tally()
        self.since, self.last, self.cached = time.monotonic(), 0.0, 0
        NUMBERS.prompt += prompt_tokens
        self.tally.prompt += prompt_tokens

    def part(self, part: Part) -> None:
        """Its tokens have come now; the gap of tokens that come together is their share of the time since the last."""
        now, count = time.monotonic(), len(part.ids)
        if count:
            if self.last:
                NUMBERS.gap.observe((now - self.last) / count, count)
            else:
                NUMBERS.first_token.observe(now - self.since)
            self.last = now
        NUMBERS.generated += count
        self.tally.completion += count
        NUMBERS.cached += part.cached_tokens - self.cached
        self.tally.cached += part.cached_tokens - self.cached
        self.cached = part.cached_tokens
        if self.tally.text is not None:
            self.tally.text += [piece.text for piece in part.pieces]


def request(route: str, status: int, seconds: float) -> None:
    """A request has been answered, with `route` as the application spells it or "other" (never what a client sent)."""
    NUMBERS.requests[route, str(status)] += 1
    NUMBERS.request_seconds[route].observe(seconds)


class Families:
    """The collector: NUMBERS and the state of the pool, read when asked."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("ascendchat_requests", "HTTP requests answered", labels=["route", "status"])
        for labels, count in NUMBERS.requests.items():
            requests.add_metric(labels, count)
        yield requests
        seconds = HistogramMetricFamily("ascendchat_request_seconds", "request to end of answer", labels=["route"])
        for route, histogram in NUMBERS.request_seconds.items():
            seconds.add_metric([route], histogram.buckets(), histogram.total)
        yield seconds
        for name, meaning, histogram in (
            ("first_token", "request to first token", NUMBERS.first_token),
            ("token_gap", "between two tokens of an answer", NUMBERS.gap),
        ):
            yield HistogramMetricFamily(f"ascendchat_{name}_seconds", meaning, histogram.buckets(), histogram.total)
        for name, meaning, count in (
            ("prompt_tokens", "tokens of prompts", NUMBERS.prompt),
            ("generated_tokens", "tokens of answers", NUMBERS.generated),
            ("cached_tokens", "tokens of prompts that were found in the prefix cache", NUMBERS.cached),
            ("worker_restarts", "workers that died and were started again", self.restarts()),
        ):
            yield CounterMetricFamily(f"ascendchat_{name}", meaning, count)
        for name, meaning, value in (
            ("requests_running", "answers under way", sum(len(process.tickets) for process in self.pool.processes)),
            ("requests_waiting", "requests that wait for a slot", len(self.pool.waiting)),
            ("workers_ready", "workers that answer", len(self.pool.ready)),
            ("weight_version", "version of the weights", self.pool.version),
        ):
            yield GaugeMetricFamily(f"ascendchat_{name}", meaning, value)

    def restarts(self) -> int:
        return sum(process.restarts for process in self.pool.processes)


def routes(pool: Pool) -> APIRouter:
    """GET /metrics, and GET /health for load balancers and orchestrators."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(Families(pool))  # type: ignore[arg-type]

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        """The process answers; start it anew if it does not."""
        return {"status": "live"}

    @router.get("/health/ready")
    @router.get("/health")
    async def ready(response: Response) -> dict[str, str | int]:
        """Requests will be answered; send them elsewhere while this is 503."""
        count = len(pool.ready)
        status = "stopping" if pool.closing else "ready" if count else "starting"
        response.status_code = 200 if status == "ready" else 503
        return {"status": status, "workers": count}

    return router
