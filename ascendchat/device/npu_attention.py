"""Attention on Ascend NPUs: the kernel `npu_fusion`, and the fused operators with the options of FlashAttention.

| FlashAttention       | npu_fusion_attention                   | note                                            |
|----------------------|----------------------------------------|-------------------------------------------------|
| dropout_p            | keep_prob = 1 - p                      | not used here                                   |
| causal               | sparse_mode 3 and the 2048×2048 mask   | without a mask all tokens see each other        |
| window_size (W-1, 0) | sparse_mode 4, pre W-1, next 0         | same mask; the arguments are spelt `tockens`    |
| softmax_scale        | scale                                  | its default is 1.0, not 1/sqrt(D)               |
| cu_seqlens           | actual_seq_qlen, actual_seq_kvlen      | host list, cumulative, no leading 0, layout TND |

The functions at the end are called by nn/flash_attend.py:

    dense    npu_fusion_attention, layout BSND: rows, with gradients
    packed   the same, layout TND: sequences end to end, with gradients
    cached   npu_fused_infer_attention_score: few queries behind a cache, dense or paged, without gradients

`left` and `right`: so many keys before and behind its own place are seen by a query, -1 for all; the last query stands
at the last key. `mask` is the 2048 × 2048 triangle that the compressed modes read, whatever the lengths. Every query
must see a key: fully hidden rows are undefined with TND. `lse`: the logsumexp of the scores is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.device.attention import REFERENCE, Ints, Reference, Sdpa, cache_mask, decode_fault

MAX_SEQUENCES = 1024  # in one call: CANN's limit on the list of bounds
FAR = 2147483647  # the operators' own number for no limit


@cache
def causal_mask(device: torch.device) -> Tensor:
    """The one 2048×2048 mask that the NPU's compressed sparse modes read, True = hidden; whatever the row length."""
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), diagonal=1)


class NpuFusion(Reference):
    """Ascend: npu_fusion_attention for training, npu_fused_infer_attention_score for decoding."""

    name = "npu_fusion"
    slices = False  # the fused kernels want contiguous keys: a slice would be copied at every step
    lengths_on_host = True
    compiles_packed = False  # its bounds are numbers on the host: each batch would be compiled anew

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        npu: Any = torch.npu  # type: ignore[attr-defined]
        if not npu.is_bf16_supported():
            return f"{npu.get_device_name()} has no fused training attention; 910B1 and later have"
        if head_dim > 768:
            return f"head_dim {head_dim} is above 768"
        if not decodes:
            return None
        if dtype == torch.float32:
            return "it reads caches in bfloat16 or float16, not float32"
        if head_dim > 512 or head_dim % 16:
            return f"it reads caches with a head_dim that is a multiple of 16 up to 512, not {head_dim}"
        return decode_fault(self, REFERENCE, device_type, dtype, head_dim)

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        causal_mask(device)

    def _sparse(self, window: int, keys: int, device: torch.device) -> dict[str, Any]:
        mask = causal_mask(device)
        if window >= keys:
            return {"atten_mask": mask, "sparse_mode": 3, "next_tockens": 0}
        return {"atten_mask": mask, "sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        import torch_npu

        sparse = self._sparse(window, k.size(1), q.device)
        return torch_npu.npu_fusion_attention(q, k, v, q.size(2), "BSND", scale=scale, **sparse)[0]

    def bounds(self, lengths: Ints, rows: int, per_document: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        """One entry per call: the ends of its documents, counted from its first token, and the longest of them."""
        groups = [lengths[i : i + MAX_SEQUENCES] for i in range(0, len(lengths), MAX_SEQUENCES)]
        return [(np.cumsum(group).tolist(), int(group.max())) for group in groups]

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        import torch_npu

        parts = zip(*(x.flatten(0, 1).split([ends[-1] for ends, _ in bounds]) for x in (q, k, v)))
        attended = []
        for (a, b, c), (ends, longest) in zip(parts, bounds):
            arguments = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, **self._sparse(window, longest, q.device)}
            attended.append(torch_npu.npu_fusion_attention(a, b, c, q.size(2), "TND", scale=scale, **arguments)[0])
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).view(q.shape)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor:
        import torch_npu

        heads = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "input_layout": "BSND"}
        arguments = {
            "actual_seq_lengths_kv": list(held),
            "scale": scale,
            **heads,
        }  # device/npu.py updates them in graphs
        return torch_npu.npu_fused_infer_attention_score(q.contiguous(), k.contiguous(), v.contiguous(), **arguments)[0]

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        import torch_npu

        mask = ~cache_mask(q.size(1), k.size(1), lengths, window)  # True = hidden
        heads = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "input_layout": "BSND"}
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return torch_npu.npu_fused_infer_attention_score(q, k, v, atten_mask=mask, scale=scale, **heads)[0]


class NpuSdpa(Sdpa):
    """torch's attention as torch_npu has it."""

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        if not torch.npu.is_bf16_supported():  # type: ignore[attr-defined]
            return "it hides keys with -inf, which this chip reports as overflow"
        return None

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if (group := q.size(2) // k.size(2)) > 1:  # torch_npu 2.7.1 forgets enable_gqa on the way to its plain path
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        return super()._call(q, k, v, mask, scale)


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

    arguments = {"scale": scale, "keep_prob": 1 - dropout, **_band(mask, left, right, "pre_tockens", "next_tockens")}
    out, largest, total, *_ = torch_npu.npu_fusion_attention(q, k, v, q.size(2), "BSND", **arguments)
    return out, _lse(largest, total) if lse else None


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

    arguments = {"scale": scale, "keep_prob": 1 - dropout, **_band(mask, left, right, "pre_tockens", "next_tockens")}
    arguments |= {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends}
    out, largest, total, *_ = torch_npu.npu_fusion_attention(q, k, v, q.size(1), "TND", **arguments)
    return out, _by_head(_lse(largest, total), q_ends) if lse else None


def _by_head(sums: Tensor, ends: list[int]) -> Tensor:
    """(H, N) from what CANN calls (N, H) of packed sequences, and fills sequence after sequence with (H, S) of each. It
    does so without `softmax_layout`, which only newer wheels have, and which only newer versions of CANN take."""
    heads = sums.size(1)
    lengths = [end - begin for begin, end in zip([0, *ends], ends)]
    parts = sums.flatten().split([heads * length for length in lengths])
    return torch.cat([part.view(heads, length) for part, length in zip(parts, lengths)], 1)


def _lse(largest: Tensor, total: Tensor) -> Tensor:
    """The kernel keeps the largest score of each row and the sum of the exponentials, each eight times."""
    return (largest[..., 0] + total[..., 0].log()).detach()


def can_cache(q: Tensor, kv_heads: int) -> bool:
    """True if `cached` takes queries of this dtype and shape (B, Tq, H, D)."""
    heads, dim = q.shape[2:]
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and dim % 16 == 0 and dim <= 512 and heads <= 256 and heads // kv_heads <= 64


def can_page(queries: int, page: int) -> bool:
    """True if `cached` reads pages of this many keys."""
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

    arguments: dict[str, Any] = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "scale": scale}
    arguments |= {"actual_seq_lengths_kv": totals, "softmax_lse_flag": lse, "input_layout": "BSH"}
    if table is not None:
        arguments |= {"block_table": table, "block_size": k.size(1)}
    arguments |= _band(mask, left, right, "pre_tokens", "next_tokens")
    flat = [x.contiguous().flatten(2) for x in (q, k, v)]
    out, lse_of_rows = torch_npu.npu_fused_infer_attention_score(*flat, **arguments)
    return out.view(q.shape), lse_of_rows[..., 0] if lse else None
