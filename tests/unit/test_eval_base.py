"""`ascendchat eval base`: bits per byte, and the command from a checkpoint on disk to its JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from test_core import CPU, KERNEL, Hashed, Letters, model  # noqa: F401 (model is a fixture)

from ascendchat.data.corpus import IGNORE
from ascendchat.eval.base import bits_per_byte, text_rows
from ascendchat.eval.scorer import Example, ModelScorer, Pending, Scored
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import token_nats

TEXTS = ["the cat sat on the mat. " * 30, "one", "", "two old dogs ran\nand ran " * 7]


class Uniform:
    """Gives every token of a vocabulary of 41 the same probability."""

    def submit(self, examples: Sequence[Example]) -> Pending:
        lengths = [len(e.rows[0]) - e.starts[0] for e in examples]
        return lambda: [[Scored(np.full(n, math.log(41), np.float32), np.zeros(n, bool))] for n in lengths]


def test_a_uniform_model_costs_log2_of_the_vocabulary_per_token() -> None:
    token_bytes = np.ones(41, dtype=np.int64)  # one token per character, one byte each
    bits = bits_per_byte(Uniform(), text_rows(Letters(), TEXTS, 32), token_bytes)
    assert bits.tokens == bits.bytes == sum(map(len, TEXTS))
    assert bits.bits_per_byte == pytest.approx(math.log2(41), rel=1e-6)
    wide = bits_per_byte(Uniform(), text_rows(Letters(), TEXTS, 32), 3 * token_bytes)
    assert wide.bits_per_byte == pytest.approx(math.log2(41) * wide.tokens / wide.bytes, rel=1e-6)


@pytest.mark.parametrize("seq_len", [7, 64, 5000])
def test_every_token_of_every_text_is_a_target_once(seq_len: int) -> None:
    rows = list(text_rows(Hashed(), TEXTS, seq_len))
    assert all(len(inputs) == len(targets) <= seq_len for inputs, targets in rows)
    assert [int(t) for _, targets in rows for t in targets] == [t for text in TEXTS for t in Hashed().encode(text)]


def test_the_model_is_scored_as_its_loss_says(model: GPT) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    rows: list[Any] = []
    for _ in range(150):  # more than the scorer is given at once
        stream = rng.integers(0, 41, 25)
        rows.append((stream[:-1], np.where(rng.random(24) < 0.3, IGNORE, stream[1:])))
    rows.append((np.zeros(24, np.int64), np.full(24, IGNORE)))  # nothing to score
    token_bytes = rng.integers(1, 9, 41)
    token_bytes[[5, 40]] = 0  # specials
    inputs, targets = (torch.tensor(np.stack(part)) for part in zip(*rows))
    with torch.no_grad():
        nats = token_nats(model(inputs, dense(model, KERNEL)), model.head, targets, 41)
    counted = (targets != IGNORE) & (torch.tensor(token_bytes)[targets.clamp(min=0)] > 0)
    expected_bytes = int(torch.tensor(token_bytes)[targets[counted]].sum())
    bits = bits_per_byte(ModelScorer(model, KERNEL, CPU, max_tokens=500), rows, token_bytes)
    assert (bits.tokens, bits.bytes) == (int(counted.sum()), expected_bytes)
    assert bits.nats == pytest.approx(float(nats[counted].double().sum()), rel=1e-6)
    assert bits.bits_per_byte == pytest.approx(bits.nats / math.log(2) / expected_bytes)
