"""Requests to a server and when they are sent: one process of `ascendchat bench serve`.

    asker = Asker(config, address, model)
    samples, gaps = asyncio.run(send(asker, start, index, processes))

Request `number` is the same in every run with the same seed, whoever sends it. With poisson arrivals the time of a
request counts from its arrival, also while it waits because too many are under way: a slow server cannot hide its
delays by slowing down the clients.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ascendchat.bench.http_client import Address, Connection, Lost, Reply, connect
from ascendchat.config.serve import BenchServeConfig

QUESTION = "What is {} + {}? "  # of chat prompts; about ten tokens


class Sample(NamedTuple):
    """One request. Times are seconds of time.monotonic, which all processes of a machine share."""

    number: int
    arrived: float
    first: float  # piece of the answer
    last: float  # piece of the answer
    ended: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


class Asker:
    """Sends requests over connections that it keeps."""

    def __init__(self, config: BenchServeConfig, address: Address, model: str) -> None:
        self.config, self.address, self.model = config, address, model
        self.path = "/v1/completions" if config.api == "completions" else "/v1/chat/completions"
        self.idle: list[Connection] = []
        self.gaps = array("d")  # seconds between two pieces of an answer

    def content(self, number: int) -> dict[str, Any]:
        """The request of this number."""
        config, chance = self.config, random.Random(f"{self.config.seed} {number}")
        common = {
            "model": self.model,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "top_k": config.top_k,
            "seed": chance.randrange(2**31),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.api == "completions":
            return {**common, "prompt": list(chance.randbytes(config.prompt_tokens))}  # every model has ids below 256
        count = max(1, config.prompt_tokens // 10)
        text = "".join(QUESTION.format(chance.randrange(100), chance.randrange(100)) for _ in range(count))
        return {**common, "messages": [{"role": "user", "content": text.strip()}]}

    async def ask(self, number: int, arrived: float) -> Sample:
        """One request to its end; what goes wrong is in the sample."""
        answer = Answer(self.gaps)
        try:
            reply = await asyncio.wait_for(self.exchange(self.content(number), answer.take), self.config.timeout)
            error = answer.error or ("" if reply.status == 200 else refusal(reply))
            if not error and not answer.usage:
                error = "the answer ended without usage"
        except asyncio.TimeoutError:
            error = "timeout"
        except Lost:
            error = "connection lost" + (" after the answer had begun" if answer.first else "")
        except OSError as problem:
            error = f"no connection: {problem.strerror or problem}"
        now, usage = time.monotonic(), answer.usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        counts = (usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
        return Sample(number, arrived, answer.first or now, answer.last or now, now, *counts, error)

    async def exchange(self, content: dict[str, Any], on_event: Callable[[bytes], None]) -> Reply:
        """Over a connection that is free, or a new one; again if the server had just closed the old one."""
        while self.idle:
            connection = self.idle.pop()
            try:
                return await self.over(connection, content, on_event)
            except Lost as lost:
                if lost.begun:
                    raise
        return await self.over(await connect(self.address), content, on_event)

    async def over(self, connection: Connection, content: Any, on_event: Callable[[bytes], None]) -> Reply:
        reply = await connection.post(self.path, content, on_event)
        if not connection.closed:
            self.idle.append(connection)
        return reply

    def close(self) -> None:
        for connection in self.idle:
            connection.close()


class Answer:
    """What has come of one streamed answer."""

    def __init__(self, gaps: array[float]) -> None:
        self.gaps = gaps
        self.first = self.last = 0.0
        self.usage: dict[str, Any] = {}
        self.error = ""

    def take(self, event: bytes) -> None:
        """One event. Tokens are counted by the usage at the end: a busy server joins several in one event."""
        if event == b"[DONE]":
            return
        try:
            content = json.loads(event)
        except ValueError:
            self.error = "an event is not JSON"
            return
        if "error" in content:
            self.error = message_in(content)
        if content.get("usage"):
            self.usage = content["usage"]
        if any(map(says, content.get("choices") or ())):
            now = time.monotonic()
            if self.last:
                self.gaps.append(now - self.last)
            self.first, self.last = self.first or now, now


def says(choice: dict[str, Any]) -> bool:
    """Whether this part of an event has something of the answer in it; the first and the last often have not."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or choice.get("token_ids") or delta.get("content") or delta.get("ascendchat"))


def refusal(reply: Reply) -> str:
    """`http 503: the server is busy`: the kind of an error."""
    try:
        return f"http {reply.status}: {message_in(json.loads(reply.body))}"
    except (ValueError, TypeError, AttributeError):
        return f"http {reply.status}"


def message_in(content: dict[str, Any]) -> str:
    error = content.get("error") or content.get("detail") or ""
    return str(error.get("message", "") if isinstance(error, dict) else error)[:100]


async def send(asker: Asker, start: float, index: int, processes: int) -> list[Sample]:
    """The share of process `index`: its clients or arrivals from `start` on, for config.seconds."""
    config = asker.config
    end = start + config.seconds
    clients = config.concurrency // processes + (index < config.concurrency % processes)
    samples: list[Sample] = []
    await asyncio.sleep(start - time.monotonic())
    if config.arrivals == "closed":
        numbers = iter(range(index, 2**62, processes))

        async def client() -> None:
            while time.monotonic() < end:
                samples.append(await asker.ask(next(numbers), time.monotonic()))
                if samples[-1].error:
                    await asyncio.sleep(0.1)  # a server that turns everybody away is not asked in a busy loop

        await asyncio.gather(*(client() for _ in range(clients)))
    else:
        await poisson(asker, start, end, index, processes, asyncio.Semaphore(max(1, clients)), samples)
    asker.close()
    return samples


async def poisson(
    asker: Asker, start: float, end: float, index: int, processes: int, room: asyncio.Semaphore, samples: list[Sample]
) -> None:
    """Independent arrivals. Those of several processes together are again independent, with the sum of their rates."""

    async def one(number: int, arrived: float) -> None:
        async with room:
            samples.append(await asker.ask(number, arrived))

    tasks: list[asyncio.Task[None]] = []
    chance = random.Random(f"{asker.config.seed} arrivals {index}")
    for count, after in enumerate(arrivals(chance, asker.config.rate / processes, end - start)):
        await asyncio.sleep(start + after - time.monotonic())
        tasks.append(asyncio.ensure_future(one(index + count * processes, start + after)))
    await asyncio.gather(*tasks)


def arrivals(chance: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Times of a Poisson process: the pauses between them are exponential, with the mean 1 / rate."""
    after = chance.expovariate(rate)
    while after < seconds:
        yield after
        after += chance.expovariate(rate)


async def one_after_another(asker: Asker, numbers: list[int]) -> list[Sample]:
    """The same requests, each behind the answer to the one before, for config.seconds at most."""
    samples: list[Sample] = []
    end = time.monotonic() + asker.config.seconds
    for number in numbers:
        if time.monotonic() >= end:
            break
        samples.append(await asker.ask(number, time.monotonic()))
    asker.close()
    return samples
