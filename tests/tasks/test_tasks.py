"""Tasks on small tables of our own: readers and rules of scoring."""

from __future__ import annotations

import json
import lzma
import re
import time
import zipfile
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendchat import sandbox
from ascendchat.data import read
from ascendchat.data.chat import formats, pairs, tables
from ascendchat.data.chat.render import render_choice, text_of
from ascendchat.data.fetch import fetch
from ascendchat.errors import UserError
from ascendchat.rl import rewards
from ascendchat.tasks import by_name as tasks
from ascendchat.tasks.dialog import ConversationStore
from ascendchat.tasks.eval_files import SPLIT, belongs
from ascendchat.tasks.gsm8k import FINAL, SIGNED, as_number, final_number
from ascendchat.tasks.humaneval import CODE_BLOCK, HumanEval, code_of, pass_at_k


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every kind of table that the examinations are published in."""
    for archive, members in {
        "mmlu": {
            "data/test/law_test.csv": '"Who, if any?",he,she,it,they,B\nWhen?,now,then,"1,2",never,C\n',
            "data/test/art_test.csv": "Why?,a,b,c,d,D\n",
            "data/dev/art_dev.csv": "How?,a,b,c,d,A\n",
        },
        "ceval": {
            "val/law_val.csv": "id,question,A,B,C,D,answer\n0,何时____。,一,二,三,四,C\n",
            "test/law_test.csv": "id,question,A,B,C,D\n0,何时____。,一,二,三,四\n",
        },
        "cmmlu": {"test/law.csv": "\ufeff,Question,A,B,C,D,Answer\n0,谁?,甲,乙,丙,丁,A\n"},
    }.items():
        with zipfile.ZipFile(tmp_path / f"{archive}.zip", "w") as file:
            for name, text in members.items():
                file.writestr(name, text)
    bundle = tmp_path / "eval_bundle" / "eval_data" / "world_knowledge"
    bundle.mkdir(parents=True)
    row = {"query": "Question: What is hot?", "choices": ["ice", "fire", "snow"], "gold": 1}
    (bundle / "arc_easy.jsonl.xz").write_bytes(lzma.compress(json.dumps(row).encode()))
    (tmp_path / "gsm8k").mkdir()
    row = {"question": "Half of 48?", "answer": "It is 48/2 = <<48/2=24>>24.\n#### 24"}
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return tmp_path


def test_every_published_table_gives_the_same_kind_of_question(folder: Path) -> None:
    mmlu = tasks.load("mmlu", source=str(folder))
    assert [mmlu.question(i) for i in range(len(mmlu))] == ["Why?", "Who, if any?", "When?"]
    assert [mmlu.answer(i) for i in range(3)] == [3, 1, 2]
    assert mmlu.example(1)[-1] == {"role": "assistant", "content": "B"}
    assert mmlu.prompt(1)[0]["content"] == render_choice("Who, if any?", ["he", "she", "it", "they"])
    assert len(tasks.load("mmlu", "dev", str(folder))) == 1
    ceval = tasks.load("ceval", source=str(folder))
    assert (ceval.split, ceval.question(0), ceval.answer(0)) == ("val", "何时____。", 2)
    assert ceval.prompt(0)[0]["content"].endswith("- 四=D\n只回答一个字母：A、B、C、D。")
    assert tasks.load("cmmlu", source=str(folder)).question(0) == "谁?"
    arc = tasks.load("arc_easy", source=str(folder))
    assert (arc.question(0), list(arc.letters(0)), arc.answer(0)) == ("What is hot?", ["A", "B", "C"], 1)


def test_the_split_of_a_file_is_told_by_its_name() -> None:
    for path, split, right in (
        ("data/mmlu/all/test-00000-of-00001.parquet", "test", True),
        ("data/mmlu/all/auxiliary_train-00000.parquet", "train", True),
        ("my_test/mmlu.zip/data/dev/law_dev.csv", "test", False),  # the folder that was given says nothing
        ("x/test/mmlu.zip/data/dev/law_dev.csv", "test", False),  # and what the file says counts more than its folder
        ("x/test/mmlu/law.csv", "test", True),
        ("x/contest/mmlu/latest.csv", "test", False),
    ):
        assert belongs(path, path.index("/mmlu"), SPLIT[split]) is right, path


def test_a_fetched_set_is_read_where_fetch_put_it(folder: Path) -> None:
    fetch("mmlu", source=str(folder))
    for path in folder.glob("*.zip"):
        path.unlink()
    assert len(tasks.load("mmlu")) == 3


def test_tables_of_the_hub_are_read_from_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    labelled = {"question": "e", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}
    for name, row in {
        "mmlu/all/test-00000-of-00001.parquet": {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 3},
        "mmlu/all/dev-00000-of-00001.parquet": {"question": "other", "choices": ["a", "b", "c", "d"], "answer": 0},
        "arc/ARC-Easy/test-00000-of-00001.parquet": labelled,
        "arc/ARC-Challenge/test-00000-of-00001.parquet": {**labelled, "answerKey": "D"},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    for source in (tmp_path, tmp_path / "mmlu"):
        mmlu = tasks.load("mmlu", source=str(source))
        assert [(mmlu.question(i), mmlu.answer(i)) for i in range(len(mmlu))] == [("q", 3)]
    assert tasks.load("arc_easy", source=str(tmp_path)).answer(0) == 1
    with pytest.raises(UserError, match=r"arc: test-0.*\.parquet, row 1 is no question: the answer 'D' is none"):
        tasks.load("arc_challenge", source=str(tmp_path))


def test_a_whole_clone_of_a_hub_is_read_once(tmp_path: Path) -> None:
    question = {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 3}
    rows = {
        "mmlu/abstract_algebra/test.jsonl": [question],
        "mmlu/all/test.jsonl": [question, question],
        "mmlu/auxiliary_train/train.jsonl": [question],
        "mmlu/virology/test.jsonl": [question],
        "gsm8k/main/test.jsonl": [{"question": "g", "answer": "#### 2"}],
        "gsm8k/socratic/test.jsonl": [{"question": "g", "answer": "Why? #### 2"}],
        "cmmlu/all/a.txt": [],
        "cmmlu/allergy/test.jsonl": [question],
        "cmmlu/virology/test.jsonl": [question],
    }
    for name, lines in rows.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    for source in (tmp_path, tmp_path / "mmlu"):
        assert len(tasks.load("mmlu", source=str(source))) == 2
    assert len(tasks.load("mmlu", "train", str(tmp_path))) == 1
    assert len(tasks.load("gsm8k", source=str(tmp_path))) == 1
    assert "Why" not in text_of(tasks.load("gsm8k", source=str(tmp_path)).example(0)[-1]["content"])
    assert len(tasks.load("cmmlu", source=str(tmp_path))) == 2


def test_absent_sets_names_splits_and_damaged_archives_are_refused_with_a_hint(folder: Path) -> None:
    for name in ("arc_challenge", "humaneval"):
        with pytest.raises(UserError, match="ascendchat data fetch"):
            tasks.load(name, source=str(folder))
    with pytest.raises(UserError, match="did you mean mmlu"):
        tasks.load("mmluu")
    with pytest.raises(UserError, match="splits val, dev"):
        tasks.load("ceval", "test", str(folder))
    (folder / "mmlu.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match="damaged"):
        tasks.load("mmlu", source=str(folder))


def write_set(folder: Path, name: str, rows: list[object]) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


CHOICE = {"question": "Red?", "A": "sky", "B": "rose", "C": "sea", "D": "ash", "answer": "B"}
SUM = {"question": "1+1?", "answer": "#### 2"}
DOUBLE = {"prompt": "def f(x):\n", "test": "assert f(1) == 2", "entry_point": "f", "canonical_solution": ""}


@pytest.mark.parametrize(
    ("name", "file", "rows", "says"),
    [
        ("ceval", "ceval/val/law.jsonl", [CHOICE, {**CHOICE, "answer": ""}], "line 2 is no question: the answer ''"),
        ("ceval", "ceval/val/law.jsonl", [CHOICE, {**CHOICE, "answer": None}], "line 2 is no question: the answer"),
        ("mmlu", "mmlu/test.jsonl", [{**CHOICE, "question": None}], "line 1 is no question: its question is null"),
        ("gsm8k", "gsm8k/test.jsonl", [SUM, {"question": "2+2?"}], "line 2 is no question: the column 'answer' is mis"),
        ("gsm8k", "gsm8k/test.jsonl", [SUM, {**SUM, "answer": "two"}], "line 2 is no question: its answer 'two' is no"),
        ("gsm8k", "gsm8k/test.jsonl", [{**SUM, "question": None}], "line 1 is no question: its question is not text"),
        ("gsm8k", "gsm8k/test.jsonl", [SUM, 7], "line 2 is no question: it is int, not an object"),
        ("gsm8k", "gsm8k/test.jsonl", [], "the files of gsm8k hold no rows"),
        ("humaneval", "HumanEval.jsonl", [DOUBLE, {"prompt": "x"}], "line 2 is no question: the column 'test' is miss"),
        ("humaneval", "HumanEval.jsonl", [{**DOUBLE, "test": ["x"]}], "line 1 is no question: its column test is not"),
    ],
)
def test_a_row_that_is_no_question_is_named(
    tmp_path: Path, name: str, file: str, rows: list[object], says: str
) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        tasks.load(name, source=write_set(tmp_path, file, rows))


def test_bare_numbers_are_answers_of_gsm8k(tmp_path: Path) -> None:
    bare = [{"question": "1+1?", "answer": 2}, {"question": "a?", "answer": "$1,800"}]
    gsm8k = tasks.load("gsm8k", source=write_set(tmp_path, "gsm8k/test.jsonl", bare))
    assert gsm8k.correct(0, "#### 2")
    assert gsm8k.correct(1, "#### 1800")
    assert not gsm8k.correct(0, "#### 3")
    assert not gsm8k.correct(0, "2")
    assert gsm8k.correct(0, text_of(gsm8k.example(0)[-1]["content"])), "what is trained on is right in examinations"


def test_tables_in_an_archive_are_read_as_beside_it(tmp_path: Path) -> None:
    line = json.dumps(SUM)
    for content in (f"[{line},\n{line}]", f"[{line}, {line}]\n", f"{line}\n{line}\n", json.dumps([SUM, SUM], indent=1)):
        with zipfile.ZipFile(tmp_path / "gsm8k.zip", "w") as archive:
            archive.writestr("test.json", content)
            archive.writestr("__MACOSX/._test.json", "no json")
        assert len(tasks.load("gsm8k", source=str(tmp_path))) == 2
    with zipfile.ZipFile(tmp_path / "gsm8k.zip", "w") as archive:
        archive.writestr("test.jsonl", '[["1+1?", "2"]]\n')
    with pytest.raises(UserError, match=r"gsm8k\.zip:test\.jsonl, row 1 is no question"):
        tasks.load("gsm8k", source=str(tmp_path))
    with zipfile.ZipFile(tmp_path / "gsm8k.zip", "w") as archive:
        archive.writestr("test.jsonl.xz", lzma.compress(line.encode()))
    assert len(tasks.load("gsm8k", source=str(tmp_path))) == 1


def test_a_csv_row_with_another_number_of_cells_is_named(tmp_path: Path) -> None:
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu" / "test.csv").write_text("Why?,a,b,c,d,D\nWhen?,now,then,1,2,never,C\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 2 is no question: 7 columns instead of 6"):
        tasks.load("mmlu", source=str(tmp_path))


def test_linked_folders_of_evaluation_sets_are_read_and_hidden_ones_are_not(tmp_path: Path) -> None:
    write_set(tmp_path / "there", "test.jsonl", [SUM])
    write_set(tmp_path, "here/.old/gsm8k/test.jsonl", [SUM] * 5)
    (tmp_path / "here" / "gsm8k").symlink_to(tmp_path / "there")
    assert len(tasks.load("gsm8k", source=str(tmp_path / "here"))) == 1
    (tmp_path / "here" / "gsm8k" / "round").symlink_to(tmp_path / "here")
    assert len(tasks.load("gsm8k", source=str(tmp_path / "here"))) == 1


def test_a_letter_in_words_is_judged_by_the_letter(folder: Path) -> None:
    mmlu = tasks.load("mmlu", source=str(folder))
    assert mmlu.correct(0, " D")
    assert mmlu.correct(0, "D.")
    assert not mmlu.correct(0, "Dogs")
    assert not mmlu.correct(0, "A")
    assert not mmlu.correct(0, "")


def test_gsm8k_becomes_calculator_calls_and_is_judged_by_the_number_behind_the_marks(folder: Path) -> None:
    gsm8k = tasks.load("gsm8k", source=str(folder))
    content = gsm8k.example(0)[-1]["content"]
    assert [part["type"] for part in content] == ["text", "tool", "output", "text"]
    assert gsm8k.prompt(0) == [{"role": "user", "content": "Half of 48?"}]
    for reply in (text_of(content), "#### 24", "#### 24.00", "#### $24", "####24.", "first #### 3 then #### 24"):
        assert gsm8k.correct(0, reply), reply
    for reply in ("24", "#### 25", "#### 2,4,0", "####", "#### -24", ""):
        assert not gsm8k.correct(0, reply), reply
    assert final_number("#### 1,234,567") == 1234567


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("#### **18**", 18),
        ("#### **$18.50**", "18.5"),
        ("**#### 18**", 18),
        ("#### ** - 3 ** apples", -3),
        ("#### - 3", -3),
        ("#### \u2212 3", -3),
        ("#### $ - 3", -3),
        ("#### 18 - 3", 18),
        ("#### 18e5", 1800000),
        ("#### 18eggs", 18),
        ("#### 18 * 2", 18),
        ("#### 1/1e5", None),
        ("#### 12/15e5", None),
        ("#### 18e5x", None),
        ("#### 18e55x", None),
        ("#### 1.e5", None),
        ("#### 10^5", None),
        ("#### 10**5", None),
        ("#### 3*4", None),
        ("#### - - 3", None),
        ("#### **", None),
    ],
)
def test_a_number_behind_the_marks_is_read_whole_or_not(reply: str, number: object) -> None:
    assert final_number(reply) == (None if number is None else Decimal(str(number)))


def test_a_bare_answer_may_have_a_blank_behind_its_sign() -> None:
    assert [as_number(text) for text in ("- 3", " \u2212 .5", "10 - 3", "- 3 apples")] == [
        -3,
        Decimal("-.5"),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("Sure:\n```python\nx = 1\n```\nDone. ```python\ny\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("    return 1", "    return 1"),
        ("```python3\ndef f():\n    return 1\n```\nThis returns one.", "def f():\n    return 1\n"),
        ("```{.python .numberLines}\r\nx = 1\r\n```\r\nSo.", "x = 1\r\n"),
        ("Run:\n```bash\npip install x\n```\nthen\n```py\nx = 1\n```", "x = 1\n"),
        ("```python\nf(1)\n```\nwith\n```text\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        (
            "1. So:\n   ```python\n   import re\n\n   def f():\n       return 1\n   ```\n2. Done.",
            "import re\n\ndef f():\n    return 1\n",
        ),
        ("- ```python\n  def f():\n      return 1\n  ```", "def f():\n    return 1\n"),
        ("```python\n    import math\n    return math.pi\n```", "    import math\n    return math.pi\n"),
        ("Here: ```python\nx = 1\n```", "x = 1\n"),
        ("Use ```x``` or `y`:\n```\nx = 1\n```", "x = 1\n"),
        ("```rust\nlet x = 1;\n```", "let x = 1;\n"),
        ("Sure:\n~~~python\nx = 1\n~~~\nDone.", "x = 1\n"),
        ("~~~\nx = '```'\n~~~", "x = '```'\n"),
        pytest.param("```\nx = '~~~'\n```", "x = '~~~'\n"),
        ("It costs ~~5~~ 4:\n~~~~ py\ndef f():\n    return 1\n~~~~", "def f():\n    return 1\n"),
    ],
)
def test_the_code_of_a_reply_is_the_block_that_defines_the_function(reply: str, code: str) -> None:
    assert code_of(reply, "f").rstrip(" ") == code


@pytest.fixture
def humaneval(tmp_path: Path) -> HumanEval:
    """One question, of a function that doubles."""
    row = {
        "task_id": "HumanEval/0",
        "prompt": 'import math\n\ndef f(x):\n    """Twice."""\n',
        "entry_point": "f",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(f):\n    assert f(2) == 4\n",
    }
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return HumanEval(source=str(tmp_path))


def test_programs_that_the_sandbox_did_not_run_are_counted(
    humaneval: HumanEval, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = "```python3\ndef f(x):\n    return 2 * x\n```\nIt doubles."
    assert humaneval.correct(0, right), humaneval.program(0, right)
    assert not humaneval.correct(0, "```python\ndef f(x):\n    return 3 * x\n```")
    assert humaneval.sandbox_failed == []
    failed = sandbox.ProgramResult(False, "", "", "sandbox", "no")
    monkeypatch.setattr(sandbox, "run", lambda *args, **way: failed)
    assert not humaneval.correct(0, "")
    assert humaneval.sandbox_failed == [0]


DOUBLES = "def f(x):\n    return 2 * x\n\n"


@pytest.mark.parametrize(
    "tail",
    [
        'if __name__ == "__main__":\n    import sys\n    sys.exit(0)',
        "if __name__ == '__main__':\n    print(f(int(input())))",
        "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 3)\n\n"
        'if __name__ == "__main__":\n    unittest.main()',
        "import unittest\nunittest.main()",
        "import sys\nsys.exit(main() if 'main' in globals() else 0)",
        "from sys import exit\nexit(1)",
    ],
)
def test_what_an_answer_shows_or_tries_itself_does_not_keep_it_from_its_tests(humaneval: HumanEval, tail: str) -> None:
    assert humaneval.correct(0, f"```python\nimport math\n{DOUBLES}{tail}\n```")
    assert not humaneval.correct(0, f"```python\n{DOUBLES.replace('2', '3')}{tail}\n```")


def test_an_answer_that_ends_before_its_function_is_none_and_tests_run_as_main(humaneval: HumanEval) -> None:
    assert not humaneval.correct(0, f"```python\nimport sys\nsys.exit(0)\n{DOUBLES}```")
    humaneval.rows[0]["test"] += 'if __name__ == "__main__":\n    raise AssertionError("run")\n'
    assert not humaneval.correct(0, f"```python\n{DOUBLES}```")


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer() -> None:
    from itertools import combinations

    for samples in range(1, 7):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(combinations([True] * right + [False] * (samples - right), k))
                assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError):
        pass_at_k(3, 1, 4)


TEMPLATES = "Dear {{name}} and {{user}} of {{author}}: \\frac{{1}}{{2}}, {{ x }}, {{town}}"


def alpaca(path: Path, reply: str) -> Path:
    path.write_text(json.dumps([{"instruction": "who?", "output": reply}]), encoding="utf-8")
    return path


def test_double_braces_in_ordinary_conversations_are_text(tmp_path: Path) -> None:
    task = tasks.load(str(alpaca(tmp_path / "my_identity.json", TEMPLATES)))
    assert task.example(0)[1]["content"] == TEMPLATES
    assert task.notices == ["my_identity: {{name}} stays as it is; it is filled in only in identity.json"]
    assert tasks.load(str(alpaca(tmp_path / "talk.json", "\\frac{{1}}{{2}}"))).notices == []


def test_only_the_declared_places_of_a_set_are_filled(tmp_path: Path) -> None:
    filled = TEMPLATES.replace("{{name}}", "Ascend Chat").replace("{{author}}", "Ascend Chat")
    path = alpaca(tmp_path / "identity.json", TEMPLATES)
    (tmp_path / "identity").mkdir()
    alpaca(tmp_path / "identity" / "a.json", TEMPLATES)
    named = [tasks.load("identity", source=str(tmp_path)), *(tasks.load(str(p)) for p in (path, path.with_suffix("")))]
    for task in named:
        assert task.example(0)[1]["content"] == filled
        assert not task.notices


def test_a_folder_of_conversations_is_read_by_split(tmp_path: Path) -> None:
    for name, count in (("train-00000", 3), ("train-00001", 2), ("test-00000", 1)):
        rows = [json.dumps({"query": f"{name} {i}", "response": "ok"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert len(tasks.load(str(tmp_path), "train")) == 5
    assert len(tasks.load(str(tmp_path), "test")) == 1
    with pytest.raises(UserError, match=r"holds no conversations of the split 'val'; they are read from \.parquet"):
        tasks.load(str(tmp_path), "val")
    with pytest.raises(UserError, match="'smoltlak' is neither a task nor a file; did you mean smoltalk"):
        tasks.load("smoltlak")


@given(st.lists(st.lists(st.text(), min_size=1, max_size=3), max_size=5))
def test_stored_conversations_come_back_as_they_were(texts: list[list[str]]) -> None:
    talks = [[{"role": "user", "content": text} for text in talk] for talk in texts]
    stored = ConversationStore(talks)
    assert [stored[i] for i in range(len(stored))] == talks


def test_the_model_answers_of_the_toy_world_are_right_and_others_are_not() -> None:
    for task in (tasks.load(name) for name in tasks.EVALUATIONS if name.startswith("toy_")):
        assert len(task)
        for row in range(0, len(task), 25):
            said = text_of(task.example(row)[-1]["content"])
            if task.kind == "choice":
                assert task.letters(row)[task.answer(row)] == said
                continue
            assert task.correct(row, said)
            assert not task.correct(row, "zzz")


MARKS = "#", "`", "~", ",", "$", " $", "<<", '\\"', '"', "\\", "####", "### ", "**", "- "
FILLINGS = " ", "\n", "\n\n", "9", "1,", "1e5", "a", *MARKS


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (FINAL, "####{}x"),
        (FINAL, "#### ${}x"),
        (FINAL, "#### **{}x"),
        (FINAL, "#### -{}x"),
        (FINAL, "#### ** $ - {}e5x"),
        (FINAL, "#### 1{}e5x"),
        (SIGNED, "-{}x"),
        (FINAL, "{}#### 1"),
        (CODE_BLOCK, "```{}`"),
        (CODE_BLOCK, "~~~{}~"),
        (rewards.NUMBER, "-{}-"),
        (rewards.BOXED, "\\boxed{}x"),
        (rewards.WORD, "\\{}"),
        (formats.TURN, "###{}x"),
        (formats.WRITTEN, "### {}x"),
        (formats.CALCULATION, "<<{}=1>"),
        (formats.CALCULATION, "<<1={}>"),
        (FINAL, "#### {}/{}x"),
        (rewards.NUMBER, "1/{}/"),
        (tables.BRACKET, '"{}'),
        (read.BETWEEN, "{}x"),
        (pairs.SPOKEN, "\n\n{}"),
    ],
)
def test_a_pattern_over_what_somebody_else_wrote_takes_linear_time(pattern: re.Pattern[str], text: str) -> None:
    began = time.process_time()
    for filling in FILLINGS:
        list(pattern.finditer(text.replace("{}", filling * (20_000 // len(filling)))))
    assert time.process_time() - began < 0.5, "a hundredth of what one of these takes in quadratic time"
