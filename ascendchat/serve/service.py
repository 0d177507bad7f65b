"""The service behind the routes: a request of the API becomes requests of the pool."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fastapi import Request

from ascendchat.config.serve import ServeConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Grammar
from ascendchat.serve.answers import About
from ascendchat.serve.errors import ApiError
from ascendchat.serve.guard import BODY, OWNER
from ascendchat.serve.large_requests import LargeRequests
from ascendchat.serve.pool import Overloaded, PendingRequest, WorkerPool
from ascendchat.serve.prompts import GenerationRequest, ServedModel, bad_grammar, grammar_field, read
from ascendchat.serve.schemas import Schemas
from ascendchat.serve.worker_messages import Ready

LARGE = 1 << 14  # bytes of a request that is read in another process
JSON_TYPE = re.compile(r"application/(.+\+)?json")


class _Generation(NamedTuple):
    """An API request under way."""

    wanted: GenerationRequest
    pending: Sequence[PendingRequest]  # one per choice
    about: About


@dataclass
class Service:
    """Everything that the routes share."""

    config: ServeConfig
    pool: WorkerPool
    tokenizer: Tokenizer
    large_requests: LargeRequests
    created: int = field(default_factory=lambda: int(time.time()))
    about: Ready = field(init=False)  # what the first worker said of the model, also while it is started anew

    def __post_init__(self) -> None:
        self.schemas = Schemas(self.config, self.tokenizer)
        self.about = self.pool.ready[0]

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.model_name or f"{self.about.model.get('run')}/{self.about.model.get('stage')}"

    @property
    def facts(self) -> dict[str, Any]:
        """Stage, step and chats of the weights that were loaded last; stage and step are None where nobody said."""
        return {name: {**self.about.model, **self.pool.facts}[name] for name in ("stage", "step", "chats")}

    @property
    def chats(self) -> bool:
        """True if the model has learned to chat."""
        return bool(self.facts["chats"])

    @property
    def version(self) -> int:
        """Version of the weights that were loaded last."""
        return self.pool.version

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the weights: equal ones have equal fingerprints."""
        checksums = (process.checksum for process in self.pool.processes if process.checksum)
        return f"fp_{next(checksums, self.about.checksum)}"

    @property
    def model(self) -> ServedModel:
        """The model, as far as a request must fit it."""
        most = self.config.max_queue + self.config.devices * self.about.slots
        about = self.about
        return ServedModel(self.config, self.tokenizer, self.name, self.chats, about.context, about.vocab, most)

    async def read(self, request: Request) -> Any:
        """Read a request by prompts.read; a large one beside the event loop."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not JSON_TYPE.fullmatch(kind):
            raise ApiError(400, "the body must be a JSON object (Content-Type: application/json)")
        path, content = request.scope["route"].path, request.scope[BODY]  # guard.py has read the body
        if len(content) < LARGE:
            return read(path, content, self.model)
        return await self.large_requests.read(path, content, self.model)

    async def generate(self, request: Request) -> _Generation:
        """Queue all choices of a request, or none. Prompts of different API keys share nothing in the prefix cache:
        nobody finds out from it what others have asked."""
        wanted: GenerationRequest = await self.read(request)
        owner = str(request.scope.get(OWNER, ""))  # of the API key, as Guard has found it; "" where there are no keys
        if (grammar := wanted.requests[0].sampling.grammar) is not None:
            await self.check(grammar, grammar_field(wanted.calls), owner)
        version = self.version
        about = About(self.name, self.fingerprint, version, self.tokenizer)
        pending: list[PendingRequest] = []
        try:
            for one in wanted.requests:
                one = replace(one, salt=f"{owner} {one.salt}")
                pending.append(self.pool.submit(one, streams=wanted.streams))
        except Overloaded as error:
            for earlier in pending:
                earlier.cancel()
            raise ApiError.of(error) from None
        return _Generation(wanted, pending, about)

    async def check(self, grammar: Grammar, param: str, owner: str) -> None:
        """Refuse a schema that cannot be used here, and not in the queue."""
        try:
            await self.schemas.check(grammar, owner)
        except ValueError as error:
            raise bad_grammar(param, str(error)) from None
        except Overloaded as error:
            raise ApiError.of(error) from None
