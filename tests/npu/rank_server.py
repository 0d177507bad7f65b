"""Starts the processes of one test quickly: imports torch, torch_npu and us once, then forks every rank from there.

    python tests/npu/rank_server.py  (started by the fixture `on_npu` of conftest.py; jobs and results are JSON lines)

A job is {"code", "ranks", "env", "folder", "timeout"}; a line has a list of jobs, which run at the same time. The
answer has for every job a list with (status, output) of every rank.
The server itself never touches a device, so each rank starts the simulated CANN anew with its own environment.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = [
    *(
        "ascendchat.cli",
        "ascendchat.train.pretrain",
        "ascendchat.train.chat",
        "ascendchat.train.chat",
        "ascendchat.rl.command",
    ),
    *("ascendchat.engine.engine", "ascendchat.doctor.selftest_device", "numpy", "safetensors.torch"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_rank(job: dict[str, Any], rank: int, port: int, path: str) -> None:
    """In the forked child: run the code with the output going to a file, then leave."""
    os.setpgid(0, 0)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))  # the server's own has the jobs
    os.environ.update(job["env"])
    if job["ranks"] > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job["ranks"]),
            LOCAL_WORLD_SIZE=str(job["ranks"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    status = 0
    try:
        exec(compile(job["code"], "<test>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        status = int(stop.code or 0) if not isinstance(stop.code, str) else 1
    except BaseException:  # noqa: BLE001 (printed, and shown by the test)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Job:
    """The running ranks of one job."""

    def __init__(self, job: dict[str, Any]) -> None:
        port = free_port()
        self.end = time.monotonic() + job["timeout"]
        self.paths = [os.path.join(job["folder"], f"rank{rank}.txt") for rank in range(job["ranks"])]
        self.running: dict[int, int] = {}  # rank -> pid
        self.statuses: dict[int, str] = {}  # exit code, "signal N", or "timeout"
        for rank, path in enumerate(self.paths):
            pid = os.fork()
            if pid == 0:
                run_rank(job, rank, port, path)
            self.running[rank] = pid

    def poll(self) -> bool:
        """True when all ranks have ended; late ones are killed."""
        for rank, pid in list(self.running.items()):
            done, raw = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(raw)
                self.statuses[rank] = str(code) if code >= 0 else f"signal {-code}"
                del self.running[rank]
            elif time.monotonic() > self.end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.statuses[rank] = "timeout"
                del self.running[rank]
        return not self.running

    def results(self) -> list[tuple[str, str]]:
        found = []
        for rank, path in enumerate(self.paths):
            with open(path, errors="replace") as file:
                found.append((self.statuses[rank], file.read()))
        return found


def run_jobs(descriptions: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    jobs = [Job(description) for description in descriptions]
    while not all([job.poll() for job in jobs]):  # a list: every job is polled every time
        time.sleep(0.005)
    return [job.results() for job in jobs]


def main() -> None:
    import torch
    import torch._dynamo  # what optimizers and FSDP would import in every rank
    import torch.distributed.fsdp
    import torch.nn.parallel
    import torch_npu  # noqa: F401

    sys.path.append(os.path.dirname(HERE))  # programs import its tiny models
    for name in OURS:
        importlib.import_module(name)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not disturb the answers
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_jobs(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
