"""Total batch from the horizon, its split over devices, and the time it takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ascendchat.chips import find
from ascendchat.config.commands import PlanConfig
from ascendchat.config.finetune import FinetuneConfig
from ascendchat.config.train import BaseConfig, ChatTrainConfig, MidConfig, TrainConfig
from ascendchat.device import pick
from ascendchat.errors import UserError
from ascendchat.nn.optim import orthogonalise
from ascendchat.plan.goals import train_plan
from ascendchat.sizes.batch import (
    MIN_STEPS,
    Split,
    batch_for,
    duration,
    fit_split,
    largest_rows,
    optimizer_tokens,
    split,
    split_fixed,
)
from ascendchat.sizes.memory import training, usable
from ascendchat.sizes.schedule import REFERENCE_TOKENS
from ascendchat.sizes.shape import Shape
from ascendchat.train.rows import share_out, total_flag

STEADY = settings(derandomize=True, deadline=None, max_examples=30)  # the same examples on every machine

COUNTS = st.integers(1, 300)
SEQ = st.sampled_from([128, 256, 1000, 2048, 8192])


def test_the_batch_follows_the_horizon_and_not_only_the_depth() -> None:
    assert batch_for(REFERENCE_TOKENS) == 2**19
    assert batch_for(105_000_000) == 2**16  # 180 s of depth 12 on an H200: 1,600 steps
    assert batch_for(9_300_000) == 2**13
    assert batch_for(3_000_000, 256) == 2**11


@STEADY
@given(st.integers(10**5, 10**12), SEQ)
def test_the_batch_rule_gives_powers_of_two_that_grow_with_the_horizon(tokens: int, seq: int) -> None:
    batch = batch_for(tokens, seq)
    assert batch == seq or math.log2(batch).is_integer()
    assert batch <= batch_for(2 * tokens, seq)
    assert batch <= seq * 2 or tokens // batch >= MIN_STEPS


@STEADY
@given(st.integers(1, 2**22), COUNTS, SEQ, COUNTS)
def test_the_planned_batch_divides_the_total(total: int, devices: int, seq: int, most: int) -> None:
    found = split(total, devices, seq, most)
    assert 1 <= found.rows <= most
    assert found.total % (devices * found.rows * seq) == 0
    assert found.total == devices * found.rows * seq * found.accumulation
    # never lowered, and raised by less than a row per device and micro-batch (and the rest of one row)
    assert 0 <= found.total - total < seq * (devices * found.accumulation + 1)


@STEADY
@given(st.integers(1, 2**22), COUNTS, SEQ, COUNTS)
def test_a_device_batch_that_was_asked_for_is_kept_unless_it_exceeds_the_total(
    total: int, devices: int, seq: int, rows: int
) -> None:
    found = split_fixed(total, devices, seq, rows)
    assert found.rows == rows or (found.accumulation == 1 and found.rows < rows)
    assert 0 <= found.total - total < devices * found.rows * seq


BATCH_CONFIGS: list[type[TrainConfig]] = [BaseConfig, MidConfig, FinetuneConfig]


@pytest.mark.parametrize("config", BATCH_CONFIGS)
@pytest.mark.parametrize("usual", [1, 256, 2**20])
def test_rows_times_accumulation_is_the_batch_where_no_total_is_given(config: type[TrainConfig], usual: int) -> None:
    asked = config(device_batch_size=4, gradient_accumulation_steps=4)
    assert share_out(asked, Shape.from_depth(2, seq_len=128), pick("cpu"), usual) == Split(1, 4, 4, 128)


@pytest.mark.parametrize("config", [MidConfig, FinetuneConfig])
def test_accumulation_agrees_with_the_examples_of_a_step(config: type[ChatTrainConfig]) -> None:
    shape, cpu = Shape.from_depth(2, seq_len=128), pick("cpu")
    asked = config(device_batch_size=4, gradient_accumulation_steps=2, target_examples_per_step=8)
    flag = total_flag(asked.total_batch_size, asked.target_examples_per_step)
    assert share_out(asked, shape, cpu, 8 * 128, flag=flag) == Split(1, 4, 2, 128)
    with pytest.raises(UserError, match="--gradient-accumulation-steps 3 does not fit --target-examples-per-step 8: "):
        share_out(replace(asked, gradient_accumulation_steps=3), shape, cpu, 8 * 128, flag=flag)
    with pytest.raises(UserError, match="say the same thing; give one of them"):
        total_flag(1024, 8)


def test_powers_of_two_are_split_exactly_whatever_the_devices() -> None:
    assert [split(2**19, devices, 2048, 32) for devices in (1, 8)] == [Split(1, 32, 8, 2048), Split(8, 32, 1, 2048)]
    assert [split_fixed(2048, devices, 128, 16) for devices in (1, 2)] == [Split(1, 16, 1, 128), Split(2, 8, 1, 128)]


def test_after_out_of_memory_the_next_smaller_batch_has_the_same_total() -> None:
    now: Split | None = split(2**19, 3, 2048, 64)  # 258 rows
    assert now is not None
    assert (now.rows, now.accumulation) == (43, 2)
    seen = []
    while now is not None:
        assert now.total == 258 * 2048
        seen.append(now.rows)
        now = now.smaller()
    assert seen == [43, 2, 1]
    assert Split(1, 32, 8, 2048).smaller() == Split(1, 16, 16, 2048)


def test_the_largest_rows_are_the_largest_power_of_two_that_fits() -> None:
    fits = {0: 0, 1: 1, 2: 2, 3: 2, 1023: 512, 1024: 1024}
    assert {limit: largest_rows(lambda rows, limit=limit: rows <= limit) for limit in fits} == fits


def test_a_step_of_the_optimizer_counts_the_products_that_muon_makes() -> None:
    shape = Shape.from_depth(2, vocab=512, dim=64, seq_len=64, value_embeddings=False)
    with FlopCounterMode(display=False) as counter:
        for (rows, cols), count in shape.matrices().items():
            orthogonalise(torch.ones(count, rows, cols), torch.float32)
    assert optimizer_tokens(shape) == counter.get_total_flops() // shape.train_flops_per_token > 0


def test_hours_come_from_flops_and_the_share_of_the_peak() -> None:
    chip = find("H200")
    run = Split(1, 32, 8, 2048)
    time = duration(8.871e8, 0, chip, run, 100, 0.464, 3.0)
    assert time.tokens_per_second == pytest.approx(517_000, rel=0.01)  # measured at that share
    assert time.hours == pytest.approx(100 * 2**19 / time.tokens_per_second / 3600)
    assert time.cost == pytest.approx(3 * time.hours)
    assert duration(8.871e8, 0, chip, run, 100, 0.464, None, 1 / 3).hours == pytest.approx(time.hours * 4 / 3)


def test_a_slow_exchange_between_nodes_bounds_the_step() -> None:
    chip = find("Ascend910B3")
    exchanged = 6 * 10**9
    inside = duration(1e6, exchanged, chip, Split(8, 1, 1, 2048), 10, None, None)
    across = duration(1e6, exchanged, chip, Split(16, 1, 1, 2048), 10, None, None)
    assert inside.communication_seconds == pytest.approx(exchanged * 7 / 8 / chip.link)
    assert across.communication_seconds == pytest.approx(
        exchanged * 7 / 8 / chip.link + exchanged / 8 / 2 / chip.node_link, rel=0.05
    )
    assert across.step_seconds == pytest.approx(across.communication_seconds, rel=0.01)


def test_devices_exchange_float32_gradients_and_weights_in_the_compute_dtype() -> None:
    config = PlanConfig(depth=12, devices=2, chip="Ascend910B3")
    time = train_plan(config, find("Ascend910B3"))["time"]
    moved = (4 + 2) * Shape.from_depth(12).total_parameters / 2  # each of two devices sends a half
    assert time["communication_seconds"] == pytest.approx(moved / find("Ascend910B3").link)


def test_a_training_command_takes_the_most_rows_that_fit_or_those_it_was_told() -> None:
    shape, chip = Shape.from_depth(20), find("Ascend910B3")
    found = fit_split(shape, chip, 8, 2**20)
    assert found.total == 2**20
    assert sum(training(shape, chip, 8, found.rows).values()) <= usable(chip)
    assert sum(training(shape, chip, 8, 2 * found.rows).values()) > usable(chip)
    assert fit_split(shape, chip, 8, 2**20, checkpointing=True).rows > found.rows
    assert fit_split(shape, chip, 8, 2**20, rows=4).accumulation == 16
    beside = 20 * 2**30
    other = fit_split(shape, chip, 8, 2**20, beside=beside)
    assert other.rows < found.rows
    assert sum(training(shape, chip, 8, other.rows).values()) + beside <= usable(chip)
    with pytest.raises(UserError, match="ascendchat plan --depth 64"):
        fit_split(Shape.from_depth(64), find("T4"), 1, 2**20)
