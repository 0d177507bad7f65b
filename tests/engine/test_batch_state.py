"""The host's notes on the rows that run: only tokens that mean something are looked at; no answer gets another's."""

from __future__ import annotations

import numpy as np
import pytest

from ascendchat.engine.batch_state import LAST_READS, READ_EVERY, Sheet
from ascendchat.engine.sampling import Mode

END = 7


@pytest.fixture
def sheet() -> Sheet:
    """Slots 0, 1 and 3 are taken, slot 2 is free."""
    sheet = Sheet(slots=4, context=200, vocab=10)
    for slot in (0, 1, 3):
        enter(sheet, slot)
    return sheet


def enter(sheet: Sheet, slot: int, limit: int = 100, plain: bool = True) -> None:
    sheet.enter(slot, 5 + slot, limit, Mode().bits, frozenset({END, 12, -1}), bound=False)
    sheet.plain[slot] = plain


def numbers(*values: int) -> np.ndarray:
    return np.array(values)


def test_text_is_written_down_and_the_rest_is_named(sheet: Sheet) -> None:
    sheet.plain[3] = False
    rows = sheet.launch(numbers(0, 1, 3))
    looked_at, ended = sheet.take(rows, numbers(2, END, 4), np.array([-1.0, -2.0, -3.0], np.float32), version=6)
    assert looked_at == [1, 2], "a token that is watched, and a row that wants a look at every token"
    assert not ended
    assert sheet.written.tolist() == [1, 0, 0, 0]
    assert (sheet.ids[0, 0], sheet.logprobs[0, 0], sheet.versions[0, 0]) == (2, -1.0, 6)


def test_what_a_request_watched_is_text_again_when_it_is_over(sheet: Sheet) -> None:
    """Else one with a thousand stop tokens would make every later one slow."""
    sheet.enter(2, 5, 100, Mode().bits, frozenset({2, 3}), bound=False)
    assert sheet.take(sheet.launch(numbers(0)), numbers(2), np.zeros(1, np.float32), 0) == ([0], [])
    sheet.leave(2)
    assert sheet.take(sheet.launch(numbers(0)), numbers(2), np.zeros(1, np.float32), 0) == ([], [])
    sheet.leave(1)
    sheet.leave(3)
    assert sheet.take(sheet.launch(numbers(0)), numbers(END), np.zeros(1, np.float32), 0) == ([0], []), "of slot 0"


def test_rows_that_are_at_their_limit_are_over(sheet: Sheet) -> None:
    sheet.limit[:] = 2
    for expected in (([], []), ([2], [0, 1])):
        rows = sheet.launch(numbers(0, 1, 3))
        assert sheet.take(rows, numbers(1, 2, END if expected[0] else 3), np.zeros(3, np.float32), 0) == expected
    assert sheet.written.tolist() == [2, 2, 0, 1]


def test_what_comes_late_for_a_slot_that_has_another_request_is_nobodys(sheet: Sheet) -> None:
    late = sheet.launch(numbers(0, 1))
    sheet.leave(1)
    enter(sheet, 1)
    sheet.launch(numbers(1))
    assert sheet.take(late, numbers(2, END), np.zeros(2, np.float32), 0) == ([], [])
    assert sheet.written.tolist() == [1, 0, 0, 0]
    assert sheet.free() == [2]


def test_a_step_is_for_rows_whose_prompts_are_read_and_that_have_tokens_left(sheet: Sheet) -> None:
    assert sheet.runs().tolist() == [], "no prompt has been read"
    assert not sheet.forced.any(), "no tool has been called"
    sheet.launch(numbers(1, 3))
    assert sheet.runs().tolist() == [1, 3]
    assert sheet.longest(sheet.runs()) == 5 + 3 + 1
    sheet.launched[3] = sheet.limit[3]
    assert sheet.runs().tolist() == [1]


def test_what_rows_need_together_is_what_one_of_them_needs(sheet: Sheet) -> None:
    one, other = Mode(random=True), Mode(tops=True, restricted=True)
    sheet.mode[[0, 3]] = one.bits, other.bits
    assert Mode.of(sheet.modes(numbers(0, 3))) == Mode(random=True, tops=True, restricted=True)
    assert Mode.of(sheet.modes(numbers(0, 1))) == one


def test_text_is_made_every_so_often_and_shortly_before_the_limit_of_each_row() -> None:
    """256 answers that end together: no step makes the text of more than a few of them, little is left at the end."""
    slots, limit = 256, 100
    sheet = Sheet(slots, 200, 10)
    for slot in range(slots):
        enter(sheet, slot, limit)
    read_at = {slot: 0 for slot in range(slots)}
    most = 0
    for number in range(limit):
        rows = sheet.launch(np.arange(slots))
        due = sheet.to_read(rows)
        most = max(most, len(due))
        read_at |= {slot: number for slot in due}
    assert most <= slots // LAST_READS + slots // READ_EVERY
    assert min(read_at.values()) >= limit - LAST_READS - 2
