"""Preference pairs: a prompt, a reply that was chosen and one that was rejected, in whatever form they are published.

    for pair in pairs("dpo.jsonl"): ...       # Pair(prompt, chosen, rejected), lists of messages as in data/chat/template.py

`finetune --stage dpo --data FILE` reads through here; `ascendchat sft` takes the chosen reply of such files.
The columns of each row tell its form:

| form                    | columns                                                                                   |
|-------------------------|-------------------------------------------------------------------------------------------|
| LLaMA-Factory, alpaca   | instruction, input; chosen, rejected (texts); system, history                             |
| LLaMA-Factory, sharegpt | conversations; chosen, rejected ({"from", "value"}); system, tools                        |
| LLaMA-Factory, openai   | messages; chosen, rejected ({"role", "content"})                                          |
| TRL                     | prompt, chosen, rejected: texts, or lists of messages with or without the prompt repeated |
| TRL, implicit prompt    | chosen, rejected: lists of messages that begin alike                                      |
| hh-rlhf                 | chosen, rejected: texts of `Human:` and `Assistant:` turns that begin alike               |
| ms-swift                | messages, or query and response; rejected_response or rejected_messages                   |

Rows that cannot be read are counted, named and left out as in formats.py: up to 1 % of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ascendchat.config import UserError
from ascendchat.data.chat.tables import Allowance, TableRow, Watched, check_table, read_rows, unused_line
from ascendchat.data.chat.template import Conversation
from ascendchat.data.chat.turns import asked, checked, history, message, opened, opening, said, spoken, turns
from ascendchat.runs.console import inert

PROMPTS = "conversations", "prompt", "instruction", "messages", "question", "query", "input"  # the first that a row has
REJECTED = "rejected_response", "rejected_messages"  # as ms-swift calls them
SPOKEN = re.compile(r"\n\n(Human|Assistant):")


class Pair(NamedTuple):
    """Both replies begin where the prompt ends."""

    prompt: Conversation
    chosen: Conversation
    rejected: Conversation


def parse_pair(row: TableRow) -> Pair:
    """The pair in a row; a ValueError says what is wrong with it, a UserError that its columns are unknown."""
    if any(name in row for name in REJECTED):
        chosen, rejected = of_swift(row)
    elif "chosen" in row and "rejected" in row:
        chosen, rejected = talk_of(row, "chosen"), talk_of(row, "rejected")
    else:
        raise UserError(
            f"the columns {inert(', '.join(row)) or '(none)'} hold no pairs; rename them to prompt, chosen and "
            "rejected, or to messages and rejected_response"
        )
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):  # the replies are the same
        shared = before_reply(chosen)
    found = Pair(*(checked(part) for part in (chosen[:shared], chosen[shared:], rejected[shared:])))
    if not any(said["role"] == "user" for said in found.prompt):
        raise ValueError("it has no prompt that both replies answer")
    if not all(any(said["role"] == "assistant" for said in reply) for reply in (found.chosen, found.rejected)):
        raise ValueError("one of its replies is not of the assistant")
    return found


def before_reply(talk: Conversation) -> int:
    """How many messages stand before the last turn of the assistant."""
    end = len(talk)
    while end and talk[end - 1]["role"] == "assistant":
        end -= 1
    return end


def talk_of(row: TableRow, side: str) -> Conversation:
    """The conversation up to the reply in this column."""
    return whole(opened(row, history(row) + prompt_of(row)), row[side])


def prompt_of(row: TableRow) -> Conversation:
    """What stands before the replies, but for the system message."""
    name = next((name for name in PROMPTS if name in row), "")
    if not name:
        return []
    return turns(row[name]) if name == "messages" else said(asked(row, name), "user")


def whole(head: Conversation, reply: Any) -> Conversation:
    """Prompt and reply. Some sets repeat the prompt in the reply."""
    if isinstance(reply, str):
        asked = head[-1]["content"] if head else ""
        if isinstance(asked, str) and SPOKEN.match(asked) and reply.startswith(asked):
            return [*head[:-1], *marked_turns(reply)]  # hh-rlhf with its prompt in a column, too
        return [*head, message("assistant", reply)] if head else marked_turns(reply)
    entries = turns([reply] if isinstance(reply, dict) else reply)
    bare = [said for said in head if said["role"] != "system"]
    system = [said for said in head if said["role"] == "system"]
    lead = next((at for at, said in enumerate(entries) if said["role"] != "system"), 0)
    if not bare or entries[lead : lead + len(bare)] == bare:
        return [*(system or entries[:lead]), *entries[lead:]]
    if lead < len(entries) and entries[lead]["role"] == bare[-1]["role"] == "user":
        if len(bare) > 1:
            raise ValueError("its reply begins with a user's message that is not that of the prompt")
        return [*(system or entries[:lead]), *entries[lead:]]  # the whole conversation; the prompt is its last question
    return [*head, *entries]


def marked_turns(text: str) -> Conversation:
    """A whole conversation in one text, as in hh-rlhf."""
    text = "\n\n" + text.lstrip()
    marks = list(SPOKEN.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [spoken(mark[1], text[mark.end() : end].strip()) for mark, end in zip(marks, ends)]


def of_swift(row: TableRow) -> tuple[Conversation, Conversation]:
    """Both conversations as a whole."""
    chosen = opened(row, turns(row["messages"])) if "messages" in row else opening(row) + history(row) + query(row)
    head = chosen[: before_reply(chosen)]
    return chosen, whole(head, row["rejected_messages" if row.get("rejected_messages") else "rejected_response"])


def query(row: TableRow) -> Conversation:
    return said(asked(row, "query"), "user") + said(row["response"], "assistant")


def pairs(
    path: str | Path,
    *,
    limit: Allowance | None = None,
    arrange: Callable[[TableRow], TableRow] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Pair]:
    """Every pair of a file, in order; `say` gets a line about rows that were left out, and one that names the columns
    that were not used, if there are any. `arrange` gives a row the columns above (dataset_info.py)."""
    path, same = check_table(path), 0
    unused: dict[str, None] = {}  # in the order in which they were seen

    def read_row(row: TableRow) -> Pair:
        watched = Watched(row)
        found = parse_pair(arrange(watched) if arrange else watched)
        unused.update(dict.fromkeys(watched.unused()))
        return found

    for found in read_rows(path, read_row, limit=limit, say=say):
        if found.chosen == found.rejected:
            same += 1
        else:
            yield found
    if unused:
        say(unused_line(path.name, unused))
    if same:
        say(f"{path.name}: {same} pairs whose replies are the same; left out, for there is nothing to prefer")
