"""Policy-gradient maths against hand-computed cases and an independent float64 implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ascendchat.nn import IGNORE
from ascendchat.nn.loss import SOFTCAP
from ascendchat.nn.objective import head_logprobs, head_objective
from ascendchat.nn.readout import Drawn
from ascendchat.train.grpo import (
    PRESETS,
    Mean,
    Method,
    advantages,
    correction,
    k3,
    length_penalty,
    mean_correction,
    sequence_anchor,
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
        assert correction(gap, how).tolist() == [1.0, 1.0, 1.0]
    assert correction(torch.tensor([0.01]), "mask").item() == pytest.approx(math.exp(0.01))


def test_correction_by_hand() -> None:
    gap = torch.tensor([0.1, 1.0, 4.0, 6.0]).log()
    assert correction(gap, "none").tolist() == [1.0] * 4
    assert correction(gap, "mask").tolist() == pytest.approx([0.0, 1.0, 4.0, 0.0])
    assert correction(gap, "truncate").tolist() == pytest.approx([0.1, 1.0, 2.0, 2.0])


def test_k3_by_hand() -> None:
    assert k3(torch.tensor([0.0, math.log(2.0), -math.log(2.0)])).tolist() == pytest.approx(
        [0.0, 2 - 1 - math.log(2.0), 0.5 - 1 + math.log(2.0)]
    )
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.1, 0.4])
    assert (p * k3((q / p).log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item()), "KL(p, q)"


def test_the_ratio_of_an_answer_by_hand() -> None:
    """Two answers of two and three tokens, one of which a tool wrote: ratios e^0.2 and e^-0.5."""
    proximal = torch.tensor([-1.0, -2.0, -1.0, -9.0, -1.0])
    logprob = torch.tensor([-0.8, -1.8, -1.2, -1.0, -1.8])
    owner, scored = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([True, True, True, False, True])
    anchor = sequence_anchor(logprob, proximal, owner, scored, 2)
    ratio = (logprob - anchor).exp()
    assert ratio.tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.5)] * 3)
    unknown = sequence_anchor(logprob, torch.full_like(proximal, torch.nan), owner, scored, 2)
    assert unknown[scored].isnan().all(), "the trained policy itself"


def slope(method: Method, ratio: float, advantage: float) -> tuple[float, float]:
    """Value and derivative by the log-probability of one token whose ratio to the proximal policy is `ratio`."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    value = method.objective()(logprob, one * advantage, zero, zero, zero, one)
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
    clipped = method.clipped(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), torch.zeros(1))
    acts = gradient == 0.0 if method.form == "clip" else method.form == "stop" and ratio > 5.0
    assert clipped.tolist() == [acts]
    unknown = torch.full((1,), torch.nan)
    assert not method.clipped(torch.tensor([math.log(ratio)]), torch.tensor([advantage]), unknown).any()


def test_the_kl_pulls_towards_the_reference() -> None:
    logprob = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    value = Method(kl=0.1).objective()(
        logprob, zero, logprob.detach(), logprob.detach(), logprob.detach(), one, reference
    )
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    e = math.e
    assert value.tolist() == pytest.approx([0.1 * (1 / e - 1 + 1), 0.1 * (e - 1 - 1)])
    assert gradient.tolist() == pytest.approx([0.1 * (1 - 1 / e), 0.1 * (1 - e)])


def test_without_a_proximal_policy_the_ratio_is_one_and_the_behaviour_corrects() -> None:
    logprob = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.5, -5.0], dtype=torch.float64)  # ratios e^0.5 and e^3: the second is masked
    unknown, one = torch.full((2,), torch.nan, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    value = Method().objective()(logprob, one, unknown, unknown, behaviour, one)
    (gradient,) = torch.autograd.grad(value.sum(), logprob)
    assert value.tolist() == pytest.approx([-math.exp(0.5), 0.0])
    assert gradient.tolist() == pytest.approx([-math.exp(0.5), 0.0])


def independent(
    logits: Tensor, targets: Tensor, owner: Tensor, columns: tuple[Tensor, ...], method: Method, temperature: float
) -> Tensor:
    """The loss of a batch written out once more, token by token, from raw logits in float64."""
    advantage, proximal, behaviour, weight, reference = columns
    own = [i for i, target in enumerate(targets.tolist()) if target != IGNORE]
    logprob: dict[int, Tensor] = {}
    for i in own:
        scaled = SOFTCAP * torch.tanh(logits[i] / SOFTCAP) / temperature
        logprob[i] = scaled[targets[i]] - torch.logsumexp(scaled, 0)
    total = torch.zeros((), dtype=torch.float64)
    for i in own:
        ratio, a = torch.exp(logprob[i] - proximal[i]), advantage[i]
        if method.level == "sequence":  # GSPO-token: sg(s) * pi / sg(pi)
            same = [j for j in own if owner[j] == owner[i]]
            mean = sum(logprob[j] - proximal[j] for j in same) / len(same)
            ratio = torch.exp(mean.detach()) * torch.exp(logprob[i]) / torch.exp(logprob[i]).detach()
        if method.form == "plain":
            gain = a * logprob[i]
        elif method.form == "stop":
            gain = torch.clamp(ratio.detach(), max=1 + method.clip_high) * a * logprob[i]
        else:
            gain = torch.min(ratio * a, torch.clamp(ratio, 1 - method.clip_low, 1 + method.clip_high) * a)
            if method.dual_clip and a < 0:
                gain = torch.max(gain, method.dual_clip * a)
        w = torch.exp(proximal[i] - behaviour[i])
        if method.correction == "mask":
            w = w if 0.5 <= w <= 5.0 else torch.zeros_like(w)
        elif method.correction == "truncate":
            w = torch.clamp(w, max=2.0)
        else:
            w = torch.ones_like(w)
        kl = torch.exp(reference[i] - logprob[i]) - (reference[i] - logprob[i]) - 1
        total = total + weight[i] * (method.kl * kl - gain * w)
    return total


METHODS = {
    **PRESETS,
    "gspo, wide": replace(PRESETS["gspo"], clip_low=0.2, clip_high=0.2, correction="mask"),
    "grpo, truncated": replace(PRESETS["grpo"], correction="truncate"),
    "default, kl": replace(PRESETS["default"], kl=0.3),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_loss_and_gradients_equal_an_independent_float64_implementation(name: str, temperature: float) -> None:
    chance = torch.Generator().manual_seed(sorted(METHODS).index(name))
    count, width, vocab = 24, 8, 19
    hidden = torch.randn(count, width, generator=chance, dtype=torch.float64)
    head = torch.randn(vocab, width, generator=chance, dtype=torch.float64)
    targets = torch.randint(0, vocab, (count,), generator=chance)
    targets[::5] = IGNORE
    owner = torch.arange(count) // 6
    advantage = torch.randn(count, generator=chance, dtype=torch.float64)
    known = torch.log_softmax(SOFTCAP * torch.tanh(hidden @ head.t() / SOFTCAP) / temperature, -1)
    own = known.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    proximal = own + 0.4 * torch.randn(count, generator=chance, dtype=torch.float64)
    behaviour = proximal + 0.8 * torch.randn(count, generator=chance, dtype=torch.float64)
    reference = own + 0.5 * torch.randn(count, generator=chance, dtype=torch.float64)
    weight = torch.rand(count, generator=chance, dtype=torch.float64)
    method, scored = METHODS[name], targets != IGNORE
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    columns = advantage, proximal, behaviour, weight, reference
    wanted = independent(a @ b.t(), targets, owner, columns, method, temperature)
    exact = torch.autograd.grad(wanted, (a, b))
    c, d = hidden.float().requires_grad_(), head.float().requires_grad_()
    drawn, anchor = Drawn(vocab, temperature), proximal.float()
    if method.level == "sequence":
        anchor = sequence_anchor(head_logprobs(c, d, targets, drawn), anchor, owner, scored, 4)
    given = [advantage, anchor, proximal, behaviour, weight, *([reference] if method.kl else [])]
    loss, logprobs, _ = head_objective(
        c, d, targets, drawn, method.objective(), [column.float() for column in given], weight=torch.tensor(1.0)
    )
    gradients = torch.autograd.grad(loss, (c, d))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4, abs=1e-4)
    assert torch.allclose(logprobs[scored].double(), own[scored], atol=1e-5)
    for mine, theirs in zip(gradients, exact):
        assert torch.allclose(mine.double(), theirs, atol=3e-4 * theirs.abs().max().item())


def test_long_answers_lose_reward_gradually() -> None:
    assert [length_penalty(n, 100, 0.2) for n in (0, 80, 90, 100, 120)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length_penalty(100, 100, 0.0) == 0.0
