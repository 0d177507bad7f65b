"""Operator cases (see op_cases.py): in-place and rarely used variants of the operators in the other lists."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from op_cases import BOOLS, INTS, ONE, OTHER_BOOLS, POSITIVE, SMALL, UNIT, Case, X, Y, distinct, inplace, randn
from op_cases_tensor import PICK, TOKENS

try:
    import torch_npu
except ImportError:  # the tests of this folder are skipped then
    torch_npu = None

INSIDE = UNIT.abs() * 0.9 + 0.05  # in (0, 1)
SQUARE = randn(4, 4, seed=30)
PROPER = SQUARE @ SQUARE.T + 4 * torch.eye(4)  # positive definite
HEADS = randn(1, 3, 2, 64, seed=31)  # (B, S, N, D)
ANGLE = randn(1, 3, 1, 64, seed=32)


def integers(name: str, method: str, *arguments: object) -> Case:
    run = lambda x, *a: getattr(x.clone(), method)(*a)  # noqa: E731
    return Case(name, run, (INTS, *arguments), name, grad=False, dtypes=ONE)


def _embed(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * ANGLE.cos() + torch.cat([-b, a], -1) * ANGLE.sin()


def _apply_rotary(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_npu.npu_apply_rotary_pos_emb(q.clone(), k.clone(), ANGLE.cos().to(q), ANGLE.sin().to(q))


def _to_experts_and_back(
    tokens: torch.Tensor, experts: torch.Tensor, probs: torch.Tensor | None = None, kept: int | None = None
) -> torch.Tensor:
    """Each expert multiplies by another number; with `kept`, only so many copies of tokens reach theirs."""
    rows, places = torch_npu.npu_moe_token_permute(tokens, experts, kept)
    factors = torch.arange(1.0, len(rows) + 1).to(rows)
    return torch_npu.npu_moe_token_unpermute(rows * factors[:, None], places, probs)


def _experts_by_hand(
    tokens: torch.Tensor, experts: torch.Tensor, probs: torch.Tensor | None = None, kept: int | None = None
) -> torch.Tensor:
    probs = torch.ones(experts.shape).reshape(len(tokens), -1) if probs is None else probs
    order = sorted(range(experts.numel()), key=lambda copy: int(experts.flatten()[copy]))
    out = [torch.zeros_like(tokens[0]) for _ in tokens]
    for row, copy in enumerate(order[:kept]):
        token, choice = divmod(copy, probs.shape[1])
        out[token] = out[token] + tokens[token] * (row + 1) * probs[token, choice]
    return torch.stack(out)


PROMPT = [16 * randn(1, 2, 32, 64, seed=seed) for seed in (33, 34, 35)]  # (B, N, S, D); scores of some hundreds


def _prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The fast mode, which is the default: the product of queries and keys is rounded to half precision."""
    return (q @ k.mT).half().float().softmax(-1) @ v


UNARY = [
    *(
        inplace(f"Inplace{name}", f"{name.lower()}_", x=INSIDE)
        for name in ["Exp2", "Expm1", "Log10", "Log1p", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Erfc", "Frac"]
    ),
    Case("RoundDecimals", lambda x: torch.round(x, decimals=1), (X,), "RoundDecimals", False, ONE),
    Case(
        "Hardsigmoid of integers",
        lambda x: (F.hardsigmoid(x), F.hardsigmoid(x.clone(), inplace=True)),
        (torch.arange(-5, 6, dtype=torch.int32),),
        "Hardsigmoid InplaceHardsigmoid",
        False,
        ONE,
        lambda x: 2 * [F.hardsigmoid(x.float()).int()],
    ),
    Case("InplaceLogicalNot", lambda x: x.clone().logical_not_(), (BOOLS,), "InplaceLogicalNot", False, ONE),
]

SEVENTH = 2 * math.pi / 7  # rounded to half precision it is 0.89746, and six of them differ in the third digit

BINARY = [
    *(
        Case(
            f"{name} rounds its factor",
            lambda x, method=method: getattr(x.clone(), method)(SEVENTH),
            (torch.arange(64.0),),
            name,
            False,
            ("float16",),
            lambda x: (x * torch.tensor(SEVENTH).half().float()).half(),
            0.0,
        )
        for name, method in {"Muls": "mul", "InplaceMuls": "mul_"}.items()
    ),
    integers("InplaceBitwiseAndTensor", "bitwise_and_", SMALL),
    integers("InplaceBitwiseAndScalar", "bitwise_and_", 3),
    integers("InplaceBitwiseXorTensor", "bitwise_xor_", SMALL),
    integers("InplaceBitwiseXorScalar", "bitwise_xor_", 3),
    integers("InplaceFloorDivide", "floor_divide_", SMALL),
    integers("InplaceFloorDivides", "floor_divide_", 2),
    integers("InplaceRemainderTensorTensor", "remainder_", SMALL),
    integers("InplaceRemainderTensorScalar", "remainder_", 3),
    integers("InplaceFmodTensor", "fmod_", SMALL),
    integers("InplaceFmodScalar", "fmod_", 3),
    inplace("InplaceDivMod", "div_", POSITIVE, launches="InplaceDiv"),
    inplace("InplaceEqScalar", "eq_", 0),
    inplace("InplaceNeScalar", "ne_", 0),
    inplace("InplaceNeTensor", "ne_", Y),
    inplace("InplaceLtScalar", "lt_", 0),
    inplace("InplaceLtTensor", "lt_", Y),
    inplace("InplaceLeScalar", "le_", 0),
    inplace("InplaceGtTensor", "gt_", Y),
    inplace("InplaceGeScalar", "ge_", 0),
    inplace("InplaceGeTensor", "ge_", Y),
    inplace("InplaceClampMinTensor", "clamp_min_", Y),
    inplace("InplaceClampMaxTensor", "clamp_max_", Y),
    inplace("InplacePowTensorTensor", "pow_", Y, x=POSITIVE),
    Case("XLogYScalarOther", lambda a: torch.special.xlogy(a, 2.0), (X,), "XLogYScalarOther", False),
    Case("XLogYScalarSelf", lambda a: torch.special.xlogy(2.0, a), (POSITIVE,), "XLogYScalarSelf", False),
    Case("Rsub", lambda a, b: torch.rsub(a, b), (X, Y), "Rsub", False),
    Case(
        "div rounding in place",
        lambda a, b: (a.clone().div_(b, rounding_mode="floor"), a.clone().div_(2, rounding_mode="trunc")),
        (INTS, SMALL),
        "InplaceDivMod InplaceDivMods",
        False,
        ONE,
    ),
    Case("bool and", lambda a, b: (a & b, a | b, a ^ b), (BOOLS, OTHER_BOOLS), "BitwiseAndTensor", False, ONE),
]

TENSOR = [
    Case("StdMeanCorrection", lambda x: torch.std_mean(x, -1), (X,), "StdMeanCorrection", False),
    Case(
        "other corrections",
        lambda x: [
            *(torch.var(x, -1, correction=c) for c in (0, 3)),
            *(torch.std(x, -1, correction=c) for c in (0, 3)),
            *torch.std_mean(x, -1, correction=-3),
            *torch.var_mean(x, -1, correction=4),
        ],
        (X,),
        "VarCorrection Std StdMeanCorrection VarMean",
        False,
    ),
    Case(
        "scatter_reduce",
        lambda x, v: [x.scatter_reduce(0, PICK[:2].expand(4, 2).T.to(x.device), v, how) for how in ("sum", "prod")],
        (SQUARE, SQUARE[:2] + 1),
        "ScatterReduce",
        False,
        ONE,
    ),
    Case("Renorm of counts", lambda x: torch.renorm(x, 0, 0, 5), (X,), "Renorm", False, ONE, lambda x: x * 5 / 24),
    Case(
        "padding at each end",
        lambda x, w: torch._nnpack_spatial_convolution(x, w, None, [1, 2]),
        (randn(1, 2, 5, 6, seed=36), randn(3, 2, 3, 3, seed=37)),
        "Convolution",
        False,
        ONE,
        lambda x, w: F.conv2d(x, w, padding=(1, 2)),
    ),
    Case(
        "index_copy", lambda x, v: x.index_copy(0, PICK[:2].to(x.device), v), (SQUARE, SQUARE[:2]), "IndexCopy", False
    ),
    Case("index_fill", lambda x: x.index_fill(0, PICK.to(x.device), 2.0), (SQUARE,), "IndexFill", False, ONE),
    Case(
        "InplacePut",
        lambda x, v: x.clone().put_(PICK[:2].to(x.device), v),
        (SQUARE, X[0, 0, :2]),
        "InplacePut",
        False,
        ONE,
    ),
    Case(
        "index_put of nothing",
        lambda x, v: x.clone().index_put_((torch.zeros(0, dtype=torch.long, device=x.device),), v),
        (SQUARE, SQUARE[0, 0]),
        "IndexPutImpl",
        False,
        ONE,
    ),
    Case("LinalgCholesky", torch.linalg.cholesky, (PROPER,), "LinalgCholesky", False, ONE),
    Case(
        "TriangularSolve",
        lambda a, b: torch.triangular_solve(b, a.tril() + 4 * torch.eye(4, device=a.device), upper=False)[0],
        (SQUARE, SQUARE),
        "TriangularSolve",
        False,
        ONE,
    ),
    Case("RepeatInterleaveInt", lambda x: x.repeat_interleave(2), (X,), "RepeatInterleaveInt", False),
    Case("IsInTensorScalar", lambda x: torch.isin(x, 5), (TOKENS,), "IsInTensorScalar", False, ONE),
    Case("SearchSorteds", lambda x: torch.searchsorted(x, 3.5), (torch.arange(8.0),), "SearchSorteds", False, ONE),
    Case("Sort stable", lambda x: tuple(torch.sort(x, stable=True)), (distinct(3, 8),), "Sort", False),
    Case(
        "Cast", lambda x: torch_npu.npu_dtype_cast(x, torch.float16), (X,), "Cast", False, ONE, lambda x: x.half(), 200
    ),
    Case(
        "ApplyRotaryPosEmb",
        _apply_rotary,
        (HEADS, -HEADS),
        "ApplyRotaryPosEmbV2",
        False,
        reference=lambda q, k: (_embed(q), _embed(k)),
    ),
    Case(
        "PromptFlashAttention fast",
        lambda q, k, v: torch_npu.npu_prompt_flash_attention(
            q / 16, k, v, num_heads=2, input_layout="BNSD", scale_value=1.0, pre_tokens=65535, next_tokens=65535
        ),
        tuple(PROMPT),
        "PromptFlashAttentionV3",
        False,
        ("float16",),
        lambda q, k, v: _prompt(q / 16, k, v),
    ),
]

PERMUTE = "MoeTokenPermute MoeTokenPermuteGrad MoeTokenUnpermute MoeTokenUnpermuteGrad"
TO_TWO = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
MOE = [
    Case(name, _to_experts_and_back, inputs, PERMUTE, reference=_experts_by_hand, loose=8)
    for name, inputs in {
        "experts": (randn(5, 8, seed=33), TO_TWO, randn(5, 2, seed=34)),
        "experts int32": (randn(5, 8, seed=33), TO_TWO.int(), randn(5, 2, seed=34)),
        "experts, one each": (randn(5, 8, seed=33), TO_TWO[:, 0]),
        "experts, some dropped": (randn(5, 8, seed=33), TO_TWO, randn(5, 2, seed=34), 7),
    }.items()
]


def _vocabulary(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
    """This device has the words 8 to 15 of 24: the parts, the loss with them, and one of the two ways back."""
    parts = torch_npu.npu_fused_linear_online_max_sum(x, weight, wanted, 8, 15, return_logits=True)
    most, total, predicted, absent, masked, logits = parts
    loss, share = torch_npu.npu_fused_cross_entropy_loss_with_max_sum(
        most, total, predicted, vocab_parallel_logits=logits
    )
    known = {"softmax": share} if step else {"logits_max": most, "sum_exp_logits": total}
    grads = torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
        loss * 0 + torch.arange(1.0, 10.0, device=x.device), x, weight, absent, masked, 0.0, **known
    )
    return most, total, predicted, absent, masked, loss, *grads


def _vocabulary_by_hand(
    x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor, step: int
) -> tuple[torch.Tensor, ...]:
    logits = x @ weight.T
    here = (wanted >= 8) & (wanted <= 15)
    target = torch.where(here, wanted - 8, 0)
    most, picked = logits.amax(1), logits.gather(1, target[:, None])[:, 0]
    predicted = torch.where(here, picked - most, 0)
    share = logits.softmax(1)
    slope = (share - F.one_hot(target, 8) * here[:, None]) * torch.arange(1.0, 10.0)[:, None]
    total = (logits - most[:, None]).exp().sum(1)
    bits = "".join("01"[not h] for h in here.tolist()) + "1" * 7
    absent = torch.tensor([int(bits[:8], 2), int(bits[8:], 2)])
    return most, total, predicted, absent, target, total.log() - predicted, slope @ weight, slope.T @ x


FUSED_LOSS = [
    Case(
        f"vocabulary {step}",
        _vocabulary,
        (randn(9, 16, seed=71) / 2, randn(8, 16, seed=72) / 2, torch.tensor([3, 8, 15, 16, 9, 23, 0, 14, 20]), step),
        "FusedLinearOnlineMaxSum FusedCrossEntropyLossWithMaxSum FusedLinearCrossEntropyLossGrad",
        False,
        ("float16", "bfloat16"),
        _vocabulary_by_hand,
        loose=4,
    )
    for step in (0, 1)
]

CASES = [*UNARY, *BINARY, *TENSOR, *MOE, *FUSED_LOSS]
