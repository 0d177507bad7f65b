"""The MLP's products by the package quack-kernels, which comes with flash-attn-4, on Hopper and newer chips.

    y = mlp(x, up, down)       # (..., C), (M, C), (M, C): relu(x @ up.t())² @ down, with gradients

The square, and in the gradient its slope, are taken before a product leaves the chip: a compiler's kernels read and
write all of (N, M) once more for each. Only the product before the square is kept for the gradient.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ascendchat.device import packages
from ascendchat.device.accelerator import keep

PACKAGE = "quack-kernels"
SQUARE = {"activation": "relu_sq", "tuned": False}
CALLED = {"gemm_act": {"A", "B", *SQUARE}, "gemm_dact": {"A", "B", "PreAct", *SQUARE}}
MULTIPLE = 8  # elements of 16 bits that are read at once


def installed() -> bool:
    return packages.installed(PACKAGE)


@cache
def _package() -> Any:
    """It compiles its kernels when they are first used; they are kept beside what torch.compile makes."""
    keep("QUACK_CACHE_DIR", PACKAGE)
    return import_module("quack.gemm_interface")


@cache
def fault() -> str | None:
    """Why the package that is installed cannot be called, or None. Asked once, before a model is compiled with it."""
    return packages.fault(_package, CALLED)


def refusal(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why the package does not multiply here although it is installed; None where it does or is not there."""
    if device.type != "cuda" or not installed():
        return None
    if (capability := torch.cuda.get_device_capability(device)) < (9, 0):
        return f"it is for compute capability 9.0 and newer, this is {'.'.join(map(str, capability))}"
    if dtype != torch.bfloat16:
        return "it was tried with bfloat16 only"
    if odd := [size for size in sizes if size % MULTIPLE]:
        return f"it is for sizes that {MULTIPLE} divides, not {odd[0]}"
    return fault()


def usable(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether it multiplies here."""
    return device.type == "cuda" and installed() and refusal(device, dtype, *sizes) is None


def notice(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """The sentence that says whether the package multiplies; None where it is not installed."""
    if usable(device, dtype, *sizes):
        return f"the MLP's products are made by the package {PACKAGE}"
    reason = refusal(device, dtype, *sizes)
    return reason and f"the package {PACKAGE} {version(PACKAGE)} is not used: {reason}"


@torch.library.custom_op("ascendchat::squared_product", mutates_args=())
def _squared(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """x @ up.t(), and the square of its positive part."""
    before, square = _package().gemm_act(x, up.t(), **SQUARE)
    return before, square


@_squared.register_fake
def _(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.size(0), up.size(0)), x.new_empty(x.size(0), up.size(0))


@torch.library.custom_op("ascendchat::squared_product_back", mutates_args=())
def _slope(grad: Tensor, down: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `before`, and its square once more."""
    slope, square = _package().gemm_dact(grad, down.t(), before, **SQUARE)
    return slope, square


@_slope.register_fake
def _(grad: Tensor, down: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), torch.empty_like(before)


class _Mlp(torch.autograd.Function):
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
    y: Tensor = _Mlp.apply(x.flatten(0, -2), up, down)  # type: ignore[no-untyped-call]
    return y.unflatten(0, x.shape[:-1])
