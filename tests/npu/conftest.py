"""Tests in this folder run on the simulated CANN:   python -m cannsim run --devices 4 -- pytest tests/npu

`on_npu(code, ...)` runs a program on a fresh simulated machine, as one process or as several ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import cannsim

HERE = Path(__file__).resolve().parent
REASON = "run through make test: python -m cannsim run -- pytest tests/npu"
READY = cannsim.built() and cannsim.active()

if READY:
    import torch_npu  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.npu)
            if not READY:
                item.add_marker(pytest.mark.skip(reason=REASON))


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
    """The process of ranks.py, started at the first use."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=cannsim.environment(),
        )  # fmt: skip
        assert self._read() == "ready"

    def _read(self) -> object:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, job: dict[str, object]) -> list[Rank]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return [Rank(status, output) for status, output in self._read()]  # type: ignore[attr-defined]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def on_npu(_server: Server, tmp_path: Path) -> Callable[..., list[Rank]]:
    """on_npu(code, ranks=1, chip=..., devices=..., timeout=60, check=True, **env) -> one Rank per process.

    Every call is a new machine (own CANNSIM_STATE). With check the test fails when a rank fails.
    """
    calls = 0

    def run(
        code: str, ranks: int = 1, *, devices: int | None = None, chip: str | None = None, timeout: float = 60,
        check: bool = True, **env: object,
    ) -> list[Rank]:  # fmt: skip
        nonlocal calls
        calls += 1
        folder = tmp_path / f"job{calls}"
        folder.mkdir()
        variables = {
            "CANNSIM_STATE": str(folder / "state"), "CANNSIM_DEVICES": str(devices or ranks),
            "CANNSIM_CHIP": chip or "Ascend910B3", "OMP_NUM_THREADS": "1",
        } | {name: str(value) for name, value in env.items()}  # fmt: skip
        results = _server.run(
            {"code": textwrap.dedent(code), "ranks": ranks, "env": variables, "folder": str(folder), "timeout": timeout}
        )
        if check:
            failed = [f"rank {rank} {result!r}" for rank, result in enumerate(results) if not result.ok]
            assert not failed, "\n".join(failed)
        return results

    return run
