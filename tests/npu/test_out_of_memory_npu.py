"""Out of memory on the simulated NPU: an operator's workspace that does not fit kills torch_npu's queue in mode 2.

python -m cannsim run -- pytest tests/npu/test_out_of_memory_npu.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_process import ServerPopen, run

import cannsim
from ascendchat.record import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parent))
from test_base_npu import ROOT, base, home

__all__ = ["home"]  # the fixture

PROGRAM = """
    import torch
    from ascendchat.device import pick

    device = pick("npu")
    device.bind(0)
    x = torch.ones(2**20, device="npu")
    assert device.responds()
    try:
        x.tanh_()
        device.synchronize()
    except RuntimeError as error:
        print("raised:", type(error).__name__)
    found = torch.ones(4096, device="npu").sum().item()
    print("sum", found, "responds", device.responds())
"""


@pytest.mark.parametrize(("queue", "alive"), [(1, True), (2, False)])
def test_a_workspace_that_does_not_fit_kills_the_queue_in_mode_2_only(
    on_npu: Callable[..., list[Any]], queue: int, alive: bool
) -> None:
    """It raises once; afterwards sums are wrong without an error, which only a checked result shows."""
    settings = {"CANNSIM_WORKSPACE": "aclnnInplaceTanh:20000000000,aclnnTanh:20000000000", "CANNSIM_MEMORY_GB": "1"}
    (rank,) = on_npu(PROGRAM, TASK_QUEUE_ENABLE=queue, **settings)
    assert "raised: OutOfMemoryError" in rank.output
    assert f"responds {alive}" in rank.output
    assert ("sum 4096.0" in rank.output) == alive


def launch(home: Path, name: str, *more: str, factor: int, devices: int = 1) -> tuple[int, str]:
    """base with 8 rows, where the gradient of a norm wants `factor` times its arguments as workspace."""
    environment = cannsim.environment(devices=devices, memory_gb=0.25, state=str(home / f"state-{name}"))
    environment |= {"ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"CANNSIM_WORKSPACE": f"aclnnRmsNormGrad:{factor}x", "HCCL_BUFFSIZE": "1"}
    command = base(home, name, 2, "--device-type=npu", f"--device-batch-size={8 // devices}", *more)
    if any(flag.startswith("--minutes") for flag in more):  # in place of the steps
        at = command.index("--num-iterations")
        del command[at : at + 2]
    started = ["launch", f"--devices={devices}", "--max-restarts=0", *command]
    result = run(
        [sys.executable, "-m", "ascendchat", *started],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        how=ServerPopen,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_a_dead_queue_is_started_again_with_the_next_smaller_batch(home: Path) -> None:
    status, output = launch(home, "smaller", factor=1000)
    assert status == 0, output
    assert "starting again with the next smaller device batch" in output
    assert "trying the next smaller device batch with the same total" in output
    assert output.count("trying the next smaller") == 1, "once: the process before had found that 8 rows do not fit"
    assert len([row for row in read_metrics(home / "runs" / "smaller" / "base") if "loss" in row]) == 2


@pytest.mark.slow
def test_so_is_one_that_died_while_the_speed_was_measured(home: Path) -> None:
    status, output = launch(home, "timed", "--minutes=0.00001", factor=1000)
    assert status == 0, output
    assert "starting again with the next smaller device batch" in output
    assert len([row for row in read_metrics(home / "runs" / "timed" / "base") if "loss" in row]) >= 1
