"""A mistake of ours: the client hears that there was one, the operator reads the whole of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from ascendchat.config import parse
from ascendchat.config.serve import ServeConfig
from ascendchat.serve.guard import AccessLog, Guard
from ascendchat.serve.keys import Keys

app = FastAPI()


@app.get("/fault")
async def fault() -> None:
    raise ZeroDivisionError("the password is 1234")


@app.get("/five")
async def five() -> Any:
    return StreamingResponse(iter([b"secret"]), status_code=500)


@app.get("/deep")
async def deep() -> None:
    await deep()


@app.get("/cut")
async def cut() -> Any:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun"
        raise ZeroDivisionError("the password is 1234")

    return StreamingResponse(pieces())


def ask(path: str, log: Path, *, gone: bool = False) -> tuple[list[int], bytes, dict[str, Any]]:
    """Statuses that were sent, the body, the line of the log."""
    sent: list[Any] = []
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "scheme": "http", "root_path": ""}
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "server": ("127.0.0.1", 80)}
    given = iter([{"type": "http.disconnect"}] if gone else [{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        for message in given:
            return message
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(app, parse(ServeConfig, []), Keys([]), AccessLog(str(log)))(scope, receive, send))
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    body = b"".join(message.get("body", b"") for message in sent)
    return statuses, body, json.loads(log.read_text())


def test_an_unexpected_exception_is_503_without_its_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        statuses, body, line = ask("/fault", tmp_path / "log")
    assert statuses == [503]
    error = json.loads(body)["error"]
    assert (error["type"], line["status"]) == ("server_error", 503)
    assert line["id"] in error["message"], "the client can name it to the operator"
    assert b"password" not in body
    assert "the password is 1234" in caplog.text, "the log has the whole of it"
    assert "Traceback" in caplog.text
    assert line["id"] in caplog.text


def test_a_500_of_the_application_is_not_passed_on(tmp_path: Path) -> None:
    statuses, body, _ = ask("/five", tmp_path / "log")
    assert statuses == [503]
    assert b"secret" not in body


def test_endless_recursion_is_the_requests_fault(tmp_path: Path) -> None:
    statuses, body, _ = ask("/deep", tmp_path / "log")
    assert statuses == [400]
    assert "nested" in json.loads(body)["error"]["message"]


def test_an_answer_that_breaks_off_is_left_incomplete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statuses, body, line = ask("/cut", tmp_path / "log")
    assert (statuses, body, line["status"]) == ([200], b"begun", 200)
    assert "the password is 1234" in caplog.text


def test_a_client_that_went_before_its_request_was_whole_is_499_in_the_log(tmp_path: Path) -> None:
    statuses, body, line = ask("/fault", tmp_path / "log", gone=True)
    assert (statuses, body, line["status"]) == ([], b"", 499)
