"""`ascendchat bench serve --concurrency 64`: how fast a running server answers many streaming clients.

    ascendchat bench serve --url http://127.0.0.1:8000 --concurrency 256 --seconds 60
    ascendchat bench serve --arrivals poisson --rate 20 --json
    ascendchat bench serve --concurrency 64 --compare-serial

traffic.py sends, in one process or several; here their samples become a table. What is measured:

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
import signal
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from ascendchat.bench.http_client import Address, Lost, connect, first_key
from ascendchat.bench.traffic import Asker, Sample, one_after_another, refusal, send
from ascendchat.config import UserError
from ascendchat.config.serve import BenchServeConfig

PERCENTS = (50, 90, 99)
CLIENTS = 64  # streams that one process follows easily


def run(config: BenchServeConfig) -> int:
    """The command."""
    address = Address.parse(config.url, first_key(config.api_key_file))
    model = asyncio.run(model_of(address))
    processes = config.processes or max(1, min(-(-config.concurrency // CLIENTS), (os.cpu_count() or 2) // 2))
    processes = min(processes, config.concurrency)
    if config.warmup:
        load(dataclasses.replace(config, seconds=config.warmup), address, model, processes)
    samples, gaps = load(config, address, model, processes)
    facts: dict[str, Any] = {"url": config.url, "model": model, "processes": processes}
    names = ("api", "arrivals", "concurrency", "rate", "prompt_tokens", "max_tokens", "temperature", "top_k", "seed")
    facts |= {name: getattr(config, name) for name in names}
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
    """All requests of one run, sent by this process or by several."""
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
    """One of several processes that send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it this one
    pipe.send("ready")
    asker = Asker(config, address, model)
    samples = asyncio.run(send(asker, pipe.recv(), index, processes))
    pipe.send((samples, asker.gaps))


# ---- numbers -----------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, between neighbours where it falls between them."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles and the largest, in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTS}
    return {name: round(value * 1e3, 3) for name, value in {**found, "max": ordered[-1]}.items()}


def measured(samples: Sequence[Sample], gaps: Sequence[float]) -> dict[str, Any]:
    """What the samples say."""
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
    """The same to read."""
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
        if found := facts[f"{name}_ms"]:
            lines.append(f"{name.replace('_', ' '):<14}" + "".join(f"{value:>11,.2f}" for value in found.values()))
    if "serial" in facts:
        serial, times = facts["serial"], facts["times_serial"] or 0
        lines.append(
            f"one after another: {serial['requests']:,} answers in {serial['seconds']:.1f} s, "
            f"{serial['tokens_per_second_out']:,.0f} tokens/s out; together {times:.1f} times as fast"
        )
    return "\n".join(lines)
