"""Tools of a client: what the model is told of them, the grammar of a call, and calls in an answer.

    tools = Tools.of(tokenizer, request.tools, request.tool_choice, ...)      # None where the client brings none
    grammar = tools.grammar(answer)                                           # for Sampling.grammar
    reader = CallReader(tokenizer); deltas = reader.feed(part.ids)            # what OpenAI calls tool_calls

A call stands between <|tool_start|> and <|tool_end|>, as the calculator's of our own models does. Its text is
{"name":"...","arguments":{...}}, and the grammar lets nothing else through, so that the arguments fit their schema.
A client's tool `calculator` with the one text `expression` is the model's own: <|tool_start|>17+25<|tool_end|>.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.grammar import JSON_OPTIONS, with_moved_borders
from ascendchat.engine.request import Grammar
from ascendchat.serve.protocol import ChosenTool, Function, ResponseFormat, Tool, ToolCall, ToolChoice

CALCULATOR = "calculator"
OPENING = re.compile(r'\{"name":"([a-zA-Z0-9_-]+)","arguments":')
EXPRESSION = r"/[^{\n][^\n]{0,199}/"  # of the calculator; a brace would be JSON
OBJECT = '{"type": "object"}'
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def native(function: Function) -> bool:
    """True if a tool is the calculator that our models know."""
    schema = function.parameters or {}
    expression = (schema.get("properties") or {}).get("expression")
    return (
        function.name == CALCULATOR
        and list(schema.get("properties") or {}) == ["expression"]
        and isinstance(expression, dict)
        and expression.get("type") == "string"
        and set(expression) <= {"type", "description", "title"}
    )


@dataclass(frozen=True)
class Tools:
    """The tools that may be called in this answer."""

    functions: Sequence[Function]
    must: bool  # call one
    several: bool  # more than one call in an answer

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Tools | None:
        """The tools of a request; None where the answer is to be text."""
        if not tools or choice == "none":
            return None
        functions = [tool.function for tool in tools]
        if isinstance(choice, ChosenTool):
            functions = [function for function in functions if function.name == choice.function.name]
        named = isinstance(choice, ChosenTool)
        return cls(functions, choice not in (None, "auto"), parallel is not False and not named)

    def grammar(self, tokenizer: Tokenizer, text: Grammar | None) -> Grammar:
        """The grammar of an answer: calls, or text (any, or what `text` allows) and perhaps calls behind it."""
        start, end = (f"<[{tokenizer.specials[name]}]>" for name in ("<|tool_start|>", "<|tool_end|>"))
        calls = "call+" if self.several else "call"
        if self.must:
            top = calls
        elif text is not None:
            top = f"json | {calls}"
        else:
            top = f"TEXT? | TEXT? {calls}"
        names = [f"call_{i}" for i in range(len(self.functions))]
        rules = [f"start: {top}", f"call: {start} ({' | '.join(names)}) {end}"]
        if not self.must:
            rules.append(
                r"TEXT: /(.|\n)+/" if text is None else f"json: %json {inline(json.loads(text.text or OBJECT))}"
            )
        for name, function in zip(names, self.functions):
            opening = json.dumps(f'{{"name":"{function.name}","arguments":')
            plain = f"{EXPRESSION} | " if native(function) else ""
            rules.append(f'{name}: {plain}{opening} {name}_arguments "}}"')
            rules.append(
                f"{name}_arguments: %json {inline({'type': 'object', **(function.parameters or NO_ARGUMENTS)})}"
            )
        return Grammar("lark", "\n".join(rules) + "\n")

    def described(self) -> str:
        """Describe the tools for the system message: short, since it costs context; the calculator needs no words."""
        lines = [signature(function) for function in self.functions if not native(function)]
        return "\n".join(["Tools:", *lines]) if lines else ""


def inline(schema: dict[str, Any]) -> str:
    """Write a schema into a Lark grammar, to be read as one that stands alone."""
    return with_moved_borders(json.dumps({**schema, "x-guidance": JSON_OPTIONS}))


def signature(function: Function) -> str:
    """echo(value: string, times?: integer) what it is for"""
    schema = function.parameters or {}
    properties = schema.get("properties")
    needed = schema.get("required")
    fields = []
    for name, one in properties.items() if isinstance(properties, dict) else []:
        kind = one.get("type") if isinstance(one, dict) else None
        optional = "" if isinstance(needed, list) and name in needed else "?"
        fields.append(f"{name}{optional}: {kind}" if isinstance(kind, str) else f"{name}{optional}")
    about = f" {function.description}" if function.description else ""
    return f"{function.name}({', '.join(fields)}){about}"


def text_grammar(form: ResponseFormat | None) -> Grammar | None:
    """The grammar of `response_format`."""
    if form is None or form.type == "text":
        return None
    return (
        Grammar("json") if form.type == "json_object" else Grammar("json_schema", json.dumps(form.json_schema.schema_))
    )


# ---- calls in messages and answers -------------------------------------------------------------


def call_text(call: ToolCall) -> str:
    """Write an earlier call in the model's form."""
    name, given = call.function.name, call.function.arguments
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        arguments = given  # what a client made up: shown as it is
    if name == CALCULATOR and isinstance(arguments, dict) and list(arguments) == ["expression"]:
        expression = arguments["expression"]
        if isinstance(expression, str):
            return expression
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, separators=(",", ":"))


class CallDelta(NamedTuple):
    """An addition to call number `call`; the first one of a call has its id and name."""

    call: int
    arguments: str
    id: str = ""
    name: str = ""

    @property
    def json(self) -> dict[str, Any]:
        """The form in which OpenAI streams it."""
        if self.id:
            function = {"name": self.name, "arguments": self.arguments}
            return {"index": self.call, "id": self.id, "type": "function", "function": function}
        return {"index": self.call, "function": {"arguments": self.arguments}}


class CallReader:
    """The calls in one answer, from its token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.specials
        self.tokens = tokenizer.tokens
        self.start, self.end = special["<|tool_start|>"], special["<|tool_end|>"]
        self.count = 0  # calls begun
        self.complete = 0
        self._inside, self._name, self._held = False, "", ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._native = False

    def feed(self, ids: Sequence[int], over: bool = False) -> list[CallDelta]:
        """Add tokens; the deltas that they bring. `over`: nothing comes behind them."""
        deltas: list[CallDelta] = []
        for token in ids:
            if token < len(self.tokens):
                if self._inside:
                    self._held += self._decoder.decode(self.tokens[token])
            else:
                deltas += self._close() if self._inside and token == self.end else []
                self._inside = token == self.start
                if self._inside:
                    self._name, self._held, self._native = "", "", False
                    self._decoder.reset()
        if self._inside:
            deltas += self._open() + self._more(keep=0 if over else 1)
        return deltas

    def _open(self) -> list[CallDelta]:
        """The first delta, as soon as the name is known."""
        if self._name or not self._held:
            return []
        if not self._held.startswith("{"):
            self._name, self._native = CALCULATOR, True
        elif match := OPENING.match(self._held):
            self._name, self._held = match[1], self._held[match.end() :]
        else:
            return []
        self.count += 1
        first = CallDelta(self.count - 1, "", f"call_{secrets.token_hex(12)}", self._name)
        return [first, CallDelta(self.count - 1, '{"expression":"')] if self._native else [first]

    def _more(self, keep: int) -> list[CallDelta]:
        """Arguments so far; the last character stays, as it may be the brace around the call."""
        if not self._name:
            return []
        cut = len(self._held) - (0 if self._native else keep)
        new, self._held = self._held[:cut], self._held[cut:]
        if not new:
            return []
        return [CallDelta(self.count - 1, quoted(new)[1:-1] if self._native else new)]

    def _close(self) -> list[CallDelta]:
        deltas = self._open() + self._more(keep=1)
        if self._name:
            self.complete += 1
            deltas += [CallDelta(self.count - 1, '"}')] if self._native else []
        return deltas


def whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """The calls of a finished answer."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.id:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            calls[delta.call]["function"]["arguments"] += delta.arguments
    return calls
