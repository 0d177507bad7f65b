"""8-bit floating-point matrix products for `--fp8`: forward and input-gradient products of the blocks and of the head.

Scales are fixed: a float needs only to land in its range, and here the ranges are known. Inputs are RMS-normalised,
averages of such, or their squares; weights keep their size under Muon; gradients of a mean loss shrink with the number
of tokens. So nothing has to be searched for a maximum, and a cast fuses into the kernel that makes the number; only the
head, which AdamW moves, is scaled by its largest weight. Forward factors are e4m3 (448 down to 2^-9), gradients e5m2
(57344 down to 2^-16). Weight gradients stay in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascendchat.nn.gpt import Heads, PlainOps
from ascendchat.nn.loss import HeadProducts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WEIGHT_SCALE = 64.0
INPUT_SCALE = 8.0  # of unit size, as norms and attention give
SQUARE_SCALE = 1.0  # ReLU² may be large
PROBABILITY_SCALE = 2.0**14  # differences of probabilities, down to 2^-30
GRADIENT_SCALE = 8.0  # times the tokens that the mean loss is over


def quantise(x: Tensor, scale: float | Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """x * scale in 8 bits, clamped: an overflow would be NaN."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def product(a: Tensor, b: Tensor, scale_a: float | Tensor, scale_b: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Product of 8-bit matrices: a (M, K) row-major, b (K, N) column-major."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, scale_a=one / scale_a, scale_b=one / scale_b, out_dtype=dtype, use_fast_accum=True)


class _Fp8Linear(torch.autograd.Function):
    """Product x (N, I) @ weight.t() with weight (O, I)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, input_scale: float, grad_scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, grad_scale)
        return product(quantise(x, input_scale), quantise(weight, WEIGHT_SCALE).t(), input_scale, WEIGHT_SCALE, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        columns = quantise(weight.t().contiguous(), WEIGHT_SCALE).t()  # (O, I), column by column
        dx = product(quantise(grad, scale, E5M2), columns, scale, WEIGHT_SCALE, x.dtype)
        return dx, grad.t() @ x, None, None


class _Fp8Transposed(torch.autograd.Function):
    """Product x (N, I) @ weight with weight (I, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, input_scale: float, grad_scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, grad_scale)
        columns = quantise(weight.t().contiguous(), WEIGHT_SCALE).t()
        return product(quantise(x, input_scale), columns, input_scale, WEIGHT_SCALE, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        rows = quantise(grad, scale, E5M2)
        dx = product(rows, quantise(weight, WEIGHT_SCALE).t(), scale, WEIGHT_SCALE, x.dtype)
        return dx, x.t() @ grad, None, None


def head_factors(head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise the head (V, C): row-major, column-major, and their scale, since its weights may grow to any size."""
    scale = torch.finfo(E4M3).max / head.abs().amax().float().clamp(min=1e-6)
    return quantise(head, scale), quantise(head.t().contiguous(), scale).t(), scale


def head_logits(hidden: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    return product(quantise(hidden, INPUT_SCALE), rows.t(), INPUT_SCALE, scale, hidden.dtype)


def head_back(gradient: Tensor, factor: Tensor, weight: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the hidden states. Times factor / weight, `gradient` is a difference of probabilities, within ±2: so
    its scale is known."""
    share = quantise(gradient * (factor / weight), PROBABILITY_SCALE, E5M2)
    return product(share, columns, PROBABILITY_SCALE, scale / weight, gradient.dtype)


class Fp8Head:
    """Factory of the products of a head; `compile` wraps each function once."""

    def __init__(self, compile: Callable[[Any], Any]) -> None:
        self.factors, self.logits, self.back = map(compile, (head_factors, head_logits, head_back))

    def __call__(self, head: Tensor) -> HeadProducts:
        return _Fp8HeadProducts(head, self)


class _Fp8HeadProducts(HeadProducts):
    """Logits, and the gradient of the hidden states. That of the head stays in the compute dtype: it would need both of
    its factors turned, and gains least."""

    def __init__(self, head: Tensor, kernels: Fp8Head) -> None:
        super().__init__(head)
        self.kernels = kernels
        self.rows, self.columns, self.scale = kernels.factors(head)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.kernels.logits(hidden, self.rows, self.scale)  # type: ignore[no-any-return]

    def back(self, gradient: Tensor, factor: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(self.kernels.back(gradient, factor, weight, self.columns, self.scale))


class Fp8Ops(PlainOps):
    """The operators of a block with 8-bit matrix products. `mean_over` says the tokens that the mean loss of one step
    is over; a 0-dim tensor holds it, so that another batch needs no new compilation."""

    def __init__(self, place: torch.device, heads: Heads | None = None) -> None:
        super().__init__(heads)
        self.gradient_scale = torch.full((), GRADIENT_SCALE, device=place)

    def mean_over(self, tokens: int) -> None:
        self.gradient_scale.fill_(GRADIENT_SCALE * tokens)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        y = _Fp8Linear.apply(x.flatten(0, -2), weight, INPUT_SCALE, self.gradient_scale)
        return y.unflatten(0, x.shape[:-1])

    def transposed_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        y = _Fp8Transposed.apply(x.flatten(0, -2), weight, SQUARE_SCALE, self.gradient_scale)
        return y.unflatten(0, x.shape[:-1])
