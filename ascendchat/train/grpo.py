"""The mathematics of policy gradients as pure functions: rewards to advantages, log-probabilities to a loss per token.

    method = PRESETS["dapo"]
    advantage = advantages(rewards, method.scale)                         # (groups, samples)
    objective = method.objective()                                        # for nn.loss.head_objective
    objective(logprob, advantage, proximal, behaviour, weight)            # per token, to be minimised

Three policies meet in a token: the one that is trained (`logprob`, which has the gradient), the one that it must not
leave at once (`proximal`: the weights at the beginning of this batch), and the one that wrote the token (`behaviour`:
what the generator reported). A proximal that is not a number stands for the trained policy itself: with one update per
batch both have the same weights. The ratio to the proximal is clipped; the ratio of proximal to behaviour, which is 1
but for rounding and staleness, corrects for the difference or masks tokens where it is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["none", "group"]
Mean = Literal["token", "sequence", "constant"]
Correction = Literal["none", "mask", "truncate"]

SMALLEST_STD = 1e-6
ROUNDING = 1e-4  # nats: a smaller gap says which rows were in the generator's batch, which a resumed run must not see


def advantages(rewards: Tensor, scale: Scale = "none") -> Tensor:
    """Rewards (groups, samples) less the mean of their group; "group" also divides by its standard deviation."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "none":
        return centred
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + SMALLEST_STD)


def token_weight(tokens: int, mean: Mean, most: int, longest: int) -> float:
    """The weight of each token of an answer of `tokens` in the loss of a step, as if all `most` answers were learnt
    from and were `longest` tokens long: with `mean_correction` they make the mean over tokens, over answers of their
    means, or over answers of their sums by a constant length. How much there is, is known when the last is there."""
    return 1.0 / (most * max(1, tokens if mean == "sequence" else longest))


def mean_correction(mean: Mean, tokens: float, answers: float, most: int, longest: int) -> float:
    """What those weights are too small by where `answers` with `tokens` tokens are learnt from."""
    return most * longest / max(1.0, tokens) if mean == "token" else most / max(1.0, answers)


def correction(gap: Tensor, how: Correction, low: float, high: float) -> Tensor:
    """The weight of a token whose proximal and behaviour log-probabilities differ by `gap`: the ratio where it lies in
    [low, high] and 0 elsewhere ("mask"), the ratio but at most `high` ("truncate"), or 1."""
    if how == "none":
        return torch.ones_like(gap)
    ratio = torch.where(gap.abs() < ROUNDING, 0.0, gap).exp()
    if how == "truncate":
        return ratio.clamp(max=high)
    return ratio * ((ratio >= low) & (ratio <= high))


@dataclass(frozen=True)
class Method:
    """How rewards become a loss."""

    scale: Scale = "none"
    mean: Mean = "token"
    form: Literal["clip", "stop", "plain"] = "clip"  # clipped ratio, stopped and clipped ratio (CISPO), no ratio
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0  # bound on the loss where the advantage is negative; 0: none
    correction: Correction = "mask"
    correction_low: float = 0.5
    correction_high: float = 5.0
    drop_equal: bool = True  # groups whose answers all have the same reward are left out
    soft_length: float = 0.0  # share of the most tokens over which a penalty grows up to -1

    def objective(self) -> Callable[..., Tensor]:
        """The function of nn.loss.head_objective."""

        def of_token(logprob: Tensor, advantage: Tensor, proximal: Tensor, behaviour: Tensor, weight: Tensor) -> Tensor:
            proximal = torch.where(proximal.isnan(), logprob.detach(), proximal)
            gain = self.gain(logprob, advantage, proximal)
            gap = proximal - behaviour
            return -weight * gain * correction(gap, self.correction, self.correction_low, self.correction_high)

        return of_token

    def gain(self, logprob: Tensor, advantage: Tensor, proximal: Tensor) -> Tensor:
        """What is maximised, before the correction."""
        if self.form == "plain":
            return advantage * logprob
        ratio = (logprob - proximal).exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        if self.form == "stop":
            return ratio.detach().clamp(max=high) * advantage * logprob
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if self.dual_clip:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual_clip * advantage), gain)
        return gain


PRESETS: dict[str, Method] = {
    "default": Method(),
    "grpo": Method(scale="group", mean="sequence", clip_high=0.2, dual_clip=0.0, correction="none", drop_equal=False),
    "drgrpo": Method(mean="constant", clip_high=0.2, dual_clip=0.0, correction="none", drop_equal=False),
    "dapo": Method(scale="group", dual_clip=0.0, correction="none", soft_length=0.2),
    "gspo": Method(
        scale="group",
        mean="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        dual_clip=0.0,
        correction="none",
        drop_equal=False,
    ),
    "cispo": Method(form="stop", clip_high=4.0, correction="truncate", correction_high=2.0),
    "reinforce": Method(form="plain", correction="none"),
}


def length_penalty(tokens: int, most: int, share: float) -> float:
    """0 up to (1 - share) of the most tokens, then down to -1 in a straight line."""
    begin = most * (1.0 - share)
    return 0.0 if not share or tokens <= begin else -min(1.0, (tokens - begin) / (most - begin))
