"""Fault injection: errors where hardware shows them, and a training of two ranks that always ends with a message.

python -m cannsim run -- pytest tests/npu/test_faults.py -m ""
"""

from __future__ import annotations

import os
import random
import re

import pytest

from ascendchat.doctor.explain import explain

ADD = "import torch; x = torch.ones(4).npu(); torch.npu.synchronize(); print('before', flush=True); y = x + x; "


def test_a_device_error_appears_at_the_synchronisation(on_npu):
    (rank,) = on_npu(
        ADD + "torch.npu.current_stream().query; print('launched', flush=True); torch.npu.synchronize()",
        CANNSIM_FAULT="aclnnAdd:1:507015",
        TASK_QUEUE_ENABLE=0,
        check=False,
    )
    assert not rank.ok
    assert "launched" in rank.output
    assert "507015" in rank.output
    assert "fault kernel_name=aclnnAdd" in rank.output


def test_a_refused_parameter_appears_at_the_call(on_npu):
    (rank,) = on_npu(
        ADD + "print('launched', flush=True)", CANNSIM_FAULT="aclnnAdd:1:161002", TASK_QUEUE_ENABLE=0, check=False
    )
    assert not rank.ok
    assert "launched" not in rank.output
    assert "EZ1001" in rank.output


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


def test_a_hung_kernel_times_out_with_507014(on_npu):
    (rank,) = on_npu(
        ADD + "torch.npu.synchronize()", CANNSIM_FAULT="aclnnAdd:1:hang", CANNSIM_TIME_SCALE=0.001, check=False
    )
    assert not rank.ok
    assert "507014" in rank.output
    assert "aicore execution times out" in rank.output


def test_a_killed_rank_is_killed(on_npu):
    (rank,) = on_npu(ADD + "torch.npu.synchronize()", CANNSIM_FAULT="aclnnAdd:1:kill", check=False)
    assert rank.status == "signal 9"
    assert "before" in rank.output


@pytest.mark.parametrize("rule", ["aclnnAdd", "aclnnAdd:0:1", "aclnnAdd:1:boom"])
def test_a_rule_that_cannot_be_read_stops_the_process(on_npu, rule):
    (rank,) = on_npu(ADD, CANNSIM_FAULT=rule, check=False)
    assert rank.status == "2"
    assert "CANNSIM_FAULT" in rank.output


def test_a_collective_that_cannot_start_reports_the_code_of_hccl(on_npu):
    (rank,) = on_npu(
        """
        import os, torch, torch.distributed as dist
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4).npu())
        torch.npu.synchronize()
        """,
        CANNSIM_FAULT="HcclCommInitRootInfoConfig:1:7",
        check=False,
    )
    assert not rank.ok
    assert "EJ0001" in rank.output


# ---- random faults in a training of two ranks

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
for step in range(8):
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

# (functions that the training calls, the last call it makes at least, what may happen to them)
POINTS = [
    (
        ["aclnnAddmm", "aclnnMatmul", "aclnnMm", "aclnnReduceSum", "aclnnMean", "aclnnThresholdBackward"],
        8,
        ["507015", "507035", "507014", "hang", "kill", "161002"],
    ),
    (["aclnnRelu"], 8, ["507015", "507053", "507054", "kill"]),
    (["HcclAllReduce"], 8, ["507048", "507056", "hang", "kill", "4", "15"]),
    (["HcclBroadcast"], 1, ["507048", "kill", "hang"]),
    (["HcclCommInitRootInfoConfig"], 1, ["7", "9", "15", "24", "kill"]),
    (["aclrtMallocAlign32"], 2, ["207001", "207018"]),
    (["aclrtSetDevice"], 1, ["107001", "507033"]),
    (["aclrtSynchronizeStreamWithTimeout"], 5, ["507046", "507011", "107020"]),
    (["aclrtMemcpy"], 4, ["507899", "507015"]),
]


def random_fault(seed: int) -> str:
    chance = random.Random(seed)
    names, last, actions = chance.choice(POINTS)
    return f"{chance.choice(names)}:{chance.randint(1, last)}:{chance.choice(actions)}@{chance.randint(0, 1)}"


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
def test_random_faults_end_in_time_with_a_message_that_explain_knows(many_on_npu):
    before = set(os.listdir("/dev/shm"))
    limits = {"CANNSIM_TIME_SCALE": "0.003", "HCCL_CONNECT_TIMEOUT": "2400", "HCCL_EXEC_TIMEOUT": "1200"}
    faults = [random_fault(seed) for seed in range(17)]  # at the same time: most of them wait
    jobs = many_on_npu(TRAINING, 2, [{"CANNSIM_FAULT": fault, **limits} for fault in faults], timeout=300)
    problems = [problem for fault, ranks in zip(faults, jobs) for problem in problems_of(fault, ranks)]
    assert not problems, "\n\n".join(problems)
    happened = sum(any(not rank.ok for rank in ranks) for ranks in jobs)
    assert happened >= 13  # the others named a call that the training does not make
    assert [name for name in set(os.listdir("/dev/shm")) - before if re.search("cannsim|hccl|torch", name)] == []


def test_the_training_without_a_fault_ends_well(on_npu):
    ranks = on_npu(TRAINING, 2)
    assert all("step 7" in rank.output for rank in ranks)
