"""The pairs of `finetune --stage dpo`: `--data NAME=WEIGHT,...` as rows to train and validate on.

    opened = open_pair_mixture(("dpo_en.jsonl=0.7", "data/dpo_zh_demo=0.3"), tokenizer, seq_len, seed=0)
    batches = PairBatches(opened.sources, bins_per_step)          # data/pair_rows.py

An entry is a file or folder of pairs in any known form (data/pairs.py), or a name of a registry (data/registry.py).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.data.chat import Encoder
from ascendchat.data.mixture import fingerprint, is_held_out, parse_mixture
from ascendchat.data.pair_rows import PairCounts, PairRows, RenderedPair, render_pair
from ascendchat.data.pairs import Pair, pairs
from ascendchat.tasks.dialog import sets_at, tables_of
from ascendchat.tasks.mixture import VALIDATION

Say = Callable[[str], None]


@dataclass(frozen=True)
class PairMixture:
    """An opened mixture. The pairs of all its rows are numbered, those of the validation behind the others."""

    sources: list[tuple[PairRows, float]]
    validation: list[PairRows]  # pairs that are not trained on, of each entry

    @property
    def every(self) -> list[PairRows]:
        return [*(rows for rows, _ in self.sources), *self.validation]

    @property
    def pairs(self) -> int:
        """Those that are trained on."""
        return sum(rows.pairs for rows, _ in self.sources)

    @property
    def bins(self) -> int:
        """Of one epoch of all entries."""
        return sum(rows.per_epoch for rows, _ in self.sources)

    @property
    def facts(self) -> list[Any]:
        """Fingerprint and weights: what a resumed run must have in common with the one it continues."""
        return [fingerprint(self.sources), *[weight for _, weight in self.sources]]

    @property
    def identity(self) -> str:
        """Of all pairs, those to validate on too."""
        return fingerprint([(rows, 1.0) for rows in self.every])


def read_pairs(name: str, say: Say) -> Iterator[Pair]:
    """All pairs that an entry of --data stands for."""
    for listed in sets_at(Path(name).expanduser(), ranking=True):
        for file in tables_of(listed, "train"):
            yield from pairs(file, limit=listed.limit, arrange=listed.arrange, say=say)


def open_pair_mixture(
    data: Sequence[str], tokenizer: Encoder, seq_len: int, *, seed: int = 0, say: Say = print
) -> PairMixture:
    """Read every entry once. Entries without a weight count by their rows."""
    opened = PairMixture([], [])
    for name, weight in parse_mixture(data):
        rows, validation = open_pairs(name, tokenizer, seq_len, seed, say)
        opened.sources.append((rows, float(rows.per_epoch) if weight is None else weight))
        opened.validation.append(validation)
    number = 0
    for rows in opened.every:
        rows.first, number = number, number + rows.pairs
    return opened


def open_pairs(name: str, tokenizer: Encoder, seq_len: int, seed: int, say: Say) -> tuple[PairRows, PairRows]:
    """Rows to train on and rows to validate on of one entry, which is read once."""
    counts, held = PairCounts(), list[Pair]()

    def rendered(found: Iterable[Pair]) -> Iterator[RenderedPair]:
        sides = (render_pair(tokenizer, pair, seq_len + 1, counts) for pair in found)
        return (pair for pair in sides if pair is not None)

    train = rendered(hold_out(read_pairs(name, say), held))
    begin = list(itertools.islice(train, 1))
    if not begin:  # the hash chose all for validation
        train, begin, held = rendered(held), [], []
    pad = tokenizer.specials["<|pad|>"]
    rows = PairRows(itertools.chain(begin, train), seq_len, seed, pad)
    kept = list(rendered(held))
    counts.check()
    say(f"{name}: {counts.line()}; {2 * rows.per_epoch} rows, {rows.filled:.0%} full")
    if not kept:
        say(f"{name} is too small to keep some for validation: validated on the first, which is also trained on")
    return rows, PairRows(kept or [rows.pair(0)], seq_len, seed, pad)


def hold_out(found: Iterable[Pair], held: list[Pair]) -> Iterator[Pair]:
    """The pairs to train on; those kept for validation go to `held`, all of a prompt or none."""
    for pair in found:
        if is_held_out(json.dumps(pair.prompt, sort_keys=True).encode(), VALIDATION):
            held.append(pair)
        else:
            yield pair
