"""Policy-gradient maths against cases that were computed by hand; test_policy_loss.py puts them together."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ascendchat.rl.grpo import (
    PRESETS,
    Mean,
    Method,
    advantages,
    correction,
    length_penalty,
    mean_correction,
    sequence_anchor,
    token_weight,
)
from ascendchat.rl.stage import RlStage


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    assert advantages(rewards).tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4, [-1.0, -1.0, -1.0, 3.0]]
    scaled = advantages(rewards, "group")
    assert scaled.tolist()[0] == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)
    assert scaled[0].abs().max() < 1.0, "what keeps the divisor from 0 makes it larger"
    assert scaled.tolist()[1] == [0.0] * 4
    assert scaled.tolist()[2] == pytest.approx([x / math.sqrt(3.0) for x in (-1.0, -1.0, -1.0, 3.0)], abs=1e-5)


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
    assert [mean_correction("constant", 5.0, answers, 3, 10) for answers in (0.0, 1.0, 3.0)] == [3.0, 3.0, 1.0]
    assert token_weight(1, "sequence", most=4, longest=10) == token_weight(0, "sequence", most=4, longest=10) == 0.25


def test_correction_by_hand() -> None:
    gap = torch.tensor([0.1, 1.0, 4.0, 6.0]).log()
    assert correction(gap, "none").tolist() == [1.0] * 4
    assert correction(gap, "mask").tolist() == pytest.approx([0.0, 1.0, 4.0, 0.0])
    assert correction(gap, "truncate").tolist() == pytest.approx([0.1, 1.0, 2.0, 2.0])
    # The last bits of a generator's log-probabilities depend on which rows it had beside: a resumed run has others.
    rounding = torch.tensor([3e-6, -3e-6, 0.0])
    assert correction(rounding, "mask").tolist() == correction(rounding, "truncate").tolist() == [1.0, 1.0, 1.0]
    assert correction(torch.tensor([0.01]), "mask").item() == pytest.approx(math.exp(0.01))


def test_the_ratio_of_an_answer_by_hand() -> None:
    """Answers of two, of three, of which a tool wrote one, and of one token: ratios e^0.2, e^-0.5 and e^0.3."""
    proximal = torch.tensor([-1.0, -2.0, -1.0, -9.0, -1.0, -1.0])
    logprob = torch.tensor([-0.8, -1.8, -1.2, -1.0, -1.8, -0.7])
    owner, scored = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([True, True, True, False, True, True])
    anchor = sequence_anchor(logprob, proximal, owner, scored, 3)
    assert (logprob - anchor).tolist() == pytest.approx([0.2] * 2 + [-0.5] * 3 + [0.3])
    unknown = sequence_anchor(logprob, torch.full_like(proximal, torch.nan), owner, scored, 3)
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
        (CLIP, 1.5, 0.5, -0.64, 0.0),  # and be it a little good
        (CLIP, 0.9, -2.0, 1.8, 1.8),  # within and bad
        (CLIP, 1.5, -2.0, 3.0, 3.0),  # above and bad: down again
        (CLIP, 0.5, -2.0, 1.6, 0.0),  # below 0.8 and bad: enough
        (CLIP, 0.5, 0.5, -0.25, -0.25),
        (CLIP, 4.0, -2.0, 6.0, 0.0),  # bounded by the dual clip
        (Method(correction="none", dual_clip=0.0), 4.0, -2.0, 8.0, 8.0),
        (Method(form="stop", clip_high=4.0, correction="none"), 3.0, 2.0, -6.0 * math.log(3.0), -6.0),
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
    apart = torch.tensor([0.5, 4.0]).log()
    assert not CLIP.clipped(apart, torch.zeros(2), torch.zeros(2)).any(), "what is neither good nor bad"


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


def test_long_answers_lose_reward_gradually() -> None:
    assert [length_penalty(n, 100, 0.2) for n in (0, 80, 90, 100, 120)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length_penalty(100, 100, 0.0) == 0.0


def test_a_full_disk_costs_transcripts_and_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "transcripts").touch()
    stage = SimpleNamespace(folder=tmp_path, _complained=False)
    for step in (1, 2):
        RlStage._write_transcript(stage, step, [])  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("transcripts cannot be written (File exists)") == 1
    (tmp_path / "transcripts").unlink()
    RlStage._write_transcript(stage, 3, [])  # type: ignore[arg-type]
    assert (tmp_path / "transcripts" / "step_000003-0.jsonl").is_file()
