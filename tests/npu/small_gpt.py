"""A small GPT of plain torch, and its training on any device; ranks of test_training.py import it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, HEADS, LAYERS = 61, 32, 2, 2
Make = Callable[[Any], torch.optim.Optimizer]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, S, N, D)."""
    d = x.size(-1)
    positions = torch.arange(x.size(1), device=x.device).float()
    angle = positions[:, None] / 1000 ** (torch.arange(0, d, 2, device=x.device).float() / d)
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).view(b, s, 3, HEADS, -1).unbind(2)
        heads = [t.transpose(1, 2) for t in (rotate(q), rotate(k), v)]
        a = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = 15 * torch.tanh(self.head(F.rms_norm(x, (WIDTH,))).float() / 15)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def train(
    device: str,
    make: Make,
    steps: int,
    amp: torch.dtype | None = None,
    scaler: Any = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    rows: slice = slice(None),
) -> list[float]:
    """Losses of the same 4 rows again and again, or of some of them; `wrap` may share out the model over ranks."""
    torch.manual_seed(0)
    model = wrap(GPT().to(device))
    optimizer = make(model.parameters())
    text = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(1))[rows].to(device)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, dtype=amp or torch.bfloat16, enabled=amp is not None):
            loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
