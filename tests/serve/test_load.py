"""Many streaming clients at once: nobody is forgotten, and who is too many hears when to come again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import running_server as real

SLOTS, CLIENTS = 16, 64
AT_HAND = SLOTS // 8  # requests that a worker holds beyond its slots


class Client:
    """An answer without end that is read as it comes."""

    def __init__(self, server: real.Server) -> None:
        self.server, self.tokens = server, 0

    async def ask(self) -> None:
        body = json.dumps(real.question(real.CONTEXT, stream=True)).encode()
        head = f"POST {real.CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while line := await reader.readline():
                self.tokens += b'"content":"' in line.replace(b'"content":""', b"").replace(b" ", b"")
        finally:
            writer.close()


async def until(true: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), real.PATIENCE)


@pytest.mark.slow
def test_streams_are_answered_together_and_those_beyond_the_queue_are_told_when_to_come_again(tmp_path: Path) -> None:
    queue = CLIENTS - SLOTS - AT_HAND
    with real.serving(tmp_path, f"--slots={SLOTS}", f"--max-queue={queue}", "--queue-timeout=600") as server:

        async def test() -> None:
            clients = [Client(server) for _ in range(CLIENTS)]
            asking = [asyncio.ensure_future(client.ask()) for client in clients]
            await until(lambda: server.metric("ascendchat_requests_waiting") == queue)
            assert server.metric("ascendchat_requests_running") == SLOTS + AT_HAND
            await until(lambda: sum(client.tokens > 5 for client in clients) == SLOTS)

            async with httpx.AsyncClient(base_url=server.url, timeout=real.PATIENCE) as more:
                for answer in await asyncio.gather(
                    *(more.post(real.CHAT, json=real.question(stream=bool(n % 2))) for n in range(20))
                ):
                    assert real.error_of(answer, 503)["code"] == "overloaded"
                    assert 1 <= int(answer.headers["Retry-After"]) <= 60

            served = 0
            while served < CLIENTS:  # whoever has been answered for a while goes, and another begins
                await until(lambda: any(c.tokens > 5 and not task.done() for c, task in zip(clients, asking)))
                for client, task in zip(clients, asking):
                    if client.tokens > 5 and not task.done():
                        task.cancel()
                        await asyncio.wait([task])
                        served += 1
            await until(lambda: server.metric("ascendchat_requests_running") == 0)
            assert server.answers()
            assert "Traceback" not in server.said

        asyncio.run(test())
