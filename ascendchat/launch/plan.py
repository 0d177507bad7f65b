"""Decides what `ascendchat launch` starts: program, devices, nodes, rendezvous, names. No process is started here.

plan = make_plan(config, os.environ)        # flags first, then the scheduler's variables, then what this machine has
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascendchat import processes as ports
from ascendchat.config.commands import LaunchConfig
from ascendchat.device.env import count_devices
from ascendchat.errors import UserError, home
from ascendchat.parallel.world import SchedulerJob, derived_port, read_job


@dataclass
class LaunchPlan:
    """Everything that is decided before the first process starts. master_port 0: a free one is picked."""

    program: list[str]  # arguments of Python
    devices: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    logs: Path
    environment: dict[str, str]  # added to that of every rank

    @property
    def prefix(self) -> str:
        """The beginning of the names of this node's own files: nodes may share the folder."""
        return f"node_{self.node_rank}_" if self.nodes > 1 else ""


def make_plan(config: LaunchConfig, environ: Mapping[str, str]) -> LaunchPlan:
    """Decide everything, or raise a UserError; only counting devices may start a process."""
    words, program = _program(list(config.command))
    job = read_job(environ)
    nodes = job.nodes if config.nnodes is None else config.nnodes
    node_rank = job.node_rank if config.node_rank is None else config.node_rank
    kind = config.device_type or _flag(words, "device_type") or environ.get("ASCENDCHAT_DEVICE")
    if nodes < 1 or not 0 <= node_rank < nodes:
        raise UserError(f"--node-rank {node_rank} with --nnodes {nodes}: nodes are numbered from 0 to {nodes - 1}")
    if config.nnodes is None:
        _check_srun(job, environ)
    name = config.run or _flag(words, "run") or _default_name(words, environ)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"--run {name!r}: use letters, digits, dots, dashes and underscores")
    address, port = _master(config, job, nodes, node_rank, " ".join(words))
    devices = config.devices or job.devices or count_devices(kind)
    environment = {
        "ASCENDCHAT_LAUNCH": uuid.uuid4().hex
    }  # the same for all restarts: `--resume never` is of this launch
    if config.device_type:
        environment["ASCENDCHAT_DEVICE"] = config.device_type
    environment["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS") or str(max(1, _cores() // devices))
    return LaunchPlan(program, devices, nodes, node_rank, address, port, home() / "runs" / name / "logs", environment)


def _program(words: list[str]) -> tuple[list[str], list[str]]:
    """Split what follows launch's own flags -> (the user's words, arguments of Python)."""
    if words and words[0] == "--":
        words = words[1:]
    if words and re.fullmatch(r"python[\d.]*", words[0]):
        words = words[1:]
    if not words or words == ["-m"]:
        raise UserError("what to run is missing, e.g. `ascendchat launch --devices 8 base --depth 20`")
    if words[0] == "launch":
        raise UserError("launch cannot launch itself; name the command to run, e.g. `ascendchat launch base`")
    if words[0] == "-m":
        return words, words
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UserError(f"there is no file {words[0]}; check the path (this folder is {Path.cwd()})")
        return words, words
    return words, ["-m", "ascendchat", *words]


def _flag(words: list[str], name: str) -> str | None:
    """Read a flag among the command's own words: `--run NAME`, `--run=NAME`, dashes or underscores."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            return value if equals else next(iter(words[at + 1 :]), None)
    return None


def _default_name(words: list[str], environ: Mapping[str, str]) -> str:
    named = words[1] if words[0] == "-m" else Path(words[0]).stem
    unique = environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", named).lstrip("._-") + "-" + unique


def _check_srun(job: SchedulerJob, environ: Mapping[str, str]) -> None:
    """Refuse more or fewer launchers than one per node: the ranks would wait for each other for ever."""
    if job.source != "slurm":
        return
    if int(environ.get("SLURM_LOCALID", "0") or 0) > 0:
        raise UserError(
            "srun started more than one launcher on this node; use `srun --ntasks-per-node=1 ascendchat launch ...`, "
            "or leave out launch: `srun --ntasks-per-node=DEVICES ascendchat COMMAND`"
        )
    if job.nodes > 1 and not (environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")):
        raise UserError(
            f"this Slurm job has {job.nodes} nodes but the launcher runs on one; "
            "start it on all of them with `srun --ntasks-per-node=1 ascendchat launch ...`"
        )


def _master(config: LaunchConfig, job: SchedulerJob, nodes: int, node_rank: int, command: str) -> tuple[str, int]:
    address, port = ports.split_address(config.master) if config.master else (job.master_addr, job.master_port)
    if nodes == 1:
        address, port = "127.0.0.1", 0  # whatever a scheduler proposes, a port that is free here is better
    if not address:
        raise UserError(f"--nnodes {nodes} needs the address of node 0: add --master HOST:PORT, the same on every node")
    port = config.master_port or port or (derived_port(config.run or command) if nodes > 1 else 0)
    if port and node_rank == 0 and not ports.is_free(port):
        raise UserError(
            f"port {port} for the rendezvous is in use on this node; see by what with `ss -ltnp`, or choose another "
            + ("with --master HOST:PORT on every node" if nodes > 1 else "by leaving out --master-port")
        )
    return address, port


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def say(text: str) -> None:
    print(f"ascendchat launch: {text}", file=sys.stderr, flush=True)
