"""The state of all running rows on the host, as arrays by slot: the result of a step of hundreds of rows is taken in
with a dozen operations, not with some for every row.

    batch.enter(slot, ...); batch.leave(slot)
    rows = batch.launch(batch.runs())                        # one more step is under way for these slots
    special, ended = batch.append(rows, ids, logprobs, version)   # rows whose token means more than text

A token that is only text is written down here; an answer's own lists get it when somebody reads them (engine.py). On an
H200, 512 rows whose answers end at any time: looking at each took 2 us a token, and the device waited for the host.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
READ_EVERY, LAST_READS = 64, 16  # passes


class PassRows(NamedTuple):
    """The rows of a pass, (R,) each."""

    slots: Ints
    owners: Ints  # who had the slots then
    numbers: Ints  # which pass of its request it is for each row, from 0 on


class BatchState:
    """Arrays by slot, (slots,) each. `context`: tokens of a row at most."""

    def __init__(self, slots: int, context: int, vocab: int) -> None:
        def numbers() -> Ints:
            return np.zeros(slots, np.int64)

        self.owner, self.entered = numbers(), 0  # the number of the request in it, from 1 on; 0: nobody's
        self.ids = np.zeros((slots, context), np.int32)  # of the answer: its tokens,
        self.versions = np.zeros((slots, context), np.int64)  # the weights of each; some count them by the clock
        self.logprobs = np.zeros((slots, context), np.float32)
        self.written = numbers()  # tokens of the answer
        self.launched = numbers()  # passes that will bring a token of this row: the prompt's is the first
        self.limit = numbers()  # tokens of the answer at most
        self.prompt = numbers()  # tokens of the prompt
        self.draw = numbers()  # sampling.Draw
        self.tables = np.zeros(slots, np.bool_)  # sampling.Mode.tables
        self.plain = np.zeros(slots, np.bool_)  # tokens that are not watched need no look
        self.constrained = np.zeros(slots, np.bool_)  # the row has a grammar
        self.forced = np.zeros(slots, np.bool_)  # a tool's result is to be put in
        self.watched = np.zeros(vocab, np.int64)  # by token: how many of the sets below have it
        self._watchers: Counter[frozenset[int]] = Counter()  # requests with a slot, by the tokens that mean something
        self._watched: list[frozenset[int]] = [frozenset()] * slots  # those tokens, by slot

    def enter(
        self, slot: int, prompt: int, limit: int, mode: tuple[int, bool], watched: frozenset[int], *, constrained: bool
    ) -> None:
        """A request takes a slot."""
        self.entered += 1
        self.owner[slot], self.prompt[slot], self.limit[slot] = self.entered, prompt, limit
        self.draw[slot], self.tables[slot] = mode
        self.written[slot] = self.launched[slot] = 0
        self.constrained[slot], self.forced[slot] = constrained, False
        self._watched[slot] = watched
        self._watchers[watched] += 1
        if self._watchers[watched] == 1:
            self._watch(watched, 1)

    def leave(self, slot: int) -> None:
        self.owner[slot], watched = 0, self._watched[slot]
        self.constrained[slot] = self.forced[slot] = False
        self._watchers[watched] -= 1
        if not self._watchers[watched]:
            del self._watchers[watched]
            self._watch(watched, -1)

    def move(self, sources: Ints, targets: Ints) -> None:
        """Move the requests of some slots to others, which are free."""
        numbers = self.owner, self.written, self.launched, self.limit, self.prompt, self.draw, self.tables
        for column in (*numbers, self.ids, self.versions, self.logprobs, self.plain, self.constrained, self.forced):
            column[targets] = column[sources]
        for source, target in zip(sources, targets):
            self._watched[target] = self._watched[source]
        self.owner[sources] = 0
        self.constrained[sources] = self.forced[sources] = False

    def _watch(self, tokens: frozenset[int], more: int) -> None:
        self.watched[[token for token in tokens if 0 <= token < len(self.watched)]] += more

    def free(self) -> list[int]:
        """The free slots."""
        slots: list[int] = np.flatnonzero(self.owner == 0).tolist()
        return slots

    def runs(self) -> Ints:
        """Slots whose prompts are read and whose last token is not under way."""
        return np.flatnonzero((self.owner > 0) & (self.launched > 0) & (self.launched < self.limit))

    def needs(self, slots: Ints) -> tuple[int, int, bool]:
        """Tokens of the longest of these rows behind the next step, and what sampling.Mode does what all need."""
        longest = int((self.prompt[slots] + self.launched[slots]).max())
        return longest, int(self.draw[slots].max()), bool(self.tables[slots].any())

    def launch(self, slots: Ints) -> PassRows:
        """Note that a pass which brings each of these rows a token is under way."""
        rows = PassRows(slots, self.owner[slots], self.launched[slots])
        self.launched[slots] += 1
        return rows

    def there(self, rows: PassRows) -> NDArray[np.bool_]:
        """(R,) bool: rows whose slot still belongs to the same request."""
        return self.owner[rows.slots] == rows.owners

    def to_read(self, rows: PassRows) -> list[int]:
        """Slots whose text is to be made now: of each row at every READ_EVERYth pass, and once in the last passes
        before its limit, each in another one: so where many answers end at once nobody waits for all their text."""
        slots, left = rows.slots, self.limit[rows.slots] - rows.numbers
        due = ((rows.numbers + slots) % READ_EVERY == 0) | (left == 2 + slots % LAST_READS)
        due_slots: list[int] = slots[due & self.there(rows)].tolist()
        return due_slots

    def append(
        self, rows: PassRows, ids: Ints, logprobs: NDArray[np.float32], version: int
    ) -> tuple[list[int], list[int]]:
        """Append what a pass brought to the answers, (R,) each. Numbers of the rows whose token is special, so that
        somebody must look at it; and of those that are at their limit with it, and over."""
        slots, at, there = rows.slots, self.written[rows.slots], self.there(rows)
        text = there & self.plain[slots] & (self.watched[ids] == 0)
        to, place = slots[text], at[text]
        self.ids[to, place], self.logprobs[to, place], self.versions[to, place] = ids[text], logprobs[text], version
        self.written[to] = place + 1
        ended = text & (at + 1 >= self.limit[slots])
        return np.flatnonzero(there & ~text).tolist(), np.flatnonzero(ended).tolist()
