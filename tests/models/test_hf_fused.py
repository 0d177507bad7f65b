"""Fused operators inside models of transformers: put in where they compute the same, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import hf_models
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from ascendchat.models.fused import ROTATION, fuse
from ascendchat.nn.attention import Reference, dense

CPU = torch.device("cpu")


class Ops:
    """As a chip would have them; `wrong` names one that it has not quite right."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.calls = wrong, {"norm": 0, "rotary": 0, "swiglu": 0}

    def _called(self, name: str, x: Tensor) -> Tensor:
        self.calls[name] += 1
        return x * 1.001 if name == self.wrong else x

    def weighted_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._called("norm", torch.nn.functional.rms_norm(x, weight.shape, weight, eps))

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return self._called("rotary", x * cos + torch.cat((-second, first), dim=-1) * sin)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._called("swiglu", torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("kind", hf_models.KINDS)
def test_what_computes_the_same_is_put_in(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_models.save(tmp_path / "m", kind)
    model = hf_models.opened(tmp_path / "m").model
    file = sys.modules[type(model.inner.base_model.layers[0]).__module__]
    monkeypatch.setattr(file, ROTATION, getattr(file, ROTATION))  # put back afterwards
    row = torch.arange(3, 23)[None]
    attend = dense(model, Reference(), 20)
    before = model(row, attend)
    for wrong in ("norm", "swiglu", "rotary"):
        assert len(fuse(hf_models.opened(tmp_path / "m").model, Ops(wrong), CPU)) == 2
    ops = Ops()
    names = fuse(model, ops, CPU)
    assert len(names) == 3
    assert f"{ROTATION} x 3" in names
    ops.calls = dict.fromkeys(ops.calls, 0)
    torch.testing.assert_close(model(row, attend), before, atol=1e-5, rtol=1e-5)
    assert ops.calls == {"norm": 13 if kind == "qwen3" else 7, "rotary": 6, "swiglu": 3}
    assert fuse(model, None, CPU) == []
