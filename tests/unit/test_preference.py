"""Losses on pairs of replies: by hand, against an independent float64 implementation, and through the head."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ascendchat.nn import IGNORE
from ascendchat.nn import objective as module
from ascendchat.nn.objective import head_logprobs, learnt_logprobs
from ascendchat.nn.preference import PREFERENCES, Pairs, Weights, log_odds, preference, sequence_sums
from ascendchat.nn.readout import Drawn

Floats = NDArray[np.float64]
SETTINGS = [
    ("dpo", Weights(0.1)),
    ("dpo", Weights(0.5, smoothing=0.2)),
    ("orpo", Weights(0.1)),
    ("orpo", Weights(1.0)),
    ("simpo", Weights(2.0, gamma=1.0)),
    ("simpo", Weights(2.5, smoothing=0.1, gamma=0.5)),
]


def pairs_of(*columns: list[float]) -> Pairs:
    return Pairs(*(torch.tensor(column, dtype=torch.float64) for column in columns))


def test_dpo_by_hand() -> None:
    """Rewards 0.1 * (-10 + 12) and 0.1 * (-20 + 19): the margin is 0.3."""
    found = PREFERENCES["dpo"](pairs_of([-10.0], [-20.0], [4.0], [5.0], [-12.0], [-19.0]), Weights(0.1))
    assert found.chosen.item() == pytest.approx(0.2)
    assert found.rejected.item() == pytest.approx(-0.1)
    assert found.loss.item() == pytest.approx(math.log(1 + math.exp(-0.3)))
    smooth = PREFERENCES["dpo"](pairs_of([-10.0], [-20.0], [4.0], [5.0], [-12.0], [-19.0]), Weights(0.1, 0.25))
    wanted = 0.75 * math.log(1 + math.exp(-0.3)) + 0.25 * math.log(1 + math.exp(0.3))
    assert smooth.loss.item() == pytest.approx(wanted)


def test_dpo_of_the_reference_itself_is_the_logarithm_of_two() -> None:
    found = PREFERENCES["dpo"](pairs_of([-7.5], [-3.0], [2.0], [2.0], [-7.5], [-3.0]), Weights(0.3))
    assert found.loss.item() == pytest.approx(math.log(2))


def test_simpo_by_hand() -> None:
    """Means -2 and -4, times beta 2: a margin of 4, of which gamma takes 1."""
    found = PREFERENCES["simpo"](pairs_of([-8.0], [-20.0], [4.0], [5.0]), Weights(2.0, gamma=1.0))
    assert (found.chosen.item(), found.rejected.item()) == (-4.0, -8.0)
    assert found.loss.item() == pytest.approx(math.log(1 + math.exp(-3.0)))


def test_orpo_by_hand() -> None:
    """Mean probabilities 1/2 and 1/4: odds 1 and 1/3."""
    found = PREFERENCES["orpo"](pairs_of([4 * math.log(0.5)], [2 * math.log(0.25)], [4.0], [2.0]), Weights(0.1))
    assert found.loss.item() == pytest.approx(math.log(2) + 0.1 * math.log(1 + 1 / 3))


def test_the_loss_of_sft_is_added_by_its_weight() -> None:
    pairs = pairs_of([-8.0], [-20.0], [4.0], [5.0])
    plain, more = (preference("simpo", pairs, Weights(2.0, gamma=1.0, sft=sft)) for sft in (0.0, 0.5))
    assert more.loss.item() == pytest.approx(plain.loss.item() + 0.5 * 2.0)
    assert more.chosen == plain.chosen


def independent(name: str, w: Weights, c: Floats, r: Floats, nc: Floats, nr: Floats, refs: list[Floats]) -> Floats:
    """The published formulas once more, in plain numpy without the tricks of the other."""

    def sigmoid(x: Floats) -> Floats:
        return 1.0 / (1.0 + np.exp(-x))

    if name == "dpo":
        ratio = np.log(np.exp(c - refs[0]) / np.exp(r - refs[1]))
        return -(1 - w.smoothing) * np.log(sigmoid(w.beta * ratio)) - w.smoothing * np.log(sigmoid(-w.beta * ratio))
    p, q = np.exp(c / nc), np.exp(r / nr)
    if name == "orpo":
        return -np.log(p) - w.beta * np.log(sigmoid(np.log((p / (1 - p)) / (q / (1 - q)))))
    margin = w.beta * np.log(p) - w.beta * np.log(q) - w.gamma
    return -(1 - w.smoothing) * np.log(sigmoid(margin)) - w.smoothing * np.log(sigmoid(-margin))


@pytest.mark.parametrize(("name", "weights"), SETTINGS)
def test_every_loss_and_its_gradient_equal_an_independent_one(name: str, weights: Weights) -> None:
    rng = np.random.default_rng(0)
    count = 40
    lengths = [rng.integers(1, 30, count).astype(np.float64) for _ in range(2)]
    sums = [-lengths[i] * rng.uniform(0.05, 4.0, count) for i in range(2)]
    refs = [each + rng.normal(0, 3, count) for each in sums]
    columns = [torch.tensor(each) for each in (*sums, *lengths, *refs)]
    c, r = (column.requires_grad_() for column in columns[:2])
    found = PREFERENCES[name](Pairs(c, r, *columns[2:]), weights)
    np.testing.assert_allclose(found.loss.detach(), independent(name, weights, *sums, *lengths, refs), rtol=1e-9)
    assert not found.chosen.requires_grad
    assert not found.rejected.requires_grad
    found.loss.sum().backward()
    step = 1e-5
    for at, column in enumerate((c, r)):
        up, down = ([each + sign * step * (i == at) for i, each in enumerate(sums)] for sign in (1, -1))
        above, below = (independent(name, weights, *moved, *lengths, refs) for moved in (up, down))
        np.testing.assert_allclose(column.grad, (above - below) / (2 * step), rtol=1e-5, atol=1e-8)


def test_odds_are_finite_however_sure_the_model_is() -> None:
    means = torch.tensor([-1e-9, 0.0, -1e-3, -50.0], requires_grad=True)
    found = log_odds(means)
    assert torch.isfinite(found).all()
    assert found[3].item() == pytest.approx(-50.0)
    found.sum().backward()
    assert torch.isfinite(means.grad).all()


def test_a_loss_that_needs_a_reference_says_so() -> None:
    with pytest.raises(ValueError, match="reference"):
        PREFERENCES["dpo"](pairs_of([-1.0], [-1.0], [1.0], [1.0]), Weights(0.1))


# ---- through the head ------------------------------------------------------------------------------

VOCAB = 37
OWNER = torch.arange(4).repeat_interleave(torch.tensor([9, 14, 6, 11]))


def by_replies(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss that is no sum over the tokens: SimPO of two pairs."""
    sums = sequence_sums(logprobs, OWNER, 4)
    pairs = Pairs(sums[[0, 2]], sums[[1, 3]], torch.tensor([9.0, 6.0]), torch.tensor([14.0, 11.0]))
    return PREFERENCES["simpo"](pairs, Weights(2.0, gamma=0.5)).loss.mean()


@pytest.mark.parametrize(("softcap", "temperature"), [(15.0, 1.0), (math.inf, 1.0), (15.0, 0.7)])
@pytest.mark.parametrize("rows", [40, 7])
def test_gradients_through_the_head_are_those_of_all_logits(
    softcap: float, temperature: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in chunks of seven rows."""
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: rows)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator) * 2
    head = torch.randn(VOCAB + 3, 16, generator=generator)
    targets = torch.randint(0, VOCAB, (40,), generator=generator)
    targets[::5] = IGNORE
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    drawn = Drawn(VOCAB, temperature, softcap=softcap)
    found = learnt_logprobs(a, b, targets, drawn)
    assert torch.equal(found, head_logprobs(hidden, head, targets, drawn))
    by_replies(found).backward()
    c, d = hidden.double().requires_grad_(), head.double().requires_grad_()
    logits = c @ d[:VOCAB].t()
    logits = logits if math.isinf(softcap) else softcap * torch.tanh(logits / softcap)
    plain = torch.log_softmax(logits / temperature, -1).gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    plain = torch.where(targets != IGNORE, plain, 0.0)
    torch.testing.assert_close(found.double(), plain, atol=1e-5, rtol=1e-5)
    by_replies(plain).backward()
    torch.testing.assert_close(a.grad.double(), c.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(b.grad.double(), d.grad, atol=1e-6, rtol=1e-4)


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    hidden, head = torch.randn(40, 16, requires_grad=True), torch.randn(VOCAB, 16)
    by_replies(learnt_logprobs(hidden, head, torch.zeros(40, dtype=torch.int64), Drawn(VOCAB))).backward()
    assert head.grad is None
    assert hidden.grad is not None
