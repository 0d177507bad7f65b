"""Attention against an independent float64 reference: every layout, sparse mode, packing and inference operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import torch_npu

import cannsim

B, N, NKV, SQ, SK, D = 2, 4, 2, 6, 9, 16
SCALE = 0.25
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
ROWS, J = torch.arange(SQ)[:, None], torch.arange(SK)[None]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(q: Any, k: Any, v: Any, hidden: Any = None, scale: float = SCALE, pse: Any = None) -> torch.Tensor:
    """(B, N, S, D) in float64, row by row; hidden: true = not seen; rows that see nothing give 0."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.size(1) // k.size(1)
    out = torch.zeros(*q.shape[:3], v.size(-1), dtype=torch.float64)
    rows = []
    for b in range(q.size(0)):
        for n in range(q.size(1)):
            scores = q[b, n] @ k[b, n // group].T
            scores = (scores + pse[b, n]) * scale if pse is not None else scores * scale
            if hidden is not None:
                mask = hidden.expand(q.size(0), q.size(1), *scores.shape)[b, n]
                scores = scores.masked_fill(mask, float("-inf"))
                weights = torch.softmax(scores, -1).masked_fill(mask.all(-1, keepdim=True), 0)
            else:
                weights = torch.softmax(scores, -1)
            rows.append(weights @ v[b, n // group])
    return torch.stack(rows).view(out.shape)


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.permute(2, 0, 1, 3).flatten(2)


def inputs(dtype: torch.dtype = torch.float32, sq: int = SQ, sk: int = SK, d: int = D) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(sq * 100 + sk)
    shapes = ((B, N, sq, d), (B, NKV, sk, d), (B, NKV, sk, d))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def compare(layout: str, tensors: list[torch.Tensor], hidden: Any, **arguments: Any) -> None:
    """Output and the three gradients of npu_fusion_attention."""
    dtype = tensors[0].dtype
    exact = [x.double().requires_grad_() for x in tensors]
    expected = to_layout(reference(*exact, hidden), layout)
    weight = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    (expected * weight).sum().backward()
    found_in = [to_layout(x, layout).contiguous().npu().requires_grad_() for x in tensors]
    arguments = {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    found, softmax_max, softmax_sum, *_ = torch_npu.npu_fusion_attention(*found_in, N, layout, scale=SCALE, **arguments)
    (found.float() * weight.npu().to(dtype).float()).sum().backward()
    tolerance = TOLERANCE[dtype]
    assert softmax_max.shape == softmax_sum.shape == (B, N, tensors[0].size(2), 8)
    torch.testing.assert_close(found.cpu().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for f, e in zip(found_in, exact):
        torch.testing.assert_close(f.grad.cpu().double(), to_layout(e.grad, layout), rtol=tolerance, atol=4 * tolerance)


FULL = torch.rand(SQ, SK, generator=torch.Generator().manual_seed(1)) > 0.6
FULL[:, 0] = False
PER_BATCH = torch.rand(B, 1, SQ, SK, generator=torch.Generator().manual_seed(2)) > 0.6
PER_BATCH[..., 0] = False
RIGHT = SK - SQ
MODES = {  # what is hidden, and how the kernel is told
    "no mask": (None, {}),
    "0 full mask": (FULL, {"atten_mask": FULL}),
    "0 per batch": (PER_BATCH, {"atten_mask": PER_BATCH}),
    "0 band": (FULL | (J > ROWS + 1) | (J < ROWS - 2), {"atten_mask": FULL, "pre_tockens": 2, "next_tockens": 1}),
    "1 full mask": (FULL, {"atten_mask": FULL, "sparse_mode": 1, "pre_tockens": 0}),
    "2 left-up causal": (J > ROWS, {"atten_mask": COMPRESSED, "sparse_mode": 2}),
    "3 right-down causal": (J > ROWS + RIGHT, {"atten_mask": COMPRESSED, "sparse_mode": 3}),
    "4 band": ((J > ROWS + RIGHT) | (J < ROWS + RIGHT - 2),
               {"atten_mask": COMPRESSED, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0}),
    "5 prefix": (torch.stack([(J > ROWS + RIGHT) & (p <= J) for p in (4, 8)])[:, None],
                 {"atten_mask": PER_BATCH, "sparse_mode": 5, "prefix": [4, 8]}),
    "6 prefix compressed": (
        torch.stack([(J > ROWS + RIGHT) & (p <= J) for p in (5, 9)])[:, None],
        {"atten_mask": torch.ones(3072, 2048, dtype=torch.bool), "sparse_mode": 6, "prefix": [5, 9]}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _count_from_here() -> None:
    """Launches are those of the test."""
    cannsim.reset()


@pytest.mark.parametrize("mode", MODES)
def test_fusion_attention_with_grouped_heads(mode: str) -> None:
    hidden, arguments = MODES[mode]
    for layout in ("BNSD", "BSND", "BSH", "SBH"):
        compare(layout, inputs(), hidden, **arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fusion_attention_in_half_precision(dtype: torch.dtype) -> None:
    hidden, arguments = MODES["4 band"]
    compare("BSND", inputs(dtype), hidden, **arguments)


def test_rows_that_see_nothing_give_zeros_and_no_nan() -> None:
    """Right-down causal with more queries than keys: the first rows see nothing."""
    i, j = torch.arange(SK)[:, None], torch.arange(SQ)[None]
    compare("BNSD", inputs(sq=SK, sk=SQ), j > i + SQ - SK, atten_mask=COMPRESSED, sparse_mode=3)


def test_scale_defaults_to_one() -> None:
    q, k, v = inputs()
    found = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), N, "BNSD")[0]
    torch.testing.assert_close(found.cpu().double(), reference(q, k, v, scale=1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pse_type", [None, 0, 1])
def test_pse_is_added_before_or_behind_scaling_and_gets_a_gradient(pse_type: int | None) -> None:
    """The first version, and 1 of the second: scale * (qk + pse); 0: scale * qk + pse."""
    pse = torch.randn(B, N, SQ, SK, generator=torch.Generator().manual_seed(4))
    exact = [x.double().requires_grad_() for x in (*inputs(), pse)]
    expected = reference(*exact[:3], pse=exact[3] / SCALE if pse_type == 0 else exact[3])
    expected.square().sum().backward()
    there = [x.npu().requires_grad_() for x in (*inputs(), pse)]
    run = torch_npu.npu_fusion_attention if pse_type is None else torch_npu.npu_fusion_attention_v2
    known = {} if pse_type is None else {"pse_type": pse_type}
    found = run(*there[:3], N, "BNSD", pse=there[3], scale=SCALE, **known)[0]
    found.square().sum().backward()
    first, second = "aclnnFlashAttentionScoreGrad", {"aclnnFlashAttentionScoreV2", "aclnnFlashAttentionScoreGradV2"}
    assert ({first} if pse_type is None else second) <= set(cannsim.launches())
    torch.testing.assert_close(found.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for f, e in zip(there, exact):
        if f.grad is not None or pse_type is None:  # the second version may give none for pse
            torch.testing.assert_close(f.grad.cpu().double(), e.grad, rtol=1e-4, atol=1e-4)


LENGTHS_Q, LENGTHS_K = [3, 1, 0, 6], [3, 4, 0, 6]
PACKED_MODES = {  # how the kernel is told, and what is hidden: key j of query i, `right` more keys than queries
    "no mask": ({}, lambda i, j, right, first, last: j < 0 * i),
    "2": ({"sparse_mode": 2}, lambda i, j, right, first, last: j > i),
    "3": ({"sparse_mode": 3}, lambda i, j, right, first, last: j > i + right),
    "4": ({"sparse_mode": 4, "pre_tockens": 1, "next_tockens": 0},
          lambda i, j, right, first, last: (j > i + right) | (j < i + right - 1)),
    "7": ({"sparse_mode": 7, "pre_tockens": 2, "next_tockens": -1},
          lambda i, j, right, first, last: (j > i + (right - last)) | (last & (j < i + right - 2))),
    "8": ({"sparse_mode": 8, "pre_tockens": 2, "next_tockens": 1},
          lambda i, j, right, first, last: (j > i + right + 1) | (j < i + right - 2) if first else j > i),
}  # fmt: skip


@pytest.mark.parametrize("mode", PACKED_MODES)
def test_packed_sequences(mode: str) -> None:
    """TND: documents of several lengths (one empty) side by side; each attends only to itself."""
    arguments, hide = PACKED_MODES[mode]
    g = torch.Generator().manual_seed(5)
    tensors = [torch.randn(t, n, D, generator=g) for t, n in ((10, N), (13, NKV), (13, NKV))]
    exact = [x.double().requires_grad_() for x in tensors]
    parts, q0, k0 = [], 0, 0
    for b, (sq, sk) in enumerate(zip(LENGTHS_Q, LENGTHS_K)):
        if sq:
            i, j = torch.arange(sq)[:, None], torch.arange(sk)[None]
            cut = [exact[0][q0 : q0 + sq], exact[1][k0 : k0 + sk], exact[2][k0 : k0 + sk]]
            block = [x.transpose(0, 1)[None] for x in cut]
            hidden = hide(i, j, sk - sq, b == 0, b == len(LENGTHS_Q) - 1)
            parts.append(reference(*block, hidden)[0].transpose(0, 1))
        q0, k0 = q0 + sq, k0 + sk
    expected = torch.cat(parts)
    weight = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    (expected * weight).sum().backward()
    ends = [torch.tensor(x).cumsum(0).tolist() for x in (LENGTHS_Q, LENGTHS_K)]
    if mode != "no mask":
        arguments = arguments | {"atten_mask": COMPRESSED.npu()}
    found_in = [x.npu().requires_grad_() for x in tensors]
    found = torch_npu.npu_fusion_attention(
        *found_in, N, "TND", scale=SCALE, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **arguments
    )[0]
    (found * weight.npu()).sum().backward()
    assert {"aclnnFlashAttentionVarLenScore", "aclnnFlashAttentionUnpaddingScoreGrad"} <= set(cannsim.launches())
    torch.testing.assert_close(found.cpu().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for f, e in zip(found_in, exact):
        torch.testing.assert_close(f.grad.cpu().double(), e.grad, rtol=1e-4, atol=1e-5)


def test_statistics_of_packed_sequences_lie_head_by_head_in_each_sequence() -> None:
    """In a tensor of shape (T, N, 8): sequence by sequence, of each its heads, of each its rows."""
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(t, n, D, generator=g) for t, n in ((10, N), (13, NKV), (13, NKV)))
    ends = [torch.tensor(x).cumsum(0).tolist() for x in (LENGTHS_Q, LENGTHS_K)]
    lengths = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    found = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), N, "TND", scale=SCALE, **lengths)[1:3]
    largest, total, q0, k0 = [], [], 0, 0
    for sq, sk in zip(LENGTHS_Q, LENGTHS_K):
        for n in range(N):
            scores = q[q0 : q0 + sq, n].double() @ k[k0 : k0 + sk, n * NKV // N].double().T * SCALE
            if sq:
                largest.append(scores.amax(-1))
                total.append((scores - largest[-1][:, None]).exp().sum(-1))
        q0, k0 = q0 + sq, k0 + sk
    for statistic, rows in zip(found, (largest, total)):
        assert statistic.shape == (10, N, 8)
        expected = torch.cat(rows)[:, None].expand(-1, 8)
        torch.testing.assert_close(statistic.cpu().double().view(-1, 8), expected, rtol=1e-5, atol=1e-5)


def test_dropout_keeps_the_mean_and_backward_uses_the_same_mask() -> None:
    """With v = identity the output is the dropped probabilities; the gradient of v must be their transpose."""
    torch.manual_seed(0)
    s = 64
    q, k = torch.zeros(1, 1, s, s).npu(), torch.zeros(1, 1, s, s).npu()
    v = torch.eye(s).view(1, 1, s, s).npu().requires_grad_()
    out = torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", keep_prob=0.75)[0]
    dropped = out.detach().cpu()[0, 0]
    values = dropped.unique()
    assert values.numel() == 2
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / s / 0.75]))
    assert abs((dropped == 0).float().mean() - 0.25) < 0.03
    out.sum().backward()
    torch.testing.assert_close(v.grad.cpu()[0, 0].sum(1), dropped.sum(0) * s, rtol=1e-4, atol=1e-5)
    again = torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", keep_prob=0.75)[0]
    assert not torch.equal(again.detach().cpu()[0, 0], dropped)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", torch.float32), ("causal", torch.float16), ("mask", torch.bfloat16), ("grouped", torch.float32)],
    ids=str,
)
def test_torch_sdpa_runs_the_fused_kernel_and_agrees(kind: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype, sq=SQ, sk=SQ)
    if kind != "grouped":
        k, v = (x.repeat_interleave(N // NKV, 1) for x in (k, v))
    arguments: dict[str, Any] = {"is_causal": kind in ("causal", "grouped"), "enable_gqa": kind == "grouped"}
    if kind == "mask":
        arguments["attn_mask"] = ~FULL[:, :SQ] | torch.eye(SQ, dtype=torch.bool)
    exact = [x.float().clone().requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*exact, **arguments).square().sum().backward()
    found_in = [x.npu().requires_grad_() for x in (q, k, v)]
    if kind == "mask":
        arguments["attn_mask"] = arguments["attn_mask"].npu()
    found = F.scaled_dot_product_attention(*found_in, **arguments)
    found.float().square().sum().backward()
    launched = cannsim.launches()
    assert "aclnnFlashAttentionScore" in launched
    assert "aclnnFlashAttentionScoreGrad" in launched
    for f, e in zip(found_in, exact):
        torch.testing.assert_close(f.grad.cpu().float(), e.grad, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])


# ---- inference ------------------------------------------------------------------------------------

KV_LENGTHS = [5, 9]
SHORT = (torch.arange(SK)[None] >= torch.tensor(KV_LENGTHS)[:, None])[:, None, None]  # (B, 1, 1, SK)


def half(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.half().contiguous().npu() for x in tensors]


def assert_half(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu().double(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
def test_incremental_attention_with_lengths(layout: str) -> None:
    q, k, v = (x.half() for x in inputs(sq=1))
    args = half(*(to_layout(x, layout) for x in (q, k, v)))
    known = {"num_heads": N, "num_key_value_heads": NKV, "scale_value": SCALE, "input_layout": layout}
    found = torch_npu.npu_incre_flash_attention(*args, **known, actual_seq_lengths=KV_LENGTHS)
    assert "aclnnIncreFlashAttentionV4" in cannsim.launches()
    assert_half(found, to_layout(reference(q, k, v, SHORT), layout))


@pytest.mark.parametrize("layout", ["BNSD", "BSH", "BSND"])
def test_prompt_attention_is_causal_with_the_compressed_mask(layout: str) -> None:
    q, k, v = (x.half() for x in inputs(sq=SQ, sk=SQ))
    args = half(*(to_layout(x, layout) for x in (q, k, v)))
    known = {"num_heads": N, "num_key_value_heads": NKV, "scale_value": SCALE, "input_layout": layout}
    found = torch_npu.npu_prompt_flash_attention(*args, **known, sparse_mode=3, atten_mask=COMPRESSED.npu())
    assert "aclnnPromptFlashAttentionV3" in cannsim.launches()
    hidden = torch.ones(SQ, SQ, dtype=torch.bool).triu(1)
    assert_half(found, to_layout(reference(q, k, v, hidden), layout))


FUSED = {  # version: the call, and its names of some arguments
    1: ("npu_fused_infer_attention_score", "num_heads", "scale", "actual_seq_lengths_kv", "softmax_lse_flag"),
    2: (
        "npu_fused_infer_attention_score_v2",
        *("num_query_heads", "softmax_scale", "actual_seq_kvlen", "return_softmax_lse"),
    ),
}


@pytest.mark.parametrize("version", [1, 2])
def test_fused_inference_decode_and_prefill(version: int) -> None:
    name, heads, scale, lengths, wants_lse = FUSED[version]
    run, common = getattr(torch_npu, name), {heads: N, "num_key_value_heads": NKV, scale: SCALE, "input_layout": "BNSD"}
    q, k, v = (x.half() for x in inputs(sq=1))
    found, _ = run(*half(q, k, v), **common, **{lengths: KV_LENGTHS})
    assert_half(found, reference(q, k, v, SHORT))
    q, k, v = (x.half() for x in inputs())
    found, lse = run(*half(q, k, v), **common, sparse_mode=3, atten_mask=COMPRESSED.npu(), **{wants_lse: True})
    wanted = {1: "aclnnFusedInferAttentionScoreV3", 2: "aclnnFusedInferAttentionScoreV4"}
    assert wanted[version] in cannsim.launches()
    hidden = J > ROWS + RIGHT
    assert_half(found, reference(q, k, v, hidden))
    scores = torch.einsum("bnsd,bntd->bnst", q.double(), k.double().repeat_interleave(N // NKV, 1)) * SCALE
    assert_half(lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("pages", ["BnBsH", "BnNBsD"])
@pytest.mark.parametrize("version", [1, 2])
def test_fused_inference_reads_a_paged_cache(version: int, pages: str) -> None:
    size, table = 16, torch.tensor([[3, 0], [5, 1]], dtype=torch.int32)
    kept = [5, 20]
    q, k, v = (x.half() for x in inputs(sq=1, sk=32))
    caches = []
    for x in (k, v):
        cache = torch.zeros(8, size, NKV, D, dtype=torch.float16)
        for b in range(B):
            for page in range(2):
                cache[table[b, page]] = x[b, :, page * size : (page + 1) * size].transpose(0, 1)
        caches.append(cache.flatten(2) if pages == "BnBsH" else cache.transpose(1, 2).contiguous())
    hidden = (torch.arange(32)[None] >= torch.tensor(kept)[:, None])[:, None, None]
    name, heads, scale, lengths, _ = FUSED[version]
    known = {heads: N, "num_key_value_heads": NKV, scale: SCALE, "input_layout": "BSH", lengths: kept}
    paged = {"block_size": size, "block_table": table.npu()}
    found, _ = getattr(torch_npu, name)(*half(to_layout(q, "BSH"), *caches), **known, **paged)
    assert_half(found, to_layout(reference(q, k, v, hidden), "BSH"))


def test_fused_inference_packed_prefill() -> None:
    g = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(7, n, D, generator=g).half() for n in (N, NKV, NKV))
    known = {"num_heads": N, "num_key_value_heads": NKV, "scale": SCALE, "input_layout": "TND"}
    ends = {"actual_seq_lengths": [3, 7], "actual_seq_lengths_kv": [3, 7]}
    causal = {"sparse_mode": 3, "atten_mask": COMPRESSED.npu()}
    found, _ = torch_npu.npu_fused_infer_attention_score(*half(q, k, v), **known, **ends, **causal)
    parts = []
    for a, b in ((0, 3), (3, 7)):
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        parts.append(reference(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), hidden)[0].transpose(0, 1))
    assert_half(found, torch.cat(parts))
