"""What `mid` and `sft` read: each entry of --data once, split into rows to train on and rows to validate on."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendchat.data import toyworld
from ascendchat.data.chat.render import Conversation, Counts
from ascendchat.data.chat.rows import ChatRows
from ascendchat.data.corpus import Corpus, TextRows
from ascendchat.data.mixture import write_mixture
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.errors import UserError
from ascendchat.tasks import by_name as tasks
from ascendchat.tasks.chat_mixture import DEFAULT_HELD_OUT, ChatMixture, default_data, open_chat_mixture, overlap_finder
from ascendchat.tasks.contamination import report_overlaps
from ascendchat.tasks.task import Task

EXAM = [{"question": f"Who is {n}?", "choices": [f"man {n}", "nobody"], "gold": 0} for n in range(9)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The smallest that knows these words."""
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
    return int(digest[:8], 16) / 2**32 < DEFAULT_HELD_OUT


def same(a: ChatRows, b: ChatRows) -> bool:
    arrays = (np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "mask", "starts"))
    return all(arrays) and [row.tolist() for row in a.members] == [row.tolist() for row in b.members]


def opened(tokenizer: Tokenizer, *data: str, source: str = "", said: list[str] | None = None) -> ChatMixture:
    say = (lambda line: None) if said is None else said.append
    return open_chat_mixture(data, "sft", tokenizer, 64, source=source, say=say)


def rows_of(mixture: ChatMixture) -> tuple[ChatRows, ChatRows]:
    """Of a mixture of one entry: the rows to train on, and those to validate on."""
    ((rows, weight),), (validation,) = mixture.sources, mixture.validation
    assert isinstance(rows, ChatRows)
    assert weight == rows.per_epoch == mixture.per_epoch
    return rows, validation


def test_an_entry_is_read_once_and_split_by_the_hash_of_each_conversation(
    chats: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(tasks.load(str(chats), "train"))
    loaded: list[str] = []

    def counted(name: str, *more: Any, **named: Any) -> Task:
        loaded.append(name)
        return tasks.load(name, *more, **named)

    monkeypatch.setattr("ascendchat.tasks.chat_mixture.load", counted)
    mixture = opened(tokenizer, str(chats), source=str(chats.parent / "eval"))
    rows, validation = rows_of(mixture)
    assert loaded.count(str(chats)) == 1
    kept = [talk for talk in every if held_out(talk)]
    assert 0 < len(kept) < 20
    trained = [talk for talk in every if not held_out(talk)]
    assert same(rows, ChatRows.build(tokenizer, trained, 64, 0, Counts()))
    assert same(validation, ChatRows.build(tokenizer, kept, 64, 0, Counts()))
    assert mixture.overlaps is not None
    assert [overlap.row for overlap in mixture.overlaps.overlaps()] == [0, 1, 2, 3, 4]
    assert mixture.facts == [hashlib.sha256(rows.ids.tobytes()).hexdigest()[:16], rows.per_epoch]
    assert opened(tokenizer, str(chats)).overlaps is None


def test_a_small_source_is_validated_on_its_first_conversation_with_a_reply(
    chats: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    every = list(tasks.load(str(chats), "train"))
    few, picked = [talk for talk in every if not held_out(talk)][:3], next(talk for talk in every if held_out(talk))
    silent = [[{"role": "user", "content": f"nobody answers {n}"}] for n in range(2000)]
    silent = [next(talk for talk in silent if held_out(talk) == held) for held in (True, False)]
    small = "too small to keep some for validation"
    for talks, trained, validated in (
        (few, few, few[:1]),
        ([picked], [picked], [picked]),
        ([*silent, *few], few, few[:1]),
        ([*few, picked, *silent], few, [picked]),
    ):
        path, said = tmp_path / "few.jsonl", list[str]()
        path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), encoding="utf-8")
        rows, validation = rows_of(opened(tokenizer, str(path), said=said))
        assert same(rows, ChatRows.build(tokenizer, trained, 64, 0, Counts()))
        assert same(validation, ChatRows.build(tokenizer, validated, 64, 0, Counts()))
        assert (small in said[-1]) == (validated == trained[:1])
        assert f"{len(trained)} conversations whole" in said[0]
        assert f"{2 * (silent[0] in talks)} without a reply" in said[0]


def test_overlaps_are_summed_up_and_all_are_in_a_file_when_not_all_are_shown(chats: Path, tmp_path: Path) -> None:
    finder = overlap_finder([str(chats)], str(chats.parent / "eval"))
    assert finder is not None
    said: list[str] = []
    (tmp_path / "overlaps.txt").write_text("of an earlier run")
    report_overlaps(None, tmp_path, said.append)
    assert not said
    assert not (tmp_path / "overlaps.txt").exists()
    passed = finder.over(tasks.load(str(chats), "train"))
    list(itertools.islice(passed, 3))
    report_overlaps(finder, tmp_path, said.append)
    assert said[0] == "arc_easy: 3 of 9 test questions are in the mixture (chats train 3)"
    assert len(said) == 4
    assert not (tmp_path / "overlaps.txt").exists()
    list(passed)
    said.clear()
    report_overlaps(finder, tmp_path, said.append)
    assert said[0] == "arc_easy: 5 of 9 test questions are in the mixture (chats train 5)"
    assert len(said) == 5
    assert said[-1] == f"all 5 of them: {tmp_path / 'overlaps.txt'}"
    assert len((tmp_path / "overlaps.txt").read_text().splitlines()) == 5


def test_an_evaluation_that_cannot_be_read_is_named_where_its_questions_are_looked_for(
    chats: Path, tmp_path: Path
) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "1+1?"}\n', encoding="utf-8")
    said: list[str] = []
    assert overlap_finder([str(chats)], str(tmp_path), said.append) is not None
    [line] = said
    assert line.startswith("questions of gsm8k are not looked for in the training data: gsm8k: test.jsonl, line 1 is")


def test_nothing_is_looked_for_without_a_folder_of_evaluations_or_conversations_of_ones_own(chats: Path) -> None:
    assert overlap_finder([str(chats)], "") is None
    assert overlap_finder(["toyworld"], str(chats.parent)) is None


@pytest.fixture
def words(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """A folder as `data prepare --weights` writes it: one corpus with a validation split and one without."""
    tokenizer.save(tmp_path / "tokenizer")
    lines = [json.dumps({"text": f"who is {n}? nobody."}) for n in range(80)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for name, fraction in (("a", 0.2), ("b", 0.0)):
        source, out = str(tmp_path / "words.jsonl"), tmp_path / "words" / name
        prepare([source], tmp_path / "tokenizer", out, val_fraction=fraction, workers=1)
    write_mixture(tmp_path / "words", [("a", 1.0), ("b", 3.0)])
    return tmp_path / "words"


def test_text_and_conversations_are_mixed_by_weight(
    chats: Path, words: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = toyworld.chats
    monkeypatch.setattr(toyworld, "chats", lambda *given, **more: itertools.islice(talks(*given, **more), 50))
    mixture = opened(tokenizer, f"{words}=0.5", f"{chats}=0.25", "toyworld=0.25")
    kinds = [(type(rows), weight) for rows, weight in mixture.sources]
    assert kinds == [(TextRows, 0.125), (TextRows, 0.375), (ChatRows, 0.25), (ChatRows, 0.25)]
    assert len(mixture.validation) == 2  # of the conversations
    assert [text.fingerprint for text in mixture.texts] == [Corpus.open(words / "a", "val").fingerprint]
    assert mixture.facts[1:] == [0.125, 0.375, 0.25, 0.25]
    assert mixture.facts[0] != opened(tokenizer, f"{words}=0.5", f"{chats}=0.25").facts[0]
    with pytest.raises(UserError, match="every entry of --data a weight, or none"):
        opened(tokenizer, str(words), str(chats))
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        opened(train_tokenizer(["a quite other text"], 270), str(words / "a"))


def test_without_data_a_model_of_the_embedded_world_stays_there_and_others_take_published_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    assert default_data("sft", ["/somewhere/data/toyworld=1"], "") == ("toyworld",)
    for learnt in ([], ["/somewhere/data/toyworld", "/somewhere/wiki"]):
        with pytest.raises(UserError, match="ascendchat data fetch smoltalk mmlu"):
            default_data("mid", learnt, "")
        assert "smoltalk" in default_data("mid", learnt, source=str(tmp_path))
