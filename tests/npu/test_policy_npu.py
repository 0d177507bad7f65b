"""The loss of RL on the simulated NPU: engine and trainer agree, and loss and gradients are those of the CPU."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascendchat.device import Device, pick
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import choose
from ascendchat.train.grpo import PRESETS, Method
from ascendchat.train.learner import Learner
from ascendchat.train.policy_loss import PolicyBatch, PolicyLoss

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from engine_models import model
from test_policy_loss import answered, learner_of, policy_of, uploaded


@pytest.fixture(scope="module")
def device() -> Device:
    found = pick("npu")
    found.bind(0)
    found.dtype = torch.float32  # type: ignore[misc]  # so that it can be compared
    return found


def on_npu(device: Device, seed: int) -> Learner:
    made, place = model(seed, device.operators(), seq_len=128), torch.device("npu:0")
    kernel, _ = choose("npu", torch.float32, made.shape.head_dim, "sdpa")  # the fused one decodes 16 bits only
    return Learner(made.to(place), kernel, device, place, by_document=True)


def moved(batch: PolicyBatch, place: torch.device) -> PolicyBatch:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: x.to(place) for name, x in columns.items() if isinstance(x, Tensor)})


@pytest.mark.parametrize(
    ("method", "temperature", "top_k"),
    [(PRESETS["default"], 1.0, 0), (PRESETS["default"], 0.7, 7), (replace(PRESETS["gspo"], kl=0.1), 1.3, 0)],
    ids=["default", "filtered", "gspo"],
)
def test_engine_and_trainer_agree_and_learn_as_on_a_cpu(
    device: Device, method: Method, temperature: float, top_k: int
) -> None:
    def policy(learner: Learner, start: Learner) -> PolicyLoss:
        return policy_of(learner, method, temperature, top_k, reference=start if method.kl else None)

    here, there = policy(learner_of(1, False), learner_of(2, False)), policy(on_npu(device, 1), on_npu(device, 2))
    batch = uploaded(answered(there, 1, count=6))
    scored = batch.targets != IGNORE
    assert scored.sum() > 50
    on_device = moved(batch, torch.device("npu:0"))
    apart = (there.logprobs(on_device).cpu() - batch.behaviour).abs()[scored]
    assert apart.max() < 1e-4
    batch = replace(batch, proximal=here.logprobs(batch) + 0.01 * torch.randn(batch.weight.shape))
    on_device = moved(batch, torch.device("npu:0"))
    tokens = float(scored.sum())
    wanted, found = here(batch, tokens), there(on_device, tokens)
    assert found.value.item() == pytest.approx(wanted.value.item(), abs=1e-4)
    assert set(found.metrics) == set(wanted.metrics)
    for name, value in wanted.metrics.items():
        assert found.metrics[name].item() == pytest.approx(value.item(), abs=1e-3), name
    assert there.largest_ratio() == pytest.approx(here.largest_ratio(), rel=1e-3)
    for each in (wanted, found):
        each.value.backward()  # type: ignore[no-untyped-call]
    for (name, mine), theirs in zip(here.learner.model.named_parameters(), there.learner.model.parameters()):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert (mine.grad - theirs.grad.cpu()).norm() <= 2e-3 * mine.grad.norm() + 1e-6, name
