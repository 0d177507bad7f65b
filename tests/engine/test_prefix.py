"""Where a new prompt may go on behind cached tokens: the rule against a ring that is played through, slots, order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from ascendchat.engine.prefix import (
    BLOCK,
    EMPTY,
    MIN_REUSE,
    SECOND_LAST,
    UNDECIDED,
    CacheEntry,
    Copy,
    Hit,
    PrefillScheduler,
    PrefixCache,
    PromptPart,
    as_tokens,
    block_place,
    head_of,
    rounds,
)


def test_a_slot_can_go_on_exactly_where_its_rings_have_all_that_is_seen() -> None:
    """Positions 0 to written - 1 are written into a real ring; token b sees ring - 1 positions before it."""
    ring, found = 33, set()
    for written in range(1, 3 * ring):
        places = [-1] * ring
        for position in range(written):
            places[position % ring] = position
        for b in range(MIN_REUSE, written + 1):
            needed = range(max(0, b - ring + 1), b)
            possible = all(places[position % ring] == position for position in needed)
            held = CacheEntry(as_tokens(range(b)), written=written, newest=written, second_last=b)
            length, _ = held.usable(as_tokens(range(b + 1)), ring)
            assert length == (b if possible else 0), (written, b)
            found.add((possible, b >= ring, written > ring))
    assert {(True, True, True), (True, False, False), (False, False, True), (False, True, True)} <= found


def test_a_prompt_goes_on_at_the_end_at_the_last_turn_or_at_the_end_of_a_block() -> None:
    full = 10_000
    held = EMPTY.read(as_tokens(range(200)), 0, 200)
    assert held.borders_kept == {64, 128, 192}
    same, longer = as_tokens(range(200)), as_tokens(range(230))
    other = as_tokens([*range(150), *range(500, 600)])
    assert held.usable(longer, full) == (200, 199 % 2)
    assert held.usable(same, full) == (199, SECOND_LAST), "the last token is computed, its logits are needed"
    assert held.usable(other, full) == (128, block_place(128))
    assert held.usable(as_tokens(range(130)), full) == (128, block_place(128))
    assert held.usable(as_tokens([7, *range(1, 200)]), full) == (0, 0)
    assert held.usable(as_tokens(range(BLOCK)), full) == (0, 0), "the last token of the block is the last of the prompt"
    decoded = CacheEntry(as_tokens(range(300)), 300, 300, held.borders_kept, held.second_last)
    assert decoded.usable(as_tokens(range(290)), full) == (199, SECOND_LAST), "decoding marks nothing"
    assert decoded.usable(as_tokens(range(301)), full) == (300, 299 % 2)


def test_a_copy_of_a_part_of_a_longer_slot_can_be_continued_at_its_own_end() -> None:
    prefixes = filled(range(200), None)
    assert prefixes.take(1, Hit(0, 128, block_place(128)), [1]) == [Copy(0, 1, 128, block_place(128))]
    prefixes.read(1, as_tokens([*range(128), *range(900, 910)]), 128, 138)
    prefixes.keep(1, as_tokens([*range(128), *range(900, 914)]), 143)
    assert prefixes.find(as_tokens([*range(128), *range(900, 920)])) == Hit(1, 142, 1)


def test_a_ring_that_turned_before_its_slot_was_continued_has_lost_what_it_lost() -> None:
    prompt = as_tokens(range(80))
    for turned, reused in ((300, 0), (64, 79)):
        held = CacheEntry(as_tokens(range(64)), written=turned, newest=64, borders_kept=frozenset({64})).read(
            prompt, 64, 80
        )
        assert held.written == max(turned, 80)
        assert held.usable(prompt, ring=80)[0] == reused


def test_reading_behind_an_answer_leaves_a_hole_in_the_marks() -> None:
    held = EMPTY.read(as_tokens(range(70)), 0, 70)
    grown = CacheEntry(as_tokens(range(200)), 200, 200, held.borders_kept, held.second_last).read(
        as_tokens(range(300)), 200, 300
    )
    assert grown.borders_kept == {64, 256}
    assert grown.first(100).borders_kept == {64}
    assert grown.first(100).second_last == 0
    assert grown.first(299).second_last == 299, "that token's own place is among the first"


def test_old_weights_leave_nothing_and_rows_that_go_on_under_new_ones_are_not_matched() -> None:
    running = {0: 105}
    prefixes = PrefixCache(2, [1000], written=running.get)
    prompt = as_tokens(range(100))
    prefixes.read(0, prompt, 0, 100)
    assert prefixes.find(as_tokens(range(120))) == Hit(0, 99, SECOND_LAST), (
        "its newest tokens are no longer those of the prompt"
    )
    running.clear()
    prefixes.read(0, prompt, 0, 100)
    assert prefixes.find(as_tokens(range(120))) == Hit(0, 100, 1)
    prefixes.clear()
    prefixes.keep(0, as_tokens(range(105)), 105)  # a row that was kept running ends
    prefixes.read(1, prompt, 64, 100)  # the second half of a prompt whose first half is of the old weights
    assert prefixes.find(as_tokens(range(120))) is None
    prefixes.read(1, prompt, 0, 100)
    assert prefixes.find(as_tokens(range(120))) == Hit(1, 100, 1)


def filled(*contents: range | None) -> PrefixCache:
    """Slots with these tokens; the first is the oldest."""
    prefixes = PrefixCache(len(contents), [1000])
    for slot, tokens in enumerate(contents):
        if tokens is not None:
            prefixes.read(slot, as_tokens(tokens), 0, len(tokens))
    return prefixes


def test_low_slots_run_and_what_they_held_moves_to_where_the_oldest_lay() -> None:
    a, b, c = range(100), range(200, 300), range(400, 500)
    prefixes = filled(None, a, b, c)
    prefixes.entries[0] = prefixes.entries.pop(3)  # slot 0 has the newest, slot 3 is gone
    prefixes.entries.append(None)
    hit = prefixes.find(as_tokens([*b, 7]))
    assert hit is not None
    assert hit.slot == 2
    slot = prefixes.choose(hit, [0, 1, 2, 3], top=-1)
    assert slot == 0, "with nobody else running a step then has one row"
    assert prefixes.take(slot, hit, [0, 1, 2, 3]) == [Copy(2, 0, 100, 1), Copy(0, 2, 100, 1)], "they change places"
    assert prefixes.find(as_tokens([*c, 7])) == Hit(2, 100, 1)
    assert prefixes.find(as_tokens([*b, 7])) == Hit(0, 100, 1)
    assert prefixes.find(as_tokens([*a, 7])) == Hit(1, 100, 1)


def test_a_hit_runs_where_it_lies_if_steps_get_no_longer() -> None:
    prefixes = filled(range(100), range(200, 300), range(400, 500))
    hit = prefixes.find(as_tokens([*range(200, 300), 7]))
    assert hit is not None
    assert prefixes.choose(hit, [0, 1], top=2) == 1
    assert prefixes.take(1, hit, [0, 1]) == [Copy(1, 1, 100, 1)]


def test_the_least_recently_used_contents_are_overwritten() -> None:
    prefixes = filled(range(100), range(200, 300), range(400, 500))
    prefixes.keep(0, as_tokens(range(100)), 100)  # used again
    slot = prefixes.choose(None, [0, 1, 2], top=5)
    assert slot == 1
    assert prefixes.take(slot, None, [0, 1, 2]) == []
    assert prefixes.find(as_tokens(range(200, 301))) is None
    assert prefixes.find(as_tokens(range(101))) is not None


def test_contents_that_a_request_went_on_behind_were_used_then() -> None:
    prefixes = filled(range(100), range(200, 300), None)
    hit = prefixes.find(as_tokens([*range(100), 7]))
    assert prefixes.take(2, hit, [2]) == [Copy(0, 2, 100, 1)], "slot 0 still runs, so it keeps what it has"
    assert prefixes.choose(None, [0, 1], top=5) == 1, "slot 1 was used longer ago"


def test_a_short_system_prompt_does_not_cost_a_long_conversation_its_place() -> None:
    long = range(400)
    prefixes = filled(long, None)
    new = as_tokens([*range(70), 900, 901])
    hit = prefixes.find(new)
    assert hit == Hit(0, 64, block_place(64))
    assert prefixes.choose(hit, [0, 1], top=-1) == 0
    assert prefixes.take(0, hit, [0, 1]) == [Copy(0, 0, 64, block_place(64)), Copy(0, 1, 400, 1)]
    assert prefixes.find(as_tokens([*long, 7])) == Hit(1, 400, 1)


def test_copies_that_follow_each_other_are_not_done_at_once() -> None:
    swap = [Copy(2, 0, 9, 0), Copy(0, 2, 9, 0)]
    assert rounds([swap]) == [swap], "one group reads before it writes"
    then = [Copy(0, 1, 9, 0)]
    assert rounds([swap, then]) == [swap, then]
    apart = [Copy(3, 4, 9, 0)]
    assert rounds([swap, apart, then]) == [[*swap, *apart], then]
    many = [[Copy(0, target, 9, 0)] for target in range(1, 80)]
    assert [len(part) for part in rounds(many)] == [32, 32, 15]


# ---- who is read when ---------------------------------------------------------------------------


@dataclass
class Asked:
    """A request, as PrefillScheduler sees it."""

    prompt: list[int]
    slot: int = -1
    cached: int = UNDECIDED
    reused: int = -1
    salt: str = ""

    def __post_init__(self) -> None:
        self.tokens = as_tokens(self.prompt)
        self.head = head_of(self.tokens, self.salt)

    def begin(self, cached: int) -> None:
        self.cached = self.reused = cached


def passes(*jobs: Asked, tokens: int = 100_000, enabled: bool = True, ring: int = 10_000) -> list[list[PromptPart]]:
    """All that is read for these requests in 16 slots, pass by pass, each as if rows went on in between."""
    reading, free, made = PrefillScheduler(PrefixCache(16, [ring], enabled)), list(range(16)), list[list[PromptPart]]()
    for job in jobs:
        reading.enter(job, free, 15 - len(free))
        free.remove(job.slot)
    while reading.waiting:
        reading.begin(free)
        made.append(reading.next_pass(tokens, True)[0])
        assert made[-1], "the first of the list is read in every pass"
        for part in made[-1]:
            reading.done(part)
    assert enabled or not reading.copies
    for copy in (copy for group in reading.copies for copy in group):
        (source,), (target,) = ([job for job in jobs if job.slot == slot] for slot in (copy.source, copy.target))
        assert target.prompt[: copy.length] == source.prompt[: copy.length]
    return made


def test_samples_of_a_few_prompts_read_each_prompt_once() -> None:
    """Twelve samples: three prompts in one pass, then one token each."""
    prompts = [[1000 * number + i for i in range(100)] for number in range(3)]
    jobs = [Asked(prompt) for prompt in prompts for _ in range(4)]
    first, second = passes(*jobs)
    assert [part.state for part in first] == [jobs[0], jobs[4], jobs[8]]
    assert all((part.start, part.end) == (99, 100) for part in second)
    assert [job.reused for job in jobs] == [0, 99, 99, 99] * 3


def test_samples_of_a_prompt_that_is_read_in_pieces_wait_for_its_end() -> None:
    jobs = [Asked([*range(100)]) for _ in range(3)]
    made = passes(*jobs, tokens=64)
    assert [(part.start, part.end) for parts in made for part in parts] == [(0, 64), (64, 100), (99, 100), (99, 100)]


def test_a_shared_system_prompt_is_read_once_unless_a_ring_has_turned_by_then() -> None:
    system = [*range(130)]
    jobs = [Asked([*system, 500 + number, *range(600, 620)]) for number in range(3)]
    assert [len(parts) for parts in passes(*jobs)] == [1, 2]
    assert [job.reused for job in jobs] == [0, 128, 128]
    again = [Asked(job.prompt) for job in jobs]
    assert [len(parts) for parts in passes(*again, ring=100)] == [3], "nothing to wait for"


def test_nothing_is_reused_where_that_is_switched_off() -> None:
    jobs = [Asked([*range(100)]) for _ in range(4)]
    assert [len(parts) for parts in passes(*jobs, enabled=False)] == [4]
    assert [job.reused for job in jobs] == [0] * 4


@pytest.mark.parametrize("tokens", [16, 100])
def test_long_prompts_are_cut_and_read_in_the_order_in_which_they_came(tokens: int) -> None:
    draw = random.Random(tokens)
    jobs = [Asked([draw.randrange(9999) for _ in range(draw.choice((1, 5, 60, 700)))]) for _ in range(12)]
    finished = []
    for parts in passes(*jobs, tokens=tokens):
        width = max(part.end - part.start for part in parts)
        assert len(parts) * width <= tokens
        finished += [part.state for part in parts if part.end == len(part.state.tokens)]
    fresh = [job for job in finished if len(job.tokens) <= tokens // 2]  # of those read in one piece
    assert sorted(map(id, finished)) == sorted(map(id, jobs))
    assert fresh == sorted(fresh, key=jobs.index)


def test_prompts_of_different_salts_share_nothing() -> None:
    """Neither what lies in the cache nor what is about to be read."""
    prompt = [*range(100)]
    prefixes = PrefixCache(4, [10_000])
    prefixes.take(0, None, [0, 1, 2, 3])
    prefixes.read(0, as_tokens(prompt), 0, 100, "a")
    assert prefixes.find(as_tokens([*prompt, 7]), "a") == Hit(0, 100, 1)
    assert prefixes.find(as_tokens([*prompt, 7]), "b") is None
    assert prefixes.find(as_tokens([*prompt, 7])) is None
    jobs = [Asked(prompt, salt=salt) for salt in ("a", "b", "a", "b", "")]
    passes(*jobs)
    assert [job.reused for job in jobs] == [0, 0, 99, 99, 0]
