"""The workers of a server and who answers what: started, fed, watched and restarted from the server's event loop.

    pool = Pool(config); await pool.start()                # one worker process per device (worker.py)
    ticket = pool.submit(request, streams=True)            # or Overloaded, when too many wait already
    async for part in ticket: ...                          # messages.Part, the last with a finish reason
    ticket.cancel()                                        # the client has gone
    await pool.close(drain=30)                             # running answers may finish

Requests wait here and not in the workers, so those of a worker that dies are not lost: what it had begun and nobody
has seen is asked again elsewhere. A request goes to the worker that holds most of its prompt in its cache, unless that
one has clearly more to do than another.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import queue
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ascendchat.config import UserError
from ascendchat.config.serve import ServeConfig
from ascendchat.infer.request import Request
from ascendchat.serve import metrics
from ascendchat.serve.messages import Ask, Cancel, Done, Load, Part, Pause, PauseMode, Ready, Refused, Resume

BLOCK = 64  # tokens of a prompt that are recognised together
BLOCKS = 4096  # of them remembered per worker
MOST_ATTEMPTS = 3  # workers that may die over one request before it is given up


class Overloaded(Exception):
    """Too many requests wait already; `retry_after` seconds are a good time to come again."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server is busy; try again later")
        self.retry_after = retry_after


class Failure(Exception):
    """This answer cannot be finished; the text is for the client. `refused`: because of what was asked."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Ticket:
    """One request under way: iterate over its parts."""

    def __init__(self, pool: Pool, key: int, request: Request, streams: bool) -> None:
        self.pool, self.key, self.request, self.streams = pool, key, request, streams
        self.worker: Process | None = None  # who answers; None while it waits
        self.attempts = 0
        self.begun = self.over = False  # something was given to the client; the last part was
        self.since = time.monotonic()
        self.meter = metrics.Meter(len(request.prompt))
        self._parts: deque[Part | Failure] = deque()
        self._arrived = asyncio.Event()

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Part:
        if self.over:
            raise StopAsyncIteration
        while not self._parts:
            self._arrived.clear()
            await self._arrived.wait()
        part = self._parts.popleft()
        self.begun = True
        if isinstance(part, Failure):
            self.over = True
            raise part
        if self._parts and not isinstance(self._parts[0], Failure):
            part = joined([part, *self._take()])
        self.over = bool(part.finish_reason)
        return part

    def _take(self) -> list[Part]:
        """What else has arrived, up to a failure: a slow client gets it in one piece."""
        more = list(itertools.takewhile(lambda part: isinstance(part, Part), self._parts))
        for _ in more:
            self._parts.popleft()
        return more  # type: ignore[return-value]

    def give(self, part: Part | Failure) -> None:
        if isinstance(part, Part):
            self.meter.part(part)
        self._parts.append(part)
        self._arrived.set()

    def cancel(self) -> None:
        """Nobody wants the rest."""
        self.pool.cancel(self)


def joined(parts: Sequence[Part]) -> Part:
    """Several parts of one answer as one."""
    last = parts[-1]
    lists = ([value for part in parts for value in part[i]] for i in range(1, 6))
    return Part(last.key, *lists, last.finish_reason, last.cached_tokens)  # type: ignore[arg-type]


def work(connection: Connection, config: ServeConfig, index: int) -> None:
    """What a worker process runs; only there torch is imported."""
    from ascendchat.serve.worker import main

    main(connection, config, index)


class Process:
    """A worker as the pool sees it: a process, a pipe, two threads that never make the event loop wait."""

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index = pool, index
        self.ready: Ready | None = None
        self.tickets: dict[int, Ticket] = {}
        self.blocks: OrderedDict[int, None] = OrderedDict()  # hashes of prompts' beginnings it has read, oldest first
        self.changes: deque[asyncio.Future[Done]] = deque()  # Pause, Resume and Load that are not yet done
        self.restarts = 0
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.pool.config, self.index), daemon=True)
        self.process.start()
        theirs.close()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for target in (self._receive, self._send):
            threading.Thread(target=target, args=(self.connection, self.outbox), daemon=True).start()

    def _receive(self, connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
        try:
            while True:
                self.pool.soon(self.pool.take, self, connection.recv())
        except (EOFError, OSError):
            outbox.put(None)
            self.pool.soon(self.pool.lost, self, connection)

    def _send(self, connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
        try:
            while (message := outbox.get()) is not None:
                connection.send(message)
        except OSError:
            pass  # the worker is gone: the other thread has seen it too
        finally:
            connection.close()

    def change(self, message: Pause | Resume | Load) -> asyncio.Future[Done]:
        """Ask for a change of state; the future has the answer."""
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.changes.append(future)
        self.outbox.put(message)
        return future

    @property
    def room(self) -> int:
        """Requests it can take now: a few more than it has slots, so that the next is at hand when one ends."""
        return 0 if self.ready is None else self.ready.slots + max(1, self.ready.slots // 8) - len(self.tickets)


class Pool:
    """All workers. Every method but `soon` is called from the event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.processes: list[Process] = []
        self.waiting: deque[Ticket] = deque()
        self.keys = itertools.count()
        self.closing = False
        self.last: tuple[Any, int] | None = None  # weights loaded last and their version, for a worker that starts anew
        self.paused: PauseMode | None = None

    def soon(self, function: Any, *arguments: Any) -> None:
        """From another thread: call this in the event loop."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended
            return

    async def start(self) -> None:
        """Start all workers and wait until each answers; what one cannot do is a UserError."""
        self.loop = asyncio.get_running_loop()
        self.started = self.loop.create_future()
        self.processes = [Process(self, index) for index in range(self.config.devices)]
        await self.started

    @property
    def ready(self) -> list[Ready]:
        """What the workers that answer have said of themselves."""
        return [process.ready for process in self.processes if process.ready is not None]

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, *, streams: bool) -> Ticket:
        """Queue a request; Overloaded when the queue is full."""
        if self.closing or len(self.waiting) >= self.config.max_queue + sum(max(0, p.room) for p in self.processes):
            raise Overloaded(self.retry_after())
        ticket = Ticket(self, next(self.keys), request, streams)
        self.waiting.append(ticket)
        self.feed()
        return ticket

    def retry_after(self) -> int:
        """Seconds after which a slot is likely to be free."""
        return max(1, min(60, len(self.waiting) // max(1, sum(ready.slots for ready in self.ready))))

    def feed(self) -> None:
        """Give waiting requests to workers that have room."""
        while self.waiting:
            process = self.choose(self.waiting[0].request)
            if process is None:
                return
            ticket = self.waiting.popleft()
            ticket.worker, process.tickets[ticket.key] = process, ticket
            ticket.attempts += 1
            remember(process.blocks, blocks_of(ticket.request.prompt))
            process.outbox.put(Ask(ticket.key, ticket.request, ticket.streams))

    def choose(self, request: Request) -> Process | None:
        """The worker with the longest part of the prompt in its cache; else the one with least to do."""
        free = [process for process in self.processes if process.room > 0]
        if not free or self.paused:
            return None
        least = min(free, key=lambda process: len(process.tickets))
        if len(free) == 1:
            return least
        blocks = blocks_of(request.prompt)

        def known(process: Process) -> int:
            return sum(1 for _ in itertools.takewhile(process.blocks.__contains__, blocks))

        best = max(free, key=known)
        assert best.ready is not None
        crowded = len(best.tickets) - len(least.tickets) > max(1, best.ready.slots // 4)
        return least if crowded or known(best) == known(least) else best

    def cancel(self, ticket: Ticket) -> None:
        if ticket.worker is not None:
            ticket.worker.outbox.put(Cancel(ticket.key))
        elif ticket in self.waiting:
            self.waiting.remove(ticket)
        ticket.over = True

    # ---- what workers say ----------------------------------------------------------------------

    def take(self, process: Process, message: Any) -> None:
        """A message of a worker."""
        if isinstance(message, Ready):
            process.ready, process.blocks = message, OrderedDict()
            if self.last is not None:
                process.change(Load(*self.last))
            if self.paused:
                process.change(Pause(self.paused))
            if not self.started.done() and len(self.ready) == len(self.processes):
                self.started.set_result(None)
        elif isinstance(message, UserError):
            if not self.started.done():
                self.started.set_exception(message)
        elif isinstance(message, Done):
            future = process.changes.popleft()
            if not future.done():
                future.set_result(message)
        else:
            for part in message:
                self.deliver(process, part)
        self.feed()

    def deliver(self, process: Process, part: Part | Refused) -> None:
        ticket = process.tickets.get(part.key)
        if ticket is None:
            return
        if isinstance(part, Refused) or part.finish_reason:
            del process.tickets[part.key]
            ticket.worker = None
        ticket.give(Failure(part.reason, refused=True) if isinstance(part, Refused) else part)

    def lost(self, process: Process, connection: Connection) -> None:
        """A worker has died: start it again; what nobody has seen of its work is asked again."""
        if connection is not process.connection or self.closing:
            return
        if not self.started.done():
            self.started.set_exception(UserError("a worker ended while it opened the model; its error stands above"))
            return
        print(
            f"worker {process.index} has died (exit status {process.process.exitcode}); it is started again",
            file=sys.stderr,
            flush=True,
        )
        tickets, process.tickets, process.ready = list(process.tickets.values()), {}, None
        for future in process.changes:
            if not future.done():
                future.set_result(Done("lost", -1, problem="the worker has died and is started again"))
        process.changes.clear()
        for ticket in reversed(tickets):
            ticket.worker = None
            if ticket.over:
                continue
            if ticket.begun or ticket._parts or ticket.attempts >= MOST_ATTEMPTS:
                ticket.give(Failure("the worker that wrote this answer has died; please ask again"))
            else:
                self.waiting.appendleft(ticket)
        process.restarts += 1
        process.start()
        self.feed()

    # ---- weights -------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> list[Done]:
        """Stop all workers; requests that come wait."""
        self.paused = mode
        return await self.change(Pause(mode))

    async def resume(self) -> list[Done]:
        done = await self.change(Resume())
        self.paused = None
        self.feed()
        return done

    async def load(self, source: str | bytes, version: int) -> list[Done]:
        """New weights everywhere; a worker that starts anew later takes them too."""
        done = await self.change(Load(source, version))
        if not any(one.problem for one in done):
            self.last = (source, version)
        return done

    async def change(self, message: Pause | Resume | Load) -> list[Done]:
        return list(await asyncio.gather(*(process.change(message) for process in self.processes if process.ready)))

    # ---- the end -------------------------------------------------------------------------------

    async def close(self, drain: float) -> None:
        """Take nothing new, let running answers finish for up to `drain` seconds, end the workers."""
        self.closing = True
        until = time.monotonic() + drain
        while time.monotonic() < until and (self.waiting or any(process.tickets for process in self.processes)):
            await asyncio.sleep(0.02)
        for process in self.processes:
            process.outbox.put(None)
        for process in self.processes:
            await asyncio.to_thread(process.process.join, 5)
            process.process.kill()


def blocks_of(prompt: Sequence[int]) -> list[int]:
    """A number for each whole block of the prompt that stands for it and all before it."""
    numbers, before = [], 0
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        before = hash((before, *prompt[begin : begin + BLOCK]))
        numbers.append(before)
    return numbers


def remember(known: OrderedDict[int, None], blocks: Sequence[int]) -> None:
    for block in blocks:
        known[block] = None
        known.move_to_end(block)
    while len(known) > BLOCKS:
        known.popitem(last=False)
