"""Losses on pairs of replies, one preferred to the other: DPO, ORPO and SimPO, as functions of their log-probabilities.

    result = preference("dpo", pairs, Weights(beta=0.1))      # `finetune --stage dpo`
    result.loss, result.chosen, result.rejected               # (P,) each: what is minimised, and the implicit rewards

Pure functions of (P,) tensors: sums of the log-probabilities of the tokens of each reply (nn/logprobs.py gives them),
how many tokens that are, and for DPO the same sums by the model that training began with.

| loss  | what is minimised for a pair (c chosen, r rejected; log p: sum over the reply, mean log p: per token)      |
|-------|------------------------------------------------------------------------------------------------------------|
| dpo   | -log sigmoid(beta ((log p(c) - log ref(c)) - (log p(r) - log ref(r))))                                     |
| orpo  | -mean log p(c) - beta log sigmoid(log odds(c) - log odds(r)), where odds = p / (1 - p) of the mean log p   |
| simpo | -log sigmoid(beta (mean log p(c) - mean log p(r)) - gamma)                                                 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-7  # nats: a mean log-probability nearer to 0 counts as this, for its odds are infinite


@dataclass(frozen=True)
class Weights:
    """Hyperparameters of a loss."""

    beta: float
    smoothing: float = 0.0  # chance that the two replies of a pair are the wrong way round (dpo, simpo)
    gamma: float = 0.0  # nats by which the chosen reply has to win (simpo)
    sft: float = 0.0  # weight of -mean log p(c), added to the loss of the pair


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of P pairs, (P,) each, in float32 or wider."""

    chosen: Tensor  # sums over the tokens of the replies
    rejected: Tensor
    chosen_tokens: Tensor  # how many these are
    rejected_tokens: Tensor
    reference_chosen: Tensor | None = None  # the same sums by the reference
    reference_rejected: Tensor | None = None

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities per token."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class Preference(NamedTuple):
    """Losses and implicit rewards of P pairs, (P,) each."""

    loss: Tensor
    chosen: Tensor  # implicit rewards, without gradient; the margin of a pair is their difference
    rejected: Tensor


def smoothed(margin: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(margin), where with the chance `smoothing` the pair counts the other way round."""
    right = -F.logsigmoid(margin)
    return right if smoothing == 0.0 else (1.0 - smoothing) * right - smoothing * F.logsigmoid(-margin)


def dpo(pairs: Pairs, weights: Weights) -> Preference:
    """Direct preference optimisation (Rafailov et al. 2023), with conservative label smoothing."""
    if pairs.reference_chosen is None or pairs.reference_rejected is None:
        raise ValueError("DPO compares with a reference")
    chosen = weights.beta * (pairs.chosen - pairs.reference_chosen)
    rejected = weights.beta * (pairs.rejected - pairs.reference_rejected)
    return Preference(smoothed(chosen - rejected, weights.smoothing), chosen.detach(), rejected.detach())


def log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p = `mean`, exact for p near 0 and near 1."""
    bounded = mean.clamp(max=-TINY)
    return bounded - torch.log(-torch.expm1(bounded))


def orpo(pairs: Pairs, weights: Weights) -> Preference:
    """Odds ratio preference optimisation (Hong et al. 2024): learns the chosen reply and avoids the other at once."""
    chosen, rejected = pairs.means
    apart = log_odds(chosen) - log_odds(rejected)
    loss = -chosen - weights.beta * F.logsigmoid(apart)
    return Preference(loss, weights.beta * chosen.detach(), weights.beta * rejected.detach())


def simpo(pairs: Pairs, weights: Weights) -> Preference:
    """Simple preference optimisation (Meng et al. 2024): the mean log-probability is the reward."""
    chosen, rejected = (weights.beta * mean for mean in pairs.means)
    return Preference(
        smoothed(chosen - rejected - weights.gamma, weights.smoothing), chosen.detach(), rejected.detach()
    )


PREFERENCES: dict[str, Callable[[Pairs, Weights], Preference]] = {"dpo": dpo, "orpo": orpo, "simpo": simpo}


def preference(name: str, pairs: Pairs, weights: Weights) -> Preference:
    """Compute the loss called `name`, plus that of SFT on the chosen replies."""
    result = PREFERENCES[name](pairs, weights)
    return result._replace(loss=result.loss - weights.sft * pairs.means[0]) if weights.sft else result


def sequence_sums(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Sum of `values` (N,) for each owner 0 .. count - 1; owner (N,) int64."""
    return values.new_zeros(count).index_add(0, owner, values)
