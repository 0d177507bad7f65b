"""Readers of chat and instruction files: every published format becomes the same kind of conversation."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from ascendchat.data.chat.formats import conversations
from ascendchat.data.chat.render import canonical, text_of
from ascendchat.data.chat.tables import entries
from ascendchat.data.chat.turns import message
from ascendchat.data.read import ReadCounts, file_documents, source_files
from ascendchat.errors import UserError
from ascendchat.tasks.by_name import load


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
        {"messages": [{"role": "developer", "content": "be brief"}, USER, REPLY], "tools": "[]"},
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
        {"text": "be brief\n### Human: hi\n### Assistant: hello"},
        {"system_prompt": "be brief", "question": "hi", "response": "hello"},
        {"system": "be brief", "prompt": None, "input": "hi", "response": None, "output": "hello"},
        {"system_prompt": "be brief", "question": "hi", "answer": "hello"},
        {"system": "be brief", "question": "hi", "answer": "hello", "context": ""},
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
    both = {"en_instruction": "hi", "en_input": "", "en_output": "hello", "zh_instruction": "你好", "zh_output": "您好"}
    found = list(conversations(write(tmp_path, [both])))
    assert [[m["content"] for m in talk] for talk in found] == [["hi", "hello"], ["你好", "您好"]]
    slots = {"instruction": "who?", "output": "I am {{name}} by {{author}}."}
    assert read(tmp_path, slots, slots={"name": "Ada", "author": "us"})[1]["content"] == "I am Ada by us."
    dolly = {"instruction": "who?", "context": "Ada wrote it.", "response": "Ada", "category": "closed_qa"}
    assert [m["content"] for m in read(tmp_path, dolly)] == ["who?\nAda wrote it.", "Ada"]


@pytest.mark.parametrize(
    ("row", "ask"),
    [
        ({"context": "c", "question": "q", "answer": "a"}, "q\nc"),
        ({"question": "q", "input": "i", "output": "a"}, "q\ni"),
        ({"prompt": "q", "input": "i", "output": "a"}, "q\ni"),
        ({"query": "q", "input": "i", "response": "a"}, "q\ni"),
        ({"input": "q", "context": "c", "completion": "a"}, "q\nc"),
        ({"instruction": "q", "input": "i", "context": "c", "output": "a"}, "q\ni\nc"),
        ({"passage": "c", "question": "q", "choices": ["x", "y"], "answer": 1}, "c\nq\n- x=A"),
        ({"prompt": "q", "input": "i", "chosen": "a", "rejected": "b"}, "q\ni"),
        ({"input": "q", "chosen": "a", "rejected": "b"}, "q"),
    ],
    ids=lambda row: "+".join(row) if isinstance(row, dict) else "",
)
def test_what_a_question_is_about_belongs_to_it(tmp_path: Path, row: dict[str, Any], ask: str) -> None:
    before, system, *earlier, user, _ = [None, *read(tmp_path, {**row, "system": "s", "history": [["u", "r"]]})]
    assert (before, system) == (None, {"role": "system", "content": "s"})
    assert [m["content"] for m in earlier] == ["u", "r"]
    assert user["role"] == "user"
    assert user["content"].startswith(ask)


def test_a_history_is_pairs_of_texts_or_messages_and_nothing_else(tmp_path: Path) -> None:
    row = {"instruction": "I", "input": "", "output": "O"}
    expected = read(tmp_path, {**row, "history": [["u", "r"]]})
    assert [m["content"] for m in expected] == ["u", "r", "I", "O"]
    asked = {"role": "user", "content": "u"}
    assert read(tmp_path, {**row, "history": [asked, {"role": "assistant", "content": "r"}]}) == expected
    for wrong in (["ua", "bc"], [["u", 1]], [["u", "r", "x"]], [["u", None]], {"u": "r"}):
        with pytest.raises(UserError, match="neither pairs of texts nor messages"):
            read(tmp_path, {**row, "history": wrong})
    with pytest.raises(UserError, match="its messages are not objects but str"):
        read(tmp_path, {"messages": ["u", "r"]})
    with pytest.raises(UserError, match="the text in place of its history is no JSON"):
        read(tmp_path, {**row, "history": "ua"})


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"messages": [USER, REPLY], "tools": "[]"}, ""),
        ({"messages": [USER, {**REPLY, "notes": "n", "audio": None}], "id": 7}, "messages.notes, id"),
        ({"question": "q", "answer": "a", "level": "", "tags": [], "why": "w"}, "why"),
        ({"text": "Write f", "code": "def f(): pass"}, "code"),
        ({"question": "q", "prompt": "p", "output": "a"}, "question"),
        ({"en_instruction": "a", "en_output": "b", "zh_instruction": "c", "zh_output": "d", "id": 1}, "id"),
    ],
)
def test_columns_that_are_not_used_are_named_once_for_a_file(tmp_path: Path, row: dict[str, Any], unused: str) -> None:
    said: list[str] = []
    assert list(conversations(write(tmp_path, [row] * 3), say=said.append))
    assert said == ([f"data.jsonl: columns that are not used: {unused}"] if unused else [])


def test_results_of_tools_go_to_the_calls_that_they_name(tmp_path: Path) -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in "ba"]
    row = {"messages": [USER, {"role": "assistant", "tool_calls": calls}, *results, REPLY]}
    assert [m["content"] for m in read(tmp_path, row)[2:4]] == ["result a", "result b"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_fields_that_only_other_rows_have_are_no_arguments(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = []
    for arguments in (
        {"city": "A"},
        {"zone": {"name": "B"}},
        {"zone": {"hour": 0}, "cities": ["C", None]},
        {"value": 1, "content": "D"},
    ):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows.append({"messages": talk, "tools": [{"name": "f", "parameters": arguments}]})
    table, path = pyarrow.Table.from_pylist(rows), tmp_path / f"calls.{kind}"
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    lines = tmp_path / "calls.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert list(conversations(path)) == list(conversations(lines))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_what_the_assistant_thinks_is_a_part_before_its_words(tmp_path: Path, name: str) -> None:
    thought, text = {"type": "thought", "text": "1+1"}, {"type": "text", "text": "2"}
    call = {"function": {"name": "f", "arguments": {}}}
    talk = [USER, {"role": "assistant", name: "1+1", "content": "2"}, USER, {"role": "assistant", "content": "3"}]
    calls = [USER, {"role": "assistant", name: "1+1", "content": None, "tool_calls": [call]}]
    twice = [USER, {"role": "assistant", name: "1+1", "content": "<think>1+1</think>2"}]
    said: list[str] = []
    rows = [{"messages": each} for each in (talk, calls, twice, [{**USER, name: "?"}, talk[1]])]
    found = list(conversations(write(tmp_path, rows), say=said.append))
    assert found[0] == [USER, {"role": "assistant", "content": [thought, text]}, USER, talk[3]]
    assert found[1][1]["content"][0] == thought
    assert found[2][1]["content"] == "<think>1+1</think>2"
    assert found[3] == found[0][:2]
    assert not said


@pytest.mark.parametrize("task", ["text", "prompt", "instruction"])
def test_a_program_answers_its_task(tmp_path: Path, task: str) -> None:
    said: list[str] = []
    rows = [{"task_id": 1, task: "Write f.", "code": "def f(): pass", "test_list": ["assert f() is None"]}]
    (talk,) = conversations(write(tmp_path, rows), say=said.append)
    assert talk == [{"role": "user", "content": "Write f."}, {"role": "assistant", "content": "def f(): pass"}]
    assert said == ["data.jsonl: columns that are not used: task_id, test_list"]


@pytest.mark.parametrize("reply", ["code", "answer", "completion"])
def test_an_input_never_takes_the_place_of_the_instruction(tmp_path: Path, reply: str) -> None:
    said: list[str] = []
    rows = [{"instruction": "Sort.", "input": about, reply: "x"} for about in ("[3, 1]", "")]
    found = [talk[0]["content"] for talk in conversations(write(tmp_path, rows), say=said.append)]
    assert (found, said) == (["Sort.\n[3, 1]", "Sort."], [])


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_messages_may_be_json_text(tmp_path: Path, column: str) -> None:
    with (tmp_path / "data.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[column], [json.dumps([USER, REPLY])]])
    assert list(conversations(tmp_path / "data.csv")) == [[USER, REPLY]]
    row = {"prompt": "Q", "completion": "A", "history": json.dumps([["q", "a"]])}
    assert [said["content"] for said in next(conversations(write(tmp_path, [row])))] == ["q", "a", "Q", "A"]
    for text, words in (
        (str([USER, REPLY]), "its messages is no JSON (Expecting"),
        ('{"a": 1}', "no JSON list but dict"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            list(conversations(write(tmp_path, [{column: text}])))


@pytest.mark.parametrize(
    ("asks", "replies"),
    [("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("query", "code")],
)
def test_messages_in_columns_of_a_pair_may_be_json_text(tmp_path: Path, asks: str, replies: str) -> None:
    row = {asks: json.dumps([SYSTEM, USER]), replies: json.dumps([REPLY]), "input": ""}
    assert read(tmp_path, row) == [SYSTEM, USER, REPLY]


@pytest.mark.parametrize(
    "text", ['[{"role": "warrior", "content": "x"}]', '[{"from": "A", "value": 3}]', "[1]", "[]", "[{", "[" * 9999]
)
def test_other_json_in_columns_of_a_pair_is_text(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, {"prompt": text, "completion": text}) == [message("user", text), message("assistant", text)]


ROWS = [{"messages": [USER, REPLY]}, {"messages": [USER, REPLY]}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["data", "instances"])
@pytest.mark.parametrize("rows", [ROWS, [[USER, REPLY]] * 2])
def test_rows_may_stand_under_a_name(tmp_path: Path, indent: int | None, name: str, rows: list[Any]) -> None:
    path = tmp_path / "unwrap_rows.json"
    path.write_text(json.dumps({"version": "1", name: rows, "about": {}}, indent=indent), encoding="utf-8")
    assert list(conversations(path)) == [[USER, REPLY]] * 2


@pytest.mark.parametrize("form", ["lines", "list", "indented"])
def test_rows_that_hold_a_list_under_such_a_name_stay_rows(tmp_path: Path, form: str) -> None:
    """As those of a registry that names the column and what its messages are called."""
    rows = [{"id": n, "data": [{"speaker": "h", "said": "a"}, {"speaker": "g", "said": "b"}]} for n in range(3)]
    path = tmp_path / "named.json"
    text = json.dumps(rows, indent=1 if form == "indented" else None)
    path.write_text("\n".join(map(json.dumps, rows)) if form == "lines" else text, encoding="utf-8")
    assert [row for _, row in entries(path)] == rows


def test_a_column_that_happens_to_be_called_data_wraps_no_rows(tmp_path: Path) -> None:
    row = {"messages": [USER, REPLY], "data": [{"source": "web"}]}
    assert list(conversations(write(tmp_path, [row]))) == [[USER, REPLY]]
    row = {"prompt": "Q", "completion": "A", "data": [{"source": "web"}, {"source": "book"}]}
    assert len(list(conversations(write(tmp_path, [row])))) == 1


def test_a_tsv_with_names_in_its_first_line_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("id\tprompt\tresponse\n1\thi\thello\n2\thi\thello\n", encoding="utf-8")
    assert list(conversations(tmp_path / "a.tsv")) == [[USER, REPLY]] * 2
    (tmp_path / "b.tsv").write_text("prompt\tcompletion\nhi\thello\nhi\n", encoding="utf-8")
    with pytest.raises(UserError, match="1 of 2 rows cannot be read: line 3: 1 columns instead of 2"):
        list(conversations(tmp_path / "b.tsv"))


@pytest.mark.parametrize(
    "text",
    ["Below.\n### Instruction:\nHi\n### Response:\nhi", "<|im_start|>user\nhi<|im_end|>", "<s>[INST] hi [/INST] a"],
)
def test_a_text_in_the_form_of_another_template_is_no_reply(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"line 1: its text holds turns as another template writes them \("):
        read(tmp_path, {"text": text})


def test_functions_are_tools_by_their_older_name(tmp_path: Path) -> None:
    row = {"messages": [USER, REPLY], "functions": [{"name": "weather"}]}
    offer = 'You can call these tools:\n[{"name": "weather"}]'
    assert read(tmp_path, row) == [{"role": "system", "content": offer}, USER, REPLY]


def test_a_program_with_shifts_is_no_calculation(tmp_path: Path) -> None:
    for program in ("int a<<b=c>>d", "a<<1=b>>", "a<<b+1=2>>c", "cout<<1==1>>2", "a<<-=1>>"):
        assert read(tmp_path, {"question": "q", "answer": program})[1]["content"] == program
    with pytest.raises(UserError, match="what the assistant says is not text but bool"):
        read(tmp_path, {"question": "q", "answer": True})


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
    brief = [SYSTEM, USER, {"role": "assistant", "tool_calls": [call]}, {**openai[2], "tool_call_id": "1"}, openai[3]]
    for row in ({"messages": brief}, {"conversations": brief}, {"prompt": brief[:2], "completion": brief[2:]}):
        assert canonical(read(tmp_path, row))[-1] == canonical(found)[-1], "a message that calls needs no content"
    brief[2] = {"role": "assistant", "function_call": call["function"]}  # as it was written before
    old = canonical(read(tmp_path, {"messages": brief, "tools": [{"name": "w"}]}))
    assert old[-1] == canonical(found)[-1]
    assert old[0] == message("system", 'be brief\nYou can call these tools:\n[{"name": "w"}]')


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


def test_the_real_conversations_are_read_whole(real_data: Path) -> None:
    """test_dataset_info.py reads the beginning of every other file."""
    for name, count in {"eval/gsm8k/test": 1319, "sft/oasst1_en_val_threads": 338}.items():
        found = [canonical(talk) for talk in conversations(real_data / f"{name}.jsonl.xz")]
        assert len(found) == count
        assert all(talk[-1]["role"] == "assistant" and "<<" not in text_of(talk[-1]["content"]) for talk in found)
        calls = sum(part["type"] == "tool" for *_, last in found for part in last["content"] if isinstance(part, dict))
        assert calls >= 3 * count * name.startswith("eval")


@pytest.mark.parametrize(
    "gold",
    [
        {"choices": ["x", "y"], "gold": 1},
        {"choices": ["x", "y"], "answer": 1},
        {"choices": ["x", "y"], "answer": "B"},
        {"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
        {"options": ["x", "y"], "answer": "B", "answer_index": 1},
        {"options": {"A": "x", "B": "y", "C": None}, "answer_idx": "B", "answer": "y"},
        {"options": ["x", "y"], "answer": "y"},
        {"A": "x", "B": "y", "answer": "B"},
        {"A": "x", "B": "", "C": "y", "D": None, "answer": "C"},
    ],
)
def test_multiple_choice_answers_with_the_letter_however_the_answer_is_written(
    tmp_path: Path, gold: dict[str, Any]
) -> None:
    user, reply = read(tmp_path, {"question": "which?", **gold})
    assert user["content"].startswith("which?\n- x=A\n- y=B\n")
    assert reply["content"] == "B"
    for answer in ("", "AB", "Z", 2, -1, None):
        with pytest.raises(UserError, match=f"the answer {answer!r} is none of the 2 choices of 'which"):
            read(tmp_path, {"question": "which?", "choices": ["x", "y"], "answer": answer})


def test_containers_and_line_breaks_inside_texts(tmp_path: Path) -> None:
    rows = [{"query": "a\u2028b", "response": "c\rd"}, {"query": "e", "response": "f"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (tmp_path / "c.tsv").write_text("\ufeffwhy?\\nsay\tyes\tbecause\r\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    expected = [[m["content"] for m in c] for c in conversations(tmp_path / "b.json")]
    assert expected == [["a\u2028b", "c\rd"], ["e", "f"]]
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())  # a byte-order mark
    (tmp_path / "b.json.xz").write_bytes(lzma.compress(b"\xef\xbb\xbf\n" + json.dumps(rows).encode() + b"\n"))
    for name in ("a.jsonl.gz", "b.jsonl", "b.json.xz", "d.parquet"):
        assert [[m["content"] for m in c] for c in conversations(tmp_path / name)] == expected
    assert [m["content"] for m in next(conversations(tmp_path / "c.tsv"))] == [
        "why?\nsay",
        "because\nThe answer is yes.",
    ]
    table = pyarrow.Table.from_pylist([*rows, {"query": "g", "response": None}])
    pyarrow.parquet.write_table(table, tmp_path / "e.parquet")
    said: list[str] = []
    assert len(list(conversations(tmp_path / "e.parquet", say=said.append))) == 2
    assert said[0].startswith("e.parquet: 1 of 3 rows cannot be read: row 3: what the assistant says is not text")


@pytest.mark.parametrize(
    ("role", "part", "words"),
    [
        ("user", {"type": "image_url", "image_url": {"url": "x.png"}}, "the unknown type 'image_url'"),
        (
            "user",
            {"type": "input_text", "text": "hi"},
            "the unknown type 'input_text' (known: text, tool, output, thought)",
        ),
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


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"role": "assistant", "content": "3", "weight": 0}, "a reply of weight 0 would"),
        ({"role": "model", "content": "3", "weight": 0.0}, "a reply of weight 0.0 would"),
        ({"from": "gpt", "value": "3", "weight": 0}, "a reply of weight 0 would"),
        ({"role": "assistant", "content": "3", "loss": False}, "a reply of loss False would"),
        ({"role": "assistant", "content": "3", "train": "false"}, "a reply of train false would"),
        ({"from": "gpt", "value": "3", "training": False}, "a reply of training False would"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "loss": False}, "a reply of loss False"),
    ],
)
def test_a_reply_that_is_not_to_be_learnt_is_not_learnt_in_silence(
    tmp_path: Path, reply: dict[str, Any], words: str
) -> None:
    """As OpenAI's fine-tuning, ms-swift and axolotl mark it; what others say needs no mark, and null is none."""
    marks = dict.fromkeys(("weight", "loss", "train", "training"))
    talk = [{**USER, "weight": 0, "loss": False}, {**REPLY, **marks}, USER]
    fine = {**reply, **{name: 1 for name in marks if name in reply}}
    assert len(list(conversations(write(tmp_path, [{"messages": [*talk, fine]}])))) == 1
    with pytest.raises(UserError, match=rf"data\.jsonl: 1 of 2 rows cannot be read: line 2: {words}"):
        list(conversations(write(tmp_path, [{"messages": [*talk, fine]}, {"messages": [*talk, reply]}])))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "completion": "worse"},
        {"messages": [USER, REPLY]},
        {"conversations": [USER, REPLY]},
        {"instruction": "p", "output": "worse"},
        {"question": "p", "answer": "worse"},
    ],
)
def test_a_reply_of_the_label_false_is_not_learnt(tmp_path: Path, row: dict[str, Any]) -> None:
    """As TRL's and ms-swift's KTO mark it; a number is the class of something."""
    rows = [{**row, "label": label} for label in (True, None, 0, 1, False)]
    said: list[str] = []
    assert len(list(conversations(write(tmp_path, rows), say=said.append))) == 4
    assert said[0].startswith("data.jsonl: 1 of 5 rows cannot be read: line 5: a reply of the label false")


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
    "no UTF-8": ('{"query": "\udcff", "response": "b"}', "'utf-8' codec"),
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
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    assert len(list(conversations(path, say=said.append))) == 496
    (line,) = said
    assert line.startswith(f"talk.jsonl: 4 of 500 rows cannot be read: line {at[0] + 1}: ")
    assert words in line or (first and "it has the columns foo, bar" in line)
    assert "line 131: " in line
    assert "line 141" not in line  # the first three are enough
    path.write_text("\n".join(lines[:150]), encoding="utf-8", errors="surrogateescape")  # more than 1 % now
    with pytest.raises(UserError, match=r"4 of 150 rows cannot be read: line .*more than 1 % is too much"):
        list(conversations(path, say=said.append))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": 0}, {"role": "assistant", "content": "zero"}]},
        {"instruction": "Name it.", "input": 0, "output": "zero"},
    ],
)
def test_a_zero_where_a_text_belongs_is_named_as_every_number_is(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [json.loads(json.dumps(row).replace(": 0", f": {cell}")) for cell in ('"0"', "0", "5", '""', '"7"')]
    with pytest.raises(UserError, match=r"2 of 5 rows cannot be read: line 2: .*; line 3: "):
        list(conversations(write(tmp_path, rows)))


@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".json", ".jsonl.gz"])
def test_a_list_of_messages_in_a_line_is_a_conversation(tmp_path: Path, kind: str) -> None:
    """As nanochat's identity file has it, and everything else that its CustomJSON reads."""
    talks = [
        [{"role": "user", "content": f"who {number}?"}, {"role": "assistant", "content": "[nanochat]"}]
        * (1 + number % 2)
        for number in range(40)
    ]
    text = "\n\n".join(map(json.dumps, talks)).encode()
    path = tmp_path / f"identity_conversations{kind}"
    path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    assert list(conversations(path)) == talks
    path.write_bytes((gzip.compress if kind.endswith("gz") else bytes)(json.dumps(talks[1]).encode()))
    assert list(conversations(path)) == talks[1:2]


TALK = [USER, {"role": "assistant", "content": "It is 4."}]
ROW = {"conversations": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "It is 4."}]}
PRETTY = json.dumps(TALK, indent=2)
LISTS = {  # a file, and how often it has TALK
    "one conversation, pretty": (PRETTY, 1),
    "conversations, pretty": (PRETTY + "\n" + PRETTY, 2),
    "a list of conversations": (json.dumps([TALK, TALK, TALK]), 3),
    "a list of conversations, pretty": (json.dumps([TALK, TALK], indent=1), 2),
    "lists of rows": (json.dumps([ROW, ROW]) + "\n" + json.dumps([ROW]), 3),
    "lists of rows in one line": (json.dumps([ROW, ROW]) + " " + json.dumps([ROW]), 3),
    "lists of rows, pretty": (json.dumps([ROW], indent=1) + json.dumps([ROW, ROW], indent=1), 3),
    "rows, pretty": (json.dumps(ROW, indent=1) + "\n" + json.dumps(ROW, indent=4) + "\n", 2),
    "lists and rows in lines": ("\n".join(map(json.dumps, ([ROW, ROW], ROW, [], [ROW, ROW]))), 5),
    "of ShareGPT, in lines": ("\n".join([json.dumps(ROW["conversations"])] * 2), 2),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_and_rows_one_after_the_other_are_read_to_the_end(tmp_path: Path, name: str) -> None:
    (tmp_path / "talk.json").write_text(LISTS[name][0], encoding="utf-8")
    assert list(conversations(tmp_path / "talk.json")) == [TALK] * LISTS[name][1]


def test_a_broken_list_among_lines_is_counted_and_named(tmp_path: Path) -> None:
    lines = [json.dumps(TALK)] * 300
    lines[200], lines[250] = json.dumps(TALK)[:40], json.dumps([*TALK, {"role": "assistant"}])
    said: list[str] = []
    (tmp_path / "talk.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert len(list(conversations(tmp_path / "talk.jsonl", say=said.append))) == 298
    assert "2 of 300 rows cannot be read: line 201: Unterminated string" in said[0]
    assert "; line 251: the column 'content' is missing" in said[0]


def test_a_first_line_that_is_cut_is_one_bad_row(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "talk.jsonl").write_text(
        "\n".join([json.dumps(TALK)[:40], *[json.dumps(TALK)] * 200]), encoding="utf-8"
    )
    assert len(list(conversations(tmp_path / "talk.jsonl", say=said.append))) == 200
    assert "1 of 201 rows cannot be read: line 1: Unterminated string" in said[0]


def test_notes_beside_conversations_are_none(tmp_path: Path) -> None:
    """Text, csv and arrow files of a folder are read where nothing else is there."""
    (tmp_path / "LICENSE.txt").write_text("Do what you like.\n", encoding="utf-8")
    (tmp_path / "columns.csv").write_text("prompt,completion\nhi,hello\n", encoding="utf-8")
    write(tmp_path, [{"messages": TALK}] * 2)
    assert list(load(str(tmp_path))) == [TALK] * 2
    (tmp_path / "data.jsonl").unlink()
    assert [talk[-1]["content"] for talk in load(str(tmp_path))] == ["hello"]
    (tmp_path / "columns.csv").unlink()
    assert [talk[-1]["content"] for talk in load(str(tmp_path))] == ["Do what you like."]


@pytest.mark.parametrize(
    ("files", "read", "left"),
    [
        ("math code_train", "code_train math", ""),
        ("chats validation dev test/more val/train", "chats val/train", "dev, test/more, validation"),
        ("math unit_test_questions", "math", "unit_test_questions"),
        ("train .ipynb_checkpoints/train-checkpoint .hidden", "train", ""),
        ("train/a valid_answers", "train/a valid_answers", ""),
        ("test/a dev/b c d e f h-test h-val h-dev val i-test", "c d e f", "dev/b, h-dev, h-test, h-val, i-test"),
    ],
)
def test_files_of_a_folder_are_trained_on_or_named(tmp_path: Path, files: str, read: str, left: str) -> None:
    """Those of another split are left out; what is hidden is no data."""
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, [{"prompt": "p", "completion": name}], f"{name}.jsonl")
    task = load(str(tmp_path))
    assert [talk[-1]["content"] for talk in task] == read.split()
    names = ", ".join(f"{name}.jsonl" for name in left.split(", "))
    more = " and 2 more" if "i-test" in left else ""
    assert task.notices == ([f"{tmp_path.name}: files that are not trained on: {names}{more}"] if left else [])


def test_files_of_another_format_are_named_when_they_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, [{"messages": TALK}], "a.jsonl")
    (tmp_path / "b.csv").write_text("prompt,completion\nhi,hello\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("no table", encoding="utf-8")
    assert load(str(tmp_path)).notices == [f"{tmp_path.name}: files that are not trained on: b.csv"]


def test_folders_that_links_reach_are_read_once(tmp_path: Path) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    write(folder, [{"prompt": "p", "completion": "here"}], "here.jsonl")
    write(other, [{"prompt": "p", "completion": "there"}], "there.jsonl")
    (folder / "more").symlink_to(other)
    (folder / "round").symlink_to(folder)
    assert [talk[-1]["content"] for talk in load(str(folder))] == ["here", "there"]
    assert [path.name for path in source_files([folder])] == ["here.jsonl", "there.jsonl"]


def test_a_folder_that_datasets_has_saved_is_read(tmp_path: Path) -> None:
    """Beside its arrow files it has two of json: dataset_info.json is none of LLaMA-Factory."""
    table = pyarrow.Table.from_pylist([{"query": "hi", "response": "hello"}])
    with pyarrow.ipc.new_stream(str(tmp_path / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    info = {"citation": "", "description": "", "features": {"query": {}}, "homepage": "", "license": ""}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (tmp_path / "state.json").write_text('{"_data_files": []}', encoding="utf-8")
    assert list(load(str(tmp_path))) == [[USER, REPLY]]


def test_a_cell_that_is_no_text_is_one_bad_row(tmp_path: Path) -> None:
    """Parquet does not look at what it is given: half a character in its bytes, say."""
    replies = pyarrow.array([b"fine", b"half \xed\xa0\xbd", b"fine", b"fine"], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"query": ["a", "b", "c", "d"], "response": replies})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    said: list[str] = []
    assert len(list(conversations(tmp_path / "a.parquet", say=said.append))) == 3
    assert "1 of 4 rows cannot be read: row 2: 'utf-8' codec can't decode" in said[0]
    tally = ReadCounts()
    assert list(file_documents(tmp_path / "a.parquet", "response", tally)) == ["fine"] * 3
    assert (tally.broken, tally.example.partition(":")[0]) == (1, "row 2 of a.parquet")


def test_tables_of_llama_factory_without_json(tmp_path: Path) -> None:
    """csv, txt and arrow, which `datasets` reads for it."""
    rows = [
        {"instruction": 'say "hi",\nplease', "input": "", "output": "hi"},
        {"instruction": "2+2", "input": "?", "output": "4"},
    ]
    wanted = [[{"role": "user", "content": 'say "hi",\nplease'}, {"role": "assistant", "content": "hi"}]]
    wanted += [[{"role": "user", "content": "2+2\n?"}, {"role": "assistant", "content": "4"}]]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    made = pyarrow.Table.from_pylist(rows)
    for name, begin in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with begin(str(tmp_path / name), made.schema) as writer:
            writer.write_table(made, max_chunksize=1)
    for name in ("a.csv", "a.csv.gz", "stream.arrow", "file.arrow"):
        assert list(conversations(tmp_path / name)) == wanted
    (tmp_path / "a.txt").write_text(
        "### Human: hi\u2028there ### Assistant: hello\n\nA line is a reply.\n", encoding="utf-8"
    )
    assert [[m["content"] for m in talk] for talk in conversations(tmp_path / "a.txt")] == [
        ["hi\u2028there", "hello"],
        ["A line is a reply."],
    ]
    (tmp_path / "bad.csv").write_text('prompt,completion\n"open,b\nc,d\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.csv: the row that begins in line 2 has a quote that is not closed"):
        list(conversations(tmp_path / "bad.csv"))
    (tmp_path / "bad.arrow").write_bytes(b"ARROW1 nothing of the kind")
    with pytest.raises(UserError, match=r"bad\.arrow cannot be read"):
        list(conversations(tmp_path / "bad.arrow"))


def test_half_a_character_in_a_row_is_counted_and_named(tmp_path: Path) -> None:
    """As text is that was cut between the two halves of an emoji."""
    talk = [USER, {"role": "assistant", "content": "ok \ud800 yes"}]
    tool = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    tool[1]["tool_calls"][0]["function"]["name"] = "\udc00"
    fine = {"messages": [USER, {"role": "assistant", "content": "a whole one: \ud83d\ude00 \ufffd"}]}
    said: list[str] = []
    rows = [fine] * 200 + [{"messages": talk}, {"messages": tool}] + [fine] * 100
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="ascii")
    assert len(list(conversations(tmp_path / "data.jsonl", say=said.append))) == 300
    (line,) = said
    assert "2 of 302 rows cannot be read: line 201: half a character (a lone surrogate); line 202: half a char" in line
    alpaca = [
        {"instruction": "a", "output": "b"},
        {"instruction": "\ud800", "output": "b"},
        {"instruction": "", "output": "c"},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, alpaca)), encoding="ascii")
    assert len(list(conversations(tmp_path / "data.jsonl", say=said.append))) == 2
    assert "1 of 3 rows" in said[1]


def test_one_bad_row_does_not_refuse_a_small_file(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join([GOOD, "{", GOOD, GOOD]), encoding="utf-8")
    assert len(list(conversations(path, say=said.append))) == 3
    assert said[0].startswith("talk.jsonl: 1 of 4 rows cannot be read: line 2: ")


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


def test_a_file_of_another_kind_is_refused_with_what_to_convert_it_to(tmp_path: Path) -> None:
    for name in ("talk.xlsx", "talk.arrow.gz", "talk.parquet.gz", "talk", "talk.zip"):
        (tmp_path / name).write_text("prompt,completion\nhi,hello\n", encoding="utf-8")
        with pytest.raises(UserError, match=rf"{name}: conversations are read from .*convert it to \.jsonl, with one"):
            list(conversations(tmp_path / name))
