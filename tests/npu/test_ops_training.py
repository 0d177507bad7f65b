"""A small GPT on the NPU: the same losses as on the CPU, with every optimizer and precision; random numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from op_cases import torch_npu
from small_gpt import WIDTH, Block, adamw, train

import cannsim

STEPS = 12


def close(found: list[float], expected: list[float], tolerance: float) -> None:
    worst = max(abs(f - e) for f, e in zip(found, expected))
    assert worst < tolerance, f"{worst}: {found} {expected}"


@pytest.fixture(scope="module")
def cpu_losses() -> list[float]:
    """Of the same training on the CPU in float32."""
    losses = train("cpu", adamw(foreach=False), STEPS)
    assert losses[-1] < losses[0] - 0.5, "it learns, so the updates are compared too"
    return losses


@pytest.mark.parametrize(
    ("options", "launched"),
    [
        ({"foreach": True}, "aclnnForeachLerpScalar"),
        ({"fused": True}, "aclnnApplyAdamWV2"),
        ({"foreach": False}, "aclnnInplaceAddcdiv"),
    ],
    ids=["foreach", "fused", "single"],
)
def test_steps_give_the_losses_of_the_cpu(options: dict[str, bool], launched: str, cpu_losses: list[float]) -> None:
    cannsim.reset()
    close(train("npu", adamw(**options), STEPS), cpu_losses, 1e-4)
    assert launched in cannsim.launches(), sorted(cannsim.launches())


def test_npu_fused_adamw_gives_the_losses_of_the_cpu(cpu_losses: list[float]) -> None:
    fused = torch_npu.optim.NpuFusedAdamW
    found = train("npu", lambda parameters: fused(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1), STEPS)
    close(found, cpu_losses, 1e-3)


def test_bfloat16_autocast_stays_near_float32(cpu_losses: list[float]) -> None:
    close(train("npu", adamw(), STEPS, amp=torch.bfloat16), cpu_losses, 0.08)


def test_half_precision_with_a_gradient_scaler(cpu_losses: list[float]) -> None:
    cannsim.reset()
    scaler = torch.amp.GradScaler("npu", init_scale=2.0**12, growth_interval=5)
    close(train("npu", adamw(), STEPS, amp=torch.float16, scaler=scaler), cpu_losses, 0.05)
    assert scaler.get_scale() == 2.0**14, "it has doubled twice"
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
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ weight).square().sum()

    x, weight = torch.randn(4, 8).npu(), torch.randn(8, 5).npu()
    found = []
    for run in (loss, torch.compile(loss, backend="aot_eager")):
        leaf = weight.clone().requires_grad_()
        run(x, leaf).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


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
