"""dataset_info.json of LLaMA-Factory: `--data NAME --dataset-dir DIR`, for conversations and for pairs."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest

from ascendchat.config.finetune import FinetuneConfig
from ascendchat.data.chat.dataset_info import INFO, listed_data
from ascendchat.data.chat.formats import conversations
from ascendchat.data.chat.pairs import Pair
from ascendchat.data.chat.tables import TABLE_TYPES, RowBudget
from ascendchat.errors import UserError, home
from ascendchat.tasks.by_name import knows, load
from ascendchat.tasks.pair_mixture import read_pairs
from ascendchat.train.finetune import located

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM, BAD = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "go away"}

TAGS = {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A"}
# name -> (entry without its file_name, a row); each is SYSTEM, USER, REPLY
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"instruction": "hi", "input": "", "output": "hello", "system": "be brief"}),
    "renamed": (
        {"columns": {"prompt": "ask", "response": "say", "system": "rules"}},
        {"ask": "hi", "input": "not named, so not used", "say": "hello", "rules": "be brief"},
    ),
    "sharegpt": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "be brief"},
    ),
    "tagged": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "system": "rules"},
            "tags": TAGS,
        },
        {"talk": [{"who": "U", "what": "hi"}, {"who": "A", "what": "hello"}], "rules": "be brief"},
    ),
    "openai": ({"formatting": "openai", "columns": {"messages": "messages"}}, {"messages": [SYSTEM, USER, REPLY]}),
}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alpaca pairs": (
        {"columns": {"prompt": "question", "chosen": "good", "rejected": "bad", "system": "rules"}},
        {"question": "hi", "good": "hello", "bad": "go away", "rules": "be brief"},
    ),
    "sharegpt pairs": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "system": "system"},
        },
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "hello"},
            "rejected": {"from": "gpt", "value": "go away"},
            "system": "be brief",
        },
    ),
    "tagged pairs": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "chosen": "chosen", "rejected": "rejected"},
            "tags": {**TAGS, "system_tag": "S"},
        },
        {
            "talk": [{"who": "S", "what": "be brief"}, {"who": "U", "what": "hi"}],
            "chosen": {"who": "A", "what": "hello"},
            "rejected": {"who": "A", "what": "go away"},
        },
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as LLaMA-Factory's `data`, with a file for each set above, some packed, and other entries."""
    info: dict[str, Any] = {}
    for number, (name, (entry, row)) in enumerate({**SETS, **PAIRS}.items()):
        file = f"set{number}.json"
        text = json.dumps([row, row])
        if number % 2:
            (tmp_path / f"{file}.xz").write_bytes(lzma.compress(text.encode()))
        else:
            (tmp_path / file).write_text(text, encoding="utf-8")
        info[name] = {"file_name": file, **entry, **({"ranking": True} if name in PAIRS else {})}
    (tmp_path / "mllm.json").write_text("[]", encoding="utf-8")
    info["mllm_demo"] = {"file_name": "mllm.json", "columns": {"messages": "messages", "images": "images"}}
    info["kto_demo"] = {"file_name": "mllm.json", "columns": {"kto_tag": "label"}}
    info["far"] = {"hf_hub_url": "someone/far-away", "ms_hub_url": "someone/far-away"}
    info["gone"] = {"file_name": "gone.json"}
    info["few"] = {"file_name": "set0.json", "num_samples": 1}
    (tmp_path / INFO).write_text(json.dumps(info), encoding="utf-8")
    return tmp_path


def test_every_kind_of_entry_gives_the_same_conversation(folder: Path) -> None:
    for name in SETS:
        (entry,) = listed_data([name], str(folder), knows)
        assert list(load(entry)) == [[SYSTEM, USER, REPLY]] * 2, name


def test_every_kind_of_ranking_entry_gives_the_same_pair_and_sft_its_chosen_reply(folder: Path) -> None:
    for name in PAIRS:
        assert list(read_pairs(str(folder / name), print)) == [Pair([SYSTEM, USER], [REPLY], [BAD])] * 2, name
        assert list(load(str(folder / name))) == [[SYSTEM, USER, REPLY]] * 2, name


def test_a_folder_stands_for_all_sets_of_the_kind_that_is_wanted(folder: Path) -> None:
    assert len(load(str(folder))) == 2 * len(SETS) + 1
    assert len(list(read_pairs(str(folder), print))) == 2 * len(PAIRS)
    assert len(load(str(folder / "few"))) == 1


def test_messages_of_an_openai_entry_may_have_calls_and_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    tags = {"role_tag": "who", "content_tag": "what"}
    named = [
        {"who" if key == "role" else "what" if key == "content" else key: value for key, value in said.items()}
        for said in (USER, call, {"role": "tool", "content": "4"}, REPLY)
    ]
    entry = {"file_name": "a.json", "formatting": "openai", "tags": tags, "columns": {"messages": "m", "tools": "t"}}
    pairs = {**entry, "file_name": "b.json", "ranking": True}
    (tmp_path / "a.json").write_text(json.dumps([{"m": named, "t": '[{"name": "f"}]'}]), encoding="utf-8")
    row = {"m": named[:1], "chosen": named[1], "rejected": named[3]}
    (tmp_path / "b.json").write_text(json.dumps([row]), encoding="utf-8")
    (tmp_path / INFO).write_text(json.dumps({"a": entry, "b": pairs}), encoding="utf-8")
    (found,) = load(str(tmp_path / "a"))
    part = {"type": "tool", "text": '{"name": "f", "arguments": {}}'}
    system = {"role": "system", "content": 'You can call these tools:\n[{"name": "f"}]'}
    called = {"role": "assistant", "content": [part]}
    assert found == [system, USER, called, {"role": "tool", "content": "4"}, REPLY]
    assert list(read_pairs(str(tmp_path / "b"), print)) == [Pair([USER], [called], [REPLY])]


def test_num_samples_counts_the_rows_of_all_files_of_a_set(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    row = {"instruction": "hi", "output": "hello", "chosen": "hello", "rejected": "go away"}
    for part in "ab":
        rows = [{**row, "instruction": part}] * 2
        (tmp_path / "parts" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for samples, wanted in ((1, "a"), (2, "aa"), (3, "aab"), (9, "aabb")):
        entry = {"file_name": "parts", "num_samples": samples}
        info = {"talk": entry, "pairs": {**entry, "ranking": True}}
        (tmp_path / INFO).write_text(json.dumps(info), encoding="utf-8")
        assert [talk[0]["content"] for talk in load(str(tmp_path / "talk"))] == [*wanted]
        assert [pair.prompt[0]["content"] for pair in read_pairs(str(tmp_path / "pairs"), print)] == [*wanted]


def test_names_keep_their_weights_and_other_data_stays_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    given = ["plain=2", "toyworld=1", "gsm8k", str(folder / "set0.json"), f"{folder.name}/tagged"]
    found = listed_data(given, folder.name, knows)
    assert found == (f"{folder}/plain=2", "toyworld=1", "gsm8k", str(folder / "set0.json"), str(folder / "tagged"))
    assert listed_data(["plain"], "", knows) == ("plain",)


def test_finetune_looks_in_the_data_folder_of_llama_factory(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is one; its names win over ours, and that is said."""
    work, said = tmp_path_factory.mktemp("llama_factory"), list[str]()
    shutil.copytree(folder, work / "data")
    info = json.loads((folder / INFO).read_text(encoding="utf-8"))
    (work / "data" / INFO).write_text(json.dumps({**info, "identity": info["plain"]}), encoding="utf-8")
    monkeypatch.chdir(work)

    def found(*names: str, dataset_dir: str = "") -> tuple[str, ...]:
        return located(names, FinetuneConfig(dataset_dir=dataset_dir), said.append)

    data = work / "data"
    for given in ("", "data"):
        assert found("identity=2", "tagged", "toyworld=1", dataset_dir=given) == (
            f"{data}/identity=2",
            str(data / "tagged"),
            "toyworld=1",
        )
        assert list(load(str(data / "identity"))) == [[SYSTEM, USER, REPLY]] * 2
        assert said == [f"identity: as {Path('data') / INFO} has it, not the set of `ascendchat data fetch identity`"]
        said.clear()
    with pytest.raises(UserError, match="did you mean tagged"):
        found("taged")
    assert listed_data(["identity"], "", knows) == ("identity",), "the commands for our own models keep our names"


def test_without_a_folder_of_llama_factory_the_name_is_ours_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    ours = ["identity: the set of `ascendchat data fetch identity`; that of LLaMA-Factory: --dataset-dir DIR"]
    assert located(("identity", "gsm8k"), FinetuneConfig(), said.append) == ("identity", "gsm8k")
    assert said == ours
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / INFO).write_text('{"features": {}, "splits": {}, "builder_name": "json"}')  # of `datasets`
    assert located(("identity",), FinetuneConfig(), said.append) == ("identity",)
    assert said == ours * 2
    (tmp_path / "data" / INFO).write_text("{broken")
    with pytest.raises(UserError, match="is not valid JSON"):
        located(("identity",), FinetuneConfig(), said.append)
    (tmp_path / "identity").mkdir()  # what is there by its path needs no name
    assert located(("toyworld",), FinetuneConfig(dataset_dir=str(tmp_path / "identity")), said.append) == ("toyworld",)


def test_what_cannot_be_read_is_refused_with_the_next_step(folder: Path) -> None:
    for name, said in {
        "mllm_demo": "has the column images, and only text",
        "kto_demo": "has the column kto_tag",
        "far": "is on a hub; fetch it first: ascendchat data fetch someone/far-away",
        "gone": "which is not there; put it there",
        "plian": "lists no 'plian'; did you mean plain",
    }.items():
        with pytest.raises(UserError, match=said):
            list(load(str(folder / name)))


def test_an_entry_of_another_form_is_named(folder: Path) -> None:
    for name, value, form in (
        ("columns", ["prompt"], "an object"),
        ("tags", "role", "an object"),
        ("formatting", ["alpaca"], "a text"),
        ("num_samples", "many", "a whole number"),
    ):
        (folder / INFO).write_text(json.dumps({"odd": {"file_name": "set0.json", name: value}}), encoding="utf-8")
        for path in (folder, folder / "odd"):
            with pytest.raises(UserError, match=f"{name} of odd must be {form}"):
                list(load(str(path)))


def test_a_name_that_nobody_knows_is_answered_with_the_nearest_of_the_folder(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has no 'sharegp'; did you mean sharegpt"):
        listed_data(["sharegp"], str(folder), knows)
    with pytest.raises(UserError, match="nowhere is not a folder"):
        listed_data(["sharegpt"], str(folder / "nowhere"), knows)


def test_files_of_a_folder_without_a_registry_are_found_by_their_names(folder: Path) -> None:
    (folder / INFO).unlink()
    found = listed_data(["set0=2", "set1", "set2.json", "toyworld"], str(folder), knows)
    assert found == (f"{folder}/set0.json=2", f"{folder}/set1.json.xz", f"{folder}/set2.json", "toyworld")
    with pytest.raises(UserError, match=r"has no 'set99'"):
        listed_data(["set99"], str(folder), knows)


def test_a_set_of_a_hub_is_read_once_it_is_fetched(folder: Path) -> None:
    place = home() / "data" / "someone--far-away"
    place.mkdir(parents=True)
    (place / "train.jsonl").write_text(json.dumps({"instruction": "hi", "output": "hello"}), encoding="utf-8")
    assert list(load(str(folder / "far"))) == [[USER, REPLY]]


def test_a_row_that_does_not_fit_the_registry_is_named_with_its_line(folder: Path) -> None:
    rows: list[Any] = [{"talk": [{"who": "U", "what": "hi"}, {"who": "A", "what": "hello"}]}] * 200
    rows[41] = {"talk": [{"who": "U"}]}
    rows[50] = {"words": []}
    (folder / "set3.json.xz").unlink()
    (folder / "set3.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = load(str(folder / "tagged"))
    assert len(task) == 198
    assert list(task.notices) == [
        "set3.json: 2 of 200 rows cannot be read: line 42: the column 'what' is missing; line 51: the column 'talk' "
        "is missing; left out"
    ]


def test_all_files_of_the_real_sets_are_read_without_a_script(real_data: Path) -> None:
    """The first rows of each."""
    files = sorted(path for path in (real_data / "sft").rglob("*") if path.is_file())
    assert len(files) >= 24
    for path in files:
        assert any(kind in path.name for kind in TABLE_TYPES), f"{path.name} has no format that is known"
        found = list(conversations(path, limit=RowBudget(40)))
        assert len(found) >= 40
        assert all(talk[-1]["role"] == "assistant" or talk[-1]["role"] == "tool" for talk in found), path.name
