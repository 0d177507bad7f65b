"""What tests of servers like vLLM share: a client, answers of an engine here, scores of a model, threads that ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import engine_models as make
from vllm_stand_in import StandIn

from ascendchat.device import pick
from ascendchat.infer.remote import Remote
from ascendchat.infer.request import Completion, Request, Sampling
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT

TEXT = make.tokenizer()
LONG = Sampling(max_tokens=40, seed=5, logprobs=True, stop_tokens=(), tools=False)


def scorer_of(model: GPT) -> Callable[[list[int]], list[float]]:
    def score(tokens: list[int]) -> list[float]:
        rows = [make.logits_of(model, tokens[: i + 1], 64).log_softmax(-1) for i in range(len(tokens) - 1)]
        return [row[token].item() for row, token in zip(rows, tokens[1:])]

    return score


def opened(server: StandIn, **settings: Any) -> Remote:
    return Remote.open(server.url, **{"tokenizer": TEXT, "patience": 30.0, "timeout": 60.0, **settings})


def local(model: GPT, request: Request) -> Completion:
    """The answer of an engine here."""
    return make.engine(model, pick("cpu", compiled=False), Sdpa(), context=64).generate([request])[0]


def ask(remote: Remote, *requests: Request) -> tuple[threading.Thread, list[Any]]:
    """Ask in a thread; what comes is put into the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend(remote.generate(list(requests)))
        except Exception as error:  # noqa: BLE001 (looked at by the test)
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def bodies(server: StandIn) -> list[dict[str, Any]]:
    return [body for path, body in server.asked if path == "/v1/completions"]
