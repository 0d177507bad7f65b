"""The mathematics of policy gradients as pure functions: rewards to advantages, log-probabilities to a loss per token.

    method = PRESETS["dapo"]
    advantage = advantages(rewards, method.scale)                         # (groups, samples)
    objective = method.objective()                                        # for nn.logprobs.head_objective
    objective(logprob, advantage, anchor, proximal, behaviour, weight)    # per token, to be minimised

Three policies meet in a token: the one that is trained (`logprob`, which has the gradient), the one that it must not
leave at once (`proximal`: the weights at the beginning of this batch), and the one that wrote the token (`behaviour`:
what the generator reported). A proximal that is not a number stands for the trained policy itself: with one update per
batch both have the same weights. The ratio to the proximal is clipped; the ratio of proximal to behaviour, which is 1
but for rounding and staleness, is an importance weight (truncated: TIS) or masks tokens where it is too large (IcePop).

`anchor` is the log-probability that the clipped ratio is measured from: the proximal, or for GSPO, whose ratio is that
of the whole answer, `sequence_anchor`. A fourth policy, `reference`, is the one that training began with: see `kl`.
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
ROUNDING = (
    1e-4  # nats: a smaller gap is rounding, which depends on the generator's batch; a resumed run must not see it
)
MASK = 0.5, 5.0  # ratios of proximal to behaviour outside of these are masked (IcePop)
TRUNCATE = 2.0  # or count at most this much (truncated importance sampling)


def advantages(rewards: Tensor, scale: Scale = "none") -> Tensor:
    """Group-relative advantages: rewards (groups, samples) less the mean of their group; "group" also divides by its
    standard deviation."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "none":
        return centred
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + SMALLEST_STD)


def token_weight(tokens: int, mean: Mean, most: int, longest: int) -> float:
    """Loss weight of each token of an answer of `tokens`, as if all `most` answers of the step were learnt from and
    were `longest` tokens long. Their true number is known only after the last micro-batch; then `mean_correction`
    makes it the mean over tokens, over answers of their means, or over answers of their sums by a constant length."""
    return 1.0 / (most * max(1, tokens if mean == "sequence" else longest))


def mean_correction(mean: Mean, tokens: float, answers: float, most: int, longest: int) -> float:
    """The factor that `token_weight` left out, when `answers` with `tokens` tokens are learnt from in fact."""
    return most * longest / max(1.0, tokens) if mean == "token" else most / max(1.0, answers)


def correction(gap: Tensor, how: Correction) -> Tensor:
    """Importance weight of a token whose proximal and behaviour log-probabilities differ by `gap`: the ratio where it
    is within MASK and else 0 ("mask"), the ratio but at most TRUNCATE ("truncate"), or 1."""
    if how == "none":
        return torch.ones_like(gap)
    ratio = torch.where(gap.abs() < ROUNDING, 0.0, gap).exp()
    if how == "truncate":
        return ratio.clamp(max=TRUNCATE)
    return ratio * ((ratio >= MASK[0]) & (ratio <= MASK[1]))


def k3(gap: Tensor) -> Tensor:
    """The k3 estimate of KL(p, q) from a token of p, `gap` = log q - log p: never negative and unbiased."""
    return gap.exp() - 1.0 - gap


def sequence_anchor(logprob: Tensor, proximal: Tensor, owner: Tensor, scored: Tensor, answers: int) -> Tensor:
    """For GSPO: the anchor that makes the ratio of each token the geometric mean of the ratios of all tokens of its
    answer, with the gradient of its own log-probability (GSPO-token's stopped gradient).

    logprob, proximal (N,) without gradient; owner (N,) the number of the answer that a token belongs to, below
    `answers`; scored (N,) bool: tokens that the model chose. Where the proximal is not a number, nor is the anchor."""
    gap = torch.where(scored, logprob - proximal, 0.0)
    total = gap.new_zeros(answers).index_add(0, owner, gap)
    count = gap.new_zeros(answers).index_add(0, owner, scored.to(gap.dtype))
    return logprob - (total / count.clamp(min=1))[owner]


@dataclass(frozen=True)
class Method:
    """The settings by which rewards become a loss; PRESETS has those of published methods."""

    scale: Scale = "none"
    mean: Mean = "token"
    form: Literal["clip", "stop", "plain"] = "clip"  # clipped ratio, stopped and clipped ratio (CISPO), no ratio
    level: Literal["token", "sequence"] = "token"  # the ratio of a token, or of its answer
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0  # bound on the loss where the advantage is negative; 0: none
    correction: Correction = "mask"
    kl: float = 0.0  # weight of the KL to the weights that training began with
    drop_equal: bool = True  # leave out groups whose answers all have the same reward
    soft_length: float = 0.0  # share of max_new_tokens over which a penalty grows up to -1

    def objective(self) -> Callable[..., Tensor]:
        """The per-token loss for nn.logprobs.head_objective; it gets `reference` where `kl` is not 0."""

        def of_token(
            logprob: Tensor,
            advantage: Tensor,
            anchor: Tensor,
            proximal: Tensor,
            behaviour: Tensor,
            weight: Tensor,
            reference: Tensor | None = None,
        ) -> Tensor:
            anchor, proximal = (torch.where(known.isnan(), logprob.detach(), known) for known in (anchor, proximal))
            loss = -self.surrogate(logprob, advantage, anchor) * correction(proximal - behaviour, self.correction)
            if reference is not None:
                loss = loss + self.kl * k3(reference - logprob)
            return weight * loss

        return of_token

    def surrogate(self, logprob: Tensor, advantage: Tensor, anchor: Tensor) -> Tensor:
        """The surrogate objective of a token, before the importance weight."""
        if self.form == "plain":
            return advantage * logprob
        ratio = (logprob - anchor).exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        if self.form == "stop":
            return ratio.detach().clamp(max=high) * advantage * logprob
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if self.dual_clip:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual_clip * advantage), gain)
        return gain

    def clipped(self, logprob: Tensor, advantage: Tensor, anchor: Tensor) -> Tensor:
        """Bool per token: where clipping acts. With a clipped ratio such a token has no gradient, with a stopped one
        (CISPO) a smaller one."""
        ratio = (logprob - torch.where(anchor.isnan(), logprob, anchor)).exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        if self.form == "plain":
            return torch.zeros_like(ratio, dtype=torch.bool)
        if self.form == "stop":
            return ratio > high
        cut = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        return cut | ((advantage < 0) & (ratio > self.dual_clip)) if self.dual_clip else cut


PRESETS: dict[str, Method] = {
    "default": Method(),
    "grpo": Method(scale="group", mean="sequence", clip_high=0.2, dual_clip=0.0, correction="none", drop_equal=False),
    "drgrpo": Method(mean="constant", clip_high=0.2, dual_clip=0.0, correction="none", drop_equal=False),
    "dapo": Method(scale="group", dual_clip=0.0, correction="none", soft_length=0.2),
    "gspo": Method(
        scale="group",
        mean="sequence",
        level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        dual_clip=0.0,
        correction="none",
        drop_equal=False,
    ),
    "cispo": Method(form="stop", clip_high=4.0, correction="truncate"),
    "reinforce": Method(form="plain", correction="none"),
}


def length_penalty(tokens: int, most: int, share: float) -> float:
    """Soft overlong penalty: 0 up to (1 - share) of `most` tokens, then linear down to -1."""
    begin = most * (1.0 - share)
    return 0.0 if not share or tokens <= begin else -min(1.0, (tokens - begin) / (most - begin))
