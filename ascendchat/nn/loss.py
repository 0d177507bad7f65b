"""Head and cross-entropy in one function that never holds the full float32 logits.

    loss = head_loss(hidden, model.head, targets, vocab)        # mean nats over the targets that are not IGNORE

The gradient of the head needs the probabilities, and they are at hand in the forward pass: so each chunk of rows is
multiplied, softcapped, scored and turned into its gradient at once, and only one chunk of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascendchat.nn import IGNORE
from ascendchat.sizes.memory import HEAD_CHUNK_BYTES  # accelerators like chunks large, CPUs small

SOFTCAP = 15.0  # logits are squashed into (-15, 15)
FP16_LIFT = 64.0  # float16 holds probabilities down to 1e-9 when they are multiplied by this


def chunk_rows(hidden: Tensor, head: Tensor) -> int:
    """Number of rows whose logits fit one chunk."""
    size = hidden.element_size()
    return max(1, HEAD_CHUNK_BYTES.get(size, 2**27) // (size * head.size(0)))


def softcap(logits: Tensor) -> Tensor:
    """Squash logits into ±SOFTCAP, in float32."""
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


def slope_times(x: Tensor, half: Tensor) -> Tensor:
    """Multiply x by half * (1 - half), a quarter of the slope of the softcap, in one pass."""
    return torch.ops.aten.sigmoid_backward(x, half)  # type: ignore[no-any-return]


def score(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    vocab: int,
    next2_targets: Tensor | None = None,
    mtp_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over the logits (N, padded V): nats per row (0 where ignored), the gradient of the nats with respect to
    the raw logits up to a factor per row, and that factor (N, 1) times `weight`.

    The softcap bounds the logits, so exp(capped + SOFTCAP) needs no maximum first, and the division by its sum is left
    to the factor, with the 4 of the slope: whoever multiplies the gradient scales small rows instead of the large one.
    float16 has no room for that, so it divides first. The columns behind `vocab` do not exist and get neither score nor
    gradient. The gradient, not the nats, has `mtp_weight` (0-dim) times the nats of `next2_targets` in it. Without a
    compiler every operation here is a pass over the logits in float32, the slowest part of a step on NPUs.
    """
    by = torch.full((1,), 2.0 / SOFTCAP, device=logits.device)  # a factor with a dimension makes the product float32
    half = torch.sigmoid(logits[:, :vocab] * by)  # capped = SOFTCAP * (2 * half - 1)
    unscaled = torch.exp((2.0 * SOFTCAP) * half)
    total = unscaled.sum(dim=-1, keepdim=True)
    valid = (targets != IGNORE).unsqueeze(-1)
    index = targets.clamp(min=0).unsqueeze(-1)
    size = total / (4.0 * FP16_LIFT) if logits.dtype == torch.float16 else None
    gradient = slope_times(unscaled, half)
    gradient = (gradient if size is None else gradient / size).to(logits.dtype)
    columns, parts = index, total  # (N, 1): where the targets are, and what they take off the gradient there
    if next2_targets is not None and mtp_weight is not None:
        has_next2 = (next2_targets != IGNORE).unsqueeze(-1)
        share = mtp_weight * has_next2
        second = torch.where(has_next2, next2_targets.unsqueeze(-1), index)
        same = second == index  # then both columns get the same number
        columns, whole = torch.cat((second, index), dim=-1), 1.0 + share
        parts = torch.cat((share + same, 1.0 + share * same), dim=-1) * (total / whole)
        weight = weight * whole
    mine = torch.sigmoid(logits.gather(-1, columns) * by)
    chosen = (2.0 * SOFTCAP) * mine  # the targets' capped logits, and SOFTCAP
    there = slope_times(chosen.exp() - parts, mine)
    gradient.scatter_(-1, columns, (there if size is None else there / size).to(gradient.dtype))
    nats = torch.where(valid.squeeze(-1), total.squeeze(-1).log() - chosen[:, -1], 0.0)
    if logits.size(-1) > vocab:
        gradient = torch.nn.functional.pad(gradient, (0, logits.size(-1) - vocab))
    return nats, gradient, torch.where(valid, 4.0 * weight / total if size is None else weight / FP16_LIFT, 0.0)


class HeadProducts:
    """The two products with the head (V, C) that depend on it; nn/fp8.py has them in 8 bits."""

    def __init__(self, head: Tensor) -> None:
        self.head = head

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.t()

    def back(self, gradient: Tensor, factor: Tensor, weight: Tensor, out: Tensor) -> None:
        """The gradient of the hidden states, from what `score` returned for a target of that weight."""
        torch.mul(gradient @ self.head, factor, out=out)


@dataclass(frozen=True)
class _Targets:
    """Targets of the head, one entry per row of hidden states, and how their scores become a loss."""

    tokens: Tensor  # (N,), IGNORE where nothing is scored
    weight: Tensor  # 0-dim factor on the sum over the tokens
    vocab: int
    scorer: Callable[..., Any]  # `score`, compiled or not
    next2_targets: Tensor | None = None  # (N,) the tokens after next, and
    mtp_weight: Tensor | None = None  # their weight in the gradient, 0-dim
    products: Callable[[Tensor], HeadProducts] = HeadProducts

    def chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor, int, Tensor | None, Tensor | None]:
        next2_targets = None if self.next2_targets is None else self.next2_targets[start:stop]
        return self.tokens[start:stop], self.weight, self.vocab, next2_targets, self.mtp_weight


class _HeadLoss(torch.autograd.Function):
    """Forward computes the gradients too; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, wanted: _Targets) -> Tensor:
        rows = chunk_rows(hidden, head)
        grad_hidden, grad_head = torch.empty_like(hidden), None
        learns = ctx.needs_input_grad[1]  # a head that is frozen costs a third less
        losses, products = [], wanted.products(head)
        for start in range(0, hidden.size(0), rows):
            part = hidden[start : start + rows]
            loss, gradient, factor = wanted.scorer(products.logits(part), *wanted.chunk(start, start + rows))
            losses.append(loss.sum())
            products.back(gradient, factor, wanted.weight, grad_hidden[start : start + rows])
            if learns:
                scaled = torch.mul(part, factor, out=torch.empty_like(part))
                grad_head = gradient.t() @ scaled if grad_head is None else torch.addmm(grad_head, gradient.t(), scaled)
            del gradient  # before the next chunk: else there are three of a chunk's size, not two
        assert losses, "a batch without rows has no loss"
        ctx.save_for_backward(grad_hidden, grad_head)
        return torch.stack(losses).sum() * wanted.weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_output.to(grad_hidden.dtype)
        return grad_hidden * scale, None if grad_head is None else grad_head * scale, None


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab: int,
    *,
    weight: Tensor | None = None,
    mtp_weight: Tensor | None = None,
    continues_document: Tensor | None = None,
    scorer: Callable[..., Any] = score,
    products: Callable[[Tensor], HeadProducts] = HeadProducts,
) -> Tensor:
    """Mean nats over the scored targets, or `weight * sum of nats` when the weight is given (a 0-dim tensor).

    hidden (..., C), targets (...) with IGNORE where nothing is scored. A batch without any scored target has loss 0.
    Multi-token prediction: with `mtp_weight` (a 0-dim tensor) the gradient is that of the loss plus `mtp_weight` times
    the loss of predicting the token after next by the same logits; targets are then (B, T). `continues_document`
    (B, T), 0 where a document begins, keeps that prediction within the document. The returned loss is without it.
    """
    next2_targets = None
    if mtp_weight is not None:
        next2_targets = (
            targets[:, 1:]
            if continues_document is None
            else targets[:, 1:].masked_fill(continues_document[:, 1:] == 0, IGNORE)
        )
        next2_targets = torch.nn.functional.pad(next2_targets, (0, 1), value=IGNORE).reshape(-1)
    tokens = targets.reshape(-1)
    wanted = _Targets(
        tokens, mean_weight(tokens) if weight is None else weight, vocab, scorer, next2_targets, mtp_weight, products
    )
    return _HeadLoss.apply(hidden.reshape(-1, hidden.size(-1)), head, wanted)  # type: ignore[no-any-return, no-untyped-call]


def mean_weight(tokens: Tensor) -> Tensor:
    """The factor that makes a sum over the scored targets their mean."""
    return 1.0 / (tokens != IGNORE).sum().clamp(min=1).float()


def token_nats(
    hidden: Tensor, head: Tensor, targets: Tensor, vocab: int, cap: Callable[[Tensor], Tensor] = softcap
) -> Tensor:
    """Nats of every target (0 where ignored), chunk by chunk; for evaluation, without gradients."""
    flat, wanted = hidden.reshape(-1, hidden.size(-1)), targets.reshape(-1)
    rows = chunk_rows(flat, head)
    parts = []
    for start in range(0, flat.size(0), rows):
        capped = cap(flat[start : start + rows] @ head[:vocab].t())
        target = wanted[start : start + rows]
        chosen = capped.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        parts.append(torch.where(target != IGNORE, torch.logsumexp(capped, dim=-1) - chosen, 0.0))
    return torch.cat(parts).view(targets.shape)


def score_without_softcap(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor,
    vocab: int,
    next2_targets: Tensor | None = None,
    mtp_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`score` for logits (N, V or more) without a soft cap, as models of Hugging Face have them. Nothing bounds them,
    so the largest of each row is subtracted first."""
    if next2_targets is not None or mtp_weight is not None:
        raise NotImplementedError("predicting the token after next is for our own models")
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
