"""What is compiled once is found again by later processes, the gradients that functions write out themselves too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascendchat.device.compiling import compiled


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
    for mine, wanted in (("", str(tmp_path / "compiled")), (str(tmp_path), str(tmp_path))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if mine:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine)
        compiled(torch.sin)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == wanted
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


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
