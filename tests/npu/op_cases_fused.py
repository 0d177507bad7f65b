"""Operator cases (see op_cases.py): what exists only on NPU, losses, norms, rotary, experts, lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import Case, X, Y, Z, forward, once, randn, torch_npu

GAMMA, BETA = randn(8, seed=11) + 1, randn(8, seed=12)
LOGITS = randn(6, 10, seed=13)
LABELS = torch.tensor([3, 0, -100, 9, 2, 2])
ALL_LABELS = torch.tensor([3, 0, 4, 9, 2, 2])
PICKED = (Y > 0).float()
HEADS = randn(2, 5, 3, 8, seed=14)  # (B, S, N, D)
ANGLES = torch.arange(5.0)[:, None] * 0.3 / torch.arange(1.0, 5.0)
COS, SIN = (f(torch.cat([ANGLES, ANGLES], -1))[None, :, None] for f in (torch.cos, torch.sin))
FEW_HEADS, ANGLE = randn(1, 3, 2, 64, seed=31), randn(1, 3, 1, 64, seed=32)
PROMPT = [16 * randn(1, 2, 32, 64, seed=seed) for seed in (33, 34, 35)]  # (B, N, S, D); scores of some hundreds
TO_TWO = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
HALF = ("float16", "bfloat16")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + swapped * sin


def _apply_rotary(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = ANGLE.cos().to(q), ANGLE.sin().to(q)
    if q.device.type == "cpu":
        return _rotate(q, cos, sin), _rotate(k, cos, sin)
    return torch_npu.npu_apply_rotary_pos_emb(q.clone(), k.clone(), cos, sin)


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


def _prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The fast mode, which is the default: the product of queries and keys is rounded to half precision."""
    if q.device.type == "cpu":
        return (q / 16 @ k.mT).half().float().softmax(-1) @ v
    return torch_npu.npu_prompt_flash_attention(
        q / 16, k, v, num_heads=2, input_layout="BNSD", scale_value=1.0, pre_tokens=65535, next_tokens=65535
    )


def _scatter_update(cache: torch.Tensor, new: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if cache.device.type != "cpu":
        return torch_npu.scatter_update_(cache.clone(), places, new, 2)
    return torch.stack([row.index_copy(1, place[None], one) for row, place, one in zip(cache, places, new)])


def _keep_top(x: torch.Tensor, k: int, p: float) -> torch.Tensor:
    """Rows keep their k largest, then of these the smallest set with probability above p; -inf elsewhere."""
    if x.device.type != "cpu":
        ps, ks = (torch.full((len(x),), value, device=x.device) for value in (p, k))
        return torch_npu.npu_top_k_top_p(x, ps, ks.int())
    values, order = x.sort(-1)
    values[:, :-k] = -torch.inf
    drop = values.softmax(-1).cumsum(-1) <= 1 - p
    drop[:, -1] = False
    return torch.empty_like(x).scatter(-1, order, values.masked_fill(drop, -torch.inf))


def _grouped_matmul(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cpu":
        return torch.cat([a @ b for a, b in zip(x.split(counts.tolist()), w)])
    known = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
    return torch_npu.npu_grouped_matmul([x], [w], **known)[0]


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


NORM = [
    Case("RmsNorm", lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0], (X, GAMMA), "RmsNorm RmsNormGrad",
         reference=lambda x, g: F.rms_norm(x, (8,), g, 1e-6), loose=2),
    forward("AddRmsNorm", lambda x, y, g: torch_npu.npu_add_rms_norm(x, y, g, 1e-6)[::2], (X, Y, GAMMA),
            reference=lambda x, y, g: (F.rms_norm(x + y, (8,), g, 1e-6), x + y), loose=3),
    forward("GemmaRmsNorm", lambda x, g: torch_npu.npu_gemma_rms_norm(x, g, 1e-6)[0], (X, GAMMA),
            reference=lambda x, g: F.rms_norm(x, (8,), 1 + g, 1e-6), loose=3),
    Case("rms_norm", lambda x, g: F.rms_norm(x, (8,), g), (X, GAMMA), "Rsqrt Mean", loose=3),
    Case("LayerNorm", lambda x, g, b: F.layer_norm(x, (8,), g, b), (X, GAMMA, BETA), "LayerNorm LayerNormBackward",
         loose=2),
    Case("LayerNorm plain", lambda x: F.layer_norm(x, (3, 8)), (X,), "LayerNorm LayerNormBackward", loose=2),
    Case("GroupNorm", lambda x, g, b: F.group_norm(x, 4, g, b), (randn(2, 8, 6), GAMMA, BETA),
         "GroupNorm GroupNormBackward", dtypes=("float32",), loose=2),
    Case("BatchNorm", lambda x, g, b: F.batch_norm(x, None, None, g, b, True), (randn(4, 8, 3, 3), GAMMA, BETA),
         "BatchNorm BatchNormBackward", dtypes=("float32",), loose=2),
]  # fmt: skip

FUSED = [
    forward("ScatterPaKvCache", _paged, (randn(3, 2, 16), randn(3, 2, 16, seed=1))),
    Case("rotary halves", lambda x: torch_npu.npu_rotary_mul(x, COS.to(x), SIN.to(x)), (HEADS,),
         "RotaryPositionEmbedding RotaryPositionEmbeddingGrad", reference=lambda x: _rotate(x, COS, SIN)),
    Case("rotary interleave", lambda x: torch_npu.npu_rotary_mul(x, COS.to(x), SIN.to(x), "interleave"), (HEADS,),
         "RotaryPositionEmbedding RotaryPositionEmbeddingGrad", reference=lambda x: _rotate_pairs(x, COS, SIN)),
    Case("rotary with cos gradient", lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s), (HEADS, COS, SIN),
         "RotaryPositionEmbeddingGrad", reference=_rotate, loose=3),
    forward("ApplyRotaryPosEmbV2", _apply_rotary, (FEW_HEADS, -FEW_HEADS)),
    Case("SwiGlu", lambda x: torch_npu.npu_swiglu(x), (X,), "SwiGlu SwiGluGrad", reference=_swiglu),
    Case("FastGelu", lambda x: torch_npu.npu_fast_gelu(x), (X,), "FastGelu FastGeluBackward",
         reference=lambda x: x * torch.sigmoid(1.702 * x), loose=2),
    once("Cast", lambda x: torch_npu.npu_dtype_cast(x, torch.float16), (X,), reference=lambda x: x.half(), loose=200),
    forward("InplaceScatterUpdate", _scatter_update,
            (torch.zeros(2, 2, 6, 8), randn(2, 2, 1, 8), torch.tensor([3, 4]))),
    once("ApplyTopKTopP", _keep_top, (LOGITS, 4, 0.7)),
    forward("GroupedMatmulV5", _grouped_matmul, (randn(6, 8), randn(3, 8, 5), torch.tensor([2, 3, 1])), dtypes=HALF,
            loose=4),
    forward("PromptFlashAttentionV3", _prompt, tuple(PROMPT), dtypes=("float16",)),
    *(Case(name, _to_experts_and_back, inputs,
           "MoeTokenPermute MoeTokenPermuteGrad MoeTokenUnpermute MoeTokenUnpermuteGrad", reference=_experts_by_hand,
           loose=8)
      for name, inputs in {
        "experts": (randn(5, 8, seed=33), TO_TWO, randn(5, 2, seed=34)),
        "experts int32": (randn(5, 8, seed=33), TO_TWO.int(), randn(5, 2, seed=34)),
        "experts, one each": (randn(5, 8, seed=33), TO_TWO[:, 0]),
        "experts, some dropped": (randn(5, 8, seed=33), TO_TWO, randn(5, 2, seed=34), 7),
      }.items()),
    *(forward(f"vocabulary {step}", _vocabulary,
              (randn(9, 16, seed=71) / 2, randn(8, 16, seed=72) / 2, torch.tensor([3, 8, 15, 16, 9, 23, 0, 14, 20]),
               step),
              "FusedLinearOnlineMaxSum FusedCrossEntropyLossWithMaxSum FusedLinearCrossEntropyLossGrad",
              dtypes=HALF, reference=_vocabulary_by_hand, loose=4)
      for step in (0, 1)),
]  # fmt: skip

LOSS = [
    Case("Softmax", lambda x: F.softmax(x, -1), (X,), "Softmax SoftmaxBackward"),
    Case("LogSoftmax", lambda x: F.log_softmax(x, 1), (X,), "LogSoftmax LogSoftmaxBackward"),
    Case("softmax to float", lambda x: F.softmax(x, -1, dtype=torch.float32), (X,), "Softmax"),
    *(Case(f"cross_entropy {r}", lambda x, labels, r=r: F.cross_entropy(x.float(), labels, reduction=r),
           (LOGITS, LABELS), "LogSoftmax NLLLoss NLLLossBackward", loose=2) for r in ("mean", "sum", "none")),
    Case("cross_entropy ignore", lambda x, labels: F.cross_entropy(x, labels, ignore_index=-1),
         (LOGITS, LABELS.clamp(-1)), "NLLLoss", loose=2),
    Case("cross_entropy smooth", lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.1),
         (LOGITS, ALL_LABELS), "LogSoftmax", loose=2),
    *(Case(f"CrossEntropyLoss {r}",
           lambda x, labels, r=r: torch_npu.npu_cross_entropy_loss(x, labels, reduction=r)[0].squeeze(),
           (LOGITS, ALL_LABELS), "CrossEntropyLoss CrossEntropyLossGrad", loose=2,
           reference=lambda x, labels, r=r: F.cross_entropy(x, labels, reduction=r)) for r in ("mean", "none")),
    Case("MseLoss", F.mse_loss, (X, Y), "MseLoss MseLossBackward", loose=2),
    Case("L1Loss", F.l1_loss, (X, Y), "L1Loss L1LossBackward", loose=2),
    Case("SmoothL1Loss", F.smooth_l1_loss, (X, Y), "SmoothL1Loss SmoothL1LossBackward", loose=2),
    forward("SoftMarginLoss", F.soft_margin_loss, (X, torch.sign(Y))),
    forward("KlDiv", lambda x: F.kl_div(x.log_softmax(-1), Y.to(x).softmax(-1), reduction="sum"), (X,), loose=4),
    Case("KlDiv gradient", lambda x: F.kl_div(x, Y.to(x).softmax(-1), reduction="batchmean"), (X,), "KlDivBackward",
         loose=4),
    Case("BCE with logits", lambda x: F.binary_cross_entropy_with_logits(x, PICKED.to(x)), (X,),
         "BinaryCrossEntropyWithLogits", loose=2),
    Case("BCE", lambda x: F.binary_cross_entropy(x, PICKED.to(x)), (X.sigmoid(),),
         "BinaryCrossEntropy BinaryCrossEntropyBackward", dtypes=("float32",), loose=4),
    Case("CtcLoss", lambda x, labels: F.ctc_loss(x.log_softmax(2), labels, (6, 6), (2, 2)),
         (randn(6, 2, 5), torch.tensor([[1, 2], [3, 1]])), "CtcLoss CtcLossBackward", dtypes=("float32",)),
]  # fmt: skip


def foreach(name: str, run: Callable[..., Any], launches: str = "", **more: Any) -> Case:
    """`run` takes and returns lists of tensors of several shapes."""
    inputs = (X, Z[0], Y.abs() + 0.5, randn(3, 8, seed=20).abs() + 0.5)
    return forward(name, lambda a, b, c, d: run([a, b], [c, d]), inputs, launches or f"Foreach{name}", **more)


def _inplace(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[torch.Tensor]:
        copies = [x.clone() for x in a]
        function(copies, b)
        return copies

    return run


FOREACH = [
    foreach("AddListV2", lambda a, b: torch._foreach_add(a, b, alpha=2)),
    foreach("SubListV2", lambda a, b: torch._foreach_sub(a, b, alpha=2)),
    foreach("MulList", torch._foreach_mul),
    foreach("DivList", torch._foreach_div),
    foreach("MaximumList", torch._foreach_maximum),
    foreach("MinimumList", torch._foreach_minimum),
    foreach("PowList", lambda a, b: torch._foreach_pow(b, a), loose=4),
    *(foreach(f"{name}ScalarV2", lambda a, b, name=name: getattr(torch, f"_foreach_{name.lower()}")(a, 2.5))
      for name in ("Add", "Sub", "Mul", "Div")),
    foreach("PowScalarV2", lambda a, b: torch._foreach_pow(b, 3), loose=8),
    foreach("MaximumScalarV2", lambda a, b: torch._foreach_maximum(a, 0.5)),
    foreach("MinimumScalarV2", lambda a, b: torch._foreach_minimum(a, 0.5)),
    foreach("AddScalarList", lambda a, b: torch._foreach_add(a, [1.0, 2.0])),
    foreach("MulScalarList", lambda a, b: torch._foreach_mul(a, [1.5, 2.0])),
    foreach("DivScalarList", lambda a, b: torch._foreach_div(a, [1.5, 2.0])),
    foreach("LerpScalar", lambda a, b: torch._foreach_lerp(a, b, 0.3)),
    foreach("LerpList", lambda a, b: torch._foreach_lerp(a, b, a), loose=4),
    foreach("AddcmulScalarV2", lambda a, b: torch._foreach_addcmul(a, b, b, 0.5)),
    foreach("AddcdivScalarV2", lambda a, b: torch._foreach_addcdiv(a, a, b, 0.5)),
    foreach("foreach addcdiv scalars", lambda a, b: torch._foreach_addcdiv(a, a, b, [0.5, 2.0]), "Addcdiv"),
    foreach("foreach addcmul scalars", lambda a, b: torch._foreach_addcmul(a, a, b, [0.5, 2.0]), "Addcmul"),
    foreach("Norm", lambda a, b: torch._foreach_norm(a, 2)),
    foreach("Copy", _inplace(torch._foreach_copy_)),
    foreach("ZeroInplace", _inplace(lambda a, b: torch._foreach_zero_(a))),
    foreach("foreach in place", _inplace(lambda a, b: (torch._foreach_mul_(a, 2.0), torch._foreach_add_(a, b))),
            "ForeachMulScalarV2 ForeachAddListV2"),
    foreach("PowScalarAndTensor", lambda a, b: torch._foreach_pow(2.0, a), loose=4),
    *(foreach(f"foreach {name}", lambda a, b, name=name: getattr(torch, f"_foreach_{name.lower()}")(b),
              f"Foreach{name}", loose=2)
      for name in "Abs Neg Sign Reciprocal Sqrt Exp Expm1 Log Log2 Log10 Log1p Sin Cos Tan Tanh Sigmoid Erf Erfc"
      .split()),
    *(forward(f"foreach {name}", lambda x, name=name: getattr(torch, f"_foreach_{name.lower()}")([x, x]),
              (X.tanh() * 0.9,), f"Foreach{name}") for name in ("Acos", "Asin", "Atan", "Cosh", "Sinh")),
    *(forward(f"foreach {name}", lambda x, name=name: getattr(torch, f"_foreach_{name}")([x]), (X,),
              "ForeachRoundOffNumberV2") for name in ("ceil", "frac")),
]  # fmt: skip

CASES = [*NORM, *FUSED, *LOSS, *FOREACH]
