"""Which tokens lie in which slot of the cache, and where a new prompt can go on behind them. Host only.

    prefixes = PrefixCache(slots=16, windows=cache.places)
    hit = prefixes.find(prompt)                       # the longest beginning that some slot still has, or None
    slot = prefixes.choose(hit, free, top)            # where the request should run
    copies = prefixes.take(slot, hit, free)           # what the device has to copy first (Decoder.copy)
    prefixes.read(slot, prompt, start, end)           # these tokens of the prompt were read
    prefixes.keep(slot, tokens, written)              # the request is over, its tokens stay

To go on at position b one needs, beside the keys and values before b, the queries, keys and values of token b - 1 as
they came out of the projection (nn/gpt.py mixes them into those of token b). The cache has these at three kinds of
places per slot (`KVCache.raw`): of the two newest tokens, one at each parity of the position; of the last but one token
that prefill read, so that the same prompt again costs one token; and of the last token of every block of BLOCK tokens
that prefill read. Decoding writes the first kind only.

A layer with a window of W tokens is a ring: position p lies at p % W. Token b sees the positions from b - W + 1 on, and
that one is overwritten by position b + 1. So with `written` positions written, a slot can go on at b if

    written <= W  (nothing was overwritten yet)   or   written <= b + 1

for the smallest W; a layer that sees the whole context never turns. A request that was ended runs at most one step too
many, which writes position b behind the b tokens that are kept: so their end can always be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ascendchat.engine.padding import padded_length
from ascendchat.sizes.shape import PREFIX_BLOCK as BLOCK

SECOND_LAST = 2  # place in `raw` of the last but one token that prefill read; 0 and 1: the newest tokens
FIRST_BLOCK = 3  # place of the last token of the first block; the other blocks follow
MIN_REUSE = 16  # fewer tokens are read again: that is a fraction of the smallest pass
# The same where the device works on its own: a pass over few tokens costs it as much as one over thousands, and the
# copy comes on top. 1,024 answers of 64 short prompts take an H200 half the time if every prompt is read anew.
MIN_REUSE_ASYNC = 256
MAX_COPIES = 32  # slots that are copied at once: each needs its size in memory a second time

Tokens = NDArray[np.int32]


def block_place(border: int) -> int:
    """The place in `raw` of the token before this border, a multiple of BLOCK."""
    return FIRST_BLOCK + border // BLOCK - 1


def borders(start: int, end: int) -> range:
    """The borders whose last token is read when prefill reads the positions from start to end - 1."""
    return range((start // BLOCK + 1) * BLOCK, end + 1, BLOCK)


def head_of(tokens: Tokens, salt: str = "") -> bytes:
    """The salt and the first tokens, as many as are worth it, b"" where there are fewer: most rows are told apart by
    it, fast. Rows of different salts never have equal ones."""
    return salt.encode() + tokens[:MIN_REUSE].tobytes() if len(tokens) >= MIN_REUSE else b""


def as_tokens(tokens: Sequence[int]) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


class Hit(NamedTuple):
    """A slot has the first `length` tokens of a prompt, and at `place` of `raw` what the next token needs."""

    slot: int
    length: int
    place: int


class Copy(NamedTuple):
    """The first `length` tokens of a slot into another, or the same, which goes on behind them; `place`: where the
    source's `raw` has the last of them."""

    source: int
    target: int
    length: int
    place: int


@dataclass(frozen=True)
class CacheEntry:
    """The contents of one slot."""

    tokens: Tokens  # whose keys and values are there, from position 0 on
    written: int  # positions that its rings have seen at most: also by steps too many, and before it was continued
    newest: int  # positions that its newest tokens in `raw` have seen at most
    borders_kept: frozenset[int] = frozenset()  # borders that have their token in `raw`
    second_last: int = 0  # position whose token before is at SECOND_LAST; 0: none
    used: int = 0  # when: a count, not a time
    salt: str = ""  # whose they are: see Request.salt

    @cached_property
    def head(self) -> bytes:
        return head_of(self.tokens, self.salt)

    def read(self, prompt: Tokens, start: int, end: int) -> CacheEntry:
        """After prefill read these positions of a prompt, the tokens before which are here."""
        borders_kept = frozenset(mark for mark in self.borders_kept if mark <= start) | frozenset(borders(start, end))
        written = max(self.written, end) if start else end
        return replace(
            self, tokens=prompt[:end], written=written, newest=end, borders_kept=borders_kept, second_last=end - 1
        )

    def extended(self, written: int) -> CacheEntry:
        """After a running request has written so many positions."""
        return replace(self, written=max(self.written, written), newest=written)

    def first(self, length: int) -> CacheEntry:
        """Only the first tokens, behind which the slot will go on; the rings are as they are."""
        borders_kept, second_last = (
            frozenset(mark for mark in self.borders_kept if mark <= length),
            self.second_last if self.second_last <= length else 0,
        )
        return replace(
            self, tokens=self.tokens[:length], newest=length, borders_kept=borders_kept, second_last=second_last
        )

    def usable(self, prompt: Tokens, ring: int, salt: str = "") -> tuple[int, int]:
        """Tokens of the prompt that need not be read again, all but the last at most, and their place in `raw`."""
        if not self.head or self.head != head_of(prompt, salt):
            return 0, 0
        most = min(len(self.tokens), len(prompt) - 1)
        different = np.flatnonzero(self.tokens[:most] != prompt[:most])
        common = int(different[0]) if len(different) else most
        end = len(self.tokens)
        mark = next((border for border in range(common // BLOCK * BLOCK, 0, -BLOCK) if border in self.borders_kept), 0)
        choices = [(mark, block_place(mark))]
        if self.second_last <= common:
            choices.append((self.second_last, SECOND_LAST))
        if end <= common and self.newest <= end + 1:
            choices.append((end, (end - 1) % 2))
        length, place = max(choices)  # if the rings do not have what the longest needs, then not what others need
        if length < MIN_REUSE or self.written > max(ring, length + 1):
            return 0, 0
        return length, place


EMPTY = CacheEntry(as_tokens([]), 0, 0)


class PrefixCache:
    """The contents of all slots. `windows`: tokens that each layer sees. `enabled`: False finds nothing, ever.
    `written`: positions that the running request of a slot has written by now, or None where none runs. `least`: tokens
    of a prompt that are worth going on behind."""

    def __init__(
        self,
        slots: int,
        windows: Sequence[int],
        enabled: bool = True,
        written: Callable[[int], int | None] = lambda slot: None,
        least: int = MIN_REUSE,
    ) -> None:
        self.entries: list[CacheEntry | None] = [None] * slots
        self.ring, self.enabled, self.written, self.least = min(windows), enabled, written, least
        self._clock = 0

    def may_share(self, prompt: Tokens) -> bool:
        """True if a prompt is long enough to go on behind another."""
        return self.enabled and len(prompt) > self.least

    def find(self, prompt: Tokens, salt: str = "") -> Hit | None:
        """The slot that saves the most, of those of this salt; of equals the one used last."""
        best: tuple[int, int, Hit] | None = None
        head = head_of(prompt, salt) if self.may_share(prompt) else b""
        for slot, entry in enumerate(self.entries) if head else ():
            if entry is not None and entry.head == head:
                entry = self._wrote(slot, entry)
                length, place = entry.usable(prompt, self.ring, salt)
                if length >= self.least and (best is None or (length, entry.used) > best[:2]):
                    best = length, entry.used, Hit(slot, length, place)
        return None if best is None else best[2]

    def promised(self, slot: int, begun: int, coming: Tokens, prompt: Tokens, salt: str = "") -> int:
        """Tokens of a prompt that a slot will have when the prompt `coming`, of which it has `begun`, is read; both of
        this salt."""
        entry = self.entries[slot] if begun else replace(EMPTY, salt=salt)
        if entry is None or not self.may_share(prompt):
            return 0
        length, _ = entry.read(coming, begun, len(coming)).usable(prompt, self.ring, salt)
        return length if length >= self.least else 0

    def choose(self, hit: Hit | None, free: Sequence[int], top: int) -> int:
        """The free slot to run in. A step runs all slots up to the highest busy one (`top`): one that makes steps no
        longer; there, the one that has the prefix, else the one whose contents were used the longest time ago."""
        most = max(top, min(free))
        cheap = [slot for slot in free if slot <= most]
        if hit is not None and hit.slot in cheap:
            return hit.slot
        return min(cheap, key=self._used)

    def take(self, slot: int, hit: Hit | None, free: Sequence[int]) -> list[Copy]:
        """Give a slot to a request that goes on behind a hit (None: at the beginning). What is lost of its contents
        moves to another free slot, if that has something older. All copies read before any of them writes."""
        old, copies = self.entries[slot], []
        source = None if hit is None else self.entries[hit.slot]
        new, spent = None, 0  # `spent`: tokens of the old contents that live on in the new
        if hit is not None and source is not None:
            self._clock += 1
            new, spent = replace(source.first(hit.length), used=self._clock), hit.length if hit.slot == slot else 0
            copies.append(Copy(hit.slot, slot, hit.length, hit.place))
            if hit.slot != slot and hit.slot in free and len(source.tokens) - hit.length < BLOCK:
                self.entries[hit.slot] = None  # nearly all of it lives on
            elif hit.slot != slot:
                self.entries[hit.slot] = replace(source, used=self._clock)
        if old is not None and len(old.tokens) - spent >= (BLOCK if spent else self.least):
            spare = min((other for other in free if other != slot), key=self._used, default=None)
            if spare is not None and self._used(spare)[0] < old.used:
                copies.append(Copy(slot, spare, len(old.tokens), (len(old.tokens) - 1) % 2))
                self.entries[spare] = old
        self.entries[slot] = new
        return copies

    def _used(self, slot: int) -> tuple[int, int]:
        entry = self.entries[slot]
        return (-1 if entry is None else entry.used), slot

    def read(self, slot: int, prompt: Tokens, start: int, end: int, salt: str = "") -> None:
        """Positions start to end - 1 of a prompt of this salt were read into a slot; a slot that was cleared while a
        request is under way stays so."""
        entry = self.entries[slot] if start else replace(EMPTY, salt=salt)
        if entry is not None and self.enabled:
            self._clock += 1
            self.entries[slot] = replace(entry.read(prompt, start, end), used=self._clock)

    def _wrote(self, slot: int, entry: CacheEntry) -> CacheEntry:
        """The contents of a slot, after what its running request has written since."""
        now = self.written(slot)
        if now is not None:
            self.entries[slot] = entry = entry.extended(now)
        return entry

    def keep(self, slot: int, tokens: Tokens, written: int) -> None:
        """A request is over: these tokens of it are in the cache."""
        entry = self.entries[slot]
        if entry is not None:
            self._clock += 1
            self.entries[slot] = replace(entry.extended(written), tokens=tokens, used=self._clock)

    def clear(self) -> None:
        """The weights have changed: nothing that was computed before may be used for a new request."""
        self.entries = [None] * len(self.entries)


def rounds(groups: Sequence[Sequence[Copy]]) -> list[list[Copy]]:
    """Groups of copies that follow each other, as few lists each of which may be done at once: within one, everything
    is read before anything is written."""
    result: list[list[Copy]] = []
    targets: set[int] = set()
    for group in groups:
        touched = {copy.source for copy in group} | {copy.target for copy in group}
        if not result or touched & targets or len(result[-1]) + len(group) > MAX_COPIES:
            result.append([])
            targets = set()
        result[-1] += group
        targets |= {copy.target for copy in group}
    return [copies for copies in result if copies]


# Prompts on their way into the cache: who begins where, and what the next pass reads. Host only; engine.py uses it.
#
#     scheduler.enter(state, free, top)               # gives the state a slot
#     scheduler.begin(free)                         # whoever need not wait for another begins behind what the cache has
#     scheduler.next_pass(left, whole)              # -> [PromptPart, ...], the prompts or pieces of prompts of one pass
#
# First come, first served: slots are given in that order, and the first of the list is in every pass. A prompt that
# shares a long beginning with one before it waits until that has been read, and then goes on behind a copy: so of n
# samples of one prompt, or of prompts with one system message, the common part is read once.

PASS_TOKENS = 16384  # of one pass over prompts, padding included
UNDECIDED = -1  # `cached` of a state that waits for another's prompt


class _PromptState(Protocol):
    """A request, as far as the scheduler knows it."""

    slot: int
    tokens: Tokens  # its prompt
    salt: str  # it goes on behind prompts of the same one only
    head: bytes  # of the tokens and the salt, see prefix.head_of
    cached: int  # tokens of the prompt that are in its slot, or UNDECIDED

    def begin(self, cached: int) -> None:
        """It will be read behind so many tokens."""


class PromptPart(NamedTuple):
    """Read the tokens of a prompt from start to end - 1."""

    state: Any
    start: int
    end: int


class PrefillScheduler:
    """The requests that have a slot and whose prompts are not read to the end, in the order in which they came."""

    def __init__(self, prefixes: PrefixCache) -> None:
        self.prefix_cache = prefixes
        self.waiting: list[_PromptState] = []
        self.copies: list[list[Copy]] = []  # to be done before the next pass, in this order

    def enter(self, state: _PromptState, free: Sequence[int], top: int) -> None:
        """Give the state one of the free slots; `top` is the highest slot that is busy, or -1."""
        hit = self.prefix_cache.find(state.tokens, state.salt)
        state.slot = self.prefix_cache.choose(hit, free, top)
        self._begin(state, hit, self.waiting, free)
        if state.cached == UNDECIDED:  # what lies in its slot must be out of the way
            self._copy(self.prefix_cache.take(state.slot, None, free))
        self.waiting.append(state)

    def begin(self, free: Sequence[int]) -> None:
        """Begin the requests that waited for a prompt that is read now."""
        for number, state in enumerate(self.waiting):
            if state.cached == UNDECIDED:
                self._begin(state, self.prefix_cache.find(state.tokens, state.salt), self.waiting[:number], free)

    def _begin(self, state: _PromptState, hit: Hit | None, before: Sequence[_PromptState], free: Sequence[int]) -> None:
        length = 0 if hit is None else hit.length
        for other in before if self.prefix_cache.may_share(state.tokens) else ():
            if other.head != state.head:
                continue
            begun = max(0, other.cached)
            worth = MIN_REUSE if begun else BLOCK  # tokens that outweigh a pass more
            if self.prefix_cache.promised(other.slot, begun, other.tokens, state.tokens, state.salt) >= length + worth:
                return
        self._copy(self.prefix_cache.take(state.slot, hit, free))
        state.begin(length)

    def _copy(self, copies: list[Copy]) -> None:
        if copies:
            self.copies.append(copies)

    def next_pass(self, left: int, whole: bool) -> tuple[list[PromptPart], int]:
        """The prompts or parts of prompts to read next, and their tokens, padding included: up to `left`. `whole`: this
        is all that may be read before the rows that run go on, so a prompt with more is cut. Prompts that begin and
        prompts that go on are read in different passes."""
        parts: list[PromptPart] = []
        width = 0
        for state in self.waiting:
            start, end = state.cached, len(state.tokens)
            if start == UNDECIDED or (parts and bool(start) != bool(parts[0].start)):
                continue
            size = padded_length(end - start)
            if not parts and size > left:
                if not whole:
                    break
                end = min(end, start + max(1, left // 16 * 16))
                return [PromptPart(state, start, end)], padded_length(end - start)
            wider = max(width, size)
            if wider * (len(parts) + 1) > (min(left, PASS_TOKENS) if parts else left):
                break
            parts.append(PromptPart(state, start, end))
            width = wider
        return parts, width * len(parts)

    def restart(self) -> None:
        """Other weights: what was read of the prompts, or is to be copied for them, is no longer theirs."""
        self.copies.clear()
        for state in self.waiting:
            state.cached = UNDECIDED

    def done(self, part: PromptPart) -> bool:
        """A part was read; whether it was the last of its prompt."""
        state = part.state
        self.prefix_cache.read(state.slot, state.tokens, part.start, part.end, state.salt)
        state.cached = part.end
        if part.end < len(state.tokens):
            return False
        self.leave(state)
        return True

    def leave(self, state: _PromptState) -> None:
        """A request that is over, however far it came."""
        if state in self.waiting:
            self.waiting.remove(state)
