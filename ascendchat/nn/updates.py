"""One step of Muon (NorMuon) and of AdamW: pure functions of tensors, in place. optim.py calls them."""

from __future__ import annotations

import math
from functools import cache

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
    x = polar((g / g.norm(dim=(-2, -1), keepdim=True).clamp_min_(TINY)).to(dtype))
    size, x = math.sqrt(min(x.size(-2), x.size(-1))), x.float()
    return x / x.norm(dim=(-2, -1), keepdim=True).mul_(1.0 / size).clamp_min_(TINY)


def polar(x: Tensor) -> Tensor:
    """(n, rows, cols) of norm 1 or less -> singular values near 1."""
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR:
        if tall:
            gram = x.mT @ x
            x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
        else:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


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


def muon_update_in_few_launches(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    factor: Tensor,
    *,
    lr: float,
    momentum: float,
    decay: float,
    beta2: float,
    dtype: torch.dtype,
) -> None:
    """The same step where each operation is a launch and a pass over its arguments, as on chips without a compiler.

    What only scales rows or matrices is done to the sizes of the rows (n, rows, 1), and reaches the weights with the
    last operation. The matrices are divided by √rows, which is their norm when every row has size 1: only where some
    rows are nearly zero does that differ from `orthogonalise`, by a factor that the polynomial makes up for.
    """
    rows, cols = weight.shape[1:]
    tiny, zero, least = constants(weight.device)
    first.lerp_(grad, 1.0 - momentum)
    g = grad.lerp(first, momentum)
    sizes = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    floor = torch.addcmul(tiny, torch.linalg.vector_norm(sizes, dim=-2, keepdim=True), least)
    x = polar(torch.addcdiv(zero, g, torch.maximum(sizes, floor), value=rows**-0.5).to(dtype))
    sizes = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    share = sizes / torch.linalg.vector_norm(sizes, dim=-2, keepdim=True).clamp_min_(TINY)
    most = min(rows, cols)  # the squared norm of the update
    second.mul_(beta2).addcmul_(share, share, value=(1.0 - beta2) * most / cols)
    step = second.clamp_min(EPS).rsqrt_()
    norm = torch.linalg.vector_norm(sizes * step, dim=-2, keepdim=True)
    decays = torch.ops.aten.threshold_backward(weight, x * weight, -TINY)  # 0 where the update has another sign
    weight.addcmul_(decays, factor, value=-lr * decay)
    weight.addcmul_(x, step / torch.addcdiv(tiny, norm, factor), value=-lr * math.sqrt(most))


@cache
def constants(place: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """TINY, 0 and LEAST_ROW, (1,) each: sums and products with them take no launch of their own."""
    tiny, zero, least = torch.tensor([[TINY], [0.0], [LEAST_ROW]], device=place)
    return tiny, zero, least


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
    """One AdamW step for a flat float32 tensor, in place, as one fused launch. `count` (0-dim): which step, from 1."""
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
