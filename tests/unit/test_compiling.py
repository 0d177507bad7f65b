"""What is compiled once is found again by later processes, the gradients that functions write out themselves too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ascendchat.device import compiling
from ascendchat.device.compiling import compiled, keep

PROGRAM = """
import torch
from torch._dynamo.utils import counters
from ascendchat.device.compiling import compiled


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


for wanted in (0, 1):
    torch.compiler.reset()
    counters.clear()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    compiled(lambda x: Cubed.apply(x).sum(), fullgraph=True)(x).backward()
    assert x.grad.tolist() == [3.0, 12.0]
    assert counters["aot_autograd"]["autograd_cache_hit"] == wanted, dict(counters["aot_autograd"])
"""


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


def test_a_torch_without_the_setting_compiles_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its module of settings refuses names that it does not have."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(AttributeError):
        torch._functorch.config.no_such_setting = True  # type: ignore[attr-defined]
    monkeypatch.setattr(compiling, "SETTING", "no_such_setting")
    assert callable(compiled(torch.sin))


@pytest.mark.slow
def test_a_gradient_of_its_own_is_found_again(tmp_path: Path) -> None:
    """In a process of its own: torch's compiler imports setuptools, which wants to be imported early."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=600)
