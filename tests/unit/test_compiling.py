"""What is compiled once is found again by later processes, the gradients that functions write out themselves too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascendchat.device.compiling import compiled, keep


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_the_cache_lies_in_the_home_unless_the_user_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    for mine, wanted in ((None, str(tmp_path / "compiled" / "torch")), (str(tmp_path), str(tmp_path))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if mine:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine)
        compiled(torch.sin)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == wanted
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize(("world", "local", "kept"), [("8", "8", True), ("16", "8", False), ("2", None, True)])
def test_nodes_that_share_a_home_do_not_share_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: str, local: str | None, kept: bool
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("SOME_CACHE", "")
    monkeypatch.delenv("SOME_CACHE")
    keep("SOME_CACHE", "part")
    assert os.environ.pop("SOME_CACHE", None) == (str(tmp_path / "compiled" / "part") if kept else None)


@pytest.mark.slow
def test_a_gradient_of_its_own_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        compiled(lambda x: Cubed.apply(x).sum(), fullgraph=True)(x).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3.0, 12.0]
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1]
