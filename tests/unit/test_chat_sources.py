"""What `mid` and `sft` read: each source once, parted into rows to train on and rows to validate on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendchat import tasks
from ascendchat.config.train import SftConfig
from ascendchat.data.chat import Conversation, Counts
from ascendchat.data.pack import ChatRows
from ascendchat.data.tokenizer import Tokenizer, train_tokenizer
from ascendchat.tasks.base import Task
from ascendchat.train.chat import VALIDATION, open_sources, report_overlaps, watch_for

EXAM = [{"question": f"Who is {n}?", "choices": [f"man {n}", "nobody"], "gold": 0} for n in range(9)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["who is the man? it is nobody, says the other."], 270)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """300 conversations, five of which are questions of the examination in tmp_path/eval."""
    (tmp_path / "eval" / "arc_easy").mkdir(parents=True)
    (tmp_path / "eval" / "arc_easy" / "test.jsonl").write_text("\n".join(map(json.dumps, EXAM)), encoding="utf-8")
    rows = [{"query": f"Who is {n}?", "response": f"man {n}" if n < 5 else "nobody"} for n in range(300)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def held_out(conversation: Conversation) -> bool:
    """The rule, once more: it must never change, or a resumed run would train on what it was validated on."""
    digest = hashlib.sha256(json.dumps(conversation, sort_keys=True).encode()).hexdigest()
    return int(digest[:8], 16) / 2**32 < VALIDATION


def same(a: ChatRows, b: ChatRows) -> bool:
    arrays = (np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "mask", "starts"))
    return all(arrays) and [row.tolist() for row in a.members] == [row.tolist() for row in b.members]


def test_a_source_is_read_once_and_parted_by_the_hash_of_each_conversation(
    chats: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SftConfig(data=(str(chats),), source=str(chats.parent / "eval"))
    every = list(tasks.load(str(chats), "train"))
    loaded: list[str] = []
    load = tasks.load

    def counted(name: str, *more: Any, **named: Any) -> Task:
        loaded.append(name)
        return load(name, *more, **named)

    monkeypatch.setattr(tasks, "load", counted)
    watch = watch_for(config)
    assert watch is not None
    ((rows, weight),), (validation,), _ = open_sources(config, "sft", tokenizer, 64, lambda line: None, watch)
    assert loaded.count(str(chats)) == 1
    assert isinstance(rows, ChatRows)
    assert weight == rows.per_epoch
    kept = [talk for talk in every if held_out(talk)]
    assert 0 < len(kept) < 20
    trained = [talk for talk in every if not held_out(talk)]
    assert same(rows, ChatRows.build(tokenizer, trained, 64, config.seed, Counts()))
    assert same(validation, ChatRows.build(tokenizer, kept, 64, config.seed, Counts()))
    assert [overlap.row for overlap in watch.found()] == [0, 1, 2, 3, 4]


def test_a_small_source_is_validated_on_its_first_conversation(
    chats: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    talks = [talk for talk in tasks.load(str(chats), "train") if not held_out(talk)][:3]
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), encoding="utf-8")
    said: list[str] = []
    ((rows, _),), (validation,), _ = open_sources(SftConfig(data=(str(few),)), "sft", tokenizer, 64, said.append)
    assert "too small to keep some for validation" in said[-1]
    assert isinstance(rows, ChatRows)
    assert same(rows, ChatRows.build(tokenizer, talks, 64, 0, Counts()))
    assert same(validation, ChatRows.build(tokenizer, talks[:1], 64, 0, Counts()))


def without_reply(held: bool) -> Conversation:
    """A conversation in which nobody answers, and which the hash does or does not pick for validation."""
    talks = ([{"role": "user", "content": f"nobody answers {n}"}] for n in range(10_000))
    return next(talk for talk in talks if held_out(talk) == held)


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_conversation_without_a_reply_never_validates_and_is_counted(
    chats: Path, tokenizer: Tokenizer, tmp_path: Path, validates: bool, first: bool
) -> None:
    every = [talk for talk in tasks.load(str(chats), "train")]
    talks = [talk for talk in every if not held_out(talk)][:3] + [talk for talk in every if held_out(talk)][:validates]
    empty = [without_reply(held=True), without_reply(held=False)]
    path, said = tmp_path / "some.jsonl", list[str]()
    lines = [json.dumps({"messages": talk}) for talk in ([*empty, *talks] if first else [*talks, *empty])]
    path.write_text("\n".join(lines), encoding="utf-8")
    ((rows, _),), (validation,), _ = open_sources(SftConfig(data=(str(path),)), "sft", tokenizer, 64, said.append)
    assert isinstance(rows, ChatRows)
    assert same(validation, ChatRows.build(tokenizer, talks[3:] or talks[:1], 64, 0, Counts()))
    assert "3 conversations whole" in said[0]
    assert "2 without a reply" in said[0]


def test_a_source_whose_only_conversation_is_picked_for_validation_is_trained_on_too(
    chats: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    talk = next(talk for talk in tasks.load(str(chats), "train") if held_out(talk))
    path, said = tmp_path / "one.jsonl", list[str]()
    path.write_text(json.dumps({"messages": talk}), encoding="utf-8")
    ((rows, _),), (validation,), _ = open_sources(SftConfig(data=(str(path),)), "sft", tokenizer, 64, said.append)
    assert isinstance(rows, ChatRows)
    assert same(rows, validation)
    assert "too small to keep some for validation" in said[-1]


def test_rows_that_were_left_out_are_said(chats: Path, tokenizer: Tokenizer) -> None:
    with chats.open("a", encoding="utf-8") as file:
        file.write("\n{broken")
    said: list[str] = []
    open_sources(SftConfig(data=(str(chats),)), "sft", tokenizer, 64, said.append)
    assert said[0].startswith("chats.jsonl: 1 of 301 rows cannot be read: line 301: ")


def test_overlaps_are_summed_up_and_all_are_in_a_file_when_not_all_are_shown(chats: Path, tmp_path: Path) -> None:
    watch = watch_for(SftConfig(data=(str(chats),), source=str(chats.parent / "eval")))
    assert watch is not None
    source, said = tasks.load(str(chats), "train"), list[str]()
    (tmp_path / "overlaps.txt").write_text("of an earlier run")
    for _ in watch.over(source[:3]):
        pass
    report_overlaps(watch, tmp_path, said.append)
    assert said[0] == "arc_easy: 3 of 9 test questions are in the mixture (chats train 3)"
    assert len(said) == 4
    assert not (tmp_path / "overlaps.txt").exists()
    for _ in watch.over(source):
        pass
    said.clear()
    report_overlaps(watch, tmp_path, said.append)
    assert said[0] == "arc_easy: 5 of 9 test questions are in the mixture (chats train 5)"
    assert len(said) == 5
    assert said[-1] == f"all 5 of them: {tmp_path / 'overlaps.txt'}"
    assert len((tmp_path / "overlaps.txt").read_text().splitlines()) == 5


def test_nothing_is_looked_for_without_a_folder_of_evaluations_or_conversations_of_ones_own(chats: Path) -> None:
    assert watch_for(SftConfig(data=(str(chats),))) is None
    assert watch_for(SftConfig(data=("toyworld=1",), source=str(chats.parent))) is None
