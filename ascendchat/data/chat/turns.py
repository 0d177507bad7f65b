"""Messages from what publishers call them: the pieces that the readers of conversations and of pairs are made of.

    spoken("gpt", "Hello.")              # {"role": "assistant", "content": "Hello."}
    turns([{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Hello."}])

`ascendchat sft --data FILE` comes here through formats.py, `finetune --stage dpo` through pairs.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from ascendchat.data.chat.tables import CALLS, SPEAKER, THOUGHTS, TableRow, is_talk
from ascendchat.data.chat.template import ROLES, SPAN_OF, Conversation, Message, Part, content_parts, text_of
from ascendchat.data.surrogates import HALF, has_half

ROLE_NAMES = {  # what publishers call each role; a "call" is a part of the assistant's turn
    "system": "system developer",
    "user": "human user prompter",
    "assistant": "gpt chatgpt bing bard assistant model",
    "call": "function_call",
    "tool": "observation function_response function tool ipython",
}
SPEAKERS = {name: role for role, names in ROLE_NAMES.items() for name in names.split()}
TOOLS_OFFERED = "You can call these tools:\n"
SYSTEM, OFFERS = ("system", "system_prompt"), ("tools", "functions")  # columns: the first that says something
ABOUT = "input", "context", "passage"  # columns with what a question is about
LEARNT = "weight", "loss", "train", "training"  # of a message: 0 or false where it is not to be learnt
NO = (0, "0", "false", "False")  # as the columns of a csv have it, too


def message(role: str, content: str | Sequence[Part]) -> Message:
    return {"role": role, "content": content if isinstance(content, str) else list(content)}


def role_of(speaker: Any) -> str | None:
    """The role of a speaker of any tradition, if it is known."""
    return SPEAKERS.get(str(speaker).strip().lower())


def spoken(speaker: Any, content: Any) -> Message:
    """A message from a speaker of any tradition; a function call is a part of the assistant's turn."""
    role = role_of(speaker)
    if role is None:
        raise ValueError(f"the speaker {speaker!r} is unknown (known: {', '.join(SPEAKERS)})")
    if isinstance(content, list):  # parts: ours, or those of the OpenAI interface
        parts = [{"type": p.get("type"), "text": p.get("text")} for p in content]
        return message(role, cast(Sequence[Part], parts))
    if not isinstance(content, str):
        raise ValueError(f"what {speaker!r} says is not text but {type(content).__name__}")
    return message("assistant", [{"type": "tool", "text": content}]) if role == "call" else message(role, content)


def turn(entry: TableRow) -> Message:
    """ShareGPT's from and value; or role and content, where a message that calls tools needs no content. What the
    assistant thinks stands before its words, unless they hold it, too."""
    speaker = entry["from" if "from" in entry else "role"]
    mark = next((name for name in LEARNT if entry.get(name) in NO), "")
    if mark and role_of(speaker) in ("assistant", "call"):
        raise ValueError(
            f"a reply of {mark} {entry[mark]} would be learnt like the others; leave out what is not to be learnt"
        )
    thought = next((held for name in THOUGHTS if isinstance(held := entry.get(name), str) and held.strip()), "")
    made = words_of(entry, speaker)
    if not thought or made["role"] != "assistant" or "</think>" in text_of(made["content"]):
        return made
    return message("assistant", [{"type": "thought", "text": thought}, *content_parts(made["content"])])


def words_of(entry: TableRow, speaker: Any) -> Message:
    """What a message says and calls."""
    if "from" in entry:
        return spoken(speaker, entry["value"])
    calls = entry.get(CALLS[0]) or ([entry[CALLS[1]]] if entry.get(CALLS[1]) else [])
    if not calls:
        return spoken(entry["role"], or_empty(entry["content"]))
    words = spoken(entry["role"], or_empty(entry.get("content")))["content"]
    said = words if isinstance(words, list) else [{"type": "text", "text": words}] if words else []
    return message("assistant", [*said, *({"type": "tool", "text": called(call)} for call in calls)])


def or_empty(content: Any) -> Any:
    """Null is no text; a number stays what it is, 0 too, and is refused as one."""
    return "" if content is None else content


def called(call: TableRow) -> str:
    """A tool call as the text the model produces."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and arguments.strip():
        arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments or {}}, ensure_ascii=False)


def opening(row: TableRow, more: str = "") -> Conversation:
    """The system message of a row, `more` that belongs to it, and the tools that the row offers."""
    first = next((row[name] for name in SYSTEM if row.get(name)), "")
    tools = next((row[name] for name in OFFERS if row.get(name)), "")
    if tools and tools != "[]":
        tools = TOOLS_OFFERED + (tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False))
    system = "\n".join(part for part in (first, more, tools) if part and part != "[]")
    return [message("system", system)] if system else []


def turns(entries: Any) -> Conversation:
    """Messages of either tradition, in a list or the JSON of one."""
    found = list(unpacked(entries, "messages"))
    if odd := next((entry for entry in found if not isinstance(entry, dict)), None):
        raise ValueError(f"its messages are not objects but {type(odd).__name__}")
    return [turn(entry) for entry in in_order(found)]


def unpacked(value: Any, what: str) -> Any:
    """What a table holds as the JSON text of a list, since its cells hold only text."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ValueError(f"the text in place of its {what} is no JSON ({error}); write a list") from None
    if not isinstance(found, list):
        raise ValueError(f"the text in place of its {what} is no JSON list but {type(found).__name__}")
    return found


def talk_in(value: Any) -> Any:
    """The messages that a text holds as JSON, told by the first one, whose speaker is known; else the value itself: in
    a column of texts any other JSON is a text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    speaks = is_talk(found) and any(role_of(found[0].get(name)) for name in SPEAKER)
    return found if speaks else value


def in_order(entries: list[Any]) -> list[Any]:
    """The same messages, with the results of tools in the order of the calls that they name: from here on it is their
    order that tells whose they are."""
    for at, entry in enumerate(entries):
        named = [call.get("id") for call in entry.get(CALLS[0]) or []]
        end = at + 1
        while end < len(entries) and entries[end].get("tool_call_id") is not None:
            end += 1
        results = entries[at + 1 : end]
        if len(named) > 1 and all(result["tool_call_id"] in named for result in results):
            entries[at + 1 : end] = sorted(results, key=lambda result: named.index(result["tool_call_id"]))
    return entries


def opened(row: TableRow, talk: Conversation) -> Conversation:
    """The conversation of a row behind its system message; one that it begins with becomes a part of that."""
    first = talk[0] if talk else {}
    if first.get("role") == "system" and isinstance(first["content"], str):
        return opening(row, first["content"]) + talk[1:]
    return opening(row) + talk


def column(row: TableRow, names: str) -> str:
    """The first of these columns that the row has; one that is null only where the others are too."""
    there = [name for name in names.split("|") if name in row]
    return next((name for name in there if row[name] is not None), there[0] if there else names.replace("|", " or "))


def cell(row: TableRow, names: str) -> Any:
    """What stands in it."""
    return row[column(row, names)]


def said(content: Any, role: str) -> Conversation:
    """A text is one message of this role; a list is messages already, in JSON too."""
    content = talk_in(content)
    if not isinstance(content, (str, list)):
        raise ValueError(f"what the {role} says is not text but {type(content).__name__}")
    return [message(role, content)] if isinstance(content, str) else turns(content)


def history(row: TableRow) -> Conversation:
    """The earlier exchanges of a row: pairs of texts, or messages."""
    earlier = unpacked(row.get("history") or [], "history")
    if isinstance(earlier, list) and all(isinstance(entry, dict) for entry in earlier):
        return turns(earlier)
    for pair in earlier:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError("its history holds neither pairs of texts nor messages")
    return [m for user, reply in earlier for m in (message("user", user), message("assistant", reply))]


def asked(row: TableRow, name: str = "instruction") -> Any:
    """What a row asks in this column, with what it is about; a list of messages stays as it is."""
    ask = talk_in(row[name])
    if isinstance(ask, list):
        return ask
    parts = [(name, ask), *((about, row[about]) for about in ABOUT if about != name and about in row)]
    parts = [(of, part) for of, part in parts if part not in (None, "")]
    for of, part in parts:
        if not isinstance(part, str):
            raise ValueError(f"the column {of} holds not text but {type(part).__name__}")
    return "\n".join(part for _, part in parts) if parts else ask


def checked(conversation: Conversation) -> Conversation:
    """The conversation, if the renderer takes it: every message has a role, and text or parts of known types."""
    for entry in conversation:
        role, content = entry["role"], entry["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for kind in (part["type"] for part in parts):
            if kind not in SPAN_OF:
                raise ValueError(f"a part of a message has the unknown type {kind!r} (known: {', '.join(SPAN_OF)})")
            if kind != "text" and role in ("system", "user"):
                raise ValueError(f"a part of the type {kind!r} belongs to the assistant, not to the role {role!r}")
        if has_half([part["text"] for part in parts]):
            raise ValueError(HALF)
        if role not in ROLES or not all(isinstance(part["text"], str) for part in parts):
            raise ValueError(f"the message {entry!r:.200} has no text")
    return conversation
