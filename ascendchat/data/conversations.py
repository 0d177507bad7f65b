"""Readers of instruction and chat files: whatever people publish, one kind of conversation comes out.

    for messages in conversations("alpaca.json"): ...      # a list of messages as data/chat.py takes them

`ascendchat sft --data FILE` reads through here. The container (json, jsonl, tsv, parquet; all but parquet also as .gz,
.bz2, .xz, .zst) is told by its name, the format of the rows by the columns of the first one that has known ones:

| format    | columns                                                 | becomes                                        |
|-----------|---------------------------------------------------------|------------------------------------------------|
| openai    | messages (role, content, tool_calls); system, tools     | tools are listed in the system message         |
| sharegpt  | conversations (from, value); system, tools              | the same                                       |
| dpo       | chosen, rejected beside a prompt: see pairs.py          | the conversation up to the chosen reply        |
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

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ascendchat.config import UserError
from ascendchat.data.chat import LETTERS, Conversation, Part, render_choice
from ascendchat.data.pairs import PAIR_COLUMNS, talk_of
from ascendchat.data.tables import Allowance, TableRow, check_table, read_rows
from ascendchat.data.turns import asked, cell, checked, history, message, opened, opening, said, spoken, turns
from ascendchat.record.console import inert

TURN = re.compile(r"###\s*(Human|Assistant|User|System)\s*:", re.IGNORECASE)
CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
PROMPT, REPLY = "query|prompt|question|input", "response|completion|output|answer"  # columns of a pair


def openai(row: TableRow) -> Iterator[Conversation]:
    yield opened(row, turns(row["messages"]))


def sharegpt(row: TableRow) -> Iterator[Conversation]:
    yield opened(row, turns(row["conversations"]))


def dpo(row: TableRow) -> Iterator[Conversation]:
    yield talk_of(row, "chosen")


def alpaca(row: TableRow) -> Iterator[Conversation]:
    yield opening(row) + history(row) + said(asked(row), "user") + said(cell(row, "output|response"), "assistant")


def pair(row: TableRow) -> Iterator[Conversation]:
    yield opening(row) + history(row) + said(cell(row, PROMPT), "user") + said(cell(row, REPLY), "assistant")


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
    (dpo, PAIR_COLUMNS),
    (openai, ("messages",)),
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
    limit: Allowance | None = None,
    slots: Mapping[str, str] | None = None,
    arrange: Callable[[TableRow], TableRow] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Conversation]:
    """Every conversation of a file, in order; `say` gets a line about rows that were left out, if there are any.

    `slots` are words for places like {{name}}, `limit` stops after so many rows, `arrange` gives a row the columns
    above (registry.py)."""
    path = check_table(path)
    reader: Callable[[TableRow], Iterator[Conversation]] | None = None

    def read_row(row: TableRow) -> list[Conversation]:
        nonlocal reader
        row = arrange(row) if arrange else row
        reader = reader or detect(row, path)
        if reader not in (dpo, text) and str(row.get("label")).lower() == "false":  # as KTO's rows are marked
            raise ValueError("a reply of the label false would be learnt; leave out what is not to be learnt")
        return [checked(one) for one in reader(filled(row, slots) if slots else row)]

    for of_row in read_rows(path, read_row, limit=limit, say=say):
        yield from of_row
