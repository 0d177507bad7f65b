"""Attention behind one FlashAttention-shaped interface; a kernel is chosen once, by name, and says why.

    kernel, why = choose("npu", torch.bfloat16, head_dim=128)   # or name="reference"
    kernel.dense(q, k, v, window, scale)             # (B, T, H, D), (B, T, K, D): causal, `window` tokens back
    kernel.packed(q, k, v, bounds, window, scale)    # the same, but each document sees only itself
    kernel.cached(q, k, v, lengths, window, scale)   # few new queries (B, Tq, H, D) behind a cache (B, S, K, D)
    kernel.one_query(q, k, v, held, scale)           # one (B, 1, H, D); row b sees its first held[b] keys

`window` counts the token itself: 1 sees only itself, T or more sees everything. Queries are aligned to the last key.
A kernel that was asked for and cannot run is an error; nothing falls back silently. `bounds` says where documents end:

    bounds = documents(kernel, lengths, tokens, dtype).bounds    # once per batch (B, T), for all layers

| FlashAttention       | npu_fusion_attention                   | note                                            |
|----------------------|----------------------------------------|-------------------------------------------------|
| dropout_p            | keep_prob = 1 - p                      | not used here                                   |
| causal               | sparse_mode 3 and the 2048×2048 mask   | without a mask all tokens see each other        |
| window_size (W-1, 0) | sparse_mode 4, pre W-1, next 0         | same mask; the arguments are spelt `tockens`    |
| softmax_scale        | scale                                  | its default is 1.0, not 1/sqrt(D)               |
| cu_seqlens           | actual_seq_qlen, actual_seq_kvlen      | host list, cumulative, no leading 0, layout TND |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ascendchat.errors import UserError
from ascendchat.nn.model import Attend, Documents, LanguageModel

PER_DOCUMENT = 8192  # on a CPU, row length × mean document length from which a call per document pays: docs/log.md
HIDDEN = -1e30  # the score of a key that is not seen, where an infinity would count as overflow
USUAL_LENGTH = 256  # tokens of a document: what there is room for before the first text is seen
FEW_ROWS = 8  # up to so many rows, a compiled decoding step uses the kernel of triton_decoding.py

Ints = NDArray[np.int32]


class Attention(Protocol):
    """One kernel."""

    name: str
    slices: bool  # `cached` reads a slice of a longer cache in place; otherwise give it whole rows
    host_lengths: bool  # decoding says on the host how many keys each row holds: `one_query` instead of `cached`
    by_position: bool  # `cached` is told how many tokens a row has had, even where a ring holds the last of them only
    compiles_packed: bool  # `bounds` of every batch look alike to a compiler, so that `packed` is compiled only once

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        """Why this kernel cannot run there, or None. `decodes`: it is to read caches too."""

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        """Make what the rows to come need and what must not be made inside a compiled or captured region."""

    def bounds(self, lengths: Ints, rows: int, one_by_one: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        """What `packed` wants to know of documents of these lengths, which fill `rows` rows. `one_by_one`: a call per
        document costs less here than masked rows."""

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor: ...
    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor: ...
    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor: ...
    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor: ...


class Reference:
    """Every score at once, softmax in float32: the definition the other kernels are tested against."""

    name = "reference"
    slices = True
    host_lengths = False
    by_position = False
    compiles_packed = True

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        return None

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        """Nothing to make."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        group = q.size(-2) // k.size(-2)
        k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, number: Tensor | None, window: int, scale: float) -> Tensor:
        """Over whole rows; where the tokens have the number of their document (B, T), only within that."""
        mask = visible(q.size(1), k.size(1), window, q.device)
        return self._attend(q, k, v, mask if number is None else mask & same(number, number), scale)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        return self._rows(q, k, v, None, window, scale)

    def bounds(self, lengths: Ints, rows: int, one_by_one: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        if one_by_one:
            return tuple(lengths.tolist())
        return upload(torch.from_numpy(np.arange(len(lengths), dtype=np.int32).repeat(lengths).reshape(rows, -1)))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        if isinstance(bounds, Tensor):
            return self._rows(q, k, v, bounds, window, scale)
        parts = zip(*(x.flatten(0, 1).split(bounds) for x in (q, k, v)))
        return torch.cat([self.dense(a[None], b[None], c[None], window, scale)[0] for a, b, c in parts]).view(q.shape)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor:
        return self.cached(q, k, v, torch.tensor(held, device=q.device), k.size(1), scale)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        return self._attend(q, k, v, cache_mask(q.size(1), k.size(1), lengths, window), scale)


class Sdpa(Reference):
    """torch's scaled_dot_product_attention; windows are cut into blocks, so that no full T × T mask ever exists."""

    name = "sdpa"

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        if device_type == "npu" and not torch.npu.is_bf16_supported():  # type: ignore[attr-defined]
            return "it hides keys with -inf, which this chip reports as overflow"
        return None

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, number: Tensor | None, window: int, scale: float) -> Tensor:
        length = q.size(1)
        if length != k.size(1):
            return self._call(q, k, v, visible(length, k.size(1), window, q.device), scale)
        if number is None and window >= length:
            return self._call(q, k, v, None, scale)
        parts = []
        for start in range(0, length, window):  # a block of queries sees its own keys and the block before
            stop, left = min(start + window, length), max(0, start - window + 1)
            mask = visible(stop - start, stop - left, window, q.device)
            if number is not None:
                mask = mask & same(number[:, start:stop], number[:, left:stop])
            parts.append(self._call(q[:, start:stop], k[:, left:stop], v[:, left:stop], mask, scale))
        return torch.cat(parts, dim=1)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        return self._call(q, k, v, cache_mask(q.size(1), k.size(1), lengths, window), scale)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        grouped = q.size(2) != k.size(2)
        if grouped and q.device.type == "npu":  # torch_npu 2.7.1 forgets enable_gqa on the way to its plain path
            group, grouped = q.size(2) // k.size(2), False
            k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return y.transpose(1, 2)


class Eager(Sdpa):
    """Products in the compute dtype, softmax in float32, hidden keys at a finite number: for chips that saturate."""

    name = "eager"

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        return None

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if mask is None:
            mask = visible(q.size(1), k.size(1), k.size(1), q.device)
        q = (q * scale).unflatten(2, (k.size(2), -1)).permute(0, 2, 3, 1, 4)  # (B, K, H/K, Tq, D)
        k, v = k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)  # (B, K, 1, T, D)
        hidden = ~(mask if mask.dim() == 2 else mask.unsqueeze(1))
        scores = (q @ k.mT).float().masked_fill(hidden, HIDDEN)
        y = scores.softmax(dim=-1).to(v.dtype) @ v
        return y.permute(0, 3, 1, 2, 4).flatten(2, 3)


class Flash(Sdpa):
    """CUDA: for rows of training the package flash-attn-4, if it is there; else cuDNN or flash through SDPA, and for
    windows FlexAttention where the model is compiled (H200, 512 of 2048, with gradient: 1.64 ms; flash: 1.91). Prompts
    have any length, for each of which cuDNN makes a plan (38 ms on an H200): they go to torch's flash kernel. Decoding:
    triton_decoding.py; SDPA without Triton."""

    name = "flash"

    def __init__(self) -> None:
        self.triton = find_spec("triton") is not None
        self.packaged = 0  # channels of a head up to which device/cuda_attention.py runs here
        self.blocks: dict[tuple[int, int], Any] = {}  # (row length, window) -> FlexAttention's block mask
        self.room = 0  # documents that the bounds of a batch have room for

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may begin while the one before it runs: programmatic dependent launch, new in Triton too."""
        return torch.cuda.get_device_capability() >= (9, 0) and find_spec("triton.language.extra.cuda.gdc") is not None

    def prepare(self, length: int, windows: Sequence[int], device: torch.device) -> None:
        from ascendchat.device.cuda_attention import CHANNELS, usable

        self.packaged = CHANNELS if usable(device) else 0
        for window in set(windows):
            if window < length and (length, window) not in self.blocks and device.type == "cuda":
                self.blocks[length, window] = window_blocks(length, window, device)

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        if device_type != "cuda":
            return f"it needs a CUDA device, this is {device_type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
        if (capability := torch.cuda.get_device_capability()) < (8, 0):
            has = ".".join(map(str, capability))
            return f"it needs compute capability 8.0, {torch.cuda.get_device_name()} has {has}"
        if head_dim > 256 or head_dim % 8:
            return f"head_dim {head_dim} is not a multiple of 8 up to 256"
        return None

    def _asks_package(self, q: Tensor) -> bool:
        trains = torch.compiler.is_compiling() or torch.is_grad_enabled()
        return trains and q.size(-1) <= self.packaged

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        if self._asks_package(q):
            from ascendchat.device.cuda_attention import attend

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

    def bounds(self, lengths: Ints, rows: int, one_by_one: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        """(room + 1,) int32 on the device: 0 and the end of each document, then documents without tokens. Each takes
        blocks of the launch and memory of the gradient, so there is room for twice as many as were ever seen, and for
        one in USUAL_LENGTH tokens, up to the next power of two: a batch with more compiles once again."""
        if len(lengths) > self.room:
            wanted = max(2 * len(lengths), int(lengths.sum()) // USUAL_LENGTH)
            self.room = 1 << (wanted - 1).bit_length()
        bounds = np.full(self.room + 1, lengths.sum(), np.int32)
        bounds[0], bounds[1 : len(lengths) + 1] = 0, np.cumsum(lengths)
        return upload(torch.from_numpy(bounds))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        if self._asks_package(q):
            from ascendchat.device.cuda_attention import attend

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
            return products(q, k, v, lengths, scale)
        from ascendchat.nn.triton_decoding import one_query

        return one_query(q, k, v, lengths, scale)


@cache
def causal_mask(device: torch.device) -> Tensor:
    """The one 2048×2048 mask that the NPU's compressed sparse modes read, True = hidden; whatever the row length."""
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), diagonal=1)


class NpuFusion:
    """Ascend: npu_fusion_attention for training, npu_fused_infer_attention_score for decoding."""

    name = "npu_fusion"
    slices = False  # the fused kernels want contiguous keys: a slice would be copied at every step
    host_lengths = True
    by_position = False
    compiles_packed = False  # its bounds are numbers on the host: each batch would be compiled anew
    MAX_DOCUMENTS: ClassVar[int] = 1024  # in one call: CANN's limit on the list of bounds

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        if device_type != "npu":
            return f"it needs an Ascend NPU, this is {device_type}"
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

    def bounds(self, lengths: Ints, rows: int, one_by_one: bool, upload: Callable[[Tensor], Tensor]) -> Any:
        """One entry per call: the ends of its documents, counted from its first token, and the longest of them."""
        groups = [lengths[i : i + self.MAX_DOCUMENTS] for i in range(0, len(lengths), self.MAX_DOCUMENTS)]
        return [(np.cumsum(group).tolist(), int(group.max())) for group in groups]

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        import torch_npu

        parts = zip(*(x.flatten(0, 1).split([ends[-1] for ends, _ in bounds]) for x in (q, k, v)))
        attended = []
        for (a, b, c), (ends, longest) in zip(parts, bounds):
            known = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, **self._sparse(window, longest, q.device)}
            attended.append(torch_npu.npu_fusion_attention(a, b, c, q.size(2), "TND", scale=scale, **known)[0])
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).view(q.shape)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor:
        import torch_npu

        heads = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "input_layout": "BSND"}
        known = {"actual_seq_lengths_kv": list(held), "scale": scale, **heads}  # device/npu.py updates them in graphs
        return torch_npu.npu_fused_infer_attention_score(q.contiguous(), k.contiguous(), v.contiguous(), **known)[0]

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        import torch_npu

        mask = ~cache_mask(q.size(1), k.size(1), lengths, window)  # True = hidden
        heads = {"num_heads": q.size(2), "num_key_value_heads": k.size(2), "input_layout": "BSND"}
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return torch_npu.npu_fused_infer_attention_score(q, k, v, atten_mask=mask, scale=scale, **heads)[0]


REFERENCE = Reference()
KERNELS: dict[str, Attention] = {kernel.name: kernel for kernel in (NpuFusion(), Flash(), Sdpa(), Eager(), REFERENCE)}


def choose(
    device_type: str, dtype: torch.dtype, head_dim: int, name: str | None = None, *, decodes: bool = False
) -> tuple[Attention, str]:
    """The kernel and the sentence that says why it was chosen; the best that can run, or exactly the one asked for."""
    if name is not None:
        if name not in KERNELS:
            raise UserError(f"there is no attention kernel {name!r}; choose from: {', '.join(KERNELS)}")
        reason = KERNELS[name].refusal(device_type, dtype, head_dim, decodes)
        if reason:
            raise UserError(f"attention kernel {name} cannot run: {reason}; leave --attention out to let it be chosen")
        return KERNELS[name], f"attention: {name} (asked for)"
    refused: list[str] = []
    for kernel in KERNELS.values():
        reason = kernel.refusal(device_type, dtype, head_dim, decodes)
        if reason is None:
            why = f"; not {', '.join(refused)}" if refused else ""
            return kernel, f"attention: {kernel.name}{why}"
        refused.append(f"{kernel.name} ({reason})")
    raise AssertionError("the reference runs everywhere")


def dense(model: LanguageModel, kernel: Attention, seq_len: int | None = None) -> Attend:
    """Causal attention over whole rows, or within the documents of a batch; each layer with its window."""
    windows, scale = model.shape.windows(seq_len), model.scale
    kernel.prepare(seq_len or model.shape.seq_len, windows, model.head.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, bounds: Any = None) -> Tensor:
        if bounds is None:
            return kernel.dense(q, k, v, windows[layer], scale)
        return kernel.packed(q, k, v, bounds, windows[layer], scale)

    return attend


def documents(
    kernel: Attention,
    lengths: Ints,
    tokens: Tensor,
    dtype: torch.dtype,
    *,
    compiled: bool = False,
    pin: bool = False,
    restarts: bool = False,
) -> Documents:
    """Borders of the documents in a batch `tokens` (B, T), from their lengths, row after row.

    Made on the host once per batch, for all layers, and uploaded without waiting where memory can be pinned.
    `restarts`: the model counts positions from the beginning of each document.
    """

    def upload(made: Tensor) -> Tensor:
        return (made.pin_memory() if pin else made).to(tokens.device, non_blocking=pin)

    lengths = np.asarray(lengths, np.int32)
    continues_document = torch.ones(tokens.numel(), dtype=dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    continues_document[torch.from_numpy(starts)] = 0
    positions = torch.from_numpy(np.arange(tokens.numel()) - starts.repeat(lengths)) if restarts else None
    work = tokens.size(1) * tokens.numel() / len(lengths)  # a mask costs by the row, a call by the document
    one_by_one = tokens.device.type == "cpu" and not compiled and work >= PER_DOCUMENT
    bounds = kernel.bounds(lengths, len(tokens), one_by_one, upload)
    within = None if positions is None else upload(positions.view(tokens.shape))
    return Documents(upload(continues_document.view(tokens.shape)), bounds, within)


# Masks of attention, bool, True where a query sees a key.


def visible(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys) bool, True where a query sees a key; the last query is aligned to the last key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def cache_mask(queries: int, keys: int, lengths: Tensor, window: int) -> Tensor:
    """(B, 1, queries, keys) bool: row b holds `lengths[b]` keys, and its queries are the last of them."""
    position = lengths[:, None] - queries + torch.arange(queries, device=lengths.device)  # (B, queries)
    distance = position[:, :, None] - torch.arange(keys, device=lengths.device)
    return ((distance >= 0) & (distance < window))[:, None]


def same(queries: Tensor, keys: Tensor) -> Tensor:
    """(B, 1, queries, keys) bool from the numbers of their documents (B, queries) and (B, keys)."""
    return queries[:, None, :, None] == keys[:, None, None, :]


def inside(window: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether a query sees a key, as FlexAttention asks."""
    return (query >= key) & (query - key < window)


def window_blocks(length: int, window: int, device: torch.device, size: int = 128) -> Any:
    """The block mask of FlexAttention for rows of `length` that see `window` tokens back. `create_block_mask` finds the
    same, but makes the mask of every token first: 34 GB of whole numbers for rows of 65,536."""
    from torch.nn.attention.flex_attention import BlockMask

    number = torch.arange(-(-length // size), device=device)
    apart = (number[:, None] - number) * size  # from the first token of a block of queries back to that of its keys
    seen = (apart >= 0) & (apart - size + 1 < window)
    whole = (apart > 0) & (apart + size - 1 < window) & ((number[:, None] + 1) * size <= length)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """How many of each row, and which; the others follow."""
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(dim=-1, dtype=torch.int32)[None, None], order.int()[None, None]

    some, full = listed(seen & ~whole), listed(whole)
    rule = partial(inside, window)
    return BlockMask.from_kv_blocks(*some, *full, BLOCK_SIZE=size, mask_mod=rule, seq_lengths=(length, length))


# Whether a kernel decodes rightly on the device that is there: `decode_fault(kernel, plain, "npu", dtype, head_dim)`.
#
# A fused kernel can be wrong on one chip or driver without an error: one report has masks that are ignored from the
# 513th key on (vllm-ascend issue 15503). So a kernel that asks for it is compared with plain attention before it
# decodes for the first time: four rows around those lengths, and a few queries behind a cache. attention.py calls it.

LENGTHS = (1, 511, 513, 2048)  # keys that the rows hold, of 2,048 places
QUERIES = 16  # behind a cache of twice as many keys
TOLERANCE = 0.05  # of outputs around 1: bfloat16 rounds by 0.004, a key too many moves them by far more


@cache
def decode_fault(
    kernel: Attention, plain: Attention, device_type: str, dtype: torch.dtype, head_dim: int
) -> str | None:
    """What is wrong with the kernel, or None."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device_type, dtype)

    rows, scale, longest = len(LENGTHS), head_dim**-0.5, max(LENGTHS)
    q, k, v = drawn(rows, 1, 2, head_dim), drawn(rows, longest, 1, head_dim), drawn(rows, longest, 1, head_dim)
    for row, length in enumerate(LENGTHS):
        v[row, length:] = 8.0  # a key that must not be seen shows
    found, right = (one.one_query(q, k, v, LENGTHS, scale).float() for one in (kernel, plain))
    errors = (found - right).abs().amax(dim=(1, 2, 3)).tolist()
    for length, error in zip(LENGTHS, errors):
        if not error <= TOLERANCE:
            return f"it is wrong on this device with {length} keys, by {error:.2g}"
    q, k, v = drawn(2, QUERIES, 2, head_dim), drawn(2, 2 * QUERIES, 1, head_dim), drawn(2, 2 * QUERIES, 1, head_dim)
    held = torch.tensor([2 * QUERIES, QUERIES + 3], device=device_type)
    found, right = (one.cached(q, k, v, held, QUERIES, scale).float() for one in (kernel, plain))
    error = float((found - right).abs().max())
    return (
        None
        if error <= TOLERANCE
        else f"it is wrong on this device with {QUERIES} queries behind a cache, by {error:.2g}"
    )


# Attention of one new query per row as products and sums, for compilers: the kernel `flash` of attention.py.


def products(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One query per row (B, 1, H, D) as products and sums, which a compiler turns into two passes over the memory of
    the cache: 160,696 tokens/s at batch 256 on an H200. With few rows its many launches cost more than the reading."""
    heads, groups = k.size(2), q.size(2) // k.size(2)
    query = q.float().view(q.size(0), 1, heads, groups, q.size(3))
    scores = (query * k.float()[:, :, :, None]).sum(-1) * scale  # (B, S, K, G)
    there = torch.arange(k.size(1), device=k.device)[None, :] < lengths[:, None]
    weights = scores.masked_fill(~there[:, :, None, None], float("-inf")).softmax(dim=1)
    out = (weights[..., None] * v.float()[:, :, :, None]).sum(1)  # (B, K, G, D)
    return out.view(q.shape).to(q.dtype)


# torch's flash kernel with what scaled_dot_product_attention does not expose: windows, and documents end to end.
#
#     flash(q, k, v, None, T, window, scale)            # rows (B, T, H, D)
#     flash(q, k, v, bounds, longest, window, scale)   # documents (N, H, D); bounds (documents + 1,) int32, from 0 to N
#     behind(q, k, v, lengths, window, scale)           # new queries (B, Tq, H, D), a cache (B, S, K, D); no gradient
#     banded(q, k, v, None, None, Tq, Tk, left, right, scale)    # other lengths of queries and keys; also the logsumexp
#
# Used by the kernel `flash` of attention.py and by compat/flash.py, on CUDA. It is an operator of its own, which a
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
