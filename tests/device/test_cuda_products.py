"""The MLP by quack-kernels: the operators around it have the right gradients, and it is left out where it cannot run.

The package itself needs a Hopper chip: without one a stand-in computes what its documentation says, in plain torch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from small_training import prepared_home
from torch import Tensor

from ascendchat.chips import find
from ascendchat.cli import main
from ascendchat.config.rl import RlConfig
from ascendchat.config.train import BenchTrainConfig
from ascendchat.device import DeviceOptions, cuda_products
from ascendchat.device.cpu import CPU
from ascendchat.device.cuda import CUDA
from ascendchat.nn.gpt import PlainOps
from ascendchat.sizes.shape import Shape
from ascendchat.train import rows, start
from ascendchat.train.loop import Result
from ascendchat.train.model import build
from ascendchat.train.run import training_context

HOPPER = torch.cuda.is_available() and cuda_products.refusal(torch.device("cuda"), torch.bfloat16) is None


def gemm_act(A: Tensor, B: Tensor, *, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    assert activation == "relu_sq"
    assert not tuned
    before = A @ B
    return before, torch.relu(before).square()


def gemm_dact(A: Tensor, B: Tensor, PreAct: Tensor, *, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    assert activation == "relu_sq"
    assert not tuned
    assert A.is_contiguous()
    positive = torch.relu(PreAct)
    return (A @ B) * 2.0 * positive, positive.square()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in that can be imported."""
    monkeypatch.setattr(cuda_products, "PACKAGE", replace(cuda_products.PACKAGE))
    module: Any = ModuleType("quack.gemm_interface")
    module.gemm_act, module.gemm_dact = gemm_act, gemm_dact
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    return module


def weights(place: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, up, down and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 96, 64), (256, 64), (256, 64), (2, 96, 64)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(place, dtype) / 4 for size in sizes]


def results(mlp: Any, x: Tensor, up: Tensor, down: Tensor, grad: Tensor) -> list[Tensor]:
    """The result and the three gradients."""
    there = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    y = mlp(*there)
    return [y.detach(), *torch.autograd.grad(y, there, grad)]


@pytest.mark.parametrize("compiled", [False, True])
def test_result_and_gradients_are_those_of_the_plain_mlp(package: Any, compiled: bool) -> None:
    torch.compiler.reset()
    mlp = PlainOps(whole_mlp=cuda_products.mlp).mlp
    if compiled:
        mlp = torch.compile(cuda_products.mlp, backend="aot_eager", fullgraph=True)
    turned = weights()
    turned[-1] = turned[-1].transpose(0, 1).contiguous().transpose(0, 1)  # a gradient of other strides
    for given in (weights(), turned):
        for found, wanted in zip(results(mlp, *given), results(PlainOps().mlp, *given), strict=True):
            torch.testing.assert_close(found, wanted)


def test_it_is_left_out_where_it_cannot_run_and_says_so(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capability = torch.device("cuda"), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])
    cuda_products.PACKAGE.version = ""
    assert (refused := cuda_products.refusal(cuda, torch.bfloat16))
    assert cuda_products.PACKAGE.notice(refused) is None

    def anew() -> None:
        monkeypatch.setattr(cuda_products, "PACKAGE", replace(cuda_products.PACKAGE))
        cuda_products.PACKAGE.version = "0.9"

    def said(dtype: torch.dtype = torch.bfloat16, *sizes: int) -> str | None:
        anew()
        refused = cuda_products.refusal(cuda, dtype, *sizes)
        found = cuda_products.PACKAGE.notice(refused)
        used = found == "the MLP's products are made by the package quack-kernels"
        assert used == (refused is None)
        return "" if used else found

    unused = "the package quack-kernels 0.9 is not used: "
    assert said(torch.bfloat16, 768, 3072) == ""
    assert said(torch.float16) == unused + "it was tried with bfloat16 only"
    assert said(torch.bfloat16, 768, 3076) == unused + "it is for sizes that 8 divides, not 3076"
    capability[0] = (8, 0)
    assert said() == unused + "it is for compute capability 9.0 and newer, this is 8.0"
    capability[0] = (9, 0)
    gpu = CUDA(torch.cuda, find("H200"), DeviceOptions())
    assert gpu.packaged_mlp(64, 256) == (None, None), "only compiled training asks for it"
    gpu.compiles = True
    assert gpu.packaged_mlp(64, 256) == (cuda_products.mlp, "the MLP's products are made by the package quack-kernels")
    assert gpu.packaged_mlp(64, 257)[0] is None
    package.gemm_dact = lambda A, B, PreAct, activation: None
    assert said() == unused + "gemm_dact takes no tuned"


@pytest.mark.skipif(not HOPPER, reason="needs quack-kernels and a chip of compute capability 9.0")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_real_package_is_near_the_exact_result(compiled: bool) -> None:
    torch.compiler.reset()
    mlp = torch.compile(cuda_products.mlp, fullgraph=True) if compiled else cuda_products.mlp
    found = results(mlp, *weights("cuda", torch.bfloat16))
    wanted = results(PlainOps().mlp, *(tensor.double() for tensor in weights("cuda", torch.bfloat16)))
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()


class Packaged(CPU):
    """A CPU with a package for layers of even sizes."""

    def __init__(self) -> None:
        super().__init__(DeviceOptions())
        self.chip = replace(self.chip, fp8=True)

    def packaged_mlp(self, *sizes: int) -> tuple[Any, str | None]:
        return None if any(size % 8 for size in sizes) else PlainOps().mlp, "there is a package"

    def compile(self, fn: Any, **options: Any) -> Any:
        return fn


def test_training_asks_the_device_for_it_and_plans_for_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan of memory and the operators agree: both know of the package, or neither does."""
    data, seen, planned = prepared_home(tmp_path), list[Any](), list[list[str]]()
    counted = rows.fit_split
    monkeypatch.setattr(rows, "fit_split", lambda *a, **k: (planned.append(k["packaged"]), counted(*a, **k))[1])
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setattr("ascendchat.train.run.fit", lambda stage, *_, **__: seen.append(stage) or Result(0))
    sizes = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 128 --steps 1 --device-type cpu"
    for flags, used in (("--run r", True), ("--run s --fp8", False), ("--run t --dim 60 --head-dim 30", False)):
        device = Packaged()
        device.compiles = "fp8" in flags
        monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, device=device, **__: device)
        assert main(["base", data, *sizes.split(), *flags.split()]) == 0
        assert planned.pop() == (["mlp"] if used else [])
        assert ("there is a package" in capsys.readouterr().out) == ("fp8" not in flags)
        assert (seen[-1].train_model.model.ops.whole_mlp is not None) == used


def test_where_two_policies_are_compared_no_package_rounds_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, shape = Packaged(), Shape.from_depth(1, dim=32, vocab=64, seq_len=64)
    monkeypatch.setattr("ascendchat.train.run.pick", lambda *_, **__: device)
    with training_context(BenchTrainConfig()) as here:
        train_model = build(BenchTrainConfig(), shape, here, packaged=False)
    assert train_model.model.ops.whole_mlp is None  # type: ignore[attr-defined]
    assert train_model.packaged == []
    made: list[bool] = []
    monkeypatch.setattr(start, "build", lambda *_, packaged=True: made.append(packaged))
    monkeypatch.setattr(start, "initial_checkpoint", MagicMock())
    start.from_checkpoint(RlConfig(), MagicMock(), "rl")
    assert made == [False]


def test_what_is_not_learnt_from_is_computed_as_elsewhere() -> None:
    """Samples and validation have rows of any number, which no package was asked about."""

    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("the package was asked")

    x, up, down, _ = weights()
    with torch.no_grad():
        found = PlainOps(whole_mlp=refuse).mlp(x, up, down)
    torch.testing.assert_close(found, PlainOps().mlp(x, up, down))
