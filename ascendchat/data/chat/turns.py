"""Messages from published forms: the pieces that the readers of conversations and of pairs are made of.

    speaker_message("gpt", "Hello.")              # {"role": "assistant", "content": "Hello."}
    parse_turns([{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Hello."}])

`ascendchat sft --data FILE` comes here through formats.py, `finetune --stage dpo` through pairs.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from ascendchat.data.chat.render import ROLES, SPAN_OF, Conversation, Message, Part, content_parts, text_of
from ascendchat.data.chat.tables import CALLS, SPEAKER, THOUGHTS, TableRow, is_talk
from ascendchat.data.surrogates import LONE_SURROGATE, has_lone_surrogate

ROLE_NAMES = {  # role -> its published names; a "call" is a part of the assistant's turn
    "system": "system developer",
    "user": "human user prompter",
    "assistant": "gpt chatgpt bing bard assistant model",
    "call": "function_call",
    "tool": "observation function_response function tool ipython",
}
SPEAKERS = {name: role for role, names in ROLE_NAMES.items() for name in names.split()}
TOOLS_OFFERED = "You can call these tools:\n"
SYSTEM, OFFERS = ("system", "system_prompt"), ("tools", "functions")  # columns; the first that is not empty counts
ABOUT = "input", "context", "passage"  # columns with the passage that a question is about
LEARNT = "weight", "loss", "train", "training"  # keys of a message: 0 or false where it is not to be learnt
NO = (0, "0", "false", "False")  # a csv has only texts


def message(role: str, content: str | Sequence[Part]) -> Message:
    return {"role": role, "content": content if isinstance(content, str) else list(content)}


def role_of(speaker: Any) -> str | None:
    """Role of a speaker under any of its published names; None if unknown."""
    return SPEAKERS.get(str(speaker).strip().lower())


def speaker_message(speaker: Any, content: Any) -> Message:
    """Build a message from a speaker under any name; a function call is a part of the assistant's turn."""
    role = role_of(speaker)
    if role is None:
        raise ValueError(f"the speaker {speaker!r} is unknown (known: {', '.join(SPEAKERS)})")
    if isinstance(content, list):  # parts: ours, or those of the OpenAI interface
        parts = [{"type": p.get("type"), "text": p.get("text")} for p in content]
        return message(role, cast(Sequence[Part], parts))
    if not isinstance(content, str):
        raise ValueError(f"what {speaker!r} says is not text but {type(content).__name__}")
    return message("assistant", [{"type": "tool", "text": content}]) if role == "call" else message(role, content)


def parse_turn(entry: TableRow) -> Message:
    """Parse one message: ShareGPT's from and value; or role and content, where a message that calls tools needs no
    content. Reasoning stands before the assistant's words, unless they hold it, too."""
    speaker = entry["from" if "from" in entry else "role"]
    mark = next((name for name in LEARNT if entry.get(name) in NO), "")
    if mark and role_of(speaker) in ("assistant", "call"):
        raise ValueError(
            f"a reply of {mark} {entry[mark]} would be learnt like the others; leave out what is not to be learnt"
        )
    thought = next((text for name in THOUGHTS if isinstance(text := entry.get(name), str) and text.strip()), "")
    built = parse_words(entry, speaker)
    if not thought or built["role"] != "assistant" or "</think>" in text_of(built["content"]):
        return built
    return message("assistant", [{"type": "thought", "text": thought}, *content_parts(built["content"])])


def parse_words(entry: TableRow, speaker: Any) -> Message:
    """Parse the words and the calls of a message."""
    if "from" in entry:
        return speaker_message(speaker, entry["value"])
    calls = entry.get(CALLS[0]) or ([entry[CALLS[1]]] if entry.get(CALLS[1]) else [])
    if not calls:
        return speaker_message(entry["role"], empty_for_null(entry["content"]))
    words = speaker_message(entry["role"], empty_for_null(entry.get("content")))["content"]
    parts = words if isinstance(words, list) else [{"type": "text", "text": words}] if words else []
    return message("assistant", [*parts, *({"type": "tool", "text": call_text(call)} for call in calls)])


def empty_for_null(content: Any) -> Any:
    """Replace null by an empty text; a number stays a number, 0 too, and is refused later."""
    return "" if content is None else content


def call_text(call: TableRow) -> str:
    """Format a tool call as the text the model produces."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and arguments.strip():
        arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments or {}}, ensure_ascii=False)


def system_message(row: TableRow, more: str = "") -> Conversation:
    """Build the system message of a row: its own, `more` that belongs to it, and the tools that the row offers."""
    first = next((row[name] for name in SYSTEM if row.get(name)), "")
    tools = next((row[name] for name in OFFERS if row.get(name)), "")
    if tools and tools != "[]":
        tools = TOOLS_OFFERED + (tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False))
    system = "\n".join(part for part in (first, more, tools) if part and part != "[]")
    return [message("system", system)] if system else []


def parse_turns(entries: Any) -> Conversation:
    """Parse messages of either form, in a list or the JSON text of one."""
    messages = list(parse_list(entries, "messages"))
    if odd := next((entry for entry in messages if not isinstance(entry, dict)), None):
        raise ValueError(f"its messages are not objects but {type(odd).__name__}")
    return [parse_turn(entry) for entry in sort_results(messages)]


def parse_list(value: Any, what: str) -> Any:
    """Parse the JSON text of a list, which a table holds where its cells hold only text; other values stay."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ValueError(f"the text in place of its {what} is no JSON ({error}); write a list") from None
    if not isinstance(parsed, list):
        raise ValueError(f"the text in place of its {what} is no JSON list but {type(parsed).__name__}")
    return parsed


def parse_talk(value: Any) -> Any:
    """Parse a text that is a JSON list of messages, recognised by the known speaker of the first one; else return
    the value: in a column of texts any other JSON is a text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    speaks = is_talk(parsed) and any(role_of(parsed[0].get(name)) for name in SPEAKER)
    return parsed if speaks else value


def sort_results(entries: list[Any]) -> list[Any]:
    """Sort the results of tools into the order of the calls that they name: from here on their order tells to which
    call each belongs."""
    for at, entry in enumerate(entries):
        call_ids = [call.get("id") for call in entry.get(CALLS[0]) or []]
        end = at + 1
        while end < len(entries) and entries[end].get("tool_call_id") is not None:
            end += 1
        results = entries[at + 1 : end]
        if len(call_ids) > 1 and all(result["tool_call_id"] in call_ids for result in results):
            entries[at + 1 : end] = sorted(results, key=lambda result: call_ids.index(result["tool_call_id"]))
    return entries


def with_system(row: TableRow, talk: Conversation) -> Conversation:
    """Put a conversation after its row's system message; a system message that it begins with becomes a part of
    that."""
    first = talk[0] if talk else {}
    if first.get("role") == "system" and isinstance(first["content"], str):
        return system_message(row, first["content"]) + talk[1:]
    return system_message(row) + talk


def column(row: TableRow, names: str) -> str:
    """The first of these columns that the row has; one that is null only where the others are too."""
    present = [name for name in names.split("|") if name in row]
    return next(
        (name for name in present if row[name] is not None), present[0] if present else names.replace("|", " or ")
    )


def cell(row: TableRow, names: str) -> Any:
    """The value of the first of these columns that the row has."""
    return row[column(row, names)]


def cell_messages(content: Any, role: str) -> Conversation:
    """Messages of a cell: a text is one message of this role; a list is messages already, as JSON text too."""
    content = parse_talk(content)
    if not isinstance(content, (str, list)):
        raise ValueError(f"what the {role} says is not text but {type(content).__name__}")
    return [message(role, content)] if isinstance(content, str) else parse_turns(content)


def history(row: TableRow) -> Conversation:
    """The earlier exchanges of a row: pairs of texts, or messages."""
    earlier = parse_list(row.get("history") or [], "history")
    if isinstance(earlier, list) and all(isinstance(entry, dict) for entry in earlier):
        return parse_turns(earlier)
    for pair in earlier:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError("its history holds neither pairs of texts nor messages")
    return [m for user, reply in earlier for m in (message("user", user), message("assistant", reply))]


def question_of(row: TableRow, name: str = "instruction") -> Any:
    """The question of a row in this column, after the passage it is about; a list of messages stays as it is."""
    ask = parse_talk(row[name])
    if isinstance(ask, list):
        return ask
    parts = [(name, ask), *((about, row[about]) for about in ABOUT if about != name and about in row)]
    parts = [(of, part) for of, part in parts if part not in (None, "")]
    for of, part in parts:
        if not isinstance(part, str):
            raise ValueError(f"the column {of} holds not text but {type(part).__name__}")
    return "\n".join(part for _, part in parts) if parts else ask


def validated(conversation: Conversation) -> Conversation:
    """Return the conversation, if the renderer takes it: every message has a role, and text or parts of known types."""
    for entry in conversation:
        role, content = entry["role"], entry["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for kind in (part["type"] for part in parts):
            if kind not in SPAN_OF:
                raise ValueError(f"a part of a message has the unknown type {kind!r} (known: {', '.join(SPAN_OF)})")
            if kind != "text" and role in ("system", "user"):
                raise ValueError(f"a part of the type {kind!r} belongs to the assistant, not to the role {role!r}")
        if has_lone_surrogate([part["text"] for part in parts]):
            raise ValueError(LONE_SURROGATE)
        if role not in ROLES or not all(isinstance(part["text"], str) for part in parts):
            raise ValueError(f"the message {entry!r:.200} has no text")
    return conversation
