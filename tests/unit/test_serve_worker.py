"""What a worker on a CPU sets up before it answers."""

from __future__ import annotations

from ascendchat.serve.worker import threads


def test_one_core_is_left_to_the_front_unless_the_user_has_named_a_number() -> None:
    assert [threads(cores, 1, named=False) for cores in (1, 2, 8)] == [1, 1, 7]
    assert threads(8, 2, named=False) == 3
    assert threads(8, 2, named=True) == 4
    assert threads(2, 16, named=True) == 1
