"""The pairs of `finetune --stage dpo`: `--data NAME=WEIGHT,...` as rows to train and validate on.

    opened = open_pair_mixture(("dpo_en.jsonl=0.7", "data/dpo_zh_demo=0.3"), tokenizer, seq_len, seed=0)
    batches = PairLoader(opened.sources, bins_per_step)          # data/chat/pairs.py

An entry is a file or folder of pairs in any known form (data/chat/pairs.py), or a name of a registry
(data/chat/dataset_info.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.data.chat.pairs import Pair, PairCounts, PairRows, RenderedPair, pairs, render_pair
from ascendchat.data.chat.render import Encoder
from ascendchat.data.mixture import fingerprint, is_held_out, parse_mixture
from ascendchat.tasks.chat_mixture import DEFAULT_HELD_OUT
from ascendchat.tasks.dialog import sets_at, tables_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class PairMixture:
    """An opened mixture. The pairs of all its rows are numbered, those of the validation after the others."""

    sources: list[tuple[PairRows, float]]
    validation: list[PairRows]  # pairs that are not trained on

    @property
    def every(self) -> list[PairRows]:
        return [*(rows for rows, _ in self.sources), *self.validation]

    @property
    def pairs(self) -> int:
        """Number of pairs that are trained on."""
        return sum(rows.pairs for rows, _ in self.sources)

    @property
    def bins(self) -> int:
        """Bins of one epoch of all entries."""
        return sum(rows.per_epoch for rows, _ in self.sources)

    @property
    def facts(self) -> list[Any]:
        """Fingerprint and weights, which a resumed run must have in common with the one it continues."""
        return [fingerprint(self.sources), *[weight for _, weight in self.sources]]

    @property
    def identity(self) -> str:
        """Fingerprint of all pairs, those to validate on too."""
        return fingerprint([(rows, 1.0) for rows in self.every])


def read_pairs(name: str, say: Say) -> Iterator[Pair]:
    """Yield all pairs of an entry of --data."""
    for listed in sets_at(Path(name).expanduser(), ranking=True):
        for file, limit in tables_of(listed, "train", say):
            yield from pairs(file, limit=limit, map_row=listed.map_row, say=say)


def open_pair_mixture(
    data: Sequence[str],
    tokenizer: Encoder,
    seq_len: int,
    *,
    seed: int = 0,
    held_out: float = DEFAULT_HELD_OUT,
    max_pairs: int | None = None,
    validation: Sequence[str] = (),
    packing: bool = True,
    say: Say = print,
) -> PairMixture:
    """Read every entry once. Entries without a weight count by their rows. `held_out`: the share of the prompts, or
    from 1 on about the number of pairs, that is held out for validation; 0, or `validation` given: none.
    `max_pairs`: of each entry. Without `packing` two rows hold one pair."""
    opened = PairMixture([], [])
    packer = _PairPacker(tokenizer, seq_len, seed, packing, say)
    for name, weight in parse_mixture(data):
        rows, held_out_rows = packer.split(
            name, itertools.islice(read_pairs(name, say), max_pairs), 0.0 if validation else held_out
        )
        opened.sources.append((rows, float(rows.per_epoch) if weight is None else weight))
        opened.validation.extend(held_out_rows)
    opened.validation.extend(packer.rows(name, read_pairs(name, say)) for name in validation)
    number = 0
    for rows in opened.every:
        rows.first, number = number, number + rows.pairs
    return opened


@dataclass(frozen=True)
class _PairPacker:
    """Renders pairs and packs them into rows."""

    tokenizer: Encoder
    seq_len: int
    seed: int
    packing: bool
    say: Say

    def rendered(self, pairs: Iterable[Pair], counts: PairCounts) -> Iterator[RenderedPair]:
        sides = (render_pair(self.tokenizer, pair, self.seq_len + 1, counts) for pair in pairs)
        return (pair for pair in sides if pair is not None)

    def pack(self, rendered: Iterable[RenderedPair]) -> PairRows:
        return PairRows(rendered, self.seq_len, self.seed, self.tokenizer.specials["<|pad|>"], packing=self.packing)

    def rows(self, name: str, pairs: Iterable[Pair]) -> PairRows:
        """Pack all pairs, and print a line about them."""
        counts = PairCounts()
        rows = self.pack(self.rendered(pairs, counts))
        counts.check()
        self.say(f"{name}: {counts.line()}; {2 * rows.per_epoch} rows, {rows.filled:.0%} full")
        return rows

    def split(self, name: str, pairs: Iterable[Pair], held_out: float) -> tuple[PairRows, list[PairRows]]:
        """Pack rows to train on, and rows to validate on, if any are wanted."""
        if not held_out:
            return self.rows(name, pairs), []
        if held_out >= 1:
            pairs = list(pairs)
            held_out = min(0.5, held_out / max(1, len(pairs)))
        held: list[Pair] = []
        train = hold_out(pairs, held, held_out)
        begin = list(itertools.islice(train, 1))
        if not begin:  # the hash chose all of them
            train, held = iter(held), []
        rows = self.rows(name, itertools.chain(begin, train))
        validation = list(self.rendered(held, PairCounts()))
        if not validation:
            self.say(
                f"{name} is too small to keep some for validation: validated on the first, which is also trained on"
            )
        return rows, [self.pack(validation or [rows.pair(0)])]


def hold_out(pairs: Iterable[Pair], held: list[Pair], share: float) -> Iterator[Pair]:
    """Yield the pairs to train on; those held out for validation go to `held`, all of a prompt or none."""
    for pair in pairs:
        if is_held_out(json.dumps(pair.prompt, sort_keys=True).encode(), share):
            held.append(pair)
        else:
            yield pair
