"""run_ranks(fn, world_size): call fn(rank) in that many real processes that form one job, with a hard time limit.

`fn` must be a function of a module (it travels by name). The value each rank returns comes back in rank order.
"""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from warm_process import PRELOADED

from ascendchat import processes as port

FORK = multiprocessing.get_context("forkserver")  # ranks have imported torch already
FORK.set_forkserver_preload(["pytest", *PRELOADED])


class Host:
    """The device of these tests: the CPU, as far as dist needs it."""

    type = "cpu"
    collective = "gloo"

    def bind(self, local_rank: int) -> torch.device:
        torch.set_num_threads(1)  # many ranks share few cores here
        return torch.device("cpu")


def _rank(rank: int, fn: Callable[..., Any], environ: Mapping[str, str], args: tuple[Any, ...], results: Any) -> None:
    os.environ.clear()  # that of the first test
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        results.put((rank, True, fn(rank, *args)))
    except BaseException:  # noqa: BLE001 (it is raised again in the test's process)
        results.put((rank, False, traceback.format_exc()))


def _failures(results: Any, rank: int, text: str) -> list[str]:
    """The first failure to arrive and those that follow it: one rank's fault makes the others fail too."""
    found = {rank: text}
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        try:
            other, good, value = results.get(timeout=0.2)
        except queue.Empty:
            continue
        if not good:
            found[other] = value
    return [f"rank {rank} failed:\n{text}" for rank, text in sorted(found.items())]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, seconds: float = 240.0, absent: tuple[int, ...] = ()
) -> list[Any]:
    """[fn(0, *args), fn(1, *args), ...]; raises if a rank fails or the time is over. `absent` ranks never start."""
    results = FORK.Queue()
    environ = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.free_port()),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    ranks = [rank for rank in range(world_size) if rank not in absent]
    processes = [FORK.Process(target=_rank, args=(rank, fn, environ, args, results)) for rank in ranks]
    end = time.monotonic() + seconds
    values: dict[int, Any] = {}
    try:
        for process in processes:
            process.start()
        while len(values) < len(ranks):
            try:
                rank, good, value = results.get(timeout=0.2)
            except queue.Empty:
                gone = [p.exitcode for p in processes if p.exitcode]
                if gone and results.empty():
                    raise AssertionError(f"a rank ended with status {gone[0]} and no result") from None
                if time.monotonic() > end:
                    raise TimeoutError(f"{len(ranks) - len(values)} of {len(ranks)} ranks not done") from None
                continue
            if not good:
                raise AssertionError("\n".join(_failures(results, rank, value)))
            values[rank] = value
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
            assert process.exitcode == 0, f"a rank ended with status {process.exitcode}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [values.get(rank) for rank in range(world_size)]
