"""What is compiled once is found again by later processes, the gradients that functions write out themselves too."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ascendchat.device import compiling
from ascendchat.device.compiling import compiled, keep, version

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

CHANGED = """
import sys
import torch
from ascendchat.device import compiling

compiling.version, factor = lambda: sys.argv[1], float(sys.argv[2])


@torch.library.custom_op("test::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, grad: grad * factor)
x = torch.ones(1, requires_grad=True)
compiling.compiled(lambda x: same(x).sum(), fullgraph=True)(x).backward()
print(x.grad.item())
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


@pytest.mark.parametrize("name", ["with a blank", "with'quote", "file"])
def test_a_folder_that_compilers_cannot_use_is_not_named_to_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """torch splits the command of the C++ compiler as a shell does."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path / name))
    monkeypatch.delenv("SOME_CACHE", raising=False)
    keep("SOME_CACHE", "part")
    assert "SOME_CACHE" not in os.environ


@pytest.mark.parametrize("fault", ["full", "read-only", "of another user"])
def test_nothing_is_kept_where_it_would_fail_or_be_another_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.delenv("SOME_CACHE", raising=False)
    if fault == "full":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    elif fault == "read-only":  # root may write everywhere: so the refusal of the system is played

        def refuse(**_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    else:
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    keep("SOME_CACHE", "part")
    assert "SOME_CACHE" not in os.environ


def test_the_version_of_the_operators_is_that_of_their_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nn").mkdir()
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "device" / "compiling.py"))
    found = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "nn" / "ops.py").write_text(text)
        version.cache_clear()
        found.add(version())
    version.cache_clear()
    assert len(found) == 2


def test_a_torch_whose_keys_take_no_version_keeps_no_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    compiled(torch.sin)
    assert torch._functorch.config.enable_autograd_cache
    monkeypatch.setattr(compiling, "TAG", "no_such_setting")
    compiled(torch.sin)
    assert not torch._functorch.config.enable_autograd_cache


@pytest.mark.slow
def test_another_version_of_an_operator_has_its_own_gradient(tmp_path: Path) -> None:
    """Of an operator torch's key has the name only."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for release, factor in (("first", "2.0"), ("second", "5.0")):
        command = [sys.executable, "-c", CHANGED, release, factor]
        done = subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True, text=True)
        assert done.stdout.split() == [factor]


@pytest.mark.slow
def test_a_gradient_of_its_own_is_found_again(tmp_path: Path) -> None:
    """In a process of its own: torch's compiler imports setuptools, which wants to be imported early."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=environment, timeout=600)
