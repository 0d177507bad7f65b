"""The place of a process or a node, read from each scheduler's variables."""

from __future__ import annotations

import pytest

from ascendchat.errors import UserError
from ascendchat.parallel.world import (
    SchedulerJob,
    World,
    derived_port,
    expand_hosts,
    read_job,
    read_world,
    tasks_per_node,
)


def shell(text: str) -> dict[str, str]:
    """Variables as a shell shows them."""
    return dict(pair.split("=", 1) for pair in text.split())


TORCHRUN = shell(
    "RANK=11 WORLD_SIZE=16 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=2 "
    "MASTER_ADDR=node0 MASTER_PORT=23456 TORCHELASTIC_RUN_ID=none"
)
SRUN = shell(
    "SLURM_JOB_ID=7123 SLURM_PROCID=6 SLURM_LOCALID=2 SLURM_NODEID=1 SLURM_NNODES=2 SLURM_NTASKS=8 SLURM_STEP_ID=0 "
    "SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_JOB_NODELIST=npu[07-08]"
)
BATCH = shell("SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NNODES=1")
ASCENDJOB = shell("WORLD_SIZE=16 RANK=1 LOCAL_WORLD_SIZE=8 LOCAL_RANK=0,1,2,3,4,5,6,7 MASTER_ADDR=10.0.0.5")
ASCENDJOB["MASTER_PORT"] = "2222"
MODELARTS = shell("MA_NUM_HOSTS=2 MA_NUM_GPUS=8 VC_TASK_INDEX=1 VC_WORKER_NUM=2")
MODELARTS["VC_WORKER_HOSTS"] = "job-worker-0.job,job-worker-1.job"
CARD = MODELARTS | shell("RANK_ID=13 RANK_SIZE=16 ASCEND_DEVICE_ID=5 RANK_TABLE_FILE=/x.json")
PYTORCHJOB = shell("WORLD_SIZE=4 RANK=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456")
KUBEFLOW = PYTORCHJOB | shell("WORLD_SIZE=32 PET_NNODES=4 PET_NODE_RANK=2 PET_NPROC_PER_NODE=8")
HOSTS_PORT = derived_port(MODELARTS["VC_WORKER_HOSTS"])
PROCESSES = {
    "alone": ({}, World(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "single")),
    "batch script without srun": (BATCH, World()),
    "torchrun": (TORCHRUN, World(11, 16, 3, 8, 1, 2, "node0", 23456, "torchrun")),
    "torchrun in slurm": ({**SRUN, **TORCHRUN}, World(11, 16, 3, 8, 1, 2, "node0", 23456, "torchrun")),
    "torchrun in modelarts": ({**CARD, **TORCHRUN}, World(11, 16, 3, 8, 1, 2, "node0", 23456, "torchrun")),
    "srun": (SRUN, World(6, 8, 2, 4, 1, 2, "npu07", 27123, "slurm")),
    "srun with a master": (SRUN | shell("MASTER_ADDR=a MASTER_PORT=5"), World(6, 8, 2, 4, 1, 2, "a", 5, "slurm")),
    "card": (CARD, World(13, 16, 5, 8, 1, 2, "job-worker-0.job", HOSTS_PORT, "modelarts")),
    "pods": (PYTORCHJOB, World(2, 4, 0, 1, 2, 4, "job-master-0", 23456, "kubernetes")),
}
NODES = {
    "alone": ({}, SchedulerJob(1, 0, None, "", 0, "single")),
    "slurm": (SRUN, SchedulerJob(2, 1, None, "npu07", 27123, "slurm")),
    "gres": (SRUN | shell("SLURM_GPUS_ON_NODE=8"), SchedulerJob(2, 1, 8, "npu07", 27123, "slurm")),
    "ascendjob": (ASCENDJOB, SchedulerJob(2, 1, 8, "10.0.0.5", 2222, "kubernetes")),
    "ascendjob of one": (
        ASCENDJOB | shell("WORLD_SIZE=8 RANK=0"),
        SchedulerJob(1, 0, 8, "10.0.0.5", 2222, "kubernetes"),
    ),
    "pods": (PYTORCHJOB, SchedulerJob(4, 2, None, "job-master-0", 23456, "kubernetes")),
    "kubeflow": (KUBEFLOW, SchedulerJob(4, 2, 8, "job-master-0", 23456, "kubernetes")),
    "elastic": (
        KUBEFLOW | shell("PET_NNODES=2:4 PET_NPROC_PER_NODE=auto"),
        SchedulerJob(4, 2, None, "job-master-0", 23456, "kubernetes"),
    ),
    "modelarts": (MODELARTS, SchedulerJob(2, 1, 8, "job-worker-0.job", HOSTS_PORT, "modelarts")),
    "modelarts of one": (
        shell("MA_NUM_HOSTS=1 MA_NUM_GPUS=4"),
        SchedulerJob(1, 0, 4, "127.0.0.1", derived_port("127.0.0.1"), "modelarts"),
    ),
}


@pytest.mark.parametrize(("environ", "world"), PROCESSES.values(), ids=PROCESSES)
def test_a_process_finds_its_place(environ: dict[str, str], world: World) -> None:
    assert read_world(environ) == world


@pytest.mark.parametrize(("environ", "job"), NODES.values(), ids=NODES)
def test_a_node_finds_its_place(environ: dict[str, str], job: SchedulerJob) -> None:
    assert read_job(environ) == job


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**TORCHRUN, "RANK": "16"}, "rank 16 of 16"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "local rank 8 of 8"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (ASCENDJOB, "ascendchat launch"),  # one process for many devices
        (KUBEFLOW, "ascendchat launch"),
    ],
)
def test_a_process_whose_variables_contradict_each_other_is_told_so(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_world(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**ASCENDJOB, "WORLD_SIZE": "12"}, "WORLD_SIZE=12 is not a multiple of LOCAL_WORLD_SIZE=8"),
        ({**ASCENDJOB, "RANK": "2"}, "node 2 of 2"),
        (TORCHRUN, "use one of them"),
    ],
    ids=["uneven", "outside the job", "inside torchrun"],
)
def test_a_node_without_a_place_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_job(environ)


def test_slurm_node_lists_and_task_counts_are_expanded() -> None:
    lists = {
        "": [],
        "solo": ["solo"],
        "a,b-1": ["a", "b-1"],
        "gpu[08-10,3],login": ["gpu08", "gpu09", "gpu10", "gpu3", "login"],
        "r[1-2]n[01-02].cluster": ["r1n01.cluster", "r1n02.cluster", "r2n01.cluster", "r2n02.cluster"],
    }
    assert {text: expand_hosts(text) for text in lists} == lists
    with pytest.raises(UserError, match="--master HOST:PORT"):
        expand_hosts("gpu[a-c]")
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("") == []


def test_a_derived_port_is_stable_and_outside_the_ephemeral_range() -> None:
    assert derived_port("123456") == 20000 + 3456
    assert derived_port("run-a") == derived_port("run-a") != derived_port("run-b")
    assert all(20000 <= derived_port(name) < 30000 for name in ("", "x", "99999999999", "hosts"))
