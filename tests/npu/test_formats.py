"""Private formats keep what was cast to them; operators without a simulation say their name, or run boxed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEAD = """
import torch, torch_npu, cannsim
"""


def test_private_formats_come_back_as_they_were(on_npu: Callable[..., list[Any]]) -> None:
    """Sizes in elements: NZ is tiles of 16 x 16 (int8: 16 x 32), NC1HWC0 has channels in groups of 16."""
    code = """
torch.npu.config.allow_internal_format = True
NZ, NC1HWC0, FRACTAL_Z = 29, 3, 4
for format, shape, dtype, size in [
    (NZ, (5, 20), torch.float32, 512),
    (NZ, (5, 20), torch.float16, 512),
    (NZ, (5, 20), torch.int8, 512),
    (NC1HWC0, (2, 3, 4, 5), torch.float16, 640),
    (FRACTAL_Z, (2, 3, 4, 5), torch.float16, 5120),
]:
    x = torch.randn(shape).mul(9).to(dtype)
    y = torch_npu.npu_format_cast(x.npu(), format)
    assert int(torch_npu.get_npu_format(y)) == format
    assert torch_npu.get_storage_size(y) == size, (format, torch_npu.get_storage_size(y))
    assert torch.equal(y.cpu(), x), format
    assert torch.equal(torch_npu.npu_format_cast(y, 2).cpu(), x), format
x, w, b = torch.randn(3, 8).half(), torch.randn(8, 10).half(), torch.randn(10).half()
nz = torch_npu.npu_format_cast(w.npu(), NZ)
torch.testing.assert_close((x.npu() @ nz).cpu(), x @ w, rtol=4e-3, atol=4e-3)
torch.testing.assert_close(torch.addmm(b.npu(), x.npu(), nz).cpu(), torch.addmm(b, x, w), rtol=4e-3, atol=4e-3)
assert "aclnnAddmmWeightNz" in cannsim.launches()
"""
    on_npu(HEAD + code)


def test_formats_are_plain_unless_private_ones_are_allowed(on_npu: Callable[..., list[Any]]) -> None:
    code = """
x = torch.randn(5, 20)
y = torch_npu.npu_format_cast(x.npu(), 29)
assert int(torch_npu.get_npu_format(y)) == 2
assert torch.equal(torch.abs(y).cpu(), x.abs())
"""
    on_npu(HEAD + code)


def test_operators_that_run_boxed_launch_nothing_and_are_counted(on_npu: Callable[..., list[Any]]) -> None:
    """Operators named by CANNSIM_BOXED are boxed beside those without a simulation, so one that exists will do."""
    code = """
x = torch.randn(3, 4)
assert torch.equal(x.npu().abs().cpu(), x.abs())
assert cannsim.boxed() == {'aten::abs': 1} and 'aclnnAbs' not in cannsim.launches(), cannsim.boxed()
import ctypes
ctypes.CDLL(None).exit(0)  # the test's own server would leave without the last words
"""
    (rank,) = on_npu(HEAD + code, CANNSIM_BOXED="abs")
    assert "cannsim: not simulated, run boxed on the CPU: aten::abs x1" in rank.output
