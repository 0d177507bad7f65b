"""GET /metrics in Prometheus' format: the numbers of counters.py; and GET /health.

    counters.Meter(prompt_tokens)     # one answer of the pool: give it every Chunk
    counters.request(route, status, seconds)
    app.include_router(metrics.routes(pool))

The numbers are plain Python ones, changed in the event loop only, so that a token costs no lock; they take the form of
prometheus_client's families when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ascendchat.serve.counters import NUMBERS

if TYPE_CHECKING:
    from ascendchat.serve.pool import WorkerPool


class _Families:
    """The collector: NUMBERS and the state of the pool, read when asked."""

    def __init__(self, pool: WorkerPool) -> None:
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
            ("requests_running", "answers under way", sum(len(process.requests) for process in self.pool.processes)),
            ("requests_waiting", "requests that wait for a slot", len(self.pool.waiting)),
            ("workers_ready", "workers that answer", len(self.pool.ready)),
            ("weight_version", "version of the weights", self.pool.version),
        ):
            yield GaugeMetricFamily(f"ascendchat_{name}", meaning, value)

    def restarts(self) -> int:
        return sum(process.restarts for process in self.pool.processes)


def routes(pool: WorkerPool) -> APIRouter:
    """GET /metrics, and GET /health for load balancers and orchestrators."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(_Families(pool))  # type: ignore[arg-type]

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
