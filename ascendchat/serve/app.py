"""The application behind `ascendchat serve`: OpenAI's routes and the web page; metrics.py has /health.

application(Service(config, pool, tokenizer, large_requests)) is an ASGI app; command.py gives it to uvicorn. A request
is read by prompts.py, which makes engine requests of the fields in protocol.py; the pool has workers that answer them;
answers.py and response_events.py write what comes back, and AnswerResponse sends it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

from ascendchat.serve import errors, weights
from ascendchat.serve.answers import ChatAnswers, TextAnswers
from ascendchat.serve.errors import ApiError, error_event
from ascendchat.serve.pool import AnswerFailed, PendingRequest
from ascendchat.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PublicNames,
    ResponsesRequest,
    TokenizeRequest,
)
from ascendchat.serve.response_events import ResponseAnswers
from ascendchat.serve.service import Service
from ascendchat.serve.worker_messages import Chunk
from ascendchat.version import __version__

WEB = Path(__file__).parent / "web"


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
    """Routes that generate, and those that name the model."""
    router = APIRouter(responses=errors.documented(400, 401, 404, 413, 429, 503))

    @router.post("/v1/chat/completions", responses=ANSWER, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """The assistant's next turn."""
        wanted, pending, about = await service.generate(request)
        return AnswerResponse(pending, ChatAnswers(about, wanted), streams=wanted.streams)

    @router.post("/v1/completions", responses=ANSWER, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        """A text continued."""
        wanted, pending, about = await service.generate(request)
        return AnswerResponse(pending, TextAnswers(about, wanted), streams=wanted.streams)

    @router.post("/v1/responses", responses=RESPONSE, openapi_extra=takes(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """An answer in the form of the Responses API; nothing is stored."""
        wanted, pending, about = await service.generate(request)
        return AnswerResponse(pending, ResponseAnswers(about, wanted), streams=wanted.streams)

    @router.get("/v1/models", responses=MODELS)
    async def models() -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [model_card(service)]})

    @router.get("/v1/models/{model:path}", responses=MODEL)
    async def model(model: str) -> Response:
        """One model by its name, which may hold a slash."""
        service.model.check_name(model)
        return JSONResponse(model_card(service))

    return router


def token_routes(service: Service) -> APIRouter:
    """Texts to token ids and back."""
    router = APIRouter(responses=errors.documented(400, 401, 404, 413, 429, 503))

    @router.post("/tokenize", responses=TOKENIZED, openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of messages."""
        return written(await service.read(request))

    @router.post("/detokenize", responses=DETOKENIZED, openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids; special tokens are written by their names."""
        return written(await service.read(request))

    return router


def written(pieces: list[bytes]) -> Response:
    """A JSON text of any length, which is sent while others are."""

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    headers = {"Content-Length": str(sum(map(len, pieces)))}
    return StreamingResponse(sent(), headers=headers, media_type="application/json")


def version_routes() -> APIRouter:
    """The route of the version; /health and /metrics are in metrics.py."""
    router = APIRouter()

    @router.get("/version")
    async def version() -> Response:
        """The version of ascendchat."""
        return JSONResponse({"version": __version__})

    return router


def page_routes() -> APIRouter:
    """The web page; not part of the API document."""
    router = APIRouter(include_in_schema=False)
    pages = {path.name: path for path in WEB.iterdir() if path.is_file()} if WEB.is_dir() else {}

    @router.get("/")
    async def index() -> Response:
        return await page("index.html")

    @router.get("/web/{name}")
    async def page(name: str) -> Response:
        if name not in pages:
            raise ApiError(404, f"there is no page {name}")
        return FileResponse(pages[name])

    return router


def model_card(service: Service) -> dict[str, Any]:
    """The entry of the model in /v1/models; `ascendchat` is ours, for the web page."""
    config, about = service.config, service.about
    own = {
        "context": about.context,
        "device": about.device,
        "devices": config.devices,
        "request_timeout": config.request_timeout,
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


# The OpenAPI document (/openapi.json): the form of requests, which the routes read by themselves, and of the answers,
# which are written without pydantic.
#
# described(app) adds the models of takes(), and leaves out what FastAPI would add and we never say (422).

PLACE = "#/components/schemas/{model}"
Responses = dict[int | str, dict[str, Any]]


def of(schema: dict[str, Any], description: str, **further: Any) -> Responses:
    """A 200 of this form."""
    return {200: {"description": description, "content": {"application/json": {"schema": schema}, **further}}}


_taken: dict[str, type[BaseModel]] = {}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """For a route (openapi_extra): its body is such a request."""
    _taken[model.__name__] = model
    reference = {"$ref": PLACE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def an_object(**properties: Any) -> dict[str, Any]:
    """All these fields, and perhaps others."""
    return {"type": "object", "required": list(properties), "properties": properties}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
OBJECT = {"type": "object"}
IDS = {"type": "array", "items": COUNT}

EVENT_STREAM = {"text/event-stream": {"schema": TEXT}}
ANSWER = of(
    an_object(
        id=TEXT,
        object=TEXT,
        created=COUNT,
        model=TEXT,
        choices={"type": "array", "items": an_object(index=COUNT, finish_reason=TEXT, ascendchat=OBJECT)},
        usage=an_object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
    ),
    "The answer; with `stream: true` its chunks as server-sent events",
    **EVENT_STREAM,
)
RESPONSE = of(
    an_object(id=TEXT, object=TEXT, status=TEXT, model=TEXT, output={"type": "array", "items": OBJECT}),
    "The answer; with `stream: true` its events",
    **EVENT_STREAM,
)
CARD = an_object(id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT, ascendchat=OBJECT)
MODEL = of(CARD, "The model")
MODELS = of(an_object(object=TEXT, data={"type": "array", "items": CARD}), "All models")
TOKENIZED = of(an_object(count=COUNT, max_model_len=COUNT, tokens=IDS), "Token ids")
DETOKENIZED = of(an_object(prompt=TEXT), "The text")


def described(app: FastAPI) -> None:
    """Make app.openapi() truthful."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            _, definitions = models_json_schema(
                [(model, "validation") for model in _taken.values()], ref_template=PLACE, schema_generator=PublicNames
            )
            schemas.update(definitions["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


# An answer on its way to one client: the pending requests it waits for, and the end when the client goes away.
#
#     return AnswerResponse(pending, answers, streams=True)           # from a route; an ASGI response
#
# Before the first byte an error has its HTTP status; later it is an event of the stream, which then ends. A client that
# goes away, streaming or not, cancels what is being generated for it.

EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a reverse proxy passes events on at once
]


class _Writer(Protocol):
    """A writer of answers (answers.py, response_events.py)."""

    def opening(self) -> bytes: ...
    def chunk(self, index: int, chunk: Chunk) -> bytes: ...
    def closing(self) -> bytes: ...
    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]: ...


class AnswerResponse(Response):
    """Sends what the pending requests bring."""

    def __init__(self, pending: Sequence[PendingRequest], answers: _Writer, *, streams: bool) -> None:
        super().__init__()
        self.pending, self.answers, self.streams = pending, answers, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future((self._stream if self.streams else self._whole)(scope, receive, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer  # its exception, if any
        finally:
            gone.cancel()
            answer.cancel()
            for one in self.pending:
                if not one.over:
                    one.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            chunks: list[list[Chunk]] = []
            for one in self.pending:
                chunks.append([chunk async for chunk in one])
        except AnswerFailed as failure:
            response = ApiError.of(failure).response()
        else:
            content = json.dumps(self.answers.whole(chunks), separators=(",", ":")).encode()
            response = Response(content, media_type="application/json")
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers, begun = self.answers, False
        try:
            async for index, chunk in merged(self.pending):
                data = answers.chunk(index, chunk)
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                    data = answers.opening() + data
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = answers.closing()
        except AnswerFailed as failure:
            problem = ApiError.of(failure)
            if not begun:
                await problem.response()(scope, receive, send)
                return
            last = error_event(problem)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(pending: Sequence[PendingRequest]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of all choices as they come, with the number of the choice."""
    if len(pending) == 1:
        async for chunk in pending[0]:
            yield 0, chunk
        return
    arrived: asyncio.Queue[tuple[int, Chunk | AnswerFailed]] = asyncio.Queue()

    async def pump(index: int, one: PendingRequest) -> None:
        try:
            async for chunk in one:
                arrived.put_nowait((index, chunk))
        except AnswerFailed as failure:
            arrived.put_nowait((index, failure))

    pumps = [asyncio.ensure_future(pump(index, one)) for index, one in enumerate(pending)]
    left = len(pumps)
    try:
        while left:
            index, news = await arrived.get()
            if isinstance(news, AnswerFailed):
                raise news
            left -= bool(news.finish_reason)
            yield index, news
    finally:
        for one in pumps:
            one.cancel()
