"""Which worker answers what, and how soon a worker that dies is started again, as pure functions."""

from __future__ import annotations

from collections import OrderedDict

from ascendchat.remote.routing import BLOCK, MAX_BLOCKS, Candidate, blocks_of, choose, remember
from ascendchat.serve.pool import MAX_PAUSE, pause_after

LONG = list(range(5 * BLOCK))


def known(*prompts: list[int]) -> OrderedDict[int, None]:
    blocks: OrderedDict[int, None] = OrderedDict()
    for prompt in prompts:
        remember(blocks, blocks_of(prompt))
    return blocks


def test_a_block_stands_for_itself_and_all_before_it() -> None:
    assert len(blocks_of(LONG)) == 5
    assert blocks_of(LONG[:-1]) == blocks_of(LONG)[:4]
    assert not set(blocks_of([1, *LONG[1:]])) & set(blocks_of(LONG)), "another first token, another prompt"
    assert blocks_of(LONG[: BLOCK - 1]) == []
    assert not set(blocks_of(LONG, "a")) & set(blocks_of(LONG)), "another's"


def test_only_so_many_blocks_are_remembered_the_newest_ones() -> None:
    blocks = known(LONG)
    for n in range(MAX_BLOCKS):
        remember(blocks, [n])
    assert len(blocks) == MAX_BLOCKS
    assert not set(blocks_of(LONG)) & set(blocks)
    remember(blocks, [0])
    remember(blocks, [-1])
    assert 0 in blocks, "what was used again is new again"
    assert 1 not in blocks


def test_the_worker_that_knows_most_of_a_prompt_answers_else_the_least_loaded() -> None:
    workers = [Candidate(1, 16, known(LONG[:BLOCK])), Candidate(3, 16, known(LONG[: 3 * BLOCK])), Candidate(0, 16, {})]
    assert choose(workers, blocks_of(LONG)) == 1
    assert choose(workers, blocks_of(LONG[::-1])) == 2, "nobody knows it"
    assert choose(workers, []) == 2


def test_an_overloaded_favourite_is_left() -> None:
    for load, expected in [(4, 1), (5, 0)]:  # a quarter of 16 slots more than the other
        workers = [Candidate(0, 16, {}), Candidate(load, 16, known(LONG))]
        assert choose(workers, blocks_of(LONG)) == expected
    assert choose([Candidate(0, 2, {}), Candidate(1, 2, known(LONG))], blocks_of(LONG)) == 1


def test_of_two_that_know_the_same_the_one_with_less_to_do_answers() -> None:
    workers = [Candidate(2, 16, known(LONG)), Candidate(1, 16, known(LONG)), Candidate(0, 16, {})]
    assert choose(workers, blocks_of(LONG)) == 1


def test_a_worker_that_dies_without_an_answer_is_started_less_and_less_often() -> None:
    assert [pause_after(deaths) for deaths in range(5)] == [0, 0.5, 1, 2, 4]
    assert pause_after(10**6) == MAX_PAUSE
