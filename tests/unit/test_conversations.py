"""Readers of chat and instruction files: every published format becomes the same kind of conversation."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from ascendchat.config import UserError
from ascendchat.data.chat import canonical, text_of
from ascendchat.data.conversations import conversations
from ascendchat.data.tables import Allowance
from ascendchat.data.turns import message


def write(folder: Path, rows: list[Any], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(folder: Path, row: Any, **options: Any) -> list[dict[str, Any]]:
    found = list(conversations(write(folder, [row]), **options))
    assert len(found) == 1
    return found[0]


USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER, REPLY]},
        {"messages": [{"role": "developer", "content": "be brief"}, USER, REPLY]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "be brief"},
        {"conversations": [SYSTEM, USER, REPLY]},
        {"instruction": "hi", "input": "", "output": "hello", "system": "be brief"},
        {"instruction": "hi", "response": "hello", "system": "be brief", "history": []},
        {"query": "hi", "response": "hello", "system": "be brief"},
        {"prompt": "hi", "completion": "hello", "system": "be brief"},
        {"prompt": [SYSTEM, USER], "completion": [REPLY]},
        {"prompt": "hi", "response": "hello", "system": "be brief"},
        {"input": "hi", "output": "hello", "system": "be brief"},
        {"question": "hi", "response": "hello", "system": "be brief"},
        {"text": "### System: be brief ### Human: hi ### Assistant: hello"},
        {
            "conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "hello"},
            "rejected": {"from": "gpt", "value": "go away"},
        },
        {"prompt": "hi", "chosen": "hello", "rejected": "go away", "system": "be brief"},
        {"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, REPLY], "rejected": [SYSTEM, USER]},
    ],
    ids=lambda row: "+".join(row),
)
def test_the_same_exchange_in_every_format_is_the_same_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(tmp_path, row) == [SYSTEM, USER, REPLY]


def test_earlier_exchanges_and_the_input_of_alpaca_rows_come_before_the_reply(tmp_path: Path) -> None:
    row = {"instruction": "add", "input": "1 and 2", "output": "3", "history": [["a", "b"], ["c", "d"]]}
    assert [m["content"] for m in read(tmp_path, row)] == ["a", "b", "c", "d", "add\n1 and 2", "3"]
    dolly = {"instruction": "who?", "context": "Ada wrote it.", "response": "Ada", "category": "closed_qa"}
    assert [m["content"] for m in read(tmp_path, dolly)] == ["who?\nAda wrote it.", "Ada"]


def test_a_function_call_is_a_tool_part_of_the_assistants_turn_and_its_result_an_output_part(tmp_path: Path) -> None:
    sharegpt = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    found = read(tmp_path, {"conversations": sharegpt, "tools": '[{"name": "weather"}]'})
    call = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    openai = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    assert read(tmp_path, {"conversations": sharegpt, "tools": "[]"}) == found[1:]
    assert found[0] == {"role": "system", "content": 'You can call these tools:\n[{"name": "weather"}]'}
    assert canonical(found[1:]) == canonical(read(tmp_path, {"messages": openai}))
    assert canonical(found)[-1]["content"] == [
        {"type": "tool", "text": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"type": "output", "text": "sunny"},
        {"type": "text", "text": "It is sunny."},
    ]


@pytest.mark.parametrize("form", ["messages", "conversations", "prompt"])
@pytest.mark.parametrize("old", [False, True])
def test_a_message_that_calls_tools_needs_no_content(tmp_path: Path, form: str, old: bool) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"function_call": function} if old else {"tool_calls": [{"id": "1", "function": function}]}
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", **call},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    row = {"prompt": talk[:2], "completion": talk[2:]} if form == "prompt" else {form: talk, "tools": [{"name": "w"}]}
    found = read(tmp_path, row)
    assert canonical(found)[-1]["content"] == [
        {"type": "tool", "text": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"type": "output", "text": "sunny"},
        {"type": "text", "text": "It is sunny."},
    ]
    offered = "" if form == "prompt" else '\nYou can call these tools:\n[{"name": "w"}]'
    assert [said for said in found if said["role"] == "system"] == [message("system", f"be brief{offered}")]


def test_gsm8k_annotations_become_calls_of_the_calculator_and_the_text_stays_readable(tmp_path: Path) -> None:
    row = {"question": "half of 48?", "answer": "It is 48/2 = $<<48/2=24>>24.\n#### 24"}
    reply = read(tmp_path, row)[1]["content"]
    assert [(p["type"], p["text"]) for p in reply] == [
        ("text", "It is 48/2 = $"),
        ("tool", "48/2"),
        ("output", "24"),
        ("text", "24.\n#### 24"),
    ]
    assert text_of(reply) == "It is 48/2 = $24.\n#### 24"


@pytest.mark.parametrize(
    "gold",
    [
        {"choices": ["x", "y"], "gold": 1},
        {"choices": ["x", "y"], "answer": 1},
        {"choices": ["x", "y"], "answer": "B"},
        {"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
    ],
)
def test_multiple_choice_answers_with_the_letter_however_the_answer_is_written(
    tmp_path: Path, gold: dict[str, Any]
) -> None:
    user, reply = read(tmp_path, {"question": "which?", **gold})
    assert user["content"].startswith("which?\n- x=A\n- y=B\n")
    assert reply["content"] == "B"


@pytest.mark.parametrize("answer", ["", "AB", "Z", 2, None])
def test_an_answer_that_names_none_of_the_choices_cannot_be_read(tmp_path: Path, answer: Any) -> None:
    row = {"question": "which?", "choices": ["x", "y"], "answer": answer}
    with pytest.raises(UserError, match=f"the answer {answer!r} is none of the 2 choices of 'which"):
        read(tmp_path, row)


def test_bilingual_rows_give_a_conversation_in_each_language(tmp_path: Path) -> None:
    row = {"en_instruction": "hi", "en_input": "", "en_output": "hello", "zh_instruction": "你好", "zh_output": "您好"}
    found = list(conversations(write(tmp_path, [row])))
    assert [[m["content"] for m in c] for c in found] == [["hi", "hello"], ["你好", "您好"]]


def test_slots_are_filled(tmp_path: Path) -> None:
    row = {"instruction": "who?", "output": "I am {{name}} by {{author}}."}
    assert read(tmp_path, row, slots={"name": "Ada", "author": "us"})[1]["content"] == "I am Ada by us."


def test_containers_and_line_breaks_inside_texts(tmp_path: Path) -> None:
    rows = [{"query": "a\u2028b", "response": "c\rd"}, {"query": "e", "response": "f"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "c.tsv").write_text("why?\\nsay\tyes\tbecause\n", encoding="utf-8")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    expected = [[m["content"] for m in c] for c in conversations(tmp_path / "b.json")]
    assert expected == [["a\u2028b", "c\rd"], ["e", "f"]]
    for name in ("a.jsonl.gz", "d.parquet"):
        assert [[m["content"] for m in c] for c in conversations(tmp_path / name)] == expected
    assert [m["content"] for m in next(conversations(tmp_path / "c.tsv"))] == [
        "why?\nsay",
        "because\nThe answer is yes.",
    ]


@pytest.mark.parametrize("pack", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)], ids=["", "gz", "xz"])
def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_part_of_it(tmp_path: Path, pack: tuple[str, Any]) -> None:
    row = '{"query": "why?", "response": "\ufeffbecause"}'
    expected = [["why?", "\ufeffbecause"]]  # inside a text it stays
    contents = {"a.jsonl": f"{row}\r\n", "b.json": f"[\n{row}\n]", "c.tsv": "why?\tyes\tbecause\r\n", "d.jsonl": ""}
    for name, content in contents.items():
        (tmp_path / f"{name}{pack[0]}").write_bytes(pack[1](b"\xef\xbb\xbf" + content.encode()))
    for name in ("a.jsonl", "b.json"):
        assert [[m["content"] for m in c] for c in conversations(tmp_path / f"{name}{pack[0]}")] == expected
    assert next(conversations(tmp_path / f"c.tsv{pack[0]}"))[0]["content"] == "why?"
    with pytest.raises(UserError, match="is empty"):
        list(conversations(tmp_path / f"d.jsonl{pack[0]}"))


@pytest.mark.parametrize(
    ("role", "part", "words"),
    [
        ("user", {"type": "image_url", "image_url": {"url": "x.png"}}, "the unknown type 'image_url'"),
        ("user", {"type": "input_text", "text": "hi"}, "the unknown type 'input_text' (known: text, tool, output)"),
        ("assistant", {"text": "hi"}, "the unknown type None"),
        ("user", {"type": "tool", "text": "1+1"}, "'tool' belongs to the assistant, not to the role 'user'"),
    ],
)
def test_a_part_the_renderer_does_not_know_is_refused_where_it_is_read(
    tmp_path: Path, role: str, part: dict[str, Any], words: str
) -> None:
    fine = [USER, {"role": "assistant", "content": [{"type": "text", "text": "2"}, {"type": "tool", "text": "1+1"}]}]
    bad = [*fine, {"role": role, "content": [{"type": "text", "text": "look"}, part]}]
    for rows in ([{"messages": fine}, {"messages": bad}], [{"conversations": fine}, {"conversations": bad}]):
        with pytest.raises(UserError, match=r"data\.jsonl: 1 of 2 rows cannot be read: line 2: ") as caught:
            list(conversations(write(tmp_path, rows)))
        assert words in str(caught.value)


def test_a_reply_that_is_not_to_be_learnt_is_not_learnt_in_silence(tmp_path: Path) -> None:
    """As OpenAI's fine-tuning marks it."""
    talk = [USER, {"role": "assistant", "content": "2", "weight": 1}, {**USER, "weight": 0}]
    rows = [{"messages": [*talk, {"role": "assistant", "content": "3", "weight": weight}]} for weight in (1, 0)]
    assert len(list(conversations(write(tmp_path, rows[:1])))) == 1
    with pytest.raises(UserError, match=r"data\.jsonl: 1 of 2 rows cannot be read: line 2: a reply of weight 0"):
        list(conversations(write(tmp_path, rows)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"foo": 1, "bar": 2}\n', "columns foo, bar"),
        ('{"query": "a", "response": "b"}\n{"query": \n', "1 of 2 rows cannot be read: line 2: Expecting value"),
        ('{"query": "a", "response": "b"}\n\n{"query": "a"}\n', "line 3: the column 'response or completion or "),
        ('{"query": "a", "response": 5}\n', "line 1: what the assistant says is not text but int"),
        ('{"conversations": [{"from": "martian", "value": "a"}]}\n', "'martian' is unknown"),
        ('{"question": "a", "choices": ["x"], "gold": 3}\n', "none of the 1 choices"),
        ('[{"query": "a", "response": "b"}, {"query": ]', "cannot be read beyond row 1: Expecting value: line 1"),
        ('[{"query": "a", "response": "b"}]\n[{"query": "c", "response": "d"}]', "there is more behind the list"),
        ("", "empty"),
    ],
)
def test_an_unreadable_file_is_named_with_its_row_and_what_was_found(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.jsonl") as caught:
        list(conversations(path))
    assert words in str(caught.value)


GOOD = '{"query": "a", "response": "b"}'
DEEP = '{"query": ' + "[" * 100_000 + "]" * 100_000 + ', "response": "b"}'
BAD = {  # a bad row, and what is said about it
    "cut": ('{"query": "a", "resp', "Unterminated string"),
    "no object": ("17", "it is int, not an object with named columns"),
    "other columns": ('{"foo": "a", "bar": "b"}', "the column"),
    "no text": ('{"query": "a", "response": null}', "what the assistant says is not text but NoneType"),
    "deep": (DEEP, "it is nested too deep"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("first", [False, True], ids=["inside", "first"])
def test_a_bad_row_among_many_is_counted_named_and_left_out(tmp_path: Path, kind: str, first: bool) -> None:
    bad, words = BAD[kind]
    at = [0, 120, 130, 140] if first else [100, 120, 130, 140]
    lines = [bad if number in at else GOOD for number in range(500)]
    path, said = tmp_path / "talk.jsonl", list[str]()
    path.write_text("\n".join(lines), encoding="utf-8")
    assert len(list(conversations(path, say=said.append))) == 496
    (line,) = said
    assert line.startswith(f"talk.jsonl: 4 of 500 rows cannot be read: line {at[0] + 1}: ")
    assert words in line or (first and "it has the columns foo, bar" in line)
    assert "line 131: " in line
    assert "line 141" not in line  # the first three are enough
    path.write_text("\n".join(lines[:150]), encoding="utf-8")  # more than 1 % now
    with pytest.raises(UserError, match=r"4 of 150 rows cannot be read: line .*more than 1 % is too much"):
        list(conversations(path, say=said.append))


def test_one_bad_row_does_not_refuse_a_small_file(tmp_path: Path) -> None:
    path, said = tmp_path / "talk.jsonl", list[str]()
    path.write_text("\n".join([GOOD, "{", GOOD, GOOD]), encoding="utf-8")
    assert len(list(conversations(path, say=said.append))) == 3
    assert said[0].startswith("talk.jsonl: 1 of 4 rows cannot be read: line 2: ")
    path.write_text("\n".join([GOOD, "{"]), encoding="utf-8")  # half of it
    with pytest.raises(UserError, match="1 of 2 rows"):
        list(conversations(path, say=said.append))


def test_a_byte_that_is_no_utf8_costs_its_line_only(tmp_path: Path) -> None:
    path, said = tmp_path / "talk.jsonl", list[str]()
    lines = [GOOD.encode()] * 200
    lines[7] = b'{"query": "\xff", "response": "b"}'
    path.write_bytes(b"\n".join(lines))
    assert len(list(conversations(path, say=said.append))) == 199
    assert said[0].startswith("talk.jsonl: 1 of 200 rows cannot be read: line 8: 'utf-8' codec")


def test_an_entry_of_a_list_that_is_nested_too_deep_is_passed_over(tmp_path: Path) -> None:
    path, said = tmp_path / "talk.json", list[str]()
    deep = '{"query": "]}\\"", "response": ' + '["\\"]", ' * 50_000 + "1" + "]" * 50_000 + "}"
    path.write_text("[" + ",\n".join([GOOD] * 150 + [deep] + [GOOD] * 50) + "]", encoding="utf-8")
    assert len(list(conversations(path, say=said.append))) == 200
    assert said == ["talk.json: 1 of 201 rows cannot be read: row 151: it is nested too deep; left out"]


def test_rows_that_no_reader_knows_are_refused_early_with_the_columns_that_are_known(tmp_path: Path) -> None:
    path = write(tmp_path, [{"foo": 1}] * 5000)
    with pytest.raises(UserError, match=r"has the columns foo, which no reader knows; rename .*pair \(query\|prompt"):
        list(conversations(path))


@pytest.mark.parametrize("name", ["talk.csv", "talk.txt", "talk.csv.gz", "talk.xlsx", "talk", "talk.zip"])
def test_a_file_of_another_kind_is_refused_with_what_to_convert_it_to(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("prompt,completion\nhi,hello\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"{name}: conversations are read from .*convert it to \.jsonl, with one line"):
        list(conversations(tmp_path / name))


def test_a_truncated_archive_is_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(("\n".join(json.dumps({"query": str(i), "response": "b"}) for i in range(5000))).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match="cut"):
        list(conversations(tmp_path / "cut.jsonl.gz"))


COUNTS = {
    "sft/dolly_open_qa.jsonl.xz": 3742,
    "sft/gpteacher_codegen.json.xz": 4535,
    "sft/gpteacher_roleplay.json.xz": 1923,
    "sft/oasst1_en_val_threads.jsonl.xz": 338,
    "sft/llamafactory/alpaca_en_demo.json.xz": 999,
    "sft/llamafactory/alpaca_zh_demo.json.xz": 1000,
    "sft/llamafactory/dpo_en_demo.json.xz": 300,
    "sft/llamafactory/dpo_zh_demo.json.xz": 300,
    "sft/llamafactory/glaive_toolcall_en_demo.json.xz": 300,
    "sft/llamafactory/glaive_toolcall_zh_demo.json.xz": 300,
    "sft/llamafactory/identity.json": 91,
    "sft/llamafactory/oaast_sft_zh.json.xz": 689,
    "eval/gsm8k/train.jsonl.xz": 7473,
    "eval/gsm8k/test.jsonl.xz": 1319,
}
SUMS = {"sft/flan_cot/*.tsv.xz": 33443, "sft/mc_train/*.jsonl.xz": 27495}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_every_row_of_the_real_files_is_a_conversation_that_ends_with_a_reply(
    real_data: Path, name: str, count: int
) -> None:
    found = list(conversations(real_data / name))
    assert len(found) == count
    for messages in found:
        turns = canonical(messages)
        assert turns[-1]["role"] == "assistant"
        assert any(turn["role"] == "user" for turn in turns)


@pytest.mark.parametrize(("pattern", "count"), SUMS.items())
def test_the_real_sets_of_many_files_have_their_published_size(real_data: Path, pattern: str, count: int) -> None:
    assert sum(sum(1 for _ in conversations(path)) for path in real_data.glob(pattern)) == count


def test_the_real_bilingual_set_has_two_conversations_per_row(real_data: Path) -> None:
    path = real_data / "sft" / "alpaca_en_zh_52k.jsonl.xz"
    first = list(conversations(path, limit=Allowance(3)))
    assert len(first) == 6
    assert first[1][0]["content"] == "给出保持健康的三个建议。"


@pytest.mark.slow
def test_the_real_bilingual_set_is_whole(real_data: Path) -> None:
    assert sum(1 for _ in conversations(real_data / "sft" / "alpaca_en_zh_52k.jsonl.xz")) == 2 * 52002


def test_every_calculation_of_the_real_gsm8k_is_found(real_data: Path) -> None:
    calls = 0
    for _, reply in conversations(real_data / "eval" / "gsm8k" / "test.jsonl.xz"):
        assert "<<" not in text_of(reply["content"])
        calls += sum(part["type"] == "tool" for part in reply["content"]) if isinstance(reply["content"], list) else 0
    assert calls > 3 * 1319
