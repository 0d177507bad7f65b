"""A small GPT trained on the simulated NPU equals the CPU, in every queue mode and on several ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from small_gpt import LAYERS, adamw, train

OnNpu = Callable[..., list[Any]]
STEPS = 8

PROGRAM = """
import os, torch, cannsim, torch.distributed as dist
from small_gpt import adamw, train

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.npu.set_device(rank)
{start}
share = slice(rank * 4 // world, (rank + 1) * 4 // world)
losses = torch.tensor(train("npu", adamw(), {steps}, rows=share, wrap=wrap)).npu()
if world > 1:
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
print("losses", losses.tolist(), cannsim.launches().get("aclnnFlashAttentionScore"))
if world > 1:
    dist.destroy_process_group()
"""
START = {
    "alone": "wrap = lambda model: model",
    "ddp": """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("hccl")
wrap = lambda model: DistributedDataParallel(model, device_ids=[rank])
""",
    "fsdp2": """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("hccl")
def wrap(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)
""",
}


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """The losses of the CPU."""
    losses = train("cpu", adamw(), STEPS)
    assert losses[-1] < losses[0] - 0.5, "it learns, so the updates are compared too"
    return losses


def losses_of(output: str) -> tuple[list[float], int]:
    """Of every step, and how often the fused attention was launched."""
    (line,) = [line for line in output.splitlines() if line.startswith("losses ")]
    found, _, launched = line.removeprefix("losses ").rpartition(" ")
    return ast.literal_eval(found), int(launched)


@pytest.mark.parametrize("queue", [0, 2])
def test_a_gpt_trains_as_on_the_cpu_in_every_queue_mode(on_npu: OnNpu, expected: list[float], queue: int) -> None:
    """The mode is read once per process; mode 1, the default, is that of test_ops_training.py."""
    (rank,) = on_npu(PROGRAM.format(start=START["alone"], steps=STEPS), TASK_QUEUE_ENABLE=queue)
    losses, launched = losses_of(rank.output)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert launched == LAYERS * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_data_parallel_training_equals_one_process(on_npu: OnNpu, expected: list[float], how: str) -> None:
    for rank in on_npu(PROGRAM.format(start=START[how], steps=STEPS), 2, timeout=180):
        assert losses_of(rank.output)[0] == pytest.approx(expected, abs=1e-4)
