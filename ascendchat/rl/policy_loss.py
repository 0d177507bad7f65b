"""The loss of a batch of answers and what is measured of it: nn/logprobs.py and grpo.py put together.

    of_policy = PolicyLoss(learner, method, drawn, reference)       # built by command.py
    loss = of_policy(batch, tokens)                                 # RlStage.loss
    batch = replace(batch, proximal=of_policy.logprobs(batch))      # before the first of several updates on a batch

What is computed once per batch, without gradient: for GSPO with a known proximal policy the log-probabilities, from the
same hidden states, since its ratio is that of a whole answer; and with a KL those of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat.config import UserError
from ascendchat.config.rl import RlConfig
from ascendchat.nn import IGNORE
from ascendchat.nn.logprobs import head_logprobs, head_objective
from ascendchat.nn.readout import Drawn
from ascendchat.parallel import collectives
from ascendchat.rl.grpo import PRESETS, Method, correction, k3, sequence_anchor
from ascendchat.train.model import Learner
from ascendchat.train.stage import Loss


@dataclass(frozen=True)
class PolicyBatch:
    """What one forward pass of RL takes, on the device: columns of the shape (B, T)."""

    inputs: Tensor
    targets: Tensor
    advantage: Tensor
    behaviour: Tensor
    weight: Tensor
    lengths: NDArray[np.int32]
    proximal: Tensor | None = None  # log-probabilities before the first update on the batch; None: this is the first


def method_of(config: RlConfig) -> Method:
    """The preset with what was asked for."""
    asked = {"clip_low": config.clip_low, "clip_high": config.clip_high, "correction": config.correction}
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(PRESETS[config.preset], kl=config.kl, **given)  # type: ignore[arg-type]


class PolicyLoss:
    """The loss of answers, and their log-probabilities. `reference` has the weights that training began with; it is
    there if the method has a KL. `exact`: the generator must have reported the very same log-probabilities."""

    def __init__(
        self, learner: Learner, method: Method, drawn: Drawn, reference: Learner | None = None, *, exact: bool = False
    ) -> None:
        self.learner, self.method, self.drawn, self.reference, self.exact = learner, method, drawn, reference, exact
        self.objective = method.objective()
        self._largest = torch.zeros((), device=learner.place)

    @torch.no_grad()
    def logprobs(self, batch: PolicyBatch) -> Tensor:
        """(B, T) of the targets by the weights as they are now, 0 where nothing is scored: the same bits, on a CPU, as
        the loss would find. Logits exist chunk by chunk."""
        return self._logprobs(self.learner, batch)

    def _logprobs(self, learner: Learner, batch: PolicyBatch) -> Tensor:
        return head_logprobs(self._hidden(learner, batch), learner.model.head, batch.targets, self.drawn)

    def _hidden(self, learner: Learner, batch: PolicyBatch) -> Tensor:
        return learner.hidden(batch.inputs, learner.documents(batch.inputs, batch.lengths))

    def __call__(self, batch: PolicyBatch, tokens: int, scale: float = 1.0) -> Loss:
        """Of this rank's tokens; the loop takes the mean over the ranks, so each counts as often as there are ranks.
        `tokens`: those that the metrics are means over."""
        learner, scored = self.learner, batch.targets != IGNORE
        hidden = self._hidden(learner, batch)
        unknown = torch.full_like(batch.weight, torch.nan)
        proximal = unknown if batch.proximal is None else batch.proximal
        anchor = self._anchor(hidden, proximal, batch) if batch.proximal is not None else proximal
        columns = [batch.advantage, anchor, proximal, batch.behaviour, batch.weight]
        if self.reference is not None:
            with torch.no_grad():
                columns.append(self._logprobs(self.reference, batch))
        weight = torch.full((), collectives.world().size * scale, device=learner.place)
        loss, logprobs, entropy = head_objective(
            hidden, learner.model.head, batch.targets, self.drawn, self.objective, columns, weight=weight
        )
        share = torch.where(scored, collectives.world().size / tokens, 0.0)
        metrics = {"entropy": entropy, **self._compared(logprobs, *columns)}
        if self.exact and (apart := torch.where(batch.weight * scored > 0, metrics["logprob_gap"], 0.0).max()) > 0:
            raise UserError(
                f"--batch-invariant: generator and trainer differ by {apart:.1e}: on this machine torch changes the "
                "order of sums with the shape even so; leave the flag out"
            )
        ratio = torch.where(scored, (logprobs - batch.behaviour).exp(), 0.0)
        self._largest = torch.maximum(self._largest, ratio.max())
        return Loss(loss, {name: (value * share).sum() for name, value in metrics.items()})

    def _anchor(self, hidden: Tensor, proximal: Tensor, batch: PolicyBatch) -> Tensor:
        """What the ratio of each token is measured from, (B, T)."""
        if self.method.level == "token":
            return proximal
        now = head_logprobs(hidden.detach(), self.learner.model.head, batch.targets, self.drawn)
        owner = torch.from_numpy(np.arange(len(batch.lengths)).repeat(batch.lengths)).to(proximal.device)
        scored = (batch.targets != IGNORE).flatten()
        anchor = sequence_anchor(now.flatten(), proximal.flatten(), owner, scored, len(batch.lengths))
        return anchor.view(proximal.shape)

    def _compared(
        self,
        logprobs: Tensor,
        advantage: Tensor,
        anchor: Tensor,
        proximal: Tensor,
        behaviour: Tensor,
        weight: Tensor,
        reference: Tensor | None = None,
    ) -> Mapping[str, Tensor]:
        """Per token: how the trained policy differs from the others."""
        gap = torch.where(proximal.isnan(), logprobs, proximal) - behaviour
        found = {
            "logprob_gap": gap.abs(),
            "mismatch_kl": k3(gap),
            "clip_fraction": self.method.clipped(logprobs, advantage, anchor),
            "masked_fraction": correction(gap, self.method.correction) == 0,
        }
        return found if reference is None else {**found, "kl": k3(reference - logprobs)}

    def largest_ratio(self) -> float:
        """Of the probability of a token to the generator's, over all ranks, since this was asked for last."""
        collectives.all_reduce(self._largest, "max")
        found = self._largest.item()
        self._largest = torch.zeros_like(self._largest)
        return found
