"""torchrun's agent inside `ascendchat launch`, with one log per rank and our rule of what is started again.

    status = run_ranks(plan, config.max_restarts, config.grace)

torchrun starts the ranks, watches them, starts them again and passes signals on. Added to it: all output of a rank in
one file, no restart after wrong input, and a smaller device batch after a device that ran out of memory. Imports torch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ascendchat import processes as ports
from ascendchat.config.language import translate
from ascendchat.errors import OutOfMemory, UserError
from ascendchat.launch.plan import LaunchPlan, say
from ascendchat.launch.rank import end_groups, forget_ranks
from ascendchat.processes import RANK_FILES, SMALLER, ChildProcess, status_of

MAX_SMALLER = 16  # restarts with a smaller batch; a program that is not ours may end with the same status for ever
MAX_CAUSE = 300  # characters of a rank's error
TAIL = 30  # lines of a failed rank's log that are shown
PORT_TRIES = 5
POLL = 0.1  # seconds between two looks at the ranks
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # torchrun installs handlers for them
_logger = logging.getLogger("torch.distributed.elastic")
STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # died of it, or ended because of it (train/signals.py)


@dataclass(frozen=True)
class Failed:
    """The rank that failed first. status: its exit status, or 128 + n when signal n ended it."""

    status: int
    log: Path
    rank: int
    others: tuple[int, ...] = ()  # failed after it
    shown: bool = False  # its output is on the console
    cause: str = ""  # its error in one line, where it wrote one


class _Logs(LogsSpecs):
    """One file for all that a rank prints, rank 0 also on the console; beside it the file of its error."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__()
        self.plan, self.smaller = plan, 0
        self.folder = plan.logs  # of the attempt under way

    @property
    def root_log_dir(self) -> str:
        return str(self.plan.logs)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Prepare the folder of an attempt and complete the environment of each local rank."""
        plan, attempt = self.plan, int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        self.folder = plan.logs / f"attempt_{attempt}"
        self.folder.mkdir(parents=True, exist_ok=True)
        logs, errors = {}, {}
        for local, environment in envs.items():
            log = log_file(self.folder, int(environment["RANK"]))
            if log.exists():  # of an earlier launch of this run: torchrun would empty it
                written = time.strftime("%Y%m%d-%H%M%S", time.localtime(log.stat().st_mtime))
                log.rename(log.with_suffix(f".{written}.log"))
            error = log.with_suffix(".json")
            error.unlink(missing_ok=True)
            logs[local], errors[local] = str(log), str(error)
            environment |= plan.environment
            environment |= {RANK_FILES: str(self.folder / f"{plan.prefix}rank_"), "TORCHELASTIC_ERROR_FILE": str(error)}
            if attempt:
                environment["ASCENDCHAT_RESTART"] = str(attempt)  # training resumes from its last checkpoint
            if self.smaller:
                environment[SMALLER] = str(self.smaller)
        shown = {0: logs[0]} if plan.node_rank == 0 else {}
        return LogsDest(stdouts=logs, stderrs=dict.fromkeys(envs, ""), tee_stdouts=shown, error_files=errors)


class _Agent(LocalElasticAgent):
    """The agent of this node. It restarts as often as allowed, and on one node MAX_SMALLER times more for memory."""

    def __init__(self, plan: LaunchPlan, port: int, max_restarts: int, grace: float) -> None:
        address = f"{plan.master_addr}:{port}"
        # The static rendezvous gives node 0 the ranks from 0 on; each attempt has its own keys in its store.
        meeting = RendezvousParameters("static", address, "launch", plan.nodes, plan.nodes, rank=plan.node_rank)
        spec = WorkerSpec(
            role="",  # what is shown on the console before each line
            local_world_size=plan.devices,
            rdzv_handler=get_rendezvous_handler(meeting),
            entrypoint=sys.executable,
            # torchrun replaces $names and $$ in arguments
            args=("-m", "ascendchat.launch.rank", "begin", *(word.replace("$", "$$") for word in plan.program)),
            max_restarts=max_restarts + MAX_SMALLER,  # `_monitor_workers` ends them earlier
            monitor_interval=POLL,
            master_addr=plan.master_addr,
            master_port=port,
        )
        self.logs = _Logs(plan)
        super().__init__(spec, self.logs, log_line_prefix_template="$role_name")
        self.plan, self.max_restarts, self.grace = plan, max_restarts, grace
        self.failures = 0
        self.failed: Failed | None = None
        self.explaining: subprocess.Popen[bytes] | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            end_groups(self.plan.logs, self.plan.prefix)
            self.failed = first_failure(result.failures, self.logs.folder, self.plan.node_rank == 0)
            if not self._starts_again(self.failed):
                self._remaining_restarts = 0  # as torchrun itself does it where a restart is of no use
        return result

    def _starts_again(self, failed: Failed) -> bool:
        say(failure_text(failed))
        if failed.status == UserError.status:  # wrong input, which starting again does not mend
            return False
        short = failed.status == OutOfMemory.status
        if short:
            self.logs.smaller += 1
        else:
            self.explaining = _explain(failed.log)
        # Other nodes see only that a rank is gone, and count that: so this one does, or it would wait for them alone.
        if not short or self.plan.nodes > 1 or self.logs.smaller > MAX_SMALLER:
            self.failures += 1
        if self.failures > self.max_restarts:
            return False
        counted = f" ({self.failures} of {self.max_restarts})"
        say(f"starting again{' with the next smaller device batch' if short else counted}")
        return True

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: object, **__: object) -> None:
        """Give the ranks the grace that the user chose; a second signal kills them at once."""
        if self._pcontext is None:
            return
        try:
            self._pcontext.close(death_sig, max(1, round(self.grace)))
        except SignalException:
            self._pcontext.close(signal.SIGKILL)
            raise


def run_ranks(plan: LaunchPlan, max_restarts: int, grace: float) -> int:
    """Run all ranks of this node to their end; 0, the status of the rank that failed, or 128 + n after signal n."""
    with _surroundings(plan, grace):
        for left in reversed(range(PORT_TRIES)):
            agent = _Agent(plan, plan.master_port or ports.free_port(), max_restarts, grace)
            try:
                result = agent.run()
            except SignalException as stopped:
                say(f"stopped by {stopped.sigval.name}")
                return 128 + int(stopped.sigval)
            except Exception as error:
                taken = "EADDRINUSE" in str(error) or "ddress already in use" in str(error)
                if taken and left and not plan.master_port:  # somebody took it between choosing and using it
                    continue
                _logger.exception("no rank was started")
                why = "the port of the rendezvous was taken by another program" if taken else "no rank was started"
                say(f"{why}; {_one_line(str(error))} (log: {torchrun_log(plan)})")
                return 1
            break
    if agent.explaining:
        agent.explaining.wait()
    return agent.failed.status if result.is_failed() and agent.failed else 0


@contextlib.contextmanager
def _surroundings(plan: LaunchPlan, grace: float) -> Iterator[None]:
    """Keep torchrun's own messages in a file, start the guard, and leave no rank behind."""
    handler = logging.FileHandler(torchrun_log(plan), encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _logger.addHandler(handler)
    _logger.propagate = False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a line of rank 0 is shown when it is written, also in a pipe
    before = {number: signal.getsignal(number) for number in SIGNALS}
    forget_ranks(plan.logs, plan.prefix)
    words = [sys.executable, "-m", "ascendchat.launch.rank", "guard", str(plan.logs), plan.prefix, str(grace)]
    guard = ChildProcess.start(words, log=torchrun_log(plan), stdin=subprocess.PIPE)
    try:
        yield
    finally:
        end_groups(plan.logs, plan.prefix)
        guard.kill()
        guard.process.communicate()
        for number, previous in before.items():
            signal.signal(number, previous)
        _logger.removeHandler(handler)
        handler.close()


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def torchrun_log(plan: LaunchPlan) -> Path:
    return plan.logs / f"{plan.prefix}torchrun.log"


def first_failure(failures: Mapping[int, ProcessFailure], folder: Path, console: bool) -> Failed:
    """Find the failure that caused the others. A rank that torchrun stopped (by SIGTERM, or by SIGKILL a second or more
    after the first failure) is not the cause; of the others it is the one whose log ended first."""
    began = min(failure.timestamp for failure in failures.values())

    def stopped(rank: int) -> bool:
        failure = failures[rank]
        return failure.exitcode in STOPPED or (failure.exitcode == -signal.SIGKILL and failure.timestamp > began)

    def order(rank: int) -> tuple[bool, float, int]:
        log = log_file(folder, rank)
        return stopped(rank), log.stat().st_mtime if log.exists() else 0.0, rank

    first = min(failures, key=order)
    code = failures[first].exitcode
    others = tuple(sorted(rank for rank in failures if rank != first and not stopped(rank)))
    message = failures[first].error_file_data.get("message")
    cause = _one_line(message["message"]) if isinstance(message, dict) else ""
    if code == UserError.status:
        cause = translate(cause.partition(": ")[2])
    shown = console and first == 0
    return Failed(status_of(code), log_file(folder, first), first, others, shown, cause)


def failure_text(failed: Failed) -> str:
    """Say which rank failed and how, with the last lines of its log and where the rest is."""
    how = f"failed with status {failed.status}"
    with contextlib.suppress(ValueError):  # a status of a program's own choosing
        how = f"was killed by {signal.Signals(failed.status - 128).name}" if failed.status > 128 else how
        how += " (often: out of host memory)" if failed.status == 128 + signal.SIGKILL else ""
    how += f": {failed.cause}" if failed.cause else ""
    how += f"; so did {', '.join(map(str, failed.others))} after it" if failed.others else ""
    if failed.cause and failed.status == UserError.status:  # nothing in the log says more
        return f"rank {failed.rank} {how} (log: {failed.log})"
    if failed.shown:
        return f"rank {failed.rank} {how}; its output is above and in {failed.log}"
    return f"rank {failed.rank} {how}; the last lines of {failed.log}:\n{_tail(failed.log)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_CAUSE]


def _tail(path: Path) -> str:
    if not path.is_file():
        return "  (no log)"
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join("  " + line for line in text.splitlines()[-TAIL:]) or "  (it printed nothing)"


def _explain(log: Path) -> subprocess.Popen[bytes] | None:
    """Let `ascendchat explain` read the log while the ranks start again."""
    if not log.is_file() or not log.stat().st_size:
        return None
    words = [sys.executable, "-m", "ascendchat", "explain", str(log)]
    return subprocess.Popen(words, stdout=sys.stderr.fileno())
