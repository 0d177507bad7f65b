"""fp16 on simulated chips without bf16: 910A and the 910B of 2019 train (test_stages_npu.py), 310P only answers.

They saturate: overflow gives the largest number instead of an infinity, and only the float status tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OnNpu = Callable[..., Any]


STATUS = """
import torch
from ascendchat.device import pick

device = pick("npu", dtype="fp16")
device.bind(0)
assert device.scaling.overflow == "flag", device.scaling
def overflows(make):
    device.clear_overflow()
    assert not device.overflowed([])
    result = make()
    seen = device.overflowed([])
    assert seen == device.overflowed([]), "reading it does not clear it"
    return seen, result.cpu().tolist()

half = torch.tensor([60000.0, -60000.0, 1.0]).half().npu()
assert overflows(lambda: half + 1) == (False, [60000.0, -60000.0, 2.0])
assert overflows(lambda: half * 2) == (True, [65504.0, -65504.0, 2.0])
assert overflows(lambda: half[:1] @ half[:1])[0]
assert overflows(lambda: torch.full((1,), 1e38).npu() * 10)[0], "float32 too"
assert overflows(lambda: torch.zeros(2).npu().masked_fill(torch.tensor([True, False]).npu(), float("-inf")))[0]
weight = torch.ones(4, dtype=torch.half, device="npu", requires_grad=True)
def backward(scale):
    weight.grad = None
    ((weight * 8).float().sum() * scale).backward()
    return weight.grad
assert overflows(lambda: backward(100.0))[0] is False
assert overflows(lambda: backward(10000.0))[0] is True, "in a backward pass"
other = torch.npu.Stream()
with torch.npu.stream(other):
    half * 2
torch.npu.synchronize()
assert device.overflowed([]), "whichever stream it was"
"""

EAGER = """
import torch
from ascendchat.device import pick
from ascendchat.nn.attention import choose
from ascendchat.nn.attention import documents

device = pick("npu")
place = device.bind(0)
kernel, why = choose("npu", device.dtype, 32)
assert "Ascend910A has no fused training attention" in why and device.operators() is None
q, k, v = (torch.randn(1, 16, 2, 32).half().to(place) for _ in range(3))
known = documents(kernel, [6, 10], torch.zeros(1, 16).to(place), torch.float16)
device.clear_overflow()
kernel.dense(q, k, v, 4, 1.0)
kernel.packed(q, k, v, known.bounds, 16, 1.0)
kernel.cached(q[:, :1], k, v, torch.tensor([9]).to(place), 16, 1.0)
assert not device.overflowed([])
"""


def test_attention_hides_keys_without_an_infinity(on_npu: OnNpu) -> None:
    """It would set the float status, and no step would ever be taken."""
    on_npu(EAGER, chip="Ascend910A")


@pytest.mark.parametrize(
    ("chip", "setting"),
    [
        ("Ascend910A", {}),
        ("Ascend910B", {}),
        ("Ascend310P3", {}),
        ("Ascend910B3", {"INF_NAN_MODE_ENABLE": "0", "INF_NAN_MODE_FORCE_DISABLE": "1"}),
    ],
    ids=["910A", "910B of 2019", "310P3", "910B3 told to saturate"],
)
def test_overflow_sets_the_float_status_until_it_is_cleared(chip: str, setting: dict[str, str], on_npu: OnNpu) -> None:
    on_npu(STATUS, chip=chip, **setting)


def test_the_float_status_of_one_device_is_not_that_of_another(on_npu: OnNpu) -> None:
    on_npu(
        """
        import torch
        from ascendchat.device import pick

        device = pick("npu")
        half = [torch.tensor([60000.0]).half().to(device.bind(index)) for index in (0, 1)]
        for index in (0, 1):
            device.bind(index)
            device.clear_overflow()
        half[1] * 2
        assert device.overflowed([])
        device.bind(0)
        assert not device.overflowed([])
        """,
        chip="Ascend910A",
        devices=2,
    )


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend310P3"])
def test_old_chips_compile_each_operator_unless_they_are_told_not_to(chip: str, on_npu: OnNpu) -> None:
    """Then torch_npu takes the older operators, of which cannsim has few."""
    (rank,) = on_npu("import torch; print(torch.zeros(4).npu().tanh().cpu())", chip=chip, check=False)
    assert "EZ3002: Optype [Tanh]" in rank.output
    code = "from ascendchat.device import pick; pick('npu'); import torch; print(torch.zeros(4).npu().tanh().cpu())"
    (rank,) = on_npu(code, chip=chip)
    assert "tensor([0., 0., 0., 0.])" in rank.output


def test_adamw_as_one_operator_is_refused_on_old_chips(on_npu: OnNpu) -> None:
    """So the optimizer writes it out there: chips.py, fused_adamw."""
    code = """
from ascendchat.device import pick
device = pick("npu"); device.bind(0)
import torch
from ascendchat.nn.optim import adamw_update
weight = [torch.ones(4, device="npu") for _ in range(4)]
adamw_update(*weight, torch.zeros((), device="npu"), lr=0.1, betas=(0.8, 0.9), decay=0.0, fused={fused})
print(weight[0].cpu(), device.chip.fused_adamw)
"""
    (rank,) = on_npu(code.format(fused=True), chip="Ascend910A", check=False)
    assert "ApplyAdamWV2 is not supported on soc version Ascend910A" in rank.output
    (rank,) = on_npu(code.format(fused=False), chip="Ascend910A")
    assert "False" in rank.output
