"""flash_attn_func and flash_attn_varlen_func of flash-attn 2, and their relatives with packed arguments. See compat/flash.py.

Here arguments are checked and brought into the form of the kernels; the kernel is the one that attention.py chooses for
the device: npu_fusion_attention on NPUs, torch's flash kernel on CUDA, scaled_dot_product_attention elsewhere. What no
fused kernel has (softcap, ALiBi) is computed by the formula of flash_plain.py, and said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ascendchat.config import UserError
from ascendchat.nn import flash_plain as plain
from ascendchat.nn.attention import causal_mask, choose
from ascendchat.nn.flash_plain import Rule

Found = Tensor | tuple[Tensor, ...]
NPU, TORCH, FINITE = "npu_fusion", "flash", ("eager", "reference")  # names of kernels in attention.py


_names: dict[tuple[str, torch.dtype, int], str] = {}
_said: set[str] = set()


@torch.compiler.assume_constant_result
def kernel_name(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Of the kernel that attention.py chooses."""
    if (device_type, dtype, head_dim) not in _names:
        _names[device_type, dtype, head_dim] = choose(device_type, dtype, head_dim)[0].name
    return _names[device_type, dtype, head_dim]


@torch.compiler.assume_constant_result
def say(text: str) -> None:
    """A warning, once in a process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=5)


def kernel_for(q: Tensor, rule: Rule) -> str:
    """The kernel of the device, or "sdpa" / "eager" where it lacks something of the rule."""
    name = kernel_name(q.device.type, q.dtype, q.size(-1))
    if name in (NPU, TORCH) and rule.changes_scores:
        what = "softcap" if rule.softcap > 0 else "alibi_slopes"
        say(f"{what}: the attention kernel {name} has none; computed by plain operations, with memory for all scores")
        return "eager"
    return "sdpa" if name == TORCH and rule.dropout else name


def make_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float = 0.0,
    lse: bool = False,
) -> Rule:
    """The arguments that all functions have, checked."""
    heads, dim = q.shape[-2:]
    if v.shape != k.shape or k.size(-1) != dim:
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise UserError(f"q, k, v: {shapes} do not fit; k and v need one shape, with the head_dim of q")
    if k.size(-2) == 0 or heads % k.size(-2):
        raise UserError(f"k, v: their {k.size(-2)} heads do not divide the {heads} heads of q")
    if not 0 <= dropout_p < 1:
        raise UserError(f"dropout_p: {dropout_p} is not in [0, 1)")
    if lse and dropout_p:
        raise UserError("return_attn_probs: with dropout_p there are no probabilities to return here; leave one out")
    if alibi_slopes is not None and alibi_slopes.shape[-1:] != (heads,):
        raise UserError(f"alibi_slopes: {tuple(alibi_slopes.shape)} is neither ({heads},) nor (batch, {heads})")
    left, right = (max(int(side), -1) for side in window_size)
    scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
    return Rule(left, 0 if causal else right, scale, max(softcap or 0.0, 0.0), alibi_slopes, dropout_p, lse)


def _repeatable(deterministic: bool, tensors: Sequence[Tensor]) -> None:
    """Only torch's own switch makes the gradients of fused kernels the same at every run."""
    name = kernel_name(tensors[0].device.type, tensors[0].dtype, tensors[0].size(-1))
    if not deterministic or name not in (NPU, TORCH) or torch.are_deterministic_algorithms_enabled():
        return
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UserError("deterministic: call torch.use_deterministic_algorithms(True), which the kernels here obey")


def _nothing(q: Tensor) -> Tensor:
    """Zeros that have a gradient, of zeros."""
    return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0)


def _result(out: Tensor, lse: Tensor | None, wanted: bool) -> Found:
    if not wanted:
        return out
    assert lse is not None, "asked for by the rule"
    return out, lse, out.new_empty(0)  # flash-attn has a third result with dropout only


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    queries, keys = q.size(1), k.size(1)
    unseeing = queries if q.numel() == 0 else plain.blind(rule, queries, keys)
    if not unseeing:
        return _seeing_rows(q, k, v, rule.for_lengths(queries, keys))
    first = _nothing(q[:, :unseeing])
    none = q.new_full((q.size(0), q.size(2), unseeing), float("inf"), dtype=torch.float32) if rule.lse else None
    if unseeing == queries:
        return first, none
    out, lse = _seeing_rows(q[:, unseeing:], k, v, rule.for_lengths(queries - unseeing, keys))
    return torch.cat([first, out], 1), None if none is None or lse is None else torch.cat([none, lse], 2)


def _seeing_rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Every query sees a key."""
    name = kernel_for(q, rule)
    if name == NPU:
        from ascendchat.device import npu_attention

        limits = (rule.left, rule.right, rule.scale, rule.dropout, rule.lse)
        return npu_attention.dense(q, k, v, causal_mask(q.device), *limits)
    if name == TORCH:
        from ascendchat.nn.flash_kernel import banded

        q, k, v = (_last_dim_dense(x) for x in (q, k, v))
        return banded(q, k, v, None, None, q.size(1), k.size(1), rule.left, rule.right, rule.scale)
    return plain.dense(q, k, v, rule, formula=name in FINITE)


def _last_dim_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """(B, Tq, H, D) against (B, Tk, K, D): (B, Tq, H, D). The last query stands at the last key; queries that see none
    give 0. `return_attn_probs` also gives the logsumexp of the scores (B, H, Tq), and an empty tensor."""
    rule = make_rule(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, lse=return_attn_probs
    )
    _repeatable(deterministic, (q, k, v))
    return _result(*_rows(q, k, v, rule), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """flash_attn_func with keys and values in one tensor (B, Tk, 2, K, D)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """flash_attn_func with all three in one tensor (B, T, 3, H, D)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


# ---- sequences end to end --------------------------------------------------------------------------------------------

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def on_host(numbers: Tensor) -> list[int]:
    """As a list. Every layer of a model asks for the same bounds: the device is waited for once, until they change."""
    if numbers.device.type == "cpu" or numbers.is_inference():  # those have no version to tell of a change
        return numbers.tolist()
    version, found = _known.get(numbers, (None, None))
    if version != numbers._version:
        found = numbers.tolist()
        _known[numbers] = (numbers._version, found)
    return found


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: list[int], k_bounds: list[int], rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """(N, H, D) and (H, N); bounds with a leading 0."""
    if kernel_for(q, rule) == NPU:
        return _sequences_npu(q, k, v, q_bounds, k_bounds, rule)
    outs, lses = [], []
    for b, ((a, end), (c, stop)) in enumerate(zip(pairwise(q_bounds), pairwise(k_bounds))):
        if a < end:
            slopes = rule.slopes[b] if rule.slopes is not None and rule.slopes.dim() == 2 else rule.slopes
            out, lse = _rows(q[None, a:end], k[None, c:stop], v[None, c:stop], rule._replace(slopes=slopes))
            outs.append(out[0])
            lses += [] if lse is None else [lse[0]]
    return torch.cat(outs), torch.cat(lses, 1) if lses else None


def _sequences_npu(
    q: Tensor, k: Tensor, v: Tensor, q_bounds: list[int], k_bounds: list[int], rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """The kernel gets only queries that see a key."""
    lengths, keys = np.diff(q_bounds), np.diff(k_bounds)
    unseeing = np.array([plain.blind(rule, *both) for both in zip(lengths.tolist(), keys.tolist())])
    if not unseeing.any():
        return _seeing_sequences_npu(q, k, v, lengths, keys, rule)
    out = _nothing(q)
    lse = q.new_full((q.size(1), q.size(0)), float("inf"), dtype=torch.float32) if rule.lse else None
    where = [np.arange(end - length + none, end) for end, length, none in zip(q_bounds[1:], lengths, unseeing)]
    rows = torch.from_numpy(np.concatenate(where)).to(q.device)
    if len(rows):
        found, sums = _seeing_sequences_npu(q.index_select(0, rows), k, v, lengths - unseeing, keys, rule)
        out = out.index_copy(0, rows, found)
        lse = None if lse is None or sums is None else lse.index_copy(1, rows, sums)
    return out, lse


def _seeing_sequences_npu(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any, keys: Any, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """In calls of as many sequences as one takes."""
    from ascendchat.device import npu_attention

    rule = rule.for_lengths(int(lengths.max()), int(keys.max()))
    limits = (rule.left, rule.right, rule.scale, rule.dropout, rule.lse)
    outs, lses, most = [], [], npu_attention.MOST_SEQUENCES
    for i in range(0, len(lengths), most):
        ends, stops = np.cumsum(lengths[i : i + most]).tolist(), np.cumsum(keys[i : i + most]).tolist()
        a, c = int(lengths[:i].sum()), int(keys[:i].sum())
        query, key, value = q[a : a + ends[-1]], k[c : c + stops[-1]], v[c : c + stops[-1]]
        if ends[-1]:
            out, lse = npu_attention.packed(query, key, value, causal_mask(q.device), ends, stops, *limits)
            outs.append(out)
            lses += [] if lse is None else [lse]
    if len(outs) == 1:
        return out, lse
    return torch.cat(outs), torch.cat(lses, 1) if lses else None


def _bounds(name: str, given: Tensor, total: int) -> list[int]:
    bounds = on_host(given)
    if bounds[0] != 0 or sorted(bounds) != bounds or bounds[-1] > total:
        raise UserError(f"{name}: {bounds} does not rise from 0 to at most {total}, the number of tokens")
    return bounds


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Found:
    """Sequences end to end: (Nq, H, D) against (Nk, K, D), of which sequence b has the rows from bounds[b] to
    bounds[b + 1]. With a block_table (B, pages) k and v are pages (pages, size, K, D). The logsumexp is (H, Nq)."""
    rule = make_rule(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, lse=return_attn_probs
    )
    _repeatable(deterministic, (q, k, v))
    if block_table is not None:
        from ascendchat.nn.flash_cache import read_pages

        k, v = read_pages(k, v, block_table, np.diff(on_host(cu_seqlens_k)))
    if kernel_for(q, rule) == TORCH and q.numel() and k.numel():
        from ascendchat.nn.flash_kernel import banded

        q, k, v = (_last_dim_dense(x) for x in (q, k, v))
        longest = int(max_seqlen_q)
        if q.size(0) != cu_seqlens_q.numel() - 1:  # told 1, the kernel takes every sequence to have one query
            longest = max(longest, 2)
        bounds = (cu_seqlens_q.int(), cu_seqlens_k.int(), longest, int(max_seqlen_k))
        return _result(*banded(q, k, v, *bounds, rule.left, rule.right, rule.scale), return_attn_probs)
    q_bounds = _bounds("cu_seqlens_q", cu_seqlens_q, q.size(0))
    k_bounds = _bounds("cu_seqlens_k", cu_seqlens_k, k.size(0))
    if len(q_bounds) != len(k_bounds):
        raise UserError(f"cu_seqlens_k: it has {len(k_bounds)} bounds, cu_seqlens_q has {len(q_bounds)}")
    used, left_over = q_bounds[-1], q.size(0) - q_bounds[-1]
    if used == 0:
        none = q.new_full((q.size(1), left_over), float("inf"), dtype=torch.float32)
        return _result(_nothing(q), none, return_attn_probs)
    out, lse = _sequences(q[:used], k[: k_bounds[-1]], v[: k_bounds[-1]], q_bounds, k_bounds, rule)
    if left_over:  # rows after the last sequence are padding
        out = torch.cat([out, _nothing(q[used:])])
        lse = None if lse is None else torch.nn.functional.pad(lse, (0, left_over), value=float("inf"))
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """flash_attn_varlen_func with keys and values in one tensor (Nk, 2, K, D)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Found:
    """flash_attn_varlen_func with all three in one tensor (N, 3, H, D)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)
