"""The model: a decoder-only transformer whose every size follows from one `Shape` (sizes/shape.py).

    model = GPT(Shape.from_depth(12))
    model.initialise(seed=0)
    hidden = model(tokens, dense(model, kernel))      # (B, T) -> (B, T, C); nn/loss.py turns it into a loss
    hidden = model(tokens, dense(model, kernel), documents=documents(kernel, lengths, tokens, dtype))   # attention.py

With `documents`, a token sees nothing of other documents in its row: not by attention, nor by what is taken from the
token before. Rotations count from the row's beginning still: only distances matter to them.

What is not plain: queries, keys and values take a learned share of the previous token's, channel by channel; queries
and keys are RMS-normalised, then rotated (a rotation keeps the norm); ReLU² MLP; value embeddings on every other layer
(a table looked up by token, gated into the values); a learned weight per layer on the residual stream and on the first
embedding; the previous token's embedding smeared in; the middle of the network backed out at the end.
Shapes: B rows, T tokens, C width, H query heads, K key-value heads, D channels per head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ascendchat.nn.attention import dense
from ascendchat.nn.loss import SOFTCAP, score, softcap
from ascendchat.nn.model import NORM_EPS, Attend, Documents, LanguageModel, Shift
from ascendchat.sizes.shape import SMEAR_GATE_CHANNELS, Formulas, Shape

__all__ = ["GPT", "Attend", "Block", "Heads", "Ops", "PlainOps", "Rope", "Shift", "attention_scale", "dense", "shifted"]

Rope = tuple[Tensor, Tensor]  # cos and sin
Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, up, down: as PlainOps.mlp


class Heads(Protocol):
    """qkv (B, T, H + 2K, D), share (H + 2K, D) -> q, k, v: shifted, then queries and keys normalised and rotated."""

    def __call__(
        self, qkv: Tensor, share: Tensor, rope: Rope, kv_heads: int, continues_document: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Ops(Protocol):
    """The operators of a block that a chip may fuse; see PlainOps for what they compute."""

    sin_sign: float  # sign of the first half of the sin table that `rotary` expects
    heads: Heads | None  # shift, norm and rotation over whole rows at once, where a chip has that

    def rms_norm(self, x: Tensor) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...
    def gate(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def smear(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor: ...
    def project(self, x: Tensor, weight: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]: ...
    def gated(self, v: Tensor, gate: Tensor, value: Tensor, most: float) -> Tensor: ...
    def mlp(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor: ...
    def mixing(self, residual: Tensor, scale: Tensor, dtype: torch.dtype) -> Sequence[tuple[Tensor, ...]]: ...
    def mix(self, x: Tensor, first: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]: ...
    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]: ...


class PlainOps:
    """The operators in plain torch; a compiler fuses them where there is one."""

    sin_sign = -1.0

    def __init__(self, heads: Heads | None = None, whole_mlp: Mlp | None = None) -> None:
        self.heads, self.whole_mlp = heads, whole_mlp

    def rms_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def transposed_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin  # a roll fuses where a concatenation would not

    def relu2(self, x: Tensor) -> Tensor:
        return F.relu(x).square()

    def gate(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, weight))

    def smear(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Add a gated part of the previous token, over whole rows; `weight` (1,)."""
        share = weight.to(x.dtype) * self.gate(x[..., : gate.size(1)], gate)
        return torch.addcmul(x, share, F.pad(x[:, :-1], (0, 0, 1, 0)))

    def project(self, x: Tensor, weight: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Project to all heads; also the gate (B, T, K) of the value embeddings, in a layer that has them."""
        return self.linear(x, weight), None if gate is None else self.gate(x[..., : gate.size(1)], gate)

    def gated(self, v: Tensor, gate: Tensor, value: Tensor, most: float) -> Tensor:
        return torch.addcmul(v, (gate * most).unsqueeze(-1), value)

    def mlp(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        if self.whole_mlp is not None and torch.is_grad_enabled():
            return self.whole_mlp(x, up, down)
        return self.transposed_linear(self.relu2(self.linear(x, up)), down)

    def mixing(self, residual: Tensor, scale: Tensor, dtype: torch.dtype) -> Sequence[tuple[Tensor, ...]]:
        """Arguments of `mix` by layer: the weight of the residual stream, and that of the first embedding."""
        return list(zip(residual.to(dtype).unbind(), scale.to(dtype).unbind()))

    def mix(self, x: Tensor, first: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Mix the input of a layer; returns it, and the first embedding for the next layer."""
        return torch.addcmul(x * weights[0], first, weights[1]), first

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, self.rms_norm(total)


class _Shifted(torch.autograd.Function):
    """Token shift with its gradient written out: only qkv is saved for it, and it needs five launches fewer."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, share: Tensor, continues_document: Tensor | None) -> Tensor:
        ctx.save_for_backward(qkv, share, continues_document)
        before = F.pad(qkv[:, :-1], (0, 0, 0, 0, 1, 0))
        if continues_document is not None:
            before = before * continues_document[:, :, None, None]
        return torch.addcmul(qkv, before, share.to(qkv.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, share, continues_document = ctx.saved_tensors
        taken = (
            grad if continues_document is None else grad * continues_document[:, :, None, None]
        )  # of the tokens that took a share
        wide = taken.float() if grad.dtype == torch.float16 else taken  # the product may leave the range of float16
        of_share = (wide[:, 1:] * qkv[:, :-1]).sum(dim=(0, 1), dtype=share.dtype)
        return torch.addcmul(grad, F.pad(taken[:, 1:], (0, 0, 0, 0, 0, 1)), share.to(qkv.dtype)), of_share, None


def shifted(layer: int, qkv: Tensor, share: Tensor, continues_document: Tensor | None = None) -> Tensor:
    """Shift over whole rows. Nothing is added at the first position, nor where `continues_document` (B, T) is 0."""
    return _Shifted.apply(qkv, share, continues_document)  # type: ignore[no-any-return, no-untyped-call]


def rope_tables(length: int, head_dim: int, sin_sign: float = -1.0, base: float = Formulas().rope_base) -> Rope:
    """cos and sin, each (length, 1, D) float32, made on the host, so alike on every device.

    With the first half of sin negated, (a, b) -> (a cos - b sin, b cos + a sin) is x * cos + swapped halves * sin.
    """
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)[:, None, :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((sin_sign * sin, sin), -1)


class Block(nn.Module):
    """Attention and MLP of one layer. Every weight is a stack of equal matrices, which is how Muon updates them."""

    def __init__(self, shape: Shape, layer: int, ops: Ops, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.layer, self.ops, self.gate_range = shape, layer, ops, shape.constants.gate_range
        self.dropout = dropout
        group = shape.heads // shape.kv_heads  # query heads that share one key-value head
        self.qkv = nn.Parameter(torch.empty(group + 2, shape.kv_dim, shape.dim))
        self.shift = nn.Parameter(torch.empty(shape.q_dim + 2 * shape.kv_dim))  # share of the previous token
        self.out = nn.Parameter(torch.empty(shape.dim, shape.q_dim))
        self.up = nn.Parameter(torch.empty(shape.mlp_dim, shape.dim))
        self.down = nn.Parameter(torch.empty(shape.mlp_dim, shape.dim))  # transposed: the same stack as `up`
        if layer in shape.value_layers:
            self.gate = nn.Parameter(torch.empty(shape.kv_heads, shape.gate_channels))

    def forward(
        self,
        x: Tensor,
        value: Tensor | None,
        rope: Rope,
        attend: Attend,
        shift: Shift | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        attended = self.attention(self.ops.rms_norm(x), value, rope, attend, shift, documents)
        x, norm = self.ops.add_norm(x, self.dropped(attended))
        return x + self.dropped(self.ops.mlp(norm, self.up, self.down))

    def dropped(self, y: Tensor) -> Tensor:
        """Dropout on what a layer adds to the residual stream, in training only."""
        return F.dropout(y, self.dropout) if self.dropout and torch.is_grad_enabled() else y

    def attention(
        self,
        x: Tensor,
        value: Tensor | None,
        rope: Rope,
        attend: Attend,
        shift: Shift | None,
        documents: Documents | None,
    ) -> Tensor:
        shape = self.shape
        qkv, gate = self.ops.project(x, self.qkv.flatten(0, 1), None if value is None else self.gate)
        qkv = qkv.unflatten(-1, (-1, shape.head_dim))  # (B, T, H + 2K, D)
        share = self.shift.view(-1, shape.head_dim)
        continues_document = None if documents is None else documents.continues_document
        if shift is None and self.ops.heads is not None:
            q, k, v = self.ops.heads(qkv, share, rope, shape.kv_heads, continues_document)
        else:
            qkv = (
                shifted(self.layer, qkv, share, continues_document) if shift is None else shift(self.layer, qkv, share)
            )
            qk, v = qkv.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=-2)
            q, k = self.ops.rotary(self.ops.rms_norm(qk), *rope).split((shape.heads, shape.kv_heads), dim=-2)
        if value is not None and gate is not None:
            v = self.ops.gated(v, gate, value.unflatten(-1, (shape.kv_heads, shape.head_dim)), self.gate_range)
        if documents is None:
            y = attend(self.layer, q, k, v)
        else:
            y = attend(self.layer, q, k, v, documents.bounds)  # type: ignore[call-arg]  # decoding has none
        return self.ops.linear(y.flatten(-2), self.out)


def table(rows: int, width: int) -> nn.Embedding:
    """An embedding table without values: `initialise` draws them, torch's own draw took two seconds at depth 12."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class GPT(LanguageModel):
    """Our own model; the docstrings of LanguageModel say what its methods do."""

    mixes_neighbours = True
    softcap = SOFTCAP
    score = staticmethod(score)

    def __init__(
        self, shape: Shape, ops: Ops | None = None, *, checkpoint_activations: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.shape: Shape = shape
        self.ops, self.scale = ops or PlainOps(), attention_scale(shape)
        self.checkpoint_activations, self.dropout = checkpoint_activations, dropout
        self.embed = table(shape.padded_vocab, shape.dim)
        self.values = nn.ModuleDict({str(i): table(shape.padded_vocab, shape.kv_dim) for i in shape.value_layers})
        self.blocks = nn.ModuleList(Block(shape, i, self.ops, dropout) for i in range(shape.depth))
        self.head: nn.Parameter = nn.Parameter(torch.empty(shape.padded_vocab, shape.dim))
        self.smear_gate = nn.Parameter(torch.empty(1, min(SMEAR_GATE_CHANNELS, shape.dim)))
        self.residual = nn.Parameter(torch.empty(shape.depth))  # weight of the stream entering each layer
        self.first = nn.Parameter(torch.empty(shape.depth))  # weight of the first embedding entering each layer
        self.smear = nn.Parameter(torch.empty(1))
        self.backout = nn.Parameter(torch.empty(1))
        self._rope: dict[tuple[int, torch.dtype, torch.device], Rope] = {}

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.embed.weight.dtype

    def initialise(self, seed: int) -> None:
        """Set every weight; the same values on every device, since they are drawn on the host."""
        generator = torch.Generator().manual_seed(seed)
        bound = math.sqrt(3.0 / self.shape.dim)  # uniform with standard deviation 1/√C
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                draw = torch.empty(parameter.shape)
                leaf = name.rsplit(".", 1)[-1]
                if name == "embed.weight":
                    draw.normal_(0.0, 0.8, generator=generator)
                elif name == "head":
                    draw.normal_(0.0, 0.001, generator=generator)
                elif leaf in ("qkv", "weight"):  # the value tables are sized like values
                    draw.uniform_(-bound, bound, generator=generator)
                elif leaf == "up":
                    draw.uniform_(-0.4 * bound, 0.4 * bound, generator=generator)
                elif leaf in ("gate", "smear_gate"):
                    draw.uniform_(0.0, 0.02, generator=generator)
                elif leaf in ("out", "down", "smear", "shift"):  # every layer starts as the identity
                    draw.zero_()
                elif leaf == "residual":
                    draw.copy_(torch.linspace(1.15, 1.05, self.shape.depth))
                elif leaf == "first":
                    draw.copy_(torch.linspace(0.20, 0.05, self.shape.depth))
                else:
                    draw.fill_(0.2)  # backout
                parameter.copy_(draw)

    def to_compute(self, dtype: torch.dtype) -> GPT:
        """Matrices and tables in the compute dtype; the few per-layer scalars stay in float32."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data = parameter.data.to(dtype)
        return self

    def cap(self, logits: Tensor) -> Tensor:
        return softcap(logits)

    def rope(self, length: int, dtype: torch.dtype, device: torch.device) -> Rope:
        """The rotary tables, made once per length."""
        key = (length, dtype, device)
        if key not in self._rope:
            base = self.shape.constants.rope_base
            cos, sin = rope_tables(length, self.shape.head_dim, self.ops.sin_sign, base)
            self._rope[key] = cos.to(device, dtype), sin.to(device, dtype)
        return self._rope[key]

    def embedding(
        self, tokens: Tensor, before: Tensor | None = None, continues_document: Tensor | None = None
    ) -> Tensor:
        """Embed tokens (B, T) -> (B, T, C) and smear in the previous token's embedding, but not where
        `continues_document` (B, T) is 0; `before` (B, 1, C) precedes the row."""
        x = self.ops.rms_norm(self.embed(tokens))
        if before is None and continues_document is None:
            return self.ops.smear(x, self.smear_gate, self.smear)
        weight = self.smear.to(x.dtype) * self.ops.gate(x[..., : self.smear_gate.size(1)], self.smear_gate)
        if continues_document is not None:
            weight = weight * continues_document.unsqueeze(-1)
        if before is None:
            previous = F.pad(x[:, :-1], (0, 0, 1, 0))
        else:
            previous = torch.cat((before, x[:, :-1]), dim=1)
        return torch.addcmul(x, weight, previous)

    def forward(
        self,
        tokens: Tensor,
        attend: Attend,
        rope: Rope | None = None,
        shift: Shift | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """(B, T) token ids -> (B, T, C)."""
        x = self.embedding(tokens, continues_document=None if documents is None else documents.continues_document)
        return self.layers(x, tokens, attend, rope, shift, documents)

    def extend(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        shift: Shift,
        *,
        room: int,
        before: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> Tensor:
        cos, sin = self.rope(room, self.dtype, tokens.device)
        smeared = None if before is None else self.ops.rms_norm(self.embed(before))[:, None]
        if smeared is not None and begins is not None:
            smeared = smeared.masked_fill(begins[:, :, None], 0.0)
        return self.layers(self.embedding(tokens, smeared), tokens, attend, (cos[positions], sin[positions]), shift)

    def layers(
        self,
        x: Tensor,
        tokens: Tensor,
        attend: Attend,
        rope: Rope | None = None,
        shift: Shift | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Run all blocks over embedded tokens; decoding passes the rotary tables of its own positions."""
        rope = rope or self.rope(x.size(1), x.dtype, x.device)
        first, middle = x, x
        weights = self.ops.mixing(self.residual, self.first, x.dtype)
        for i, block in enumerate(self.blocks):
            x, first = self.ops.mix(x, first, weights[i])
            value = self.values[str(i)](tokens) if str(i) in self.values else None
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, value, rope, attend, shift, documents, use_reentrant=False)
            else:
                x = block(x, value, rope, attend, shift, documents)
            if i == self.shape.depth // 2:
                middle = x
        backout = self.backout.to(x.dtype)
        if self.shape.depth <= 2:  # the middle is the end, and the norm hides its size: only rounding would move the
            backout = backout.detach()  # weight, and beyond 1 everything has the other sign
        return self.ops.rms_norm(x - backout * middle)

    def matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that Muon updates: all of the blocks but the small gates and token-shift shares."""
        for name, parameter in self.blocks.named_parameters(prefix="blocks"):
            if not name.endswith((".gate", ".shift")):
                yield name, parameter


def attention_scale(shape: Shape) -> float:
    """Factor on the product of queries and keys: the gain of each of the two is folded into 1/√D."""
    return shape.constants.qk_gain**2 / math.sqrt(shape.head_dim)
