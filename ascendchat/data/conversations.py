"""Readers of instruction and chat files: whatever people publish, one kind of conversation comes out.

    for messages in conversations("alpaca.json"): ...      # a list of messages as data/chat.py takes them

`ascendchat sft --data FILE` reads through here. The container (json, jsonl, tsv, parquet; all but parquet also as .gz,
.bz2, .xz, .zst) is told by its name, the format of the rows by the columns of the first one that has known ones:

| format    | columns                                                 | becomes                                        |
|-----------|---------------------------------------------------------|------------------------------------------------|
| openai    | messages (role, content, tool_calls)                    | the same                                       |
| sharegpt  | conversations (from, value); system, tools              | tools are listed in the system message         |
| dpo       | conversations, prompt or instruction; chosen, rejected  | the conversation up to the chosen reply        |
| alpaca    | instruction, input, output or response; system, history | input (Dolly: context) follows the instruction |
| bilingual | en_instruction, en_output, zh_instruction, ...          | one conversation per language                  |
| choice    | question, choices, gold, answer or answerKey            | `chat.render_choice` and the letter            |
| question  | question, answer                                        | <<48/2=24>> becomes a call of the calculator   |
| pair      | query, prompt, question or input with response,         | one exchange behind the history; lists of      |
|           | completion, output or answer; system, history           | messages stay as they are                      |
| text      | text                                                    | turns at `### Human:`; else one reply          |
| reasoned  | tsv of three columns: question, answer, explanation     | the explanation, then the answer               |

Rows that cannot be read are counted and left out, and the first of them are named. More than 1 % of them in a file is
an error, as for `ascendchat data prepare`; but a single one is not, unless it is half of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from ascendchat.config import UserError
from ascendchat.data import read
from ascendchat.data.chat import LETTERS, ROLES, SPAN_OF, Conversation, Message, Part, render_choice
from ascendchat.data.read import format_of
from ascendchat.data.tables import TABLE_TYPES, TableRow, Unread, entries, why_unread
from ascendchat.record.console import inert

ROLE_NAMES = {  # what publishers call each role; a "call" is a part of the assistant's turn
    "system": "system developer",
    "user": "human user prompter",
    "assistant": "gpt chatgpt bing bard assistant model",
    "call": "function_call",
    "tool": "observation function_response function tool ipython",
}
SPEAKERS = {name: role for role, names in ROLE_NAMES.items() for name in names.split()}
TOOLS_OFFERED = "You can call these tools:\n"
TURN = re.compile(r"###\s*(Human|Assistant|User|System)\s*:", re.IGNORECASE)
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
PROMPT, REPLY = "query|prompt|question|input", "response|completion|output|answer"  # columns of a pair
Row = TypeVar("Row")
OF_ANOTHER_FORM = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what such a row raises


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


def openai(row: TableRow) -> Iterator[Conversation]:
    conversation: Conversation = []
    for entry in row["messages"]:
        calls = entry.get("tool_calls") or []
        said = spoken(entry["role"], entry.get("content") or "")
        if calls:
            text = [] if not said["content"] else [{"type": "text", "text": said["content"]}]
            made = [{"type": "tool", "text": called(call)} for call in calls]
            said = message("assistant", [*(text if isinstance(said["content"], str) else said["content"]), *made])
        conversation.append(said)
    yield conversation


def called(call: TableRow) -> str:
    """A tool call as the text the model produces."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and arguments.strip():
        arguments = json.loads(arguments)
    return json.dumps({"name": function["name"], "arguments": arguments or {}}, ensure_ascii=False)


def opening(row: TableRow) -> Conversation:
    """The system message of a row, with the tools it offers."""
    system, tools = row.get("system") or "", row.get("tools") or ""
    if tools:
        tools = tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False)
        system = "\n".join(part for part in (system, TOOLS_OFFERED + tools) if part)
    return [message("system", system)] if system else []


def turns(entries: Any) -> Conversation:
    """ShareGPT turns (from, value) or the same with role and content."""
    return [spoken(e["from"], e["value"]) if "from" in e else spoken(e["role"], e["content"]) for e in entries]


def sharegpt(row: TableRow) -> Iterator[Conversation]:
    yield opening(row) + turns(row["conversations"])


def dpo(row: TableRow) -> Iterator[Conversation]:
    chosen = row["chosen"]
    head = said(row.get("conversations", row.get("prompt", row.get("instruction", []))), "user")
    if isinstance(chosen, str):
        yield opening(row) + head + [message("assistant", chosen)]
    elif isinstance(chosen, list):  # some sets repeat the whole conversation in `chosen`
        whole = turns(chosen)
        yield opening(row) + (whole if whole[:1] == head[:1] else head + whole)
    else:
        yield opening(row) + head + turns([chosen])


def alpaca(row: TableRow) -> Iterator[Conversation]:
    ask = "\n".join(part for part in (row["instruction"], row.get("input") or row.get("context") or "") if part)
    yield opening(row) + history(row) + said(ask, "user") + said(cell(row, "output|response"), "assistant")


def pair(row: TableRow) -> Iterator[Conversation]:
    yield opening(row) + history(row) + said(cell(row, PROMPT), "user") + said(cell(row, REPLY), "assistant")


def cell(row: TableRow, names: str) -> Any:
    """The first of these columns that the row has."""
    return row[next((name for name in names.split("|") if name in row), names.replace("|", " or "))]


def said(content: Any, role: str) -> Conversation:
    """A text is one message of this role; a list is messages already."""
    if not isinstance(content, (str, list)):
        raise ValueError(f"what the {role} says is not text but {type(content).__name__}")
    return [message(role, content)] if isinstance(content, str) else turns(content)


def history(row: TableRow) -> Conversation:
    """The earlier exchanges of a row."""
    return [m for u, a in row.get("history") or [] for m in (message("user", u), message("assistant", a))]


def bilingual(row: TableRow) -> Iterator[Conversation]:
    for language in ("en", "zh"):
        own = {key[3:]: value for key, value in row.items() if key.startswith(f"{language}_")}
        yield from alpaca(own)


def parse_choice(row: TableRow) -> tuple[str, list[str], int]:
    """Question, choices, and which of them is right, of a multiple-choice row as anybody publishes it: the choices are
    a list, texts with labels (ARC: {"text": [...], "label": ["A", ...] or ["1", ...]}) or columns A, B, C ...; the
    right one is named by its number, letter or label."""
    asked, gold = cell(row, "question|Question|query"), cell(row, "gold|answer|Answer|answerKey")
    choices, labels = row.get("choices"), list(LETTERS)
    if choices is None:
        choices = [row[letter] for letter in LETTERS[:10] if row.get(letter) not in (None, "")]
    elif isinstance(choices, Mapping):
        choices, labels = choices["text"], [str(label) for label in choices["label"]]
    right = gold if isinstance(gold, int) else labels.index(str(gold).strip()) if str(gold).strip() in labels else -1
    if not 0 <= right < len(choices):
        raise ValueError(f"the answer {gold!r} is none of the {len(choices)} choices of {str(asked)[:60]!r}")
    return asked, list(choices), right


def choice(row: TableRow) -> Iterator[Conversation]:
    asked, choices, right = parse_choice(row)
    yield [message("user", render_choice(asked, choices)), message("assistant", LETTERS[right])]


def question(row: TableRow) -> Iterator[Conversation]:
    yield [message("user", row["question"]), message("assistant", calculations(row["answer"]))]


def calculations(answer: str) -> str | list[Part]:
    """GSM8K writes `48/2 = <<48/2=24>>24`: the calculator is asked 48/2, gives 24, and the text goes on with 24."""
    parts: list[Part] = []
    at = 0
    for calculation in CALCULATION.finditer(answer):
        parts.append({"type": "text", "text": answer[at : calculation.start()]})
        parts.append({"type": "tool", "text": calculation[1].strip()})
        parts.append({"type": "output", "text": calculation[2].strip()})
        at = calculation.end()
    return [*parts, {"type": "text", "text": answer[at:]}] if parts else answer


def text(row: TableRow) -> Iterator[Conversation]:
    marks = list(TURN.finditer(row["text"]))
    ends = [mark.start() for mark in marks[1:]] + [len(row["text"])]
    if not marks:
        yield [message("assistant", row["text"])]
    else:
        yield [spoken(mark[1], row["text"][mark.end() : end].strip()) for mark, end in zip(marks, ends)]


def reasoned(row: TableRow) -> Iterator[Conversation]:
    if len(row["cells"]) != 3:
        raise ValueError(f"it has {len(row['cells'])} columns, not question, answer and explanation")
    ask, answer, why = (cell.replace("\\n", "\n").strip() for cell in row["cells"])
    yield [message("user", ask), message("assistant", f"{why}\nThe answer is {answer}.")]


# In this order: the first whose columns are all there (one of each bar-separated group) reads the file.
READERS: tuple[tuple[Callable[[TableRow], Iterator[Conversation]], tuple[str, ...]], ...] = (
    (openai, ("messages",)),
    (dpo, ("conversations|prompt|instruction", "chosen", "rejected")),
    (sharegpt, ("conversations",)),
    (bilingual, ("en_instruction", "en_output", "zh_instruction", "zh_output")),
    (alpaca, ("instruction", "output|response")),
    (choice, ("question", "choices", "gold|answer|answerKey")),
    (question, ("question", "answer")),
    (pair, (PROMPT, REPLY)),
    (text, ("text",)),
    (reasoned, ("cells",)),
)


def detect(row: TableRow, path: Path) -> Callable[[TableRow], Iterator[Conversation]]:
    """The reader of rows like this one, or an error that names what was found."""
    for reader, needed in READERS:
        if all(any(name in row for name in group.split("|")) for group in needed):
            return reader
    named = [(reader, needed) for reader, needed in READERS if reader is not reasoned]
    known = "; ".join(f"{reader.__name__} ({', '.join(needed)})" for reader, needed in named)
    raise UserError(
        f"{path.name} has the columns {inert(', '.join(row)) or '(none)'}, which no reader knows; rename them to those "
        f"of one of these formats: {known}"
    )


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
    path: str | Path,
    *,
    limit: int | None = None,
    slots: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Conversation]:
    """Every conversation of a file, in order; `say` gets a line about rows that were left out, if there are any.

    `slots` are words for places like {{name}}, `limit` stops after so many rows."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file; name a json, jsonl, tsv or parquet file of conversations")
    if format_of(path.name)[0] not in TABLE_TYPES:
        raise UserError(
            f"{path.name}: conversations are read from {' '.join(TABLE_TYPES)} files; convert it to .jsonl, with one "
            'line for each conversation, like {"prompt": "Who are you?", "completion": "A small assistant."}'
        )
    reader: Callable[[TableRow], Iterator[Conversation]] | None = None

    def read_row(row: TableRow) -> list[Conversation]:
        nonlocal reader
        reader = reader or detect(row, path)
        return [checked(one) for one in reader(filled(row, slots) if slots else row)]

    for of_row in read_rows(path, read_row, limit=limit, say=say):
        yield from of_row


def read_rows(
    path: Path,
    read_row: Callable[[TableRow], Row],
    *,
    limit: int | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Row]:
    """What `read_row` makes of each row of a table; rows that it cannot read are counted and left out. A UserError of
    it means columns that it does not know: those of another row may be known."""
    unread, read_any, unknown = Unread(path.name), False, None
    try:
        for where, row in islice(entries(path), limit):
            unread.rows += 1
            try:
                if isinstance(row, Exception):
                    raise row
                if not isinstance(row, dict):
                    raise ValueError(f"it is {type(row).__name__}, not an object with named columns")
                found = read_row(row)
            except UserError as error:
                unknown = unknown or error
                unread.add(where, f"it has the columns {', '.join(row) or '(none)'}")
            except OF_ANOTHER_FORM as error:
                unread.add(where, why_unread(error))
                read_any = read_any or isinstance(row, dict)
            else:
                read_any = True
                yield found
            if unread.count > 1000 and unread.too_many:
                break  # no need to read the wrong thing to its end
    except (ValueError, *read.UNREADABLE) as error:  # of the file, not of a row
        raise UserError(
            f"{path.name} cannot be read beyond row {unread.rows}: {read.reason(error)}; fetch or write it again"
        ) from error
    if not unread.rows:
        raise UserError(f"{path.name} is empty; name a file with at least one row")
    if not read_any and unknown is not None:
        raise unknown
    if unread.too_many:
        raise UserError(f"{unread.line()}; more than 1 % is too much: mend these rows or take them out")
    if unread.count:
        say(f"{unread.line()}; left out")


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
        if role not in ROLES or not all(isinstance(part["text"], str) for part in parts):
            raise ValueError(f"the message {entry!r:.200} has no text")
    return conversation
