"""Servers as the client sees them: pause, weight updates, verification. Ours is here, vllm.py has vLLM's.

    server = await vllm.find_out(http, folder)      # OurServer, VllmServer, or Server: one that only answers
    await server.pause("keep"); await server.push(weights, 7); await server.resume()
    await server.verify(weights, 7, scorer, probe)

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
from ascendchat.remote.http import HTTPClient, NoRoute
from ascendchat.remote.weights import Scorer, as_dtypes, checksum

CHUNK = 1 << 20  # bytes of weights sent at a time
TEMPORARY = 1 << 40  # added to a version that is in use for other weights
PauseMode = Literal["abort", "wait", "keep"]


async def checksum_in(weights: Weights, dtypes: dict[str, str]) -> str:
    """The checksum of weights in the dtypes of a server."""
    return await asyncio.to_thread(lambda: checksum(as_dtypes(weights, dtypes)))


class Server:
    """A server with OpenAI's API, as it described itself; this one takes no weights."""

    ours = False

    def __init__(self, http: HTTPClient, card: dict[str, Any]) -> None:
        own = card.get("ascendchat") or {}
        self.http, self.model = http, str(card["id"])
        self.context = int(card.get("max_model_len") or own.get("context") or 0)
        self.weight_version = int(own.get("version") or 0)
        self.request_timeout = float(own.get("request_timeout") or 0)  # seconds until it ends an answer; 0: unknown
        if not self.context:
            raise UserError(f"{http.url} does not say how long the context of its model is: it is no server for this")

    @property
    def name(self) -> str:
        return "a server with OpenAI's API"

    @property
    def holds_requests(self) -> bool:
        """True if the client must hold its requests back while weights change, since the server does not say which
        weights wrote which token. Ours does."""
        return not self.ours

    async def pause(self, mode: PauseMode) -> None:
        raise UserError(f"{self.http.url} is not a server of ascendchat or vLLM: it takes no weights from here")

    async def resume(self) -> None:
        raise UserError(f"{self.http.url} is not a server of ascendchat or vLLM: it cannot be paused from here")

    async def push(self, weights: Weights, version: int) -> None:
        """Send new weights, whole or not at all."""
        raise UserError(f"{self.http.url} is not a server of ascendchat or vLLM: it takes no weights from here")

    async def verify(self, weights: Weights, version: int, scorer: Scorer | None, probe: list[int]) -> None:
        """Raise a UserError unless it has the weights that were pushed: by checksums where it tells them, else by the
        log-probabilities of the `probe`. It is not paused any more."""
        raise NotImplementedError

    def has_others(self, details: str) -> UserError:
        """The error of `verify`."""
        return UserError(f"{self.http.url} has other weights than it was sent: {details}")

    async def is_paused(self) -> bool:
        """True if somebody has paused it."""
        try:
            return bool(((await self.http.probe("/is_paused")) or {}).get("is_paused"))
        except (httpx.TransportError, asyncio.TimeoutError):
            return False


class OurServer(Server):
    """`ascendchat serve --weight-updates`: weights go up as one safetensors file; every worker takes them, or none."""

    ours = True

    @property
    def name(self) -> str:
        return "ascendchat serve"

    async def pause(self, mode: PauseMode) -> None:
        await self._command("POST", f"/pause?mode={mode}", self.http.timeout)

    async def resume(self) -> None:
        await self.http.retry(lambda: self._command("POST", "/resume"))

    async def push(self, weights: Weights, version: int) -> None:
        """A server does not take other weights of the version that it has (another trainer, or its own checkpoint, may
        have used the number): then they are first loaded under a temporary version."""
        state = await self._weights()
        if state["version"] == version and state["checksum"] != await checksum_in(weights, state["dtypes"]):
            await self._upload(weights, version + TEMPORARY)
        await self._upload(weights, version)

    async def verify(self, weights: Weights, version: int, scorer: Scorer | None, probe: list[int]) -> None:
        state = await self._weights()
        expected = await checksum_in(weights, state["dtypes"])
        if (state["version"], state["checksum"]) != (version, expected):
            raise self.has_others(
                f"version {state['version']} with the checksum {state['checksum']} instead of version {version} with "
                f"{expected}; does another trainer use it?"
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
            await self.http.retry(
                lambda: self._command("POST", path, self.http.timeout, content=content(), headers=headers)
            )

    async def _weights(self) -> dict[str, Any]:
        """Version and checksum of the weights as they lie in the workers' memory."""
        end = time.monotonic() + self.http.patience
        while True:
            state = await self.http.retry(lambda: self._command("GET", "/weights"))
            if state["checksum"] is not None or time.monotonic() > end:
                return dict(state)
            await asyncio.sleep(0.2)  # a worker is being started

    async def _command(self, method: str, path: str, seconds: float = 30.0, **content: Any) -> Any:
        try:
            return await self.http.command(method, path, seconds, **content)
        except NoRoute:
            raise UserError(
                f"{self.http.host} takes no weights; start it with: ascendchat serve --weight-updates"
            ) from None
