"""The application behind `ascendchat serve`: OpenAI's routes, health, and the web page.

application(Service(config, pool, tokenizer)) is an ASGI app; command.py gives it to uvicorn.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from ascendchat.config.serve import ServeConfig
from ascendchat.data.chat import render_prompt
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.request import Request as Prompt
from ascendchat.infer.request import Sampling
from ascendchat.serve.pool import Overloaded, Pool, Ticket

WEB = Path(__file__).parent / "web"


@dataclass
class Service:
    """What the routes work with."""

    config: ServeConfig
    pool: Pool
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """Of the model."""
        about = self.pool.ready[0].model if self.pool.ready else {}
        return self.config.model_name or f"{about.get('run')}/{about.get('stage')}"


def application(service: Service) -> FastAPI:
    """All routes."""
    app = FastAPI(title="ascendchat", docs_url=None, redoc_url=None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(service)]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        try:
            ticket = service.pool.submit(chat_prompt(service, body), streams=bool(body.get("stream")))
        except Overloaded as error:
            return JSONResponse({"error": {"message": str(error)}}, 503, {"Retry-After": str(error.retry_after)})
        if body.get("stream"):
            return StreamingResponse(chunks(service, ticket, body), media_type="text/event-stream")
        parts = [part async for part in ticket]
        text = "".join(piece.text for part in parts for piece in part.pieces if piece.kind == "text")
        count = sum(len(part.ids) for part in parts)
        return JSONResponse(
            {
                "id": f"chatcmpl-{secrets.token_hex(12)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": service.name,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text, "refusal": None},
                        "logprobs": None,
                        "finish_reason": parts[-1].finish_reason,
                    }
                ],
                "usage": usage(len(ticket.request.prompt), count),
            }
        )

    @app.get("/")
    async def index() -> Response:
        return FileResponse(WEB / "index.html")

    @app.get("/web/{name}")
    async def web(name: str) -> Response:
        known = {path.name: path for path in WEB.iterdir() if path.is_file()}
        return FileResponse(known[name]) if name in known else Response(status_code=404)

    return app


def model_card(service: Service) -> dict[str, Any]:
    """What /v1/models says of the model; `ascendchat` is ours, for the web page."""
    config, ready = service.config, service.pool.ready[0]
    own = {
        "context": ready.context,
        "device": ready.device,
        "devices": config.devices,
        **{name: ready.model[name] for name in ("stage", "step", "chats")},
        "version": 0,
        "defaults": {"temperature": config.temperature, "top_k": config.top_k, "max_tokens": config.max_tokens},
    }
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "ascendchat",
        "ascendchat": own,
    }


def chat_prompt(service: Service, body: dict[str, Any]) -> Prompt:
    config, ready = service.config, service.pool.ready[0]
    most = int(body.get("max_completion_tokens") or body.get("max_tokens") or config.max_tokens)
    temperature = body.get("temperature")
    sampling = Sampling(
        most,
        config.temperature if temperature is None else float(temperature),
        int(body.get("top_k", config.top_k)),
        seed=secrets.randbits(31) if body.get("seed") is None else int(body["seed"]),
    )
    room = ready.context - min(most, ready.context // 2)
    return Prompt(render_prompt(service.tokenizer, body["messages"], room), sampling)


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def chunks(service: Service, ticket: Ticket, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Server-sent events of one answer."""
    head = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": service.name,
    }
    count = 0

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"

    try:
        yield event({"role": "assistant", "content": ""})
        async for part in ticket:
            count += len(part.ids)
            for piece in part.pieces:
                if piece.kind == "text":
                    yield event({"content": piece.text})
                else:
                    yield event({"content": "", "ascendchat": {"tool": {"kind": piece.kind, "text": piece.text}}})
            if part.finish_reason:
                yield event({}, part.finish_reason)
        if (body.get("stream_options") or {}).get("include_usage"):
            final = {**head, "choices": [], "usage": usage(len(ticket.request.prompt), count)}
            yield b"data: " + json.dumps(final).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        ticket.cancel()
