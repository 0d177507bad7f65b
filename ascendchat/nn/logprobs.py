"""Policy gradients through the head: the loss is a function of the log-probability of each token.

    loss, logprobs, entropy = head_objective(hidden, head, targets, drawn, objective, columns)
    logprobs = head_logprobs(hidden, head, targets, drawn)         # without gradient, as of an older policy
    logprobs = learnt_logprobs(hidden, head, targets, drawn)       # with: for losses of whole replies (preference.py)

As in loss.py each chunk of rows is multiplied, scored and turned into its gradient at once, and only one chunk of
logits exists at a time. `drawn` (readout.py) says which distribution is meant, and in which dtype it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascendchat.nn import IGNORE
from ascendchat.nn.loss import chunk_rows, mean_weight
from ascendchat.nn.readout import Drawn, Read

Objective = Callable[..., Tensor]  # (log-probabilities (N,), *columns (N,)) -> what is minimised, per token (N,)


@dataclass(frozen=True)
class Wanted:
    """What is asked of the head, one entry per row of hidden states."""

    tokens: Tensor  # (N,), IGNORE where nothing is scored
    weight: Tensor  # 0-dim factor on the sum over the tokens
    drawn: Drawn
    objective: Objective
    columns: tuple[Tensor, ...]  # (N,) each: what the objective takes besides the log-probability


def chunks(hidden: Tensor, head: Tensor) -> Iterator[slice]:
    """Rows whose float32 logits fit one chunk."""
    rows = max(1, chunk_rows(hidden, head) * hidden.element_size() // 4)
    return (slice(start, start + rows) for start in range(0, hidden.size(0), rows))


class HeadObjective(torch.autograd.Function):
    """Forward computes the gradients too; backward only scales them. Results: the loss, then (N,) log-probabilities and
    entropies, 0 where nothing is scored."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        drawn, vocab = wanted.drawn, wanted.drawn.vocab
        narrow = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype  # float16 has no room for gradients
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        logprobs, entropies = hidden.new_zeros(2, hidden.size(0), dtype=torch.float32)
        losses = [hidden.new_zeros((), dtype=torch.float32)]
        for rows in chunks(hidden, head):
            part, tokens = hidden[rows], wanted.tokens[rows]
            scored = tokens != IGNORE
            read = drawn.read(part, head, tokens)
            logprobs[rows] = torch.where(scored, read.logprob, 0.0)
            loss, slope = value_and_slope(
                wanted.objective, logprobs[rows], tuple(column[rows] for column in wanted.columns), scored
            )
            losses.append(loss.sum())
            shares = (read.scaled - read.logsumexp.unsqueeze(-1)).exp_()
            entropy = read.logsumexp - (shares * read.capped).sum(dim=-1) / drawn.temperature
            entropies[rows] = torch.where(scored, entropy, 0.0)
            gradient = by_logits(read, tokens, slope * (wanted.weight / drawn.temperature), drawn, shares).to(narrow)
            grad_hidden[rows] = (gradient @ head[:vocab].to(narrow)).to(hidden.dtype)
            grad_head[:vocab] += gradient.t() @ part.to(narrow)
            del read, shares, gradient  # before the next chunk is read
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(logprobs, entropies)
        return torch.stack(losses).sum() * wanted.weight, logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        scale = grad_output.to(grad_hidden.dtype)
        return grad_hidden * scale, grad_head * scale, None


def by_logits(read: Read, tokens: Tensor, factor: Tensor, drawn: Drawn, shares: Tensor) -> Tensor:
    """(N, V): `factor` (N,) times the gradient of the log-probability by the raw logits, which is (chosen - share)
    times the slope of the softcap. `shares` (N, V), the probabilities, and the logits of `read` end here."""
    index = tokens.clamp(min=0).unsqueeze(-1)
    gradient = shares.neg_().scatter_add_(-1, index, torch.ones_like(read.logprob).unsqueeze(-1))
    of_softcap = read.capped.mul_(1.0 / drawn.softcap).square_().neg_().add_(1.0)
    return gradient.mul_(of_softcap).mul_(factor.unsqueeze(-1))


class HeadLogprobs(torch.autograd.Function):
    """(N,) log-probabilities. What each of them weighs is known when all are: backward makes the logits once more,
    chunk by chunk, instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, drawn: Drawn) -> Tensor:
        ctx.save_for_backward(hidden, head, tokens)
        ctx.drawn = drawn
        parts = [drawn.read(hidden[part], head, tokens[part]).logprob for part in chunks(hidden, head)]
        known = torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
        return torch.where(tokens != IGNORE, known, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, head, tokens = ctx.saved_tensors
        drawn, vocab = ctx.drawn, ctx.drawn.vocab
        narrow = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # adapters: frozen
        factor = torch.where(tokens != IGNORE, grad_output, 0.0) / drawn.temperature
        for rows in chunks(hidden, head):
            part = hidden[rows]
            read = drawn.read(part, head, tokens[rows])
            shares = (read.scaled - read.logsumexp.unsqueeze(-1)).exp_()
            gradient = by_logits(read, tokens[rows], factor[rows], drawn, shares).to(narrow)
            grad_hidden[rows] = (gradient @ head[:vocab].to(narrow)).to(hidden.dtype)
            if grad_head is not None:
                grad_head[:vocab] += gradient.t() @ part.to(narrow)
            del read, shares, gradient
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None


def value_and_slope(
    objective: Objective, logprobs: Tensor, columns: tuple[Tensor, ...], scored: Tensor
) -> tuple[Tensor, Tensor]:
    """The objective of every token and its derivative by the log-probability; both 0 where nothing is scored."""
    with torch.enable_grad():
        known = logprobs.detach().requires_grad_()
        values = objective(known, *columns)
        (slope,) = torch.autograd.grad(values.sum(), known)
    return torch.where(scored, values.detach(), 0.0), torch.where(scored, slope, 0.0)  # elsewhere they may be infinite


def head_objective(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    drawn: Drawn,
    objective: Objective,
    columns: Sequence[Tensor] = (),
    *,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of objective(log-probability of the target, *columns) over the scored targets, or `weight` (0-dim) times
    their sum.

    `columns` have the shape of the targets: advantages, log-probabilities of an older policy, a mask. The objective is
    a plain function of vectors and is differentiated chunk by chunk. Returns the loss, and without gradient, in the
    shape of the targets, log-probabilities and entropies (nats of the whole distribution at that place).
    """
    rows, tokens = scored_rows(targets)
    scale = mean_weight(tokens) if weight is None else weight
    wanted = Wanted(tokens, scale, drawn, objective, tuple(column.reshape(-1)[rows] for column in columns))
    loss, *known = HeadObjective.apply(hidden.reshape(-1, hidden.size(-1))[rows], head, wanted)  # type: ignore[no-untyped-call]
    logprobs, entropies = (spread(column, rows, targets) for column in known)
    return loss, logprobs, entropies


def learnt_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, drawn: Drawn) -> Tensor:
    """Of every target, in their shape; 0 where nothing is scored. The product with the head is made a second time in
    the backward pass: what is kept in between is one number per target."""
    rows, tokens = scored_rows(targets)
    known = HeadLogprobs.apply(hidden.reshape(-1, hidden.size(-1))[rows], head, tokens, drawn)  # type: ignore[no-untyped-call]
    return spread(known, rows, targets)


@torch.no_grad()
def head_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, drawn: Drawn) -> Tensor:
    """The same without gradient."""
    return learnt_logprobs(hidden, head, targets, drawn)


def scored_rows(targets: Tensor) -> tuple[Tensor | slice, Tensor]:
    """The rows that the head is asked for, and their targets. Of a rollout half may be prompts and padding: a CPU skips
    them; elsewhere to find them would take a wait, and shapes that change from batch to batch."""
    tokens = targets.reshape(-1)
    rows = (tokens != IGNORE).nonzero().squeeze(-1) if targets.device.type == "cpu" else slice(None)
    return rows, tokens[rows]


def spread(values: Tensor, rows: Tensor | slice, targets: Tensor) -> Tensor:
    """Back to the shape of the targets; 0 elsewhere."""
    if isinstance(rows, slice):
        return values.view(targets.shape)
    return values.new_zeros(targets.numel()).index_put((rows,), values).view(targets.shape)
