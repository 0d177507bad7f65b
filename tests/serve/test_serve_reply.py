"""An answer on its way to a client, with real tickets that are filled here by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import engine_models as make

from ascendchat.engine.request import Piece, Request, Sampling
from ascendchat.serve.answers import About, ChatAnswers, TextAnswers
from ascendchat.serve.app import AnswerResponse
from ascendchat.serve.pool import AnswerFailed, PendingRequest
from ascendchat.serve.prompts import GenerationRequest
from ascendchat.serve.protocol import ResponsesRequest
from ascendchat.serve.response_events import ResponseAnswers
from ascendchat.serve.worker_messages import Chunk

TEXT = make.tokenizer()


def part(text: str, reason: str = "", versions: tuple[int, ...] = (3,)) -> Chunk:
    return Chunk(0, [Piece("text", text)], [1] * len(versions), [], [], list(versions), reason)


def answers(kind: type = ChatAnswers, choices: int = 1, **about: Any) -> Any:
    requests = [Request([1, 2], Sampling()) for _ in range(choices)]
    return kind(About("m", "f", 3, TEXT), GenerationRequest(requests, choices, **about))


def sent(
    news: list[list[Chunk | AnswerFailed]], streams: bool, writer: Any, leaves: bool = False
) -> tuple[int, dict[str, str], str, list[PendingRequest]]:
    """Status, headers and body of a reply to these tickets, and which were cancelled; `leaves`: the client goes."""
    cancelled: list[PendingRequest] = []
    messages: list[Any] = []

    async def run() -> None:
        tickets = [PendingRequest(i, Request([1, 2]), streams, cancelled.append) for i in range(len(news))]
        for pending, given in zip(tickets, news):
            for one in given:
                pending.give(one)
                await asyncio.sleep(0)

        async def receive() -> Any:
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        await asyncio.wait_for(AnswerResponse(tickets, writer, streams=streams)({"type": "http"}, receive, send), 60)

    asyncio.run(run())
    if not messages:
        return 0, {}, "", cancelled
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in messages)
    return messages[0]["status"], headers, body.decode(), cancelled


def test_a_failure_before_the_first_byte_has_a_status() -> None:
    for streams in (True, False):
        busy = [[AnswerFailed("the worker has died", retry_after=4)]]
        status, headers, body, _ = sent(busy, streams, answers())  # type: ignore[arg-type]
        assert (status, headers["retry-after"]) == (503, "4")
        assert json.loads(body)["error"]["message"] == "the worker has died"
        refused = [[AnswerFailed("odd prompt", refused=True)]]
        status, headers, body, _ = sent(refused, streams, answers())  # type: ignore[arg-type]
        assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
        assert "retry-after" not in headers


def test_a_failure_in_mid_stream_is_its_last_event() -> None:
    """The other answers of the request end with it."""
    status, _, body, cancelled = sent([[part("a"), AnswerFailed("it has died")], [part("b")]], True, answers(choices=2))
    events = body.split("\n\n")
    assert status == 200
    assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "it has died"
    assert "[DONE]" not in body
    assert [pending.key for pending in cancelled] == [1]


def test_a_client_that_leaves_cancels_all_its_tickets() -> None:
    for streams in (True, False):
        _, _, _, cancelled = sent([[], []], streams, answers(choices=2), leaves=True)
        assert [pending.key for pending in cancelled] == [0, 1]


def test_every_token_has_its_version_where_weights_changed() -> None:
    for kind in (ChatAnswers, TextAnswers):
        _, _, body, _ = sent([[part("ab", "stop", (3, 4))]], False, answers(kind))
        assert json.loads(body)["choices"][0]["ascendchat"] == {"weight_version": 3, "weight_versions": [3, 4]}
        writer = answers(kind)
        chunk = json.loads(writer.chunk(0, part("ab", versions=(3, 4))).decode().removeprefix("data: "))
        assert chunk["choices"][0]["ascendchat"] == {"weight_version": 3, "weight_versions": [3, 4]}
        chunk = json.loads(writer.chunk(0, part("c", versions=(4,))).decode().removeprefix("data: "))
        assert chunk["choices"][0]["ascendchat"] == {"weight_version": 4}


def test_an_answer_that_was_cut_short_from_outside_says_so() -> None:
    _, _, body, _ = sent([[part("a", "cancelled")]], False, answers())
    assert json.loads(body)["choices"][0]["finish_reason"] == "abort"


def test_an_answer_whose_time_was_over_has_what_was_written_and_says_so() -> None:
    """OpenAI's clients know "length"; a trainer asks for the rest."""
    for kind in (ChatAnswers, TextAnswers):
        _, _, body, _ = sent([[part("a"), part("b", "timeout")]], False, answers(kind))
        (choice,) = json.loads(body)["choices"]
        assert (choice["finish_reason"], choice["ascendchat"]["timed_out"]) == ("length", True)
        assert "ab" in (choice.get("text"), choice.get("message", {}).get("content"))
        status, _, body, _ = sent([[part("a"), part("b", "timeout")]], True, answers(kind))
        events = body.split("\n\n")
        last = json.loads(events[-3].removeprefix("data: "))["choices"][0]
        assert (status, last["finish_reason"], last["ascendchat"]["timed_out"]) == (200, "length", True)
        assert events[-2] == "data: [DONE]"
    request = ResponsesRequest(input="hi")
    for streams in (True, False):
        writer = ResponseAnswers(answers().about, GenerationRequest([Request([1, 2], Sampling())], response=request))
        _, _, body, _ = sent([[part("ab", "timeout")]], streams, writer)
        if streams:
            assert "event: response.incomplete" in body
        whole = json.loads(body.rpartition("data: ")[2])
        whole = whole.get("response", whole)
        assert (whole["status"], whole["ascendchat"]["timed_out"]) == ("incomplete", True)
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}, "OpenAI knows no other that fits"
        assert whole["output"][0]["content"][0]["text"] == "ab"


def test_a_chunk_is_one_line_whatever_the_text() -> None:
    text = 'a\u2028b\r\n\x85"\\</script>你'
    data = answers().chunk(0, part(text)).decode()
    assert data.isascii()
    assert data.count("\n") == 2
    assert len(data.splitlines()) == 2
    assert json.loads(data.removeprefix("data: "))["choices"][0]["delta"]["content"] == text
