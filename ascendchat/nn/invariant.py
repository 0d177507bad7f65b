"""A model whose result for a token has the same bits whatever stands beside it: `ascendchat rl --batch-invariant`.

    ops, kernel, readout = InvariantOps(), InvariantAttention(), InvariantLMHead(dtype, place)

The same sum in another order is another number, and libraries choose the order by the shape of what they are given: a
decoding step of one row and a training pass of a thousand differ in the last bits. Here every sum has one order:

- products are made of tiles of exactly TILE rows, the last filled with zeros. In a call of one shape each row is summed
  alike, wherever it stands.
- attention is a sum over channels, and then over the keys of a document in the order of their positions: the sum of
  each block of BLOCK keys, then block after block. Those that a query does not see add exactly 0, however many.
- functions like exp are called on pieces that fill the registers of a CPU and that no thread divides: what is left over
  goes through other code, with another last bit.

For float32 on a CPU. Only results are bound to this order: gradients are computed as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ascendchat.nn.attention import Ints, Reference
from ascendchat.nn.gpt import PlainOps
from ascendchat.nn.logprobs import Float32LMHead

TILE = 32  # rows of a product
BLOCK = 64  # keys of a block
REGISTERS, PIECE = 64, 1 << 14  # numbers: a multiple of what registers hold; torch divides 2^15 and more among threads
GROUP = 1 << 21  # products of queries and keys that exist at a time, where several queries are asked for


class _TiledProduct(torch.autograd.Function):
    """Product x (N, I) @ weight (I, O), tile by tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = F.pad(x, (0, 0, 0, -x.size(0) % TILE)).contiguous()
        out = x.new_empty(rows.size(0), weight.size(1))
        for tile, result in zip(rows.split(TILE), out.split(TILE)):
            torch.mm(tile, weight, out=result)
        return out[: x.size(0)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Product x (..., I) @ weight (I, O)."""
    y: Tensor = _TiledProduct.apply(x.reshape(-1, x.size(-1)), weight)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.size(1))


def in_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function to pieces of one size."""
    flat = F.pad(x.reshape(-1), (0, -x.numel() % REGISTERS))
    return torch.cat([function(piece) for piece in flat.split(PIECE)])[: x.numel()].view(x.shape)


class InvariantOps(PlainOps):
    """The operators of a block; those that are not here treat every number, or every row, for itself already."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight.t())

    def transposed_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight)

    def gate(self, x: Tensor, weight: Tensor) -> Tensor:
        return in_pieces(torch.sigmoid, self.linear(x, weight))


class InvariantLMHead(Float32LMHead):
    """Logits and their normaliser, summed in a fixed order."""

    def product(self, hidden: Tensor, head: Tensor) -> Tensor:
        return product(hidden, head.t())

    def tanh(self, x: Tensor) -> Tensor:
        return in_pieces(torch.tanh, x)

    def logsumexp(self, x: Tensor) -> Tensor:
        most = x.amax(dim=-1)
        parts = in_pieces(torch.exp, x - most[:, None])
        rows = F.pad(parts, (0, 0, 0, -x.size(0) % TILE))
        total = torch.cat([tile.sum(dim=-1) for tile in rows.split(TILE)])[: x.size(0)]
        return most + in_pieces(torch.log, total)


class _Bounds(NamedTuple):
    """Borders of the documents in a batch (B, T)."""

    lengths: tuple[int, ...]
    positions: Tensor  # (B, T) of each token in its document


class InvariantAttention(Reference):
    """Attention whose sums for a query do not depend on other queries; see above."""

    name = "invariant"
    by_position = True
    compiles_packed = False

    def refusal(self, device_type: str, dtype: torch.dtype, head_dim: int, decodes: bool = False) -> str | None:
        if device_type != "cpu" or dtype != torch.float32:
            return f"it is for float32 on a CPU, this is {str(dtype).removeprefix('torch.')} on {device_type}"
        return None

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        most = max(1, GROUP // (BLOCK * q[:, :1].numel()))  # queries of a row at a time
        parts = []
        for start in range(0, q.size(1), most):
            stop = min(start + most, q.size(1))
            ends = torch.full((q.size(0),), stop)
            parts.append(self._attend_exactly(q[:, start:stop], k[:, :stop], v[:, :stop], ends, window, scale))
        return torch.cat(parts, dim=1)

    def bounds(self, lengths: Ints, rows: int, per_document: bool, upload: Callable[[Tensor], Tensor]) -> _Bounds:
        positions = np.concatenate([np.arange(length) for length in lengths]).reshape(rows, -1)
        return _Bounds(tuple(lengths.tolist()), upload(torch.from_numpy(positions)))

    def packed(self, q: Tensor, k: Tensor, v: Tensor, bounds: Any, window: int, scale: float) -> Tensor:
        parts = zip(*(x.flatten(0, 1).split(bounds.lengths) for x in (q, k, v)))
        return torch.cat([self.dense(a[None], b[None], c[None], window, scale)[0] for a, b, c in parts]).view(q.shape)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
        """A ring that has turned is unrolled: position p lies at p % S, and what it has of others is not seen."""
        order = torch.arange(int(lengths.max())) % k.size(1)
        return self._attend_exactly(q, k[:, order], v[:, order], lengths, window, scale)

    def one_query(self, q: Tensor, k: Tensor, v: Tensor, held: Sequence[int], scale: float) -> Tensor:
        return self.cached(q, k, v, torch.tensor(held), k.size(1), scale)

    def _attend_exactly(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, window: int, scale: float) -> Tensor:
        """q (B, Q, H, D) are the last of ends (B,) tokens, k and v (B, S, K, D) from position 0 on."""
        group = q.size(2) // k.size(2)
        rest = (0, 0, 0, 0, 0, -k.size(1) % BLOCK)
        k, v = (F.pad(x, rest).repeat_interleave(group, dim=2) for x in (k, v))  # (B, S, H, D)
        position = ends[:, None] - q.size(1) + torch.arange(q.size(1))  # (B, Q)
        distance = position[:, :, None] - torch.arange(k.size(1))
        hidden = ((distance < 0) | (distance >= window))[:, :, None]  # (B, Q, 1, S)
        blocks = k.transpose(1, 2)[:, None].split(BLOCK, dim=3)  # (B, 1, H, BLOCK, D) each
        scores = torch.cat([_sums(q[:, :, :, None] * block) for block in blocks], dim=-1) * scale  # (B, Q, H, S)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = in_pieces(torch.exp, scores - scores.amax(dim=-1, keepdim=True).detach())
        total, out = torch.zeros_like(scores[..., :1]), torch.zeros_like(q)
        columns = v.permute(0, 2, 3, 1)[:, None]  # (B, 1, H, D, S)
        for part, block in zip(weights.split(BLOCK, dim=-1), columns.split(BLOCK, dim=-1)):
            total = total + _sums(part)[..., None]
            out = out + _sums(part[..., None, :] * block)  # (B, Q, H, D)
        return out / total


def _sums(x: Tensor) -> Tensor:
    """Sum over the last dimension, made contiguous: its order is then fixed."""
    return x.contiguous().sum(dim=-1)
