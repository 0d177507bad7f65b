"""Starts the processes of one test quickly: imports torch and torch_npu once, then forks every rank from there.

    python tests/npu/ranks.py        (started by the fixture `on_npu` of conftest.py; jobs and results are JSON lines)

A job is {"code", "ranks", "env", "folder", "timeout"}; the answer is a list with (status, output) of every rank.
The server itself never touches a device, so each rank starts the simulated CANN anew with its own environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any


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
    os.environ.update(job["env"])
    if job["ranks"] > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
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


def wait_for(children: dict[int, int], timeout: float) -> dict[int, str]:
    """The status of each rank: exit code, "signal N", or "timeout" (and it is killed)."""
    end = time.monotonic() + timeout
    statuses: dict[int, str] = {}
    while len(statuses) < len(children) and time.monotonic() < end:
        for rank, pid in children.items():
            if rank in statuses:
                continue
            done, raw = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(raw)
                statuses[rank] = str(code) if code >= 0 else f"signal {-code}"
        time.sleep(0.005)
    for rank, pid in children.items():
        if rank not in statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            statuses[rank] = "timeout"
    return statuses


def run_job(job: dict[str, Any]) -> list[tuple[str, str]]:
    port = free_port()
    paths = [os.path.join(job["folder"], f"rank{rank}.txt") for rank in range(job["ranks"])]
    children = {}
    for rank, path in enumerate(paths):
        pid = os.fork()
        if pid == 0:
            run_rank(job, rank, port, path)
        children[rank] = pid
    statuses = wait_for(children, job["timeout"])
    results = []
    for rank, path in enumerate(paths):
        with open(path, errors="replace") as file:
            results.append((statuses[rank], file.read()))
    return results


def main() -> None:
    import torch
    import torch_npu  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not disturb the answers
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
