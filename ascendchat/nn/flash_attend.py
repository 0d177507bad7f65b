"""flash_attn_func and flash_attn_varlen_func of flash-attn 2, and their relatives with packed arguments. See
compat/flash.py.

Here arguments are checked and brought into the form of the kernels; the kernel is the one that attention.py chooses for
the device: npu_fusion_attention on NPUs, torch's flash kernel on CUDA, scaled_dot_product_attention elsewhere. What no
fused kernel has (softcap, ALiBi) is computed by the formula of flash_plain.py, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ascendchat.device import cuda_attention, npu_attention
from ascendchat.device.npu_attention import causal_mask
from ascendchat.errors import UserError
from ascendchat.nn import flash_plain as plain
from ascendchat.nn.attention import choose
from ascendchat.nn.flash_plain import Rule

Output = Tensor | tuple[Tensor, ...]
NPU, TORCH, FINITE = "npu_fusion", "flash", ("eager", "reference")  # names of kernels in attention.py


_kernel_names: dict[tuple[str, torch.dtype, int], str] = {}
_warned: set[str] = set()


@torch.compiler.assume_constant_result
def kernel_name(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Name of the kernel that attention.py chooses."""
    if (device_type, dtype, head_dim) not in _kernel_names:
        _kernel_names[device_type, dtype, head_dim] = choose(device_type, dtype, head_dim)[0].name
    return _kernel_names[device_type, dtype, head_dim]


@torch.compiler.assume_constant_result
def warn_once(text: str) -> None:
    """Warn once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=5)


def kernel_for(q: Tensor, rule: Rule) -> str:
    """The kernel of the device, or "sdpa" / "eager" where it lacks something of the rule."""
    name = kernel_name(q.device.type, q.dtype, q.size(-1))
    if name in (NPU, TORCH) and rule.changes_scores:
        what = "softcap" if rule.softcap > 0 else "alibi_slopes"
        warn_once(
            f"{what}: the attention kernel {name} has none; computed by plain operations, with memory for all scores"
        )
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
    """Check the arguments that all functions have."""
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


def _check_deterministic(deterministic: bool, tensors: Sequence[Tensor]) -> None:
    """Refuse `deterministic` without torch's own switch: only that makes gradients of fused kernels repeatable."""
    name = kernel_name(tensors[0].device.type, tensors[0].dtype, tensors[0].size(-1))
    if not deterministic or name not in (NPU, TORCH) or torch.are_deterministic_algorithms_enabled():
        return
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UserError("deterministic: call torch.use_deterministic_algorithms(True), which the kernels here obey")


def _zeros(q: Tensor) -> Tensor:
    """Zeros of the shape of q, with a gradient of zeros."""
    return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0)


def _result(out: Tensor, lse: Tensor | None, wanted: bool) -> Output:
    if not wanted:
        return out
    assert lse is not None, "asked for by the rule"
    return out, lse, out.new_empty(0)  # flash-attn has a third result with dropout only


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    queries, keys = q.size(1), k.size(1)
    blind = queries if q.numel() == 0 else plain.blind(rule, queries, keys)
    if not blind:
        return _attend_rows(q, k, v, rule.for_lengths(queries, keys))
    first = _zeros(q[:, :blind])
    none = q.new_full((q.size(0), q.size(2), blind), float("inf"), dtype=torch.float32) if rule.lse else None
    if blind == queries:
        return first, none
    out, lse = _attend_rows(q[:, blind:], k, v, rule.for_lengths(queries - blind, keys))
    return torch.cat([first, out], 1), None if none is None or lse is None else torch.cat([none, lse], 2)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Attention where every query sees a key."""
    name = kernel_for(q, rule)
    if name == NPU:
        limits = (rule.left, rule.right, rule.scale, rule.dropout, rule.lse)
        return npu_attention.dense(q, k, v, causal_mask(q.device), *limits)
    if name == TORCH:
        q, k, v = (_last_dim_dense(x) for x in (q, k, v))
        return cuda_attention.banded(q, k, v, None, None, q.size(1), k.size(1), rule.left, rule.right, rule.scale)
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
) -> Output:
    """(B, Tq, H, D) against (B, Tk, K, D): (B, Tq, H, D). The last query stands at the last key; queries that see none
    give 0. `return_attn_probs` also gives the logsumexp of the scores (B, H, Tq), and an empty tensor."""
    rule = make_rule(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, lse=return_attn_probs
    )
    _check_deterministic(deterministic, (q, k, v))
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
) -> Output:
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
) -> Output:
    """flash_attn_func with all three in one tensor (B, T, 3, H, D)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


# ---- sequences end to end --------------------------------------------------------------------------------------------

_host_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def on_host(numbers: Tensor) -> list[int]:
    """Copy to a list. Every layer of a model has the same bounds: the device is waited for once, until they change."""
    if numbers.device.type == "cpu" or numbers.is_inference():  # those have no version to tell of a change
        return numbers.tolist()
    version, values = _host_copies.get(numbers, (None, None))
    if version != numbers._version:
        values = numbers.tolist()
        _host_copies[numbers] = (numbers._version, values)
    return values


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
    """Sequences on an NPU, whose kernel gets only the queries that see a key; the others give 0."""
    lengths, keys = np.diff(q_bounds), np.diff(k_bounds)
    blind = np.array([plain.blind(rule, *both) for both in zip(lengths.tolist(), keys.tolist())])
    if not blind.any():
        return _attend_sequences_npu(q, k, v, lengths, keys, rule)
    out = _zeros(q)
    lse = q.new_full((q.size(1), q.size(0)), float("inf"), dtype=torch.float32) if rule.lse else None
    where = [np.arange(end - length + none, end) for end, length, none in zip(q_bounds[1:], lengths, blind)]
    rows = torch.from_numpy(np.concatenate(where)).to(q.device)
    if len(rows):
        attended, sums = _attend_sequences_npu(q.index_select(0, rows), k, v, lengths - blind, keys, rule)
        out = out.index_copy(0, rows, attended)
        lse = None if lse is None or sums is None else lse.index_copy(1, rows, sums)
    return out, lse


def _attend_sequences_npu(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any, keys: Any, rule: Rule
) -> tuple[Tensor, Tensor | None]:
    """Sequences on an NPU, in calls of at most MAX_SEQUENCES."""
    rule = rule.for_lengths(int(lengths.max()), int(keys.max()))
    limits = (rule.left, rule.right, rule.scale, rule.dropout, rule.lse)
    outs, lses, max_sequences = [], [], npu_attention.MAX_SEQUENCES
    for i in range(0, len(lengths), max_sequences):
        ends, stops = (
            np.cumsum(lengths[i : i + max_sequences]).tolist(),
            np.cumsum(keys[i : i + max_sequences]).tolist(),
        )
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
) -> Output:
    """Sequences end to end: (Nq, H, D) against (Nk, K, D), of which sequence b has the rows from bounds[b] to
    bounds[b + 1]. With a block_table (B, pages) k and v are pages (pages, size, K, D). The logsumexp is (H, Nq)."""
    rule = make_rule(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, lse=return_attn_probs
    )
    _check_deterministic(deterministic, (q, k, v))
    if block_table is not None:
        k, v = read_pages(k, v, block_table, np.diff(on_host(cu_seqlens_k)))
    if kernel_for(q, rule) == TORCH and q.numel() and k.numel():
        q, k, v = (_last_dim_dense(x) for x in (q, k, v))
        longest = int(max_seqlen_q)
        if q.size(0) != cu_seqlens_q.numel() - 1:  # told 1, the kernel takes every sequence to have one query
            longest = max(longest, 2)
        bounds = (cu_seqlens_q.int(), cu_seqlens_k.int(), longest, int(max_seqlen_k))
        return _result(*cuda_attention.banded(q, k, v, *bounds, rule.left, rule.right, rule.scale), return_attn_probs)
    q_bounds = _bounds("cu_seqlens_q", cu_seqlens_q, q.size(0))
    k_bounds = _bounds("cu_seqlens_k", cu_seqlens_k, k.size(0))
    if len(q_bounds) != len(k_bounds):
        raise UserError(f"cu_seqlens_k: it has {len(k_bounds)} bounds, cu_seqlens_q has {len(q_bounds)}")
    used, left_over = q_bounds[-1], q.size(0) - q_bounds[-1]
    if used == 0:
        none = q.new_full((q.size(1), left_over), float("inf"), dtype=torch.float32)
        return _result(_zeros(q), none, return_attn_probs)
    out, lse = _sequences(q[:used], k[: k_bounds[-1]], v[: k_bounds[-1]], q_bounds, k_bounds, rule)
    if left_over:  # rows after the last sequence are padding
        out = torch.cat([out, _zeros(q[used:])])
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
) -> Output:
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
) -> Output:
    """flash_attn_varlen_func with all three in one tensor (N, 3, H, D)."""
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


# flash_attn_with_kvcache of flash-attn 2: writes new keys and values into a cache, rotated or not, and attends. See
# compat/flash.py. The cache is rows (B, S, K, D), or pages (pages, size, K, D) in the order of a block_table (B, pages
# per row).
#
# On NPUs the lengths are needed on the host: pass cache_seqlens as a number or a CPU tensor where you have it; a tensor
# on the device is read once, and again when it has changed.

TRITON = find_spec("triton") is not None  # not on Windows


def read_pages(k: Tensor, v: Tensor, table: Tensor, lengths: Any) -> tuple[Tensor, Tensor]:
    """Pages (pages, size, K, D) as sequences of these lengths, end to end: (N, K, D)."""
    size, starts = k.size(1), np.cumsum(lengths) - lengths
    place = torch.from_numpy(np.arange(lengths.sum()) - starts.repeat(lengths)).to(table.device)
    row = torch.from_numpy(np.arange(len(lengths)).repeat(lengths)).to(table.device)
    slot = table[row, place // size].long() * size + place % size
    return k.flatten(0, 1)[slot], v.flatten(0, 1)[slot]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first channels of x (B, T, H, D), as many as two times the width of cos and sin (S, R / 2), by the angles at
    its positions (B, T). Pairs are neighbours if interleaved, else half the rotated width apart."""
    width = 2 * cos.size(-1)
    high = torch.promote_types(x.dtype, torch.float32)
    c, s = (angles[positions].to(high).unsqueeze(2) for angles in (cos, sin))  # (B, T, 1, R / 2)
    part = x[..., :width].to(high)
    one, other = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = one * c - other * s, one * s + other * c
    both = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([both.to(x.dtype), x[..., width:]], -1)


def _places(cache: Tensor, rows: Tensor, positions: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """The index of these positions (B, T) of these rows (B,) in a cache; in one of pages, of the lines of the table."""
    if table is None:
        return rows[:, None], positions
    size = cache.size(1)
    return table.long().gather(1, positions // size), positions % size


def _refuse(
    k: Tensor | None, v: Tensor | None, seqlens: Any, rows: Any, leftpad: Any, table: Any, cos: Any, sin: Any
) -> None:
    """Combinations that flash-attn refuses too."""
    if (k is None) != (v is None):
        raise UserError("k, v: give both or none")
    if k is not None and seqlens is None:
        raise UserError("cache_seqlens: needed with k and v, to say where they go in the cache")
    if (cos is None) != (sin is None) or (cos is not None and k is None):
        raise UserError("rotary_cos, rotary_sin: give both, and k and v with them")
    for name, given in (("cache_batch_idx", rows), ("cache_leftpad", leftpad)):
        if table is not None and given is not None:
            raise UserError(f"{name}: not with block_table; put the pages of a row into its line of the table")


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """Queries (B, Tq, H, D) behind a cache; k and v (B, T, K, D) are first written at cache_seqlens, in place. There is
    no gradient. `num_splits` is about speed alone, and not used here. The logsumexp is (B, H, Tq)."""
    _refuse(k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, rotary_cos, rotary_sin)
    rule = make_rule(q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, alibi_slopes)
    rule = rule._replace(lse=return_softmax_lse)
    batch, device, room = q.size(0), q.device, k_cache.size(1)
    if block_table is not None:
        room *= block_table.size(1)
    elif cache_batch_idx is None and k_cache.size(0) < batch:
        raise UserError(f"k_cache: {k_cache.size(0)} rows are fewer than the {batch} of q; name them: cache_batch_idx")
    given: int | Tensor = room if cache_seqlens is None else cache_seqlens
    starts = torch.full((batch,), given, device=device) if isinstance(given, int) else given.to(device).long()
    on_cpu = isinstance(given, int) or given.device.type == "cpu"
    lengths_on_host = [int(given)] * batch if isinstance(given, int) else on_host(given) if on_cpu else None
    rows = torch.arange(batch, device=device) if cache_batch_idx is None else cache_batch_idx.long()
    new = 0 if k is None else k.size(1)
    if lengths_on_host is None and kernel_for(q, rule) == NPU:
        lengths_on_host = on_host(given)  # type: ignore[arg-type]
    if lengths_on_host is not None and max(lengths_on_host, default=0) + new > room:
        raise UserError(f"cache_seqlens: {max(lengths_on_host)} and {new} new tokens do not fit into a cache of {room}")
    if k is not None and v is not None:
        positions = starts[:, None] + torch.arange(new, device=device)
        if rotary_cos is not None and rotary_sin is not None:
            first = starts[:, None] - (0 if cache_leftpad is None else cache_leftpad[:, None])
            steps = torch.arange(max(new, q.size(1)), device=device)
            k = rotate(k, rotary_cos, rotary_sin, first + steps[:new], rotary_interleaved)
            moves = rule.left >= 0 or rule.right >= 0  # else all queries stand at the first new place
            at = first + (steps[: q.size(1)] if moves else steps[: q.size(1)] * 0)
            q = rotate(q, rotary_cos, rotary_sin, at, rotary_interleaved)
        where = _places(k_cache, rows, positions, block_table)
        k_cache[where], v_cache[where] = k.to(k_cache.dtype), v.to(v_cache.dtype)
    held = None if lengths_on_host is None else [length + new for length in lengths_on_host]
    cached = _Cached(k_cache, v_cache, starts, new, held, rows, cache_batch_idx is None, cache_leftpad, block_table)
    out, lse = _attend(q, cached, rule)
    return (out, lse) if lse is not None else out


class _Cached(NamedTuple):
    """The cache as the queries see it."""

    k: Tensor  # (rows, S, K, D), or (pages, size, K, D)
    v: Tensor
    starts: Tensor  # (B,) keys that were in each row
    new: int  # and that were added
    held: list[int] | None  # keys in each row, where the host knows it
    rows: Tensor  # (B,) of the cache
    in_order: bool  # they are the first ones
    leftpad: Tensor | None  # (B,) where the keys begin
    table: Tensor | None

    @property
    def room(self) -> int:
        return self.k.size(1) * (1 if self.table is None else self.table.size(1))

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of these positions (B, T) of each row."""
        where = _places(self.k, self.rows, positions, self.table)
        return self.k[where], self.v[where]

    def contents(self, length: int) -> tuple[Tensor, Tensor]:
        """(B, length, K, D) twice, a copy only of pages and of picked rows."""
        if self.in_order and self.table is None:
            return self.k[: len(self.rows), :length], self.v[: len(self.rows), :length]
        return self.read(torch.arange(length, device=self.k.device).expand(len(self.rows), -1))


def _attend(q: Tensor, cached: _Cached, rule: Rule) -> tuple[Tensor, Tensor | None]:
    name, queries = kernel_for(q, rule), q.size(1)
    rule = rule.for_lengths(queries, cached.room)
    if q.numel() == 0:
        return q.clone(), q.new_zeros(q.size(0), q.size(2), queries, dtype=torch.float32) if rule.lse else None
    if name == NPU:
        attended = _attend_npu(q, cached, rule)
        if attended is not None:
            return attended
        name = FINITE[0]
    longest = cached.room if cached.held is None else max(1, *cached.held)
    k, v = cached.contents(longest)
    totals, leftpad = cached.starts + cached.new, cached.leftpad
    free = rule.left < 0 and rule.right < 0 and leftpad is None
    dense = all(x.stride() == k.stride() and x.stride(2) == x.size(3) and x.stride(3) == 1 for x in (k, v))
    if name == TORCH and TRITON and queries == 1 and free and dense and not rule.lse:
        from ascendchat.device.triton_attention import one_query

        return one_query(q, k, v, totals, rule.scale).masked_fill((totals == 0)[:, None, None, None], 0), None
    whole = leftpad is None and cached.held is not None and min(cached.held) == longest
    return plain.cached(q, k, v, totals, leftpad, rule, whole=whole, formula=name in FINITE)


def _attend_npu(q: Tensor, cached: _Cached, rule: Rule) -> tuple[Tensor, Tensor | None] | None:
    """By the incremental kernel, or None where it has no way. It wants rows that begin at 0, and takes no window for
    one query: then the keys in sight are copied."""
    queries, held, k, v, table = q.size(1), cached.held, cached.k, cached.v, cached.table
    assert held is not None, "known for NPUs"
    if not npu_attention.can_cache(q, k.size(2)):
        warn_once(
            f"flash_attn_with_kvcache: the NPU's kernel takes no {q.dtype} with head_dim {q.size(3)}; plain operations"
        )
        return None
    first = [0] * len(held) if cached.leftpad is None else on_host(cached.leftpad)
    if queries == 1 and rule.left >= 0:
        first = [max(start, total - 1 - rule.left) for start, total in zip(first, held)]
        rule = rule._replace(left=-1)
    lengths = [max(total - start, 0) for start, total in zip(first, held)]
    if any(first):
        positions = torch.tensor(first, device=q.device)[:, None] + torch.arange(max(1, *lengths), device=q.device)
        k, v = cached.read(positions.clamp(max=cached.room - 1))
        table = None
    elif table is None or not npu_attention.can_page(queries, k.size(1)):
        in_place = cached.in_order and table is None  # a slice of it would be copied
        k, v = cached.contents(k.size(1) if in_place else max(1, *lengths))
        table = None
    pages = None if table is None else table.int()
    limits = (rule.left, rule.right, rule.scale, rule.lse)
    out, lse = npu_attention.cached(q, k, v, causal_mask(q.device), [max(n, 1) for n in lengths], pages, *limits)
    none = [[i < plain.blind(rule, queries, total) for i in range(queries)] for total in lengths]
    if any(map(any, none)):
        where = torch.tensor(none, device=q.device)  # (B, Tq)
        out = out.masked_fill(where[:, :, None, None], 0)
        lse = None if lse is None else lse.masked_fill(where[:, None], float("inf"))
    return out, lse
