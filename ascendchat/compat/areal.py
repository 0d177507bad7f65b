"""Rollouts for programs written against AReaL's inference engine: its method names and fields, over our Generator.

    engine = VLLMRemoteEngine(api_key=key, tokenizer=tokenizer)
    engine.initialize(["http://127.0.0.1:8000", "http://127.0.0.1:8001"])  # ours, or vLLM's
    request = ModelRequest(input_ids=ids, gconfig=GenerationHyperparameters(max_new_tokens=64))
    answer = await engine.agenerate(request)                               # output_tokens, output_versions, ...
    engine.update_weights(WeightUpdateMeta(7, model.state_dict())).result()
    batch = engine.rollout_batch(rows, workflow)                           # async arun_episode(engine, row)
    engine.destroy()

It is thin: routing, retries, fail-over and verified weights are those of remote/fleet.py. What AReaL's engine does with
processes and process groups (launch_server, init_weights_update_group) is done here by `ascendchat rollout-server` and
by `load`. `n_samples` is 1 per call, as there: a group is several calls.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ascendchat.checkpoint import read_file, verify
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Completion, Generator, Request, Sampling, Weights
from ascendchat.errors import UserError
from ascendchat.remote.fleet import ReplicaPool

MAX_CALLS = 256  # of agenerate that wait for an answer at a time
UNLIMITED = 10**8  # AReaL's top_k that means all tokens
POLL = 0.05  # seconds between two looks at whether it is still paused
DEFAULT_TIMEOUT = 3600.0  # seconds of `wait` and `rollout_batch`


@dataclass
class GenerationHyperparameters:
    """Sampling settings, by AReaL's names."""

    n_samples: int = 1
    max_new_tokens: int = 256
    max_tokens: int | None = None  # of prompt and answer together
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = UNLIMITED
    stop_token_ids: list[int] | None = None  # None: those that end a reply of our models
    stop: list[str] = field(default_factory=list)
    seed: int | None = None  # None: another one for each request


@dataclass
class ModelRequest:
    """One prompt with its sampling settings."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelResponse:
    """One answer; its lists have an entry for each token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: Literal["stop", "length", "abort"]
    latency: float  # seconds
    text: str = ""


@dataclass
class WeightUpdateMeta:
    """New weights: tensors by name, or a checkpoint or safetensors file that holds them."""

    version: int
    weights: Weights | None = None
    path: str = ""
    interrupt: bool = False  # answers under way go on with the new weights, instead of being finished by the old


class Workflow(Protocol):
    """One episode: whatever it returns is collected; None and exceptions count as rejected."""

    async def arun_episode(self, engine: VLLMRemoteEngine, data: Any) -> Any: ...


class VLLMRemoteEngine:
    """AReaL's InferenceEngine over a Generator. Methods may be called from any thread."""

    def __init__(self, *, api_key: str = "", tokenizer: Tokenizer | None = None, **settings: Any) -> None:
        """`settings` are those of ReplicaPool."""
        self.settings = {"api_key": api_key, "tokenizer": tokenizer, **settings}
        self.generator: Generator | None = None
        self.rejected = 0
        self._weights_version = 0
        self._pool: ReplicaPool | None = None
        self._running = threading.Event()  # cleared by pause()
        self._running.set()
        self._seeds = itertools.count(1)
        self._done: collections.deque[Any] = collections.deque()
        self._arrived = threading.Condition()

    def initialize(self, addr: str | Sequence[str] = "", *, generator: Generator | None = None) -> None:
        """Connect to servers, or take a Generator that is there."""
        if generator is None:
            urls = [part for part in addr.split(",") if part] if isinstance(addr, str) else list(addr)
            if not urls:
                raise UserError("initialize() needs the addresses of servers; start one: ascendchat rollout-server")
            generator = self._pool = ReplicaPool.open(urls, **self.settings)
        self.generator, self._weights_version = generator, generator.version
        self._threads, self._updates = ThreadPoolExecutor(MAX_CALLS, "agenerate"), ThreadPoolExecutor(1, "weights")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()

    def destroy(self) -> None:
        """End everything under way. The servers go on."""
        if self.generator is None:
            return
        self._running.set()
        if self._pool is not None:
            self._pool.close()
        for threads in (self._threads, self._updates):
            threads.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.generator = self._pool = None

    # ---- generating ----------------------------------------------------------------------------

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One answer; while the engine is paused it waits."""
        if req.gconfig.n_samples != 1:
            raise ValueError("n_samples is 1 per call; a group of answers is several calls")
        began = time.monotonic()
        request, generator = request_of(req, next(self._seeds)), self._connected()
        while not self._running.is_set():
            await asyncio.sleep(POLL)
        answers = asyncio.get_running_loop().run_in_executor(self._threads, generator.generate, [request])
        return response_of(req, (await answers)[0], time.monotonic() - began)

    def _connected(self) -> Generator:
        if self.generator is None:
            raise UserError("the engine is not connected; call initialize() first")
        return self.generator

    def pause(self) -> None:
        """Send no further requests; those under way go on."""
        self._running.clear()

    def resume(self) -> None:
        """Go on after pause()."""
        self._running.set()

    # ---- weights -------------------------------------------------------------------------------

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Send new weights to every server. As in AReaL the result is a Future: `.result()` waits, and raises what went
        wrong; then nothing has changed."""
        return self._updates.submit(self._update, meta)

    def _update(self, meta: WeightUpdateMeta) -> None:
        weights = meta.weights if meta.weights is not None else weights_in(Path(meta.path))
        generator: Any = self._connected()
        if meta.interrupt:
            generator.load(weights, meta.version, interrupt=True)
        else:
            generator.load(weights, meta.version)
        self._weights_version = meta.version

    def get_version(self) -> int:
        """The version of the weights that answer the next request."""
        return self._weights_version

    def set_version(self, version: int) -> None:
        """Another process has replaced the weights."""
        self._connected().renew(version)
        self._weights_version = version

    # ---- episodes ------------------------------------------------------------------------------

    def submit(self, data: Any, workflow: Workflow) -> None:
        """Begin an episode; `wait` collects its result."""
        self._begin(workflow.arun_episode(self, data), self._collect)

    def _begin(self, episode: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        async def run() -> None:
            try:
                result = await episode
            except Exception as error:  # noqa: BLE001 (one bad sample must not stop a run; it is counted)
                result = error
            then(result)

        self._connected()
        asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _collect(self, result: Any) -> None:
        with self._arrived:
            if result is None or isinstance(result, Exception):
                self.rejected += 1
            else:
                self._done.append(result)
            self._arrived.notify_all()

    def wait(self, count: int, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """The next `count` results, in the order in which they came; TimeoutError when they do not come."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._done) >= count, timeout):
                raise TimeoutError(f"{len(self._done)} of {count} episodes were done after {timeout:g} s")
            return [self._done.popleft() for _ in range(count)]

    def rollout_batch(self, data: Sequence[Any], workflow: Workflow, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """All episodes, in the order of `data`; None for one that was rejected. The first exception is raised."""
        results: dict[int, Any] = {}
        arrived = threading.Condition()

        def note(number: int, result: Any) -> None:
            with arrived:
                results[number] = result
                arrived.notify_all()

        for number, row in enumerate(data):
            self._begin(workflow.arun_episode(self, row), lambda result, number=number: note(number, result))  # type: ignore[misc]
        with arrived:
            if not arrived.wait_for(lambda: len(results) == len(data), timeout):
                raise TimeoutError(f"{len(results)} of {len(data)} episodes were done after {timeout:g} s")
        failure = next((result for result in results.values() if isinstance(result, Exception)), None)
        if failure is not None:
            raise failure
        return [results[number] for number in range(len(data))]


def request_of(req: ModelRequest, number: int) -> Request:
    """Our Request of an AReaL request."""
    settings = req.gconfig
    room = settings.max_new_tokens
    if settings.max_tokens is not None:
        room = min(room, settings.max_tokens - len(req.input_ids))
    sampling = Sampling(
        max_tokens=room,
        temperature=0.0 if settings.greedy else settings.temperature,
        top_k=0 if settings.top_k >= UNLIMITED else settings.top_k,
        top_p=settings.top_p,
        seed=number if settings.seed is None else settings.seed,
        stop=tuple(settings.stop),
        stop_tokens=None if settings.stop_token_ids is None else tuple(settings.stop_token_ids),
        keep_stop=True,
        logprobs=True,
        tools=False,
    )
    return Request(list(req.input_ids), sampling)


def response_of(req: ModelRequest, answer: Completion, latency: float) -> ModelResponse:
    """AReaL's response of our Completion."""
    reason: Any = "abort" if answer.finish_reason == "cancelled" else answer.finish_reason
    logprobs = [0.0 if value is None else value for value in answer.logprobs]
    return ModelResponse(list(req.input_ids), answer.ids, logprobs, answer.versions, reason, latency, answer.text)


def weights_in(path: Path) -> Weights:
    """Read the weights of a checkpoint folder or a safetensors file."""
    if path.is_file():
        return read_file(path)
    if (path / "manifest.json").is_file():
        return verify(path, optimizer=False).model()
    raise UserError(f"{path} is neither a checkpoint nor a safetensors file; name one of them in WeightUpdateMeta.path")
