"""Errors of the API in OpenAI's envelope, for every status.

    raise ApiError(404, "there is no such model", code="model_not_found", param="model")
    install(app)                     # every exception becomes {"error": {"message", "type", "param", "code"}}

No stack trace reaches a client; an error of ours is answered with 500, and uvicorn logs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ascendchat.serve.pool import AnswerFailed, Overloaded

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
KINDS = {
    **{"string_type": "a string", "list_type": "a list", "float_type": "a number", "bool_type": "true or false"},
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}  # what pydantic misses -> what a client should have sent
LIMITS = {
    "string_too_short": "at least {min_length} character{s}",
    "too_short": "at least {min_length} item{s}",
    "too_long": "at most {max_length} item{s}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "finite_number": "a finite number",
}  # the kind is right, the value is not
SHOWN = 80  # characters of a wrong value that are repeated to the client


class ApiError(Exception):
    """A request that is answered with an error; `param` names the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The envelope."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def __reduce__(self) -> Any:  # it comes from the process that reads large requests, too
        return _api_error, (self.status, self.message, self.param, self.code, self.headers)

    def response(self) -> Response:
        """The whole answer; ASCII escapes, since a wrong value may hold what is no text."""
        content = json.dumps(self.body).encode()
        return Response(content, self.status, self.headers, media_type="application/json")

    @classmethod
    def busy(cls, reason: str, retry_after: int, code: str = "overloaded") -> ApiError:
        """Not now: the client may try again after so many seconds."""
        return cls(503, reason, code=code, headers={"Retry-After": str(retry_after)})

    @classmethod
    def of(cls, error: AnswerFailed | Overloaded) -> ApiError:
        """The answer to what the pool could not do."""
        if isinstance(error, Overloaded):
            return cls.busy(str(error), error.retry_after)
        if error.refused:
            return cls(400, str(error))
        return cls.busy(str(error), error.retry_after, "not_finished")


def _api_error(status: int, message: str, *rest: Any) -> ApiError:
    return ApiError(status, message, **dict(zip(("param", "code", "headers"), rest)))


ENVELOPE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
MEANINGS = {
    400: "The request is wrong, or asks for what this server does not do; `param` names the field.",
    401: "A valid API key is needed.",
    403: "Refused.",
    404: "There is no such thing here.",
    405: "Another method is needed.",
    413: "The request is too large.",
    429: "Too many requests; `Retry-After` says when to come again.",
    503: "Busy or starting; `Retry-After` says when to come again.",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document."""
    return {
        status: {"description": MEANINGS[status], "content": {"application/json": {"schema": ENVELOPE}}}
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Answer every exception of the application in the envelope."""

    @app.exception_handler(ApiError)
    async def problem(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # without "body" in front
        return explained(errors, error.body).response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        known = {404: f"there is nothing at {request.url.path}", 405: f"{request.url.path} has no {request.method}"}
        message = known.get(error.status_code, str(error.detail))
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, message, headers=headers).response()

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server made a mistake; its log says more").response()


def explained(errors: Sequence[Any], body: Any) -> ApiError:
    """The error that is nearest to what the client meant. Of a field that may hold several kinds of value pydantic
    reports each kind: best is one whose kind fits and that is only too long, too small and so on; else the deepest."""
    places = [place(error["loc"], body, error["type"]) for error in errors]

    def nearness(i: int) -> tuple[bool, int, int]:
        last = places[i][-1] if places[i] else 0
        return errors[i]["type"] in LIMITS, len(places[i]), last if isinstance(last, int) else 0

    best = max(range(len(errors)), key=nearness)
    error, path, name = errors[best], places[best], written(places[best])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":  # of a rule in protocol.py: it begins with the field's name
        message = error["msg"].partition(", ")[2]
        return ApiError(400, message, param=message.split()[0].rstrip(":"), code="invalid_value")
    if not path:
        return ApiError(400, f"the body must be a JSON object (Content-Type: application/json): {error['msg']}")
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field: {name}", param=name, code="unknown_parameter")
    if kind == "none_required":
        return ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    tag = str(context.get("discriminator", "")).strip("'")  # the field that says which kind of object it is
    name = f"{name}.{tag}" if tag else name
    if kind in ("missing", "union_tag_not_found"):
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    if kind == "union_tag_invalid":
        value, wanted = error["input"][tag], f"one of {context['expected_tags']}"
    else:
        same = [e for e, where in zip(errors, places) if where == path and (e["type"] in LIMITS) == (kind in LIMITS)]
        value, wanted = error["input"], alternatives([expected(e) for e in same])
    return ApiError(400, f"{name}: expected {wanted}, found {shown(value)}", param=name, code="invalid_value")


def expected(error: Any) -> str:
    """The kind of value that was expected, in the words of JSON."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in LIMITS:
        whole = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in context.items()}
        return LIMITS[kind].format(**whole, s="" if 1 in whole.values() else "s")
    if kind == "literal_error":
        return {"False": "false", "True": "true"}.get(context["expected"], str(context["expected"]))
    return KINDS.get(kind) or str(error["msg"]).removeprefix("Input should be ")


def alternatives(phrases: Sequence[str]) -> str:
    """a, b or c"""
    *first, last = dict.fromkeys(phrases)
    comma = "," if any(" or " in phrase for phrase in first) else ""
    return f"{', '.join(first)}{comma} or {last}" if first else last


def shown(value: Any) -> str:
    """Its beginning as JSON; no more of it is written than is shown."""
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(cut(value) if isinstance(value, str) else value):
        text += piece
        if len(text) > SHOWN:
            break
    return cut(text)


def cut(text: str) -> str:
    """The beginning of a text that a client has sent."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def place(location: Sequence[Any], body: Any, kind: str) -> list[Any]:
    """The part of pydantic's location that is in the body; the names of union members are not."""
    path: list[Any] = []
    for at, step in enumerate(location):
        missing = kind == "missing" and at == len(location) - 1
        if isinstance(body, dict) and (step in body or missing):
            path.append(step)
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            path.append(step)
            body = body[step]
    return path


def written(path: Sequence[Any]) -> str:
    """messages[0].content"""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{cut(step)}" for step in path).lstrip(".")


def error_event(problem: ApiError) -> bytes:
    """Inside a stream."""
    return b"data: " + json.dumps(problem.body).encode() + b"\n\n"
