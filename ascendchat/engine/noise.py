"""The noise of sampling: numbers in (0, 1) that are a pure function of a row's seed, the position and the token.

    keys = seed_keys(seed)                                     # on the host, once per request
    uniform(keys (B, KEYS), position (B,), columns(vocab))     # (B, vocab) float32

A block cipher in float32: every product, sum and floor here is exact, so that CPU, GPU and NPU give the same bits, in
eager, compiled and captured code. No shifts and no integers: on Ascend A2 a shift is computed by the AICPU, and in
torch_npu up to 2.9.0 by an operator that no graph can capture; on older chips nothing on 64-bit integers is fast.

A block is two numbers, `left` and `right`, odd multiples of 2^-13 and 2^-12 in (0, 1): 12 and 11 bits. Half a round
adds to one of them the middle bits of the other's product with a key, and drops what is 1 or more (a Feistel network).
The keys of the vocabulary's blocks are the position's block, enciphered three times under the keys of the seed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LEFT, RIGHT = 2.0**-12, 2.0**-11  # the step between two neighbours
ROUNDS, LANES = 5, 3  # halves of rounds, the first of which changes `left`; blocks of a position
KEYS = ROUNDS * LANES
WIDE, NARROW = 2.0**6, 2.0**7  # of the product of two odd integers, 24 bits, the lowest 6 are dropped
MASK = (1 << 64) - 1


def scrambled(x: int) -> int:
    """A bijection of 64-bit numbers in which every input bit moves about half of the output bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seed_keys(seed: int) -> tuple[float, ...]:
    """(KEYS,) of any integer; neighbouring seeds, and the same with another sign, have nothing in common."""
    bits, folded = seed & ((1 << 128) - 1), 0x9E3779B97F4A7C15
    for part in (bits & MASK, bits >> 64):
        folded = scrambled(folded ^ part)
    words = [scrambled((folded + number * 0x9E3779B97F4A7C15) & MASK) for number in range(1, KEYS + 1)]
    wide = [number // LANES % 2 == 0 for number in range(KEYS)]  # odd integers of 12 bits, or of 11
    return tuple((word >> 52 | 1) * WIDE if wide else (word >> 53 | 1) * NARROW for word, wide in zip(words, wide))


def columns(count: int, place: torch.device | str = "cpu") -> Tensor:
    """(2, count) float32: the block of every token; made once, it stays on the device."""
    number = np.arange(count, dtype=np.int64)
    for factor in (0x5BD1E5, 0x2C1B3D, 0x297A2D):  # three times: a bijection of 23 bits that leaves no pattern
        number = (number * factor + 0x1234567) & (2**23 - 1)
        number ^= number >> 11
    both = np.stack(((number >> 11) * LEFT + LEFT / 2, (number & 2047) * RIGHT + RIGHT / 2))
    return torch.from_numpy(both.astype(np.float32)).to(place)


def mixed(changed: Tensor, other: Tensor, key: Tensor, step: float) -> Tensor:
    """Half a round. Sums have at most 18 bits before the comma and behind it together, products 24."""
    total = torch.add(changed, torch.floor(other * key), alpha=step)
    return total - torch.floor(total)


def enciphered(left: Tensor, right: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A block under the keys of ROUNDS halves, which may be broadcast over it."""
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = mixed(left, right, key, LEFT)
        else:
            right = mixed(right, left, key, RIGHT)
    return left, right


def uniform(keys: Tensor, position: Tensor, blocks: Tensor) -> Tensor:
    """(B, V) float32 in (0, 1), from seed_keys (B, KEYS), position (B,) and columns(V): multiples of 2^-23 and a half,
    which are exact, and never 0 or 1."""
    place = position.int().float()[:, None]  # (B, 1); positions are far below 2^23
    high = torch.floor(place * RIGHT)
    left, right = high * LEFT + LEFT / 2, (place - high * 2048.0) * RIGHT + RIGHT / 2
    left, right = enciphered(left, right, keys.unflatten(1, (ROUNDS, LANES)).unbind(1))  # (B, LANES)
    wide = (right * (WIDE * 4096.0)).unbind(1)  # odd integers of 12 bits
    narrow = ((torch.floor(left * 1024.0) * 2.0 + 1.0) * NARROW).unbind(1)  # of 11 bits
    under = tuple(key[:, None] for key in (wide[0], narrow[0], wide[1], narrow[1], wide[2]))
    left, right = enciphered(blocks[0], blocks[1], under)  # (B, V)
    return torch.add(left - LEFT / 2, right, alpha=LEFT)
