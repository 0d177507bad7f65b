"""Tests in this folder run on the simulated CANN:

    python -m cannsim run --devices 4 -- pytest -m '' tests/npu        # or one of its files

`on_npu(code, ...)` runs a program on a fresh simulated machine, as one process or as several ranks.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cannsim

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "invariant"))  # its runs of learning from pairs
REASON = "run through make test: python -m cannsim run -- pytest tests/npu"
READY = cannsim.built() and cannsim.active()

if READY:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # a machine of its own, with NPUs that nobody else uses
        os.environ["CANNSIM_STATE"] = os.path.join(os.environ["CANNSIM_STATE"], worker)
        os.makedirs(os.environ["CANNSIM_STATE"], exist_ok=True)
    import torch_npu  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.npu)
            if not READY:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="module")
def device() -> Any:
    """The first NPU, bound."""
    from ascendchat.device import pick

    found = pick("npu")
    found.bind(0)
    return found


@dataclass
class Rank:
    """How one process of a test ended."""

    status: str  # exit code, "signal N" or "timeout"
    output: str  # stdout and stderr

    @property
    def ok(self) -> bool:
        return self.status == "0"

    def __repr__(self) -> str:
        return f"ended with {self.status}:\n{self.output}"


class Server:
    """The process of rank_server.py, started at the first use."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=cannsim.environment(),
        )
        assert self._read() == "ready"

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, jobs: list[dict[str, object]]) -> list[list[Rank]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(jobs) + "\n")
        self.process.stdin.flush()
        return [[Rank(*rank) for rank in job] for job in self._read()]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


OnNpu = Callable[..., list[Rank]]


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    """One for all tests of this process."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def _new_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, object]]:
    """A program on a machine of its own (own CANNSIM_STATE)."""
    folder, numbers = tmp_path_factory.mktemp("jobs"), itertools.count()

    def new(
        code: str,
        ranks: int = 1,
        *,
        devices: int | None = None,
        chip: str = "Ascend910B3",
        timeout: float = 180,
        **env: object,
    ) -> dict[str, object]:
        own = folder / str(next(numbers))
        own.mkdir()
        variables = {
            "CANNSIM_STATE": own / "state",
            "CANNSIM_DEVICES": devices or ranks,
            "CANNSIM_CHIP": chip,
            "OMP_NUM_THREADS": 1,
            **env,
        }
        env_text = {name: str(value) for name, value in variables.items()}
        text = textwrap.dedent(code)
        return {"code": text, "ranks": ranks, "env": env_text, "folder": str(own), "timeout": timeout}

    return new


@pytest.fixture(scope="session")
def on_npu(_server: Server, _new_job: Callable[..., dict[str, object]]) -> OnNpu:
    """on_npu(code, ranks=1, devices=..., chip=..., timeout=180, check=True, **env) -> one Rank per process.

    With check the test fails when a rank fails.
    """

    def run(code: str, ranks: int = 1, *, check: bool = True, **settings: Any) -> list[Rank]:
        (results,) = _server.run([_new_job(code, ranks, **settings)])
        if check:
            failed = [f"rank {number} {rank!r}" for number, rank in enumerate(results) if not rank.ok]
            assert not failed, "\n".join(failed)
        return results

    return run


@pytest.fixture(scope="session")
def many_on_npu(_server: Server, _new_job: Callable[..., dict[str, object]]) -> Callable[..., list[list[Rank]]]:
    """many_on_npu(code, ranks, [env, ...], **settings): the same program in many environments at the same time."""

    def run(code: str, ranks: int, environments: list[dict[str, str]], **settings: Any) -> list[list[Rank]]:
        return _server.run([_new_job(code, ranks, **settings, **env) for env in environments])

    return run
