"""A request may be as long as a client likes: it costs its sender no more than a refusal, and the others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import engine_models as make
import pytest
from running_pool import run
from running_server import CHAT, Server, error_of, question, running
from warm_process import children, warm_workers

from ascendchat.config.serve import ServeConfig
from ascendchat.serve import large_requests, pool
from ascendchat.serve.errors import ApiError
from ascendchat.serve.large_requests import LargeRequests
from ascendchat.serve.prompts import ServedModel, read

TEXT, COMPLETIONS, RESPONSES = make.tokenizer(), "/v1/completions", "/v1/responses"
HI = {"role": "user", "content": "hi"}


def model(context: int = 1 << 20) -> ServedModel:
    return ServedModel(ServeConfig(), TEXT, "tiny/sft", True, context, TEXT.vocab_size, 64)


def refusal(path: str, body: Any, context: int = 1 << 20) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(path, json.dumps(body).encode(), model(context))
    return caught.value


def calls(action: Callable[[], object]) -> int:
    """Functions that are called, of Python and of C; but not those that end what earlier tests have left: the garbage
    is collected whenever enough was made, of which many mistakes make more than few."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def chat_with(message: Any) -> Callable[[int], Any]:
    return lambda n: {"messages": [message] * n}


NAMES: Callable[[int], Any] = lambda n: {f"name{i}": i for i in range(n)}  # noqa: E731
BAD: dict[str, tuple[str, Callable[[int], Any]]] = {
    "numbers for texts": (CHAT, chat_with({"role": "user", "content": 1})),
    "messages without a role": (CHAT, chat_with({"content": "a"})),
    "messages that are none": (CHAT, chat_with(7)),
    "parts": (CHAT, lambda n: {"messages": [{"role": "user", "content": [{"type": "image"}] * n}]}),
    "parts of an answer": (CHAT, lambda n: {"messages": [{"role": "assistant", "content": [{"type": "image"}] * n}]}),
    "calls": (CHAT, lambda n: {"messages": [{"role": "assistant", "tool_calls": [{}] * n}]}),
    "fields": (CHAT, lambda n: {"messages": [HI], **NAMES(n)}),
    "fields of a message": (CHAT, lambda n: {"messages": [{**HI, **NAMES(n)}]}),
    "biases": (CHAT, lambda n: {"messages": [HI], "logit_bias": NAMES(n)}),
    "labels": (CHAT, lambda n: {"messages": [HI], "metadata": NAMES(n)}),
    "tools": (CHAT, lambda n: {"messages": [HI], "tools": [{}] * n}),
    "stops": (CHAT, lambda n: {"messages": [HI], "stop": [1] * n}),
    "allowed tokens": (CHAT, lambda n: {"messages": [HI], "allowed_token_ids": ["a"] * n}),
    "prompts": (COMPLETIONS, lambda n: {"prompt": [{}] * n}),
    "ids of prompts": (COMPLETIONS, lambda n: {"prompt": [[-1] * n] * 8}),
    "items": (RESPONSES, lambda n: {"input": [{"role": "user", "content": 1}] * n}),
    "parts of items": (RESPONSES, lambda n: {"input": [{"role": "user", "content": [{"type": "sound"}] * n}]}),
    "included": (RESPONSES, lambda n: {"input": "a", "include": [1] * n}),
    "ids": ("/detokenize", lambda n: {"tokens": [-1] * n}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_thousand_mistakes_cost_as_much_as_two_thousand(what: str) -> None:
    path, body = BAD[what]
    content = {n: json.dumps(body(n)).encode() for n in (1000, 2000)}

    def refuse(n: int) -> None:
        with pytest.raises(ApiError) as caught:
            read(path, content[n], model())
        assert caught.value.status == 400
        assert len(caught.value.message) < 500

    refuse(1000)  # what is made once is made
    few, many = (calls(lambda n=n: refuse(n)) for n in (1000, 2000))  # type: ignore[misc]
    assert many <= few * 1.05


def test_garbage_of_others_is_not_counted() -> None:
    class Left:
        def __del__(self) -> None:
            len("")

    def fill() -> None:
        for _ in range(5000):
            left = Left()
            left.me = left  # type: ignore[attr-defined]

    gc.collect()
    assert calls(fill) == calls(lambda: None)
    gc.collect()


class Deaf:
    """A tokenizer that must not be asked to encode."""

    vocab_size, longest_token, opening, calls_tools = TEXT.vocab_size, TEXT.longest_token, TEXT.opening, True

    def encode(self, text: str) -> list[int]:
        raise AssertionError("this text was encoded though it cannot fit")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [HI] * 64}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "1" * 10_000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "1" * 50}] * 200}]}, "messages"),
        (RESPONSES, {"input": [HI] * 64}, "input"),
        (RESPONSES, {"input": "1" * 10_000}, "messages"),
        (COMPLETIONS, {"prompt": "1" * 10_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["1" * 10_000, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1] * 64}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [-1] * 64]}, "prompt"),
        ("/detokenize", {"tokens": [-1] * 65}, "tokens"),
        ("/tokenize", {"messages": [HI] * 64}, "messages"),
    ],
)
def test_what_cannot_fit_the_context_is_refused_before_it_is_looked_at(path: str, body: Any, param: str) -> None:
    deaf = ServedModel(ServeConfig(), Deaf(), "tiny/sft", True, 64, TEXT.vocab_size, 64)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="this model's context is 64 tokens") as caught:
        read(path, json.dumps(body).encode(), deaf)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_more_answers_than_are_ever_taken_are_refused_before_a_prompt_is_encoded() -> None:
    deaf = ServedModel(ServeConfig(), Deaf(), "tiny/sft", True, 64, TEXT.vocab_size, 7)  # type: ignore[arg-type]
    for path, body in ((CHAT, {"messages": [HI], "n": 8}), (COMPLETIONS, {"prompt": ["a", "b"], "n": 4})):
        with pytest.raises(ApiError, match="n: this server takes 7 answers at once at most"):
            read(path, json.dumps(body).encode(), deaf)


def test_of_long_names_and_values_only_the_beginning_comes_back() -> None:
    long = "x" * 100_000
    bodies = [{"messages": [HI], long: 1}, {"messages": [HI], "model": long}, {"messages": [{"role": long}]}]
    bodies += [
        {"messages": [HI], "logit_bias": {long: 1}},
        {"messages": [HI], "n": long},
        {"messages": [HI], "n": [1] * 9999},
    ]
    for body in bodies:
        problem = refusal(CHAT, body)
        assert len(problem.message) + len(problem.param or "") < 500


def test_a_schema_that_is_never_compiled_is_refused_before_it_stands_in_a_queue() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "x" * 500_000}}}
    assert refusal(CHAT, {"messages": [HI], "response_format": schema}).code == "invalid_schema"
    tool = {"type": "function", "name": "a", "parameters": {"const": "x" * 500_000}}
    assert refusal(RESPONSES, {"input": "hi", "tools": [tool], "tool_choice": "none"}).param == "tools"


# ---- the other process -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def reading(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[LargeRequests]:
    TEXT.save(folder)
    monkeypatch.setattr(pool, "subprocess", warm_workers())
    made = LargeRequests(ServeConfig(), folder, **settings)
    try:
        yield made
    finally:
        await made.close()


def prompt(size: int) -> bytes:
    return json.dumps({"prompt": "a" * size}).encode()


def test_the_other_process_gives_what_reading_here_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = json.dumps(
        {"messages": [HI], "seed": 7, "n": 2, "tools": [{"type": "function", "function": {"name": "a"}}]}
    )

    async def test() -> None:
        async with reading(tmp_path, monkeypatch) as there:
            assert await there.read(CHAT, asked.encode(), model()) == read(CHAT, asked.encode(), model())
            for size in (9, 300_000):  # in one piece, and in several
                assert await there.read("/tokenize", prompt(size), model()) == read("/tokenize", prompt(size), model())
            problems = []
            for where in (there.read(CHAT, b'{"n": 0}', model()), there.read(CHAT, b"[" * 100_000, model())):
                with pytest.raises(ApiError) as caught:
                    await where
                problems.append((caught.value.status, caught.value.param))
            assert problems == [(400, "n"), (400, None)]

    run(test)


def test_small_requests_are_read_before_large_ones_that_came_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        done: list[int] = []

        async def one(size: int) -> None:
            await there.read("/tokenize", prompt(size), model())
            done.append(size)

        async with reading(tmp_path, monkeypatch) as there:
            await asyncio.gather(*(one(size) for size in (40_000, 30_000, 20, 500, 10_000)))
        assert done in ([20, 500, 10_000, 30_000, 40_000], [40_000, 20, 500, 10_000, 30_000])

    run(test)


def test_a_request_that_takes_too_long_to_read_is_refused_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with reading(tmp_path, monkeypatch, seconds=0.1) as there:
            with pytest.raises(ApiError, match=r"more than 0.1 s of processor time to read") as caught:
                await there.read("/tokenize", prompt(4_000_000), model())
            assert caught.value.status == 400
            assert json.loads(b"".join(await there.read("/tokenize", prompt(3), model())))["count"] == 4

    run(test)


@pytest.mark.parametrize("kills", [1, 2])
def test_a_request_whose_process_was_killed_is_read_by_another_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Nobody has noticed its end yet; what kills a second one may be the request itself."""
    send, struck = pool.Child.send, list[int]()

    def killing(there: pool.Child, message: Any) -> None:
        if isinstance(message, tuple) and message[0] == "/tokenize" and len(struck) < kills:
            struck.append(there.process.pid)
            os.kill(there.process.pid, signal.SIGKILL)
        send(there, message)

    monkeypatch.setattr(pool.Child, "send", killing)

    async def test() -> None:
        async with reading(tmp_path, monkeypatch) as there:
            asked = there.read("/tokenize", prompt(3), model())
            if kills == 1:
                assert json.loads(b"".join(await asked))["count"] == 4
                return
            with pytest.raises(ApiError, match="has died; try again") as caught:
                await asked
            assert (caught.value.status, len(set(struck))) == (503, 2)

    run(test)


def test_too_many_bytes_that_wait_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_requests, "MAX_WAITING", 1000)

    async def test() -> None:
        async with reading(tmp_path, monkeypatch) as there:
            with pytest.raises(ApiError, match="try again later") as caught:
                await there.read("/tokenize", prompt(1001), model())
            assert caught.value.status == 503

    run(test)


@pytest.mark.slow
def test_nobody_else_waits_while_a_large_request_is_read(server: Server) -> None:
    """The process that reads is stopped: whatever it does, and however long, the others are answered."""
    large = {"prompt": "a" * 20_000}
    assert server.post("/tokenize", large).json()["count"] == 20_001
    alive = filter(running, children(server.process.pid))
    other = max(alive, key=lambda pid: os.getpriority(os.PRIO_PROCESS, pid))  # it lets answers under way come first
    os.kill(other, signal.SIGSTOP)
    try:
        with contextlib.closing(server.link()) as waits:
            waits.request("POST", "/tokenize", json.dumps(large), {"Content-Type": "application/json"})
            for _ in range(3):
                assert server.get("/health").status_code == 200
                assert server.post(CHAT, question(2)).status_code == 200
            os.kill(other, signal.SIGCONT)
            assert json.loads(waits.getresponse().read())["count"] == 20_001
    finally:
        os.kill(other, signal.SIGCONT)
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": "a" * 20_000}]},
        COMPLETIONS: {"prompt": [1] * 20_000},
        RESPONSES: {"input": "a" * 20_000},
        "/detokenize": {"tokens": [1] * 20_000},
    }
    for path, body in bodies.items():
        assert error_of(server.post(path, body), 400)["code"] == "context_length_exceeded"
    os.kill(other, signal.SIGKILL)
    assert server.post("/tokenize", large).status_code == 200
