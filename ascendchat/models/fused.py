"""A chip's fused operators inside a model of transformers: norms, rotation, SwiGLU.

    for name in fuse(model, device.operators(), place): print(name)      # nothing where plain torch is best

Each is tried first on random numbers, where the model will run: what gives other results than transformers' own code
stays as it was.
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

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value
ROTATION = "apply_rotary_pos_emb"


class _FusedOps(Protocol):
    """What a chip may have in one operator, with gradients; those of device/ have it."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def weighted_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor: ...


def fuse(model: CausalLM, ops: _FusedOps | None, place: torch.device) -> list[str]:
    """Put them in; what was put in, for people. The model may still be elsewhere."""
    if ops is None:
        return []
    counts: dict[str, int] = {}
    known: dict[tuple[type, int], bool] = {}  # kind of module and its width -> whether the fused one does the same
    for module in model.inner.modules():
        made = fused_forward(module, ops)
        if made is None:
            continue
        key = type(module), width_of(module)
        if key not in known:
            alone = deepcopy(module).to(place)
            known[key] = same(alone.forward, fused_forward(alone, ops), model, place, width_of(module))
        if known[key]:
            module.forward = made
            name = type(module).__name__
            counts[name] = counts.get(name, 0) + 1
    if fuse_rotation(model, ops, place):
        counts[ROTATION] = model.shape.depth
    return [f"{name} x {count}" for name, count in counts.items()]


def fused_forward(module: nn.Module, ops: _FusedOps) -> Callable[[Tensor], Tensor] | None:
    """The forward of a norm or of a gated MLP; None for anything else."""
    if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return partial(norm, module, ops)
    if all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj")):
        return partial(gated, module, ops)
    return None


def norm(module: Any, ops: _FusedOps, x: Tensor) -> Tensor:
    return ops.weighted_norm(x, module.weight, module.variance_epsilon)


def gated(module: Any, ops: _FusedOps, x: Tensor) -> Tensor:
    found: Tensor = module.down_proj(ops.swiglu(module.gate_proj(x), module.up_proj(x)))
    return found


def width_of(module: Any) -> int:
    """Channels that go in."""
    return int(module.weight.size(0) if hasattr(module, "weight") else module.gate_proj.in_features)


@torch.no_grad()
def same(theirs: Any, ours: Any, model: CausalLM, place: torch.device, *size: int) -> bool:
    """Whether both give the same for random numbers."""
    head = model.head
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0)).to(place, head.dtype)
    expected, found = theirs(x), ours(x)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    far = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6)
    return float(far) <= CLOSE.get(head.dtype, 0.0)


def fuse_rotation(model: CausalLM, ops: _FusedOps, place: torch.device) -> bool:
    """transformers calls it as a function of the file of the model, which other models of that kind use too: those on
    another type of device keep theirs."""
    layer = next((module for module in model.inner.modules() if hasattr(module, "layer_idx")), None)
    file = vars(sys.modules[type(layer).__module__]) if layer is not None else {}
    if ROTATION not in file:
        return False
    theirs = getattr(file[ROTATION], "theirs", file[ROTATION])

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if q.device.type != place.type or args or named or cos.size(-1) != q.size(-1):
            rotated: tuple[Tensor, Tensor] = theirs(q, k, cos, sin, *args, **named)
            return rotated
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, T, D)
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)

    width = model.shape.head_dim
    angles = torch.arange(3.0)[None, :, None] * torch.arange(1.0, width // 2 + 1).repeat(2) / width
    cos, sin = (part.to(place, model.head.dtype) for part in (angles.cos(), angles.sin()))

    def with_angles(function: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
        return torch.cat(function(x, x[:, :1], cos, sin), dim=1)

    def rows(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        return lambda x: with_angles(function, x.transpose(1, 2))  # (B, T, H, D) -> (B, H, T, D)

    if not same(rows(theirs), rows(rotate), model, place, 2, width):
        return False
    rotate.theirs = theirs  # type: ignore[attr-defined]
    file[ROTATION] = rotate
    return True
