"""Requests to one server over HTTP: retries, deadlines, errors. client.py uses it.

    http = HTTPClient(url, api_key="", concurrency=256, timeout=900.0, patience=120.0)
    await http.ask("POST", "/v1/completions", json=body)             # one attempt
    await http.retry(lambda: http.ask(...))                          # as many as patience allows

Every wait has a deadline. Only what can be repeated without harm is repeated, and the caller says so by `retry`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import httpx

from ascendchat.errors import UserError

FIRST_PAUSE, MAX_PAUSE = 0.25, 10.0  # seconds between two attempts; doubled each time
MAX_RETRY_AFTER = 60.0  # seconds that a server may ask us to wait

Result = TypeVar("Result")


class RetryLater(Exception):
    """An attempt failed, and another may succeed: `after` so many seconds, if the server has said."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class NoAnswer(UserError):
    """The server was missing or busy for as long as it was retried."""


class NoRoute(UserError):
    """The server has no such route."""


class HTTPClient:
    """The connections to one server. Answers and commands have separate ones, so that a /resume is never queued behind
    answers that wait for it."""

    def __init__(self, url: str, api_key: str, concurrency: int, timeout: float, patience: float) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.timeout, self.patience = timeout, patience
        settings: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "trust_env": False,  # a proxy for downloads is not the way to a server of one's own
        }
        limits = httpx.Limits(max_connections=concurrency + 1)
        self._answers = httpx.AsyncClient(**settings, timeout=httpx.Timeout(timeout, connect=30.0), limits=limits)
        self._commands = httpx.AsyncClient(**settings, timeout=httpx.Timeout(30.0))
        where = self._answers.base_url
        self.host, self.port = where.host, where.port or (443 if where.scheme == "https" else 80)

    async def ask(self, method: str, path: str, **content: Any) -> Any:
        """One attempt at a request for an answer."""
        return content_of(await self._answers.request(method, path, **content))

    async def command(self, method: str, path: str, seconds: float = 30.0, **content: Any) -> Any:
        """One attempt at a command; `seconds` until it is given up."""
        timeout = httpx.Timeout(seconds, connect=30.0)
        response = await asyncio.wait_for(
            self._commands.request(method, path, timeout=timeout, **content), timeout=seconds + 5.0
        )
        return content_of(response)

    async def probe(self, path: str) -> Any:
        """GET a route; None where the server does not have it. Other errors are those of an attempt."""
        try:
            return await self.command("GET", path)
        except NoRoute:
            return None

    async def text(self, path: str) -> str:
        """GET a route that does not speak JSON; "" where there is none."""
        response = await asyncio.wait_for(self._commands.get(path), 35.0)
        return response.text if response.status_code == 200 else ""

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream as they come."""
        async with self._answers.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise error_of(response)
            async for line in response.aiter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise UserError(f"{self.url} gave up an answer: {message_in(event)}")
                    yield event

    async def retry(
        self,
        once: Callable[[], Awaitable[Result]],
        may: Callable[[], bool] = lambda: True,
        patience: float | None = None,
    ) -> Result:
        """Call `once` until it succeeds, with growing pauses, for `patience` seconds and while it `may` be repeated."""
        end = time.monotonic() + (self.patience if patience is None else patience)
        for attempt in itertools.count():
            after: float | None = None
            try:
                return await once()
            except RetryLater as error:
                reason, after = str(error), error.after
            except (httpx.TransportError, asyncio.TimeoutError) as error:
                reason = str(error) or type(error).__name__
            except (json.JSONDecodeError, LookupError, TypeError) as error:
                raise UserError(f"{self.url} does not speak OpenAI's API: {error!r}") from None
            pause = min(MAX_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
            pause = pause if after is None else min(MAX_RETRY_AFTER, after)
            if not may() or time.monotonic() + pause > end:
                raise NoAnswer(f"no answer from {self.url}: {reason}; is the server running?")
            await asyncio.sleep(pause)
        raise AssertionError("the attempts have no end")

    async def close(self) -> None:
        await self._answers.aclose()
        await self._commands.aclose()


UNREACHABLE = (RetryLater, httpx.TransportError, asyncio.TimeoutError)  # the server is missing, or cannot answer now
ATTEMPT_ERRORS = (*UNREACHABLE, UserError, ValueError)  # that one attempt may raise


def content_of(response: httpx.Response) -> Any:
    """The JSON of a response, or None if it is empty."""
    if response.status_code != 200:
        raise error_of(response)
    return response.json() if response.content else None


def error_of(response: httpx.Response) -> Exception:
    """The error of a response other than 200: RetryLater, ValueError (bad request), UserError (bad server or key)."""
    status, host = response.status_code, response.request.url.host
    try:
        message = message_in(response.json())
    except (ValueError, AttributeError):
        message = ""
    message = message or f"status {status} for {response.request.url.path}"
    if status == 429 or status >= 500:
        after = response.headers.get("Retry-After", "")
        return RetryLater(message, float(after) if after.isdigit() else None)
    if status in (400, 413, 422):
        return ValueError(message)
    if status in (401, 403):
        return UserError(f"{host} refuses us: {message}; give an API key that it knows")
    if status in (404, 405):
        return NoRoute(f"{host} cannot do this: {message}")
    return UserError(f"{host} cannot do this: {message}")


def message_in(content: dict[str, Any]) -> str:
    """The message in an error of OpenAI's form, FastAPI's, or vLLM's development routes."""
    error = content.get("error") or content.get("detail") or ""
    return str(error.get("message", "") if isinstance(error, dict) else error)
