"""Show data as the model will see it: `ascendchat sft --preview 3`, also of `mid` and `finetune`.

    for text in preview_mixture(config.data, mixture.sources, tokenizer, 3, colours(sys.stdout)):
        print(text)

Rows are shown in the order of the file, rendered and cut as in training, special tokens by their names. Supervised
tokens are green on a terminal and stand in [[ ]] elsewhere; the rest is only read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol, TextIO

import numpy as np

from ascendchat.data.chat.pairs import PairRows
from ascendchat.data.chat.render import Rendered
from ascendchat.data.chat.rows import ChatRows
from ascendchat.data.mixture import RowSource, parse_mixture
from ascendchat.nn import IGNORE
from ascendchat.runs.console import inert

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


class _Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int]) -> str: ...


def colours(stream: TextIO) -> bool:
    """True if supervised tokens can be shown in colour on this stream."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown(tokenizer: _Decoder, row: Rendered, colour: bool) -> str:
    """The text of a row with its supervised tokens marked. Control characters of the data are made visible."""
    begin, end = (GREEN, PLAIN) if colour else ("[[", "]]")
    parts = []
    for learnt, run in groupby(zip(row.ids, row.mask), key=lambda token: bool(token[1])):
        text = inert(tokenizer.decode([token for token, _ in run]))
        parts.append(f"{begin}{text}{end}" if learnt else text)
    return "".join(parts)


def preview_mixture(
    data: Sequence[str], sources: Sequence[tuple[RowSource, float]], tokenizer: _Decoder, count: int, colour: bool
) -> Iterator[str]:
    """Yield the first `count` rows of every entry, each under a line with its name."""
    for (name, _), (rows, _) in zip(parse_mixture(data), sources):
        for title, row in rows_of(rows, count):
            where = f"--- {name}, {title}: {len(row.ids)} tokens, {sum(row.mask)} learnt"
            yield f"{where}\n{shown(tokenizer, row, colour)}"


def rows_of(rows: RowSource, count: int) -> Iterator[tuple[str, Rendered]]:
    """Yield the first rows of a source with their titles, in the order of the file; of a text, rows of training."""
    if isinstance(rows, PairRows):
        for number in range(min(count, rows.pairs)):
            for side, row in zip(("chosen", "rejected"), rows.pair(number)):
                yield f"pair {number + 1}, {side}", row
    elif isinstance(rows, ChatRows):
        for number in range(min(count, len(rows.starts) - 1)):
            span = slice(rows.starts[number], rows.starts[number + 1])
            yield f"row {number + 1}", Rendered(rows.ids[span].tolist(), rows.mask[span].tolist())
    else:
        for number in range(min(count, rows.per_epoch)):
            inputs, targets = np.empty((2, 1, rows.seq_len), dtype=np.int64)
            rows.fill(number, inputs, targets)
            learnt = (targets[0, :-1] != IGNORE).astype(int).tolist()  # each token but the first is a target
            yield f"row {number + 1}", Rendered(inputs[0].tolist(), [0, *learnt])
