"""What the routes of the server work with: the service, and what was asked of it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from ascendchat.config.serve import ServeConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Grammar
from ascendchat.serve.answers import About
from ascendchat.serve.errors import Problem
from ascendchat.serve.messages import Ready
from ascendchat.serve.pool import Overloaded, Pool, Ticket
from ascendchat.serve.prompts import Asked, Model, asked_by, bad_grammar
from ascendchat.serve.reader import Reader
from ascendchat.serve.reading import read
from ascendchat.serve.schemas import Schemas

LARGE = 1 << 14  # bytes of a request that is read in another process


JSON_TYPE = re.compile(r"application/(.+\+)?json")


@dataclass
class Service:
    """What the routes work with."""

    config: ServeConfig
    pool: Pool
    tokenizer: Tokenizer
    reader: Reader
    created: int = field(default_factory=lambda: int(time.time()))
    about: Ready = field(init=False)  # what the first worker said of the model, also while it is started anew

    def __post_init__(self) -> None:
        self.schemas = Schemas(self.config, self.tokenizer)
        self.about = self.pool.ready[0]

    @property
    def name(self) -> str:
        """Of the model."""
        return self.config.model_name or f"{self.about.model.get('run')}/{self.about.model.get('stage')}"

    @property
    def facts(self) -> dict[str, Any]:
        """Stage, step and chats of the weights that were loaded last; stage and step are None where nobody said."""
        return {name: {**self.about.model, **self.pool.facts}[name] for name in ("stage", "step", "chats")}

    @property
    def chats(self) -> bool:
        """Whether the model has learned to."""
        return bool(self.facts["chats"])

    @property
    def version(self) -> int:
        """Of the weights that were loaded last."""
        return self.pool.version

    @property
    def fingerprint(self) -> str:
        """Equal weights have equal fingerprints."""
        known = (process.checksum for process in self.pool.processes if process.checksum)
        return f"fp_{next(known, self.about.checksum)}"

    @property
    def model(self) -> Model:
        """As a request must fit it."""
        most = self.config.max_queue + self.config.devices * self.about.slots
        about = self.about
        return Model(self.config, self.tokenizer, self.name, self.chats, about.context, about.vocab, most)

    async def read(self, request: Request) -> Any:
        """What reading.read makes of a request; of a large one beside the event loop."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not JSON_TYPE.fullmatch(kind):
            raise Problem(400, "the body must be a JSON object (Content-Type: application/json)")
        path, content = request.scope["route"].path, await request.body()
        return (
            read(path, content, self.model)
            if len(content) < LARGE
            else await self.reader.read(path, content, self.model)
        )

    async def submit(self, asked: Asked, owner: str) -> list[Ticket]:
        """Queue all of a request, or none of it. `owner` of its API key: nobody finds out from the prefix cache what
        others have asked."""
        if (grammar := asked.requests[0].sampling.grammar) is not None:
            await self.check(grammar, asked_by(asked.calls), owner)
        tickets: list[Ticket] = []
        try:
            for request in asked.requests:
                request = replace(request, salt=f"{owner} {request.salt}")
                tickets.append(self.pool.submit(request, streams=asked.streams))
        except Overloaded as error:
            for ticket in tickets:
                ticket.cancel()
            raise Problem.of(error) from None
        return tickets

    async def check(self, grammar: Grammar, param: str, owner: str) -> None:
        """A schema that cannot be used is refused here, and not in the queue."""
        try:
            await self.schemas.check(grammar, owner)
        except ValueError as error:
            raise bad_grammar(param, str(error)) from None
        except Overloaded as error:
            raise Problem.of(error) from None

    def answer_about(self, asked: Asked) -> About:
        """What every chunk of the answer says."""
        return About(
            self.name,
            self.fingerprint,
            self.version,
            self.tokenizer,
            asked.n,
            include_usage=asked.include_usage,
            token_ids=asked.token_ids,
            as_ids=asked.as_ids,
        )
