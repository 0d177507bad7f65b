"""Scores token rows, many in one forward pass: nats of each token and greedy hits, for `eval base` and validation.

    scorer = ModelScorer(model, kernel, torch.device("cpu"))
    result = scorer.submit([Example([[0, 5, 7], [0, 5, 9]], starts=[2, 2])])     # queued, the host goes on
    result()[0][1].nats                                                         # waits; row 1, from its start

Rows of similar length share a batch. Rows of one example with a common prefix (the options behind a long few-shot
prompt) compute it once: its keys and values are cached, and each option is a short row that attends to them. Logits are
computed at the scored positions only. Padding stands behind the rows, where a causal model cannot see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ascendchat.engine.padding import Row, padded_length, stack, to_device
from ascendchat.errors import UserError
from ascendchat.nn.attention import Attention, dense, documents
from ascendchat.nn.gpt import shifted
from ascendchat.nn.loss import chunk_rows
from ascendchat.nn.model import Documents, LanguageModel

MAX_TOKENS = 32768  # tokens of one forward pass
MIN_PREFIX = 64  # tokens; a shorter common prefix is cheaper to repeat than to cache
KEYS_PER_TOKEN = 4  # a copied key and value take about a quarter of the memory of a token in the MLP


@dataclass(frozen=True)
class Example:
    """Rows to score, row i from token starts[i] to its end. `shared`: rows with equal starts have equal tokens before
    them."""

    rows: Sequence[Row]
    starts: Sequence[int]
    shared: bool = False


class Scored(NamedTuple):
    """The scores of one row."""

    nats: np.ndarray  # of each scored token
    greedy: np.ndarray  # True where it is the model's first choice


Pending = Callable[[], list[list[Scored]]]


class Scorer(Protocol):
    """A model that scores rows."""

    def submit(self, examples: Sequence[Example]) -> Pending:
        """Begin. The returned function waits for the scores: per example, per row."""


class _UniqueRow(NamedTuple):
    """One row to compute: `tokens[start:]` is scored."""

    tokens: Row
    start: int
    copies: list[tuple[int, int]]  # (example, row) of all equal rows, which get the result


class _PrefixGroup(NamedTuple):
    """Rows with the same first `start - 1` tokens, which are computed once."""

    prefix: Row
    options: list[_UniqueRow]


def row_length(flag: str, given: int | None, trained: int) -> int:
    """Tokens per row: those given, by default as many as in training. The model has never seen later positions, and a
    score over them would say nothing."""
    if given is not None and given > trained:
        raise UserError(f"{flag} {given}: this model was trained with rows of {trained} tokens; give at most those")
    return given or trained


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Group indices into batches whose padded size is within `budget` tokens, longest first: memory runs out in the
    first batch or never."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * padded_length(lengths[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def unique_rows(examples: Sequence[Example]) -> tuple[list[_UniqueRow], list[_PrefixGroup]]:
    """Rows to compute whole, and groups that share their prefix. Rows without a scored token are left out, and equal
    options computed once: their scores must be equal to the last bit, for the first of equals is the model's choice."""
    whole: list[_UniqueRow] = []
    groups: list[_PrefixGroup] = []
    for number, example in enumerate(examples):
        by_start: dict[int, dict[tuple[int, ...], _UniqueRow]] = {}
        for i, (tokens, start) in enumerate(zip(example.rows, example.starts)):
            if start < 1:
                raise ValueError(f"row {i} is scored from token {start}; the first token has nothing before it")
            if start < len(tokens):
                key = tuple(tokens[start:] if example.shared else tokens) if len(example.rows) > 1 else ()
                piece = by_start.setdefault(start, {}).setdefault(key, _UniqueRow(tokens, start, []))
                piece.copies.append((number, i))
        for start, unique in by_start.items():
            pieces = list(unique.values())
            if example.shared and len(pieces) > 1 and start - 1 >= MIN_PREFIX:
                groups.append(_PrefixGroup(pieces[0].tokens[: start - 1], pieces))
            else:
                whole += pieces
    return whole, groups


class ModelScorer:
    """Scores with a model, on any device; the host does not wait for the device before a result is read."""

    def __init__(
        self,
        model: LanguageModel,
        kernel: Attention,
        device: torch.device,
        *,
        max_tokens: int = MAX_TOKENS,
        max_len: int | None = None,
        pin: bool = False,
        bos: int | None = None,
    ) -> None:
        """`bos`: each such token begins a document, and tokens attend within their own document only."""
        self.model, self.kernel, self.device, self.pin, self.bos = model, kernel, device, pin, bos
        self.put = partial(to_device, place=device, pin=pin)
        self.max_tokens, self.max_len = max_tokens, max_len or model.shape.seq_len
        room = padded_length(self.max_len) + padded_length(self.max_len)  # a prefix and an option, each rounded up
        self.windows, self.room, self.scale = model.shape.windows(room), room, model.scale
        self.vocab = model.shape.vocab

    @torch.no_grad()
    def submit(self, examples: Sequence[Example]) -> Pending:
        """Queue all rows; the returned function copies the results to the host."""
        was_training = self.model.training
        self.model.eval()
        whole, groups = unique_rows(examples)
        order: list[_UniqueRow] = []
        parts: list[Tensor] = []  # each (2, scored tokens): nats and hits
        for batch in batches([len(piece.tokens) - 1 for piece in whole], self.max_tokens):
            pieces = [whole[i] for i in batch]
            order += pieces
            parts.append(self.score_whole(pieces))
        for batch in batches([len(group.prefix) for group in groups], self.max_tokens):
            for pieces, part in self.score_groups([groups[i] for i in batch]):
                order += pieces
                parts.append(part)
        self.model.train(was_training)
        sizes = [len(example.rows) for example in examples]
        return lambda: collect(sizes, order, parts)

    def score_whole(self, pieces: Sequence[_UniqueRow]) -> Tensor:
        """Compute complete rows, each from its first token. (2, scored tokens)"""
        inputs = [piece.tokens[:-1] for piece in pieces]
        width = padded_length(max(map(len, inputs)))
        attend = dense(self.model, self.kernel, self.room)
        rows = stack(inputs, width)
        tokens = self.put(rows)
        hidden = self.model(tokens, attend, documents=self.documents(rows, tokens))  # (B, T, C)
        return self.score_tokens(hidden, pieces, [piece.start - 1 for piece in pieces])

    def documents(self, rows: np.ndarray, tokens: Tensor) -> Documents | None:
        """The documents in these rows, if attention keeps within them."""
        if self.bos is None:
            return None
        begins = np.asarray(rows) == self.bos
        begins[:, 0] = True
        lengths = np.diff(np.append(np.flatnonzero(begins), begins.size))
        model = self.model
        return documents(self.kernel, lengths, tokens, model.dtype, pin=self.pin, restarts=model.restarts)

    def score_groups(self, groups: Sequence[_PrefixGroup]) -> Iterator[tuple[list[_UniqueRow], Tensor]]:
        """Compute the prefixes, then the options of all groups in batches of their own."""
        lengths = [len(group.prefix) for group in groups]
        options = [(owner, piece) for owner, group in enumerate(groups) for piece in group.options]
        longest = padded_length(max(len(piece.tokens) - piece.start for _, piece in options))
        width = padded_length(max(lengths))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        newest: list[Tensor] = []  # queries, keys and values of the last token of each prefix
        rows, last = self.put(np.arange(len(groups))), self.put(np.array(lengths) - 1)

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(F.pad(k, (0, 0, 0, 0, 0, longest)))  # room for the options behind the prefix
            values.append(F.pad(v, (0, 0, 0, 0, 0, longest)))
            return self.kernel.dense(q, k, v, self.windows[layer], self.scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            newest.append(qkv[rows, last][:, None])
            return shifted(layer, qkv, share)

        self.model(self.put(stack([group.prefix for group in groups], width)), keep, shift=shift)
        budget = max(1, KEYS_PER_TOKEN * self.max_tokens // (width + longest))  # options at a time
        options.sort(key=lambda option: len(option[1].tokens) - option[1].start)
        for first in range(0, len(options), budget):
            part = options[first : first + budget]
            pieces = [piece for _, piece in part]
            owners = np.array([owner for owner, _ in part])
            yield pieces, self.score_options(pieces, owners, np.array(lengths)[owners], (keys, values, newest))

    def score_options(
        self,
        pieces: Sequence[_UniqueRow],
        owners: np.ndarray,
        prefix_lengths: np.ndarray,
        caches: tuple[list[Tensor], ...],
    ) -> Tensor:
        """Compute short rows; row i attends to the cached keys and values of prefix `owners[i]`."""
        keys, values, newest = caches
        width = padded_length(max(len(piece.tokens) - piece.start for piece in pieces))
        tokens = self.put(stack([piece.tokens[piece.start - 1 : -1] for piece in pieces], width))  # (B, Q)
        previous = self.put(np.array([piece.tokens[piece.start - 2] for piece in pieces], dtype=np.int64))
        owner, past = self.put(owners), self.put(prefix_lengths)
        rows = torch.arange(len(pieces), device=self.device)[:, None]
        positions = past[:, None] + torch.arange(width, device=self.device)  # (B, Q)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            all_keys = keys[layer].index_select(0, owner)  # (B, S, K, D)
            all_values = values[layer].index_select(0, owner)
            all_keys[rows, positions] = k
            all_values[rows, positions] = v
            return self.kernel.cached(q, all_keys, all_values, past + width, self.windows[layer], self.scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            before = torch.cat((newest[layer].index_select(0, owner), qkv[:, :-1]), dim=1)
            return torch.addcmul(qkv, before, share.to(qkv.dtype))

        hidden = self.model.extend(tokens, positions, attend, shift, room=self.room, before=previous)  # (B, Q, C)
        return self.score_tokens(hidden, pieces, [0] * len(pieces))

    def score_tokens(self, hidden: Tensor, pieces: Sequence[_UniqueRow], first: Sequence[int]) -> Tensor:
        """(2, scored tokens): nats and greedy hits, row after row; the scores of row i begin at position first[i]."""
        counts = [len(piece.tokens) - piece.start for piece in pieces]
        positions = np.concatenate(
            [np.arange(count) + (i * hidden.size(1) + begin) for i, (count, begin) in enumerate(zip(counts, first))]
        )
        targets = self.put(np.concatenate([np.asarray(p.tokens[p.start :], dtype=np.int64) for p in pieces]))
        scored = hidden.flatten(0, 1).index_select(0, self.put(positions))  # (scored, C)
        head = self.model.head[: self.vocab].t()
        step = chunk_rows(scored, self.model.head)
        nats, hits = [], []
        for start in range(0, len(targets), step):
            logits, target = self.model.cap(scored[start : start + step] @ head), targets[start : start + step]
            nats.append(F.cross_entropy(logits, target, reduction="none"))
            hits.append(logits.argmax(dim=-1) == target)
        return torch.stack((torch.cat(nats), torch.cat(hits).float()))


def collect(sizes: Sequence[int], order: Sequence[_UniqueRow], parts: Sequence[Tensor]) -> list[list[Scored]]:
    """Copy the results to the host at once, and split them into rows; rows that were left out have no tokens."""
    empty = Scored(np.zeros(0, np.float32), np.zeros(0, bool))
    out = [[empty] * size for size in sizes]
    if not order:
        return out
    flat = torch.cat(list(parts), dim=1).cpu().numpy()
    offset = 0
    for piece in order:
        end = offset + len(piece.tokens) - piece.start
        for example, row in piece.copies:
            out[example][row] = Scored(flat[0, offset:end], flat[1, offset:end] > 0.5)
        offset = end
    return out
