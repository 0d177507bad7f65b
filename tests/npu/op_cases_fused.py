"""Operator cases (see op_cases.py): what exists only on NPU, losses, norms, rotary, foreach, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import ONE, Case, X, Y, Z, randn

try:
    import torch_npu
except ImportError:  # the tests of this folder are skipped then
    torch_npu = None

GAMMA, BETA = randn(8, seed=11) + 1, randn(8, seed=12)
LOGITS = randn(6, 10, seed=13)
LABELS = torch.tensor([3, 0, -100, 9, 2, 2])
ALL_LABELS = torch.tensor([3, 0, 4, 9, 2, 2])
HEADS = randn(2, 5, 3, 8, seed=14)  # (B, S, N, D)
ANGLES = torch.arange(5.0)[:, None] * 0.3 / torch.arange(1.0, 5.0)
COS, SIN = (f(torch.cat([ANGLES, ANGLES], -1))[None, :, None] for f in (torch.cos, torch.sin))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + swapped * sin


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def _paged(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Three tokens written to slots 1, 5 and 2 of two caches of (2 pages, 4 slots, N, D)."""
    caches = [torch.zeros(2, 4, *key.shape[1:], dtype=key.dtype, device=key.device) for _ in range(2)]
    slots = torch.tensor([1, 5, 2], dtype=torch.int32, device=key.device)
    if key.device.type == "cpu":
        for cache, new in zip(caches, (key, value)):
            cache.view(8, *key.shape[1:])[slots.long()] = new
    else:
        torch_npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="Norm")
    return tuple(caches)


NORM = [
    Case(
        "RmsNorm",
        lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0],
        (X, GAMMA),
        "RmsNorm RmsNormGrad",
        loose=2,
        reference=lambda x, g: F.rms_norm(x, (8,), g, 1e-6),
    ),
    Case(
        "AddRmsNorm",
        lambda x, y, g: torch_npu.npu_add_rms_norm(x, y, g, 1e-6)[::2],
        (X, Y, GAMMA),
        "AddRmsNorm",
        False,
        reference=lambda x, y, g: (F.rms_norm(x + y, (8,), g, 1e-6), x + y),
        loose=3,
    ),
    Case(
        "GemmaRmsNorm",
        lambda x, g: torch_npu.npu_gemma_rms_norm(x, g, 1e-6)[0],
        (X, GAMMA),
        "GemmaRmsNorm",
        False,
        reference=lambda x, g: F.rms_norm(x, (8,), 1 + g, 1e-6),
        loose=3,
    ),
    Case("rms_norm", lambda x, g: F.rms_norm(x, (8,), g), (X, GAMMA), "Rsqrt Mean", loose=3),
    Case(
        "LayerNorm",
        lambda x, g, b: F.layer_norm(x, (8,), g, b),
        (X, GAMMA, BETA),
        "LayerNorm LayerNormBackward",
        loose=2,
    ),
    Case("LayerNorm plain", lambda x: F.layer_norm(x, (3, 8)), (X,), "LayerNorm LayerNormBackward", loose=2),
    Case(
        "GroupNorm",
        lambda x, g, b: F.group_norm(x, 4, g, b),
        (randn(2, 8, 6), GAMMA, BETA),
        "GroupNorm GroupNormBackward",
        dtypes=ONE,
        loose=2,
    ),
    Case(
        "BatchNorm",
        lambda x, g, b: F.batch_norm(x, None, None, g, b, True),
        (randn(4, 8, 3, 3), GAMMA, BETA),
        "BatchNorm BatchNormBackward",
        dtypes=ONE,
        loose=2,
    ),
]

FUSED = [
    Case("ScatterPaKvCache", _paged, (randn(3, 2, 16), randn(3, 2, 16, seed=1)), "ScatterPaKvCache", False),
    Case(
        "RotaryPositionEmbedding",
        lambda x: torch_npu.npu_rotary_mul(x, COS.to(x), SIN.to(x)),
        (HEADS,),
        "RotaryPositionEmbedding RotaryPositionEmbeddingGrad",
        reference=lambda x: _rotate(x, COS, SIN),
    ),
    Case(
        "rotary interleave",
        lambda x: torch_npu.npu_rotary_mul(x, COS.to(x), SIN.to(x), "interleave"),
        (HEADS,),
        "RotaryPositionEmbedding RotaryPositionEmbeddingGrad",
        reference=lambda x: _rotate_pairs(x, COS, SIN),
    ),
    Case(
        "rotary with cos gradient",
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s),
        (HEADS, COS, SIN),
        "RotaryPositionEmbeddingGrad",
        reference=_rotate,
        loose=3,
    ),
    Case("SwiGlu", lambda x: torch_npu.npu_swiglu(x), (X,), "SwiGlu SwiGluGrad", reference=_swiglu),
    Case(
        "FastGelu",
        lambda x: torch_npu.npu_fast_gelu(x),
        (X,),
        "FastGelu FastGeluBackward",
        reference=lambda x: x * torch.sigmoid(1.702 * x),
        loose=2,
    ),
    Case(
        "scatter_update",
        lambda c, u: torch_npu.scatter_update_(c.clone(), torch.tensor([3, 4], device=c.device), u, 2),
        (torch.zeros(2, 2, 6, 8), randn(2, 2, 1, 8)),
        "InplaceScatterUpdate",
        False,
        reference=lambda c, u: torch.stack(
            [c[0].index_copy(1, torch.tensor([3]), u[0]), c[1].index_copy(1, torch.tensor([4]), u[1])]
        ),
    ),
    Case(
        "top_k_top_p",
        lambda x: torch_npu.npu_top_k_top_p(
            x,
            torch.full((6,), 0.7, dtype=x.dtype, device=x.device),
            torch.full((6,), 4, dtype=torch.int32, device=x.device),
        ),
        (LOGITS,),
        "ApplyTopKTopP",
        False,
        ONE,
        reference=lambda x: _keep_top(x, 4, 0.7),
    ),
    Case(
        "Convolution",
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        (randn(2, 3, 8, 8), randn(4, 3, 3, 3), randn(4)),
        "Convolution ConvolutionBackward",
        loose=8,
    ),
    Case(
        "grouped matmul",
        lambda x, w: torch_npu.npu_grouped_matmul(
            [x], [w], group_list=torch.tensor([2, 3, 1], device=x.device), split_item=2, group_type=0, group_list_type=1
        )[0],
        (randn(6, 8), randn(3, 8, 5)),
        "GroupedMatmulV5",
        False,
        ("float16", "bfloat16"),
        loose=4,
        reference=lambda x, w: torch.cat([a @ b for a, b in zip(x.split([2, 3, 1]), w)]),
    ),
]


def _keep_top(x: torch.Tensor, k: int, p: float) -> torch.Tensor:
    """Rows keep their k largest, then of these the smallest set with probability above p; -inf elsewhere."""
    values, order = x.sort(-1)
    values[:, :-k] = -torch.inf
    drop = values.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return torch.empty_like(x).scatter(-1, order, values.masked_fill(drop, -torch.inf))


LOSS = [
    Case(
        "KlDiv gradient",
        lambda x: F.kl_div(x, Y.to(x).softmax(-1), reduction="batchmean"),
        (X,),
        "KlDivBackward",
        loose=4,
    ),
    Case("Softmax", lambda x: F.softmax(x, -1), (X,), "Softmax SoftmaxBackward"),
    Case("LogSoftmax", lambda x: F.log_softmax(x, 1), (X,), "LogSoftmax LogSoftmaxBackward"),
    Case("softmax to float", lambda x: F.softmax(x, -1, dtype=torch.float32), (X,), "Softmax"),
    *(
        Case(
            f"cross_entropy {r}",
            lambda x, r=r: F.cross_entropy(x.float(), LABELS.to(x.device), reduction=r),
            (LOGITS,),
            "LogSoftmax NLLLoss NLLLossBackward",
            loose=2,
        )
        for r in ("mean", "sum", "none")
    ),
    Case(
        "cross_entropy ignore",
        lambda x: F.cross_entropy(x, (LABELS.clamp(-1)).to(x.device), ignore_index=-1),
        (LOGITS,),
        "NLLLoss",
        loose=2,
    ),
    Case(
        "cross_entropy smooth",
        lambda x: F.cross_entropy(x, ALL_LABELS.to(x.device), label_smoothing=0.1),
        (LOGITS,),
        "LogSoftmax",
        loose=2,
    ),
    *(
        Case(
            f"CrossEntropyLoss {r}",
            lambda x, r=r: torch_npu.npu_cross_entropy_loss(x, ALL_LABELS.to(x.device), reduction=r)[0].squeeze(),
            (LOGITS,),
            "CrossEntropyLoss CrossEntropyLossGrad",
            loose=2,
            reference=lambda x, r=r: F.cross_entropy(x, ALL_LABELS, reduction=r),
        )
        for r in ("mean", "none")
    ),
    Case("MseLoss", F.mse_loss, (X, Y), "MseLoss MseLossBackward", loose=2),
    Case("L1Loss", F.l1_loss, (X, Y), "L1Loss L1LossBackward", loose=2),
    Case("SmoothL1Loss", F.smooth_l1_loss, (X, Y), "SmoothL1Loss SmoothL1LossBackward", loose=2),
    Case(
        "KlDiv",
        lambda x: F.kl_div(x.log_softmax(-1), Y.to(x).softmax(-1), reduction="sum"),
        (X,),
        "KlDiv",
        False,
        loose=4,
    ),
    Case(
        "BCE with logits",
        lambda x: F.binary_cross_entropy_with_logits(x, (Y > 0).to(x)),
        (X,),
        "BinaryCrossEntropyWithLogits",
        loose=2,
    ),
    Case(
        "BCE",
        lambda x: F.binary_cross_entropy(x, (Y > 0).to(x)),
        (X.sigmoid(),),
        "BinaryCrossEntropy BinaryCrossEntropyBackward",
        dtypes=ONE,
        loose=4,
    ),
]


def foreach(name: str, run: Callable[..., Any], launches: str, **more: Any) -> Case:
    """`run` takes and returns lists of tensors of several shapes."""
    inputs = (X, Z[0], Y.abs() + 0.5, randn(3, 8, seed=20).abs() + 0.5)
    return Case(name, lambda a, b, c, d: run([a, b], [c, d]), inputs, launches, grad=False, **more)


def _inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
        copies = [x.clone() for x in a]
        function(copies, b)
        return copies

    return run


FOREACH = [
    foreach("ForeachAddListV2", lambda a, b: torch._foreach_add(a, b, alpha=2), "ForeachAddListV2"),
    foreach("ForeachSubListV2", lambda a, b: torch._foreach_sub(a, b, alpha=2), "ForeachSubListV2"),
    foreach("ForeachMulList", lambda a, b: torch._foreach_mul(a, b), "ForeachMulList"),
    foreach("ForeachDivList", lambda a, b: torch._foreach_div(a, b), "ForeachDivList"),
    foreach("ForeachMaximumList", lambda a, b: torch._foreach_maximum(a, b), "ForeachMaximumList"),
    foreach("ForeachMinimumList", lambda a, b: torch._foreach_minimum(a, b), "ForeachMinimumList"),
    foreach("ForeachPowList", lambda a, b: torch._foreach_pow(b, a), "ForeachPowList", loose=4),
    foreach("ForeachAddScalar", lambda a, b: torch._foreach_add(a, 2.5), "ForeachAddScalarV2"),
    foreach("ForeachSubScalar", lambda a, b: torch._foreach_sub(a, 2.5), "ForeachSubScalarV2"),
    foreach("ForeachMulScalar", lambda a, b: torch._foreach_mul(a, 2.5), "ForeachMulScalarV2"),
    foreach("ForeachDivScalar", lambda a, b: torch._foreach_div(a, 2.5), "ForeachDivScalarV2"),
    foreach("ForeachPowScalar", lambda a, b: torch._foreach_pow(b, 3), "ForeachPowScalarV2", loose=8),
    foreach("ForeachMaximumScalar", lambda a, b: torch._foreach_maximum(a, 0.5), "ForeachMaximumScalarV2"),
    foreach("ForeachMinimumScalar", lambda a, b: torch._foreach_minimum(a, 0.5), "ForeachMinimumScalarV2"),
    foreach("ForeachAddScalarList", lambda a, b: torch._foreach_add(a, [1.0, 2.0]), "ForeachAddScalarList"),
    foreach("ForeachMulScalarList", lambda a, b: torch._foreach_mul(a, [1.5, 2.0]), "ForeachMulScalarList"),
    foreach("ForeachDivScalarList", lambda a, b: torch._foreach_div(a, [1.5, 2.0]), "ForeachDivScalarList"),
    foreach("ForeachLerpScalar", lambda a, b: torch._foreach_lerp(a, b, 0.3), "ForeachLerpScalar"),
    foreach("ForeachLerpList", lambda a, b: torch._foreach_lerp(a, b, a), "ForeachLerpList", loose=4),
    foreach("ForeachAddcmulScalar", lambda a, b: torch._foreach_addcmul(a, b, b, 0.5), "ForeachAddcmulScalarV2"),
    foreach("ForeachAddcdivScalar", lambda a, b: torch._foreach_addcdiv(a, a, b, 0.5), "ForeachAddcdivScalarV2"),
    foreach("foreach addcdiv scalars", lambda a, b: torch._foreach_addcdiv(a, a, b, [0.5, 2.0]), "Addcdiv"),
    foreach("foreach addcmul scalars", lambda a, b: torch._foreach_addcmul(a, a, b, [0.5, 2.0]), "Addcmul"),
    foreach("ForeachNorm", lambda a, b: torch._foreach_norm(a, 2), "ForeachNorm"),
    foreach("ForeachCopy", _inplace(torch._foreach_copy_), "ForeachCopy"),
    foreach("ForeachZeroInplace", _inplace(lambda a, b: torch._foreach_zero_(a)), "ForeachZeroInplace"),
    foreach(
        "foreach in place",
        _inplace(lambda a, b: (torch._foreach_mul_(a, 2.0), torch._foreach_add_(a, b))),
        "ForeachMulScalarV2 ForeachAddListV2",
    ),
    foreach("ForeachPowScalarAndTensor", lambda a, b: torch._foreach_pow(2.0, a), "ForeachPowScalarAndTensor", loose=4),
    *(
        foreach(f"Foreach{n}", lambda a, b, n=n: getattr(torch, f"_foreach_{n.lower()}")(b), f"Foreach{n}", loose=2)
        for n in (
            "Abs",
            "Neg",
            "Sign",
            "Reciprocal",
            "Sqrt",
            "Exp",
            "Expm1",
            "Log",
            "Log2",
            "Log10",
            "Log1p",
            "Sin",
            "Cos",
            "Tan",
            "Tanh",
            "Sigmoid",
            "Erf",
            "Erfc",
        )
    ),
]

CASES = [*NORM, *FUSED, *LOSS, *FOREACH]
