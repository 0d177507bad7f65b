"""fp16 on simulated chips without bf16: 910A and the 910B of 2019 train, 310P only answers.

They saturate: overflow gives the largest number instead of an infinity, and only the float status tells.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_chat
from tiny_chat import ANSWER, CHAIN, ROOT, STEPS, chat, losses, training

from ascendchat.record import read_metrics

OnNpu = Callable[..., Any]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.make(tmp_path_factory.mktemp("fp16"))


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend910B"])
def test_base_mid_sft_and_chat_follow_fp32(chip: str, home: Path, on_npu: OnNpu) -> None:
    """Within 4 % of the losses of the CPU in fp32 at every step (0.002 where they are nearly 0), the same answer.

    Numbers that tensors are multiplied by are rounded to fp16, too, as on the chips: 2.8 % were seen.
    """
    program = CHAIN.format(commands=[*training(home, "npu", chip), chat(chip, "npu"), chat("cpu", "npu")])
    (rank,) = on_npu(program, chip=chip, timeout=300, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT)
    assert f"npu: {chip}, float16" in rank.output
    assert "attention: eager" in rank.output
    assert "overflowed" not in rank.output
    for stage in STEPS:
        assert losses(home, chip, stage) == pytest.approx(losses(home, "cpu", stage), rel=0.04, abs=0.002)
        rows = [row for row in read_metrics(home / "runs" / chip / stage) if "loss" in row]
        assert {(row["loss_scale"], row["skipped_steps"]) for row in rows} == {(2.0**16, 0)}
    assert rank.output.count(ANSWER) == 2, "of its own model and of the CPU's"


def test_310p_answers_and_is_not_trained_on(home: Path, on_npu: OnNpu) -> None:
    program = f"""
from ascendchat.cli import main

assert main({chat("cpu", "npu")}) == 0
print("STATUS", *[main(words) for words in {training(home, "npu", "refused")}])
"""
    (rank,) = on_npu(program, chip="Ascend310P3", timeout=120, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT)
    assert ANSWER in rank.output
    assert "STATUS 2 2 2" in rank.output
    assert rank.output.count("Ascend310P3 is an inference product: CANN lists no gradients") == 3
    assert not (home / "runs" / "refused").exists()


@pytest.mark.slow
def test_steps_that_overflow_are_skipped_and_said_until_the_scale_is_right(home: Path, on_npu: OnNpu) -> None:
    """The overflow is real: with this scale the gradients leave the range of float16."""
    (words, *_) = training(home, "npu", "high")
    program = f"""
from ascendchat.cli import main
from ascendchat.train import loop

loop.FIRST_SCALE = 2.0**32
assert main({words}) == 0
"""
    (rank,) = on_npu(program, chip="Ascend910A", timeout=200, ASCENDCHAT_HOME=home, PYTHONPATH=ROOT)
    assert "step 1: float16 overflowed, no update; loss scale 4.29497e+09 -> 2.14748e+09" in rank.output
    rows = [row for row in read_metrics(home / "runs" / "high" / "base") if "loss" in row]
    skipped = [row["skipped_steps"] for row in rows]
    assert skipped[0] == 1
    assert 1 < skipped[-1] < 20
    assert rows[-1]["loss_scale"] == 2.0 ** (32 - skipped[-1])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1


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
from ascendchat.nn.updates import adamw_update
weight = [torch.ones(4, device="npu") for _ in range(4)]
adamw_update(*weight, torch.zeros((), device="npu"), lr=0.1, betas=(0.8, 0.9), decay=0.0, fused={fused})
print(weight[0].cpu(), device.chip.fused_adamw)
"""
    (rank,) = on_npu(code.format(fused=True), chip="Ascend910A", check=False)
    assert "ApplyAdamWV2 is not supported on soc version Ascend910A" in rank.output
    (rank,) = on_npu(code.format(fused=False), chip="Ascend910A")
    assert "False" in rank.output
