"""One step of Muon (NorMuon) and of AdamW: pure functions of tensors, in place. optim.py calls them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Five steps of a polynomial that drives all singular values to 1 (Polar Express, fitted to bf16). The first takes
# matrices of norm 1 by 1 / ROOM: rounded to 16 bits, a singular value of 1 may come out above it.
ROOM = 1.01
POLAR = (
    (8.1566 / ROOM, -22.4833 / ROOM**3, 15.8788 / ROOM**5),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
TINY = 1e-20  # divides zeros; the squares of smaller numbers are no longer in float32
LEAST_ROW = 1e-5  # of the size of its matrix: a row that is nearly zero is not blown up to the size of the others
EPS = 1e-10


def orthogonalise(g: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, rows, cols) float32 -> nearest semi-orthogonal matrices, scaled to ‖·‖_F = √min(rows, cols), float32.

    The products are in `dtype`. What is rounded to it has size 1 whatever the size of g: in float16 numbers below 6e-8
    are gone. A matrix of zeros stays one.
    """
    rows = g.norm(dim=-1, keepdim=True)  # equal rows first: a better start for the polynomial
    floor = rows.norm(dim=-2, keepdim=True).mul_(LEAST_ROW).clamp_min_(TINY)
    g = g / torch.maximum(rows, floor)
    x = (g / g.norm(dim=(-2, -1), keepdim=True).clamp_min_(TINY)).to(dtype)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR:
        if tall:
            gram = x.mT @ x
            x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
        else:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    size, x = math.sqrt(min(x.size(-2), x.size(-1))), x.float()
    return x / x.norm(dim=(-2, -1), keepdim=True).mul_(1.0 / size).clamp_min_(TINY)


def equalise(update: Tensor, second: Tensor, beta2: float) -> Tensor:
    """NorMuon: divide each row by a running estimate of its size, then restore the norm of the whole update.

    update (n, rows, cols) float32; second (n, rows, 1) is updated in place.
    """
    mean_square = update.square().mean(dim=-1, keepdim=True)
    second.lerp_(mean_square, 1.0 - beta2)
    step = second.clamp_min(EPS).rsqrt()
    before = mean_square.sum(dim=-2, keepdim=True)
    after = (mean_square * step.square()).sum(dim=-2, keepdim=True)
    return update * (step * (before / after.clamp_min(EPS)).sqrt())


def muon_update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    factor: Tensor,
    *,
    lr: float | Tensor,
    momentum: float | Tensor,
    decay: float | Tensor,
    beta2: float,
    dtype: torch.dtype,
) -> None:
    """One step for a stack of matrices (n, rows, cols), all float32, in place; `factor` (n, 1, 1) scales the rate."""
    first.lerp_(grad, 1.0 - momentum)
    update = orthogonalise(grad.lerp(first, momentum), dtype)  # Nesterov
    update = equalise(update, second, beta2)
    agrees = (update * weight >= 0).to(weight.dtype)  # cautious: decay only where it agrees with the update
    weight.sub_((update + weight * agrees * decay) * (factor * lr))


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    decay: float,
    eps: float = EPS,
    fused: bool = True,
) -> None:
    """One AdamW step for a flat float32 tensor, in place, as one fused launch; `count` (0-dim) counts the steps."""
    count.add_(1.0)
    if not fused:
        first.lerp_(grad, 1.0 - betas[0])
        second.mul_(betas[1]).addcmul_(grad, grad, value=1.0 - betas[1])
        size = (second / (1.0 - betas[1] ** count)).sqrt_().add_(eps)
        weight.mul_(1.0 - lr * decay).sub_(first / size * (lr / (1.0 - betas[0] ** count)))
        return
    torch._fused_adamw_(
        [weight],
        [grad],
        [first],
        [second],
        [],
        [count],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
