"""Every operator of ours against float64 on the CPU, in the shapes of training: items of `ascendchat selftest`.

Inputs are drawn on the host and rounded to the device's dtype first; the reference computes with the rounded ones.
An error counts in shares of the largest value of its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ascendchat.device import Device
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import Attention, choose, documents, same, visible
from ascendchat.nn.flash_attend import flash_attn_varlen_func
from ascendchat.nn.gpt import Ops, PlainOps, rope_tables, shifted
from ascendchat.nn.loss import SOFTCAP, head_loss
from ascendchat.nn.optim import adamw_update, muon_update
from ascendchat.sizes.shape import Shape

LIMITS = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # float32: some chips multiply with 10 bits
MUON_LIMIT = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}  # of the size of the update: five rounds
ADAMW_LIMIT = 1e-3


class Wrong(Exception):
    """What did not hold."""


class Skip(Exception):
    """Why an item cannot be tried here."""


@dataclass
class Bench:
    """The device under test, and numbers to try it with."""

    device: Device
    place: torch.device
    quick: bool
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def shape(self) -> Shape:
        """Heads and widths of depth 12, or of 4."""
        return Shape.from_depth(4 if self.quick else 12)

    @property
    def length(self) -> int:
        return 320 if self.quick else 2048

    @property
    def ops(self) -> Ops:
        made: Ops | None = self.device.operators()
        return made or PlainOps()

    def drawn(self, *size: int, scale: float = 1.0) -> Tensor:
        """On the host, in the device's dtype."""
        return torch.randn(size, generator=self.generator).mul(scale).to(self.device.dtype)

    def kernel(self, decodes: bool = False) -> tuple[Attention, str]:
        return choose(self.device.type, self.device.dtype, self.shape.head_dim, decodes=decodes)


def error_of(name: str, found: Tensor, right: Tensor, limit: float) -> float:
    """The largest error in shares of the largest value; Wrong when it is above the limit, or not a number."""
    found = found.detach().cpu().double()
    error = float((found - right).abs().max() / right.abs().max().clamp_min(1e-30))
    if not error <= limit:
        what = f"off by {error:.2g} of the largest value, {limit:g} is allowed" if error == error else "nan"
        raise Wrong(f"{name}: {what}")
    return error


def against_float64(
    bench: Bench,
    name: str,
    on_device: Callable[..., Tensor],
    exactly: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    gradients: bool = True,
) -> dict[str, float]:
    """The largest error of the result, and of the gradients of all inputs."""
    towards: Tensor | None = None
    results: list[list[Tensor]] = []
    for function, moved in ((exactly, lambda x: x.double()), (on_device, lambda x: x.to(bench.place))):
        leaves = [moved(x).detach().requires_grad_(gradients) for x in inputs]
        out = function(*leaves)
        if gradients:
            if towards is None:
                towards = bench.drawn(*out.shape) if out.dim() else torch.ones(())
            out.backward(moved(towards).to(out.dtype))
        results.append([out.detach(), *(x.grad for x in leaves if x.grad is not None)])
    limit = LIMITS[bench.device.dtype]
    names = [name, *(f"gradient {number} of {name}" for number in range(1, len(results[0])))]
    errors = [error_of(*one, limit) for one in zip(names, results[1], results[0])]
    return {name: round(max(errors), 6)}


def norm(bench: Bench) -> dict[str, Any]:
    """RMSNorm over the width, and over the channels of a head."""
    shape, plain = bench.shape, PlainOps()
    rows, heads = bench.drawn(2, bench.length, shape.dim), bench.drawn(1, bench.length, shape.heads, shape.head_dim)
    return against_float64(bench, "norm of rows", bench.ops.rms_norm, plain.rms_norm, [rows]) | against_float64(
        bench, "norm of heads", bench.ops.rms_norm, plain.rms_norm, [heads]
    )


def rotary(bench: Bench) -> dict[str, Any]:
    """Rotations of queries and keys."""
    shape, ops, dtype = bench.shape, bench.ops, bench.device.dtype
    mine = [table.to(bench.place, dtype) for table in rope_tables(bench.length, shape.head_dim, ops.sin_sign)]
    right = [table.to(dtype).double() for table in rope_tables(bench.length, shape.head_dim)]
    heads = bench.drawn(2, bench.length, shape.heads, shape.head_dim)
    return against_float64(
        bench, "rotary", lambda x: ops.rotary(x, *mine), lambda x: PlainOps().rotary(x, *right), [heads]
    )


def block(bench: Bench) -> dict[str, Any]:
    """The other operators of a layer: products, gates, residual weights, ReLU², and the share of the token before."""
    shape, ops, plain = bench.shape, bench.ops, PlainOps()
    x, y = (bench.drawn(2, bench.length, shape.dim) for _ in range(2))
    up, down = (bench.drawn(shape.mlp_dim, shape.dim, scale=0.03) for _ in range(2))
    narrow, one = bench.drawn(1, 24, scale=0.1), bench.drawn(1)
    gate, most = bench.drawn(2, bench.length, shape.kv_heads), shape.constants.gate_range
    v, value = (bench.drawn(2, bench.length, shape.kv_heads, shape.head_dim) for _ in range(2))
    pairs: dict[str, tuple[Callable[[Ops], Callable[..., Tensor]], list[Tensor]]] = {
        "linear": (lambda by: by.linear, [x, up]),
        "MLP": (lambda by: by.mlp, [x, up, down]),
        "gate": (lambda by: by.gate, [x[..., :24].contiguous(), narrow]),
        "smear": (lambda by: by.smear, [x, narrow, one]),
        "gated values": (lambda by: lambda v, gate, value: by.gated(v, gate, value, most), [v, gate, value]),
        "sum and norm": (lambda by: lambda *z: by.add_norm(*z)[1], [x, y]),
        "mix": (lambda by: lambda x, y, r, s: by.mix(x, y, tuple(by.mixing(r, s, x.dtype)[0]))[0], [x, y, one, -one]),
    }
    found: dict[str, Any] = {}
    for name, (operator, inputs) in pairs.items():
        found |= against_float64(bench, name, operator(ops), operator(plain), inputs)
    heads = shape.heads + 2 * shape.kv_heads
    qkv, share = bench.drawn(2, bench.length, heads, shape.head_dim), bench.drawn(heads, shape.head_dim)

    def exact_shift(qkv: Tensor, share: Tensor) -> Tensor:
        return qkv + F.pad(qkv[:, :-1], (0, 0, 0, 0, 1, 0)) * share

    return found | against_float64(bench, "shift", lambda a, b: shifted(0, a, b), exact_shift, [qkv, share])


def exact_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """In the dtype given; (B, Tq, H, D), (B, T, K, D), and a mask that is broadcast to (B, H, Tq, T)."""
    group = q.size(-2) // k.size(-2)
    k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, float("-inf")).softmax(dim=-1), v)


def rows_of_heads(bench: Bench, rows: int = 1) -> list[Tensor]:
    """Queries, keys and values."""
    shape = bench.shape
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [bench.drawn(rows, bench.length, number, shape.head_dim) for number in heads]


def attention(bench: Bench) -> dict[str, Any]:
    """Whole rows, and a window of a quarter of them, forward and backward."""
    kernel, _ = bench.kernel()
    length, scale = bench.length, bench.shape.head_dim**-0.5
    found: dict[str, float] = {}
    kernel.prepare(length, [length, length // 4], bench.place)
    for window in (length, length // 4):
        mask = visible(length, length, window, torch.device("cpu"))
        found |= against_float64(
            bench,
            f"{kernel.name}, window {window}",
            lambda q, k, v, window=window: kernel.dense(q, k, v, window, scale),
            lambda q, k, v, mask=mask: exact_attention(q, k, v, mask, scale),
            rows_of_heads(bench),
        )
    return found


def packed(bench: Bench) -> dict[str, Any]:
    """Documents of many lengths in one row, each of which sees only itself."""
    kernel, _ = bench.kernel()
    length, scale = bench.length, bench.shape.head_dim**-0.5
    cuts = [1, 2, 65, length // 4, length // 2 + 3]
    lengths = np.diff([0, *cuts, length]).astype(np.int32)
    number = torch.from_numpy(np.arange(len(lengths)).repeat(lengths))[None]
    mask = visible(length, length, length, torch.device("cpu")) & same(number, number)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=bench.place)
    kernel.prepare(length, [length], bench.place)
    bounds = documents(kernel, lengths, tokens, bench.device.dtype).bounds
    return against_float64(
        bench,
        f"{kernel.name}, documents",
        lambda q, k, v: kernel.packed(q, k, v, bounds, length, scale),
        lambda q, k, v: exact_attention(q, k, v, mask, scale),
        rows_of_heads(bench),
    )


def logsumexps(bench: Bench) -> dict[str, Any]:
    """Those of documents in one row, which CANN lays down in an order of its own."""
    heads, dim = bench.shape.heads, bench.shape.head_dim
    bounds = [0, 1, 3, 68, bench.length // 2, bench.length]
    q, k, v = (x[0] for x in rows_of_heads(bench))
    ends, longest = torch.tensor(bounds, dtype=torch.int32, device=bench.place), int(np.diff(bounds).max())
    ask, key, value = (x.to(bench.place) for x in (q, k, v))
    options: Any = {"causal": True, "return_attn_probs": True}
    found = flash_attn_varlen_func(ask, key, value, ends, ends, longest, longest, **options)[1]
    keys = k.double().repeat_interleave(heads // k.size(1), 1)
    right = torch.empty(heads, bench.length, dtype=torch.float64)
    for a, b in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), keys[a:b]) * dim**-0.5
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        right[:, a:b] = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    name = "log-sum-exp of documents"
    return {name: round(error_of(name, found, right, LIMITS[bench.device.dtype]), 6)}


def losses(bench: Bench) -> dict[str, Any]:
    """Head, softcap and cross-entropy in one, with targets that are not scored."""
    rows, vocab = (96, 2000) if bench.quick else (512, 32768)
    dim = bench.shape.dim
    hidden, head = bench.drawn(rows, dim), bench.drawn(vocab + 48, dim, scale=0.1)  # the head is padded
    targets = torch.randint(0, vocab, (rows,), generator=bench.generator)
    targets[::7] = IGNORE

    def exactly(hidden: Tensor, head: Tensor) -> Tensor:
        logits = SOFTCAP * torch.tanh(hidden @ head[:vocab].t() / SOFTCAP)
        return F.cross_entropy(logits, targets, ignore_index=IGNORE)

    there = targets.to(bench.place)
    return against_float64(bench, "head loss", lambda a, b: head_loss(a, b, there, vocab), exactly, [hidden, head])


def optimizer(bench: Bench) -> dict[str, Any]:
    """Three steps of Muon and of AdamW from the same state."""
    shape = (2, 64, 160) if bench.quick else (2, bench.shape.dim, bench.shape.mlp_dim)
    weight, grads = torch.randn(shape, generator=bench.generator) * 0.02, []
    for _ in range(3):
        grads.append(torch.randn(shape, generator=bench.generator) * 1e-3)

    def muon(place: torch.device, dtype: torch.dtype) -> Tensor:
        here = weight.to(place, copy=True)
        first, second = torch.zeros_like(here), here.new_zeros(*shape[:2], 1)
        factor = here.new_ones(shape[0], 1, 1)
        for grad in grads:
            rates = {"lr": 0.02, "momentum": 0.9, "decay": 0.1, "beta2": 0.9}
            muon_update(here, grad.to(place), first, second, factor, dtype=dtype, **rates)
        return here.cpu().double() - weight

    def adamw(place: torch.device, wide: torch.dtype, fused: bool) -> Tensor:
        here = weight.flatten().to(place, wide, copy=True)
        first, second, count = torch.zeros_like(here), torch.zeros_like(here), here.new_zeros(())
        for grad in grads:
            flat = grad.flatten().to(place, wide)
            count += 1
            adamw_update(here, flat, first, second, count, lr=0.01, betas=(0.8, 0.95), decay=0.1, fused=fused)
        return here.cpu().double() - weight.flatten()

    host, dtype, device = torch.device("cpu"), bench.device.dtype, bench.device
    right, found = muon(host, torch.float64), muon(bench.place, dtype)  # products in float64
    far = float((found - right).norm() / right.norm())
    if not far <= MUON_LIMIT[dtype]:
        raise Wrong(f"muon: the update is {far:.2g} of its size from the right one, {MUON_LIMIT[dtype]:g} is allowed")
    found, right = adamw(bench.place, torch.float32, device.chip.fused_adamw), adamw(host, torch.float64, False)
    return {"muon": round(far, 6), "adamw": round(error_of("adamw", found, right, ADAMW_LIMIT), 6)}
