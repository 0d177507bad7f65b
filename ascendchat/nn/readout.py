"""Hidden states to the logits that tokens are drawn from, and to the log-probabilities of tokens.

    readout = Readout()                                   # the product in the model's dtype
    readout = Float32Readout(torch.bfloat16, place)       # the product is made and kept in float32, as RL wants it
    logits = readout.logits(hidden, head)                 # (N, C), (V, C) -> (N, V) float32, softcapped
    drawn = Drawn(vocab, temperature=0.7, top_k=50, readout=readout)
    drawn.logprobs(hidden, head, targets)                 # (N,), of the distribution that an engine draws from

The engine (engine/decode.py) and the trainer (nn/logprobs.py) of RL use the same one: a product that is rounded to 16
bits moves log-probabilities by up to 3 %, and by other amounts in either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ascendchat.nn.loss import SOFTCAP


class Readout:
    """The product in the model's dtype."""

    def product(self, hidden: Tensor, head: Tensor) -> Tensor:
        return hidden @ head.t()

    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def logits(self, hidden: Tensor, head: Tensor, softcap: float = SOFTCAP) -> Tensor:
        """(N, C) -> (N, V) float32, within ±softcap; math.inf: as they are."""
        logits = self.product(hidden, head).float()
        return logits if math.isinf(softcap) else softcap * self.tanh(logits / softcap)

    def logsumexp(self, x: Tensor) -> Tensor:
        """Over the last dimension."""
        return torch.logsumexp(x, dim=-1)


class Float32Readout(Readout):
    """The product is summed and kept in float32. A product of two numbers of 16 bits is exact in float32, so it does
    not matter whether the numbers are widened first, or a device multiplies them as they are and keeps the sum."""

    def __init__(self, dtype: torch.dtype, place: torch.device) -> None:
        self.keeps = dtype != torch.float32 and keeps_float32(dtype, place)

    def product(self, hidden: Tensor, head: Tensor) -> Tensor:
        if self.keeps:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        return hidden.float() @ head.float().t()


def keeps_float32(dtype: torch.dtype, place: torch.device) -> bool:
    """Whether this device multiplies matrices of 16 bits into one of float32 by itself."""
    try:
        small = torch.ones(16, 16, dtype=dtype, device=place)
        return torch.mm(small, small, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):  # this torch has no such argument, or this device no such operator
        return False


class Read(NamedTuple):
    """What the logits of N rows say, (N, V) and (N,)."""

    capped: Tensor  # (N, V) logits
    scaled: Tensor  # (N, V) logits by the temperature, -inf where a token cannot be drawn
    logsumexp: Tensor  # (N,) of those
    logprob: Tensor  # (N,) of the targets; of token 0 where nothing is scored


@dataclass(frozen=True)
class Drawn:
    """The distribution that tokens are drawn from: the softmax of the logits by the temperature, over the `top_k`
    likeliest tokens (0: all) and the target itself, which an engine that rounds otherwise may have counted among
    them."""

    vocab: int
    temperature: float = 1.0
    top_k: int = 0
    softcap: float = SOFTCAP
    readout: Readout = field(default_factory=Readout)

    def read(self, hidden: Tensor, head: Tensor, targets: Tensor) -> Read:
        """hidden (N, C), head (V or more, C), targets (N,), negative where nothing is scored."""
        capped = self.readout.logits(hidden, head[: self.vocab], self.softcap)
        scaled = capped if self.temperature == 1.0 else capped / self.temperature
        index = targets.clamp(min=0).unsqueeze(-1)
        if self.top_k:
            least = scaled.topk(min(self.top_k, self.vocab), dim=-1).values[:, -1:]
            scaled = scaled.masked_fill((scaled < least).scatter(-1, index, False), -torch.inf)
        total = self.readout.logsumexp(scaled)
        return Read(capped, scaled, total, scaled.gather(-1, index).squeeze(-1) - total)
