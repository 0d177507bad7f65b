"""The MLP's products by the package quack-kernels, which comes with flash-attn-4, on Hopper and newer chips.

    y = mlp(x, up, down)       # (..., C), (M, C), (M, C): relu(x @ up.t())² @ down, with gradients

The square, and in the gradient its slope, are taken before a product leaves the chip: a compiler's kernels read and
write all of (N, M) once more for each. Only the product before the square is kept for the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascendchat.device.packages import PackagedKernel

SQUARE = {"activation": "relu_sq", "tuned": False}
PACKAGE = PackagedKernel(
    "quack-kernels",
    "the MLP's products are made by",
    module="quack.gemm_interface",
    calls={"gemm_act": {"A", "B", *SQUARE}, "gemm_dact": {"A", "B", "PreAct", *SQUARE}},
    cache="QUACK_CACHE_DIR",
)
MULTIPLE = 8  # elements of 16 bits that are read at once


def refusal(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why the package does not multiply matrices of these sizes, or None."""
    reason = None
    if dtype != torch.bfloat16:
        reason = "it was tried with bfloat16 only"
    elif odd := [size for size in sizes if size % MULTIPLE]:
        reason = f"it is for sizes that {MULTIPLE} divides, not {odd[0]}"
    return PACKAGE.refusal(device, reason)


@torch.library.custom_op("ascendchat::squared_product", mutates_args=())
def _squared(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """x @ up.t(), and the square of its positive part."""
    before, square = PACKAGE.functions.gemm_act(x, up.t(), **SQUARE)
    return before, square


@_squared.register_fake
def _(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.size(0), up.size(0)), x.new_empty(x.size(0), up.size(0))


@torch.library.custom_op("ascendchat::squared_product_back", mutates_args=())
def _slope(grad: Tensor, down: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `before`, and its square once more."""
    slope, square = PACKAGE.functions.gemm_dact(grad, down.t(), before, **SQUARE)
    return slope, square


@_slope.register_fake
def _(grad: Tensor, down: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), torch.empty_like(before)


class _Mlp(torch.autograd.Function):
    """Keeps the product before the square, (N, M)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        before, square = _squared(x, up)
        ctx.save_for_backward(x, up, down, before)
        return square @ down

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, up, down, before = ctx.saved_tensors
        grad = grad.contiguous()
        slope, square = _slope(grad, down, before)
        return slope @ up, slope.t() @ x, square.t() @ grad


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """relu(x @ up.t())² @ down, with gradients."""
    y: Tensor = _Mlp.apply(x.flatten(0, -2), up, down)  # type: ignore[no-untyped-call]
    return y.unflatten(0, x.shape[:-1])
