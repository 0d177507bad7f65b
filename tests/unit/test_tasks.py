"""Tasks on small tables of our own: readers, slices, mixtures, the check for leaks."""

from __future__ import annotations

import json
import lzma
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendchat import sandbox, tasks
from ascendchat.config import UserError
from ascendchat.data.chat import Conversation, render_choice, text_of
from ascendchat.data.fetch import fetch
from ascendchat.tasks.base import Mixture, Task
from ascendchat.tasks.choice import item
from ascendchat.tasks.dialog import Stored
from ascendchat.tasks.files import SPLIT, belongs
from ascendchat.tasks.gsm8k import final_number
from ascendchat.tasks.humaneval import HumanEval, code_of, pass_at_k


class Numbers(Task):
    """Row i asks for i + 1."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def __len__(self) -> int:
        return self.count

    def example(self, index: int) -> Conversation:
        return [
            {"role": "user", "content": f"What comes after {self.name} {index}?"},
            {"role": "assistant", "content": str(index + 1)},
        ]


def write_zip(path: Path, members: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every kind of table that the examinations are published in."""
    write_zip(
        tmp_path / "mmlu.zip",
        {
            "data/test/law_test.csv": '"Who, if any?",he,she,it,they,B\nWhen?,now,then,"1,2",never,C\n',
            "data/test/art_test.csv": "Why?,a,b,c,d,D\n",
            "data/dev/art_dev.csv": "How?,a,b,c,d,A\n",
        },
    )
    write_zip(
        tmp_path / "ceval.zip",
        {
            "val/law_val.csv": "id,question,A,B,C,D,answer\n0,何时____。,一,二,三,四,C\n",
            "test/law_test.csv": "id,question,A,B,C,D\n0,何时____。,一,二,三,四\n",
        },
    )
    write_zip(tmp_path / "cmmlu.zip", {"test/law.csv": "\ufeff,Question,A,B,C,D,Answer\n0,谁?,甲,乙,丙,丁,A\n"})
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


@pytest.mark.parametrize(
    ("path", "split", "right"),
    [
        ("data/mmlu/all/test-00000-of-00001.parquet", "test", True),
        ("data/mmlu/all/auxiliary_train-00000.parquet", "train", True),
        ("my_test/mmlu.zip/data/dev/law_dev.csv", "test", False),  # the folder that was given says nothing
        ("x/test/mmlu.zip/data/dev/law_dev.csv", "test", False),  # and what the file says counts more than its folder
        ("x/test/mmlu/law.csv", "test", True),
        ("x/contest/mmlu/latest.csv", "test", False),
    ],
)
def test_the_split_of_a_file_is_told_by_its_name(path: str, split: str, right: bool) -> None:
    assert belongs(path, path.index("/mmlu"), SPLIT[split]) is right


def test_the_hub_format_of_arc_has_labels_of_its_own() -> None:
    row = {"question": "x", "choices": {"text": ["p", "q", "r"], "label": ["1", "2", "3"]}, "answerKey": "3"}
    assert item(row).answer == 2
    with pytest.raises(ValueError):
        item({**row, "answerKey": "D"})


def test_a_fetched_set_is_read_where_fetch_put_it(folder: Path) -> None:
    fetch("mmlu", source=str(folder))
    for path in folder.glob("*.zip"):
        path.unlink()
    assert len(tasks.load("mmlu")) == 3


def test_tables_of_the_hub_are_read_from_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = {
        "mmlu/all/test-00000-of-00001.parquet": {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 3},
        "mmlu/all/dev-00000-of-00001.parquet": {"question": "other", "choices": ["a", "b", "c", "d"], "answer": 0},
        "arc/ARC-Easy/test-00000-of-00001.parquet": {
            "question": "e", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B",
        },
        "gsm8k/main/train-00000-of-00001.parquet": {"question": "g", "answer": "<<1+1=2>>2 #### 2"},
    }  # fmt: skip
    for name, row in rows.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    for source in (tmp_path, tmp_path / "mmlu"):
        mmlu = tasks.load("mmlu", source=str(source))
        assert [(mmlu.question(i), mmlu.answer(i)) for i in range(len(mmlu))] == [("q", 3)]
    assert tasks.load("arc_easy", source=str(tmp_path)).answer(0) == 1
    assert tasks.load("gsm8k", "train", str(tmp_path)).correct(0, "#### 2")


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


@pytest.mark.parametrize("name", ["arc_challenge", "humaneval"])
def test_a_set_that_is_not_there_is_an_error_that_says_how_to_get_it(name: str, folder: Path) -> None:
    with pytest.raises(UserError, match="ascendchat data fetch"):
        tasks.load(name, source=str(folder))


def test_names_splits_and_damaged_archives_are_refused_with_a_hint(folder: Path) -> None:
    with pytest.raises(UserError, match="did you mean mmlu"):
        tasks.load("mmluu")
    with pytest.raises(UserError, match="splits val, dev"):
        tasks.load("ceval", "test", str(folder))
    (folder / "mmlu.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match="damaged"):
        tasks.load("mmlu", source=str(folder))


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
    assert gsm8k.correct(0, text_of(content))
    for reply, right in {
        "#### 24": True, "#### 24.00": True, "#### $24": True, "####24.": True, "first #### 3 then #### 24": True,
        "24": False, "#### 25": False, "#### 2,4,0": False, "####": False, "#### -24": False, "": False,
    }.items():  # fmt: skip
        assert gsm8k.correct(0, reply) is right, reply
    assert final_number("#### 1,234,567") == 1234567


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
        ("1. So:\n   ```python\n   import re\n\n   def f():\n       return 1\n   ```\n2. Done.",
         "import re\n\ndef f():\n    return 1\n"),
        ("- ```python\n  def f():\n      return 1\n  ```", "def f():\n    return 1\n"),
        ("```python\n    import math\n    return math.pi\n```", "    import math\n    return math.pi\n"),
        ("Here: ```python\nx = 1\n```", "x = 1\n"),
        ("Use ```x``` or `y`:\n```\nx = 1\n```", "x = 1\n"),
        ("```rust\nlet x = 1;\n```", "let x = 1;\n"),
    ],
)  # fmt: skip
def test_the_code_of_a_reply_is_the_block_that_defines_the_function(reply: str, code: str) -> None:
    assert code_of(reply, "f").rstrip(" ") == code


@pytest.fixture
def humaneval(tmp_path: Path) -> HumanEval:
    row = {"task_id": "HumanEval/0", "prompt": "import math\n\ndef f(x):\n    \"\"\"Twice.\"\"\"\n", "entry_point": "f",
           "canonical_solution": "    return 2 * x\n", "test": "def check(f):\n    assert f(2) == 4\n"}  # fmt: skip
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return HumanEval(source=str(tmp_path))


def test_right_programs_are_right_however_they_are_wrapped(humaneval: HumanEval) -> None:
    for reply in (
        "```python3\ndef f(x):\n    return 2 * x\n```\nIt doubles.",
        "```bash\npython f.py\n```\n```python\ndef f(x):\n    return 2 * x\n```",
        "1. So:\n\n   ```python\n   def f(x):\n       return 2 * x\n   ```\n",
        "```python\n    return 2 * x\n```",
    ):
        assert humaneval.correct(0, reply), humaneval.program(0, reply)
    assert not humaneval.correct(0, "```python\ndef f(x):\n    return 3 * x\n```")
    assert humaneval.sandbox_failed == []


def test_programs_that_the_sandbox_did_not_run_are_counted(
    humaneval: HumanEval, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = sandbox.Result(False, "", "", "sandbox", "no")
    monkeypatch.setattr(sandbox, "run", lambda *args, **way: failed)
    assert not humaneval.correct(0, "")
    assert humaneval.sandbox_failed == [0]


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer() -> None:
    from itertools import combinations

    for samples in range(1, 7):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(combinations([True] * right + [False] * (samples - right), k))
                assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError):
        pass_at_k(3, 1, 4)


def test_slices_take_rows_by_start_stop_and_step() -> None:
    part = Numbers("n", 10)[2:9:3]
    assert [part.example(i)[-1]["content"] for i in range(len(part))] == ["3", "6", "9"]
    assert len(Numbers("n", 10)[:4][1:]) == 3
    assert Numbers("n", 10)[::-1].question(0) == "What comes after n 9?"


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.3, 0.5, 1.0, 2.0, 2.5])), min_size=1, max_size=4))
def test_an_epoch_of_a_mixture_holds_each_task_by_its_weight(parts: list[tuple[int, float]]) -> None:
    mixture = Mixture([(Numbers(str(i), rows), weight) for i, (rows, weight) in enumerate(parts)], seed=1)
    for epoch in (0, 1, 5):
        counts = Counter(mixture.order(epoch))
        for number, (rows, weight) in enumerate(parts):
            own = [counts[number, row] for row in range(rows)]
            assert sum(own) == max(1, round(rows * weight))
            assert max(own) - min(own) <= 1
        assert len(mixture.order(epoch)) == len(mixture)


def test_a_mixture_is_a_pure_function_of_seed_and_epoch_and_shows_all_rows_in_time() -> None:
    parts: list[tuple[Task, float]] = [(Numbers("a", 20), 0.25), (Numbers("b", 7), 1.0)]
    one, two = Mixture(parts, seed=3), Mixture(parts, seed=3)
    late = two.order(5)
    assert [one.order(e) for e in range(6)][5] == late
    assert one.order(0) != one.order(1)
    assert Mixture(parts, seed=4).order(0) != one.order(0)
    seen = {row for epoch in range(4) for number, row in one.order(epoch) if number == 0}
    assert seen == set(range(20))  # a quarter in each of four epochs: all of them
    assert one.example(len(one) + 2) == parts[one.order(1)[2][0]][0].example(one.order(1)[2][1])
    assert "a" in one.lines()[0]


def test_a_recipe_lists_a_mixture(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{{{{name}}}} {i}?"}, {"role": "assistant", "content": "yes"}]}
            for i in range(6)]  # fmt: skip
    talk.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    made = tasks.mixture([{"task": str(talk), "weight": 2, "stop": 4, "slots": {"name": "Ada"}}], seed=1)
    assert len(made) == 8
    assert made.parts[0][0].example(3)[0]["content"] == "Ada 3?"
    for wrong, match in [
        ({"task": str(talk), "wieght": 2}, "did you mean weight"),
        ({"weight": 2}, "needs a task"),
        ({"task": str(talk), "weight": "much"}, "numbers"),
        ({"task": str(talk), "weight": 0}, "above 0"),
        ({"task": "nothing-like-this"}, "neither a task nor a file"),
    ]:
        with pytest.raises(UserError, match=match):
            tasks.mixture([wrong])
    with pytest.raises(UserError, match="at least one"):
        tasks.mixture([])


def test_places_that_nobody_fills_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    path.write_text(json.dumps([{"instruction": "who?", "output": "{{name}} of {{town}}"}]), encoding="utf-8")
    with pytest.raises(UserError, match="town"):
        tasks.load(str(path))
    assert tasks.load(str(path), slots={"town": "Ulm"}).example(0)[1]["content"] == "Ascend Chat of Ulm"


def test_a_folder_of_conversations_is_read_by_split(tmp_path: Path) -> None:
    for name, count in (("train-00000", 3), ("train-00001", 2), ("test-00000", 1)):
        rows = [json.dumps({"query": f"{name} {i}", "response": "ok"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert len(tasks.load(str(tmp_path), "train")) == 5
    assert len(tasks.load(str(tmp_path), "test")) == 1


@given(st.lists(st.lists(st.text(), min_size=1, max_size=3), max_size=5))
def test_stored_conversations_come_back_as_they_were(texts: list[list[str]]) -> None:
    talks = [[{"role": "user", "content": text} for text in talk] for talk in texts]
    stored = Stored(talks)
    assert [stored[i] for i in range(len(stored))] == talks


@pytest.mark.parametrize("name", [name for name in tasks.EVALUATIONS if name.startswith("toy_")] + ["toy_problems"])
def test_the_model_answers_of_the_toy_world_are_right_and_others_are_not(name: str) -> None:
    task = tasks.load(name)
    assert len(task)
    for row in range(0, len(task), 7):
        said = text_of(task.example(row)[-1]["content"])
        if task.kind == "choice":
            assert task.letters(row)[task.answer(row)] == said
        else:
            assert task.correct(row, said)
            assert not task.correct(row, "zzz")
