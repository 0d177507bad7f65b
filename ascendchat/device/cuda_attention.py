"""Attention over rows of training by the package flash-attn-4, on Hopper and newer chips that have it installed.

    y = attend(q, k, v, window, scale)     # (B, T, H, D), (B, T, K, D): causal, `window` tokens back; with gradients
    y = attend(q, k, v, window, scale, bounds)    # the same, but each document sees only itself: Flash.bounds

Its kernels are operators of torch here, so that a compiled model calls them without a break. On an H200, 32 rows of
2048, 6 heads of 128, with gradient: 1.57 ms, cuDNN 1.77; a window of 512: 0.99 ms, FlexAttention 1.64.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ascendchat.device import packages
from ascendchat.device.accelerator import keep

PACKAGE = "flash-attn-4"
CHANNELS = 128  # of a head at most; larger ones were not timed
SEEN = {"causal", "window_size_left", "window_size_right"}
DOCUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
CALLED = {  # what is given to its two functions by name: they are internal, and another version may have others
    "_flash_attn_fwd": {"softmax_scale", "return_lse", *SEEN, *DOCUMENTS},
    "_flash_attn_bwd": {"deterministic", *SEEN, *DOCUMENTS},
}


def installed() -> bool:
    return packages.installed(PACKAGE)


@cache
def _package() -> Any:
    """It compiles its kernels when they are first used; they are kept beside what torch.compile makes."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    keep("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", PACKAGE)
    return import_module("flash_attn.cute.interface")


@cache
def fault() -> str | None:
    """Why the package that is installed cannot be called, or None. Asked once, before a model is compiled with it."""
    return packages.fault(_package, CALLED)


def refusal(device: torch.device) -> str | None:
    """Why the package does not run on this device although it is installed; None where it runs or is not there."""
    if device.type != "cuda" or not installed():
        return None
    if (capability := torch.cuda.get_device_capability(device)) < (9, 0):
        return f"it is for compute capability 9.0 and newer, this is {'.'.join(map(str, capability))}"
    if capability >= (12, 0) and torch.are_deterministic_algorithms_enabled():
        return "its gradient is not deterministic on this chip"
    return fault()


def usable(device: torch.device) -> bool:
    """Whether it runs on this device."""
    return device.type == "cuda" and installed() and refusal(device) is None


def notice(device: torch.device, head_dim: int) -> str | None:
    """The sentence that says whether rows of training are read by the package; None where it is not installed."""
    reason = refusal(device)
    if usable(device):
        if head_dim <= CHANNELS:
            return f"rows of training are read by the package {PACKAGE}"
        reason = f"a head of {head_dim} channels is above {CHANNELS}"
    return reason and f"the package {PACKAGE} {version(PACKAGE)} is not used: {reason}"


def _told(bounds: Tensor | None, longest: int, window: int) -> dict[str, Any]:
    """What a query sees, and where documents end (documents + 1,)."""
    told: dict[str, Any] = {"causal": True}
    if window < longest:
        told = {"causal": False, "window_size_left": window - 1, "window_size_right": 0}
    if bounds is not None:
        told |= {f"cu_seqlens_{side}": bounds for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    return told


@torch.library.custom_op("ascendchat::packaged_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows (B, T, H, D) without bounds, documents end to end (N, H, D) with them."""
    how = _told(bounds, longest, window) | {"softmax_scale": scale, "return_lse": True}
    y, logsumexp, *_ = _package()._flash_attn_fwd(q, k, v, **how)
    return y, logsumexp


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    size = (q.size(1), q.size(0)) if bounds is not None else (q.size(0), q.size(2), q.size(1))
    return q.new_empty(q.shape), q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("ascendchat::packaged_attention_back", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    y: Tensor,
    logsumexp: Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With torch.use_deterministic_algorithms the same bits at every call, 6 % slower on an H200."""
    how = _told(bounds, longest, window) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    dq, dk, dv = _package()._flash_attn_bwd(q, k, v, y, grad.contiguous(), logsumexp, scale, **how)
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)  # strides as those of the package


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.rest = inputs[4:]


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 4


_forward.register_autograd(_gradients, setup_context=_keep)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None = None) -> Tensor:
    longest, flat = q.size(1), (q, k, v)
    if bounds is not None:
        flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    y: Tensor = _forward(*flat, bounds, longest, window, scale)[0]
    return y.view(q.shape)
