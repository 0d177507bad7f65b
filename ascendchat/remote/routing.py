"""Which worker or server answers which request: pure functions, used by serve/pool.py and by fleet.py.

A request goes to the worker that holds most of its prompt in its cache, unless that one has clearly more to do than
another. What a worker holds is known by hashes of the beginnings of the prompts that it was given.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

BLOCK = 64  # tokens of a prompt that are recognised together
BLOCKS = 4096  # of them remembered per worker


def blocks_of(prompt: Sequence[int], salt: str = "") -> list[int]:
    """A number for each whole block of the prompt that stands for it and all before it, of this salt."""
    numbers, before, tokens = [], hash(salt), array("i", prompt)
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, tokens[begin : begin + BLOCK].tobytes()))
        numbers.append(before)
    return numbers


def remember(known: OrderedDict[int, None], blocks: Sequence[int]) -> None:
    """Note that a worker has read these; the oldest beyond BLOCKS are forgotten."""
    for block in blocks:
        known[block] = None
        known.move_to_end(block)
    while len(known) > BLOCKS:
        known.popitem(last=False)


class Candidate(NamedTuple):
    """A worker that can take a request."""

    load: int  # requests it has
    slots: int
    blocks: Container[int]  # that it has read


def choose(candidates: Sequence[Candidate], blocks: Sequence[int]) -> int:
    """The place of the candidate with the longest beginning of the prompt in its cache, if that saves anything and it
    has at most a quarter of its slots more to do than the least loaded one; else of the least loaded."""
    least = min(range(len(candidates)), key=lambda place: candidates[place].load)
    if len(candidates) == 1 or not blocks:
        return least
    known = [sum(1 for _ in itertools.takewhile(one.blocks.__contains__, blocks)) for one in candidates]
    best = max(range(len(candidates)), key=lambda place: (known[place], -candidates[place].load))
    favourite = candidates[best]
    crowded = favourite.load - candidates[least].load > max(1, favourite.slots // 4)
    return least if crowded or known[best] == known[least] else best
