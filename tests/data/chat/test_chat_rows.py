"""Packing of conversations: nothing lost, no row without a target, the same batches for any world and any resume."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import TOKENIZER, exchange

from ascendchat.data.chat.render import Counts, Rendered, render
from ascendchat.data.chat.rows import ChatRows, best_fit
from ascendchat.data.mixture import MixtureLoader
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE

PAD = TOKENIZER.specials["<|pad|>"]


def talk(count: int, longest: int = 60, seed: int = 0) -> list[list[dict[str, Any]]]:
    draw = random.Random(seed)
    return [exchange(draw.randint(0, 9), draw.randint(1, longest), draw.randint(1, longest)) for _ in range(count)]


def read(rows: ChatRows, first: int, last: int) -> list[tuple[np.ndarray, np.ndarray, list[int]]]:
    found = []
    for number in range(first, last):
        inputs, targets = np.zeros((1, rows.seq_len), np.int64), np.zeros((1, rows.seq_len), np.int64)
        lengths, counts = rows.fill(number, inputs, targets)
        assert counts.tolist() == [len(lengths)]
        found.append((inputs[0], targets[0], lengths.tolist()))
    return found


@given(st.lists(st.integers(1, 50), max_size=120), st.integers(1, 40))
def test_every_conversation_is_in_one_row_and_no_row_overflows(lengths: list[int], window: int) -> None:
    rows = best_fit(lengths, 50, window)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 50 for row in rows)


def test_best_fit_fills_rows_that_first_come_first_served_would_waste() -> None:
    assert len(best_fit([6, 5, 4, 5], 10)) == 2
    assert sorted(map(sorted, best_fit([6, 5, 4, 5], 10))) == [[0, 2], [1, 3]]


def test_an_epoch_holds_every_conversation_once_with_targets_only_where_the_assistant_speaks() -> None:
    conversations, counts = talk(200), Counts()
    rows = ChatRows.build(TOKENIZER, conversations, 128, 0, counts)
    assert counts.whole == 200
    seen = []
    for inputs, targets, lengths in read(rows, 0, rows.per_epoch):
        assert sum(lengths) == 128
        at = 0
        for length in lengths:
            part, goal = inputs[at : at + length], targets[at : at + length]
            at += length
            if (part == PAD).all():
                assert (goal == IGNORE).all()
                continue
            shown = [(int(i), int(t)) for i, t in zip(part, goal)]
            seen.append(tuple(shown))
        assert (targets != IGNORE).any()
    expected = []
    for messages in conversations:
        ids, mask = render(TOKENIZER, messages)
        goals = [token if on else IGNORE for token, on in zip(ids[1:], mask[1:])]
        expected.append(tuple(zip(ids[:-1], goals)))
    assert sorted(seen) == sorted(expected)


def test_rows_are_almost_full_and_mostly_not_padding() -> None:
    assert ChatRows.build(TOKENIZER, talk(600, 40), 256, 0, Counts()).filled > 0.97


def test_conversations_far_longer_than_a_row_neither_clog_the_packer_nor_vanish() -> None:
    counts = Counts()
    rows = ChatRows.build(TOKENIZER, [exchange(1, 1000, 1000) for _ in range(20)] + talk(20), 256, 0, counts)
    assert (counts.whole, counts.split, counts.pieces) == (20, 20, 40)
    assert counts.lost_tokens == 20 * (1 + 2 + 1000 + 2 + 1000 - 257)
    for _, targets, _ in read(rows, 0, rows.per_epoch):
        assert (targets != IGNORE).any()


def test_a_piece_that_does_not_fit_or_teaches_nothing_is_refused() -> None:
    assert ChatRows([Rendered([1] * 11, [1] * 11)], 10, 0, PAD).filled == 1
    with pytest.raises(ValueError, match="longer than a row"):
        ChatRows([Rendered([1] * 12, [1] * 12)], 10, 0, PAD)
    with pytest.raises(ValueError, match="nothing to learn"):
        ChatRows([Rendered([1, 2], [0, 0])], 10, 0, PAD)
    with pytest.raises(UserError, match="no conversation"):
        ChatRows.build(TOKENIZER, [[{"role": "user", "content": "x"}]], 64, 0, Counts())


def test_epochs_hold_the_same_rows_in_another_order_and_seeds_pack_differently() -> None:
    rows = ChatRows.build(TOKENIZER, talk(100), 128, 0, Counts())
    n = rows.per_epoch
    first = [row[0].tolist() for row in read(rows, 0, n)]
    second = [row[0].tolist() for row in read(rows, n, 2 * n)]
    assert first != second
    assert sorted(first) == sorted(second)
    other = ChatRows.build(TOKENIZER, talk(100), 128, 1, Counts())
    assert sorted(row[0].tolist() for row in read(other, 0, other.per_epoch)) != sorted(first)


ROWS = [ChatRows.build(TOKENIZER, talk(60, seed=i), 128, 0, Counts()) for i in range(2)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.sampled_from([1, 2, 4, 8]))
def test_any_number_of_ranks_and_any_resumed_step_see_the_same_global_batch(step: int, world: int) -> None:
    straight = MixtureLoader([(ROWS[0], 2.0), (ROWS[1], 1.0)], 8)
    whole = straight.batch(step)
    fresh = MixtureLoader([(ROWS[0], 2.0), (ROWS[1], 1.0)], 8)  # as after a restart
    share = 8 // world
    parts = [fresh.batch(step, rank * share, (rank + 1) * share) for rank in reversed(range(world))][::-1]
    assert np.array_equal(whole.inputs, np.concatenate([part.inputs for part in parts]))
    assert np.array_equal(whole.targets, np.concatenate([part.targets for part in parts]))
    assert np.array_equal(whole.lengths, np.concatenate([part.lengths for part in parts]))
    assert whole.lengths.sum() == 8 * 128


def test_the_first_token_of_a_piece_is_no_target_whatever_its_mask_says() -> None:
    """Templates of other models may begin with a token that the assistant says."""
    rows = ChatRows([Rendered([1, 2, 3], [1, 1, 0]), Rendered([4, 5, 6, 7], [0, 1, 1, 0])], 4, 0, PAD)
    assert rows.per_epoch == 2
    for number in range(2):
        ((_, targets, _),) = read(rows, number, number + 1)
        assert (targets != IGNORE).sum() == rows.targets(number, number + 1)
    assert rows.targets(0, 2) == 3
    assert rows.filled == 5 / 8
