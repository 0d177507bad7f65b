"""Operator cases (see op_cases.py): matrices, indexing, shapes, sorting, copies, convolutions and pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from op_cases import ORDERED, Case, X, Y, distinct, forward, once, randn

A, B = randn(6, 16, seed=5), randn(16, 10, seed=6)
BATCH_A, BATCH_B = randn(3, 5, 8, seed=7), randn(3, 8, 4, seed=8)
BIAS, TABLE, SQUARE = randn(10, seed=9), randn(12, 8, seed=10), randn(4, 4, seed=30)
PROPER = SQUARE @ SQUARE.T + 4 * torch.eye(4)  # positive definite
TOKENS = torch.tensor([[1, 5, 1], [0, 11, 7]])
PICK, TWO = torch.tensor([2, 0, 2]), torch.tensor([2, 0])
GATHER = torch.tensor([[[0, 7], [3, 1], [2, 2]], [[5, 4], [6, 0], [1, 1]]])
FIRST = GATHER[..., :1]
MASK = X > 0.2
STEPS, UNSORTED = torch.arange(8.0), randn(5, seed=15) + 4
LINE, PICTURE, VOLUME = distinct(2, 3, 10), distinct(2, 3, 8, 6), distinct(1, 2, 4, 6, 5)
CLASSES = torch.arange(48).reshape(2, 4, 6) % 3
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
         torch.bool)  # fmt: skip


def _newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """The batched orthogonalisation of Muon: five steps of a quintic iteration."""
    x = (g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-6)).mT
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(-4.775 * s, s, s, beta=1, alpha=2.0315) @ x
    return x.mT


def _pieces(x: torch.Tensor) -> list[torch.Tensor]:
    return [*x.split([3, 5], -1), *x.unbind(1), *x.chunk(4, -1)]


def _filled(x: torch.Tensor) -> list[torch.Tensor]:
    zeros, ones = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    return [zeros, ones, torch.full((2,), 2.5, device=x.device), torch.zeros_like(x), torch.full_like(x, 3)]


def _lstm_cell(gates: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def resize(names: str, x: torch.Tensor, mode: str, **options: bool) -> Case:
    """Names of the operator and of its gradient."""
    run = lambda x: F.interpolate(x, scale_factor=1.5, mode=mode, **options)  # noqa: E731
    return Case(" ".join([names, *options]), run, (x,), names, loose=4)


def pad(name: str, x: torch.Tensor, mode: str) -> Case:
    amounts = [1, 2] * (x.dim() - 2)
    return Case(name, lambda x: F.pad(x, amounts, mode), (x,), f"{name} {name}Backward")


MATMUL = [
    once("Svd", torch.linalg.svdvals, (randn(5, 3),)),
    once("LinalgQr", lambda a: torch.linalg.qr(a)[1].abs(), (randn(5, 3),)),
    once("LinalgCholesky", torch.linalg.cholesky, (PROPER,)),
    once("Inverse", torch.inverse, (randn(4, 4) + 4 * torch.eye(4),)),
    once("TriangularSolve",
         lambda a, b: torch.triangular_solve(b, a.tril() + 4 * torch.eye(4, device=a.device), upper=False)[0],
         (SQUARE, SQUARE)),
    Case("Mm", lambda a, b: a @ b, (A, B), "Matmul", loose=4),
    Case("linear", F.linear, (A, B.t().contiguous(), BIAS), "Addmm", loose=4),
    Case("linear 3d", F.linear, (X, TABLE), "Matmul", loose=4),
    Case("transposed", lambda a, b: a.t() @ b, (A.t().contiguous(), B), "Matmul", loose=4),
    Case("BatchMatMul", torch.bmm, (BATCH_A, BATCH_B), loose=4),
    Case("Baddbmm", lambda s, a, b: torch.baddbmm(s, a, b, beta=0.5, alpha=2), (randn(3, 5, 4), BATCH_A, BATCH_B),
         loose=8),
    Case("Addmm", lambda s, a, b: torch.addmm(s, a, b, beta=0.5, alpha=2), (BIAS, A, B), loose=8),
    forward("InplaceAddmm", lambda s, a, b: s.clone().addmm_(a, b), (randn(6, 10), A, B), loose=4),
    forward("Mv", torch.mv, (A, randn(16)), loose=4),
    forward("Addmv", torch.addmv, (randn(6), A, randn(16)), loose=4),
    forward("Addbmm", torch.addbmm, (randn(5, 4), BATCH_A, BATCH_B), loose=8),
    forward("Addr", torch.addr, (randn(6, 10), randn(6), randn(10)), loose=4),
    forward("InplaceAddr", lambda m, a, b: m.clone().addr_(a, b), (randn(3, 4), randn(3), randn(4))),
    forward("Dot", torch.dot, (randn(16, seed=1), randn(16, seed=2)), loose=4),
    Case("einsum", lambda a, b: torch.einsum("bsh,bth->bst", a, b), (X, Y), "BatchMatMul", loose=4),
    Case("matmul broadcast", lambda a, b: a @ b, (randn(2, 3, 4, 8), randn(8, 5)), "Matmul", loose=4),
    forward("newton schulz", _newton_schulz, (randn(2, 6, 4),), "Baddbmm Matmul", loose=20),
]  # fmt: skip

INDEX = [
    Case("Embedding", lambda t: F.embedding(TOKENS.to(t.device), t), (TABLE,), "Embedding EmbeddingDenseBackward"),
    forward("EmbeddingBag", lambda w, tokens, ends: F.embedding_bag(tokens, w, ends, mode="mean"),
            (randn(4, 8), torch.tensor([1, 2, 0, 3]), torch.tensor([0, 2]))),
    forward("EmbeddingRenorm", lambda w, tokens: F.embedding(tokens, w.clone(), max_norm=0.5),
            (randn(4, 8), torch.tensor([1, 2]))),
    Case("IndexSelect", lambda x, i: x.index_select(1, i), (X, PICK)),
    Case("Gather", lambda x, i: x.gather(-1, i), (X, GATHER), "Gather ScatterAdd"),
    Case("Index", lambda x, i: x[:, i], (X, PICK), "Index IndexPutImpl"),
    forward("Index mask", lambda x, mask: x[mask], (X, MASK), "Index"),
    forward("Take", torch.take, (X, PICK)),
    forward("MaskedSelect", torch.masked_select, (X, MASK)),
    forward("Nonzero", lambda x: (x > 0).nonzero(), (X,)),
    Case("index_put", lambda x, v, i: x.index_put((i,), v), (randn(4, 8), randn(2, 8), TWO), "IndexPutImpl"),
    forward("index_put accumulate", lambda x, v, i: x.index_put((i,), v, accumulate=True),
            (randn(4, 8), randn(3, 8), PICK), "IndexPutImpl"),
    once("index_put of nothing", lambda x, v, i: x.clone().index_put_((i,), v), (SQUARE, SQUARE[0, 0], PICK[:0]),
         "IndexPutImpl"),
    once("InplacePut", lambda x, v, i: x.clone().put_(i, v), (SQUARE, X[0, 0, :2], TWO)),
    Case("IndexAdd", lambda x, v, i: x.index_add(0, i, v, alpha=2), (randn(4, 8), randn(3, 8), PICK)),
    forward("IndexCopy", lambda x, v, i: x.index_copy(0, i, v), (SQUARE, SQUARE[:2], TWO)),
    forward("InplaceIndexCopy", lambda x, v, i: x.clone().index_copy_(0, i, v), (randn(4, 8), randn(2, 8), TWO)),
    once("IndexFill", lambda x, i: x.index_fill(0, i, 2.0), (SQUARE, PICK)),
    once("InplaceIndexFill", lambda x, i: x.clone().index_fill_(0, i, 3.0), (randn(4, 8), PICK)),
    forward("Scatter", lambda x, v, i: x.scatter(-1, i, v), (X, Y[..., :1], FIRST)),
    forward("ScatterValue", lambda x, i: x.scatter(-1, i, 2.0), (X, FIRST)),
    forward("InplaceScatter", lambda x, v, i: x.clone().scatter_(-1, i, v), (X, Y[..., :1], FIRST)),
    forward("InplaceScatterValue", lambda x, i: x.clone().scatter_(-1, i, 2.0), (X, FIRST)),
    forward("ScatterAdd", lambda x, v, i: x.scatter_add(-1, i, v), (X, Y[..., :2], GATHER)),
    once("ScatterReduce", lambda x, v, i: [x.scatter_reduce(0, i, v, how) for how in ("sum", "prod")],
         (SQUARE, SQUARE[:2] + 1, TWO.expand(4, 2).T)),
    Case("masked_fill", lambda x, mask: x.masked_fill(mask, -1.5), (X, MASK), "InplaceMaskedFillScalar"),
    forward("masked_fill tensor", lambda x, v, mask: x.masked_fill(mask, v), (X, torch.tensor(2.0), MASK),
            "InplaceMaskedFillTensor"),
    once("InplaceMaskedScatter", lambda x, v, mask: x.clone().masked_scatter_(mask, v), (X, Y, MASK)),
    once("OneHot", lambda tokens: F.one_hot(tokens, 12), (TOKENS,)),
    once("IsInTensorScalar", lambda x: torch.isin(x, 5), (TOKENS,)),
]  # fmt: skip

SHAPE = [
    Case("Cat", lambda a, b: torch.cat([a, b, a], 1), (X, Y)),
    Case("Stack", lambda a, b: torch.stack([a, b], 1), (X, Y)),
    Case("split and unbind", lambda x: torch.stack([piece.sum() for piece in _pieces(x)]), (X,), "Stack", loose=4),
    Case("Repeat", lambda x: x.repeat(2, 1, 3), (X,)),
    Case("RepeatInterleaveIntWithDim", lambda x: x.repeat_interleave(2, 1), (X,)),
    forward("RepeatInterleaveInt", lambda x: x.repeat_interleave(2), (X,)),
    forward("RepeatInterleaveWithDim", lambda x, n: x.repeat_interleave(n, 1), (X, torch.tensor([1, 0, 2]))),
    Case("ConstantPadNd", lambda x: F.pad(x, (1, 2), value=0.5), (X,)),
    Case("Flip", lambda x: x.flip(-1), (X,)),
    Case("Roll", lambda x: x.roll(1, 0), (X,)),
    Case("Triu", lambda x: x.triu(1), (X,)),
    Case("Tril", lambda x: x.tril(-1), (X,)),
    forward("InplaceTril", lambda x: (x.clone().tril_(), x.clone().triu_()), (X,), "InplaceTril InplaceTriu"),
    Case("expand", lambda x: x[:, :1].expand(2, 3, 8) * 1, (X,), "Muls"),
    Case("contiguous", lambda x: x.transpose(0, 2).contiguous().view(8, -1) * 2, (X,), "InplaceCopy"),
    forward("strided copy", lambda x: x.clone()[:, ::2].copy_(x[:, ::2] * 2), (X,), "InplaceCopy"),
    Case("unfold", lambda x: x.unfold(-1, 4, 2) * 1, (X,), "UnfoldGrad"),
    once("InplaceFillDiagonal", lambda x: x.clone().fill_diagonal_(2.0), (randn(4, 4),)),
    forward("ChannelShuffle", lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 2), (PICTURE,)),
]  # fmt: skip

SORT = [
    forward("Sort", lambda x: tuple(x.sort(-1)), (ORDERED,)),
    forward("Sort descending", lambda x: tuple(x.sort(0, descending=True)), (ORDERED,), "Sort"),
    forward("Sort stable", lambda x: tuple(torch.sort(x, stable=True)), (ORDERED,), "Sort"),
    forward("argsort", lambda x: x.argsort(-1), (ORDERED,), "Sort"),
    forward("Topk", lambda x: tuple(x.topk(3, -1)), (ORDERED,)),
    forward("Topk smallest", lambda x: tuple(x.topk(2, 0, largest=False)), (ORDERED,), "Topk"),
    once("Kthvalue", lambda x: tuple(x.kthvalue(3, -1)), (ORDERED,)),
    forward("Median", lambda x: (x.median(), *x.median(-1)), (distinct(4, 7),), "Median MedianDim"),
    once("SearchSorted", torch.searchsorted, (STEPS, UNSORTED)),
    once("SearchSorteds", lambda x: torch.searchsorted(x, 3.5), (STEPS,)),
    once("bucketize", lambda x, v: torch.bucketize(v, x), (STEPS, UNSORTED), "SearchSorted"),
    once("UniqueConsecutive", torch.unique_consecutive, (TOKENS.flatten(),)),
    once("Unique2", lambda x: x.unique(return_inverse=True, return_counts=True), (TOKENS,)),
    once("UniqueDim", lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
         (torch.tensor([[1, 2], [3, 4], [1, 2]]),)),
]  # fmt: skip

COPY = [
    *(once(f"cast {source} to all".replace("torch.", ""),
           lambda x, source=source: [x.to(source).to(t).float() for t in TYPES], ((X * 3).abs(),), "InplaceCopy")
      for source in TYPES),
    Case("autograd casts", lambda x: x.float() * 2 + x.to(torch.float16).float(), (X,), "InplaceCopy",
         dtypes=("float32", "bfloat16"), loose=200),
    once("Arange", lambda x: (torch.arange(10, device=x.device), torch.arange(1, 3, 0.5, device=x.device)), (X,)),
    once("Linspace", lambda x: torch.linspace(0, 1, 7, device=x.device), (X,)),
    once("Eye", lambda x: torch.eye(3, 5, device=x.device), (X,)),
    forward("fills", _filled, (X,), "InplaceZero InplaceOne InplaceFillScalar"),
    forward("InplaceFillTensor", lambda x: x.clone().fill_(x[0, 0, 0]), (X,)),
]  # fmt: skip

PICTURES = [
    Case("Convolution", lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
         (randn(2, 3, 8, 8), randn(4, 3, 3, 3), randn(4)), "Convolution ConvolutionBackward", loose=8),
    once("padding at each end", lambda x, w: torch._nnpack_spatial_convolution(x, w, None, [1, 2]),
         (randn(1, 2, 5, 6, seed=36), randn(3, 2, 3, 3, seed=37)), "Convolution",
         reference=lambda x, w: F.conv2d(x, w, padding=(1, 2))),
    Case("AvgPool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), (PICTURE,), "AvgPool2d AvgPool2dBackward"),
    Case("AvgPool3d", lambda x: F.avg_pool3d(x, 2), (VOLUME,), "AvgPool3d AvgPool3dBackward"),
    Case("AdaptiveAvgPool2d", lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (PICTURE,),
         "AdaptiveAvgPool2d AdaptiveAvgPool2dBackward"),
    Case("AdaptiveAvgPool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), (VOLUME,),
         "AdaptiveAvgPool3d AdaptiveAvgPool3dBackward"),
    Case("AdaptiveMaxPool2d", lambda x: F.adaptive_max_pool2d(x, (4, 3)), (PICTURE,),
         "AdaptiveMaxPool2d AdaptiveMaxPool2dBackward"),
    Case("MaxPool2d", lambda x: F.max_pool2d(x, 3, 2, 1), (PICTURE,), "MaxPool2dWithMask MaxPool2dWithMaskBackward"),
    Case("MaxPool3d", lambda x: F.max_pool3d(x, 2), (VOLUME,), "MaxPool3dWithArgmax MaxPool3dWithArgmaxBackward"),
    forward("MaxUnpool2d", lambda x, places: F.max_unpool2d(x, places.expand(2, 3, 8, 6), 2),
            (PICTURE, 2 * torch.arange(48).reshape(8, 6))),
    resize("UpsampleNearest1dV2 UpsampleNearest1dBackward", LINE, "nearest"),
    resize("UpsampleNearestExact1d UpsampleNearestExact1dBackward", LINE, "nearest-exact"),
    resize("UpsampleLinear1d UpsampleLinear1dBackward", LINE, "linear"),
    resize("UpsampleNearest2dV2 UpsampleNearest2dBackward", PICTURE, "nearest"),
    resize("UpsampleNearestExact2d UpsampleNearestExact2dBackward", PICTURE, "nearest-exact"),
    resize("UpsampleBilinear2d UpsampleBilinear2dBackwardV2", PICTURE, "bilinear"),
    resize("UpsampleBilinear2d UpsampleBilinear2dBackwardV2", PICTURE, "bilinear", align_corners=True),
    resize("UpsampleBicubic2d UpsampleBicubic2dBackward", PICTURE, "bicubic"),
    resize("UpsampleBilinear2dAA UpsampleBilinear2dAABackward", PICTURE, "bilinear", antialias=True),
    resize("UpsampleBicubic2dAA UpsampleBicubic2dAAGrad", PICTURE, "bicubic", antialias=True),
    resize("UpsampleNearest3d UpsampleNearest3dBackward", VOLUME, "nearest"),
    resize("UpsampleNearestExact3d UpsampleNearestExact3dBackward", VOLUME, "nearest-exact"),
    resize("UpsampleTrilinear3d UpsampleTrilinear3dBackward", VOLUME, "trilinear"),
    *(pad(f"ReflectionPad{x.dim() - 2}d", x, "reflect") for x in (LINE, PICTURE, VOLUME)),
    *(pad(f"ReplicationPad{x.dim() - 2}d", x, "replicate") for x in (LINE, PICTURE, VOLUME)),
    Case("GridSampler2D", lambda x, g: F.grid_sample(x, g, align_corners=False),
         (PICTURE, randn(2, 4, 5, 2, seed=9).tanh() * 0.8), "GridSampler2D GridSampler2DBackward", dtypes=("float32",),
         loose=40),
    Case("GridSampler3D", lambda x, g: F.grid_sample(x, g, align_corners=True),
         (VOLUME, randn(1, 3, 4, 2, 3, seed=9).tanh() * 0.8), "GridSampler3D GridSampler3DBackward",
         dtypes=("float32",), loose=40),
    forward("AffineGrid", lambda t: F.affine_grid(t, [2, 3, 4, 5], False), (randn(2, 2, 3),)),
    Case("Im2col", lambda x: F.unfold(x, (2, 3), 1, 1, 2), (PICTURE,), "Im2col Im2colBackward"),
    Case("Prelu", F.prelu, (PICTURE, randn(3, seed=5)), "Prelu PreluBackward", loose=4),
    Case("Prelu of one slope", F.prelu, (PICTURE, randn(1, seed=5)), "Prelu PreluBackward", loose=40),
    Case("NLLLoss2d", lambda x, classes: F.nll_loss(x.log_softmax(1), classes), (PICTURE[:, :, :4], CLASSES),
         "NLLLoss2d NLLLoss2dBackward"),
    once("Cdist", lambda x, y: torch.cdist(x, y, 1.5), (X, Y)),
    once("Pdist", lambda x: F.pdist(x, 3), (X[0],)),
    once("ThnnFusedLstmCell", lambda x, h, c: torch.ops.aten._thnn_fused_lstm_cell(x, h, c)[:2],
         (randn(2, 16), randn(2, 16, seed=1), randn(2, 4)), reference=lambda x, h, c: _lstm_cell(x + h, c)),
]  # fmt: skip

CASES = [*MATMUL, *INDEX, *SHAPE, *SORT, *COPY, *PICTURES]
