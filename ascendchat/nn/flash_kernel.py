"""torch's flash kernel with what scaled_dot_product_attention does not expose: windows, and documents end to end.

    flash(q, k, v, None, T, window, scale)            # rows (B, T, H, D)
    flash(q, k, v, bounds, longest, window, scale)    # documents (N, H, D); bounds (documents + 1,) int32, from 0 to N
    behind(q, k, v, lengths, window, scale)           # new queries (B, Tq, H, D), a cache (B, S, K, D); no gradient
    banded(q, k, v, None, None, Tq, Tk, left, right, scale)    # other lengths of queries and keys; also the logsumexp

Used by the kernel `flash` of attention.py and by compat/flash.py, on CUDA. It is an operator of its own, which a compiler
calls as it is: what torch's version of it returns besides the result differs between versions, and only the result and
the normaliser matter without dropout. Documents may have no tokens, so the bounds can have the same size for every
batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_bounds, Tensor? k_bounds, int q_longest, int k_longest, "
    "int left, int right, float scale"
)


def _limits(left: int, right: int, scale: float) -> dict[str, Any]:
    """-1 is no limit, and the faster kernel."""
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    q_longest: int,
    k_longest: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    known = (q_bounds, k_bounds, q_longest, k_longest, 0.0, right == 0, False)  # no dropout, causal?, no debug mask
    result = torch.ops.aten._flash_attention_forward(q, k, v, *known, **_limits(left, right, scale))
    return result[0], result[1]


_flash = torch.library.custom_op(
    "ascendchat::flash", _run, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
)


@torch.library.custom_op(
    "ascendchat::flash_gradient",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor normaliser, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _gradient(
    grad: Tensor,
    out: Tensor,
    normaliser: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    q_longest: int,
    k_longest: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of the dropout that there is not
    known = (q_bounds, k_bounds, q_longest, k_longest, 0.0, right == 0, random, random)
    tensors = (grad.contiguous(), q, k, v, out, normaliser)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*tensors, *known, **_limits(left, right, scale))
    return dq, dk, dv


@_flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    size = (q.size(1), q.size(0)) if bounds is not None else (q.size(0), q.size(2), q.size(1))
    return torch.empty_like(q), q.new_empty(size, dtype=torch.float32)


@_gradient.register_fake
def _(grad: Tensor, out: Tensor, normaliser: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.rest = inputs[5:]


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *_gradient(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 7


_flash.register_autograd(_backward, setup_context=_keep)


def flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, longest: int, window: int, scale: float) -> Tensor:
    """Causal attention; a query sees `window` keys, its own among them. Where nobody compiles or learns, the operator
    is left out: its first call imports torch's compiler, for which a chat would wait 2.5 s."""
    left = window - 1 if window < longest else -1
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    attend = _flash if learns or torch.compiler.is_compiling() else _run
    return attend(q, k, v, bounds, bounds, longest, longest, left, 0, scale)[0]


def behind(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
    """Row b holds lengths[b] keys, and its queries are the last of them; each sees `window`, its own among them."""
    (rows, queries), keys = q.shape[:2], k.size(1)
    row = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    known = (row * queries, row * keys, queries, keys, 0.0, True, False)  # no dropout, causal, no debug mask
    limits = _limits(window - 1 if window < keys else -1, 0, scale)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(*flat, *known, **limits, seqused_k=lengths.int())[0]
    return out.view(q.shape)


def banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor | None,
    k_bounds: Tensor | None,
    q_longest: int,
    k_longest: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The last query stands at the last key; each sees `left` keys before its place and `right` behind it, -1: all.
    Also the logsumexp of the scores, (B, H, T) or (H, N), without a gradient."""
    out, normaliser = _flash(q, k, v, q_bounds, k_bounds, q_longest, k_longest, left, right, scale)
    return out, normaliser.detach()
