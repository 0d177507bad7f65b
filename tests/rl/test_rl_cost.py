"""What a step of `ascendchat rl` does not pay for: padding where nothing is compiled, rows that wait for prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_models import model, tokenizer

from ascendchat.chips import find
from ascendchat.config.rl import RlConfig
from ascendchat.device import pick
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import Reference
from ascendchat.rl.command import BUSY_TOKENS, batch_rows, engine_of, readout_of, split_of
from ascendchat.rl.rollout import AnswerGroup, TaskQuestion, TokenRows, pack
from ascendchat.sizes.memory import caches, training, usable
from ascendchat.sizes.shape import Shape
from ascendchat.tasks.by_name import load
from ascendchat.train.model import TrainModel

T, PAD = 16, 0


def packed(answers: int) -> TokenRows:
    """One answer of 5 tokens to a prompt of 8 in each row."""
    task = load("toy_arithmetic_en", "train")
    answer = Completion([7] * 5, logprobs=[-1.0] * 5, forced=[False] * 5)
    groups = [AnswerGroup(TaskQuestion(i, task, i, [3] * 8), [answer], [1.0], 1, [1.0]) for i in range(answers)]
    return pack(groups, lambda answer: 0.1, T, PAD)


@pytest.mark.parametrize(("answers", "fill", "sizes"), [(5, True, [4, 4]), (5, False, [4, 1]), (0, False, [1])])
def test_only_a_compiled_model_gets_rows_of_padding(answers: int, fill: bool, sizes: list[int]) -> None:
    parts = packed(answers).cut(4, PAD, fill=fill)
    assert [len(part.inputs) for part in parts] == sizes
    assert sum(int((part.targets != IGNORE).sum()) for part in parts) == 5 * answers
    for part in parts:
        assert part.lengths.sum() == part.inputs.size
        assert np.all(part.weight[part.targets == IGNORE] == 0)


def test_all_prompts_are_read_before_the_first_step() -> None:
    """On a CPU an engine reads 512 tokens of prompts between two steps: with 12 of 60 tokens, rows enter one pass after
    the other, and every step is paid for rows that have not begun or are over."""
    device = pick("cpu")
    train_model = TrainModel(model(seq_len=128), Reference(), device, device.bind(0))
    engine, steps = engine_of(train_model, tokenizer(), 12, readout_of(train_model)), 0
    usual = engine.decoder.step

    def counted(*given: object) -> object:
        nonlocal steps
        steps += 1
        return usual(*given)  # type: ignore[arg-type]

    engine.decoder.step = counted  # type: ignore[method-assign,assignment]
    sampling = Sampling(6, 1.0, stop_tokens=(), tools=False)
    answers = engine.generate([Request([10 + i] * 60, sampling) for i in range(12)])
    assert [len(answer.ids) for answer in answers] == [6] * 12
    assert steps == 5  # the first token of each comes with its prompt


@pytest.mark.parametrize(("slots", "longest"), [(64, 2048), (512, 2048), (512, 4096)])
def test_rl_trains_beside_the_caches_of_its_engine_in_batches_without_much_padding(slots: int, longest: int) -> None:
    shape, chip = Shape.from_depth(12, seq_len=longest), find("H200")
    here: Any = SimpleNamespace(device=SimpleNamespace(chip=chip), world=SimpleNamespace(size=1))
    split = split_of(RlConfig(), shape, here, 512, slots)
    engine = sum(caches(shape, chip, slots, longest).values())
    assert sum(training(shape, chip, 1, split.rows).values()) + engine <= usable(chip)
    assert split.rows * longest <= BUSY_TOKENS
    assert split.total == batch_rows(512) * longest
    assert split_of(RlConfig(device_batch_size=64), shape, here, 512, slots).rows == 64
