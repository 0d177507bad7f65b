"""The protocol of models for generation, evaluation and training: gpt.py is ours, models/causal_lm.py Hugging Face's.

    hidden = model(tokens, dense(model, kernel))                            # whole rows; `dense` is in attention.py
    hidden = model.extend(tokens, positions, attend, shift, room=context)   # tokens behind those of a cache
    logits = model.cap(hidden @ model.head[: model.shape.vocab].t())

The model computes everything but attention, for which it calls `attend`: so one cache, one engine and one set of
kernels serve all models. Shapes: B rows, T tokens, C width, H query heads, K key-value heads, D channels per head, V
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

NORM_EPS = 1e-6

Scorer = Callable[..., tuple[Tensor, Tensor, Tensor]]  # as `score` in loss.py


class Attend(Protocol):
    """Attention of one layer: training passes a kernel over whole rows, decoding one that reads a KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Documents(NamedTuple):
    """Borders of the documents in a batch (B, T); `documents` in attention.py makes it. Every row begins a document;
    padding is one of its own."""

    continues_document: Tensor  # (B, T) in the compute dtype: 1 where the token before is of the same document, else 0
    bounds: Any  # as the kernel's `packed` wants it
    positions: Tensor | None = None  # (B, T) within the document, for models that count from there


class Shift(Protocol):
    """Token shift: qkv (B, T, H + 2K, D) of a layer plus `share` (H + 2K, D) of the previous token's. None stands for
    whole rows; decoding sees only the newest token, so it caches the previous one."""

    def __call__(self, layer: int, qkv: Tensor, share: Tensor) -> Tensor: ...


class Sizes(Protocol):
    """Sizes of a model; sizes/shape.py has those of ours."""

    @property
    def depth(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int:
        """Number of tokens that exist; the head may have more rows."""

    @property
    def seq_len(self) -> int:
        """Tokens of a training row; by default also of prompt and answer together."""

    @property
    def total_parameters(self) -> int: ...
    @property
    def train_flops_per_token(self) -> int: ...
    def windows(self, seq_len: int | None = None) -> tuple[int, ...]:
        """Attention window of each layer, the token itself included, in rows of `seq_len`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a checkpoint finds its model by them."""


class LanguageModel(nn.Module):
    """Tokens in, normalised hidden states out; `state_dict` names the weights as they are exchanged."""

    shape: Sizes
    head: Tensor  # (V or more, C)
    scale: float  # on the product of queries and keys
    dtype: Any  # of computation
    mixes_neighbours = False  # has a token shift: the cache then keeps the previous token's share too
    restarts = False  # positions restart with each document, instead of with each row
    softcap = math.inf  # bound of the logits
    score: Scorer  # of raw logits, for the loss

    def forward(
        self,
        tokens: Tensor,
        attend: Attend,
        rope: Any = None,
        shift: Shift | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """(B, T) token ids from the beginning of rows -> (B, T, C). `rope`: what `rope` has made for such rows."""
        raise NotImplementedError

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
        """Tokens (B, T) at `positions` (T,) or (B, T), all below `room` -> (B, T, C). `before` (B,): the tokens before
        the first ones, but in rows that begin, (B, 1) bool; without it all rows begin."""
        raise NotImplementedError

    def compiled(self, compile: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Tensor]:
        """`forward` for training, where all rows have one length; `compile` as torch.compile."""
        forward: Callable[..., Tensor] = compile(self, dynamic=False, fullgraph=True)
        return forward

    def rope(self, length: int, dtype: Any, device: Any) -> Any:
        """Tables of positions for rows of `length` tokens, made once."""
        raise NotImplementedError

    def cap(self, logits: Tensor) -> Tensor:
        """Raw logits -> the float32 logits that probabilities are the softmax of."""
        raise NotImplementedError

    def to_compute(self, dtype: Any) -> LanguageModel:
        """Cast the weights to the compute dtype."""
        raise NotImplementedError
