"""Operator cases (see op_cases.py): matrices, indexing, shapes, sorting, copies and fills."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from op_cases import ONE, Case, X, Y, distinct, randn

A, B = randn(6, 16, seed=5), randn(16, 10, seed=6)
BATCH_A, BATCH_B = randn(3, 5, 8, seed=7), randn(3, 8, 4, seed=8)
BIAS = randn(10, seed=9)
TABLE = randn(12, 8, seed=10)
TOKENS = torch.tensor([[1, 5, 1], [0, 11, 7]])
PICK = torch.tensor([2, 0, 2])
GATHER = torch.tensor([[[0, 7], [3, 1], [2, 2]], [[5, 4], [6, 0], [1, 1]]])
MASK = X > 0.2
UNSORTED = randn(5, seed=15) + 4

MATMUL = [
    Case("Svd", lambda a: torch.linalg.svdvals(a), (randn(5, 3),), "Svd", False, ONE),
    Case("LinalgQr", lambda a: torch.linalg.qr(a)[1].abs(), (randn(5, 3),), "LinalgQr", False, ONE),
    Case("Mm", lambda a, b: a @ b, (A, B), "Matmul", loose=4),
    Case("linear", F.linear, (A, B.t().contiguous(), BIAS), "Addmm", loose=4),
    Case("linear 3d", lambda x, w: F.linear(x, w), (X, TABLE), "Matmul", loose=4),
    Case("transposed", lambda a, b: a.t() @ b, (A.t().contiguous(), B), "Matmul", loose=4),
    Case("BatchMatMul", torch.bmm, (BATCH_A, BATCH_B), "BatchMatMul", loose=4),
    Case(
        "Baddbmm",
        lambda s, a, b: torch.baddbmm(s, a, b, beta=0.5, alpha=2),
        (randn(3, 5, 4), BATCH_A, BATCH_B),
        "Baddbmm",
        loose=8,
    ),
    Case("Addmm", lambda s, a, b: torch.addmm(s, a, b, beta=0.5, alpha=2), (BIAS, A, B), "Addmm", loose=8),
    Case("InplaceAddmm", lambda s, a, b: s.clone().addmm_(a, b), (randn(6, 10), A, B), "InplaceAddmm", False, loose=4),
    Case("Mv", torch.mv, (A, randn(16)), "Mv", grad=False, loose=4),
    Case("Addmv", torch.addmv, (randn(6), A, randn(16)), "Addmv", grad=False, loose=4),
    Case("Addbmm", torch.addbmm, (randn(5, 4), BATCH_A, BATCH_B), "Addbmm", grad=False, loose=8),
    Case("Addr", torch.addr, (randn(6, 10), randn(6), randn(10)), "Addr", grad=False, loose=4),
    Case("Dot", torch.dot, (randn(16, seed=1), randn(16, seed=2)), "Dot", grad=False, loose=4),
    Case("einsum", lambda a, b: torch.einsum("bsh,bth->bst", a, b), (X, Y), "BatchMatMul", loose=4),
    Case("matmul broadcast", lambda a, b: a @ b, (randn(2, 3, 4, 8), randn(8, 5)), "Matmul", loose=4),
    Case("newton schulz", lambda g: _newton_schulz(g), (randn(2, 6, 4),), "Baddbmm Matmul", grad=False, loose=20),
    Case("Inverse", torch.inverse, (randn(4, 4) + 4 * torch.eye(4),), "Inverse", False, ONE),
]


def _newton_schulz(g: torch.Tensor) -> torch.Tensor:
    """The batched orthogonalisation of Muon: five steps of a quintic iteration."""
    x = (g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-6)).mT
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(-4.775 * s, s, s, beta=1, alpha=2.0315) @ x
    return x.mT


INDEX = [
    Case("Embedding", lambda t: F.embedding(TOKENS.to(t.device), t), (TABLE,), "Embedding EmbeddingDenseBackward"),
    Case("IndexSelect", lambda x: x.index_select(1, PICK.to(x.device)), (X,), "IndexSelect"),
    Case("Gather", lambda x: x.gather(-1, GATHER.to(x.device)), (X,), "Gather ScatterAdd"),
    Case("Index", lambda x: x[:, PICK.to(x.device)], (X,), "Index IndexPutImpl"),
    Case("Index mask", lambda x: x[MASK.to(x.device)], (X,), "Index", grad=False),
    Case("Take", lambda x: torch.take(x, PICK.to(x.device)), (X,), "Take", grad=False),
    Case("MaskedSelect", lambda x: x.masked_select(MASK.to(x.device)), (X,), "MaskedSelect", grad=False),
    Case("Nonzero", lambda x: (x > 0).nonzero(), (X,), "Nonzero", grad=False),
    Case(
        "index_put", lambda x, v: x.index_put((PICK[:2].to(x.device),), v), (randn(4, 8), randn(2, 8)), "IndexPutImpl"
    ),
    Case(
        "index_put accumulate",
        lambda x, v: x.index_put((PICK.to(x.device),), v, accumulate=True),
        (randn(4, 8), randn(3, 8)),
        "IndexPutImpl",
        grad=False,
    ),
    Case(
        "IndexAdd", lambda x, v: x.index_add(0, PICK.to(x.device), v, alpha=2), (randn(4, 8), randn(3, 8)), "IndexAdd"
    ),
    Case(
        "IndexCopy",
        lambda x, v: x.clone().index_copy_(0, PICK[:2].to(x.device), v),
        (randn(4, 8), randn(2, 8)),
        "InplaceIndexCopy",
        grad=False,
    ),
    Case(
        "IndexFill",
        lambda x: x.clone().index_fill_(0, PICK.to(x.device), 3.0),
        (randn(4, 8),),
        "InplaceIndexFill",
        grad=False,
        dtypes=ONE,
    ),
    Case(
        "Scatter", lambda x, v: x.scatter(-1, GATHER[..., :1].to(x.device), v), (X, Y[..., :1]), "Scatter", grad=False
    ),
    Case("ScatterValue", lambda x: x.scatter(-1, GATHER[..., :1].to(x.device), 2.0), (X,), "ScatterValue", grad=False),
    Case(
        "InplaceScatter",
        lambda x, v: x.clone().scatter_(-1, GATHER[..., :1].to(x.device), v),
        (X, Y[..., :1]),
        "InplaceScatter",
        grad=False,
    ),
    Case(
        "InplaceScatterValue",
        lambda x: x.clone().scatter_(-1, GATHER[..., :1].to(x.device), 2.0),
        (X,),
        "InplaceScatterValue",
        grad=False,
    ),
    Case(
        "ScatterAdd", lambda x, v: x.scatter_add(-1, GATHER.to(x.device), v), (X, Y[..., :2]), "ScatterAdd", grad=False
    ),
    Case("masked_fill", lambda x: x.masked_fill(MASK.to(x.device), -1.5), (X,), "InplaceMaskedFillScalar"),
    Case(
        "masked_fill tensor",
        lambda x, v: x.masked_fill(MASK.to(x.device), v),
        (X, torch.tensor(2.0)),
        "InplaceMaskedFillTensor",
        grad=False,
    ),
    Case(
        "masked_scatter",
        lambda x, v: x.clone().masked_scatter_(MASK.to(x.device), v),
        (X, Y),
        "InplaceMaskedScatter",
        False,
        ONE,
    ),
    Case("OneHot", lambda x: F.one_hot(TOKENS.to(x.device), 12), (X,), "OneHot", False, ONE),
]


def _pieces(x: torch.Tensor) -> list[torch.Tensor]:
    return [*x.split([3, 5], -1), *x.unbind(1), *x.chunk(4, -1)]


SHAPE = [
    Case("Cat", lambda a, b: torch.cat([a, b, a], 1), (X, Y), "Cat"),
    Case("Stack", lambda a, b: torch.stack([a, b], 1), (X, Y), "Stack"),
    Case("split and unbind", lambda x: torch.stack([piece.sum() for piece in _pieces(x)]), (X,), "Stack", loose=4),
    Case("Repeat", lambda x: x.repeat(2, 1, 3), (X,), "Repeat"),
    Case("RepeatInterleave", lambda x: x.repeat_interleave(2, 1), (X,), "RepeatInterleaveIntWithDim"),
    Case(
        "RepeatInterleave tensor",
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 2], device=x.device), 1),
        (X,),
        "RepeatInterleaveWithDim",
        grad=False,
    ),
    Case("ConstantPadNd", lambda x: F.pad(x, (1, 2), value=0.5), (X,), "ConstantPadNd"),
    Case(
        "ReflectionPad1d", lambda x: F.pad(x, (1, 2), mode="reflect"), (X,), "ReflectionPad1d ReflectionPad1dBackward"
    ),
    Case("Flip", lambda x: x.flip(-1), (X,), "Flip"),
    Case("Roll", lambda x: x.roll(1, 0), (X,), "Roll"),
    Case("Triu", lambda x: x.triu(1), (X,), "Triu"),
    Case("Tril", lambda x: x.tril(-1), (X,), "Tril"),
    Case("InplaceTril", lambda x: (x.clone().tril_(), x.clone().triu_()), (X,), "InplaceTril InplaceTriu", grad=False),
    Case("expand", lambda x: x[:, :1].expand(2, 3, 8) * 1, (X,), "Muls"),
    Case("contiguous", lambda x: x.transpose(0, 2).contiguous().view(8, -1) * 2, (X,), "InplaceCopy"),
    Case("strided copy", lambda x: x.clone()[:, ::2].copy_(x[:, ::2] * 2), (X,), "InplaceCopy", grad=False),
    Case("unfold", lambda x: x.unfold(-1, 4, 2) * 1, (X,), "UnfoldGrad"),
    Case("diag", lambda x: x.clone().fill_diagonal_(2.0), (randn(4, 4),), "InplaceFillDiagonal", False, ONE),
]

SORT = [
    Case("UniqueConsecutive", torch.unique_consecutive, (TOKENS.flatten(),), "UniqueConsecutive", False, ONE),
    Case("Sort", lambda x: tuple(x.sort(-1)), (distinct(4, 8),), "Sort", grad=False),
    Case("Sort descending", lambda x: tuple(x.sort(0, descending=True)), (distinct(4, 8),), "Sort", grad=False),
    Case("argsort", lambda x: x.argsort(-1), (distinct(4, 8),), "Sort", grad=False),
    Case("Topk", lambda x: tuple(x.topk(3, -1)), (distinct(4, 8),), "Topk", grad=False),
    Case("Topk smallest", lambda x: tuple(x.topk(2, 0, largest=False)), (distinct(4, 8),), "Topk", grad=False),
    Case("Kthvalue", lambda x: tuple(x.kthvalue(3, -1)), (distinct(4, 8),), "Kthvalue", grad=False, dtypes=ONE),
    Case("Median", lambda x: (x.median(), *x.median(-1)), (distinct(4, 7),), "Median MedianDim", grad=False),
    Case("SearchSorted", torch.searchsorted, (torch.arange(8.0), UNSORTED), "SearchSorted", False, ONE),
    Case("bucketize", lambda x, v: torch.bucketize(v, x), (torch.arange(8.0), UNSORTED), "SearchSorted", False, ONE),
    Case("Unique2", lambda x: x.unique(return_inverse=True, return_counts=True), (TOKENS,), "Unique2", False, ONE),
]

_TYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)

COPY = [
    *(
        Case(
            f"cast {source} to all".replace("torch.", ""),
            lambda x, s=source: [x.to(s).to(t).float() for t in _TYPES],
            ((X * 3).abs(),),
            "InplaceCopy",
            False,
            ONE,
        )
        for source in _TYPES
    ),
    Case(
        "autograd casts",
        lambda x: x.float() * 2 + x.to(torch.float16).float(),
        (X,),
        "InplaceCopy",
        dtypes=("float32", "bfloat16"),
        loose=200,
    ),
    Case(
        "Arange",
        lambda x: (torch.arange(10, device=x.device), torch.arange(1, 3, 0.5, device=x.device)),
        (X,),
        "Arange",
        False,
        ONE,
    ),
    Case("Linspace", lambda x: torch.linspace(0, 1, 7, device=x.device), (X,), "Linspace", False, ONE),
    Case("Eye", lambda x: torch.eye(3, 5, device=x.device), (X,), "Eye", False, ONE),
    Case(
        "fills",
        lambda x: (
            torch.zeros(3, device=x.device),
            torch.ones(3, device=x.device),
            torch.full((2,), 2.5, device=x.device),
            torch.zeros_like(x),
            torch.full_like(x, 3),
        ),
        (X,),
        "InplaceZero InplaceOne InplaceFillScalar",
        grad=False,
    ),
    Case("fill_ tensor", lambda x: x.clone().fill_(x[0, 0, 0]), (X,), "InplaceFillTensor", grad=False),
]

CASES = [*MATMUL, *INDEX, *SHAPE, *SORT, *COPY]
