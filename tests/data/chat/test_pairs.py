"""Preference pairs: every published form gives the same pair; rows that cannot be read are counted and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ascendchat.data.chat.formats import conversations
from ascendchat.data.chat.pairs import Pair, pairs
from ascendchat.errors import UserError
from ascendchat.train.preference import ReferenceLogprobs

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 2 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "Five, I think."}
WANTED = Pair([SYSTEM, USER], [GOOD], [BAD])


def gpt(message: dict[str, str]) -> dict[str, str]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"from": names[message["role"]], "value": message["content"]}


BOTH = {"chosen": "4", "rejected": "Five, I think.", "system": "Be brief."}
FORMS: dict[str, dict[str, Any]] = {
    "llamafactory alpaca": {"instruction": "What is 2 + 2?", **BOTH},
    "llamafactory sharegpt": {**BOTH, "conversations": [gpt(USER)], "chosen": gpt(GOOD), "rejected": gpt(BAD)},
    "llamafactory openai": {"messages": [SYSTEM, USER], "chosen": GOOD, "rejected": BAD},
    "trl texts": {"prompt": "What is 2 + 2?", **BOTH},
    "trl messages": {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]},
    "trl, prompt repeated": {
        "prompt": "What is 2 + 2?",
        "chosen": [SYSTEM, USER, GOOD],
        "rejected": [SYSTEM, USER, BAD],
        "messages": [SYSTEM, USER, GOOD],
        "score_chosen": 8.0,
    },
    "trl, prompt repeated with a blank": {
        "prompt": "What is 2 + 2? ",
        "chosen": [SYSTEM, USER, GOOD],
        "rejected": [SYSTEM, USER, BAD],
    },
    "trl, implicit prompt": {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
    "swift": {"messages": [SYSTEM, USER, GOOD], "rejected_response": "Five, I think."},
    "swift, messages": {"messages": [SYSTEM, USER, GOOD], "rejected_messages": [SYSTEM, USER, BAD]},
    "swift, query": {
        "system": "Be brief.",
        "query": "What is 2 + 2?",
        "response": "4",
        "rejected_response": "Five, I think.",
    },
}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def as_cells(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a csv has it: lists as JSON text."""
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}


@pytest.mark.parametrize("form", [form for form, row in FORMS.items() if as_cells(row) != row])
def test_lists_of_messages_may_be_json_text_in_every_form(tmp_path: Path, form: str) -> None:
    assert list(pairs(write(tmp_path / "pairs.jsonl", [as_cells(FORMS[form])]))) == [WANTED]


def test_other_json_is_a_reply_like_any_text(tmp_path: Path) -> None:
    chosen, rejected = '[{"role": "warrior", "content": "x"}]', '[{"from": "A", "value": 3}]'
    (pair,) = pairs(write(tmp_path / "pairs.jsonl", [{"prompt": "[1, 2]", "chosen": chosen, "rejected": rejected}]))
    assert [part[0]["content"] for part in pair] == ["[1, 2]", chosen, rejected]


def read(tmp_path: Path, row: dict[str, Any]) -> Pair:
    (found,) = pairs(write(tmp_path / "pairs.jsonl", [row]))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_the_same_pair_in_every_form_is_the_same(tmp_path: Path, name: str) -> None:
    row = FORMS[name]
    assert read(tmp_path, row) == WANTED
    (talk,) = conversations(write(tmp_path / "talk.jsonl", [row]))
    assert talk == [*WANTED.prompt, *WANTED.chosen], "SFT learns the chosen reply to the whole prompt"


def test_earlier_turns_belong_to_the_prompt(tmp_path: Path) -> None:
    more = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And 3 + 3?"}]
    row = {"chosen": [USER, *more, GOOD], "rejected": [USER, *more, BAD]}
    assert read(tmp_path, row) == Pair([USER, *more], [GOOD], [BAD])
    (last,) = [{**row, "prompt": "And 3 + 3?"}]
    assert read(tmp_path, last) == Pair([USER, *more], [GOOD], [BAD])
    with pytest.raises(UserError, match="its reply begins with a user's message that is not that of the prompt"):
        read(tmp_path, {**last, "history": [["a", "b"]]})
    alpaca = {"instruction": "And?", "input": "Now?", "history": [["a", "b"]], "chosen": "x", "rejected": "y"}
    assert [m["content"] for m in read(tmp_path, alpaca).prompt] == ["a", "b", "And?\nNow?"]


def test_texts_of_human_and_assistant_turns_are_split_where_they_part(tmp_path: Path) -> None:
    same = "\n\nHuman: Who are you?\n\nAssistant: A model.\n\nHuman: The Human: is it you?\n\nAssistant:"
    found = read(tmp_path, {"chosen": same + " No.", "rejected": same + " Yes, a man.\nTruly."})
    assert [m["content"] for m in found.prompt] == ["Who are you?", "A model.", "The Human: is it you?"]
    assert (found.chosen[0]["content"], found.rejected[0]["content"]) == ("No.", "Yes, a man.\nTruly.")
    row = {"prompt": same, "chosen": same + " No.", "rejected": same + " Yes, a man.\nTruly."}
    assert read(tmp_path, row) == found
    (talk,) = conversations(write(tmp_path / "talk.jsonl", [{"chosen": same + " No.", "rejected": same + " Yes."}]))
    assert talk == [*found.prompt, *found.chosen]


def test_rows_that_cannot_be_read_are_named_with_their_line_and_the_others_are_read(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(300)]
    rows[6], rows[100] = "{broken", {"prompt": "q", "chosen": "a"}
    rows[200] = {"prompt": [{"role": "oracle", "content": "?"}], "chosen": "a", "rejected": "b"}
    said: list[str] = []
    assert len(list(pairs(write(tmp_path / "mine.jsonl", rows), say=said.append))) == 297
    (line,) = said
    assert line.startswith("mine.jsonl: 3 of 300 rows cannot be read: line 7: ")
    assert "line 101: it has the columns prompt, chosen; line 201: the speaker 'oracle' is unknown" in line
    rows[:1] = [{"prompt": [], "chosen": [GOOD], "rejected": [BAD]}]
    with pytest.raises(UserError, match=r"4 of 300 rows.*no prompt that both replies answer.*more than 1 %"):
        list(pairs(write(tmp_path / "mine.jsonl", rows)))


def test_pairs_without_a_difference_are_counted_and_left_out_however_many_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "a", "rejected": "a" if n % 2 else "b"} for n in range(10)]
    said: list[str] = []
    assert len(list(pairs(write(tmp_path / "mine.jsonl", rows), say=said.append))) == 5
    assert said == ["mine.jsonl: 5 pairs whose replies are the same; left out, for there is nothing to prefer"]


def test_a_file_of_conversations_is_refused_with_the_columns_that_are_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the columns messages hold no pairs; rename them to prompt, chosen"):
        read(tmp_path, {"messages": [USER, GOOD]})


def test_a_table_of_the_reference_that_cannot_be_kept_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    ReferenceLogprobs(tmp_path / "absent", ["model"]).write(torch.zeros(2, 2), said.append)
    assert len(said) == 1
    assert said[0].endswith("training goes on")


def test_a_pair_with_half_a_character_is_counted_and_named(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": reply} for reply in ("c", "d", "\ud800", "e")]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="ascii")
    said: list[str] = []
    assert len(list(pairs(tmp_path / "pairs.jsonl", say=said.append))) == 3
    assert said == ["pairs.jsonl: 1 of 4 rows cannot be read: line 3: half a character (a lone surrogate); left out"]
