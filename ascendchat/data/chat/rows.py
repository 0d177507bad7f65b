"""Conversations packed into rows for mid-training and SFT: `ascendchat mid`, `ascendchat sft`.

    counts = Counts()
    rows = ChatRows.build(tokenizer, conversations, seq_len, seed, counts)
    batches = MixtureLoader([(rows, 1.0)], rows_per_step)   # data/mixture.py: alone or with other rows, and with text

A conversation of n tokens takes n - 1 positions of a row: its last token is only a target. Targets are IGNORE where the
assistant does not speak. `template.render_pieces` splits what is longer than a row, leaves out what has nothing to
learn, and counts both; so every row has a target, no loss is 0/0 and nothing waits in the packer forever.

Rows are packed once, best fit decreasing within windows of a shuffled order, and come in a new order every epoch: the
global batch of a step is a pure function of (conversations, seed, step), whatever the number of devices.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ascendchat.data.chat.render import Conversation, Counts, Encoder, Rendered, render_pieces
from ascendchat.data.corpus import shuffled
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE

WINDOW = 4096  # conversations packed together: enough to fill rows, few enough that long and short ones stay mixed
ORDER, EPOCHS = 0, 1  # salts of two shuffles: before packing, and of the rows in each epoch


def best_fit(lengths: Sequence[int], seq_len: int, window: int = WINDOW) -> list[list[int]]:
    """Pack conversations into rows: the longest first, each into the fullest row that still has room (best fit
    decreasing)."""
    rows: list[list[int]] = []
    for first in range(0, len(lengths), window):
        members = range(first, min(first + window, len(lengths)))
        room: list[tuple[int, int]] = []  # (places left, row), sorted
        for i in sorted(members, key=lambda i: (-lengths[i], i)):
            at = bisect_left(room, (lengths[i], -1))
            if at < len(room):
                left, row = room.pop(at)
                rows[row].append(i)
            else:
                left, row = seq_len, len(rows)
                rows.append([i])
            if left > lengths[i]:
                insort(room, (left - lengths[i], row))
    return rows


class ChatRows:
    """The packed rows of a set of conversations; a mixture.RowSource."""

    def __init__(self, pieces: Iterable[Rendered], seq_len: int, seed: int, pad: int, packing: bool = True) -> None:
        """Pack the pieces; without `packing` every row holds one."""
        self.seq_len, self.seed, self.pad = seq_len, seed, pad
        ids, mask, starts = array("i"), array("b"), array("q", [0])
        for piece in pieces:
            if len(piece.ids) > seq_len + 1 or not any(piece.mask[1:]):
                raise ValueError("a piece is longer than a row or has nothing to learn: use chat.render_pieces")
            ids.extend(piece.ids)
            mask.extend(piece.mask)
            starts.append(len(ids))
        if len(starts) == 1:
            raise UserError("no conversation with a reply was found; look at the file and choose another with --data")
        self.ids = np.frombuffer(ids, dtype=np.int32)
        self.mask = np.frombuffer(mask, dtype=np.int8)
        self.starts = np.frombuffer(starts, dtype=np.int64)
        order = shuffled(len(starts) - 1, seed, 0, ORDER)
        lengths = (np.diff(self.starts)[order] - 1).tolist()
        packed = best_fit(lengths, seq_len) if packing else [[number] for number in range(len(lengths))]
        self.members = [order[row] for row in packed]  # row -> its conversations
        self.per_epoch = len(self.members)
        # Supervised tokens of each conversation, without its first token, which is never a target
        learnt = np.add.reduceat(self.mask, self.starts[:-1], dtype=np.int64) - self.mask[self.starts[:-1]]
        self._learnt = np.array([learnt[row].sum() for row in self.members])  # targets of each row

    @classmethod
    def build(
        cls,
        tokenizer: Encoder,
        conversations: Iterable[Conversation],
        seq_len: int,
        seed: int,
        counts: Counts,
        packing: bool = True,
    ) -> ChatRows:
        """Render, split what is too long, pack. A conversation that the model's chat template refuses is counted and
        left out."""

        def rendered() -> Iterator[Rendered]:
            for talk in conversations:
                try:
                    yield from render_pieces(tokenizer, talk, seq_len + 1, counts)
                except UserError as error:
                    counts.refuse(talk, error)
                if counts.refused > 1000:
                    counts.check()  # no need to read the wrong thing to its end
            counts.check()

        special = tokenizer.specials
        return cls(rendered(), seq_len, seed, special.get("<|pad|>", special["<|bos|>"]), packing)

    @property
    def filled(self) -> float:
        """Share of the positions that hold a token and not padding."""
        return (len(self.ids) - (len(self.starts) - 1)) / (self.per_epoch * self.seq_len)

    @property
    def identity(self) -> memoryview:
        return self.ids.data

    def fill(
        self, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Write rows (see RowSource.fill); padding is the last segment of its row."""
        inputs[:], targets[:] = self.pad, IGNORE
        lengths, counts = list[int](), list[int]()
        for n in range(len(inputs)):
            epoch, row = divmod(number + n, self.per_epoch)
            at, before = 0, len(lengths)
            for i in self.members[self._order(epoch)[row]]:
                begin, end = self.starts[i], self.starts[i + 1]
                length = int(end - begin) - 1  # the last token is only a target
                inputs[n, at : at + length] = self.ids[begin : end - 1]
                targets[n, at : at + length] = np.where(self.mask[begin + 1 : end], self.ids[begin + 1 : end], IGNORE)
                lengths.append(length)
                at += length
            if at < self.seq_len:
                lengths.append(self.seq_len - at)
            counts.append(len(lengths) - before)
        return np.array(lengths, dtype=np.int64), np.array(counts, dtype=np.int64)

    def targets(self, start: int, stop: int) -> int:
        places = (divmod(number, self.per_epoch) for number in range(start, stop))
        return sum(int(self._learnt[self._order(epoch)[row]]) for epoch, row in places)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The order of the rows in an epoch; the last one used is cached."""
        cached: tuple[int, NDArray[np.int64]] | None = getattr(self, "_kept", None)
        if cached is None or cached[0] != epoch:
            cached = self._kept = (epoch, shuffled(self.per_epoch, self.seed, epoch, EPOCHS))
        return cached[1]
