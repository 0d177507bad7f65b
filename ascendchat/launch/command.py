"""Start one process per device, on one node or many.

    ascendchat launch --devices 8 base --depth 20
    ascendchat launch --nnodes 2 --node-rank 0 --master node0:20123 --devices 8 base --depth 26
    srun --ntasks-per-node=1 ascendchat launch base --depth 26        (Slurm; Kubernetes and ModelArts are read too)

torchrun underneath, on a port that is free; what a rank prints goes to RUN/logs/attempt_K/rank_N.log, rank 0 also to
the console; signals are passed on; the exit status is that of the rank that failed. No torch in this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascendchat import processes as ports
from ascendchat.config.commands import LaunchConfig
from ascendchat.device.env import count_devices
from ascendchat.errors import OutOfMemory, UserError, home
from ascendchat.files import write_atomic
from ascendchat.launch.forkserver import Nursery
from ascendchat.launch.rank import PROGRAM, node_prefix
from ascendchat.launch.supervise import AttemptResult, run_torchrun
from ascendchat.parallel.world import SchedulerJob, World, derived_port, read_job, read_world
from ascendchat.processes import SMALLER

__all__ = ["AttemptResult", "SchedulerJob", "World", "failure_text", "read_job", "read_world", "run"]
MAX_SMALLER = 16  # restarts for that; a program that is not ours may end with the same status for ever
TAIL = 30  # lines of a failed rank's log that are shown
PORT_TRIES = 5
NURSERY_LOG = "warm.log"


@dataclass
class LaunchPlan:
    """Everything that is decided before the first process starts. master_port 0: pick a free one for each attempt."""

    program: list[str]
    devices: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    logs: Path
    environment: dict[str, str]
    nursery: Nursery | None = None  # who forks the ranks


def run(config: LaunchConfig) -> int:
    """Run the command on all ranks; start it again after a failure as often as --max-restarts allows, and on one node
    MAX_SMALLER times more where a device died of too large a batch."""
    card = os.environ.get("ASCEND_DEVICE_ID", "0")
    if os.environ.get("RANK_ID") and card != "0":  # ModelArts' preset engine starts this once per card
        _say(f"card {card} is used by the launcher that runs on card 0; nothing to do here")
        return 0
    plan = make_plan(config, os.environ)
    where = f", node {plan.node_rank} of {plan.nodes}" if plan.nodes > 1 else ""
    _say(f"{plan.devices} process{'es' if plan.devices > 1 else ''}{where}; logs in {plan.logs}")
    with contextlib.ExitStack() as stack:
        if config.max_restarts and can_fork(plan.program):
            try:
                plan.logs.mkdir(parents=True, exist_ok=True)
                plan.nursery = Nursery(plan.program, plan.environment, nursery_log(plan))
            except OSError as error:
                raise not_writable(plan.logs, error) from None
            stack.enter_context(contextlib.closing(plan.nursery))
        return _attempts(plan, config)


def _attempts(plan: LaunchPlan, config: LaunchConfig) -> int:
    restarts = failures = smaller = 0
    while True:
        outcome = attempt(plan, restarts, config.grace)
        if outcome.status == 0:
            return 0
        _say(failure_text(outcome))
        if outcome.stopped or outcome.status == UserError.status:  # wrong input, which starting again does not mend
            return outcome.status
        explaining: subprocess.Popen[bytes] | None = None
        if short := outcome.status == OutOfMemory.status:
            smaller += 1
            plan.environment[SMALLER] = str(smaller)
        else:
            explaining = _explain(outcome)
        # Other nodes see only that a rank is gone, and count that: so this one does, or it would wait for them alone.
        if not short or plan.nodes > 1 or smaller > MAX_SMALLER:
            failures += 1
        if failures > config.max_restarts:
            if explaining:
                explaining.wait()
            return outcome.status
        restarts += 1
        counted = f" ({failures} of {config.max_restarts})"
        _say(f"starting again{' with the next smaller device batch' if short else counted}")


def nursery_log(plan: LaunchPlan) -> Path:
    return plan.logs / f"{node_prefix(plan.nodes, plan.node_rank)}{NURSERY_LOG}"


def not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the logs to {folder} ({error.strerror}); set ASCENDCHAT_HOME to a folder of yours")


def can_fork(program: list[str]) -> bool:
    """Whether the ranks of this program may be forked from a process that has imported its modules (forkserver.py)."""
    return sys.platform == "linux" and program[:2] == ["-m", "ascendchat"]


def _say(text: str) -> None:
    print(f"ascendchat launch: {text}", file=sys.stderr, flush=True)


def make_plan(config: LaunchConfig, environ: Mapping[str, str]) -> LaunchPlan:
    """Flags first, then the scheduler's variables, then what this machine has."""
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
    environment = {k: v for k, v in environ.items() if not k.startswith("PET_")}  # these would steer torchrun
    if config.device_type:
        environment["ASCENDCHAT_DEVICE"] = config.device_type
    environment["ASCENDCHAT_LAUNCH"] = uuid.uuid4().hex  # the same for all restarts: `--resume never` is of this launch
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // devices)))
    return LaunchPlan(program, devices, nodes, node_rank, address, port, home() / "runs" / name / "logs", environment)


def _program(words: list[str]) -> tuple[list[str], list[str]]:
    """What the user wrote after launch's own flags -> (his words, arguments of python)."""
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
    """The value of a flag among the command's own words: `--run NAME`, `--run=NAME`, dashes or underscores."""
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
    """One launcher per node, no more and no fewer, or the ranks would wait for each other for ever."""
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


def attempt(plan: LaunchPlan, restart: int, grace: float) -> AttemptResult:
    """Run all ranks of this node once. A port that someone took between choosing and using it is chosen again."""
    folder, node = plan.logs / f"attempt_{restart}", node_prefix(plan.nodes, plan.node_rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{node}{PROGRAM}", json.dumps(plan.program))
    except OSError as error:
        raise not_writable(folder, error) from None
    environment = dict(plan.environment)
    if restart:
        environment["ASCENDCHAT_RESTART"] = str(restart)  # training resumes from its last checkpoint
    for _ in range(PORT_TRIES):
        # Each attempt of a job on several nodes meets on its own port: a node that is late cannot join the old one.
        port = plan.master_port + restart if plan.master_port else ports.free_port()
        arguments = ["--nnodes", str(plan.nodes), "--node-rank", str(plan.node_rank)]
        arguments += ["--nproc-per-node", str(plan.devices), "--max-restarts", "0", "--rdzv-backend", "static"]
        arguments += ["--master-addr", plan.master_addr, "--master-port", str(port)]
        arguments += [str(Path(__file__).with_name("rank.py")), str(folder), *([node] if node else [])]
        show = plan.node_rank == 0
        outcome = run_torchrun(arguments, folder, environment, grace, show=show, node=node, nursery=plan.nursery)
        if outcome.lost and plan.nursery:
            if plan.nursery.process.wait() != UserError.status:
                _say(f"ranks cannot be forked here, so they start one by one; why: {nursery_log(plan)}")
            plan.nursery = None
        elif not outcome.port_taken or plan.master_port:
            break
    return outcome


def failure_text(outcome: AttemptResult) -> str:
    """What happened, the last lines of the failing rank's log, and where the rest is."""
    if outcome.stopped:
        return f"stopped by {signal.Signals(outcome.stopped).name}"
    if outcome.port_taken:
        return f"the port of the rendezvous was taken by another program; {outcome.detail} (log: {outcome.log})"
    if outcome.rank is None:
        return f"the ranks could not be started: {outcome.detail}\n{_tail(outcome.log)}\n(log: {outcome.log})"
    code = outcome.status
    how = f"failed with status {code}"
    if code > 128:
        try:
            how = f"was killed by {signal.Signals(code - 128).name}"
        except ValueError:  # a status of its own choosing
            how = f"failed with status {code}"
        how += " (often: out of host memory)" if code == 128 + signal.SIGKILL else ""
    others = f"; so did {', '.join(map(str, outcome.others))} after it" if outcome.others else ""
    if outcome.shown:
        return f"rank {outcome.rank} {how}{others}; its output is above and in {outcome.log}"
    return f"rank {outcome.rank} {how}{others}; the last lines of {outcome.log}:\n{_tail(outcome.log)}"


def _tail(path: Path) -> str:
    if not path.is_file():
        return "  (no log)"
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join("  " + line for line in text.splitlines()[-TAIL:]) or "  (it printed nothing)"


def _explain(outcome: AttemptResult) -> subprocess.Popen[bytes] | None:
    """Let `ascendchat explain` read the log, in its own process: it is a layer above this one. Nobody waits for it who
    has something else to do."""
    explainer = Path(__file__).parent.parent / "doctor" / "explain.py"
    if not explainer.is_file() or not outcome.log.is_file() or not outcome.log.stat().st_size:
        return None
    words = [sys.executable, "-m", "ascendchat", "explain", str(outcome.log)]
    return subprocess.Popen(words, stdout=sys.stderr.fileno())
