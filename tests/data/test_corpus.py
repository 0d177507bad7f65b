"""Rows use every token exactly once per epoch, damage is named."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.data.corpus import (
    FORMAT,
    Corpus,
    TextRows,
    cut_long_documents,
    evaluation_rows,
    pack_documents,
    shuffled,
)
from ascendchat.data.prepare import write_shard
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE

BOS = 0


def store(folder: Path, shards: list[list[list[int]]], dtype: str = "uint16", split: str = "train") -> Path:
    """A prepared folder that holds these documents (token ids without bos), shard by shard."""
    folder.mkdir(exist_ok=True)
    about: dict = {"documents": 0, "tokens": 0, "text_bytes": 0, "parts": []}
    files: dict = {}
    for number, documents in enumerate(shards):
        name = f"{split}-{number:016x}-00000"
        tokens = np.concatenate([[BOS, *document] for document in documents]).astype(dtype)
        files |= write_shard(folder, name, tokens, [len(document) + 1 for document in documents], BOS)
        about["parts"].append(name)
        about["documents"] += len(documents)
        about["tokens"] += len(tokens)
        about["text_bytes"] += 3 * (len(tokens) - len(documents))
    manifest = {
        "format": FORMAT,
        "tokenizer": "t",
        "vocab_size": 70_000 if dtype == "uint32" else 1000,
        "bos": BOS,
        "dtype": dtype,
        "splits": {split: about},
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def numbered(lengths: list[int], first: int = 1) -> list[list[int]]:
    """Documents whose tokens are all different, so that a token says where it came from."""
    edges = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


def corpus_of(lengths: list[list[int]], folder: Path) -> tuple[Corpus, list[list[int]]]:
    flat = numbered([n for shard in lengths for n in shard])
    left = iter(flat)
    return Corpus.open(store(folder, [[next(left) for _ in shard] for shard in lengths], "uint32")), flat


LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=25), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 2**63), st.integers(0, 3))
def test_the_rows_of_an_epoch_hold_the_documents_exactly(
    lengths: list[list[int]], seq_len: int, seed: int, epoch: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, documents = corpus_of(lengths, Path(folder))
        rows = TextRows(corpus, seq_len, seed)
        following = {a: b for document in documents for a, b in zip(document, [*document[1:], BOS])}
        opening = {BOS: {document[0] for document in documents}}
        seen: list[int] = []
        pieces: list[list[int]] = []
        padding = 0
        for row in range(rows.per_epoch):
            inputs, targets = np.full(seq_len, -7), np.full(seq_len, -7)
            parts, _ = rows.fill(epoch * rows.per_epoch + row, inputs[None], targets[None])
            assert parts.sum() == seq_len
            for piece, goal in zip(np.split(inputs, np.cumsum(parts)[:-1]), np.split(targets, np.cumsum(parts)[:-1])):
                if (goal == IGNORE).any():
                    assert (goal == IGNORE).all()
                    assert (piece == BOS).all()
                    padding += len(piece)
                    continue
                pieces.append(piece.tolist())
                seen += piece.tolist()
                for token, target in zip(piece.tolist(), goal.tolist()):
                    assert target == following[token] if token != BOS else target in opening[BOS]
        # Every piece is a run of one document; sorted by their last token the pieces concatenate to the documents.
        assert padding == rows.per_epoch * seq_len - corpus.tokens
        assert padding < seq_len
        whole = [token for document in documents for token in [BOS, *document]]
        assert sorted(seen) == sorted(whole)
        nonzero = sorted((p for p in pieces if p != [BOS]), key=lambda p: p[-1])
        lone = sum(p == [BOS] for p in pieces)  # a row may end after the bos of a document
        assert [t for p in nonzero for t in p if t != BOS] == [t for t in whole if t != BOS]
        assert sum(p[0] == BOS for p in nonzero) + lone == len(documents)
        assert all(BOS not in p[1:] for p in nonzero)


def test_most_rows_begin_with_a_document_and_no_more_documents_are_cut_than_by_concatenation(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 1, 3000).astype(int) + 1
    corpus, _ = corpus_of([lengths.tolist()], tmp_path)
    rows = TextRows(corpus, 512, seed=1)
    packing = rows.packing(0)
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    aligned = np.isin(packing.position[packing.first[:-1]], starts).mean()
    plain = np.isin(np.arange(0, corpus.tokens, 512), starts).mean()
    assert plain < 0.05
    assert aligned > 0.9
    assert (packing.position >= 0).sum() - corpus.documents <= rows.per_epoch


@settings(deadline=None, max_examples=50)
@given(LENGTHS, st.integers(1, 40))
def test_evaluation_covers_every_token_of_text_once(lengths: list[list[int]], seq_len: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, documents = corpus_of(lengths, Path(folder))
        rows = list(evaluation_rows(corpus, seq_len))
        targets = np.concatenate([t for _, t in rows])
        assert targets[targets != IGNORE].tolist() == [token for document in documents for token in document]
        stream = [token for document in documents for token in [BOS, *document]]
        assert np.concatenate([i for i, _ in rows])[: len(stream) - 1].tolist() == stream[:-1]
        assert all(len(i) == len(t) == seq_len for i, t in rows)


def test_a_missing_or_short_file_is_found_and_named(tmp_path: Path) -> None:
    folder = store(tmp_path, [numbered([50])])
    corpus = Corpus.open(folder)
    assert (corpus.token_dtype, corpus.tokens, corpus.documents, corpus.text_bytes) == (np.dtype("<u2"), 51, 1, 150)
    path = next(folder.glob("*.tokens"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"\.tokens has 102 bytes instead of 104"):
        Corpus.open(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"\.tokens is missing"):
        Corpus.open(folder)


def test_a_folder_that_is_not_prepared_says_how_to_prepare_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ascendchat data prepare --source"):
        Corpus.open(tmp_path)
    with pytest.raises(UserError, match=r"no val documents \(it has: train\)"):
        Corpus.open(store(tmp_path, [numbered([5])]), "val")
    (tmp_path / "manifest.json").write_text("{half")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        Corpus.open(tmp_path)


def test_the_order_of_an_epoch_never_changes_between_versions() -> None:
    # A change here means that no run started before can be resumed exactly.
    assert shuffled(8, seed=42, epoch=3, salt=1).tolist() == [6, 7, 4, 5, 2, 0, 1, 3]
    packing = pack_documents(np.array([5, 40, 7, 16, 33, 2]), seq_len=16, seed=42, epoch=0)
    assert packing.position.tolist() == [52, 101, 0, 45, 37, 84, 5, 68, 21, 39, 100, -1]
    again = pack_documents(np.array([5, 40, 7, 16, 33, 2]), seq_len=16, seed=42, epoch=1)
    assert again.position.tolist() == [7, 100, 39, -1, 52, 0, 101, 68, 5, 86, 45, 91, 23, 70]
    assert shuffled(8, seed=-1, epoch=0, salt=0).tolist() == shuffled(8, seed=2**64 - 1, epoch=0, salt=0).tolist()


def test_long_documents_are_cut_elsewhere_in_every_epoch_but_the_first() -> None:
    lengths = np.array([100, 3, 16, 17, 900, 0])
    assert cut_long_documents(lengths, 16, seed=1, epoch=0).tolist() == lengths.tolist()
    seen = [cut_long_documents(lengths, 16, seed=1, epoch=epoch).tolist() for epoch in range(1, 200)]
    for pieces in seen:
        first, *_ = pieces
        assert 1 <= first < 16  # the beginning of the first document
        assert first + pieces[1] == 100
        assert pieces[2:4] == [3, 16]  # what fits a row stays whole
        assert sum(pieces) == lengths.sum()
        assert 0 not in pieces
    assert {pieces[0] for pieces in seen} == set(range(1, 16))
    assert seen[0] == cut_long_documents(lengths, 16, seed=1, epoch=1).tolist()
    assert seen != [cut_long_documents(lengths, 16, seed=2, epoch=epoch).tolist() for epoch in range(1, 200)]
    assert cut_long_documents(np.array([5, 1]), 1, seed=0, epoch=1).tolist() == [1, 4, 1]
