"""Attention on NVIDIA GPUs: the kernel `flash`, by torch's flash kernel, Triton, or the package flash-attn-4.

The package is for rows of training on Hopper and newer chips that have it installed. Its kernels are operators of torch
here, so that a compiled model calls them without a break. On an H200, 32 rows of 2048, 6 heads of 128, with gradient:
1.57 ms, cuDNN 1.77; a window of 512: 0.99 ms, FlexAttention 1.64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.device.attention import Ints, Sdpa
from ascendchat.device.packages import PackagedKernel

USUAL_LENGTH = 256  # tokens of a document: what there is room for before the first text is seen
FEW_ROWS = 8  # up to so many rows, a compiled decoding step uses the kernel of triton_attention.py


class Flash(Sdpa):
    """Rows of training: the package flash-attn-4, if it is there; else cuDNN or flash through SDPA, and for windows
    FlexAttention where the model is compiled (H200, 512 of 2048, with gradient: 1.64 ms; flash: 1.91). Prompts have any
    length, for each of which cuDNN makes a plan (38 ms on an H200): they go to torch's flash kernel. Decoding:
    triton_attention.py; SDPA without Triton."""

    name = "flash"

    def __init__(self) -> None:
        self.triton = find_spec("triton") is not None
        self.packaged = 0
        self.blocks: dict[tuple[int, int], Any] = {}  # (row length, window) -> FlexAttention's block mask
        self.room = 0  # documents that the bounds of a batch have room for

    @property
    def overlaps(self) -> bool:
        """Programmatic dependent launch: a kernel may begin while the one before it runs; new in Triton too."""
        return torch.cuda.get_device_capability() >= (9, 0) and find_spec("triton.language.extra.cuda.gdc") is not None

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        self.packaged = MAX_CHANNELS if package_refusal(device) is None else 0
        for window in set(windows):
            if window < length and (length, window) not in self.blocks and device.type == "cuda":
                self.blocks[length, window] = window_blocks(length, window, device)

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
        if (capability := torch.cuda.get_device_capability()) < (8, 0):
            has = ".".join(map(str, capability))
            return f"it needs compute capability 8.0, {torch.cuda.get_device_name()} has {has}"
        if head_dim > 256 or head_dim % 8:
            return f"head_dim {head_dim} is not a multiple of 8 up to 256"
        return None

    def notice(self, head_dim: int) -> str | None:
        refusal = package_refusal(torch.device("cuda"))
        if refusal is None and head_dim > MAX_CHANNELS:
            refusal = f"a head of {head_dim} channels is above {MAX_CHANNELS}"
        return PACKAGE.notice(refusal)

    def _uses_package(self, q: Tensor) -> bool:
        trains = torch.compiler.is_compiling() or torch.is_grad_enabled()
        return trains and q.size(-1) <= self.packaged

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        if self._uses_package(q):
            return attend(q, k, v, window, scale)
        compiling = torch.compiler.is_compiling()
        if (compiling or torch.is_grad_enabled()) and window >= k.size(1):
            return super().dense(q, k, v, window, scale)
        if compiling and (blocks := self.blocks.get((q.size(1), window))) is not None:
            from torch.nn.attention.flex_attention import flex_attention

            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            y: Any = flex_attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=q.size(1) != k.size(1))
            return y.transpose(1, 2)

        return flash(q, k, v, None, q.size(1), window, scale)

    def bounds(self, lengths: Ints, rows: int, per_document: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        """(room + 1,) int32 on the device: 0 and the end of each document, then documents without tokens. Each takes
        blocks of the launch and memory of the gradient, so there is room for twice as many as were ever seen, and for
        one in USUAL_LENGTH tokens, up to the next power of two: a batch with more compiles once again."""
        if len(lengths) > self.room:
            count = max(2 * len(lengths), int(lengths.sum()) // USUAL_LENGTH)
            self.room = 1 << (count - 1).bit_length()
        bounds = np.full(self.room + 1, lengths.sum(), np.int32)
        bounds[0], bounds[1 : len(lengths) + 1] = 0, np.cumsum(lengths)
        return upload(torch.from_numpy(bounds))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        if self._uses_package(q):
            return attend(q, k, v, window, scale, bounds)

        a, b, c = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        return flash(a, b, c, bounds, q.size(1), window, scale).view(q.shape)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if q.size(1) > 1 and not compiling:
            return behind(q, k, v, lengths, window, scale)
        if q.size(1) > 1 or window < k.size(1) or not self.triton:
            return super().cached(q, k, v, lengths, window, scale)
        if q.size(0) > FEW_ROWS and compiling:
            return decode_by_products(q, k, v, lengths, scale)
        from ascendchat.device.triton_attention import one_query

        return one_query(q, k, v, lengths, scale)


def window_mask_mod(window: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """FlexAttention's mask_mod: a query sees a key."""
    return (query >= key) & (query - key < window)


def window_blocks(length: int, window: int, device: torch.device, size: int = 128) -> Any:
    """The block mask of FlexAttention for rows of `length` that see `window` tokens back. `create_block_mask` finds the
    same, but makes the mask of every token first: 34 GB of whole numbers for rows of 65,536."""
    from torch.nn.attention.flex_attention import BlockMask

    number = torch.arange(-(-length // size), device=device)
    distance = (number[:, None] - number) * size  # from the first token of a block of queries back to that of its keys
    partly = (distance >= 0) & (distance - size + 1 < window)
    wholly = (distance > 0) & (distance + size - 1 < window) & ((number[:, None] + 1) * size <= length)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Count of each row's blocks, and their numbers; the other numbers follow."""
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(dim=-1, dtype=torch.int32)[None, None], order.int()[None, None]

    some, full = listed(partly & ~wholly), listed(wholly)
    rule = partial(window_mask_mod, window)
    return BlockMask.from_kv_blocks(*some, *full, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(length, length))


def decode_by_products(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One query per row (B, 1, H, D) as products and sums, which a compiler turns into two passes over the memory of
    the cache: 160,696 tokens/s at batch 256 on an H200. With few rows its many launches cost more than the reading."""
    heads, groups = k.size(2), q.size(2) // k.size(2)
    query = q.float().view(q.size(0), 1, heads, groups, q.size(3))
    scores = (query * k.float()[:, :, :, None]).sum(-1) * scale  # (B, S, K, G)
    held = torch.arange(k.size(1), device=k.device)[None, :] < lengths[:, None]
    weights = scores.masked_fill(~held[:, :, None, None], float("-inf")).softmax(dim=1)
    out = (weights[..., None] * v.float()[:, :, :, None]).sum(1)  # (B, K, G, D)
    return out.view(q.shape).to(q.dtype)


# torch's flash kernel with what scaled_dot_product_attention does not expose: windows, and documents end to end.
#
#     flash(q, k, v, None, T, window, scale)            # rows (B, T, H, D)
#     flash(q, k, v, bounds, longest, window, scale)   # documents (N, H, D); bounds (documents + 1,) int32, from 0 to N
#     behind(q, k, v, lengths, window, scale)           # new queries (B, Tq, H, D), a cache (B, S, K, D); no gradient
#     banded(q, k, v, None, None, Tq, Tk, left, right, scale)    # other lengths of queries and keys; also the logsumexp
#
# Used by the kernel `flash` and by nn/flash_attend.py. It is an operator of its own, which a
# compiler calls as it is: what torch's version of it returns besides the result differs between versions, and only the
# result and the normaliser matter without dropout. Documents may have no tokens, so the bounds can have the same size
# for every batch.

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
    arguments = (q_bounds, k_bounds, q_longest, k_longest, 0.0, right == 0, False)  # no dropout, causal?, no debug mask
    result = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, **_limits(left, right, scale))
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
    arguments = (q_bounds, k_bounds, q_longest, k_longest, 0.0, right == 0, random, random)
    tensors = (grad.contiguous(), q, k, v, out, normaliser)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(*tensors, *arguments, **_limits(left, right, scale))
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
    """Causal attention; a query sees `window` keys, its own among them. Without a compiler or a gradient, the operator
    is left out: its first call imports torch's compiler, for which a chat would wait 2.5 s."""
    left = window - 1 if window < longest else -1
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    attend = _flash if learns or torch.compiler.is_compiling() else _run
    return attend(q, k, v, bounds, bounds, longest, longest, left, 0, scale)[0]


def behind(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
    """Row b holds lengths[b] keys, and its queries are the last of them; each sees `window`, its own among them."""
    (rows, queries), keys = q.shape[:2], k.size(1)
    row = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    arguments = (row * queries, row * keys, queries, keys, 0.0, True, False)  # no dropout, causal, no debug mask
    limits = _limits(window - 1 if window < keys else -1, 0, scale)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(*flat, *arguments, **limits, seqused_k=lengths.int())[0]
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


# Rows of training by the package flash-attn-4.
#
#     y = attend(q, k, v, window, scale)     # (B, T, H, D), (B, T, K, D): causal, `window` tokens back; with gradients
#     y = attend(q, k, v, window, scale, bounds)    # the same, but each document sees only itself: Flash.bounds

MAX_CHANNELS = 128  # of a head; larger ones were not timed
SEEN = {"causal", "window_size_left", "window_size_right"}
DOCUMENTS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
PACKAGE = PackagedKernel(
    "flash-attn-4",
    "rows of training are read by",
    module="flash_attn.cute.interface",
    calls={
        "_flash_attn_fwd": {"softmax_scale", "return_lse", *SEEN, *DOCUMENTS},
        "_flash_attn_bwd": {"deterministic", *SEEN, *DOCUMENTS},
    },
    cache="FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    environment={"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"},
)


def package_refusal(device: torch.device) -> str | None:
    """Why the package does not run on this device, or None."""
    if (refusal := PACKAGE.refusal(device)) is not None:
        return refusal
    unsteady = torch.cuda.get_device_capability(device) >= (12, 0) and torch.are_deterministic_algorithms_enabled()
    return "its gradient is not deterministic on this chip" if unsteady else None


def _limits_of_package(bounds: Tensor | None, longest: int, window: int) -> dict[str, Any]:
    """Arguments that limit what a query sees; `bounds`: where documents end, (documents + 1,)."""
    limits: dict[str, Any] = {"causal": True}
    if window < longest:
        limits = {"causal": False, "window_size_left": window - 1, "window_size_right": 0}
    if bounds is not None:
        limits |= {f"cu_seqlens_{side}": bounds for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    return limits


@torch.library.custom_op("ascendchat::packaged_attention", mutates_args=())
def _package_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, longest: int, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows (B, T, H, D) without bounds, documents end to end (N, H, D) with them."""
    how = _limits_of_package(bounds, longest, window) | {"softmax_scale": scale, "return_lse": True}
    y, logsumexp, *_ = PACKAGE.functions._flash_attn_fwd(q, k, v, **how)
    return y, logsumexp


@_package_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    size = (q.size(1), q.size(0)) if bounds is not None else (q.size(0), q.size(2), q.size(1))
    return q.new_empty(q.shape), q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("ascendchat::packaged_attention_back", mutates_args=())
def _package_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    y: Tensor,
    logsumexp: Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With torch.use_deterministic_algorithms the same bits at every call, 6 % slower on an H200."""
    how = _limits_of_package(bounds, longest, window) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    dq, dk, dv = PACKAGE.functions._flash_attn_bwd(q, k, v, y, grad.contiguous(), logsumexp, scale, **how)
    return dq, dk, dv


@_package_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)  # strides as those of the package


def _keep_for_package(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.rest = inputs[4:]


def _package_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_package_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 4


_package_forward.register_autograd(_package_gradients, setup_context=_keep_for_package)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None = None) -> Tensor:
    """Rows (B, T, H, D) by the package, causal and `window` tokens back; with `bounds` each document sees itself."""
    longest, flat = q.size(1), (q, k, v)
    if bounds is not None:
        flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    y: Tensor = _package_forward(*flat, bounds, longest, window, scale)[0]
    return y.view(q.shape)
