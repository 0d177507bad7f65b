"""A worker as the pool sees it: whatever process does its work at the moment, what it is doing, and whether it hangs.

process = Process(pool, 0); await process.live()                 # for ever: when its process dies, it gets another
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ascendchat.serve.child import Child
from ascendchat.serve.messages import Change, Check, Done, Load, Open, Pause, Ready, Resume
from ascendchat.serve.ticket import Ticket

if TYPE_CHECKING:
    from ascendchat.serve.pool import Pool

PATIENCE = 300.0  # seconds without a word from a worker that has work, after which it counts as hanging
FIRST_TIME = 4  # times as many until it has answered something: it opens the model, compiles, records graphs
LONGEST_PAUSE = 30.0  # seconds between two attempts to start a worker that dies before it has answered anything


def say(text: str) -> None:
    """To who runs the server."""
    print(text, file=sys.stderr, flush=True)


class Process:
    """A worker as the pool sees it. When its process dies, it gets another."""

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index = pool, index
        self.child: Child | None = None
        self.ready: Ready | None = None  # None while it starts
        self.loaded: Load | None = None  # what it answers with; None: what it has opened
        self.checksum = ""
        self.tickets: dict[int, Ticket] = {}
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
                how, self.killed = ended(status), status is not None and status < 0 and not self.hangs
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

    def change(self, what: Pause | Resume | Check | Load) -> asyncio.Future[Done]:
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
        return self.ready.slots + max(1, self.ready.slots // 8) - len(self.tickets)

    # ---- does it hang? -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """It must say something before long."""
        return self.ready is None or bool(self.changes) or (bool(self.tickets) and not self.pool.held)

    def watch(self) -> None:
        """Called before it gets something to do: from now on it must say something within PATIENCE."""
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


def ended(status: int | None) -> str:
    """How a process has ended, in words."""
    if status is None:
        return "it cannot be ended"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def pause_after(early_deaths: int) -> float:
    """Seconds before a worker is started again that has died so many times without an answer in between."""
    return min(LONGEST_PAUSE, 2.0 ** min(early_deaths - 2, 10)) if early_deaths else 0.0
