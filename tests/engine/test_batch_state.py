"""The host's notes on the rows that run: only tokens that mean something are looked at; no answer gets another's."""

from __future__ import annotations

import numpy as np
import pytest

from ascendchat.engine.batch_state import LAST_READS, READ_EVERY, BatchState
from ascendchat.engine.sampling import Draw, Mode

END = 7


@pytest.fixture
def batch() -> BatchState:
    """Slots 0, 1 and 3 are taken, slot 2 is free."""
    batch = BatchState(slots=4, context=200, vocab=10)
    for slot in (0, 1, 3):
        enter(batch, slot)
    return batch


def enter(batch: BatchState, slot: int, limit: int = 100, plain: bool = True) -> None:
    batch.enter(slot, 5 + slot, limit, Mode(), frozenset({END, 12, -1}), constrained=False)
    batch.plain[slot] = plain


def numbers(*values: int) -> np.ndarray:
    return np.array(values)


def test_text_is_written_down_and_the_rest_is_named(batch: BatchState) -> None:
    batch.plain[3] = False
    rows = batch.launch(numbers(0, 1, 3))
    looked_at, ended = batch.append(rows, numbers(2, END, 4), np.array([-1.0, -2.0, -3.0], np.float32), version=6)
    assert looked_at == [1, 2], "a token that is watched, and a row that wants a look at every token"
    assert not ended
    assert batch.written.tolist() == [1, 0, 0, 0]
    assert (batch.ids[0, 0], batch.logprobs[0, 0], batch.versions[0, 0]) == (2, -1.0, 6)


def test_what_a_request_watched_is_text_again_when_it_is_over(batch: BatchState) -> None:
    """Else one with a thousand stop tokens would make every later one slow."""
    batch.enter(2, 5, 100, Mode(), frozenset({2, 3}), constrained=False)
    assert batch.append(batch.launch(numbers(0)), numbers(2), np.zeros(1, np.float32), 0) == ([0], [])
    batch.leave(2)
    assert batch.append(batch.launch(numbers(0)), numbers(2), np.zeros(1, np.float32), 0) == ([], [])
    batch.leave(1)
    batch.leave(3)
    assert batch.append(batch.launch(numbers(0)), numbers(END), np.zeros(1, np.float32), 0) == ([0], []), "of slot 0"


def test_rows_that_are_at_their_limit_are_over(batch: BatchState) -> None:
    batch.limit[:] = 2
    for expected in (([], []), ([2], [0, 1])):
        rows = batch.launch(numbers(0, 1, 3))
        assert batch.append(rows, numbers(1, 2, END if expected[0] else 3), np.zeros(3, np.float32), 0) == expected
    assert batch.written.tolist() == [2, 2, 0, 1]


def test_what_comes_late_for_a_slot_that_has_another_request_is_nobodys(batch: BatchState) -> None:
    late = batch.launch(numbers(0, 1))
    batch.leave(1)
    enter(batch, 1)
    batch.launch(numbers(1))
    assert batch.append(late, numbers(2, END), np.zeros(2, np.float32), 0) == ([], [])
    assert batch.written.tolist() == [1, 0, 0, 0]
    assert batch.free() == [2]


def test_a_step_is_for_rows_whose_prompts_are_read_and_that_have_tokens_left(batch: BatchState) -> None:
    assert batch.runs().tolist() == [], "no prompt has been read"
    assert not batch.forced.any(), "no tool has been called"
    batch.launch(numbers(1, 3))
    assert batch.runs().tolist() == [1, 3]
    assert batch.needs(batch.runs())[0] == 5 + 3 + 1
    batch.launched[3] = batch.limit[3]
    assert batch.runs().tolist() == [1]


def test_what_rows_need_together_is_what_one_of_them_needs(batch: BatchState) -> None:
    batch.draw[[0, 3]], batch.tables[3] = (Draw.FILTERED, Draw.RANDOM), True
    assert batch.needs(numbers(0, 3))[1:] == (Draw.FILTERED, True)
    assert batch.needs(numbers(1, 3))[1:] == (Draw.RANDOM, True)
    assert batch.needs(numbers(0, 1))[1:] == (Draw.FILTERED, False)


def test_text_is_made_every_so_often_and_shortly_before_the_limit_of_each_row() -> None:
    """256 answers that end together: no step makes the text of more than a few of them, little is left at the end."""
    slots, limit = 256, 100
    batch = BatchState(slots, 200, 10)
    for slot in range(slots):
        enter(batch, slot, limit)
    read_at = {slot: 0 for slot in range(slots)}
    most = 0
    for number in range(limit):
        rows = batch.launch(np.arange(slots))
        due = batch.to_read(rows)
        most = max(most, len(due))
        read_at |= {slot: number for slot in due}
    assert most <= slots // LAST_READS + slots // READ_EVERY
    assert min(read_at.values()) >= limit - LAST_READS - 2
