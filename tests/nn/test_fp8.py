"""--fp8: 8-bit products near the exact ones, with gradients of the size that the run really has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_training import prepared_home

from ascendchat.cli import main
from ascendchat.config.rl import RlConfig
from ascendchat.device import DeviceOptions, Scaling
from ascendchat.device.cpu import CPU
from ascendchat.nn.attention import Reference
from ascendchat.nn.fp8 import GRADIENT_SCALE, Fp8Head, Fp8Ops
from ascendchat.nn.gpt import GPT
from ascendchat.nn.loss import IGNORE, head_loss
from ascendchat.rl.grpo import token_weight
from ascendchat.rl.stage import RlStage
from ascendchat.sizes.batch import Split
from ascendchat.sizes.shape import Shape
from ascendchat.train import budget
from ascendchat.train.loop import Result
from ascendchat.train.model import TrainModel


class Eight(CPU):
    """A CPU that says it has 8-bit products and compiles; torch computes the products in software."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(DeviceOptions())
        self.chip, self.dtype, self.compiles = replace(self.chip, fp8=True), dtype, True

    def compile(self, fn: Any, **options: Any) -> Any:
        return fn

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.dtype == torch.float16, "inf" if self.dtype == torch.float16 else "none")


@pytest.mark.parametrize("tokens", [512, 2**21])
def test_products_and_gradients_are_near_the_exact_ones_whatever_the_batch(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(256, 128, generator=generator) / 11).bfloat16()
    gradient = (torch.randn(64, 256, generator=generator) / tokens).bfloat16()
    ops = Fp8Ops(x.device)
    ops.mean_over(tokens)
    for found in (ops.linear(x, weight), ops.transposed_linear(x, weight.t().contiguous())):
        exact = x.detach().float() @ weight.float().t()
        assert (found.float() - exact).norm() < 0.06 * exact.norm()
        (dx,) = torch.autograd.grad(found, x, gradient)
        exact = gradient.float() @ weight.float()
        assert (dx.float() - exact).norm() < 0.1 * exact.norm()


def gradients_of(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, **more: Any
) -> tuple[float, torch.Tensor, torch.Tensor]:
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss = head_loss(hidden, head, targets, 250, **more)
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert head.grad is not None
    return float(loss.detach()), hidden.grad.float(), head.grad.float()


@pytest.mark.parametrize(("size", "tokens"), [(0.001, 2**19), (0.1, 64), (3.0, 3 * 2**20)])
def test_a_head_in_8_bits_is_near_the_exact_one_whatever_its_weights_and_the_batch(size: float, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 32, 128, generator=generator).bfloat16()
    head = (torch.randn(256, 128, generator=generator) * size).bfloat16()
    targets = torch.randint(0, 250, (2, 32), generator=generator)
    targets[1, 20:] = IGNORE
    more = {"weight": torch.tensor(1.0 / tokens), "mtp_weight": torch.tensor(0.4)}
    exact = gradients_of(hidden, head, targets, **more)
    found = gradients_of(hidden, head, targets, products=Fp8Head(lambda function: function), **more)
    assert found[0] == pytest.approx(exact[0], rel=0.02)
    assert (found[1] - exact[1]).norm() < 0.12 * exact[1].norm()
    assert (found[2] - exact[2]).norm() < 0.08 * exact[2].norm()
    assert not found[1][1, 20:].any(), "what is not scored has no gradient"
    assert not torch.equal(found[1], exact[1]), "the products are those of 8 bits"


SIZES = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 128 --fp8 --device-type cpu".split()


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `ascendchat base` would train, in the order of the calls; nothing is trained."""
    found: list[Any] = []
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setattr("ascendchat.train.run.fit", lambda stage, *_, **__: found.append(stage) or Result(0))
    return found


def test_a_timed_run_scales_gradients_for_its_own_batch(
    stages: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch is known only when the speed is."""
    monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, **__: Eight())
    monkeypatch.setattr(budget, "measured_token_budget", lambda *_: 3_000_000)
    data = prepared_home(tmp_path)
    for more in (["--steps", "4"], ["--minutes", "5"]):
        assert main(["base", data, *SIZES, "--run", more[0][2:], *more]) == 0
    plain, timed = stages
    assert plain.split.total != timed.split.total
    for stage in stages:
        ops = stage.train_model.model.ops
        assert isinstance(ops, Fp8Ops)
        assert float(ops.gradient_scale) == GRADIENT_SCALE * stage.split.total
        assert isinstance(stage.train_model.products, Fp8Head)


def test_fp8_is_left_out_where_the_loss_is_scaled(
    stages: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, **__: Eight(torch.float16))
    assert main(["base", prepared_home(tmp_path), *SIZES, "--run", "half"]) == 0
    assert not isinstance(stages[0].train_model.model.ops, Fp8Ops)
    assert "--fp8 is ignored: the loss is scaled for float16" in capsys.readouterr().out


def test_rl_scales_gradients_for_the_tokens_of_its_answers() -> None:
    """Without it a gradient of 1 / 2^18 would be 0 in 8 bits."""
    device, shape = Eight(), Shape.from_depth(1, dim=32, vocab=64, seq_len=64)
    place = torch.device("cpu")
    train_model = TrainModel(GPT(shape, Fp8Ops(place)).to_compute(device.dtype), Reference(), device, place)
    config = RlConfig(prompts_per_step=32, samples=16, max_new_tokens=512)
    given: Any = SimpleNamespace(train_model=train_model, method=None, rollout=None)
    nothing: Any = None
    RlStage(given, Split(1, 1, 1, 64), 10, nothing, given, [], nothing, config, nothing, nothing)
    ops = train_model.model.ops
    assert isinstance(ops, Fp8Ops)
    assert float(ops.gradient_scale) * token_weight(512, "token", 32 * 16, 512) == GRADIENT_SCALE


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "eight"), [(64, True), (72, False)])
def test_sizes_that_8_bit_products_refuse_are_left_out_and_results_say_what_was_timed(
    dim: int, eight: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, **__: Eight())
    # A small vocabulary: in bfloat16 and in 8 bits a CPU may need seconds for the products of the head.
    sizes = f"--depth 1 --dim {dim} --head-dim 8 --vocab-size 512 --max-seq-len 32 --device-batch-size 1"
    sizes += " --total-batch-size 32"
    assert main(["bench", "train", "--fp8", *sizes.split(), "--steps-to-time", "1", "--device-type", "cpu"]) == 0
    out = capsys.readouterr().out
    assert ("--fp8 is ignored: 8-bit products are of sizes that 16 divides, not 72" in out) == (not eight)
    assert json.loads(out.splitlines()[-1])["fp8"] == eight
