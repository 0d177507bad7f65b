"""Learning rate, momentum and weight decay as functions of the step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.sizes.schedule import (
    MAX_SHRINK,
    MIN_BATCH,
    REFERENCE_TOKENS,
    averaged_snapshots,
    full_decay,
    lr_scale,
    momentum,
    mtp_weight,
    rates,
    warmdown_start,
    weight_decay,
)

STEADY = settings(derandomize=True, deadline=None, max_examples=30)  # the same examples on every machine


def test_the_rate_warms_up_stays_and_falls_to_five_percent() -> None:
    steps = 2520  # 40 up, flat to 882, down over the last 65 %
    assert lr_scale(0, steps) == pytest.approx(1 / 40)
    assert lr_scale(39, steps) == 1.0
    assert lr_scale(882, steps) == 1.0
    assert lr_scale(1701, steps) == pytest.approx(0.525)  # half way between 1 and 0.05
    assert lr_scale(steps, steps) == pytest.approx(0.05)


def test_momentum_ramps_up_over_400_steps_and_down_with_the_rate() -> None:
    steps = 2520
    assert momentum(0, steps) == pytest.approx(0.85)
    assert momentum(200, steps) == pytest.approx(0.91)
    assert momentum(400, steps) == momentum(882, steps) == pytest.approx(0.97)
    assert momentum(1701, steps) == pytest.approx(0.935)
    assert momentum(steps, steps) == pytest.approx(0.90)
    assert momentum(warmdown_start(200), 200) == pytest.approx(0.97), "a short run reaches it before the rate falls"


def test_weight_decay_is_a_cosine_to_zero() -> None:
    assert weight_decay(0, 100, 0.28) == pytest.approx(0.28)
    assert weight_decay(50, 100, 0.28) == pytest.approx(0.14)
    assert weight_decay(100, 100, 0.28) == pytest.approx(0.0)


def test_depth_12_at_its_own_batch_has_the_reference_rates() -> None:
    found = rates(768, 2**19)
    assert found == pytest.approx(
        {
            "matrices": 0.02,
            "head": 0.008,
            "embedding": 0.3,
            "value_embeddings": 0.15,
            "residual_scalars": 0.005,
            "skip_scalars": 0.5,
            "smear_backout": 0.2,
            "shifts": 0.1,
        }
    )
    assert full_decay(2**19, REFERENCE_TOKENS) == pytest.approx(0.28)


def test_batches_below_the_least_keep_its_rates() -> None:
    assert rates(768, MIN_BATCH) == rates(768, 2**11)
    assert rates(768, MIN_BATCH)["matrices"] == pytest.approx(0.02 * 0.125**0.5)
    assert rates(768, 2 * MIN_BATCH)["matrices"] == pytest.approx(0.01)


@STEADY
@given(st.integers(12, 21), st.integers(10**6, 10**11))
def test_the_whole_shrinking_of_a_run_is_the_same_unless_one_step_would_shrink_too_much(
    power: int, tokens: int
) -> None:
    batch = 2**power
    per_step = rates(768, batch)["matrices"] * full_decay(batch, tokens)
    whole = 0.02 * 0.28 * REFERENCE_TOKENS / 2**19
    assert per_step == pytest.approx(min(whole * batch / tokens, MAX_SHRINK))
    asked = rates(768, batch)["matrices"] * full_decay(batch, tokens, 0.56)
    assert asked == pytest.approx(2 * whole * batch / tokens)  # as told, whatever a step shrinks
    assert full_decay(batch, tokens, 0.0) == 0


def test_the_token_after_next_counts_for_two_thirds_of_a_run_and_less_and_less() -> None:
    assert mtp_weight(0, 900) == 0.4
    assert mtp_weight(300, 900) == pytest.approx(0.2)
    assert [mtp_weight(step, 900) for step in (600, 899)] == [0, 0]


@pytest.mark.parametrize(
    ("steps", "taken"),
    [(1, []), (4, []), (10, [9]), (40, [36, 37, 38, 39]), (1774, [1619, 1641, 1663, 1685, 1707, 1729, 1751, 1773])],
)
def test_weights_of_the_last_tenth_are_averaged_the_last_ones_among_them(steps: int, taken: list[int]) -> None:
    counts = [averaged_snapshots(step, steps) for step in range(-1, steps)]
    assert [step for step in range(steps) if counts[step + 1] > counts[step]] == taken
    assert counts[-1] == len(taken)
    assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(counts)), "one at a time"


def test_a_rate_that_is_asked_for_counts_at_width_768_and_2_to_the_19_tokens() -> None:
    """As nanochat means its flags: the tables follow the width, all follow the batch."""
    usual = rates(768, 2**19)
    asked = rates(768, 2**19, matrix=0.04, embedding=0.2, unembedding=0.004, scalar=1.0)
    assert {name: asked[name] for name in asked if asked[name] != usual[name]} == {
        "matrices": 0.04,
        "embedding": 0.2,
        "value_embeddings": 0.1,
        "head": 0.004,
        "skip_scalars": 1.0,
        "residual_scalars": 0.01,
    }
    wide = rates(768 * 4, 2**21, matrix=0.04, embedding=0.2)
    assert wide["matrices"] == pytest.approx(0.08)
    assert wide["embedding"] == pytest.approx(0.2)  # half for the width, twice for the batch
    assert wide["smear_backout"] == pytest.approx(rates(768 * 4, 2**21)["smear_backout"])
