"""Policy-gradient maths against hand-computed cases and an independent float64 implementation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ascendchat.nn import IGNORE
from ascendchat.nn.loss import SOFTCAP, head_objective
from ascendchat.train.grpo import (
    PRESETS,
    Mean,
    Method,
    advantages,
    correction,
    length_penalty,
    mean_correction,
    token_weight,
)


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    plain = advantages(rewards)
    assert plain.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4, [-1.0, -1.0, -1.0, 3.0]]
    scaled = advantages(rewards, "group")
    assert torch.allclose(scaled[0], torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64), atol=1e-5)
    assert scaled[1].tolist() == [0.0] * 4
    assert torch.allclose(scaled[2], plain[2] / math.sqrt(3.0), atol=1e-5)


def test_weights_make_the_named_mean() -> None:
    """Though they are given before it is known that 2 of 3 answers are learnt from, and how long those are."""
    values = [torch.tensor([1.0, 3.0]), torch.full((6,), 5.0)]

    def total(mean: Mean) -> float:
        summed = sum((value * token_weight(len(value), mean, most=3, longest=10)).sum().item() for value in values)
        return summed * mean_correction(mean, tokens=8, answers=2, most=3, longest=10)

    assert total("token") == pytest.approx((4 + 30) / 8)
    assert total("sequence") == pytest.approx((2 + 5) / 2)
    assert total("constant") == pytest.approx((4 / 10 + 30 / 10) / 2)
    assert mean_correction("token", 0.0, 0.0, 3, 10) == 30.0, "a step without anything to learn"


def test_rounding_of_the_generator_changes_no_bit() -> None:
    """Its log-probabilities depend on which rows it had beside in the last bits: a resumed run has others."""
    gap = torch.tensor([3e-6, -3e-6, 0.0])
    for how in ("mask", "truncate"):
        assert correction(gap, how, 0.5, 5.0).tolist() == [1.0, 1.0, 1.0]
    assert correction(torch.tensor([0.01]), "mask", 0.5, 5.0).item() == pytest.approx(math.exp(0.01))


def test_correction_by_hand() -> None:
    gap = torch.tensor([0.1, 1.0, 4.0, 6.0]).log()
    assert correction(gap, "none", 0.5, 5.0).tolist() == [1.0] * 4
    assert correction(gap, "mask", 0.5, 5.0).tolist() == pytest.approx([0.0, 1.0, 4.0, 0.0])
    assert correction(gap, "truncate", 0.5, 2.0).tolist() == pytest.approx([0.1, 1.0, 2.0, 2.0])


def slope(method: Method, ratio: float, advantage: float) -> tuple[float, float]:
    """Value and derivative by the log-probability of one token whose ratio to the proximal policy is `ratio`."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    value = method.objective()(logprob, one * advantage, zero, zero, one)
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    return value.item(), gradient.item()


CLIP = Method(correction="none")


@pytest.mark.parametrize(
    ("method", "ratio", "advantage", "value", "gradient"),
    [
        (CLIP, 1.0, 2.0, -2.0, -2.0),
        (CLIP, 1.2, 2.0, -2.4, -2.4),  # within
        (CLIP, 1.5, 2.0, -2.56, 0.0),  # above 1.28 and good: no more
        (CLIP, 1.5, -2.0, 3.0, 3.0),  # above and bad: down again
        (CLIP, 0.5, -2.0, 1.6, 0.0),  # below 0.8 and bad: enough
        (CLIP, 0.5, 2.0, -1.0, -1.0),
        (CLIP, 4.0, -2.0, 6.0, 0.0),  # bounded by the dual clip
        (Method(correction="none", dual_clip=0.0), 4.0, -2.0, 8.0, 8.0),
        (Method(form="stop", clip_high=4.0, correction="none"), 3.0, 1.0, -3.0 * math.log(3.0), -3.0),
        (Method(form="stop", clip_high=4.0, correction="none"), 9.0, 1.0, -5.0 * math.log(9.0), -5.0),
        (PRESETS["reinforce"], 9.0, 2.0, -2.0 * math.log(9.0), -2.0),
    ],
)
def test_objective_by_hand(method: Method, ratio: float, advantage: float, value: float, gradient: float) -> None:
    assert slope(method, ratio, advantage) == pytest.approx((value, gradient))


def test_without_a_proximal_policy_the_ratio_is_one_and_the_behaviour_corrects() -> None:
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.5, -5.0], dtype=torch.float64)  # ratios e^0.5 and e^3: the second is masked
    unknown, one = torch.full((2,), torch.nan, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    value = Method().objective()(logprob, one, unknown, behaviour, one)
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    assert value.tolist() == pytest.approx([-math.exp(0.5), 0.0])
    assert gradient.tolist() == pytest.approx([-math.exp(0.5), 0.0])


def independent(logits: Tensor, targets: Tensor, columns: tuple[Tensor, ...], method: Method) -> Tensor:
    """The loss of a batch written out once more, token by token, from raw logits in float64."""
    advantage, proximal, behaviour, weight = columns
    total = torch.zeros((), dtype=torch.float64)
    for i, target in enumerate(targets.tolist()):
        if target == IGNORE:
            continue
        capped = SOFTCAP * torch.tanh(logits[i] / SOFTCAP)
        logprob = capped[target] - torch.logsumexp(capped, 0)
        ratio = torch.exp(logprob - proximal[i])
        a = advantage[i]
        if method.form == "plain":
            gain = a * logprob
        elif method.form == "stop":
            gain = torch.clamp(ratio.detach(), max=1 + method.clip_high) * a * logprob
        else:
            gain = torch.min(ratio * a, torch.clamp(ratio, 1 - method.clip_low, 1 + method.clip_high) * a)
            if method.dual_clip and a < 0:
                gain = torch.max(gain, method.dual_clip * a)
        w = torch.exp(proximal[i] - behaviour[i])
        if method.correction == "mask":
            w = w if method.correction_low <= w <= method.correction_high else torch.zeros_like(w)
        elif method.correction == "truncate":
            w = torch.clamp(w, max=method.correction_high)
        else:
            w = torch.ones_like(w)
        total = total - weight[i] * gain * w
    return total


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_loss_and_gradients_equal_an_independent_float64_implementation(name: str) -> None:
    chance = torch.Generator().manual_seed(sorted(PRESETS).index(name))
    count, width, vocab = 24, 8, 19
    hidden = torch.randn(count, width, generator=chance, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=chance, dtype=torch.float64)
    targets = torch.randint(0, vocab, (count,), generator=chance)
    targets[::5] = IGNORE
    advantage = torch.randn(count, generator=chance, dtype=torch.float64)
    known = torch.log_softmax(SOFTCAP * torch.tanh(hidden @ head.t() / SOFTCAP), -1)
    own = known.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    proximal = own + 0.4 * torch.randn(count, generator=chance, dtype=torch.float64)
    behaviour = proximal + 0.8 * torch.randn(count, generator=chance, dtype=torch.float64)
    weight = torch.rand(count, generator=chance, dtype=torch.float64)
    columns = advantage, proximal, behaviour, weight
    method = PRESETS[name]
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    wanted = independent(a @ b.t(), targets, columns, method)
    exact = torch.autograd.grad(wanted, (a, b))
    c, d = hidden.float().requires_grad_(), head.float().requires_grad_()
    loss, logprobs = head_objective(
        c, d, targets, vocab, method.objective(), [column.float() for column in columns], weight=torch.tensor(1.0)
    )
    gradients = torch.autograd.grad(loss, (c, d))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4, abs=1e-4)
    scored = targets != IGNORE
    assert torch.allclose(logprobs[scored].double(), own[scored], atol=1e-5)
    for mine, theirs in zip(gradients, exact):
        assert torch.allclose(mine.double(), theirs, atol=2e-4 * theirs.abs().max().item())


def test_long_answers_lose_reward_gradually() -> None:
    assert [length_penalty(n, 100, 0.2) for n in (0, 80, 90, 100, 120)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length_penalty(100, 100, 0.0) == 0.0
