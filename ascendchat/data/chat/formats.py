"""Readers of instruction and chat files: of every published format, one kind of conversation comes out.

    for messages in conversations("alpaca.json"): ...      # a list of messages as data/chat/render.py takes them

`ascendchat sft --data FILE` reads through here. The container (json, jsonl, tsv, parquet; all but parquet also as .gz,
.bz2, .xz, .zst) is recognised by its name, the format of the rows by the columns of the first row that has known ones:

| format    | columns                                                 | becomes                                        |
|-----------|---------------------------------------------------------|------------------------------------------------|
| openai    | messages (role, content, tool_calls); system, tools     | tools are listed in the system message         |
| sharegpt  | conversations (from, value); system, tools              | the same                                       |
| dpo       | chosen, rejected, with or without a prompt: pairs.py    | the conversation up to the chosen reply        |
| alpaca    | instruction, input, output or response                  | input (Dolly: context) follows the instruction |
| bilingual | en_instruction, en_output, zh_instruction, ...          | one conversation per language                  |
| choice    | question; choices, options or A, B ...; answer, gold... | `chat.render_choice` and the letter            |
| question  | question, answer                                        | <<48/2=24>> becomes a call of the calculator   |
| pair      | query, prompt, question, instruction or input with      | one exchange behind the history; lists of      |
|           | response, completion, output or answer                  | messages stay as they are                      |
| program   | one of these and code; text, code, test_list            | the task, then the program                     |
| text      | text                                                    | turns at `### Human:`; else one reply          |
| reasoned  | tsv of three columns: question, answer, explanation     | the explanation, then the answer               |

`system` (or `system_prompt`), `tools`, `history`, `input`, `context` and `passage` beside any prompt belong to it. The
columns that were not used are named, once for a file.

Rows that cannot be read are counted and left out, and the first of them are named. More than 1 % of them in a file is
an error, as for `ascendchat data prepare`; but a single one is not, unless it is half of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ascendchat.data.chat.pairs import talk_of
from ascendchat.data.chat.render import LETTERS, Conversation, Part, render_choice
from ascendchat.data.chat.tables import RowBudget, TableRow, TrackedRow, check_table, read_rows, unused_line
from ascendchat.data.chat.turns import (
    ABOUT,
    cell,
    cell_messages,
    column,
    history,
    message,
    parse_talk,
    parse_turns,
    question_of,
    speaker_message,
    system_message,
    validated,
    with_system,
)
from ascendchat.errors import UserError
from ascendchat.runs.console import inert

TURN = re.compile(r"###\s*(Human|Assistant|User|System)\s*:", re.IGNORECASE)
WRITTEN = re.compile(r"### (?:Instruction|Response):|<\|im_start\|>|\[/INST\]|<start_of_turn>")  # Alpaca, ChatML ...
SIGNS = r"\s.,+\-*/()%×÷\u2212"  # \u2212: a minus sign
ARITHMETIC = rf"([{SIGNS}]*\d[\d{SIGNS}]*)"
CALCULATION = re.compile(f"<<{ARITHMETIC}={ARITHMETIC}>>")  # a << b = c >> d and a<<1=b>> are programs
# Columns of a pair; an `input` beside any of the others is the passage that the prompt is about
PROMPT, REPLY = "query|prompt|question|instruction|input", "response|completion|output|answer"


def openai(row: TableRow) -> Iterator[Conversation]:
    yield with_system(row, parse_turns(row["messages"]))


def sharegpt(row: TableRow) -> Iterator[Conversation]:
    yield with_system(row, parse_turns(row["conversations"]))


def dpo(row: TableRow) -> Iterator[Conversation]:
    yield talk_of(row, "chosen")


def alpaca(row: TableRow) -> Iterator[Conversation]:
    yield (
        system_message(row)
        + history(row)
        + cell_messages(question_of(row), "user")
        + cell_messages(cell(row, "output|response"), "assistant")
    )


def pair(row: TableRow) -> Iterator[Conversation]:
    ask = cell_messages(question_of(row, column(row, PROMPT)), "user")
    yield with_system(row, history(row) + ask) + cell_messages(cell(row, REPLY), "assistant")


def bilingual(row: TableRow) -> Iterator[Conversation]:
    for language in ("en", "zh"):
        columns = {key[3:]: row[key] for key in row if key.startswith(f"{language}_")}
        yield from alpaca(columns)


def parse_choice(row: TableRow) -> tuple[str, list[str], int]:
    """Parse a multiple-choice row of any published form: (question, choices, index of the right one). The choices
    are a list, texts with labels (ARC: {"text": [...], "label": ["A", ...] or ["1", ...]}; MedQA: {"A": ..., "B":
    ...}) or columns A, B, C ...; the right one is given by its number, letter, label or text. A passage stands
    before the question."""
    question, gold = cell(row, "question|Question|query"), cell(row, "gold|answer_idx|answer|Answer|answerKey")
    if about := [row[name] for name in ABOUT if row.get(name)]:
        question = "\n".join([*about, question])
    choices, labels = row.get("choices") or row.get("options"), list(LETTERS)
    if choices is None:
        choices = {letter: row[letter] for letter in LETTERS[:10] if letter in row}
    if isinstance(choices, Mapping):
        labelled = {"text", "label"} <= choices.keys()
        pairs = zip(choices["label"], choices["text"]) if labelled else choices.items()
        filled_in = [(str(label), choice) for label, choice in pairs if choice not in (None, "")]
        gold = labels[gold] if isinstance(gold, int) and not labelled and 0 <= gold < len(labels) else gold
        labels, choices = [label for label, _ in filled_in], [choice for _, choice in filled_in]
    if isinstance(choices, str):
        raise ValueError("its choices are not a list but text")
    named_by, words = [*labels[: len(choices)], *choices], str(gold).strip()
    right = gold if isinstance(gold, int) else named_by.index(words) % len(choices) if words in named_by else -1
    if not 0 <= right < len(choices):
        raise ValueError(f"the answer {gold!r} is none of the {len(choices)} choices of {str(question)[:60]!r}")
    return question, list(choices), right


def choice(row: TableRow) -> Iterator[Conversation]:
    question, choices, right = parse_choice(row)
    ask = [message("user", render_choice(question, choices)), message("assistant", LETTERS[right])]
    yield system_message(row) + history(row) + ask


def question(row: TableRow) -> Iterator[Conversation]:
    answer = parse_talk(row["answer"])
    reply = calculations(answer) if isinstance(answer, str) else answer
    worked = [message("assistant", reply)] if isinstance(answer, str) else cell_messages(reply, "assistant")
    yield with_system(row, history(row) + cell_messages(question_of(row, "question"), "user")) + worked


def calculations(answer: str) -> str | list[Part]:
    """Turn GSM8K's `48/2 = <<48/2=24>>24` into a calculator call 48/2, its result 24, and the text that goes on with
    24."""
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
        if mark_of_template := WRITTEN.search(row["text"]):
            raise ValueError(
                f"its text holds turns as another template writes them ({mark_of_template[0]}); give messages instead"
            )
        yield [message("assistant", row["text"])]
    else:
        first = row["text"][: marks[0].start()].strip()
        talk = [speaker_message(mark[1], row["text"][mark.end() : end].strip()) for mark, end in zip(marks, ends)]
        yield [message("system", first), *talk] if first else talk


def program(row: TableRow) -> Iterator[Conversation]:
    ask = cell_messages(question_of(row, column(row, f"{PROMPT}|text")), "user")
    yield with_system(row, history(row) + ask) + cell_messages(cell(row, "code"), "assistant")


def reasoned(row: TableRow) -> Iterator[Conversation]:
    if len(row["cells"]) != 3:
        raise ValueError(f"it has {len(row['cells'])} columns, not question, answer and explanation")
    ask, answer, why = (cell.replace("\\n", "\n").strip() for cell in row["cells"])
    yield [message("user", ask), message("assistant", f"{why}\nThe answer is {answer}.")]


# In this order: the first whose columns are all there (one of each bar-separated group) reads the file.
READERS: tuple[tuple[Callable[[TableRow], Iterator[Conversation]], tuple[str, ...]], ...] = (
    (dpo, ("chosen", "rejected")),
    (openai, ("messages",)),
    (sharegpt, ("conversations",)),
    (bilingual, ("en_instruction", "en_output", "zh_instruction", "zh_output")),
    (alpaca, ("instruction", "output|response")),
    (choice, ("question", "choices|options", "gold|answer|answerKey|answer_idx")),
    (choice, ("question|Question", "A", "B", "answer|Answer")),
    (question, ("question", "answer")),
    (pair, (PROMPT, REPLY)),
    (program, (PROMPT, "code")),
    (program, ("text", "code", "test_list")),
    (text, ("text",)),
    (reasoned, ("cells",)),
)


def detect(row: TableRow, path: Path) -> Callable[[TableRow], Iterator[Conversation]]:
    """Choose the reader for rows like this one; the error names the columns that were found."""
    for reader, needed in READERS:
        if all(any(name in row for name in group.split("|")) for group in needed):
            return reader
    named = [(reader, needed) for reader, needed in READERS if reader is not reasoned]
    formats = "; ".join(f"{reader.__name__} ({', '.join(needed)})" for reader, needed in named)
    raise UserError(
        f"{path.name} has the columns {inert(', '.join(row)) or '(none)'}, which no reader knows; rename them to those "
        f"of one of these formats: {formats}"
    )


def fill_slots(value: Any, slots: Mapping[str, str]) -> Any:
    """The value with every {{slot}} in its texts replaced."""
    if isinstance(value, str):
        for name, words in slots.items():
            value = value.replace("{{" + name + "}}", words)
        return value
    if isinstance(value, list):
        return [fill_slots(entry, slots) for entry in value]
    return {key: fill_slots(entry, slots) for key, entry in value.items()} if isinstance(value, dict) else value


def conversations(
    path: str | Path,
    *,
    limit: RowBudget | None = None,
    slots: Mapping[str, str] | None = None,
    map_row: Callable[[TableRow], TableRow] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Conversation]:
    """Yield every conversation of a file, in order; `say` gets a line about rows that were left out, and one that
    names the columns that were not used, if there are any.

    `slots` are words for slots like {{name}}, `limit` stops after so many rows, `map_row` gives a row the columns
    above (dataset_info.py).
    """
    path = check_table(path)
    unused: dict[str, None] = {}  # in the order in which they were seen
    reader: Callable[[TableRow], Iterator[Conversation]] | None = None

    def read_row(row: TableRow) -> list[Conversation]:
        nonlocal reader
        row = watched = TrackedRow(fill_slots(row, slots) if slots else row)
        if map_row:
            row = map_row(row)
        reader = reader or detect(row, path)
        if reader not in (dpo, text) and str(row.get("label")).lower() == "false":  # as KTO's rows are marked
            raise ValueError("a reply of the label false would be learnt; leave out what is not to be learnt")
        parsed = [validated(conversation) for conversation in reader(row)]
        unused.update(dict.fromkeys(watched.unused()))
        return parsed

    for parsed in read_rows(path, read_row, limit=limit, say=say):
        yield from parsed
    if unused:
        say(unused_line(path.name, unused))
