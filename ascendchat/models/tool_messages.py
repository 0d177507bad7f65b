"""Calls of tools as the messages that chat templates take, as transformers describes them.

    called([{"type": "tool", "text": '{"name": "weather", "arguments": {}}'}, {"type": "output", "text": "sunny"}])
    # [{"role": "assistant", "content": "", "tool_calls": [...]}, {"role": "tool", "content": "sunny", ...}]

template.py comes here where the template writes what PROBE_CALL and PROBE_OFFER hold.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ascendchat.data.chat.template import Message, Part
from ascendchat.data.chat.turns import TOOLS_OFFERED

OFFERED = "tools"  # in the first message of a conversation: the tools that may be called
CALLED, ARGUMENT, RESULT = "qqzq", "zqqz", "qzqz"


def function(name: str, number: int, arguments: Any) -> dict[str, Any]:
    """A call. Its id has nine letters and digits, since Mistral's templates take no other."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


PROBE_CALL: Sequence[Message] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [function(CALLED, 0, {"a": ARGUMENT})]},
    {"role": "tool", "content": RESULT, "name": CALLED, "tool_call_id": "call00000"},
    {"role": "assistant", "content": "b"},
)
TOOL = {"name": CALLED, "description": ARGUMENT, "parameters": {"type": "object", "properties": {}}}
PROBE_OFFER: Sequence[Message] = ({"role": "user", "content": "a", OFFERED: [{"type": "function", "function": TOOL}]},)


def probe_thought(name: str) -> Sequence[Message]:
    """What a template that knows thoughts by this name writes."""
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": ARGUMENT, name: CALLED}]


def read_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a part; none where it is one of the calculator, or no JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    calls = found if isinstance(found, list) else [found]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def called(parts: Sequence[Part], thoughts: str = "thought") -> list[Message]:
    """A turn of the assistant as messages, with what it thinks under the name `thoughts`; none where nothing is called
    or thought, or something is called that is no function."""
    messages: list[Message] = []
    number, waiting = 0, list[tuple[str, str]]()  # calls without a result: id and name
    for at, part in enumerate(parts):
        fresh = at > 0 and parts[at - 1]["type"] == "thought"  # the message of the thought has no words yet
        if part["type"] == "text":
            if fresh:
                messages[-1]["content"] = part["text"]
            else:
                messages.append({"role": "assistant", "content": part["text"]})
        elif part["type"] == "thought":
            messages.append({"role": "assistant", "content": "", thoughts: part["text"]})
        elif part["type"] == "tool":
            found = read_calls(part["text"])
            if not found:
                return []
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            for call in found:
                made = function(call["name"], number, call.get("arguments") or {})
                messages[-1].setdefault("tool_calls", []).append(made)
                waiting.append((made["id"], call["name"]))
                number += 1
        elif not waiting:
            return []
        else:
            identity, name = waiting.pop(0)
            messages.append({"role": "tool", "content": part["text"], "name": name, "tool_call_id": identity})
    return messages if number or any(thoughts in message for message in messages) else []


def offered(talk: list[Message]) -> list[Message]:
    """The conversation with the tools that its system message lists (data/chat/turns.py) beside its first message."""
    if not talk or talk[0]["role"] != "system" or TOOLS_OFFERED not in talk[0]["content"]:
        return talk
    before, _, listed = talk[0]["content"].rpartition(TOOLS_OFFERED)
    try:
        found = json.loads(listed)
    except ValueError:
        return talk
    found = found if isinstance(found, list) else [found]
    if not found or not all(isinstance(tool, dict) for tool in found):
        return talk
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]
    rest = [{"role": "system", "content": before.rstrip("\n")}, *talk[1:]] if before.strip() else talk[1:]
    return [{**rest[0], OFFERED: tools}, *rest[1:]] if rest else talk


def split_offers(talk: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages as a template takes them, and the tools for it."""
    bare = [{name: value for name, value in message.items() if name != OFFERED} for message in talk]
    return bare, [tool for message in talk for tool in message.get(OFFERED, ())]
