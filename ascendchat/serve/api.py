"""The application behind `ascendchat serve`: OpenAI's routes, health, and the web page.

application(Service(config, pool, tokenizer)) is an ASGI app; command.py gives it to uvicorn. protocol.py says what a
request may hold, prompts.py makes requests of the engine of it, answers.py writes what comes back, reply.py sends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from ascendchat import __version__
from ascendchat.config.serve import ServeConfig
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.serve import errors, weights
from ascendchat.serve.answers import About, ChatAnswers, TextAnswers
from ascendchat.serve.document import ANSWER, DETOKENIZED, MODEL, MODELS, RESPONSE, TOKENIZED, described
from ascendchat.serve.errors import Problem
from ascendchat.serve.messages import Ready
from ascendchat.serve.pool import Overloaded, Pool, Ticket
from ascendchat.serve.prompts import Asked, chat_prompts, check_chats, completion_prompts, rendered
from ascendchat.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from ascendchat.serve.reply import Reply
from ascendchat.serve.response_events import ResponseAnswers
from ascendchat.serve.responses import ResponsesRequest, chat_request
from ascendchat.serve.tools import Tools

WEB = Path(__file__).parent / "web"
LONG = 1 << 14  # bytes of a request whose tokens are counted beside the event loop

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass
class Service:
    """What the routes work with."""

    config: ServeConfig
    pool: Pool
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    about: Ready = field(init=False)  # what the first worker said of the model, also while it is started anew

    def __post_init__(self) -> None:
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

    def check_model(self, name: str | None) -> None:
        """There is one; nothing or its name must be asked for."""
        if name is not None and name != self.name:
            raise Problem(404, f"the model {name!r} is not here; this is {self.name!r}", param="model", code=NO_MODEL)

    def submit(self, asked: Asked, streams: bool) -> list[Ticket]:
        """Queue all of a request, or none of it."""
        most = self.config.max_queue + self.config.devices * self.about.slots
        if len(asked.requests) > most:
            raise Problem(400, f"n: this server takes {most} answers at once at most", param="n", code="invalid_value")
        tickets: list[Ticket] = []
        try:
            for request in asked.requests:
                tickets.append(self.pool.submit(request, streams=streams))
        except Overloaded as error:
            for ticket in tickets:
                ticket.cancel()
            raise Problem.of(error) from None
        return tickets

    def answer_about(self, body: SamplingFields) -> About:
        """What every chunk of the answer says."""
        options = body.stream_options
        return About(
            self.name,
            self.fingerprint,
            self.version,
            self.tokenizer,
            body.n or 1,
            include_usage=bool(options and options.include_usage),
            token_ids=bool(body.return_token_ids),
            as_ids=isinstance(body, CompletionRequest) and body.return_tokens_as_token_ids,
        )


NO_MODEL = "model_not_found"


async def prepared(request: Request, make: Callable[[Service, Given], Made], service: Service, body: Given) -> Made:
    """make(service, body), in a thread when it takes long: large prompts and schemas must not hold up other answers."""
    compiles = isinstance(body, ChatRequest) and bool(body.tools or body.response_format)
    if not compiles and int(request.headers.get("content-length") or LONG) < LONG:
        return make(service, body)
    return await asyncio.to_thread(make, service, body)


def application(service: Service) -> FastAPI:
    """All routes."""
    app = FastAPI(title="ascendchat", version=__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    app.include_router(completion_routes(service))
    app.include_router(token_routes(service))
    app.include_router(version_routes())
    if service.config.weight_updates:
        app.include_router(weights.routes(service))
    if service.config.web:
        app.include_router(page_routes())
    described(app)
    return app


def completion_routes(service: Service) -> APIRouter:
    """What an application asks for."""
    router = APIRouter(responses=errors.documented(400, 401, 404, 413, 429, 503))

    @router.post("/v1/chat/completions", responses=ANSWER)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """The assistant's next turn."""
        asked = await prepared(request, chat_prompts, service, body)
        answers, streams = ChatAnswers(service.answer_about(body), asked), bool(body.stream)
        return Reply(service.submit(asked, streams), answers, streams=streams)

    @router.post("/v1/completions", responses=ANSWER)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """A text continued."""
        asked = await prepared(request, completion_prompts, service, body)
        answers, streams = TextAnswers(service.answer_about(body), asked), bool(body.stream)
        return Reply(service.submit(asked, streams), answers, streams=streams)

    @router.post("/v1/responses", responses=RESPONSE)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """The same in the form of the Responses API; nothing is stored."""
        chat = chat_request(body)
        asked = await prepared(request, chat_prompts, service, chat)
        answers, streams = ResponseAnswers(service.answer_about(chat), asked, body), bool(body.stream)
        return Reply(service.submit(asked, streams), answers, streams=streams)

    @router.get("/v1/models", responses=MODELS)
    async def models() -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [model_card(service)]})

    @router.get("/v1/models/{model:path}", responses=MODEL)
    async def model(model: str) -> Response:
        """The same by its name, which may hold a slash."""
        service.check_model(model)
        return JSONResponse(model_card(service))

    return router


def token_routes(service: Service) -> APIRouter:
    """Texts to token ids and back."""
    router = APIRouter(responses=errors.documented(400, 401, 404, 413, 429, 503))

    def tokens_of(service: Service, body: TokenizeRequest) -> list[int]:
        service.check_model(body.model)
        if body.messages is not None:
            check_chats(service)
            return rendered(service, body.messages, Tools.of(body.tools, None, None), body.add_generation_prompt)
        ids = service.tokenizer.encode(body.prompt or "")
        return [service.tokenizer.bos, *ids] if body.add_special_tokens else ids

    @router.post("/tokenize", responses=TOKENIZED)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The token ids of a text or of messages."""
        ids = await prepared(request, tokens_of, service, body)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": service.about.context, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [service.tokenizer.decode([token]) for token in ids]
        return JSONResponse(found)

    @router.post("/detokenize", responses=DETOKENIZED)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids; special tokens are written by their names."""
        service.check_model(body.model)
        if body.tokens and max(body.tokens) >= service.tokenizer.vocab_size:
            raise Problem(400, f"tokens: ids end at {service.tokenizer.vocab_size - 1}", param="tokens")
        return JSONResponse({"prompt": service.tokenizer.decode(body.tokens)})

    return router


def version_routes() -> APIRouter:
    """What runs here; /health and /metrics are in metrics.py."""
    router = APIRouter()

    @router.get("/version")
    async def version() -> Response:
        """Of ascendchat."""
        return JSONResponse({"version": __version__})

    return router


def page_routes() -> APIRouter:
    """The web page; not part of the API document."""
    router = APIRouter(include_in_schema=False)
    known = {path.name: path for path in WEB.iterdir() if path.is_file()} if WEB.is_dir() else {}

    @router.get("/")
    async def index() -> Response:
        return await page("index.html")

    @router.get("/web/{name}")
    async def page(name: str) -> Response:
        if name not in known:
            raise Problem(404, f"there is no page {name}")
        return FileResponse(known[name])

    return router


def model_card(service: Service) -> dict[str, Any]:
    """What /v1/models says of the model; `ascendchat` is ours, for the web page."""
    config, about = service.config, service.about
    own = {
        "context": about.context,
        "device": about.device,
        "devices": config.devices,
        **service.facts,
        "version": service.version,
        "defaults": {"temperature": config.temperature, "top_k": config.top_k, "max_tokens": config.max_tokens},
    }
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "ascendchat",
        "max_model_len": about.context,
        "ascendchat": own,
    }
