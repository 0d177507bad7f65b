"""The place of a process or a node, read from each scheduler's variables."""

from __future__ import annotations

import pytest

from ascendchat.config import UserError
from ascendchat.launch.world import (
    SchedulerJob,
    World,
    derived_port,
    expand_hosts,
    read_job,
    read_world,
    tasks_per_node,
)

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "23456",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "7123",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "npu[07-08]",
}
ASCENDJOB = {
    "WORLD_SIZE": "16",
    "RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "0,1,2,3,4,5,6,7",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "2222",
}
MODELARTS = {
    "MA_NUM_HOSTS": "2",
    "MA_NUM_GPUS": "8",
    "VC_TASK_INDEX": "1",
    "VC_WORKER_NUM": "2",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
}
CARD = {**MODELARTS, "RANK_ID": "13", "RANK_SIZE": "16", "ASCEND_DEVICE_ID": "5", "RANK_TABLE_FILE": "/x.json"}
PYTORCHJOB = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
KUBEFLOW = {**PYTORCHJOB, "WORLD_SIZE": "32", "PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8"}
HOSTS_PORT = derived_port(MODELARTS["VC_WORKER_HOSTS"])


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "single")),
        (TORCHRUN, World(11, 16, 3, 8, 1, 2, "node0", 23456, "torchrun")),
        ({**SRUN, **TORCHRUN}, World(11, 16, 3, 8, 1, 2, "node0", 23456, "torchrun")),
        ({**CARD, **TORCHRUN}, World(11, 16, 3, 8, 1, 2, "node0", 23456, "torchrun")),
        (SRUN, World(6, 8, 2, 4, 1, 2, "npu07", 27123, "slurm")),
        ({**SRUN, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, World(6, 8, 2, 4, 1, 2, "a", 5, "slurm")),
        (CARD, World(13, 16, 5, 8, 1, 2, "job-worker-0.job", HOSTS_PORT, "modelarts")),
        (PYTORCHJOB, World(2, 4, 0, 1, 2, 4, "job-master-0", 23456, "kubernetes")),
    ],
    ids=["alone", "torchrun", "torchrun-in-slurm", "torchrun-in-modelarts", "srun", "srun-master", "card", "pods"],
)
def test_a_process_finds_its_place(environ: dict[str, str], world: World) -> None:
    assert read_world(environ) == world


def test_a_batch_script_without_srun_is_one_process() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}
    assert read_world(batch) == World()


@pytest.mark.parametrize("environ", [ASCENDJOB, KUBEFLOW], ids=["ascendjob", "kubeflow"])
def test_one_process_for_many_devices_is_told_to_use_launch(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match="ascendchat launch"):
        read_world(environ)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "16"}, "rank 16 of 16"),
        ({"LOCAL_RANK": "8"}, "local rank 8 of 8"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_world({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, SchedulerJob(1, 0, None, "", 0, "single")),
        (SRUN, SchedulerJob(2, 1, None, "npu07", 27123, "slurm")),
        ({**SRUN, "SLURM_GPUS_ON_NODE": "8"}, SchedulerJob(2, 1, 8, "npu07", 27123, "slurm")),
        (ASCENDJOB, SchedulerJob(2, 1, 8, "10.0.0.5", 2222, "kubernetes")),
        ({**ASCENDJOB, "WORLD_SIZE": "8", "RANK": "0"}, SchedulerJob(1, 0, 8, "10.0.0.5", 2222, "kubernetes")),
        (PYTORCHJOB, SchedulerJob(4, 2, None, "job-master-0", 23456, "kubernetes")),
        (KUBEFLOW, SchedulerJob(4, 2, 8, "job-master-0", 23456, "kubernetes")),
        (
            {**KUBEFLOW, "PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "auto"},
            SchedulerJob(4, 2, None, "job-master-0", 23456, "kubernetes"),
        ),
        (MODELARTS, SchedulerJob(2, 1, 8, "job-worker-0.job", HOSTS_PORT, "modelarts")),
        (
            {"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "4"},
            SchedulerJob(1, 0, 4, "127.0.0.1", derived_port("127.0.0.1"), "modelarts"),
        ),
    ],
    ids=["alone", "slurm", "gres", "ascendjob", "ascendjob-1", "pods", "kubeflow", "elastic", "modelarts", "ma-1"],
)
def test_a_node_finds_its_place(environ: dict[str, str], job: SchedulerJob) -> None:
    assert read_job(environ) == job


def test_an_uneven_ascendjob_is_refused() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE=12 is not a multiple of LOCAL_WORLD_SIZE=8"):
        read_job({**ASCENDJOB, "WORLD_SIZE": "12"})


def test_a_node_rank_outside_the_job_is_refused() -> None:
    with pytest.raises(UserError, match="node 2 of 2"):
        read_job({**ASCENDJOB, "RANK": "2"})


def test_launch_inside_torchrun_is_refused() -> None:
    with pytest.raises(UserError, match="use one of them"):
        read_job(TORCHRUN)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("solo", ["solo"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu09", "gpu10", "gpu3", "login"]),
        ("r[1-2]n[01-02].cluster", ["r1n01.cluster", "r1n02.cluster", "r2n01.cluster", "r2n02.cluster"]),
    ],
)
def test_slurm_node_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_a_broken_node_list_says_what_to_give_instead() -> None:
    with pytest.raises(UserError, match="--master HOST:PORT"):
        expand_hosts("gpu[a-c]")


def test_slurm_task_counts_are_expanded() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("") == []


def test_a_derived_port_is_stable_and_outside_the_ephemeral_range() -> None:
    assert derived_port("123456") == 20000 + 3456
    assert derived_port("run-a") == derived_port("run-a") != derived_port("run-b")
    assert all(20000 <= derived_port(name) < 30000 for name in ("", "x", "99999999999", "hosts"))
