"""Readers of instruction and chat files: whatever people publish, one kind of conversation comes out.

    for messages in conversations("alpaca.json"): ...      # a list of messages as data/chat.py takes them

`ascendchat sft --data FILE` reads through here. The container (json, jsonl, tsv, parquet; plain, .gz, .bz2, .xz, .zst)
is told by its name, the format of the rows by the columns of the first one:

| format    | columns                                                 | becomes                                        |
|-----------|---------------------------------------------------------|------------------------------------------------|
| openai    | messages (role, content, tool_calls)                    | the same                                       |
| sharegpt  | conversations (from, value); system, tools              | tools are listed in the system message         |
| dpo       | conversations or prompt, with chosen and rejected       | the conversation up to the chosen reply        |
| alpaca    | instruction, input, output or response; system, history | input follows the instruction                  |
| bilingual | en_instruction, en_output, zh_instruction, ...          | one conversation per language                  |
| query     | query, response; system, history                        | one exchange behind the history                |
| choice    | question, choices, gold, answer or answerKey            | `chat.render_choice` and the letter            |
| question  | question, answer                                        | <<48/2=24>> becomes a call of the calculator   |
| text      | text                                                    | turns at `### Human:`; else one reply          |
| reasoned  | tsv of three columns: question, answer, explanation     | the explanation, then the answer               |
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from ascendchat.config import UserError
from ascendchat.data.chat import LETTERS, ROLES, SPAN_OF, Conversation, Message, Part, render_choice
from ascendchat.data.read import UNREADABLE, format_of, reason, unpack

Row = dict[str, Any]
SPEAKERS = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "prompter": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "assistant": "assistant", "model": "assistant",
    "function_call": "call", "observation": "tool", "function_response": "tool", "function": "tool", "tool": "tool",
    "ipython": "tool",
}  # fmt: skip
TOOLS = "You can call these tools:\n"
TURN = re.compile(r"###\s*(Human|Assistant|User|System)\s*:", re.IGNORECASE)
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")


def message(role: str, content: str | Sequence[Part]) -> Message:
    return {"role": role, "content": content if isinstance(content, str) else list(content)}


def spoken(speaker: Any, content: Any) -> Message:
    """A message from a speaker of any tradition; a function call is a part of the assistant's turn."""
    role = SPEAKERS.get(str(speaker).strip().lower())
    if role is None:
        raise ValueError(f"the speaker {speaker!r} is unknown (known: {', '.join(SPEAKERS)})")
    if isinstance(content, list):  # parts: ours, or those of the OpenAI interface
        parts = [{"type": p.get("type"), "text": p.get("text")} for p in content]
        return message(role, cast(Sequence[Part], parts))
    if not isinstance(content, str):
        raise ValueError(f"what {speaker!r} says is not text but {type(content).__name__}")
    return message("assistant", [{"type": "tool", "text": content}]) if role == "call" else message(role, content)


def openai(row: Row) -> Iterator[Conversation]:
    found: Conversation = []
    for entry in row["messages"]:
        calls = entry.get("tool_calls") or []
        said = spoken(entry["role"], entry.get("content") or "")
        if calls:
            text = [] if not said["content"] else [{"type": "text", "text": said["content"]}]
            made = [{"type": "tool", "text": called(call)} for call in calls]
            said = message("assistant", [*(text if isinstance(said["content"], str) else said["content"]), *made])
        found.append(said)
    yield found


def called(call: Row) -> str:
    """A tool call as the text the model produces."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and arguments.strip():
        arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments or {}}, ensure_ascii=False)


def opening(row: Row) -> Conversation:
    """The system message of a row, with the tools it offers."""
    system, tools = row.get("system") or "", row.get("tools") or ""
    if tools:
        tools = tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False)
        system = "\n".join(part for part in (system, TOOLS + tools) if part)
    return [message("system", system)] if system else []


def turns(entries: Any) -> Conversation:
    """ShareGPT turns (from, value) or the same with role and content."""
    return [spoken(e["from"], e["value"]) if "from" in e else spoken(e["role"], e["content"]) for e in entries]


def sharegpt(row: Row) -> Iterator[Conversation]:
    yield opening(row) + turns(row["conversations"])


def dpo(row: Row) -> Iterator[Conversation]:
    chosen = row["chosen"]
    before = row.get("conversations", row.get("prompt", row.get("instruction", [])))
    head = [message("user", before)] if isinstance(before, str) else turns(before)
    if isinstance(chosen, str):
        yield opening(row) + head + [message("assistant", chosen)]
    elif isinstance(chosen, list):  # some sets repeat the whole conversation in `chosen`
        said = turns(chosen)
        yield opening(row) + (said if said[:1] == head[:1] else head + said)
    else:
        yield opening(row) + head + turns([chosen])


def alpaca(row: Row) -> Iterator[Conversation]:
    ask = "\n".join(part for part in (row["instruction"], row.get("input") or "") if part)
    yield paired(row, ask, row["output"] if "output" in row else row["response"])


def query(row: Row) -> Iterator[Conversation]:
    yield paired(row, row["query"], row["response"])


def paired(row: Row, ask: str, reply: str) -> Conversation:
    """One exchange behind the system message and the earlier exchanges of a row."""
    past = [m for u, a in row.get("history") or [] for m in (message("user", u), message("assistant", a))]
    return opening(row) + past + [message("user", ask), message("assistant", reply)]


def bilingual(row: Row) -> Iterator[Conversation]:
    for language in ("en", "zh"):
        own = {key[3:]: value for key, value in row.items() if key.startswith(f"{language}_")}
        yield from alpaca(own)


def choice(row: Row) -> Iterator[Conversation]:
    options, gold = row["choices"], row.get("gold", row.get("answer", row.get("answerKey")))
    labels = None
    if isinstance(options, Mapping):  # ARC as published: {"text": [...], "label": [...]}
        options, labels = options["text"], options["label"]
    at = gold if isinstance(gold, int) else (labels or LETTERS[: len(options)]).index(str(gold))
    if not 0 <= at < len(options):
        raise ValueError(f"the answer {gold!r} is none of the {len(options)} choices")
    yield [message("user", render_choice(row["question"], options)), message("assistant", LETTERS[at])]


def question(row: Row) -> Iterator[Conversation]:
    yield [message("user", row["question"]), message("assistant", calculations(row["answer"]))]


def calculations(answer: str) -> str | list[Part]:
    """GSM8K writes `48/2 = <<48/2=24>>24`: the calculator is asked 48/2, gives 24, and the text goes on with 24."""
    parts: list[Part] = []
    at = 0
    for found in CALCULATION.finditer(answer):
        parts.append({"type": "text", "text": answer[at : found.start()]})
        parts.append({"type": "tool", "text": found[1].strip()})
        parts.append({"type": "output", "text": found[2].strip()})
        at = found.end()
    return [*parts, {"type": "text", "text": answer[at:]}] if parts else answer


def text(row: Row) -> Iterator[Conversation]:
    marks = list(TURN.finditer(row["text"]))
    ends = [mark.start() for mark in marks[1:]] + [len(row["text"])]
    if not marks:
        yield [message("assistant", row["text"])]
    else:
        yield [spoken(mark[1], row["text"][mark.end() : end].strip()) for mark, end in zip(marks, ends)]


def reasoned(row: Row) -> Iterator[Conversation]:
    ask, answer, why = (cell.replace("\\n", "\n").strip() for cell in row["cells"])
    yield [message("user", ask), message("assistant", f"{why}\nThe answer is {answer}.")]


# In this order: the first whose columns are all there (one of each bar-separated group) reads the file.
FORMATS: tuple[tuple[Callable[[Row], Iterator[Conversation]], tuple[str, ...]], ...] = (
    (openai, ("messages",)),
    (dpo, ("conversations|prompt|instruction", "chosen", "rejected")),
    (sharegpt, ("conversations",)),
    (bilingual, ("en_instruction", "en_output", "zh_instruction", "zh_output")),
    (alpaca, ("instruction", "output|response")),
    (query, ("query", "response")),
    (choice, ("question", "choices", "gold|answer|answerKey")),
    (question, ("question", "answer")),
    (text, ("text",)),
    (reasoned, ("cells",)),
)


def detect(row: Row, path: Path) -> Callable[[Row], Iterator[Conversation]]:
    """The reader of rows like this one, or an error that names what was found."""
    for reader, needed in FORMATS:
        if all(any(name in row for name in group.split("|")) for group in needed):
            return reader
    known = "; ".join(f"{reader.__name__} ({', '.join(needed)})" for reader, needed in FORMATS[:-1])
    raise UserError(
        f"{path.name} has the columns {', '.join(row) or '(none)'}, which no reader knows; rename them to those of one "
        f"of these formats: {known}"
    )


def opened(path: Path) -> IO[str]:
    """The file as text, unpacked by its last suffix, without a byte-order mark at its beginning.

    Only \\n ends a line: a text may hold other line breaks."""
    return io.TextIOWrapper(unpack(path.open("rb"), format_of(path.name)[1]), encoding="utf-8-sig", newline="\n")


def rows(path: Path) -> Iterator[Row]:
    """The rows of a file, as they are."""
    kind = format_of(path.name)[0]
    if kind == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        return
    with closing(opened(path)) as file:
        if kind == ".tsv":
            for line in file:
                cells = line.rstrip("\n").split("\t")
                if len(cells) != 3:
                    raise ValueError(f"a line has {len(cells)} columns, not question, answer and explanation")
                yield {"cells": cells}
            return
        first = next((line for line in file if line.strip()), "")
        if first.lstrip().startswith("["):
            yield from json.loads(first + file.read())
        else:
            for line in chain([first], file):
                if line.strip():
                    yield json.loads(line)


def filled(value: Any, slots: Mapping[str, str]) -> Any:
    """The same value with every {{slot}} in its texts replaced."""
    if isinstance(value, str):
        for name, words in slots.items():
            value = value.replace("{{" + name + "}}", words)
        return value
    if isinstance(value, list):
        return [filled(entry, slots) for entry in value]
    return {key: filled(entry, slots) for key, entry in value.items()} if isinstance(value, dict) else value


def conversations(
    path: str | Path, *, limit: int | None = None, slots: Mapping[str, str] | None = None
) -> Iterator[Conversation]:
    """Every conversation of a file, in order; `slots` fills {{name}} and its like, `limit` stops after so many rows."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file; name a json, jsonl, tsv or parquet file of conversations")
    reader, number, whole = None, 0, False  # whole: the row itself could be read
    try:
        for row in islice(rows(path), limit):
            number, whole = number + 1, True
            if not isinstance(row, dict):
                raise ValueError(f"a row is {type(row).__name__}, not an object with named columns")
            reader = reader or detect(row, path)
            for found in reader(filled(row, slots) if slots else row):
                yield checked(found)
            whole = False
    except (*UNREADABLE, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the column {error} is missing" if isinstance(error, KeyError) else reason(error)
        kind = f" as {reader.__name__}" if reader else ""
        number += not whole
        raise UserError(
            f"{path.name}, row {number}, cannot be read{kind}: {what}; mend that row or leave it out"
        ) from error
    if not number:
        raise UserError(f"{path.name} is empty; name a file with at least one conversation")


def checked(found: Conversation) -> Conversation:
    """The conversation, if the renderer takes it: every message has a role, and text or parts of known types."""
    for entry in found:
        role, content = entry["role"], entry["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for kind in (part["type"] for part in parts):
            if kind not in SPAN_OF:
                raise ValueError(f"a part of a message has the unknown type {kind!r} (known: {', '.join(SPAN_OF)})")
            if kind != "text" and role in ("system", "user"):
                raise ValueError(f"a part of the type {kind!r} belongs to the assistant, not to the role {role!r}")
        if role not in ROLES or not all(isinstance(part["text"], str) for part in parts):
            raise ValueError(f"the message {entry!r:.200} has no text")
    return found
