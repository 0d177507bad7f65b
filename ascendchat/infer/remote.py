"""A Generator over HTTP: a server of ours, or another with OpenAI's API and vLLM's additions to it.

    with Remote.open("http://127.0.0.1:8000", api_key=key, tokenizer=tokenizer) as generator:
        answers = generator.generate([Request(prompt, Sampling(seed=1)), ...])     # all at the same time
        with closing(generator.stream(request)) as stream: ...
        generator.load(model.state_dict(), version=12)                            # `ascendchat serve --weight-updates`

Prompts and answers are token ids on both sides of the connection: text is never tokenized again. With a tokenizer the
text is made of the ids here, as the engine does it; without one it is what the server wrote. A server that is busy, or
gone for a while, is asked again after a pause; what can be mended by nobody else is a UserError. Other servers run no
calculator. All waiting is done by one event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import random
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any, TypeVar

import httpx

from ascendchat.checkpoint import write_weights
from ascendchat.config import UserError
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.answer import Answer, body_of
from ascendchat.infer.generator import Weights
from ascendchat.infer.request import Completion, Piece, Request

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds between two attempts; doubled each time
LONGEST_RETRY_AFTER = 60.0  # seconds that a server may ask us to wait
BUSY = (429, 502, 503, 504)
CHUNK = 1 << 20  # bytes of weights sent at a time
PATH = "/v1/completions"

Result = TypeVar("Result")


class Again(Exception):
    """This attempt failed, and another may not: `after` so many seconds, if the server has said."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Remote:
    """A Generator in another process or on another machine. Several threads may use it."""

    elsewhere = True

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        tokenizer: Tokenizer | None = None,
        concurrency: int = 256,
        timeout: float = 900.0,
        patience: float = 120.0,
    ) -> None:
        """`concurrency`: requests under way at once. `timeout`: seconds for an answer, pauses of the server included.
        `patience`: seconds for which a busy or missing server is asked again."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self.tokenizer, self.patience = tokenizer, patience
        self.model, self.context, self.ours, self.version = "", 0, False, 0
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(concurrency)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=30.0),
            limits=httpx.Limits(max_connections=concurrency + 1),
            trust_env=False,  # a proxy for downloads is not the way to a server of one's own
        )

    @classmethod
    def open(cls, url: str, **settings: Any) -> Remote:
        """Connect, and ask which model is there."""
        remote = cls(url, **settings)
        threading.Thread(target=remote._loop.run_forever, name="remote generator", daemon=True).start()
        try:
            remote._wait(remote._meet())
        except BaseException:
            remote.close()
            raise
        return remote

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request under way, and the thread."""
        if not self._loop.is_closed() and self._loop.is_running():
            self._wait(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- the Generator -------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests. After an error none is left under way."""
        bodies = [self._body(request) for request in requests]
        return self._wait(self._all([self._one(*pair) for pair in zip(requests, bodies)]))

    def stream(self, request: Request) -> RemoteStream:
        """One answer as it comes."""
        return RemoteStream(self, request, self._body(request))

    def load(self, weights: Weights, version: int, *, interrupt: bool = False) -> None:
        """Answer with these weights from now on; see Generator.load. Only our own server takes them like this."""
        if not self.ours:
            raise UserError(f"{self.url} is not a server of ascendchat: it takes no weights from here")
        with tempfile.TemporaryDirectory(prefix="ascendchat-") as folder:
            file = Path(folder) / "weights.safetensors"
            write_weights(file, weights)
            if interrupt:
                self._wait(self._again(lambda: self._ask("POST", "/pause?mode=keep")))
            try:
                self._wait(self._load(file, version))
            finally:
                if interrupt:
                    self._wait(self._again(lambda: self._ask("POST", "/resume")))
        self.version = version

    def renew(self, version: int) -> None:
        """Another process has loaded new weights there."""
        self.version = version

    # ---- in the event loop ---------------------------------------------------------------------

    async def _meet(self) -> None:
        """The first model of the server: its name, its context, whether the server is one of ours."""
        card = (await self._again(lambda: self._ask("GET", "/v1/models")))["data"][0]
        self.model, self.ours = str(card["id"]), "ascendchat" in card
        own = card.get("ascendchat") or {}
        self.context = int(card.get("max_model_len") or own.get("context") or 0)
        self.version = int(own.get("version") or 0)
        if not self.context:
            raise UserError(f"{self.url} does not say how long the context of its model is: it is no server for this")

    async def _one(self, request: Request, body: dict[str, Any]) -> Completion:
        async with self._room:
            reply = await self._again(lambda: self._ask("POST", PATH, json=body))
        answer = Answer(request, self.tokenizer, self.ours, self.version)
        answer.take(reply)
        answer.close()
        self._seen(answer.completion)
        return answer.completion

    async def _pieces(self, body: dict[str, Any], put: Callable[[Any], None]) -> None:
        """Every event of one answer to `put`; None at the end, or the error."""
        begun = False

        async def once() -> None:
            nonlocal begun
            content = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async with self._client.stream("POST", PATH, json=content) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise refused(response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                        continue
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise UserError(f"{self.url} gave up an answer: {message_in(event)}")
                    begun = True
                    put(event)
            if not begun:
                raise UserError(f"{self.url} does not speak OpenAI's API: a stream without a single event")

        try:
            async with self._room:
                await self._again(once, lambda: not begun)
            put(None)
        except Exception as error:  # noqa: BLE001 (raised where the pieces are read)
            put(error)

    async def _load(self, file: Path, version: int) -> None:
        async def content() -> AsyncIterator[bytes]:
            with open(file, "rb") as opened:
                while chunk := opened.read(CHUNK):
                    yield chunk

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(file.stat().st_size)}
        path = f"/update_weights?version={version}"
        await self._again(lambda: self._ask("POST", path, content=content(), headers=headers))

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        response = await self._client.request(method, path, **content)
        if response.status_code != 200:
            raise refused(response)
        return response.json()

    async def _again(self, once: Callable[[], Awaitable[Result]], may: Callable[[], bool] = lambda: True) -> Result:
        """What `once` returns, after as many attempts as `patience` allows. `may`: whether it can be repeated."""
        end = time.monotonic() + self.patience
        for attempt in itertools.count():
            after: float | None = None
            try:
                return await once()
            except Again as again:
                reason, after = str(again), again.after
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            except (json.JSONDecodeError, LookupError, TypeError) as error:
                raise UserError(f"{self.url} does not speak OpenAI's API: {error!r}") from None
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
            pause = pause if after is None else min(LONGEST_RETRY_AFTER, after)
            if not may() or time.monotonic() + pause > end:
                raise UserError(f"no answer from {self.url}: {reason}; is the server running?")
            await asyncio.sleep(pause)
        raise AssertionError("the attempts have no end")

    async def _all(self, waiting: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """All results; the first error ends the others."""
        tasks = [asyncio.ensure_future(one) for one in waiting]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    # ---- from outside --------------------------------------------------------------------------

    def _wait(self, waiting: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        try:
            while not future.done() and self._loop.is_running():  # close() may have come before it
                wait([future], 1.0)
            if not future.done():
                raise CancelledError
            return future.result()
        except BaseException:  # Ctrl-C: nothing goes on without us
            future.cancel()
            raise

    def _body(self, request: Request) -> dict[str, Any]:
        return body_of(request, self.model, self.context, self.tokenizer, self.ours)

    def _seen(self, completion: Completion) -> None:
        """Answers say which weights wrote them; another trainer may have replaced them."""
        self.version = max([self.version, *completion.versions])


class RemoteStream:
    """The generator.Stream of one request."""

    def __init__(self, remote: Remote, request: Request, body: dict[str, Any]) -> None:
        self._remote = remote
        self._answer = Answer(request, remote.tokenizer, remote.ours, remote.version)
        self._ready: deque[Piece] = deque()
        self._over = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # may be filled by a signal handler of its reader
        self._task = asyncio.run_coroutine_threadsafe(remote._pieces(body, self._inbox.put), remote._loop)

    @property
    def completion(self) -> Completion:
        return self._answer.completion

    def __iter__(self) -> RemoteStream:
        return self

    def __next__(self) -> Piece:
        while not self._ready and not self._over:
            event = self._inbox.get()
            if isinstance(event, Exception):
                self._over = True
                raise event
            if event is None:
                self._over = True
                self._ready.extend(self._answer.close())
                self._remote._seen(self.completion)
            else:
                self._ready.extend(self._answer.take(event))
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        self._task.cancel()
        self._inbox.put(None)

    def __del__(self) -> None:
        self._task.cancel()


def refused(response: httpx.Response) -> Exception:
    """What an answer other than 200 means: try again, a wrong request (ValueError), or a wrong server or key."""
    status = response.status_code
    try:
        message = message_in(response.json())
    except (ValueError, AttributeError):
        message = ""
    message = message or f"status {status} for {response.request.url.path}"
    if status in BUSY:
        after = response.headers.get("Retry-After", "")
        return Again(message, float(after) if after.isdigit() else None)
    if status in (400, 413, 422):
        return ValueError(message)
    if status == 404 and response.request.url.path == "/update_weights":
        return UserError(
            f"{response.request.url.host} takes no weights; start it with: ascendchat serve --weight-updates"
        )
    if status in (401, 403):
        return UserError(f"{response.request.url.host} refuses us: {message}; give an API key that it knows")
    return UserError(f"{response.request.url.host} cannot do this: {message}")


def message_in(content: dict[str, Any]) -> str:
    """Of OpenAI's envelope, or of FastAPI's."""
    error = content.get("error") or content.get("detail") or ""
    return str(error.get("message", "") if isinstance(error, dict) else error)
