"""Policy gradients through the head: the loss is a function of the log-probability of each token.

    loss, logprobs, entropy = head_objective(hidden, head, targets, drawn, objective, columns)
    logprobs = head_logprobs(hidden, head, targets, drawn)         # without gradient, as of an older policy
    logprobs = differentiable_logprobs(hidden, head, targets, drawn)  # with: losses of whole replies (preference.py)

As in loss.py each chunk of rows is multiplied, scored and turned into its gradient at once, and only one chunk of
logits exists at a time. `drawn` (logprobs.py) says which distribution is meant, and in which dtype it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascendchat.nn import IGNORE
from ascendchat.nn.loss import SOFTCAP, chunk_rows, mean_weight

Objective = Callable[..., Tensor]  # (log-probabilities (N,), *columns (N,)) -> what is minimised, per token (N,)


@dataclass(frozen=True)
class _Wanted:
    """Targets of the head and the objective of their log-probabilities, one entry per row of hidden states."""

    tokens: Tensor  # (N,), IGNORE where nothing is scored
    weight: Tensor  # 0-dim factor on the sum over the tokens
    distribution: SamplingDistribution
    objective: Objective
    columns: tuple[Tensor, ...]  # (N,) each: what the objective takes besides the log-probability


def chunks(hidden: Tensor, head: Tensor) -> Iterator[slice]:
    """Slices of rows whose float32 logits fit one chunk."""
    rows = max(1, chunk_rows(hidden, head) * hidden.element_size() // 4)
    return (slice(start, start + rows) for start in range(0, hidden.size(0), rows))


class _HeadObjective(torch.autograd.Function):
    """Forward computes the gradients too; backward only scales them. Results: the loss, then (N,) log-probabilities and
    entropies, 0 where nothing is scored."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, wanted: _Wanted) -> tuple[Tensor, Tensor, Tensor]:
        distribution, vocab = wanted.distribution, wanted.distribution.vocab
        narrow = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype  # float16 has no room for gradients
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        logprobs, entropies = hidden.new_zeros(2, hidden.size(0), dtype=torch.float32)
        losses = [hidden.new_zeros((), dtype=torch.float32)]
        for rows in chunks(hidden, head):
            part, tokens = hidden[rows], wanted.tokens[rows]
            scored = tokens != IGNORE
            read = distribution.read(part, head, tokens)
            logprobs[rows] = torch.where(scored, read.logprob, 0.0)
            loss, slope = value_and_slope(
                wanted.objective, logprobs[rows], tuple(column[rows] for column in wanted.columns), scored
            )
            losses.append(loss.sum())
            shares = (read.scaled - read.logsumexp.unsqueeze(-1)).exp_()
            entropy = read.logsumexp - (shares * read.capped).sum(dim=-1) / distribution.temperature
            entropies[rows] = torch.where(scored, entropy, 0.0)
            gradient = by_logits(
                read, tokens, slope * (wanted.weight / distribution.temperature), distribution, shares
            ).to(narrow)
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


def by_logits(read: Read, tokens: Tensor, factor: Tensor, distribution: SamplingDistribution, shares: Tensor) -> Tensor:
    """Gradient (N, V) by the raw logits: `factor` (N,) times (1 for the target, 0 else, minus its probability) times
    the slope of the softcap. Overwrites `shares` (N, V), the probabilities, and the logits of `read`."""
    index = tokens.clamp(min=0).unsqueeze(-1)
    gradient = shares.neg_().scatter_add_(-1, index, torch.ones_like(read.logprob).unsqueeze(-1))
    of_softcap = read.capped.mul_(1.0 / distribution.softcap).square_().neg_().add_(1.0)
    return gradient.mul_(of_softcap).mul_(factor.unsqueeze(-1))


class HeadLogprobs(torch.autograd.Function):
    """Log-probabilities (N,) whose weights in the loss are known only when all of them are: the backward pass makes the
    logits once more, chunk by chunk, instead of saving them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, distribution: SamplingDistribution) -> Tensor:
        ctx.save_for_backward(hidden, head, tokens)
        ctx.distribution = distribution
        parts = [distribution.read(hidden[part], head, tokens[part]).logprob for part in chunks(hidden, head)]
        logprobs = torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
        return torch.where(tokens != IGNORE, logprobs, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, head, tokens = ctx.saved_tensors
        distribution, vocab = ctx.distribution, ctx.distribution.vocab
        narrow = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None  # adapters: frozen
        factor = torch.where(tokens != IGNORE, grad_output, 0.0) / distribution.temperature
        for rows in chunks(hidden, head):
            part = hidden[rows]
            read = distribution.read(part, head, tokens[rows])
            shares = (read.scaled - read.logsumexp.unsqueeze(-1)).exp_()
            gradient = by_logits(read, tokens[rows], factor[rows], distribution, shares).to(narrow)
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
        variable = logprobs.detach().requires_grad_()
        values = objective(variable, *columns)
        (slope,) = torch.autograd.grad(values.sum(), variable)
    return torch.where(scored, values.detach(), 0.0), torch.where(scored, slope, 0.0)  # elsewhere they may be infinite


def head_objective(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    distribution: SamplingDistribution,
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
    wanted = _Wanted(tokens, scale, distribution, objective, tuple(column.reshape(-1)[rows] for column in columns))
    loss, *columns_out = _HeadObjective.apply(hidden.reshape(-1, hidden.size(-1))[rows], head, wanted)  # type: ignore[no-untyped-call]
    logprobs, entropies = (spread(column, rows, targets) for column in columns_out)
    return loss, logprobs, entropies


def differentiable_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, distribution: SamplingDistribution
) -> Tensor:
    """Log-probability of every target, in their shape; 0 where nothing is scored. The backward pass multiplies with the
    head once more, so that between the passes only one number per target is saved."""
    rows, tokens = scored_rows(targets)
    logprobs = HeadLogprobs.apply(hidden.reshape(-1, hidden.size(-1))[rows], head, tokens, distribution)  # type: ignore[no-untyped-call]
    return spread(logprobs, rows, targets)


@torch.no_grad()
def head_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, distribution: SamplingDistribution) -> Tensor:
    """`differentiable_logprobs` without gradient."""
    return differentiable_logprobs(hidden, head, targets, distribution)


def scored_rows(targets: Tensor) -> tuple[Tensor | slice, Tensor]:
    """The rows that have a target, and their targets. Half of a rollout may be prompts and padding: a CPU skips them;
    an accelerator would have to be waited for, and shapes would change from batch to batch."""
    tokens = targets.reshape(-1)
    rows = (tokens != IGNORE).nonzero().squeeze(-1) if targets.device.type == "cpu" else slice(None)
    return rows, tokens[rows]


def spread(values: Tensor, rows: Tensor | slice, targets: Tensor) -> Tensor:
    """Put values of `rows` back into the shape of the targets; 0 elsewhere."""
    if isinstance(rows, slice):
        return values.view(targets.shape)
    return values.new_zeros(targets.numel()).index_put((rows,), values).view(targets.shape)


# Hidden states to the logits that tokens are drawn from, and to the log-probabilities of tokens.
#
#     readout = LMHead()                                   # the product in the model's dtype
#     readout = Float32LMHead(torch.bfloat16, place)       # the product is made and kept in float32, as RL wants it
#     logits = readout.logits(hidden, head)                 # (N, C), (V, C) -> (N, V) float32, softcapped
#     drawn = SamplingDistribution(vocab, temperature=0.7, top_k=50, readout=readout)
#     drawn.logprobs(hidden, head, targets)                 # (N,), of the distribution that an engine draws from
#
# The engine (engine/decode.py) and the trainer (nn/logprobs.py) of RL use the same one: a product that is rounded to 16
# bits moves log-probabilities by up to 3 %, and by other amounts in either.


class LMHead:
    """Computes logits in the model's dtype."""

    def product(self, hidden: Tensor, head: Tensor) -> Tensor:
        return hidden @ head.t()

    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def logits(self, hidden: Tensor, head: Tensor, softcap: float = SOFTCAP) -> Tensor:
        """(N, C) -> (N, V) float32, within ±softcap; math.inf: as they are."""
        logits = self.product(hidden, head).float()
        return logits if math.isinf(softcap) else softcap * self.tanh(logits / softcap)

    def logsumexp(self, x: Tensor) -> Tensor:
        """Log-sum-exp over the last dimension."""
        return torch.logsumexp(x, dim=-1)


class Float32LMHead(LMHead):
    """Computes logits in float32. A product of two 16-bit numbers is exact in float32, so it does not matter whether
    they are widened first, or the device multiplies them as they are and accumulates in float32."""

    def __init__(self, dtype: torch.dtype, place: torch.device) -> None:
        self.keeps = dtype != torch.float32 and keeps_float32(dtype, place)

    def product(self, hidden: Tensor, head: Tensor) -> Tensor:
        if self.keeps:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return hidden.float() @ head.float().t()


def keeps_float32(dtype: torch.dtype, place: torch.device) -> bool:
    """True if the device multiplies 16-bit matrices into a float32 one in a single operator."""
    try:
        small = torch.ones(16, 16, dtype=dtype, device=place)
        return torch.mm(small, small, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):  # this torch has no such argument, or this device no such operator
        return False


class Read(NamedTuple):
    """Logits of N rows and the log-probabilities of their targets."""

    capped: Tensor  # (N, V) logits
    scaled: Tensor  # (N, V) logits by the temperature, -inf where a token cannot be drawn
    logsumexp: Tensor  # (N,) of those
    logprob: Tensor  # (N,) of the targets; of token 0 where nothing is scored


@dataclass(frozen=True)
class SamplingDistribution:
    """The distribution that tokens are drawn from: the softmax of the logits by the temperature, over the `top_k`
    likeliest tokens (0: all) and the target itself, which an engine that rounds otherwise may have counted among
    them."""

    vocab: int
    temperature: float = 1.0
    top_k: int = 0
    softcap: float = SOFTCAP
    readout: LMHead = field(default_factory=LMHead)

    def read(self, hidden: Tensor, head: Tensor, targets: Tensor) -> Read:
        """Logits and log-probabilities of hidden (N, C), head (V or more, C), targets (N,), negative if not scored."""
        capped = self.readout.logits(hidden, head[: self.vocab], self.softcap)
        scaled = capped if self.temperature == 1.0 else capped / self.temperature
        index = targets.clamp(min=0).unsqueeze(-1)
        if self.top_k:
            least = scaled.topk(min(self.top_k, self.vocab), dim=-1).values[:, -1:]
            scaled = scaled.masked_fill((scaled < least).scatter(-1, index, False), -torch.inf)
        total = self.readout.logsumexp(scaled)
        return Read(capped, scaled, total, scaled.gather(-1, index).squeeze(-1) - total)
