"""Cache-aware routing of requests to replicas: pure functions, used by serve/pool.py and by fleet.py.

A request goes to the replica with the longest prefix of its prompt in its prefix cache, unless that one has clearly
more to do than another. The content of a cache is estimated by hashes of the prompts that a replica was given.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

BLOCK = 64  # tokens of a prompt that are hashed together
MAX_BLOCKS = 4096  # remembered per replica


def blocks_of(prompt: Sequence[int], salt: str = "") -> list[int]:
    """A hash for each whole block of the prompt, of it and all before it, and of the salt."""
    numbers, before, tokens = [], hash(salt), array("i", prompt)
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        before = hash((before, tokens[begin : begin + BLOCK].tobytes()))
        numbers.append(before)
    return numbers


def remember(cached: OrderedDict[int, None], blocks: Sequence[int]) -> None:
    """Note that a replica has cached these; the oldest beyond MAX_BLOCKS are forgotten."""
    for block in blocks:
        cached[block] = None
        cached.move_to_end(block)
    while len(cached) > MAX_BLOCKS:
        cached.popitem(last=False)


class Candidate(NamedTuple):
    """A replica that can take a request."""

    load: int  # requests under way
    slots: int
    blocks: Container[int]  # in its cache


def choose(candidates: Sequence[Candidate], blocks: Sequence[int]) -> int:
    """The index of the candidate with the longest prefix of the prompt in its cache, if that saves anything and it has
    at most a quarter of its slots more to do than the least loaded one; else of the least loaded."""
    least = min(range(len(candidates)), key=lambda place: candidates[place].load)
    if len(candidates) == 1 or not blocks:
        return least
    cached = [sum(1 for _ in itertools.takewhile(one.blocks.__contains__, blocks)) for one in candidates]
    best = max(range(len(candidates)), key=lambda place: (cached[place], -candidates[place].load))
    favourite = candidates[best]
    crowded = favourite.load - candidates[least].load > max(1, favourite.slots // 4)
    return least if crowded or cached[best] == cached[least] else best
