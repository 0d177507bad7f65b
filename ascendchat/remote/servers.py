"""What a server can do beside answering, and how one of ours takes weights; vllm.py is about those of vLLM.

    server = await vllm.find_out(link, folder)      # OurServer, VllmServer, or Server: one that only answers
    await server.pause("keep"); await server.push(weights, 7); await server.resume()

client.py owns one of these and calls it from its event loop.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx

from ascendchat.checkpoint import write_weights
from ascendchat.engine.request import Weights
from ascendchat.errors import UserError
from ascendchat.remote.http import Link, NoRoute
from ascendchat.remote.weights import as_dtypes, checksum

CHUNK = 1 << 20  # bytes of weights sent at a time
ASIDE = 1 << 40  # added to a version that is in use for other weights
PauseMode = Literal["abort", "wait", "keep"]


async def expected_of(weights: Weights, told: dict[str, Any]) -> str:
    """The checksum of weights in the dtypes of a server."""
    return await asyncio.to_thread(lambda: checksum(as_dtypes(weights, told["dtypes"])))


class Server:
    """What is known of a server; this one takes no weights."""

    ours = False

    def __init__(self, link: Link, card: dict[str, Any]) -> None:
        own = card.get("ascendchat") or {}
        self.link, self.model = link, str(card["id"])
        self.context = int(card.get("max_model_len") or own.get("context") or 0)
        self.weight_version = int(own.get("version") or 0)
        self.request_timeout = float(own.get("request_timeout") or 0)  # seconds until it ends an answer; 0: unknown
        if not self.context:
            raise UserError(f"{link.url} does not say how long the context of its model is: it is no server for this")

    @property
    def name(self) -> str:
        return "a server with OpenAI's API"

    @property
    def holds_requests(self) -> bool:
        """Whether the client must hold its own requests back while weights change: a server that does not say which
        weights wrote which token. One of ours does."""
        return not self.ours

    async def pause(self, mode: PauseMode) -> None:
        raise UserError(f"{self.link.url} is not a server of ascendchat or vLLM: it takes no weights from here")

    async def resume(self) -> None:
        raise UserError(f"{self.link.url} is not a server of ascendchat or vLLM: it cannot be paused from here")

    async def push(self, weights: Weights, version: int) -> None:
        """New weights, whole or not at all, and not yet verified by an answer."""
        raise UserError(f"{self.link.url} is not a server of ascendchat or vLLM: it takes no weights from here")

    async def is_paused(self) -> bool:
        """Whether somebody has paused it."""
        try:
            return bool(((await self.link.probe("/is_paused")) or {}).get("is_paused"))
        except (httpx.TransportError, asyncio.TimeoutError):
            return False


class OurServer(Server):
    """`ascendchat serve --weight-updates`: weights go up as one safetensors file; every worker takes them, or none."""

    ours = True

    @property
    def name(self) -> str:
        return "ascendchat serve"

    async def pause(self, mode: PauseMode) -> None:
        await self._command("POST", f"/pause?mode={mode}", self.link.timeout)

    async def resume(self) -> None:
        await self.link.again(lambda: self._command("POST", "/resume"))

    async def push(self, weights: Weights, version: int) -> None:
        """Another trainer, or the checkpoint that it was started with, may have used the same version for other
        weights, which the server does not take: then they go there by another number first."""
        told = await self._weights()
        if told["version"] == version and told["checksum"] != await expected_of(weights, told):
            await self._upload(weights, version + ASIDE)
        await self._upload(weights, version)
        told = await self._weights()
        expected = await expected_of(weights, told)
        if (told["version"], told["checksum"]) != (version, expected):
            raise UserError(
                f"{self.link.url} has other weights than it was sent: version {told['version']} with the checksum "
                f"{told['checksum']} instead of version {version} with {expected}; does another trainer use it?"
            )

    async def _upload(self, weights: Weights, version: int) -> None:
        with tempfile.TemporaryDirectory(prefix="ascendchat-") as folder:
            file = Path(folder) / "weights.safetensors"
            await asyncio.to_thread(write_weights, file, weights)
            size = str(file.stat().st_size)

            async def content() -> AsyncIterator[bytes]:
                with open(file, "rb") as opened:
                    while chunk := opened.read(CHUNK):
                        yield chunk

            headers = {"Content-Type": "application/octet-stream", "Content-Length": size}
            path = f"/update_weights?version={version}"
            await self.link.again(
                lambda: self._command("POST", path, self.link.timeout, content=content(), headers=headers)
            )

    async def _weights(self) -> dict[str, Any]:
        """Version and checksum of the weights as they lie in the workers' memory."""
        end = time.monotonic() + self.link.patience
        told = await self.link.again(lambda: self._command("GET", "/weights"))
        while told["checksum"] is None and time.monotonic() < end:  # a worker is being started
            await asyncio.sleep(0.2)
            told = await self.link.again(lambda: self._command("GET", "/weights"))
        return dict(told)

    async def _command(self, method: str, path: str, seconds: float = 30.0, **content: Any) -> Any:
        try:
            return await self.link.command(method, path, seconds, **content)
        except NoRoute:
            raise UserError(
                f"{self.link.host} takes no weights; start it with: ascendchat serve --weight-updates"
            ) from None
