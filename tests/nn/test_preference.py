"""Losses on pairs of replies: by hand, and through the head."""

from __future__ import annotations

import math

import pytest
import torch

from ascendchat.nn import IGNORE
from ascendchat.nn import logprobs as module
from ascendchat.nn.logprobs import SamplingDistribution, differentiable_logprobs, head_logprobs
from ascendchat.nn.preference import PREFERENCES, Pairs, Weights, log_odds, preference, sequence_sums

LOG2 = math.log(2)


def lost(margin: float) -> float:
    """-log sigmoid(margin)."""
    return math.log(1 + math.exp(-margin))


def pairs_of(*columns: list[float]) -> Pairs:
    return Pairs(*(torch.tensor(column, dtype=torch.float64) for column in columns))


@pytest.mark.parametrize(
    ("name", "weights", "columns", "rewards", "loss"),
    [
        # DPO: rewards 0.1 (-10 + 12) and 0.1 (-20 + 17), so the margin is 0.5
        ("dpo", Weights(0.1), ([-10.0], [-20.0], [4.0], [5.0], [-12.0], [-17.0]), (0.2, -0.3), lost(0.5)),
        ("dpo", Weights(0.1, 0.25), ([-10.0], [-20.0], [4.0], [5.0], [-12.0], [-17.0]), (0.2, -0.3),
         0.75 * lost(0.5) + 0.25 * lost(-0.5)),
        # SimPO: means -2 and -4, times beta 2: a margin of 4, of which gamma takes 1
        ("simpo", Weights(2.0, gamma=1.0), ([-8.0], [-20.0], [4.0], [5.0]), (-4.0, -8.0), lost(3.0)),
        ("simpo", Weights(2.0, 0.1, gamma=1.0), ([-8.0], [-20.0], [4.0], [5.0]), (-4.0, -8.0),
         0.9 * lost(3.0) + 0.1 * lost(-3.0)),
        # ORPO: mean probabilities 1/2 and 1/4, so the odds are 1 and 1/3
        ("orpo", Weights(0.1), ([-4 * LOG2], [-4 * LOG2], [4.0], [2.0]), (-0.1 * LOG2, -0.2 * LOG2),
         LOG2 + 0.1 * math.log(4 / 3)),
    ],
)  # fmt: skip
def test_losses_and_rewards_by_hand(
    name: str, weights: Weights, columns: tuple[list[float], ...], rewards: tuple[float, float], loss: float
) -> None:
    c, r, *rest = (torch.tensor(column, dtype=torch.float64) for column in columns)
    found = PREFERENCES[name](Pairs(c.requires_grad_(), r.requires_grad_(), *rest), weights)
    assert (found.chosen.item(), found.rejected.item()) == pytest.approx(rewards)
    assert found.loss.item() == pytest.approx(loss)
    assert not found.chosen.requires_grad
    assert not found.rejected.requires_grad
    assert torch.autograd.gradcheck(lambda c, r: PREFERENCES[name](Pairs(c, r, *rest), weights).loss, (c, r))


def test_the_loss_of_sft_is_added_by_its_weight() -> None:
    pairs = pairs_of([-8.0], [-20.0], [4.0], [5.0])
    plain, more = (preference("simpo", pairs, Weights(2.0, gamma=1.0, sft=sft)) for sft in (0.0, 0.5))
    assert more.loss.item() == pytest.approx(plain.loss.item() + 0.5 * 2.0)
    assert more.chosen == plain.chosen


def test_odds_are_finite_however_sure_the_model_is() -> None:
    means = torch.tensor([-1e-9, 0.0, -1e-3, -50.0], requires_grad=True)
    found = log_odds(means)
    assert torch.isfinite(found).all()
    assert found[3].item() == pytest.approx(-50.0)
    found.sum().backward()
    assert torch.isfinite(means.grad).all()


def test_a_loss_that_needs_a_reference_says_so() -> None:
    with pytest.raises(ValueError, match="reference"):
        PREFERENCES["dpo"](pairs_of([-1.0], [-1.0], [1.0], [1.0], [-1.0]), Weights(0.1))


# ---- through the head ------------------------------------------------------------------------------

VOCAB = 37
OWNER = torch.arange(4).repeat_interleave(torch.tensor([9, 14, 6, 11]))


def by_replies(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss that is no sum over the tokens: SimPO of two pairs."""
    sums = sequence_sums(logprobs, OWNER, 4)
    pairs = Pairs(sums[[0, 2]], sums[[1, 3]], torch.tensor([9.0, 6.0]), torch.tensor([14.0, 11.0]))
    return PREFERENCES["simpo"](pairs, Weights(2.0, gamma=0.5)).loss.mean()


@pytest.mark.parametrize(
    ("softcap", "temperature", "rows", "skips"),
    [(15.0, 1.0, 40, True), (math.inf, 1.0, 7, True), (15.0, 0.7, 7, False)],
)
def test_gradients_through_the_head_are_those_of_all_logits(
    softcap: float, temperature: float, rows: int, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in chunks of seven rows. A CPU skips the rows that are not scored, an accelerator reads them, too."""
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: rows)
    if not skips:
        monkeypatch.setattr(module, "scored_rows", lambda targets: (slice(None), targets))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator) * 2
    head = torch.randn(VOCAB + 3, 16, generator=generator)
    targets = torch.randint(0, VOCAB, (40,), generator=generator)
    targets[::5] = IGNORE
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    drawn = SamplingDistribution(VOCAB, temperature, softcap=softcap)
    found = differentiable_logprobs(a, b, targets, drawn)
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
    again = hidden.clone().requires_grad_()
    by_replies(differentiable_logprobs(again, head, targets, drawn)).backward()
    assert head.grad is None, "it is not trained"
    assert torch.equal(again.grad, a.grad)
