"""The OpenAPI document (/openapi.json): the form of requests, which the routes read by themselves, and of the answers,
which are written without pydantic.

described(app) adds the models of takes(), and leaves out what FastAPI would add and we never say (422).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

PLACE = "#/components/schemas/{model}"
Responses = dict[int | str, dict[str, Any]]


def of(schema: dict[str, Any], description: str, **further: Any) -> Responses:
    """A 200 of this form."""
    return {200: {"description": description, "content": {"application/json": {"schema": schema}, **further}}}


_taken: dict[str, type[BaseModel]] = {}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """For a route (openapi_extra): its body is such a request."""
    _taken[model.__name__] = model
    reference = {"$ref": PLACE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def an_object(**properties: Any) -> dict[str, Any]:
    """All these fields, and perhaps others."""
    return {"type": "object", "required": list(properties), "properties": properties}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
OBJECT = {"type": "object"}
IDS = {"type": "array", "items": COUNT}

EVENTS = {"text/event-stream": {"schema": TEXT}}
ANSWER = of(
    an_object(
        id=TEXT,
        object=TEXT,
        created=COUNT,
        model=TEXT,
        choices={"type": "array", "items": an_object(index=COUNT, finish_reason=TEXT, ascendchat=OBJECT)},
        usage=an_object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
    ),
    "The answer; with `stream: true` its chunks as server-sent events",
    **EVENTS,
)
RESPONSE = of(
    an_object(id=TEXT, object=TEXT, status=TEXT, model=TEXT, output={"type": "array", "items": OBJECT}),
    "The answer; with `stream: true` its events",
    **EVENTS,
)
CARD = an_object(id=TEXT, object=TEXT, created=COUNT, owned_by=TEXT, ascendchat=OBJECT)
MODEL = of(CARD, "The model")
MODELS = of(an_object(object=TEXT, data={"type": "array", "items": CARD}), "All models")
TOKENIZED = of(an_object(count=COUNT, max_model_len=COUNT, tokens=IDS), "Token ids")
DETOKENIZED = of(an_object(prompt=TEXT), "The text")


def described(app: FastAPI) -> None:
    """Make app.openapi() truthful."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            _, found = models_json_schema([(model, "validation") for model in _taken.values()], ref_template=PLACE)
            schemas.update(found["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
