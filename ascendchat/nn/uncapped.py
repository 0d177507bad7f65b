"""`score` of loss.py for logits without a soft cap, as other people's models have them.

loss = head_loss(hidden, head, targets, vocab, scorer=uncapped_score)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ascendchat.nn import IGNORE
from ascendchat.nn.loss import FP16_LIFT


def uncapped_score(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    vocab: int,
    later: Tensor | None = None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats per row (0 where ignored), their gradient with respect to the logits (N, V or more) up to a factor per row,
    and that factor (N, 1) times `weight`. Nothing bounds the logits, so the largest of each row is taken off first."""
    if later is not None or ahead is not None:
        raise NotImplementedError("guessing the token after next is for our own models")
    top = logits[:, :vocab].amax(dim=-1, keepdim=True).float()
    unscaled = (logits[:, :vocab] - top).exp_()  # the only float32 of their size that there is
    total = unscaled.sum(dim=-1, keepdim=True)
    valid = (targets != IGNORE).unsqueeze(-1)
    index = targets.clamp(min=0).unsqueeze(-1)
    chosen = logits.gather(-1, index).float() - top
    nats = torch.where(valid, total.log() - chosen, 0.0).squeeze(-1)
    size = total / FP16_LIFT if logits.dtype == torch.float16 else torch.ones_like(total)
    gradient = (unscaled / size if logits.dtype == torch.float16 else unscaled).to(logits.dtype)
    gradient = gradient.scatter(-1, index, ((chosen.exp() - total) / size).to(gradient.dtype))
    if logits.size(-1) > vocab:
        gradient = torch.nn.functional.pad(gradient, (0, logits.size(-1) - vocab))
    return nats, gradient, torch.where(valid, weight * size / total, 0.0)
