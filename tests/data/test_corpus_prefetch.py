"""The prefetcher yields exactly the rank's rows of each step, ahead of time, and passes errors on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_corpus import numbered, store

from ascendchat.data.corpus import Corpus, TextRows
from ascendchat.data.loader import Prefetcher
from ascendchat.data.mixture import MixtureLoader


@pytest.fixture
def batches(tmp_path: Path) -> MixtureLoader:
    """Of a small corpus, 12 rows of 8 tokens each."""
    corpus = Corpus.open(store(tmp_path, [numbered([40, 3, 90, 17, 33])]))
    return MixtureLoader([(TextRows(corpus, seq_len=8, seed=3), 1.0)], rows_per_step=12)


def test_micro_batches_are_the_ranks_rows_in_order(batches: MixtureLoader) -> None:
    for rank, micro in ((0, 3), (1, 4)):  # 4 does not divide 6: the last one is smaller
        rows = (rank * 6, rank * 6 + 6)
        with Prefetcher(batches, torch.device("cpu"), rows=rows, micro_batch=micro) as prefetcher:
            for step in range(3):
                found = prefetcher.take(step)
                expected = batches.batch(step, *rows)
                assert [len(m.inputs) for m in found] == [min(micro, 6 - i) for i in range(0, 6, micro)]
                assert found[0].inputs.dtype == found[0].targets.dtype == torch.int64
                assert (torch.cat([m.inputs for m in found]).numpy() == expected.inputs).all()
                assert (torch.cat([m.targets for m in found]).numpy() == expected.targets).all()
                assert (np.concatenate([m.lengths for m in found]) == expected.lengths).all()
                assert all(m.lengths.sum() == m.inputs.numel() for m in found)


def test_any_step_can_be_taken_next_or_again(batches: MixtureLoader) -> None:
    with Prefetcher(batches, torch.device("cpu"), rows=(0, 12), micro_batch=12) as prefetcher:
        for step in (7, 7, 8, 2, 3, 1000):
            assert (prefetcher.take(step)[0].inputs.numpy() == batches.batch(step).inputs).all()


def test_coming_steps_are_gathered_while_the_caller_computes(
    batches: MixtureLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    original = batches.batch
    monkeypatch.setattr(batches, "batch", lambda step, a, b: gathered.append(step) or original(step, a, b))
    with Prefetcher(batches, torch.device("cpu"), rows=(0, 12), micro_batch=12, depth=2) as prefetcher:
        prefetcher.take(0)
        deadline = time.monotonic() + 60
        while len(gathered) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gathered == [0, 1, 2, 3]  # two wait in the queue, one in the thread's hand
        prefetcher.take(1)
        while len(gathered) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gathered == [0, 1, 2, 3, 4]  # and never more: memory is bounded


def test_an_error_in_the_thread_reaches_the_caller(batches: MixtureLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    original = batches.batch

    def fails_later(step: int, a: int, b: int) -> object:
        if step == 2:
            raise OSError("the disk is gone")
        return original(step, a, b)

    monkeypatch.setattr(batches, "batch", fails_later)
    prefetcher = Prefetcher(batches, torch.device("cpu"), rows=(0, 12), micro_batch=6)
    prefetcher.take(0)
    prefetcher.take(1)
    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher.take(2)


def test_close_ends_the_thread_even_with_a_full_queue(batches: MixtureLoader) -> None:
    before = set(threading.enumerate())  # some of which may end meanwhile
    prefetcher = Prefetcher(batches, torch.device("cpu"), rows=(0, 12), micro_batch=1, depth=2)
    prefetcher.take(0)
    assert len(set(threading.enumerate()) - before) == 1
    prefetcher.close()
    assert not set(threading.enumerate()) - before
    prefetcher.close()
    assert len(prefetcher.take(0)) == 12
    prefetcher.close()
