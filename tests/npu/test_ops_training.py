"""A small GPT on the NPU: the same losses as on the CPU, with every optimizer and precision, and decoding.

python -m cannsim run -- pytest tests/npu/test_ops_training.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cannsim

try:
    import torch_npu
except ImportError:  # the tests of this folder are skipped then
    torch_npu = None

VOCAB, WIDTH, HEADS, LAYERS = 61, 32, 2, 2


def rotate(x: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Rotary embedding of (B, S, N, D)."""
    d = x.size(-1)
    positions = torch.arange(start, start + x.size(1), device=x.device).float()
    angle = positions[:, None] / 1000 ** (torch.arange(0, d, 2, device=x.device).float() / d)
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        b, s, _ = x.shape
        y = F.rms_norm(x, (WIDTH,))
        q, k, v = self.qkv(y).view(b, s, 3, HEADS, -1).unbind(2)
        start = cache[0].size(1) if cache else 0
        q, k = rotate(q, start), rotate(k, start)
        if cache is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(cache, (k, v))) if cache else (k, v)
            cache[:] = [k, v]
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        a = F.scaled_dot_product_attention(*heads, is_causal=start == 0 and s > 1)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def logits(self, tokens: torch.Tensor, caches: list[list[torch.Tensor]] | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches is not None else None)
        return 15 * torch.tanh(self.head(F.rms_norm(x, (WIDTH,))).float() / 15)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(1)).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


Make = Callable[[Any], torch.optim.Optimizer]


def train(device: str, make: Make, steps: int, amp: torch.dtype | None = None, scaler: Any = None) -> list[float]:
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = make(model.parameters())
    tokens, targets = batch(device)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, dtype=amp or torch.bfloat16, enabled=amp is not None):
            loss = model(tokens, targets)
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


def adamw(**options: Any) -> Make:
    return lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def close(found: list[float], expected: list[float], tolerance: float) -> None:
    worst = max(abs(f - e) for f, e in zip(found, expected))
    assert worst < tolerance, f"{worst}: {found} {expected}"


@pytest.fixture(scope="module")
def cpu_losses() -> list[float]:
    return train("cpu", adamw(foreach=False), 50)


@pytest.mark.parametrize("kind", ["foreach", "fused", "single"])
def test_fifty_steps_give_the_losses_of_the_cpu(kind: str, cpu_losses: list[float]) -> None:
    cannsim.reset()
    found = train("npu", adamw(foreach=kind == "foreach", fused=kind == "fused"), 50)
    close(found, cpu_losses, 1e-4)
    assert found[-1] < 0.5 * found[0]
    wanted = {"foreach": "aclnnForeachLerpScalar", "fused": "aclnnApplyAdamWV2", "single": "aclnnInplaceAddcdiv"}
    assert wanted[kind] in cannsim.launches(), sorted(cannsim.launches())


@pytest.mark.parametrize("queue", [0, 2])
def test_other_launch_queues_give_the_same_losses(
    queue: int, cpu_losses: list[float], on_npu: Callable[..., Any]
) -> None:
    """The queue mode is read once per process; this process runs mode 1, the default."""
    code = f"""
import sys
sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
import test_ops_training as t
t.close(t.train("npu", t.adamw(), 50), {cpu_losses}, 1e-4)
"""
    on_npu(code, TASK_QUEUE_ENABLE=queue)


def test_npu_fused_adamw_gives_the_losses_of_the_cpu(cpu_losses: list[float]) -> None:
    torch.manual_seed(0)
    model = GPT().npu()
    optimizer = torch_npu.optim.NpuFusedAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, targets = batch("npu")
    losses = []
    for _ in range(20):
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    close(losses, cpu_losses, 1e-3)


def test_bfloat16_autocast_stays_near_float32(cpu_losses: list[float]) -> None:
    close(train("npu", adamw(), 30, amp=torch.bfloat16), cpu_losses, 0.08)


def test_half_precision_with_a_gradient_scaler(cpu_losses: list[float]) -> None:
    cannsim.reset()
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**12, growth_interval=5)
    close(train("npu", adamw(), 20, amp=torch.float16, scaler=scaler), cpu_losses, 0.05)
    assert scaler.get_scale() > 2.0**12
    assert {"aclnnForeachNonFiniteCheckAndUnscale", "aclnnAmpUpdateScale"} <= set(cannsim.launches())


def test_scaler_skips_a_step_with_infinite_gradients() -> None:
    weight = nn.Parameter(torch.ones(4, device="npu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0] * 4
    assert scaler.get_scale() == 2.0


def test_cached_decoding_gives_the_tokens_of_full_recomputation_on_cpu() -> None:
    torch.manual_seed(0)
    model = GPT()
    tokens = batch("cpu")[0][:1, :5]
    expected = tokens
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, model.logits(expected)[:, -1:].argmax(-1)], 1)
        model.npu()
        caches: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        found, step = tokens.npu(), tokens.npu()
        for _ in range(12):
            step = model.logits(step, caches)[:, -1:].argmax(-1)
            found = torch.cat([found, step], 1)
    assert found.tolist() == expected.tolist()


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    block, x = Block().npu(), torch.randn(2, 6, WIDTH).npu().requires_grad_()
    block(x).square().sum().backward()
    first = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    checkpoint(block, x, use_reentrant=False).square().sum().backward()
    for a, b in zip(first, block.parameters()):
        torch.testing.assert_close(a, b.grad)


@pytest.mark.slow
def test_compiled_with_aot_eager_agrees() -> None:
    torch.manual_seed(0)
    model = GPT().npu()
    tokens, targets = batch("npu")
    expected = model(tokens, targets)
    expected.backward()
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager")(tokens, targets)
    loss.backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-5)
    torch.testing.assert_close(model.head.weight.grad, gradient, rtol=1e-4, atol=1e-6)


# ---- random numbers -------------------------------------------------------------------------------


RANDOM = {
    "aclnnInplaceNormal",
    "aclnnInplaceUniform",
    "aclnnInplaceRandom",
    "aclnnInplaceBernoulli",
    "aclnnInplaceBernoulliTensor",
    "aclnnRandperm",
    "aclnnDropoutGenMaskV2",
    "aclnnDropoutDoMask",
}


def test_random_fills_follow_the_seed_and_their_distribution() -> None:
    def draw(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        n, dev = 20000, "npu"
        return [
            torch.randn(n, device=dev),
            torch.rand(n, device=dev),
            torch.empty(n, device=dev).exponential_(2.0),
            torch.empty(n, device=dev).normal_(1.0, 3.0),
            torch.empty(n, device=dev).uniform_(-2, 4),
            torch.empty(n, device=dev).bernoulli_(0.3),
            torch.randint(0, 10, (n,), device=dev).float(),
            torch.bernoulli(torch.full((n,), 0.7, device=dev)),
            torch.randperm(n, device=dev).float() / n,
            F.dropout(torch.ones(n, device=dev), 0.25),
        ]

    cannsim.reset()
    first, again, other = ([x.cpu() for x in draw(seed)] for seed in (1, 1, 2))
    means = (0, 0.5, 0.5, 1, 1, 0.3, 4.5, 0.7, 0.5, 1)
    deviations = (1, 0.289, 0.5, 3, 1.732, 0.458, 2.872, 0.458, 0.289, 0.577)
    for x, same, different, mean, deviation in zip(first, again, other, means, deviations):
        assert torch.equal(x, same)
        assert not torch.equal(x, different)
        assert abs(x.mean() - mean) < 5 * deviation / math.sqrt(x.numel()), (x.mean(), mean)
        assert abs(x.std() / deviation - 1) < 0.05, (x.std(), deviation)
    assert first[8].unique().numel() == 20000
    assert set(cannsim.launches()) >= RANDOM


def test_multinomial_draws_by_weight_and_without_repetition() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([[0.1, 0.0, 0.9], [0.5, 0.5, 0.0]], device="npu")
    cannsim.reset()
    drawn = torch.multinomial(weights, 4000, replacement=True).cpu()
    assert "aclnnMultinomial" in cannsim.launches()
    assert set(drawn[0].tolist()) == {0, 2}
    assert abs((drawn[0] == 2).float().mean() - 0.9) < 0.03
    assert set(drawn[1].tolist()) == {0, 1}
    assert sorted(torch.multinomial(torch.ones(5, device="npu"), 5).tolist()) == [0, 1, 2, 3, 4]


def test_dropout_gradient_uses_the_same_mask() -> None:
    x = torch.ones(1000, device="npu", requires_grad=True)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
