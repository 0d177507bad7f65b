"""Puts a chip's fused operators into a model of transformers: norms, rotary embedding, SwiGLU.

    for name in fuse(model, device.operators(), place): print(name)      # nothing where plain torch is best

Each is first compared with transformers' own code, on random numbers and on the device of the model; one that gives
other results is not used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ascendchat.models.causal_lm import CausalLM

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # relative to the largest value
ROTATION = "apply_rotary_pos_emb"


class _FusedOps(Protocol):
    """Operators that a chip may have, with gradients; device/ implements them."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def weighted_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor: ...


def fuse(model: CausalLM, ops: _FusedOps | None, device: torch.device) -> list[str]:
    """Replace modules by `ops`, and say which. `device`: the one on which the model will run."""
    if ops is None:
        return []
    counts: dict[str, int] = {}
    equal: dict[tuple[type, int], bool] = {}  # kind of module and its width -> the fused one gives the same results
    for module in model.inner.modules():
        forward = fused_forward(module, ops)
        if forward is None:
            continue
        key = type(module), width_of(module)
        if key not in equal:
            copy = deepcopy(module).to(device)
            equal[key] = agree(copy.forward, fused_forward(copy, ops), model, device, width_of(module))
        if equal[key]:
            module.forward = forward
            name = type(module).__name__
            counts[name] = counts.get(name, 0) + 1
    if fuse_rotation(model, ops, device):
        counts[ROTATION] = model.shape.depth
    return [f"{name} x {count}" for name, count in counts.items()]


def fused_forward(module: nn.Module, ops: _FusedOps) -> Callable[[Tensor], Tensor] | None:
    """A fused forward for a norm or a gated MLP; None for other modules."""
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return partial(norm, module, ops)
    if all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
        return partial(gated, module, ops)
    return None


def norm(module: Any, ops: _FusedOps, x: Tensor) -> Tensor:
    return ops.weighted_norm(x, module.weight, module.variance_epsilon)


def gated(module: Any, ops: _FusedOps, x: Tensor) -> Tensor:
    y: Tensor = module.down_proj(ops.swiglu(module.gate_proj(x), module.up_proj(x)))
    return y


def width_of(module: Any) -> int:
    """Input channels of a module."""
    return int(module.weight.size(0) if hasattr(module, "weight") else module.gate_proj.in_features)


@torch.no_grad()
def agree(theirs: Any, ours: Any, model: CausalLM, device: torch.device, *size: int) -> bool:
    """True if both functions give the same results for random numbers."""
    head = model.head
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)).to(device, head.dtype)
    expected, actual = theirs(x), ours(x)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6)
    return float(error) <= TOLERANCE.get(head.dtype, 0.0)


def fuse_rotation(model: CausalLM, ops: _FusedOps, device: torch.device) -> bool:
    """Replace the rotary embedding. It is a function of the model's file in transformers, which has no interface for
    this; other models of that kind call it too, and those on another type of device keep transformers' own."""
    layer = next((module for module in model.inner.modules() if hasattr(module, "layer_idx")), None)
    file = vars(sys.modules[type(layer).__module__]) if layer is not None else {}
    if ROTATION not in file:
        return False
    theirs = getattr(file[ROTATION], "theirs", file[ROTATION])

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if q.device.type != device.type or args or named or cos.size(-1) != q.size(-1):
            rotated: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, *args, **named)
            return rotated
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D)
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)

    width = model.shape.head_dim
    angles = torch.arange(3.0)[None, :, None] * torch.arange(1.0, width // 2 + 1).repeat(2) / width
    cos, sin = (part.to(device, model.head.dtype) for part in (angles.cos(), angles.sin()))

    def with_angles(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        return torch.cat(function(x, x[:, :1], cos, sin), dim=1)

    def rows(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        return lambda x: with_angles(function, x.transpose(1, 2))  # (B, T, H, D) -> (B, H, T, D)

    if not agree(rows(theirs), rows(rotate), model, device, 2, width):
        return False
    rotate.theirs = theirs  # type: ignore[attr-defined]
    file[ROTATION] = rotate
    return True
