"""`ascendchat bench serve --concurrency 64`: how fast a running server answers many streaming clients.

    ascendchat bench serve --url http://127.0.0.1:8000 --concurrency 256 --seconds 60
    ascendchat bench serve --arrivals poisson --rate 20 --json
    ascendchat bench serve --concurrency 64 --compare-serial

serve.py sends, in one process or several; here their samples become a table. What is measured:

    first token   from the arrival of a request to the first piece of its answer
    token gap     of one answer: time from its first to its last piece, over its tokens less one
    piece gap     between two pieces of an answer; a busy server joins tokens to fewer, larger pieces
    request       from arrival to the end of the answer

Tokens are those of `usage`. Only whole answers count; the others are listed by kind. Exit status 1 when there is none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from ascendchat.bench.http_client import Address, ClientConnection, ClientReply, Lost, connect, first_key
from ascendchat.config import as_dict
from ascendchat.config.serve import BenchServeConfig
from ascendchat.errors import UserError

PERCENTS = (50, 90, 99)
CLIENTS = 64  # streams that one process follows easily


def run(config: BenchServeConfig) -> int:
    """Run `ascendchat bench serve`."""
    address = Address.parse(config.url, first_key(config.api_key_file))
    model = asyncio.run(model_of(address))
    processes = config.processes or max(1, min(-(-config.concurrency // CLIENTS), (os.cpu_count() or 2) // 2))
    processes = min(processes, config.concurrency)
    if config.warmup:
        load(dataclasses.replace(config, seconds=config.warmup), address, model, processes)
    samples, gaps = load(config, address, model, processes)
    facts: dict[str, Any] = {"url": config.url, "model": model, "processes": processes}
    names = ("api", "arrivals", "concurrency", "rate", "prompt_tokens", "max_tokens", "temperature", "top_k", "seed")
    settings = as_dict(config)
    facts |= {name: settings[name] for name in names}
    if config.arrivals == "closed":
        del facts["rate"]
    facts |= measured(samples, gaps)
    if config.compare_serial:
        asker = Asker(config, address, model)
        serial = measured(asyncio.run(one_after_another(asker, sorted(one.number for one in samples))), asker.gaps)
        facts["serial"] = serial
        slow = serial["tokens_per_second_out"]
        facts["times_serial"] = round(facts["tokens_per_second_out"] / slow, 2) if slow else None
    print(json.dumps(facts) if config.json else table(facts), flush=True)
    return 0 if facts["requests"] else 1


async def model_of(address: Address) -> str:
    """The name of the model, which is also the first sign of life."""
    where = f"{address.host}:{address.port}"
    try:
        connection = await connect(address)
        reply = await asyncio.wait_for(connection.get("/v1/models"), 60)
        connection.close()
    except (OSError, Lost, asyncio.TimeoutError) as error:
        raise UserError(
            f"no server answers at {where} ({str(error) or 'timeout'}); start one with: ascendchat serve"
        ) from None
    if reply.status == 401:
        raise UserError(f"{where} wants an API key; give it with --api-key-file or $ASCENDCHAT_API_KEYS")
    try:
        if reply.status != 200:
            raise ValueError(refusal(reply))
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{where} does not speak OpenAI's API: /v1/models answers with {refusal(reply)}") from None


# ---- processes ---------------------------------------------------------------------------------


def load(
    config: BenchServeConfig, address: Address, model: str, processes: int
) -> tuple[list[Sample], Sequence[float]]:
    """Send all requests of one run, from this process or from several."""
    if processes == 1:
        asker = Asker(config, address, model)
        return asyncio.run(send(asker, time.monotonic(), 0, 1)), asker.gaps
    context = multiprocessing.get_context("spawn")
    pipes: list[Pipe] = []
    for index in range(processes):
        ours, theirs = context.Pipe()
        arguments = (theirs, config, address, model, index, processes)
        context.Process(target=process, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    samples, gaps = list[Sample](), array("d")
    try:
        for pipe in pipes:
            pipe.recv()  # it has imported what it needs
        start = time.monotonic() + 0.1
        for pipe in pipes:
            pipe.send(start)
        for pipe in pipes:
            some, between = pipe.recv()
            samples += some
            gaps += between
    except EOFError:
        raise UserError("a process of the load generator ended early; its error stands above") from None
    return samples, gaps


def process(pipe: Pipe, config: BenchServeConfig, address: Address, model: str, index: int, processes: int) -> None:
    """Run one of several processes that send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it this one
    pipe.send("ready")
    asker = Asker(config, address, model)
    samples = asyncio.run(send(asker, pipe.recv(), index, processes))
    pipe.send((samples, asker.gaps))


# ---- numbers -----------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, between neighbours where it falls between them."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles and the largest, in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    percentiles = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS}
    return {name: round(value * 1e3, 3) for name, value in {**percentiles, "max": ordered[-1]}.items()}


def measured(samples: Sequence[Sample], gaps: Sequence[float]) -> dict[str, Any]:
    """Throughput and latencies of these samples."""
    whole = [one for one in samples if not one.error]
    began = min((one.arrived for one in samples), default=0.0)
    seconds = max((one.ended for one in whole), default=began) - began
    tokens = {name: sum(getattr(one, name) for one in whole) for name in Sample._fields if name.endswith("_tokens")}
    several = [one for one in whole if one.completion_tokens > 1]
    return {
        "requests": len(whole),
        "errors": dict(Counter(one.error for one in samples if one.error).most_common()),
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(whole) / seconds, 3) if whole else 0.0,
        **{f"total_{name}": count for name, count in tokens.items()},
        "tokens_per_second_in": round(tokens["prompt_tokens"] / seconds, 1) if whole else 0.0,
        "tokens_per_second_out": round(tokens["completion_tokens"] / seconds, 1) if whole else 0.0,
        "first_token_ms": spread([one.first - one.arrived for one in whole]),
        "token_gap_ms": spread([(one.last - one.first) / (one.completion_tokens - 1) for one in several]),
        "piece_gap_ms": spread(gaps),
        "request_ms": spread([one.ended - one.arrived for one in whole]),
    }


def table(facts: dict[str, Any]) -> str:
    """The facts as lines of text."""
    many = f"{facts['concurrency']} clients"
    if facts["arrivals"] == "poisson":
        many = f"{facts['rate']:g} requests/s, at most {facts['concurrency']} at once"
    lines = [
        f"{facts['url']}  {facts['model']}  {facts['api']}",
        f"{many}; prompts of {facts['prompt_tokens']} tokens, answers of {facts['max_tokens']}",
        f"{facts['requests']:,} answers in {facts['seconds']:.1f} s, {facts['requests_per_second']:.2f} per second; "
        f"{sum(facts['errors'].values()):,} failures",
        f"tokens/s: {facts['tokens_per_second_in']:,.0f} in, {facts['tokens_per_second_out']:,.0f} out",
    ]
    lines += [f"{count:>8,} x {kind}" for kind, count in facts["errors"].items()]
    lines.append(f"{'milliseconds':<14}" + "".join(f"{name:>11}" for name in [f"p{p}" for p in PERCENTS] + ["max"]))
    for name in ("first_token", "token_gap", "piece_gap", "request"):
        if values := facts[f"{name}_ms"]:
            lines.append(f"{name.replace('_', ' '):<14}" + "".join(f"{value:>11,.2f}" for value in values.values()))
    if "serial" in facts:
        serial, times = facts["serial"], facts["times_serial"] or 0
        lines.append(
            f"one after another: {serial['requests']:,} answers in {serial['seconds']:.1f} s, "
            f"{serial['tokens_per_second_out']:,.0f} tokens/s out; together {times:.1f} times as fast"
        )
    return "\n".join(lines)


# Requests to a server and when they are sent: one process of `ascendchat bench serve`.
#
#     asker = Asker(config, address, model)
#     samples, gaps = asyncio.run(send(asker, start, index, processes))
#
# Request `number` is the same in every run with the same seed, whoever sends it. With poisson arrivals the time of a
# request counts from its arrival, also while it waits because too many are under way: a slow server cannot hide its
# delays by slowing down the clients.

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
        self.idle: list[ClientConnection] = []
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
        """Send one request and read its answer to the end; what goes wrong is in the sample."""
        answer = _Answer(self.gaps)
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

    async def exchange(self, content: dict[str, Any], on_event: Callable[[bytes], None]) -> ClientReply:
        """Use a free connection, or a new one; again if the server had just closed the old one."""
        while self.idle:
            connection = self.idle.pop()
            try:
                return await self.over(connection, content, on_event)
            except Lost as lost:
                if lost.begun:
                    raise
        return await self.over(await connect(self.address), content, on_event)

    async def over(self, connection: ClientConnection, content: Any, on_event: Callable[[bytes], None]) -> ClientReply:
        reply = await connection.post(self.path, content, on_event)
        if not connection.closed:
            self.idle.append(connection)
        return reply

    def close(self) -> None:
        for connection in self.idle:
            connection.close()


class _Answer:
    """The progress of one streamed answer."""

    def __init__(self, gaps: array[float]) -> None:
        self.gaps = gaps
        self.first = self.last = 0.0
        self.usage: dict[str, Any] = {}
        self.error = ""

    def take(self, event: bytes) -> None:
        """Take one event. Tokens are counted by the usage at the end: a busy server joins several in one event."""
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
    """True if this part of an event has something of the answer in it; the first and the last often have not."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or choice.get("token_ids") or delta.get("content") or delta.get("ascendchat"))


def refusal(reply: ClientReply) -> str:
    """`http 503: the server is busy`: the kind of an error."""
    try:
        return f"http {reply.status}: {message_in(json.loads(reply.body))}"
    except (ValueError, TypeError, AttributeError):
        return f"http {reply.status}"


def message_in(content: dict[str, Any]) -> str:
    error = content.get("error") or content.get("detail") or ""
    return str(error.get("message", "") if isinstance(error, dict) else error)[:100]


async def send(asker: Asker, start: float, index: int, processes: int) -> list[Sample]:
    """Send the share of process `index`: its clients or arrivals from `start` on, for config.seconds."""
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
    """Send these requests, each behind the answer to the one before, for config.seconds at most."""
    samples: list[Sample] = []
    end = time.monotonic() + asker.config.seconds
    for number in numbers:
        if time.monotonic() >= end:
            break
        samples.append(await asker.ask(number, time.monotonic()))
    asker.close()
    return samples
