"""The workers of a server and who answers what: started, fed, watched and restarted from the server's event loop.

    pool = WorkerPool(config); await pool.start()                # one worker process per device (worker.py)
    pending = pool.submit(request, streams=True)            # Overloaded, when too many wait already
    await pool.pause("keep"); await pool.load(path, 7); await pool.resume()      # other weights, everywhere or nowhere
    await pool.close(drain=30)                             # running answers may finish

Requests wait here and not in the workers, so those of a worker that dies are not lost: what it had begun and nobody
has seen is asked again elsewhere. When all workers answer, one process more is started that has imported torch and
waits without a model: it takes the place of the first that dies, and saves the seconds of that import.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from ascendchat.config.serve import ServeConfig
from ascendchat.engine.request import Request
from ascendchat.errors import UserError
from ascendchat.processes import ChildProcess, how_ended
from ascendchat.remote.routing import Candidate, blocks_of, choose, remember
from ascendchat.serve import counters
from ascendchat.serve.worker_messages import (
    LENGTH,
    Begun,
    Cancel,
    Change,
    CheckWeights,
    Chunk,
    Done,
    Generate,
    LoadWeights,
    Open,
    Pause,
    PauseMode,
    Ready,
    Refused,
    Resume,
    pack,
)

# A worker as the pool sees it: whatever process does its work at the moment, what it is doing, and whether it hangs.
#
# process = Process(pool, 0); await process.live()                 # for ever: when its process dies, it gets another

PATIENCE = 300.0  # seconds without a word from a worker that has work, after which it counts as hanging
FIRST_TIME = 4  # times as many until it has answered something: it opens the model, compiles, records graphs
MAX_PAUSE = 30.0  # seconds between two attempts to start a worker that dies before it has answered anything


def say(text: str) -> None:
    """Print a line for whoever runs the server."""
    print(text, file=sys.stderr, flush=True)


class Process:
    """A worker as the pool sees it. When its process dies, it gets another."""

    def __init__(self, pool: WorkerPool, index: int) -> None:
        self.pool, self.index = pool, index
        self.child: Child | None = None
        self.ready: Ready | None = None  # None while it starts
        self.loaded: LoadWeights | None = None  # what it answers with; None: what it has opened
        self.checksum = ""
        self.requests: dict[int, PendingRequest] = {}
        self.blocks: OrderedDict[int, None] = OrderedDict()  # of prompts it has read, oldest first
        self.changes: dict[int, asyncio.Future[Done]] = {}  # not yet done
        self.restarts = 0
        self.early_deaths = 0  # in a row, before it had answered anything
        self.killed = False  # the last one ended by a signal, and did not hang
        self.hangs = False  # it is being killed for that
        self.proven = False  # it has answered something since it was started
        self.heard = 0.0  # time of its last word
        self.timer: asyncio.TimerHandle | None = None

    async def live(self) -> None:
        """Start it, and again whenever it has died."""
        while True:
            self.proven, self.hangs, self.loaded, self.heard = False, False, None, time.monotonic()
            try:
                self.child = await self.pool.child()
            except OSError as error:  # no memory, too many processes
                how, self.killed = f"no process can be started: {error}", False
            else:
                self.watch()
                self.child.open(Open(self.pool.config, self.index), self.take)
                await self.child.gone.wait()
                status = await self.child.end()
                how, self.killed = how_ended(status), status is not None and status < 0 and not self.hangs
            self.early_deaths = 0 if self.proven else self.early_deaths + 1
            if not self.pool.lost(self, how):
                return
            self.restarts += 1
            await asyncio.sleep(pause_after(self.early_deaths))

    def send(self, message: Any) -> None:
        assert self.child is not None
        self.watch()
        self.child.send(message)

    def take(self, message: Any) -> None:
        self.heard = time.monotonic()
        self.pool.take(self, message)

    def change(self, what: Pause | Resume | CheckWeights | LoadWeights) -> asyncio.Future[Done]:
        """Ask for a change of state; the future has the answer."""
        number, future = next(self.pool.keys), self.pool.loop.create_future()
        self.send(Change(number, what))
        self.changes[number] = future
        return future

    @property
    def room(self) -> int:
        """Requests it can take now: a few more than it has slots, so that the next is at hand when one ends."""
        if self.ready is None or self.child is None or self.child.gone.is_set():
            return 0
        return self.ready.slots + max(1, self.ready.slots // 8) - len(self.requests)

    # ---- does it hang? -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while it must say something before long."""
        return self.ready is None or bool(self.changes) or (bool(self.requests) and not self.pool.held)

    def watch(self) -> None:
        """Start the clock, before it gets something to do: it must say something within PATIENCE."""
        if self.timer is None or not self.busy:
            self.heard = time.monotonic()
        if self.timer is None:
            self.timer = self.pool.loop.call_later(self.pool.patience, self._look)

    def _look(self) -> None:
        self.timer = None
        if not self.busy or self.child is None:
            return
        limit = self.pool.patience * (1 if self.proven else FIRST_TIME)
        left = self.heard + limit - time.monotonic()
        if left > 0:
            self.timer = self.pool.loop.call_later(left, self._look)
        else:
            say(f"worker {self.index} has work and has said nothing for {limit:.0f} s; it is killed")
            self.hangs = True
            self.child.kill()


def pause_after(early_deaths: int) -> float:
    """Seconds before a worker is started again that has died so many times without an answer in between."""
    return min(MAX_PAUSE, 2.0 ** min(early_deaths - 2, 10)) if early_deaths else 0.0


__all__ = ["AnswerFailed", "Overloaded", "PendingRequest", "Process", "WorkerPool", "joined"]

DIED = -1  # as the version in what a worker says last
HANDING_OVER = 30.0  # seconds in which a worker must say what it has written of an answer whose time is over
MAX_ATTEMPTS = 3  # workers that may die over one request before it is given up, or be killed before they are ready


class _Clock:
    """Seconds in which requests can be answered: it stands still while the pool is held."""

    def __init__(self) -> None:
        self._stood = 0.0  # seconds
        self._stopped: float | None = None  # since then

    def now(self) -> float:
        return (time.monotonic() if self._stopped is None else self._stopped) - self._stood

    def stop(self) -> None:
        """Stop the clock; nothing happens if it stands already."""
        if self._stopped is None:
            self._stopped = time.monotonic()

    def start(self) -> None:
        if self._stopped is not None:
            self._stood += time.monotonic() - self._stopped
            self._stopped = None


class WorkerPool:
    """All workers. Everything is called from the event loop. `patience`: seconds, see PATIENCE."""

    def __init__(self, config: ServeConfig, patience: float = PATIENCE) -> None:
        self.config, self.patience = config, patience
        self.processes = [Process(self, index) for index in range(config.devices)]
        self.waiting: deque[PendingRequest] = deque()
        self.keys = itertools.count()
        self.closing = False
        self.paused: PauseMode | None = None  # by request
        self.loading = False  # weights are being replaced
        self.last: LoadWeights | None = None  # the weights loaded last, for a worker that starts anew
        self.facts: dict[str, Any] = {}  # of them: stage, step, chats, as far as they are known
        self._clock = _Clock()  # of the time limits
        self._idle = asyncio.Event()
        self._load = asyncio.Lock()
        self._spare: Child | None = None
        self._preparing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all workers and wait until each answers; what one cannot do is a UserError."""
        self.loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self.loop.create_future()
        for process in self.processes:
            self._begin(process.live())
        await self.started

    def _begin(self, coroutine: Any) -> None:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Take note of a task's end. An error of ours ends the start; afterwards asyncio writes it into the log."""
        self._tasks.discard(task)
        if not self.started.done() and not task.cancelled() and (error := task.exception()):
            self.started.set_exception(error)

    @property
    def failed(self) -> bool:
        """True if the start has ended without a server."""
        return self.started.done() and (self.started.cancelled() or self.started.exception() is not None)

    @property
    def ready(self) -> list[Ready]:
        """Ready messages of the workers that answer."""
        return [process.ready for process in self.processes if process.ready is not None]

    @property
    def held(self) -> bool:
        """True while no request may begin."""
        return self.loading or self.paused is not None

    @property
    def requests(self) -> list[PendingRequest]:
        """All requests, waiting and under way."""
        return [*self.waiting, *(request for process in self.processes for request in process.requests.values())]

    @property
    def version(self) -> int:
        """Version of the weights that answer the next request."""
        return self.last.version if self.last else 0

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, *, streams: bool) -> PendingRequest:
        """Queue a request; Overloaded when the queue is full."""
        if self.closing:
            raise Overloaded(max(1, round(self.config.drain)), "the server is being stopped; try again later")
        if len(self.waiting) >= self.config.max_queue + sum(max(0, process.room) for process in self.processes):
            raise Overloaded(self.retry_after())
        pending = PendingRequest(next(self.keys), request, streams, self.cancel)
        pending.end = self._clock.now() + self.config.request_timeout
        self._limit(pending, min(self.config.queue_timeout, self.config.request_timeout))
        self.waiting.append(pending)
        self.feed()
        return pending

    def retry_after(self) -> int:
        """Seconds after which a slot is likely to be free."""
        return max(1, min(60, len(self.waiting) // max(1, sum(ready.slots for ready in self.ready))))

    def feed(self) -> None:
        """Give waiting requests to workers that have room."""
        while self.waiting and not self.held:
            free = [process for process in self.processes if process.room > 0]
            if not free:
                break
            request = self.waiting.popleft()
            candidates = [Candidate(len(p.requests), p.ready.slots, p.blocks) for p in free if p.ready]
            blocks = blocks_of(request.engine_request.prompt, request.engine_request.salt)
            process = free[choose(candidates, blocks)]
            remember(process.blocks, blocks)
            process.send(Generate(request.key, request.engine_request, request.streams))
            request.worker, process.requests[request.key] = process, request
            request.attempts += 1
        if not self.waiting and not any(process.requests for process in self.processes):
            self._idle.set()

    def cancel(self, request: PendingRequest) -> None:
        """Cancel: nobody wants the rest."""
        if not request.closed:
            request.close()
            self._drop(request)

    def fail(self, request: PendingRequest, failure: AnswerFailed) -> None:
        """End a request and say why."""
        if not request.closed:
            request.give(failure)
            self._drop(request)

    def _drop(self, request: PendingRequest) -> None:
        """Take a request from the queue or its worker; the slot is free when the worker has said so."""
        if request.worker is not None:
            request.worker.send(Cancel(request.key))
        else:
            self.waiting.remove(request)
            self.feed()

    def _limit(self, request: PendingRequest, seconds: float) -> None:
        """Give a request so many seconds for what comes next."""
        request.until = self._clock.now() + seconds
        self._wake(request)

    def _wake(self, request: PendingRequest) -> None:
        """Look at a request again when its time is over."""
        if request.timer is not None:
            request.timer.cancel()
        request.timer = self.loop.call_later(max(0.0, request.until - self._clock.now()), self._timeout, request)

    def _timeout(self, request: PendingRequest) -> None:
        if self.held:
            return  # resume() looks after it
        if request.first_token is not None and not request.stopped:
            request.stopped = True
            request.worker.send(Cancel(request.key))
            self._limit(request, HANDING_OVER)
        elif request.first_token is not None:
            reason = f"the answer took longer than {self.config.request_timeout:g} s and was ended"
            self.fail(request, AnswerFailed(reason, retry_after=self.retry_after()))
        else:
            reason = f"no answer could begin within {time.monotonic() - request.since:.0f} s; try again later"
            self.fail(request, AnswerFailed(reason, retry_after=self.retry_after()))

    # ---- what workers say ----------------------------------------------------------------------

    def take(self, process: Process, message: Any) -> None:
        """Take a message of a worker."""
        if isinstance(message, list):
            for chunk in message:
                self._deliver(process, chunk)
            self.feed()
        elif isinstance(message, Done):
            future = process.changes.pop(message.number)
            if not future.done():
                future.set_result(message)
        elif isinstance(message, Ready):
            self._begin(self._enter(process, message))
        elif isinstance(message, UserError):
            if not self.started.done():
                self.started.set_exception(message)
            elif not self.failed:  # the first sentence is enough
                say(f"worker {process.index}: {message}")

    def _deliver(self, process: Process, chunk: Begun | Chunk | Refused) -> None:
        request = process.requests.get(chunk.key)
        if request is None:
            return
        process.proven = True
        if request.first_token is None and not isinstance(chunk, Refused):
            request.first_token = time.monotonic()
            if not request.closed:
                self._limit(request, request.end - self._clock.now())
        if isinstance(chunk, Begun):
            return
        if isinstance(chunk, Refused) or chunk.finish_reason:
            del process.requests[chunk.key]
            request.worker = None
            if request.stopped and isinstance(chunk, Chunk) and chunk.finish_reason == "cancelled":
                chunk = chunk._replace(finish_reason="timeout")
        request.give(AnswerFailed(chunk.reason, refused=True) if isinstance(chunk, Refused) else chunk)

    async def _enter(self, process: Process, ready: Ready) -> None:
        """Let a worker that has opened the model take part, once its weights are those of the others."""
        first = next((other for other in self.ready), ready).model["checkpoint"]
        if self.config.checkpoint != first:  # from now on this very one, though a trainer may write newer ones
            paths = {"checkpoint": first, "tokenizer": ready.model["tokenizer"]}
            self.config = dataclasses.replace(self.config, **paths)
        child, checksum = process.child, ready.checksum
        assert child is not None
        if ready.model["checkpoint"] != first:
            return child.kill()
        while process.loaded is not self.last:
            wanted = self.last
            assert wanted is not None
            done = await process.change(wanted)
            if done.problem:
                say(f"worker {process.index} cannot take the weights of version {wanted.version}: {done.problem}")
                return child.kill()
            process.loaded, checksum, self.facts = wanted, done.checksum, done.model or {}
        if self.paused:
            process.change(Pause(self.paused))
        process.ready, process.checksum, process.blocks = ready, checksum, OrderedDict()
        if len(self.ready) == len(self.processes):
            if not self.started.done():
                self.started.set_result(None)
            self._begin(self._prepare())
        self.feed()

    async def _prepare(self) -> None:
        """Start a spare process, which waits without a model."""
        if self._spare is None and not self._preparing and not self.closing:
            self._preparing = True
            try:
                self._spare = await Child.start()
            except OSError as error:
                say(f"no process can be kept ready for a worker that dies: {error}")
            finally:
                self._preparing = False

    async def child(self) -> Child:
        """A process for a worker: the one that waits, or a new one."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.gone.is_set():
            return spare
        if spare is not None:
            await spare.end()
        return await Child.start()

    def lost(self, process: Process, how: str) -> bool:
        """Handle the death of a worker: what nobody has seen of its work is queued again. True: start it again."""
        requests, process.requests, process.ready = list(process.requests.values()), {}, None
        for number, future in process.changes.items():
            if not future.done():
                future.set_result(Done(number, DIED, problem=f"worker {process.index} has died and is started again"))
        process.changes.clear()
        for request in reversed(requests):
            again = request.attempts < MAX_ATTEMPTS and not self.closing and not request.stopped
            if again and request.restart():
                self.waiting.appendleft(request)
                self._limit(request, self.config.queue_timeout)
            else:
                request.worker = None
                request.give(AnswerFailed("the worker that wrote this answer has died; please ask again"))
        if self.closing:
            self.feed()  # close() need not wait any longer if these were the last
            return False
        if not self.started.done() and not (process.killed and process.early_deaths < MAX_ATTEMPTS):
            text = f"worker {process.index} ended while it opened the model ({how}); its error stands above"
            self.started.set_exception(UserError(text))
            return False
        if self.failed:
            return False
        say(f"worker {process.index} has died ({how}); it is started again")  # whoever was killed is not to blame
        self.feed()
        return True

    # ---- weights -------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Stop all workers; requests that come wait."""
        self.paused = mode
        self._clock.stop()
        await self._change(Pause(mode))

    async def resume(self) -> None:
        """End a pause; also when nothing was paused."""
        self.paused = None
        if not self.loading:
            await self._change(Resume())
            if not self.held:
                self._go_on()

    def _go_on(self) -> None:
        """Answer requests again: the time of a pause was not theirs."""
        self._clock.start()
        for request in self.requests:
            if not request.closed:
                self._wake(request)
        self.feed()

    async def load(self, source: str, version: int) -> None:
        """Load weights of a checkpoint folder or a safetensors file in all workers or in none: a UserError when they do
        not fit, an AnswerFailed when it can be tried again. Answers under way are finished first, or as `pause` has
        said; the files must stay as long as these weights are used."""
        async with self._load:
            checked = await self._change(CheckWeights(source, version))
            problems = sorted((done.version == DIED, done.problem) for done in checked if done.problem)
            if problems or not checked:
                await self._change(CheckWeights(""))
                died, problem = problems[0] if problems else (True, "no worker is there to take them; try again")
                raise AnswerFailed(problem) if died else UserError(problem)
            self.loading = True
            self._clock.stop()
            try:
                if not self.paused:
                    await self._change(Pause("wait"))
                self.last = load = LoadWeights(source, version)
                takers = [process for process in self.processes if process.ready]
                for process, done in zip(takers, await self._change(load)):
                    if not done.problem:
                        process.loaded, process.checksum, self.facts = load, done.checksum, done.model or {}
                    elif process.child is not None:  # it read them a moment ago; as a new process it will again
                        say(f"worker {process.index} has not taken version {version}: {done.problem}")
                        process.child.kill()
            finally:
                self.loading = False
                for process in self.processes:
                    process.blocks.clear()
                if not self.paused:
                    await self.resume()

    async def _change(self, what: Pause | Resume | CheckWeights | LoadWeights) -> list[Done]:
        return list(await asyncio.gather(*[process.change(what) for process in self.processes if process.ready]))

    # ---- the end -------------------------------------------------------------------------------

    async def close(self, drain: float) -> None:
        """Take nothing new, let answers finish for up to `drain` seconds, end the workers."""
        self.closing = True
        if self.paused:
            self._begin(self.resume())
        self._idle.clear()
        self.feed()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain)
        for request in self.requests:
            self.fail(request, AnswerFailed("the server was stopped before the answer was finished"))
        children = [child for child in (self._spare, *(process.child for process in self.processes)) if child]
        for child in children:
            child.kill()
        await asyncio.gather(*(child.end() for child in children))
        for task in list(self._tasks):
            task.cancel()


# One request under way, as the routes see it: chunks to iterate over, or the reason why there are no more.
#
# request = pool.submit(request, streams=True)            # or Overloaded
# async for chunk in request: ...                         # the last Chunk has a finish reason; or AnswerFailed
# request.cancel()                                        # the client has gone

MAX_CHUNKS = 64  # that lie unread before they are put together, as for a client that does not read


class Overloaded(Exception):
    """Too many requests wait already; `retry_after` seconds are a good time to come again."""

    def __init__(self, retry_after: int, reason: str = "the server is busy; try again later") -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class AnswerFailed(Exception):
    """This answer cannot be finished; the text is for the client. `refused`: because of what was asked, else it is the
    server's trouble (503), and `retry_after` seconds are a good time to come again."""

    def __init__(self, reason: str, refused: bool = False, retry_after: int = 1) -> None:
        super().__init__(reason)
        self.refused, self.retry_after = refused, retry_after


class PendingRequest:
    """One request: iterate over its chunks. The pool's side is `give`, `restart` and `close`."""

    def __init__(self, key: int, request: Request, streams: bool, cancel: Callable[[PendingRequest], None]) -> None:
        self.key, self.engine_request, self.streams = key, request, streams
        self.worker: Any = None  # the pool's Process that answers; None while the request waits
        self.attempts = 0  # workers it was given to
        self.begun = False  # something was given to the client
        self.stopped = False  # its time is over: the next chunk is the last
        self.over = False  # the client has the last chunk, or wants no more
        self.closed = False  # nothing more will come
        self.since = time.monotonic()
        self.meter = counters.Meter(len(request.prompt))
        self.first_token: float | None = None  # when it was there, by the same clock
        self.end = self.until = math.inf  # of the answer, and of what comes next, by the clock of the pool
        self.timer: asyncio.TimerHandle | None = None  # of the pool
        self._cancel = cancel
        self._chunks: deque[Chunk | AnswerFailed] = deque()
        self._arrived = asyncio.Event()

    def __aiter__(self) -> PendingRequest:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self.over or self.closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        self.begun = True
        whole = list(itertools.takewhile(lambda chunk: isinstance(chunk, Chunk), self._chunks))
        if not whole:
            failure = self._chunks.popleft()
            self.over = True
            raise failure  # type: ignore[misc]
        for _ in whole:
            self._chunks.popleft()
        chunk = joined(whole)  # type: ignore[arg-type]
        self.over = bool(chunk.finish_reason)
        return chunk

    def cancel(self) -> None:
        """Cancel: nobody wants the rest."""
        self.over = True
        self._chunks.clear()
        self._cancel(self)

    # ---- the pool's side -----------------------------------------------------------------------

    def give(self, chunk: Chunk | AnswerFailed) -> None:
        """Add the next chunk; after the last one, or a failure, nothing is taken any more."""
        if self.closed:
            return
        if isinstance(chunk, Chunk):
            self.meter.chunk(chunk)
        if len(self._chunks) >= MAX_CHUNKS:
            self._chunks = deque([joined(self._chunks)])  # type: ignore[arg-type]  # a failure would have closed it
        self._chunks.append(chunk)
        if isinstance(chunk, AnswerFailed) or chunk.finish_reason:
            self.close()
        self._arrived.set()

    def restart(self) -> bool:
        """Forget what has come, for another worker to begin anew; False when the client has seen some of it."""
        if self.begun or self.closed:
            return False
        self._chunks.clear()
        self.worker = self.first_token = None
        return True

    def close(self) -> None:
        """Take nothing more."""
        self.closed = True
        if self.timer is not None:
            self.timer.cancel()
        self._arrived.set()


def joined(chunks: Iterable[Chunk]) -> Chunk:
    """Join several chunks of one answer."""
    chunks = list(chunks)
    if len(chunks) == 1:
        return chunks[0]
    return chunks[-1]._replace(
        pieces=[piece for chunk in chunks for piece in chunk.pieces],
        ids=[token for chunk in chunks for token in chunk.ids],
        logprobs=[number for chunk in chunks for number in chunk.logprobs],
        tops=[top for chunk in chunks for top in chunk.tops],
        versions=[version for chunk in chunks for version in chunk.versions],
    )


# A process of the server and the socket to it, as the server's event loop sees them.
#
# child = await Child.start(); child.open(Open(config, 0), take); child.send(Generate(...)); await child.end()
#
# A worker (worker.py) imports torch and then waits for Open: one that is started before it is needed opens a model at
# once. Large requests are read by another kind of process (large_requests.py).

ENDING = 1  # seconds that a process which has closed its socket gets to end by itself
UNKILLABLE = 10  # seconds after which a killed process is left alone: its driver holds it


class Child(asyncio.Protocol):
    """One process that runs worker.py, or another module with a FrontSocket (worker_messages.py)."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.gone = asyncio.Event()  # its end of the socket is closed
        self._take: Callable[[Any], None] = lambda message: None
        self._buffer = bytearray()

    @classmethod
    async def start(cls, module: str = "ascendchat.serve.worker") -> Child:
        ours, theirs = socket.socketpair()
        # The front decides when a worker ends: neither Ctrl-C nor a SIGTERM to all processes of a service reaches it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        child = cls(process)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        return child

    def open(self, message: Any, take: Callable[[Any], None]) -> None:
        """Give it what it begins with; `take` is called with everything it says."""
        self._take = take
        self.send(message)

    def listen(self, take: Callable[[Any], None]) -> None:
        """Call `take` from now on."""
        self._take = take

    def send(self, message: Any) -> None:
        """Send a message; never waits."""
        if not self.gone.is_set():
            self._transport.write(pack(message))

    def kill(self) -> None:
        """End it and whatever it has started, now."""
        ChildProcess(self.process).kill()

    async def end(self) -> int | None:
        """Wait until it has ended, a moment by itself and then by force: its exit status, below 0 for a signal; None
        when it cannot be ended."""
        if self.gone.is_set():  # on its way out; so the status is its own
            status = await asyncio.to_thread(ChildProcess(self.process).wait, ENDING)
            if status is not None:
                return status
        self.kill()
        self._transport.abort()
        return await asyncio.to_thread(ChildProcess(self.process).wait, UNKILLABLE)

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= LENGTH.size:
            end = begin + LENGTH.size + LENGTH.unpack_from(buffer, begin)[0]
            if end > len(buffer):
                break
            with memoryview(buffer) as view, view[begin + LENGTH.size : end] as content:  # it may be megabytes
                message = pickle.loads(content)
            begin = end
            self._take(message)
        del buffer[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
