"""Ascend's fused attention with the options of FlashAttention. Called by compat/flash.py and nn/flash_attend.py.

    dense    npu_fusion_attention, layout BSND: rows, with gradients
    packed   the same, layout TND: sequences end to end, with gradients
    cached   npu_fused_infer_attention_score: few queries behind a cache, dense or paged, without gradients

`left` and `right`: so many keys before and behind its own place are seen by a query, -1 for all; the last query stands
at the last key. `mask` is the 2048 × 2048 triangle that the compressed modes read, whatever the lengths. Every query
must see a key: fully hidden rows are undefined with TND. `lse`: the logsumexp of the scores is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_SEQUENCES = 1024  # in one call: CANN's limit on the list of bounds
FAR = 2147483647  # the operators' own number for no limit


def _band(mask: Tensor, left: int, right: int, before: str, behind: str) -> dict[str, Any]:
    """Mode 3 is causal from the lower right corner, mode 4 a band along its diagonal. Without a mask all is seen."""
    if left < 0 and right < 0:
        return {}
    if left < 0 and right == 0:
        return {"atten_mask": mask, "sparse_mode": 3, behind: 0}
    limits = {before: left if left >= 0 else FAR, behind: right if right >= 0 else FAR}
    return {"atten_mask": mask, "sparse_mode": 4, **limits}


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, left: int, right: int, scale: float, dropout: float, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(B, Tq, H, D), and (B, H, Tq) if wanted."""
    import torch_npu

    known = {"scale": scale, "keep_prob": 1 - dropout, **_band(mask, left, right, "pre_tockens", "next_tockens")}
    out, most, total, *_ = torch_npu.npu_fusion_attention(q, k, v, q.size(2), "BSND", **known)
    return out, _lse(most, total) if lse else None


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    q_ends: list[int],
    k_ends: list[int],
    left: int,
    right: int,
    scale: float,
    dropout: float,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(N, H, D), and (H, N) if wanted; the ends without a leading 0, at most MAX_SEQUENCES."""
    import torch_npu

    known = {"scale": scale, "keep_prob": 1 - dropout, **_band(mask, left, right, "pre_tockens", "next_tockens")}
    known |= {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends}
    out, most, total, *_ = torch_npu.npu_fusion_attention(q, k, v, q.size(1), "TND", **known)
    return out, _by_head(_lse(most, total), q_ends) if lse else None


def _by_head(found: Tensor, ends: list[int]) -> Tensor:
    """(H, N) from what CANN calls (N, H) of packed sequences, and fills sequence after sequence with (H, S) of each. It
    does so without `softmax_layout`, which only newer wheels have, and which only newer versions of CANN take."""
    heads = found.size(1)
    lengths = [end - begin for begin, end in zip([0, *ends], ends)]
    parts = found.flatten().split([heads * length for length in lengths])
    return torch.cat([part.view(heads, length) for part, length in zip(parts, lengths)], 1)


def _lse(most: Tensor, total: Tensor) -> Tensor:
    """The kernel keeps the largest score of each row and the sum of the exponentials, each eight times."""
    return (most[..., 0] + total[..., 0].log()).detach()


def can_cache(q: Tensor, kv_heads: int) -> bool:
    """Whether `cached` takes such queries (B, Tq, H, D)."""
    heads, dim = q.shape[2:]
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and dim % 16 == 0 and dim <= 512 and heads <= 256 and heads // kv_heads <= 64


def can_page(queries: int, page: int) -> bool:
    """Whether `cached` reads pages of this many keys."""
    return page % (16 if queries == 1 else 128) == 0 and page <= 512


def cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    totals: list[int],
    table: Tensor | None,
    left: int,
    right: int,
    scale: float,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(B, Tq, H, D), and (B, H, Tq) if wanted. Row b of the cache (B, S, K, D) holds `totals[b]` keys; with a table
    (B, pages) int32, the cache is (pages, size, K, D). One query ignores the limits: with one, there must be none."""
    import torch_npu

    known: dict[str, Any] = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "scale": scale}
    known |= {"actual_seq_lengths_kv": totals, "softmax_lse_flag": lse, "input_layout": "BSH"}
    if table is not None:
        known |= {"block_table": table, "block_size": k.size(1)}
    known |= _band(mask, left, right, "pre_tokens", "next_tokens")
    flat = [x.contiguous().flatten(2) for x in (q, k, v)]
    out, found = torch_npu.npu_fused_infer_attention_score(*flat, **known)
    return out.view(q.shape), found[..., 0] if lse else None
