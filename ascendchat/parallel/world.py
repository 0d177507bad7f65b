"""The place of this process in its job, from the variables of torchrun, Slurm, Kubernetes and ModelArts.

    read_world(os.environ)   # in a process that computes: its rank, the number of ranks, where rank 0 is
    read_job(os.environ)     # in `ascendchat launch`, one per node: how many nodes, which one is this

No torch here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ascendchat.errors import UserError

# Below the range that operating systems hand out, so that a derived port is rarely taken by a passing connection.
FIRST_PORT, PORTS = 20000, 10000


@dataclass(frozen=True)
class World:
    """The place of one process: rank counts over all nodes, local_rank on this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    source: str = "single"


@dataclass(frozen=True)
class SchedulerJob:
    """The place of one node. devices None: count them; master_port 0: pick one."""

    nodes: int = 1
    node_rank: int = 0
    devices: int | None = None
    master_addr: str = ""
    master_port: int = 0
    source: str = "single"


def derived_port(text: str) -> int:
    """Derive a port that is equal on every node from text that all nodes share: job id, run name, list of hosts."""
    return FIRST_PORT + (int(text) if text.isdigit() else zlib.crc32(text.encode())) % PORTS


def _int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"the environment variable {name}={text!r} is not a whole number; unset it, or use `ascendchat launch`"
        ) from None


def _checked(world: World) -> World:
    if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.local_size <= world.size):
        raise UserError(
            f"the variables of {world.source} contradict each other: rank {world.rank} of {world.size}, local rank "
            f"{world.local_rank} of {world.local_size}; start the processes with `ascendchat launch`"
        )
    if world.size > 1 and not world.master_addr:
        raise UserError(
            f"{world.source} started {world.size} processes but MASTER_ADDR is not set; "
            "start them with `ascendchat launch`, or export MASTER_ADDR and MASTER_PORT"
        )
    return world


def read_world(environ: Mapping[str, str]) -> World:
    """The place of this process in its job; without any scheduler it is alone."""
    _refuse_one_process_for_many_devices(environ)
    if all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _checked(_from_torchrun(environ))
    if environ.get("RANK_ID") and environ.get("RANK_SIZE"):
        return _checked(_from_modelarts_card(environ))
    if _int(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:  # set by srun only: a plain batch script is one process
        return _checked(_from_srun(environ))
    if environ.get("RANK") and environ.get("WORLD_SIZE"):  # PyTorchJob with one process per pod
        rank, size = _int(environ, "RANK"), _int(environ, "WORLD_SIZE")
        address, port = environ.get("MASTER_ADDR", ""), _int(environ, "MASTER_PORT", 0)
        return _checked(World(rank, size, 0, 1, rank, size, address, port, "kubernetes"))
    return World()


def _refuse_one_process_for_many_devices(environ: Mapping[str, str]) -> None:
    listed = environ.get("LOCAL_RANK", "")
    if "," in listed:
        raise UserError(
            f"LOCAL_RANK={listed} is a list: this is an AscendJob container with {len(listed.split(','))} devices and "
            "one process; start one process per device with `ascendchat launch COMMAND --flags`"
        )
    per_node = environ.get("PET_NPROC_PER_NODE", "")
    if per_node.isdigit() and int(per_node) > 1 and not listed:
        raise UserError(
            f"this container is to run {per_node} processes (PET_NPROC_PER_NODE) and this is only one; "
            "start them with `ascendchat launch COMMAND --flags`"
        )


def _from_torchrun(environ: Mapping[str, str]) -> World:
    rank, size, local_rank = (_int(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # torchrun sets all of them; a hand-written start may set only the first three
    local_size = _int(environ, "LOCAL_WORLD_SIZE", size)
    nodes = _int(environ, "GROUP_WORLD_SIZE", max(1, size // max(1, local_size)))
    node_rank = _int(environ, "GROUP_RANK", rank // max(1, local_size))
    address, port = environ.get("MASTER_ADDR", ""), _int(environ, "MASTER_PORT", 0)
    return World(rank, size, local_rank, local_size, node_rank, nodes, address, port, "torchrun")


def _from_modelarts_card(environ: Mapping[str, str]) -> World:
    """The preset engine starts the script once per card."""
    rank, size = _int(environ, "RANK_ID"), _int(environ, "RANK_SIZE")
    nodes = _int(environ, "MA_NUM_HOSTS", 1)
    local_size = _int(environ, "MA_NUM_GPUS", max(1, size // nodes))
    local_rank = _int(environ, "ASCEND_DEVICE_ID", rank % local_size)
    address, port = _modelarts_master(environ)
    node_rank = _int(environ, "VC_TASK_INDEX", rank // local_size)
    return World(rank, size, local_rank, local_size, node_rank, nodes, address, port, "modelarts")


def _modelarts_master(environ: Mapping[str, str]) -> tuple[str, int]:
    hosts = environ.get("VC_WORKER_HOSTS", "")
    address = environ.get("MASTER_ADDR") or hosts.split(",")[0].strip() or "127.0.0.1"
    return address, _int(environ, "MASTER_PORT", derived_port(hosts or address))


def _from_srun(environ: Mapping[str, str]) -> World:
    rank, size = _int(environ, "SLURM_PROCID"), _int(environ, "SLURM_STEP_NUM_TASKS")
    nodes, node_rank = _slurm_nodes(environ), _int(environ, "SLURM_NODEID", 0)
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    local_size = counts[node_rank] if node_rank < len(counts) else max(1, size // nodes)
    address, port = _slurm_master(environ)
    return World(rank, size, _int(environ, "SLURM_LOCALID"), local_size, node_rank, nodes, address, port, "slurm")


def _slurm_nodes(environ: Mapping[str, str]) -> int:
    return _int(environ, "SLURM_STEP_NUM_NODES", _int(environ, "SLURM_NNODES", _int(environ, "SLURM_JOB_NUM_NODES", 1)))


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    hosts = expand_hosts(names or "")
    address = environ.get("MASTER_ADDR") or (hosts[0] if hosts else "")
    return address, _int(environ, "MASTER_PORT", derived_port(environ.get("SLURM_JOB_ID") or names or "slurm"))


def expand_hosts(text: str) -> list[str]:
    """Slurm's short list of nodes: `gpu[01-03,7],login` -> gpu01 gpu02 gpu03 gpu7 login."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()):
        hosts += _expand(item.strip())
    return hosts


def _expand(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        return [item]
    before, after = item[: match.start()], _expand(item[match.end() :])
    middle: list[str] = []
    for part in match.group(1).split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"cannot read {item!r} in Slurm's list of nodes; give --master HOST:PORT")
        numbers = range(int(first), int(last if dash else first) + 1)
        middle += [str(n).zfill(len(first)) for n in numbers]  # the width of the first number is kept: 08, 09, 10
    return [before + m + tail for m in middle for tail in after]


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),3` -> [4, 4, 3]."""
    counts: list[int] = []
    for number, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(repeat or 1)
    return counts


def read_job(environ: Mapping[str, str]) -> SchedulerJob:
    """The part of the job that `ascendchat launch` starts on this node, as far as the scheduler says it."""
    if environ.get("TORCHELASTIC_RUN_ID"):
        raise UserError(
            "`ascendchat launch` was started by torchrun; use one of them: `ascendchat launch --devices N COMMAND` "
            "or `torchrun --nproc_per_node=N -m ascendchat COMMAND`"
        )
    if environ.get("MA_NUM_HOSTS"):
        address, port = _modelarts_master(environ)
        nodes, cards = _int(environ, "MA_NUM_HOSTS"), _int(environ, "MA_NUM_GPUS", 0) or None
        return _checked_job(SchedulerJob(nodes, _int(environ, "VC_TASK_INDEX", 0), cards, address, port, "modelarts"))
    if environ.get("LOCAL_WORLD_SIZE") and environ.get("WORLD_SIZE"):  # AscendJob: WORLD_SIZE counts devices
        devices, total = _int(environ, "LOCAL_WORLD_SIZE"), _int(environ, "WORLD_SIZE")
        if devices < 1 or total % devices:
            raise UserError(
                f"WORLD_SIZE={total} is not a multiple of LOCAL_WORLD_SIZE={devices}: the pods of this job have "
                "different numbers of devices; give --nnodes, --node-rank, --devices and --master"
            )
        return _checked_job(_kubernetes(environ, total // devices, _int(environ, "RANK", 0), devices))
    if environ.get("PET_NNODES") or (environ.get("RANK") and environ.get("WORLD_SIZE")):  # PyTorchJob and its kin
        pods = environ.get("PET_NNODES", "").rpartition(":")[2]  # elastic jobs write MIN:MAX
        per_pod = environ.get("PET_NPROC_PER_NODE", "")  # a number, or a word: auto, gpu, cpu
        each = int(per_pod) if per_pod.isdigit() else 0
        count = int(pods) if pods.isdigit() else max(1, _int(environ, "WORLD_SIZE") // max(1, each))
        rank = _int(environ, "PET_NODE_RANK", _int(environ, "RANK", 0))
        return _checked_job(_kubernetes(environ, count, rank, each or None))
    if environ.get("SLURM_JOB_ID") or environ.get("SLURM_NNODES"):
        address, port = _slurm_master(environ)
        granted = environ.get("SLURM_GPUS_ON_NODE", "")
        cards = int(granted) if granted.isdigit() and int(granted) else None
        return _checked_job(
            SchedulerJob(_slurm_nodes(environ), _int(environ, "SLURM_NODEID", 0), cards, address, port, "slurm")
        )
    return SchedulerJob()


def _kubernetes(environ: Mapping[str, str], nodes: int, node_rank: int, devices: int | None) -> SchedulerJob:
    address = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or ""
    port = _int(environ, "MASTER_PORT", _int(environ, "PET_MASTER_PORT", derived_port(address)))
    return SchedulerJob(nodes, node_rank, devices, address, port, "kubernetes")


def _checked_job(job: SchedulerJob) -> SchedulerJob:
    if not 0 <= job.node_rank < job.nodes:
        raise UserError(
            f"the variables of {job.source} contradict each other: node {job.node_rank} of {job.nodes}; "
            "give --nnodes and --node-rank"
        )
    return job
