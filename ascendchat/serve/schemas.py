"""Checks the grammar of a request beside the event loop: hostile ones take seconds.

await Schemas(config, tokenizer).check(grammar, owner)        # a ValueError says why not; Overloaded: too many wait
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from ascendchat.engine.grammar import grammars
from ascendchat.serve.pool import Overloaded

if TYPE_CHECKING:
    from ascendchat.config.serve import ServeConfig
    from ascendchat.data.tokenizer.tokenizer import Tokenizer
    from ascendchat.engine.request import Grammar

MAX_CHECKS = 64  # at the same time, each in a thread that waits


class Schemas:
    """The checks of one server. Everything is called from the event loop."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.under_way = 0

    async def check(self, grammar: Grammar, owner: str) -> None:
        """Check as Grammars.check does; Overloaded when too many wait."""
        if self.under_way >= MAX_CHECKS:
            raise Overloaded(1, "too many schemas wait to be checked; try again later")
        loop = asyncio.get_running_loop()
        checked: asyncio.Future[None] = loop.create_future()

        def done(reason: str | None) -> None:
            self.under_way -= 1
            if checked.done():
                return
            if reason is None:
                checked.set_exception(RuntimeError("a schema could not be checked; the reason stands above"))
            elif reason:
                checked.set_exception(ValueError(reason))
            else:
                checked.set_result(None)

        def work() -> None:
            reason = None
            try:
                grammars(self.tokenizer).check(grammar, owner)
                reason = ""
            except ValueError as error:
                reason = str(error)
            finally:
                with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(done, reason)

        self.under_way += 1
        threading.Thread(target=work, daemon=True).start()  # one of a pool's would keep the server from ending
        try:
            await asyncio.wait_for(checked, self.config.queue_timeout)
        except asyncio.TimeoutError:
            raise Overloaded(1, "the schema could not be checked in time; try again later") from None
