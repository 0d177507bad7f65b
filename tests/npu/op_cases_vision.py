"""One line per operator case: pooling, resizing, padding, sampling, recurrent cells, and the long tail of
elementwise operators that the public suites use. Run by test_ops_all.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from op_cases import ONE, POSITIVE, UNIT, Case, X, Y, distinct, inplace, randn, unary

LINE, PICTURE, VOLUME = distinct(2, 3, 10), distinct(2, 3, 8, 6), distinct(1, 2, 4, 6, 5)
SIGNS = torch.sign(Y)
GRID = randn(2, 4, 5, 2, seed=9).tanh() * 0.8
GRID_3D = randn(1, 3, 4, 2, 3, seed=9).tanh() * 0.8
LOSSY: dict[str, Any] = {"loose": 4.0}


def resize(name: str, x: torch.Tensor, factor: float = 1.5, **options: Any) -> Case:
    mode = options.pop("mode")
    return Case(
        name,
        lambda x: F.interpolate(x, scale_factor=factor, mode=mode, **options),
        (x,),
        f"{name.split()[0]} {name.split()[1]}",
        **LOSSY,
    )


def pad(name: str, x: torch.Tensor, mode: str) -> Case:
    amounts = [1, 2] * (x.dim() - 2)
    return Case(name, lambda x: F.pad(x, amounts, mode), (x,), f"{name} {name}Backward")


def _lstm_cell(gates: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


ELEMENTWISE = [
    unary("Acosh", torch.acosh, POSITIVE + 1),
    unary("Asinh", torch.asinh),
    unary("Atanh", torch.atanh, UNIT, **LOSSY),
    unary("Sinc", torch.sinc, POSITIVE),
    unary("Celu", lambda x: F.celu(x, 0.7)),
    inplace("InplaceAcosh", "acosh_", x=POSITIVE + 1),
    inplace("InplaceAsinh", "asinh_"),
    inplace("InplaceAtanh", "atanh_", x=UNIT),
    inplace("InplaceSinc", "sinc_"),
    Case("InplaceCelu", lambda x: F.celu(x.clone(), 0.7, inplace=True), (X,), "InplaceCelu", grad=False),
    Case("Hardshrink", lambda x: F.hardshrink(x, 0.3), (X,), "Hardshrink HardshrinkBackward"),
    Case("Softshrink", lambda x: F.softshrink(x, 0.3), (X,), "Softshrink SoftshrinkBackward"),
    Case("Prelu", F.prelu, (PICTURE, randn(3, seed=5)), "Prelu PreluBackward", loose=4.0),
    Case("Prelu of one slope", F.prelu, (PICTURE, randn(1, seed=5)), "Prelu PreluBackward", loose=40.0),
    Case("RReluWithNoise", lambda x: F.rrelu(x, 0.1, 0.3), (X,), "RReluWithNoise", grad=False),
    Case("AngleV2", torch.angle, (X,), "AngleV2", False, ONE),
    Case("Polar", lambda a, b: torch.view_as_real(torch.polar(a, b)), (POSITIVE, X), "Polar", False, ONE),
    Case("Gcd", torch.gcd, (torch.tensor([12, 18, 7]), torch.tensor([8, 27, 21])), "Gcd", False, ONE),
    Case("LeftShifts", lambda x: x << 2, (torch.tensor([1, 2, 3]),), "LeftShifts", False, ONE),
    inplace("InplaceAtan2", "atan2_", Y),
    inplace("InplaceXLogYScalarOther", "xlogy_", 1.5),
    Case("LinalgCross", lambda x, y: torch.linalg.cross(x, y, dim=1), (X, Y), "LinalgCross", False),
    Case("InplaceAddr", lambda m, a, b: m.clone().addr_(a, b), (randn(3, 4), randn(3), randn(4)), "InplaceAddr", False),
    Case("ForeachAcos", lambda x: torch._foreach_acos([x, x]), (UNIT,), "ForeachAcos", False),
    Case("ForeachAsin", lambda x: torch._foreach_asin([x]), (UNIT,), "ForeachAsin", False),
    Case("ForeachAtan", lambda x: torch._foreach_atan([x]), (X,), "ForeachAtan", False),
    Case("ForeachCosh", lambda x: torch._foreach_cosh([x]), (X,), "ForeachCosh", False),
    Case("ForeachSinh", lambda x: torch._foreach_sinh([x]), (X,), "ForeachSinh", False),
    Case("ForeachRoundOffNumberV2", lambda x: torch._foreach_ceil([x]), (X,), "ForeachRoundOffNumberV2", False),
    Case("ForeachRoundOffNumberV2 frac", lambda x: torch._foreach_frac([x]), (X,), "ForeachRoundOffNumberV2", False),
]

POOLING = [
    Case("AvgPool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), (PICTURE,), "AvgPool2d AvgPool2dBackward"),
    Case("AvgPool3d", lambda x: F.avg_pool3d(x, 2), (VOLUME,), "AvgPool3d AvgPool3dBackward"),
    Case(
        "AdaptiveAvgPool2d",
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        (PICTURE,),
        "AdaptiveAvgPool2d AdaptiveAvgPool2dBackward",
    ),
    Case(
        "AdaptiveAvgPool3d",
        lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)),
        (VOLUME,),
        "AdaptiveAvgPool3d AdaptiveAvgPool3dBackward",
    ),
    Case(
        "MaxPool2dWithMask",
        lambda x: F.max_pool2d(x, 3, 2, 1),
        (PICTURE,),
        "MaxPool2dWithMask MaxPool2dWithMaskBackward",
    ),
    Case(
        "MaxPool3dWithArgmax",
        lambda x: F.max_pool3d(x, 2),
        (VOLUME,),
        "MaxPool3dWithArgmax MaxPool3dWithArgmaxBackward",
    ),
    Case(
        "AdaptiveMaxPool2d",
        lambda x: F.adaptive_max_pool2d(x, (4, 3)),
        (PICTURE,),
        "AdaptiveMaxPool2d AdaptiveMaxPool2dBackward",
    ),
    Case(
        "MaxUnpool2d",
        lambda x: F.max_unpool2d(x, torch.arange(48, device=x.device).reshape(8, 6).expand(2, 3, 8, 6) * 2, 2),
        (PICTURE,),
        "MaxUnpool2d",
        False,
    ),
]

RESIZING = [
    resize("UpsampleNearest1dV2 UpsampleNearest1dBackward", LINE, mode="nearest"),
    resize("UpsampleNearestExact1d UpsampleNearestExact1dBackward", LINE, mode="nearest-exact"),
    resize("UpsampleLinear1d UpsampleLinear1dBackward", LINE, mode="linear"),
    resize("UpsampleNearest2dV2 UpsampleNearest2dBackward", PICTURE, mode="nearest"),
    resize("UpsampleNearestExact2d UpsampleNearestExact2dBackward", PICTURE, mode="nearest-exact"),
    resize("UpsampleBilinear2d UpsampleBilinear2dBackwardV2", PICTURE, mode="bilinear"),
    resize("UpsampleBilinear2d UpsampleBilinear2dBackwardV2 corners", PICTURE, mode="bilinear", align_corners=True),
    resize("UpsampleBicubic2d UpsampleBicubic2dBackward", PICTURE, mode="bicubic"),
    resize("UpsampleBilinear2dAA UpsampleBilinear2dAABackward", PICTURE, mode="bilinear", antialias=True),
    resize("UpsampleBicubic2dAA UpsampleBicubic2dAAGrad", PICTURE, mode="bicubic", antialias=True),
    resize("UpsampleNearest3d UpsampleNearest3dBackward", VOLUME, mode="nearest"),
    resize("UpsampleNearestExact3d UpsampleNearestExact3dBackward", VOLUME, mode="nearest-exact"),
    resize("UpsampleTrilinear3d UpsampleTrilinear3dBackward", VOLUME, mode="trilinear"),
    pad("ReflectionPad2d", PICTURE, "reflect"),
    pad("ReflectionPad3d", VOLUME, "reflect"),
    pad("ReplicationPad1d", LINE, "replicate"),
    pad("ReplicationPad2d", PICTURE, "replicate"),
    pad("ReplicationPad3d", VOLUME, "replicate"),
]

SAMPLING = [
    Case(
        "GridSampler2D",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (PICTURE, GRID),
        "GridSampler2D GridSampler2DBackward",
        dtypes=ONE,
        loose=40.0,
    ),
    Case(
        "GridSampler3D",
        lambda x, g: F.grid_sample(x, g, align_corners=True),
        (VOLUME, GRID_3D),
        "GridSampler3D GridSampler3DBackward",
        dtypes=ONE,
        loose=40.0,
    ),
    Case("AffineGrid", lambda t: F.affine_grid(t, [2, 3, 4, 5], False), (randn(2, 2, 3),), "AffineGrid", False),
    Case("Im2col", lambda x: F.unfold(x, (2, 3), 1, 1, 2), (PICTURE,), "Im2col Im2colBackward"),
    Case("ChannelShuffle", lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 2), (PICTURE,), "ChannelShuffle", False),
    Case("SoftMarginLoss", F.soft_margin_loss, (X, SIGNS), "SoftMarginLoss", False),
    Case(
        "NLLLoss2d",
        lambda x: F.nll_loss(x.log_softmax(1), torch.arange(48, device=x.device).reshape(2, 4, 6) % 3),
        (PICTURE[:, :, :4],),
        "NLLLoss2d NLLLoss2dBackward",
    ),
    Case(
        "CtcLoss",
        lambda x: F.ctc_loss(x.log_softmax(2), torch.tensor([[1, 2], [3, 1]]).to(x.device), (6, 6), (2, 2)),
        (randn(6, 2, 5),),
        "CtcLoss CtcLossBackward",
        dtypes=ONE,
    ),
]

TAIL = [
    Case("Cdist", lambda x, y: torch.cdist(x, y, 1.5), (X, Y), "Cdist", False, ONE),
    Case("Pdist", lambda x: F.pdist(x, 3), (X[0],), "Pdist", False, ONE),
    Case("Renorm", lambda x: torch.renorm(x, 2, 1, 0.5), (X,), "Renorm", False),
    inplace("InplaceRenorm", "renorm_", 2, 1, 0.5),
    Case("NanMedian", lambda x: x.nanmedian(), (distinct(3, 5),), "NanMedian", False),
    Case("NanMedianDim", lambda x: tuple(x.nanmedian(1)), (distinct(3, 5),), "NanMedianDim", False),
    Case("ReduceNansum", lambda x: torch.nansum(torch.where(x > 1, x / 0 * 0, x), 1), (X,), "ReduceNansum", False),
    Case("Aminmax", lambda x: tuple(torch.aminmax(x, dim=1)), (X,), "Aminmax", False),
    Case(
        "UniqueDim",
        lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
        (torch.tensor([[1, 2], [3, 4], [1, 2]]),),
        "UniqueDim",
        False,
        ONE,
    ),
    Case(
        "EmbeddingBag",
        lambda w: F.embedding_bag(
            torch.tensor([1, 2, 0, 3]).to(w.device), w, torch.tensor([0, 2]).to(w.device), mode="mean"
        ),
        (randn(4, 8),),
        "EmbeddingBag",
        False,
    ),
    Case(
        "EmbeddingRenorm",
        lambda w: F.embedding(torch.tensor([1, 2]).to(w.device), w.clone(), max_norm=0.5),
        (randn(4, 8),),
        "EmbeddingRenorm",
        False,
    ),
    Case(
        "ThnnFusedLstmCell",
        lambda x, h, c: torch.ops.aten._thnn_fused_lstm_cell(x, h, c)[:2],
        (randn(2, 16), randn(2, 16, seed=1), randn(2, 4)),
        "ThnnFusedLstmCell",
        False,
        ONE,
        reference=lambda x, h, c: _lstm_cell(x + h, c),
    ),
]

CASES = [*ELEMENTWISE, *POOLING, *RESIZING, *SAMPLING, *TAIL]
