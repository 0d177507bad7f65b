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

from ascendchat.device import accelerator
from ascendchat.device.accelerator import compiled, keep_compiled, operators_version

PROGRAM = """
import os
import torch
import torch._inductor.compile_fx  # before the processes are forked: each would import it for itself
from torch._dynamo.utils import counters
from ascendchat.device import accelerator


@torch.library.custom_op("test::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.custom_op("test::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return same(x)

    @staticmethod
    def backward(ctx, grad):
        return scaled(grad, 3.0)


scaled.register_fake(lambda x, factor: torch.empty_like(x))
same.register_fake(torch.empty_like)
for release, factor in (("first", 2.0), ("first", 2.0), ("second", 5.0)):
    if os.fork() == 0:
        accelerator.operators_version = lambda: release
        same.register_autograd(lambda ctx, grad: scaled(grad, factor))
        x = torch.ones(1, requires_grad=True)
        accelerator.compiled(lambda x: Tripled.apply(same(x)), fullgraph=True)(x).backward(torch.ones(1))
        print(release, x.grad.item(), counters["aot_autograd"]["autograd_cache_hit"], flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_a_later_process_finds_what_was_compiled_but_not_that_of_another_version(tmp_path: Path) -> None:
    """Gradients that a function writes out itself are kept, too. Of an operator torch's key has the name only: without
    our version in it, the third process would find the gradient of the first. No operator here needs the C++ compiler,
    which takes a minute. Not in this process: torch's compiler imports setuptools, which wants to be imported early."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    found = [line.split() for line in done.stdout.splitlines()]  # release, gradient, whether it was found
    assert found == [["first", "6.0", "0"], ["first", "6.0", "1"], ["second", "15.0", "0"]], done.stderr


def test_the_cache_lies_in_the_home_unless_the_user_has_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    for mine, wanted in ((None, str(tmp_path / "compiled" / "torch")), (str(tmp_path), str(tmp_path))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if mine:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine)
        compiled(torch.sin)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == wanted
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def named(monkeypatch: pytest.MonkeyPatch, home: Path) -> str | None:
    """The folder that a compiler is told to keep its work in; the variable is as it was afterwards."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(home))
    monkeypatch.setenv("SOME_CACHE", "")
    monkeypatch.delenv("SOME_CACHE")
    keep_compiled("SOME_CACHE", "part")
    return os.environ.pop("SOME_CACHE", None)


@pytest.mark.parametrize(("world", "local", "kept"), [("8", "8", True), ("16", "8", False), ("2", None, True)])
def test_nodes_that_share_a_home_do_not_share_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: str, local: str | None, kept: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "")
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert named(monkeypatch, tmp_path) == (str(tmp_path / "compiled" / "part") if kept else None)


def test_a_torch_without_the_setting_compiles_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its module of settings refuses names that it does not have."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with pytest.raises(AttributeError):
        torch._functorch.config.no_such_setting = True  # type: ignore[attr-defined]
    monkeypatch.setattr(accelerator, "AUTOGRAD_CACHE", "no_such_setting")
    assert callable(compiled(torch.sin))


@pytest.mark.parametrize("fault", ["a blank", "a'quote", "a file", "full", "read-only", "of another user"])
def test_nothing_is_kept_where_compilers_would_fail_or_another_user_could_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """torch splits the command of the C++ compiler as a shell does; what lies in the folder is run."""
    (tmp_path / "a file").write_text("")

    def refuse(**_: object) -> None:  # root may write everywhere: so the refusal of the system is played
        raise OSError(errno.EROFS, "Read-only file system")

    if fault == "full":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    elif fault == "read-only":
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    elif fault == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert named(monkeypatch, tmp_path / fault if fault.startswith("a") else tmp_path) is None


def test_the_version_of_the_operators_is_that_of_their_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nn").mkdir()
    monkeypatch.setattr(accelerator, "__file__", str(tmp_path / "device" / "accelerator.py"))
    found = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "nn" / "ops.py").write_text(text)
        operators_version.cache_clear()
        found.add(operators_version())
    operators_version.cache_clear()
    assert len(found) == 2


def test_a_torch_whose_keys_take_no_version_keeps_no_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", True)
    compiled(torch.sin)
    assert torch._functorch.config.enable_autograd_cache
    monkeypatch.setattr(accelerator, "CACHE_TAG", "no_such_setting")
    compiled(torch.sin)
    assert not torch._functorch.config.enable_autograd_cache
