"""The grammar of --data, and batches that depend on nothing but (data, seed, step)."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corpus import LENGTHS, corpus_of

from ascendchat.data.chat.dataset_info import listed_data
from ascendchat.data.corpus import TextRows, open_corpora
from ascendchat.data.mixture import (
    MixtureLoader,
    absolute,
    fingerprint,
    is_held_out,
    parse_entry,
    parse_mixture,
    write_mixture,
)
from ascendchat.errors import UserError


def test_an_entry_is_a_name_with_or_without_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1").touch()
    assert parse_entry("smoltalk") == ("smoltalk", None)
    assert parse_entry("smoltalk=0.5") == ("smoltalk", 0.5)
    assert parse_entry("a=1") == ("a=1", None)  # a file of this name is there
    assert parse_entry("a=1=2") == ("a=1", 2.0)
    assert absolute(["a=1", "a=1=2", "smoltalk=0.50", "smoltalk"]) == (
        str(tmp_path / "a=1"),
        f"{tmp_path / 'a=1'}=2",
        "smoltalk=0.5",
        "smoltalk",
    )
    with pytest.raises(UserError, match=r"'heavy' is not a weight; write b=0\.7"):
        parse_entry("b=heavy")
    for weight in ("0", "-1", "inf", "nan"):
        with pytest.raises(UserError, match="greater than 0"):
            parse_entry(f"b={weight}")


def test_a_weight_is_written_back_as_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a run hold it, and its next commands read it there."""
    monkeypatch.chdir(tmp_path)
    for weight in ("0.1234567890123", "1234567.5", "1e-7", "0.30000000000000004", "3", "1e20"):
        for written in (*absolute([f"a={weight}"]), *listed_data([f"a={weight}"], "", lambda name: True)):
            assert parse_entry(written) == ("a", float(weight))
    assert absolute(["a=0.50", "a=2", "a=1e-7"]) == ("a=0.5", "a=2", "a=1e-07")


def test_all_entries_have_a_weight_or_none_has(tmp_path: Path) -> None:
    write_mixture(tmp_path, [("a", 1.0), ("b", 3.0)])
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert parse_mixture(["x", tmp_path / "a"]) == [("x", None), (a, None)]
    assert parse_mixture([str(tmp_path)]) == [(a, 1.0), (b, 3.0)]
    assert parse_mixture([f"{tmp_path}=0.5", "x=1"]) == [(a, 0.125), (b, 0.375), ("x", 1.0)]
    for wrong in (["x", "y=1"], [str(tmp_path), "x"]):
        with pytest.raises(UserError, match="every entry of --data a weight, or none"):
            parse_mixture(wrong)


def test_corpora_without_a_weight_count_by_their_tokens(tmp_path: Path) -> None:
    corpus_of([[10, 20, 30]], tmp_path / "a")
    corpus_of([[9]], tmp_path / "b")
    assert [weight for _, weight in open_corpora([tmp_path / "a", tmp_path / "b"])] == [63.0, 10.0]
    (tmp_path / "mixture.json").write_text(
        json.dumps({"corpora": [{"folder": "a", "weight": 1}, {"folder": "b", "weight": 3}]})
    )
    assert [weight for _, weight in open_corpora([tmp_path])] == [1.0, 3.0]


@settings(deadline=None, max_examples=10)
@given(LENGTHS, st.integers(2, 30), st.integers(0, 1000))
def test_every_world_size_and_every_resume_sees_the_same_global_batches(
    lengths: list[list[int]], seq_len: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, _ = corpus_of(lengths, Path(folder))
        other, _ = corpus_of([[5, 9], [31]], Path(folder) / "other")

        def opened() -> MixtureLoader:
            return MixtureLoader([(TextRows(corpus, seq_len, seed), 0.7), (TextRows(other, seq_len, seed), 0.3)], 8)

        whole = opened()
        steps = 2 * sum(rows.per_epoch for rows in whole.rows) // 8 + 5  # over several epochs
        expected = [whole.batch(step) for step in range(steps)]
        for world in (1, 2, 4, 8):
            each = 8 // world
            resumed = opened()  # as a new process would
            for step in np.random.default_rng(seed + world).permutation(steps)[:5].tolist():
                ranks = [resumed.batch(step, rank * each, (rank + 1) * each) for rank in range(world)]
                for name in ("inputs", "targets", "lengths"):
                    joined = np.concatenate([getattr(rank, name) for rank in ranks])
                    assert joined.tobytes() == getattr(expected[step], name).tobytes()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=5), st.integers(0, 10**10))
def test_a_mixture_follows_its_weights_at_every_row(weights: list[float], rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus, _ = corpus_of([[5, 6]], Path(folder))
        batches = MixtureLoader([(TextRows(corpus, 4, seed=0), weight) for weight in weights], 2)
        counts = batches.counts(rows)
        assert sum(counts) == rows
        for count, weight in zip(counts, weights):
            assert abs(count - rows * weight / sum(weights)) < len(weights) + 1e-6 * rows**0.5
        which, number = batches.locate(rows)
        assert number == counts[which]
        counts[which] += 1
        assert batches.counts(rows + 1) == counts


def test_sources_of_a_mixture_have_rows_of_one_length(tmp_path: Path) -> None:
    corpus, _ = corpus_of([[10]], tmp_path)
    for sources in ([], [(TextRows(corpus, 7, 0), 1.0), (TextRows(corpus, 8, 0), 1.0)]):
        with pytest.raises(ValueError, match="rows of one length"):
            MixtureLoader(sources, 8)


def test_batches_fingerprints_and_the_split_never_change_between_versions(tmp_path: Path) -> None:
    # A change here means that no run started before can be resumed exactly.
    a, _ = corpus_of([[10, 20, 30]], tmp_path / "a")
    b, _ = corpus_of([[5, 9], [31]], tmp_path / "b")
    sources = [(TextRows(a, 8, seed=1), 0.7), (TextRows(b, 8, seed=1), 0.3)]
    digest = hashlib.sha256()
    for step in range(9):
        batch = MixtureLoader(sources, 4).batch(step)
        for array in (batch.inputs, batch.targets, batch.lengths):
            digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == "5f94c4fb76902457"
    assert fingerprint(sources) == hashlib.sha256(f"{a.fingerprint}{b.fingerprint}".encode()).hexdigest()[:16]
    assert [n for n in range(300) if is_held_out(str(n).encode(), 0.02)] == [51, 55, 152, 178, 245, 286]
