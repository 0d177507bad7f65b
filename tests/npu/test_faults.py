"""Fault injection: errors where hardware shows them, and a training of two ranks that always ends with a message."""

from __future__ import annotations

import os
import re

import pytest

from ascendchat.doctor.explain import explain

ADD = """
import torch
x = torch.ones(4).npu()
torch.npu.synchronize()
print("before", flush=True)
y = x + x
print("launched", flush=True)
torch.npu.synchronize()
print("over", flush=True)
"""
ENDS = {  # rule: (how far the program comes, its status, what is said)
    "aclnnAdd:1:507015": ("launched", "1", ("507015", "fault kernel_name=aclnnAdd")),  # at the synchronisation
    "aclnnAdd:1:161002": ("before", "1", ("EZ1001",)),  # at the call
    "aclnnAdd:1:hang": ("launched", "1", ("507014", "aicore execution times out")),
    "aclnnAdd:1:kill": ("before", "signal 9", ()),
    "aclnnAdd:2:507015": ("over", "0", ()),  # there is no second call
    "aclnnAdd:1:507015@1": ("over", "0", ()),  # it is for another rank
    "aclnnAdd": ("", "2", ("CANNSIM_FAULT",)),  # rules that cannot be read
    "aclnnAdd:0:1": ("", "2", ("CANNSIM_FAULT",)),
    "aclnnAdd:1:boom": ("", "2", ("CANNSIM_FAULT",)),
}


@pytest.mark.parametrize("rule", ENDS)
def test_a_fault_appears_where_hardware_shows_it(on_npu, rule):
    (rank,) = on_npu(ADD, CANNSIM_FAULT=rule, TASK_QUEUE_ENABLE=0, CANNSIM_TIME_SCALE=0.001, check=False)
    last, status, said = ENDS[rule]
    assert rank.status == status, rank
    assert [word for word in ("before", "launched", "over") if f"{word}\n" in rank.output][-1:] == [last] * bool(last)
    assert [word for word in said if word not in rank.output] == [], rank


def test_the_error_stays_until_the_process_ends(on_npu):
    (rank,) = on_npu(
        """
        import torch
        x = torch.ones(4).npu()
        for attempt in range(2):
            try:
                x + x
                torch.npu.synchronize()
            except RuntimeError as error:
                print("attempt", attempt, "507035" in str(error), "EZ9999" in str(error))
        """,
        CANNSIM_FAULT="aclnnAdd:1:507035",
        TASK_QUEUE_ENABLE=0,
    )
    assert "attempt 0 True True" in rank.output
    assert "attempt 1 True True" in rank.output


def test_only_the_chosen_call_on_the_chosen_rank_fails(on_npu):
    code = "import torch; x = torch.ones(4).npu()\nfor i in range(3): print('add', i, (x + x).cpu().sum(), flush=True)"
    healthy, broken = on_npu(code, 2, CANNSIM_FAULT="aclnnAdd:3:507015@1", check=False)
    assert healthy.ok
    assert not broken.ok
    assert "add 1" in broken.output
    assert "add 2" not in broken.output


def test_a_collective_that_cannot_start_reports_the_code_of_hccl(on_npu):
    (rank,) = on_npu(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4).npu())
        torch.npu.synchronize()
        """,
        CANNSIM_FAULT="HcclCommInitRootInfoConfig:1:7",
        check=False,
    )
    assert not rank.ok
    assert "EJ0001" in rank.output


# ---- faults in a training of two ranks

TRAINING = """
import datetime, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=10))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).npu()
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(8, 16).npu()
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, round(loss.item(), 4), flush=True)
dist.barrier()
torch.npu.synchronize()
dist.destroy_process_group()
"""

FAULTS = [  # each on one rank, in calls that the training makes
    "aclnnAddmm:3:507015@0", "aclnnReduceSum:2:hang@1", "aclnnRelu:4:kill@1", "HcclAllReduce:2:507056@0",
    "HcclCommInitRootInfoConfig:1:7@0", "aclrtMemcpy:1:507899@1", "aclrtSetDevice:1:507033@0",
]  # fmt: skip


def problems_of(fault: str, ranks: list) -> list[str]:
    """What did not hold after this fault."""
    found = []
    for number, rank in enumerate(ranks):
        if rank.status == "timeout":
            found.append(f"{fault}: rank {number} did not end")
        elif rank.status not in ("0", "signal 9") and not explain(rank.output):
            found.append(f"{fault}: rank {number} ended without a known message:\n{rank.output[-1500:]}")
    return found


@pytest.mark.slow
def test_faults_of_a_rank_end_in_time_with_a_message_that_explain_knows(many_on_npu):
    before = set(os.listdir("/dev/shm"))
    limits = {"CANNSIM_TIME_SCALE": "0.003", "HCCL_CONNECT_TIMEOUT": "2400", "HCCL_EXEC_TIMEOUT": "1200"}
    jobs = many_on_npu(TRAINING, 2, [{"CANNSIM_FAULT": fault, **limits} for fault in FAULTS], timeout=300)
    problems = [problem for fault, ranks in zip(FAULTS, jobs) for problem in problems_of(fault, ranks)]
    assert not problems, "\n\n".join(problems)
    assert [fault for fault, ranks in zip(FAULTS, jobs) if all(rank.ok for rank in ranks)] == [], "all of them happen"
    assert [name for name in set(os.listdir("/dev/shm")) - before if re.search("cannsim|hccl|torch", name)] == []


def test_the_training_without_a_fault_ends_well(on_npu):
    ranks = on_npu(TRAINING, 2)
    assert all("step 3" in rank.output for rank in ranks)
