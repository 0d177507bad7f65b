"""The workers of a server and who answers what: started, fed, watched and restarted from the server's event loop.

    pool = Pool(config); await pool.start()                # one worker process per device (worker.py)
    ticket = pool.submit(request, streams=True)            # ticket.py; Overloaded, when too many wait already
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
import time
from collections import OrderedDict, deque
from typing import Any

from ascendchat.config import UserError
from ascendchat.config.serve import ServeConfig
from ascendchat.engine.request import Request
from ascendchat.remote.routing import Candidate, blocks_of, choose, remember
from ascendchat.serve.child import Child
from ascendchat.serve.messages import (
    Ask,
    Begun,
    Cancel,
    Check,
    Done,
    Load,
    Part,
    Pause,
    PauseMode,
    Ready,
    Refused,
    Resume,
)
from ascendchat.serve.process import PATIENCE, Process, say
from ascendchat.serve.ticket import Failure, Overloaded, Ticket, joined

__all__ = ["Failure", "Overloaded", "Pool", "Process", "Ticket", "joined"]

DIED = -1  # as the version in what a worker says last
HANDING_OVER = 30.0  # seconds in which a worker must say what it has written of an answer whose time is over
MOST_ATTEMPTS = 3  # workers that may die over one request before it is given up, or be killed before they are ready


class Clock:
    """Seconds in which requests can be answered: it stands still while the pool is held."""

    def __init__(self) -> None:
        self._stood = 0.0  # seconds
        self._stopped: float | None = None  # since then

    def now(self) -> float:
        return (time.monotonic() if self._stopped is None else self._stopped) - self._stood

    def stop(self) -> None:
        """Nothing happens if it stands already."""
        if self._stopped is None:
            self._stopped = time.monotonic()

    def start(self) -> None:
        if self._stopped is not None:
            self._stood += time.monotonic() - self._stopped
            self._stopped = None


class Pool:
    """All workers. Everything is called from the event loop. `patience`: seconds, see PATIENCE."""

    def __init__(self, config: ServeConfig, patience: float = PATIENCE) -> None:
        self.config, self.patience = config, patience
        self.processes = [Process(self, index) for index in range(config.devices)]
        self.waiting: deque[Ticket] = deque()
        self.keys = itertools.count()
        self.closing = False
        self.paused: PauseMode | None = None  # by request
        self.loading = False  # weights are being replaced
        self.last: Load | None = None  # the weights loaded last, for a worker that starts anew
        self.facts: dict[str, Any] = {}  # of them: stage, step, chats, as far as they are known
        self._clock = Clock()  # of the time limits
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
        """An error of ours ends the start; afterwards it stands in the log, as asyncio writes it."""
        self._tasks.discard(task)
        if not self.started.done() and not task.cancelled() and (error := task.exception()):
            self.started.set_exception(error)

    @property
    def failed(self) -> bool:
        """The start has ended without a server."""
        return self.started.done() and (self.started.cancelled() or self.started.exception() is not None)

    @property
    def ready(self) -> list[Ready]:
        """What the workers that answer have said of themselves."""
        return [process.ready for process in self.processes if process.ready is not None]

    @property
    def held(self) -> bool:
        """No request begins."""
        return self.loading or self.paused is not None

    @property
    def tickets(self) -> list[Ticket]:
        """Of all requests, waiting and under way."""
        return [*self.waiting, *(ticket for process in self.processes for ticket in process.tickets.values())]

    @property
    def version(self) -> int:
        """Of the weights that answer the next request."""
        return self.last.version if self.last else 0

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, *, streams: bool) -> Ticket:
        """Queue a request; Overloaded when the queue is full."""
        if self.closing:
            raise Overloaded(max(1, round(self.config.drain)), "the server is being stopped; try again later")
        if len(self.waiting) >= self.config.max_queue + sum(max(0, process.room) for process in self.processes):
            raise Overloaded(self.retry_after())
        ticket = Ticket(next(self.keys), request, streams, self.cancel)
        ticket.end = self._clock.now() + self.config.request_timeout
        self._limit(ticket, min(self.config.queue_timeout, self.config.request_timeout))
        self.waiting.append(ticket)
        self.feed()
        return ticket

    def retry_after(self) -> int:
        """Seconds after which a slot is likely to be free."""
        return max(1, min(60, len(self.waiting) // max(1, sum(ready.slots for ready in self.ready))))

    def feed(self) -> None:
        """Give waiting requests to workers that have room."""
        while self.waiting and not self.held:
            free = [process for process in self.processes if process.room > 0]
            if not free:
                break
            ticket = self.waiting.popleft()
            blocks = blocks_of(ticket.request.prompt, ticket.request.salt)
            candidates = [Candidate(len(p.tickets), p.ready.slots, p.blocks) for p in free if p.ready]
            process = free[choose(candidates, blocks)]
            remember(process.blocks, blocks)
            process.send(Ask(ticket.key, ticket.request, ticket.streams))
            ticket.worker, process.tickets[ticket.key] = process, ticket
            ticket.attempts += 1
        if not self.waiting and not any(process.tickets for process in self.processes):
            self._idle.set()

    def cancel(self, ticket: Ticket) -> None:
        """Nobody wants the rest."""
        if not ticket.closed:
            ticket.close()
            self._drop(ticket)

    def fail(self, ticket: Ticket, failure: Failure) -> None:
        """End a request and say why."""
        if not ticket.closed:
            ticket.give(failure)
            self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        """A worker's slot is free when the worker has said so."""
        if ticket.worker is not None:
            ticket.worker.send(Cancel(ticket.key))
        else:
            self.waiting.remove(ticket)
            self.feed()

    def _limit(self, ticket: Ticket, seconds: float) -> None:
        """Give a request so many seconds for what comes next."""
        ticket.until = self._clock.now() + seconds
        self._wake(ticket)

    def _wake(self, ticket: Ticket) -> None:
        """Look at a request again when its time is over."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        ticket.timer = self.loop.call_later(max(0.0, ticket.until - self._clock.now()), self._timeout, ticket)

    def _timeout(self, ticket: Ticket) -> None:
        if self.held:
            return  # resume() looks after it
        if ticket.first_token is not None and not ticket.stopped:
            ticket.stopped = True
            ticket.worker.send(Cancel(ticket.key))
            self._limit(ticket, HANDING_OVER)
        elif ticket.first_token is not None:
            reason = f"the answer took longer than {self.config.request_timeout:g} s and was ended"
            self.fail(ticket, Failure(reason, retry_after=self.retry_after()))
        else:
            reason = f"no answer could begin within {time.monotonic() - ticket.since:.0f} s; try again later"
            self.fail(ticket, Failure(reason, retry_after=self.retry_after()))

    # ---- what workers say ----------------------------------------------------------------------

    def take(self, process: Process, message: Any) -> None:
        """A message of a worker."""
        if isinstance(message, list):
            for part in message:
                self._deliver(process, part)
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

    def _deliver(self, process: Process, part: Begun | Part | Refused) -> None:
        ticket = process.tickets.get(part.key)
        if ticket is None:
            return
        process.proven = True
        if ticket.first_token is None and not isinstance(part, Refused):
            ticket.first_token = time.monotonic()
            if not ticket.closed:
                self._limit(ticket, ticket.end - self._clock.now())
        if isinstance(part, Begun):
            return
        if isinstance(part, Refused) or part.finish_reason:
            del process.tickets[part.key]
            ticket.worker = None
            if ticket.stopped and isinstance(part, Part) and part.finish_reason == "cancelled":
                part = part._replace(finish_reason="timeout")
        ticket.give(Failure(part.reason, refused=True) if isinstance(part, Refused) else part)

    async def _enter(self, process: Process, ready: Ready) -> None:
        """A worker has opened the model. It takes part once its weights are those of the others."""
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
        """Have a process at hand."""
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
        """A worker has died; what nobody has seen of its work is asked again. True: start it again."""
        tickets, process.tickets, process.ready = list(process.tickets.values()), {}, None
        for number, future in process.changes.items():
            if not future.done():
                future.set_result(Done(number, DIED, problem=f"worker {process.index} has died and is started again"))
        process.changes.clear()
        for ticket in reversed(tickets):
            again = ticket.attempts < MOST_ATTEMPTS and not self.closing and not ticket.stopped
            if again and ticket.restart():
                self.waiting.appendleft(ticket)
                self._limit(ticket, self.config.queue_timeout)
            else:
                ticket.worker = None
                ticket.give(Failure("the worker that wrote this answer has died; please ask again"))
        if self.closing:
            self.feed()  # close() need not wait any longer if these were the last
            return False
        if not self.started.done() and not (process.killed and process.early_deaths < MOST_ATTEMPTS):
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
        """Go on; also when nothing was paused."""
        self.paused = None
        if not self.loading:
            await self._change(Resume())
            if not self.held:
                self._go_on()

    def _go_on(self) -> None:
        """Requests are answered again: the time of a pause was not theirs."""
        self._clock.start()
        for ticket in self.tickets:
            if not ticket.closed:
                self._wake(ticket)
        self.feed()

    async def load(self, source: str, version: int) -> None:
        """Weights of a checkpoint folder or a safetensors file, for all workers or for none: with a UserError when they
        do not fit, with a Failure when it can be tried again. Answers under way are finished first, or as `pause` has
        said; the files must stay as long as these weights are used."""
        async with self._load:
            checked = await self._change(Check(source, version))
            problems = sorted((done.version == DIED, done.problem) for done in checked if done.problem)
            if problems or not checked:
                await self._change(Check(""))
                died, problem = problems[0] if problems else (True, "no worker is there to take them; try again")
                raise Failure(problem) if died else UserError(problem)
            self.loading = True
            self._clock.stop()
            try:
                if not self.paused:
                    await self._change(Pause("wait"))
                self.last = load = Load(source, version)
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

    async def _change(self, what: Pause | Resume | Check | Load) -> list[Done]:
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
        for ticket in self.tickets:
            self.fail(ticket, Failure("the server was stopped before the answer was finished"))
        children = [child for child in (self._spare, *(process.child for process in self.processes)) if child]
        for child in children:
            child.kill()
        await asyncio.gather(*(child.end() for child in children))
        for task in list(self._tasks):
            task.cancel()
