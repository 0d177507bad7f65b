"""Items of `ascendchat selftest`: every operator of ours against float64 on the CPU, in the shapes of training.

Inputs are drawn on the host and rounded to the device's dtype first; the reference computes with the rounded ones.
Errors are relative to the largest value of a tensor.
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
# Relative to the size of the update; wider than LIMITS, for it goes through five rounds of matmuls.
MUON_LIMIT = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}
ADAMW_LIMIT = 1e-3


class Wrong(Exception):
    """An item did not hold; the text tells what was wrong."""


class Skip(Exception):
    """An item cannot be tried here; the text tells why."""


@dataclass
class SelftestBench:
    """The device under test, and random tensors to try it with."""

    device: Device
    torch_device: torch.device
    quick: bool
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def shape(self) -> Shape:
        """Model shape of depth 12; of depth 4 with --quick."""
        return Shape.from_depth(4 if self.quick else 12)

    @property
    def length(self) -> int:
        return 320 if self.quick else 2048

    @property
    def ops(self) -> Ops:
        fused: Ops | None = self.device.operators()
        return fused or PlainOps()

    def random_tensor(self, *size: int, scale: float = 1.0) -> Tensor:
        """Normal random numbers on the host, in the device's dtype."""
        return torch.randn(size, generator=self.generator).mul(scale).to(self.device.dtype)

    def kernel(self, decodes: bool = False) -> tuple[Attention, str]:
        return choose(self.device.type, self.device.dtype, self.shape.head_dim, decodes=decodes)


def relative_error(name: str, result: Tensor, expected: Tensor, limit: float) -> float:
    """Largest error, relative to the largest value; raises Wrong when it is above the limit, or not a number."""
    result = result.detach().cpu().double()
    error = float((result - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not error <= limit:
        what = f"off by {error:.2g} of the largest value, {limit:g} is allowed" if error == error else "nan"
        raise Wrong(f"{name}: {what}")
    return error


def against_float64(
    bench: SelftestBench,
    name: str,
    on_device: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    gradients: bool = True,
) -> dict[str, float]:
    """Compare an operator's result, and the gradients of all inputs, with float64; {name: largest relative error}."""
    grad_out: Tensor | None = None
    results: list[list[Tensor]] = []
    for function, moved in ((reference, lambda x: x.double()), (on_device, lambda x: x.to(bench.torch_device))):
        leaves = [moved(x).detach().requires_grad_(gradients) for x in inputs]
        out = function(*leaves)
        if gradients:
            if grad_out is None:
                grad_out = bench.random_tensor(*out.shape) if out.dim() else torch.ones(())
            out.backward(moved(grad_out).to(out.dtype))
        results.append([out.detach(), *(x.grad for x in leaves if x.grad is not None)])
    limit = LIMITS[bench.device.dtype]
    names = [name, *(f"gradient {number} of {name}" for number in range(1, len(results[0])))]
    errors = [relative_error(*one, limit) for one in zip(names, results[1], results[0])]
    return {name: round(max(errors), 6)}


def norm(bench: SelftestBench) -> dict[str, Any]:
    """Check RMSNorm over the width, and over the channels of a head."""
    shape, plain = bench.shape, PlainOps()
    rows, heads = (
        bench.random_tensor(2, bench.length, shape.dim),
        bench.random_tensor(1, bench.length, shape.heads, shape.head_dim),
    )
    return against_float64(bench, "norm of rows", bench.ops.rms_norm, plain.rms_norm, [rows]) | against_float64(
        bench, "norm of heads", bench.ops.rms_norm, plain.rms_norm, [heads]
    )


def rotary(bench: SelftestBench) -> dict[str, Any]:
    """Check the rotary embedding of queries and keys."""
    shape, ops, dtype = bench.shape, bench.ops, bench.device.dtype
    tables = [table.to(bench.torch_device, dtype) for table in rope_tables(bench.length, shape.head_dim, ops.sin_sign)]
    expected = [table.to(dtype).double() for table in rope_tables(bench.length, shape.head_dim)]
    heads = bench.random_tensor(2, bench.length, shape.heads, shape.head_dim)
    return against_float64(
        bench, "rotary", lambda x: ops.rotary(x, *tables), lambda x: PlainOps().rotary(x, *expected), [heads]
    )


def block(bench: SelftestBench) -> dict[str, Any]:
    """Check the other operators of a layer: matmuls, gates, residual weights, ReLU², and the token shift."""
    shape, ops, plain = bench.shape, bench.ops, PlainOps()
    x, y = (bench.random_tensor(2, bench.length, shape.dim) for _ in range(2))
    up, down = (bench.random_tensor(shape.mlp_dim, shape.dim, scale=0.03) for _ in range(2))
    narrow, scalar = bench.random_tensor(1, 24, scale=0.1), bench.random_tensor(1)
    gate, gate_range = bench.random_tensor(2, bench.length, shape.kv_heads), shape.constants.gate_range
    v, value = (bench.random_tensor(2, bench.length, shape.kv_heads, shape.head_dim) for _ in range(2))
    pairs: dict[str, tuple[Callable[[Ops], Callable[..., Tensor]], list[Tensor]]] = {
        "linear": (lambda by: by.linear, [x, up]),
        "MLP": (lambda by: by.mlp, [x, up, down]),
        "gate": (lambda by: by.gate, [x[..., :24].contiguous(), narrow]),
        "smear": (lambda by: by.smear, [x, narrow, scalar]),
        "gated values": (lambda by: lambda v, gate, value: by.gated(v, gate, value, gate_range), [v, gate, value]),
        "sum and norm": (lambda by: lambda *z: by.add_norm(*z)[1], [x, y]),
        "mix": (
            lambda by: lambda x, y, r, s: by.mix(x, y, tuple(by.mixing(r, s, x.dtype)[0]))[0],
            [x, y, scalar, -scalar],
        ),
    }
    errors: dict[str, Any] = {}
    for name, (operator, inputs) in pairs.items():
        errors |= against_float64(bench, name, operator(ops), operator(plain), inputs)
    heads = shape.heads + 2 * shape.kv_heads
    qkv, share = bench.random_tensor(2, bench.length, heads, shape.head_dim), bench.random_tensor(heads, shape.head_dim)

    def exact_shift(qkv: Tensor, share: Tensor) -> Tensor:
        return qkv + F.pad(qkv[:, :-1], (0, 0, 0, 0, 1, 0)) * share

    return errors | against_float64(bench, "shift", lambda a, b: shifted(0, a, b), exact_shift, [qkv, share])


def exact_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention in the dtype given; (B, Tq, H, D), (B, T, K, D), and a mask that is broadcast to (B, H, Tq, T)."""
    group = q.size(-2) // k.size(-2)
    k, v = k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, float("-inf")).softmax(dim=-1), v)


def rows_of_heads(bench: SelftestBench, rows: int = 1) -> list[Tensor]:
    """Random queries (B, T, H, D), keys and values (B, T, K, D)."""
    shape = bench.shape
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [bench.random_tensor(rows, bench.length, number, shape.head_dim) for number in heads]


def attention(bench: SelftestBench) -> dict[str, Any]:
    """Check attention over whole rows, and over a window of a quarter of them, forward and backward."""
    kernel, _ = bench.kernel()
    length, scale = bench.length, bench.shape.head_dim**-0.5
    errors: dict[str, float] = {}
    kernel.prepare(length, [length, length // 4], bench.torch_device)
    for window in (length, length // 4):
        mask = visible(length, length, window, torch.device("cpu"))
        errors |= against_float64(
            bench,
            f"{kernel.name}, window {window}",
            lambda q, k, v, window=window: kernel.dense(q, k, v, window, scale),
            lambda q, k, v, mask=mask: exact_attention(q, k, v, mask, scale),
            rows_of_heads(bench),
        )
    return errors


def packed(bench: SelftestBench) -> dict[str, Any]:
    """Check attention with documents of many lengths in one row, each of which sees only itself."""
    kernel, _ = bench.kernel()
    length, scale = bench.length, bench.shape.head_dim**-0.5
    cuts = [1, 2, 65, length // 4, length // 2 + 3]
    lengths = np.diff([0, *cuts, length]).astype(np.int32)
    number = torch.from_numpy(np.arange(len(lengths)).repeat(lengths))[None]
    mask = visible(length, length, length, torch.device("cpu")) & same(number, number)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=bench.torch_device)
    kernel.prepare(length, [length], bench.torch_device)
    bounds = documents(kernel, lengths, tokens, bench.device.dtype).bounds
    return against_float64(
        bench,
        f"{kernel.name}, documents",
        lambda q, k, v: kernel.packed(q, k, v, bounds, length, scale),
        lambda q, k, v: exact_attention(q, k, v, mask, scale),
        rows_of_heads(bench),
    )


def logsumexps(bench: SelftestBench) -> dict[str, Any]:
    """Check the log-sum-exp of documents in one row, which CANN stores in an order of its own."""
    heads, dim = bench.shape.heads, bench.shape.head_dim
    bounds = [0, 1, 3, 68, bench.length // 2, bench.length]
    q, k, v = (x[0] for x in rows_of_heads(bench))
    ends, longest = torch.tensor(bounds, dtype=torch.int32, device=bench.torch_device), int(np.diff(bounds).max())
    query, key, value = (x.to(bench.torch_device) for x in (q, k, v))
    options: Any = {"causal": True, "return_attn_probs": True}
    result = flash_attn_varlen_func(query, key, value, ends, ends, longest, longest, **options)[1]
    keys = k.double().repeat_interleave(heads // k.size(1), 1)
    expected = torch.empty(heads, bench.length, dtype=torch.float64)
    for a, b in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), keys[a:b]) * dim**-0.5
        hidden = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        expected[:, a:b] = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
    name = "log-sum-exp of documents"
    return {name: round(relative_error(name, result, expected, LIMITS[bench.device.dtype]), 6)}


def losses(bench: SelftestBench) -> dict[str, Any]:
    """Check head, softcap and cross-entropy in one operator, with targets that are not scored."""
    rows, vocab = (96, 2000) if bench.quick else (512, 32768)
    dim = bench.shape.dim
    hidden, head = bench.random_tensor(rows, dim), bench.random_tensor(vocab + 48, dim, scale=0.1)  # the head is padded
    targets = torch.randint(0, vocab, (rows,), generator=bench.generator)
    targets[::7] = IGNORE

    def exactly(hidden: Tensor, head: Tensor) -> Tensor:
        logits = SOFTCAP * torch.tanh(hidden @ head[:vocab].t() / SOFTCAP)
        return F.cross_entropy(logits, targets, ignore_index=IGNORE)

    targets_there = targets.to(bench.torch_device)
    return against_float64(
        bench, "head loss", lambda a, b: head_loss(a, b, targets_there, vocab), exactly, [hidden, head]
    )


def optimizer(bench: SelftestBench) -> dict[str, Any]:
    """Check three steps of Muon and of AdamW from the same state."""
    shape = (2, 64, 160) if bench.quick else (2, bench.shape.dim, bench.shape.mlp_dim)
    weight, grads = torch.randn(shape, generator=bench.generator) * 0.02, []
    for _ in range(3):
        grads.append(torch.randn(shape, generator=bench.generator) * 1e-3)

    def muon(torch_device: torch.device, dtype: torch.dtype) -> Tensor:
        weights = weight.to(torch_device, copy=True)
        first, second = torch.zeros_like(weights), weights.new_zeros(*shape[:2], 1)
        factor = weights.new_ones(shape[0], 1, 1)
        for grad in grads:
            rates = {"lr": 0.02, "momentum": 0.9, "decay": 0.1, "beta2": 0.9}
            muon_update(weights, grad.to(torch_device), first, second, factor, dtype=dtype, **rates)
        return weights.cpu().double() - weight

    def adamw(torch_device: torch.device, dtype_of_state: torch.dtype, fused: bool) -> Tensor:
        weights = weight.flatten().to(torch_device, dtype_of_state, copy=True)
        first, second, count = torch.zeros_like(weights), torch.zeros_like(weights), weights.new_zeros(())
        for grad in grads:
            flat = grad.flatten().to(torch_device, dtype_of_state)
            count += 1
            adamw_update(weights, flat, first, second, count, lr=0.01, betas=(0.8, 0.95), decay=0.1, fused=fused)
        return weights.cpu().double() - weight.flatten()

    host, dtype, device = torch.device("cpu"), bench.device.dtype, bench.device
    expected, result = muon(host, torch.float64), muon(bench.torch_device, dtype)  # products in float64
    distance = float((result - expected).norm() / expected.norm())
    if not distance <= MUON_LIMIT[dtype]:
        raise Wrong(
            f"muon: the update is {distance:.2g} of its size from the right one, {MUON_LIMIT[dtype]:g} is allowed"
        )
    result, expected = (
        adamw(bench.torch_device, torch.float32, device.chip.fused_adamw),
        adamw(host, torch.float64, False),
    )
    return {"muon": round(distance, 6), "adamw": round(relative_error("adamw", result, expected, ADAMW_LIMIT), 6)}
