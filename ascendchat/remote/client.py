"""A Generator over HTTP: a server of ours, or another with OpenAI's API and vLLM's additions to it.

    with RemoteGenerator.open("http://127.0.0.1:8000", api_key=key, tokenizer=tokenizer) as generator:
        answers = generator.generate([Request(prompt, Sampling(seed=1)), ...])     # all at the same time
        with closing(generator.stream(request)) as stream: ...
        generator.load(model.state_dict(), version=12)          # `ascendchat serve --weight-updates`, or vLLM (vllm.py)

Prompts and answers are token ids on both sides of the connection: text is never tokenized again. With a tokenizer the
text is made of the ids here, as the engine does it; without one it is what the server wrote. A server that is busy, or
gone for a while, is asked again after a pause; what can be mended by nobody else is a UserError. Other servers run no
calculator. All waiting is done by one event loop in a thread of its own.

This is the only place that continues an answer which was cut short (finish_reason "abort"; new weights, a time limit):
its prompt and what was written are sent again for the rest, see PartialAnswer.continue_answer. Answers with unusable
log-probabilities are generated again, a few times.

While a vLLM server gets new weights no request is under way: it does not say which weights wrote a token, so the
version of a part is the one that was there when it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from typing import Any, TypeVar

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Completion, Piece, Request, Sampling, Weights
from ascendchat.errors import UserError
from ascendchat.remote.completions import PartialAnswer, Unusable, body_of
from ascendchat.remote.http import ATTEMPT_ERRORS, FIRST_PAUSE, MAX_PAUSE, UNREACHABLE, HTTPClient, RetryLater
from ascendchat.remote.servers import PauseMode, Server
from ascendchat.remote.vllm import VllmServer, find_out, first_line
from ascendchat.remote.weights import Scorer, probe_of

PATH = "/v1/completions"
MAX_UNUSABLE = 3  # attempts at an answer that can be learnt from
PULSE = 20.0  # seconds for one token by a server that is well

Result = TypeVar("Result")


class WeightsLost(UserError):
    """The server does not have the weights that it was sent: it was restarted, or a sync broke off. `load` mends it."""


class RemoteGenerator:
    """A Generator in another process or on another machine. Several threads may use it.

    `scorer`: gives the trainer's own log-probabilities of tokens, by which a vLLM server is verified after `load` if it
    cannot tell checksums of all its weights; the tokens come from range(vocab) of the tokenizer.
    """

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
        pulse_every: float = 60.0,
        folder: str = "",
        scorer: Scorer | None = None,
    ) -> None:
        """`concurrency`: requests under way at once. `timeout`: seconds for an answer, pauses of the server included.
        `patience`: seconds for which a busy or missing server is asked again. `pulse_every`: seconds without an answer
        after which a server must show that it can still write a token. `folder`: one that this machine and the server
        both see, for weights; needed for a vLLM server elsewhere without our receiver."""
        self.tokenizer, self.scorer = tokenizer, scorer
        self.version, self.pulse_every = 0, pulse_every
        self.http = HTTPClient(url, api_key, concurrency, timeout, patience)
        self.url, self._folder = self.http.url, folder
        self.server: Server
        self.unknown_weights = ""  # why it is unknown which weights the server has; "": they are known
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(concurrency)
        self._gate = asyncio.Event()  # closed while weights change
        self._gate.set()
        self._check_restart = False  # before the next request, since one failed or a batch begins
        self._asking = asyncio.Lock()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._load_lock = threading.Lock()

    @classmethod
    def open(cls, url: str, **settings: Any) -> RemoteGenerator:
        """Connect, and ask which model the server has."""
        remote = cls(url, **settings)
        running = threading.Event()  # until then `_wait` and `close` would take the loop for one that was closed
        remote._loop.call_soon(running.set)
        threading.Thread(target=remote._loop.run_forever, name="remote generator", daemon=True).start()
        running.wait()
        try:
            remote.server = remote._wait(find_out(remote.http, remote._folder))
            remote.version = remote.server.weight_version
        except BaseException:
            remote.close()
            raise
        return remote

    def __enter__(self) -> RemoteGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request under way, and the thread."""
        if not self._loop.is_closed() and self._loop.is_running():
            self._wait(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)

    # ---- the Generator -------------------------------------------------------------------------

    @property
    def context(self) -> int:
        return self.server.context

    @property
    def model(self) -> str:
        return self.server.model

    @property
    def ours(self) -> bool:
        return self.server.ours

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests. After an error the other requests are cancelled."""
        for request in requests:
            self._body(request)
        self._check_restart = True
        return self._wait(self._all([self._one(request) for request in requests]))

    def stream(self, request: Request) -> _RemoteStream:
        """One answer as it comes."""
        return _RemoteStream(self, request, self._body(request))

    def load(self, weights: Weights, version: int, *, interrupt: bool = False) -> None:
        """Answer with these weights from now on, verified; see Generator.load."""
        with self._load_lock:
            try:
                self._wait(self._load(weights, version, interrupt))
            except UNREACHABLE as error:
                raise UserError(f"{self.url} has not taken version {version}: {first_line(error)}") from None

    def renew(self, version: int) -> None:
        """Another process has loaded weights of this version into the server."""
        self.version = version

    # ---- the server ----------------------------------------------------------------------------

    def alive(self, seconds: float = PULSE) -> bool:
        """True if the server writes a token within so many seconds; a health route proves nothing."""
        return self._wait(self._pulse(seconds))

    def pause(self, mode: PauseMode = "abort") -> None:
        """Let the server begin nothing new; see Engine.pause. `load` does it by itself."""
        self._wait(self.server.pause(mode))

    def resume(self) -> None:
        """Go on after pause()."""
        self._wait(self.server.resume())

    # ---- answers, in the event loop ------------------------------------------------------------

    async def _one(self, request: Request) -> Completion:
        await self._fit(request.sampling)
        answer = PartialAnswer(request, self.tokenizer, self.ours)
        rest: Request | None = request
        unusable = without_progress = 0
        end = time.monotonic() + self.http.patience
        async with self._room:
            while rest is not None:
                length = len(answer.completion.ids)
                try:
                    await self._part(answer, rest)
                except Unusable as problem:
                    unusable += 1
                    if unusable >= MAX_UNUSABLE:
                        raise UserError(f"{self.url} gives answers that cannot be learnt from: {problem}") from None
                if answer.finished:
                    break
                if len(answer.completion.ids) > length:
                    without_progress, end = 0, time.monotonic() + self.http.patience
                elif time.monotonic() > end:
                    raise UserError(f"{self.url} cuts every answer short; is it being stopped?")
                else:
                    await asyncio.sleep(
                        min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(without_progress, 9)) if without_progress else 0
                    )
                    without_progress += 1
                rest = answer.continue_answer(self.context)
                if rest is not None and unusable:  # the same noise would choose the same token
                    rest = Request(rest.prompt, shifted(rest.sampling, unusable))
        answer.close()
        self._seen(answer.completion)
        return answer.completion

    async def _part(self, answer: PartialAnswer, request: Request) -> None:
        """One answer of the server, whole or cut short. The version is pinned when it is sent, at every attempt."""

        async def once() -> Any:
            await self._open()
            answer.begin(self.version)
            try:
                return await self._counted(self._watched(self._body(request)))
            except Exception:
                self._check_restart = True
                raise

        answer.take(await self.http.retry(once), whole=True)

    async def _open(self) -> None:
        """Wait while weights change; look whether a server that failed was restarted."""
        try:
            await asyncio.wait_for(self._gate.wait(), self.http.timeout)
        except asyncio.TimeoutError:
            raise UserError(f"{self.url} was kept waiting for weights for {self.http.timeout:g} s") from None
        async with self._asking:
            if self._check_restart and isinstance(self.server, VllmServer) and not self.unknown_weights:
                if await self.server.was_restarted():
                    self.unknown_weights = "it was started anew"
                self._check_restart = False
        if self.unknown_weights:
            raise WeightsLost(
                f"{self.url} does not have the weights it was sent ({self.unknown_weights}); load weights again"
            )

    async def _counted(self, waiting: Coroutine[Any, Any, Result]) -> Result:
        self._under_way += 1
        try:
            return await waiting
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _watched(self, body: dict[str, Any]) -> Any:
        """The answer to one request. While none comes, the server must generate a token from time to time."""
        task = asyncio.ensure_future(self.http.ask("POST", PATH, json=body))
        end = time.monotonic() + self.http.timeout
        try:
            while not (await asyncio.wait({task}, timeout=self.pulse_every))[0]:
                if time.monotonic() > end:
                    raise RetryLater(f"no answer within {self.http.timeout:g} s")
                if self._gate.is_set() and not await self._pulse(PULSE) and not await self.server.is_paused():
                    raise RetryLater(f"it does not write a single token within {PULSE:g} s")
            return task.result()
        finally:
            task.cancel()

    async def _pulse(self, seconds: float) -> bool:
        sampling = Sampling(max_tokens=1, temperature=0.0, tools=False, stop_tokens=() if self.tokenizer else None)
        try:
            reply = await asyncio.wait_for(
                self.http.ask("POST", PATH, json=self._body(Request([1], sampling))), seconds
            )
            return bool(reply["choices"])
        except (*ATTEMPT_ERRORS, LookupError, TypeError):
            return False

    async def _fit(self, sampling: Sampling) -> None:
        """Refuse a server whose log-probabilities are not those of the distribution it samples from."""
        drawn = sampling.temperature not in (0.0, 1.0) or sampling.top_k or sampling.top_p < 1 or sampling.min_p
        needed = sampling.logprobs and drawn and isinstance(self.server, VllmServer)
        if needed and not await self.server.reports_processed():  # type: ignore[attr-defined]
            raise UserError(
                f"{self.url} reports log-probabilities from before temperature and top-k; start it with "
                "--logprobs-mode processed_logprobs, or use temperature 1 and no top-k"
            )

    async def _pieces(self, body: dict[str, Any], put: Callable[[Any], None]) -> None:
        """Every event of one answer to `put`; None at the end, or the error."""
        begun = False

        async def once() -> None:
            nonlocal begun
            await self._open()
            content = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async for event in self.http.events(PATH, content):
                begun = True
                put(event)
            if not begun:
                raise UserError(f"{self.url} does not speak OpenAI's API: a stream without a single event")

        try:
            async with self._room:
                await self.http.retry(lambda: self._counted(once()), lambda: not begun)
            put(None)
        except Exception as error:  # noqa: BLE001 (raised where the pieces are read)
            put(error)

    # ---- weights, in the event loop ------------------------------------------------------------

    async def _load(self, weights: Weights, version: int, interrupt: bool) -> None:
        server = self.server
        if not server.holds_requests:
            async with paused(server, "keep") if interrupt else contextlib.nullcontext():
                await server.push(weights, version)
            await server.verify(weights, version, self.scorer, probe_of(self.tokenizer))
            self.version = version
            return
        self._gate.clear()
        try:
            if not interrupt:
                await self._quiet(self.http.timeout)
            async with paused(server, "abort" if interrupt else "wait"):
                if interrupt:
                    await self._quiet(self.http.timeout, again="abort")
                self.unknown_weights = f"version {version} was being sent"
                await server.push(weights, version)
            await server.verify(weights, version, self.scorer, probe_of(self.tokenizer))
            self.version, self.unknown_weights = version, ""
        except Exception as error:
            if self.unknown_weights:
                self.unknown_weights = f"version {version}: {error}"
            raise
        finally:
            self._gate.set()

    async def _quiet(self, seconds: float, again: PauseMode | None = None) -> None:
        """Wait until no request is under way. A request that was sent before a pause may reach the server behind it,
        and would wait there for new weights: so the pause is repeated, as `again`."""
        end = time.monotonic() + seconds
        while self._under_way:
            if time.monotonic() > end:
                raise UserError(f"{self.url} has not finished its answers within {seconds:g} s: no new weights")
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), 1.0)
            except asyncio.TimeoutError:
                if again:
                    await self.server.pause(again)

    async def _all(self, waiting: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """All results; the first error cancels the others."""
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
        if isinstance(getattr(self, "server", None), VllmServer):
            await self.server.close()  # type: ignore[attr-defined]
        await self.http.close()

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
        body = body_of(request, self.model, self.context, self.tokenizer, self.ours)
        if isinstance(self.server, VllmServer):
            body["cache_salt"] = f"weights {self.version}"  # what other weights have cached is never used
        return body

    def _seen(self, completion: Completion) -> None:
        """Take the version from an answer: another trainer may have replaced the weights."""
        if self.ours:
            self.version = max([self.version, *completion.versions])


@contextlib.asynccontextmanager
async def paused(server: Server, mode: PauseMode) -> AsyncIterator[None]:
    """Pause a server and resume it, also after an error: one that is left paused keeps everybody waiting for ever."""
    try:
        await server.pause(mode)
        yield
    except BaseException:
        with contextlib.suppress(*ATTEMPT_ERRORS):  # what went wrong first is what counts
            await server.resume()
        raise
    await server.resume()


def shifted(sampling: Sampling, attempt: int) -> Sampling:
    """Change the seed, so that other tokens are drawn."""
    return replace(sampling, seed=(sampling.seed + 0x9E3779B97F4A7C15 * attempt) % 2**62)


class _RemoteStream:
    """One answer as it comes."""

    def __init__(self, remote: RemoteGenerator, request: Request, body: dict[str, Any]) -> None:
        self._remote = remote
        self._answer = PartialAnswer(request, remote.tokenizer, remote.ours, remote.version)
        self._ready: deque[Piece] = deque()
        self._over = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # may be filled by a signal handler of its reader
        self._task = asyncio.run_coroutine_threadsafe(remote._pieces(body, self._inbox.put), remote._loop)

    @property
    def completion(self) -> Completion:
        return self._answer.completion

    def __iter__(self) -> _RemoteStream:
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


Remote = RemoteGenerator  # its former name, which programs of users import
