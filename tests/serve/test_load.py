"""Many streaming clients at once on a small model: nothing fails, nobody is forgotten, and batching pays."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path

import httpx
import pytest
import running_server as real

pytestmark = pytest.mark.slow

CLIENTS, TOKENS, SECONDS = 64, 32, 10.0


class Load:
    """Streaming requests on plain sockets, so that the client costs as little as it can."""

    def __init__(self, url: str) -> None:
        host, _, self.port = url.removeprefix("http://").rpartition(":")
        self.host, self.tokens, self.first = host, 0, []  # type: ignore[var-annotated]  # seconds to the first token
        body = {"model": "tiny/sft", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
        self.body = json.dumps({**body, "stream": True, "temperature": 0.7, "seed": 3}).encode()

    async def ask(self) -> None:
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        try:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            began = time.monotonic()
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(self.body)}\r\n\r\n".encode() + self.body)
            text = b""
            while chunk := await reader.read(65536):
                if not text.count(b'"content":') > 1 and (text + chunk).count(b'"content":') > 1:
                    self.first.append(time.monotonic() - began)  # the very first is empty, and says who speaks
                text += chunk
        finally:
            writer.close()
        assert text.startswith(b"HTTP/1.1 200"), text[:500]
        assert b'"finish_reason":"length"' in text.replace(b" ", b""), text[-500:]
        assert b"[DONE]" in text
        self.tokens += TOKENS

    async def clients(self, count: int, seconds: float) -> float:
        """Each asks again when it is answered; tokens per second."""
        self.tokens, self.first = 0, []
        began = time.monotonic()

        async def client() -> None:
            while time.monotonic() < began + seconds:
                await self.ask()

        await asyncio.gather(*(client() for _ in range(count)))
        return self.tokens / (time.monotonic() - began)


def test_sixty_four_streams_are_answered_together(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--slots=16") as server:
        load = Load(server.url)

        async def test() -> None:
            await load.clients(2, 1.0)  # warm
            real.wait_until(lambda: len(server.workers) == 2 and quiet(server.workers))
            for _ in range(3):  # again where the machine had something else to do
                alone = await load.clients(1, SECONDS / 2)
                together = await load.clients(CLIENTS, SECONDS)
                first = sorted(load.first)
                median, late = statistics.median(first), first[int(0.99 * (len(first) - 1))]
                print(f"{alone:.0f} tok/s alone, {together:.0f} together ({together / alone:.1f} times), ", end="")
                print(f"first token {median:.2f} s, p99 {late:.2f} s, {len(first)} answers")
                if late < 6 * median and together > 2 * alone:
                    break
            assert late < 6 * median  # 4 on a calm machine
            assert together > 2 * alone  # 4 on a calm machine
            assert "Traceback" not in server.said

        asyncio.run(test())


def read(server: real.Server, messages: list[dict[str, str]]) -> tuple[int, int]:
    """Tokens of a prompt, and how many of them were in the cache. The answer is "aaaaaaaa"."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logit_bias": {"97": 100}}
    usage = httpx.post(f"{server.url}{real.CHAT}", json=body, timeout=real.PATIENCE).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_turn_of_a_long_conversation_pays_only_for_what_is_new(tmp_path: Path) -> None:
    turns, length = 20, 60  # tokens of a question: one per byte
    real.save(tmp_path, real.make.model(seq_len=2048, dim=256, head_dim=64))
    with real.serving(tmp_path, "--slots=8") as server:
        for number in range(2):
            talk: list[dict[str, str]] = []
            for turn in range(1, turns + 1):
                talk.append({"role": "user", "content": f"{number}.{turn} ".ljust(length, "x")})
                prompt, cached = read(server, talk)
                talk.append({"role": "assistant", "content": "a" * 8})
                assert turn == 1 or prompt - cached < length + 16, "only the question and the ends of turns"
            other = {"role": "user", "content": f"other {talk[0]['content']}"}
            prompt, cached = read(server, [other, *talk[1:-1]])
            assert cached < 16 < turns * length < prompt, "nothing of it is known"


def test_two_hundred_clients_beyond_the_queue_are_told_when_to_come_again(tmp_path: Path) -> None:
    """Each at once, while what was there before goes on and is served."""
    slots, queue = 2, 5
    held = slots + 1 + queue  # one more is at hand in the worker
    with real.serving(tmp_path, f"--slots={slots}", f"--max-queue={queue}", "--queue-timeout=600") as server:

        async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
            return await client.post(real.CHAT, json=real.question(stream=bool(number % 2)))

        async def test() -> None:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=real.PATIENCE, limits=limits) as client:
                long = real.question(real.CONTEXT, stream=True)
                busy = [asyncio.ensure_future(client.post(real.CHAT, json=long)) for _ in range(held)]
                while server.metric("ascendchat_requests_waiting") < queue:
                    await asyncio.sleep(0.05)
                for answer in await asyncio.gather(*(ask(client, number) for number in range(200))):
                    assert real.error_of(answer, 503)["code"] == "overloaded"
                    assert 1 <= int(answer.headers["Retry-After"]) <= 60
                assert not any(task.done() for task in busy)
                for task in busy:
                    task.cancel()
                await asyncio.wait(busy)
            async with httpx.AsyncClient(base_url=server.url, timeout=real.PATIENCE) as client:  # idle links may be cut
                while (answer := await ask(client, 0)).status_code == 503:  # until the worker has heard of it
                    await asyncio.sleep(0.05)
                assert answer.status_code == 200

        asyncio.run(asyncio.wait_for(test(), real.PATIENCE))


def quiet(processes: list[int]) -> bool:
    before = sum(map(real.cpu_seconds, processes))
    time.sleep(1)
    return sum(map(real.cpu_seconds, processes)) - before < 0.05
