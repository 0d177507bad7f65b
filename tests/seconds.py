"""Seconds of processor time of every test, and of each part of the suite, printed at its end.

pytest --seconds=FILE      # also written as JSON: test -> [seconds of the test and what it started, kind]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def descendants(process: str = "self") -> Iterator[str]:
    """Numbers of all processes that this one has started, and they, and that have not ended."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                for child in file.read().split():
                    yield child
                    yield from descendants(child)


def processor_time() -> tuple[float, float]:
    """Seconds of this process, and of its children, those included that have ended."""
    own = os.times()
    others = own.children_user + own.children_system
    for process in descendants():
        with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
            others += sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / TICKS
    return own.user + own.system, others


def compiled() -> int:
    """How many functions torch.compile has seen in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return sum(dynamo.counters["frames"].values()) if dynamo and "frames" in dynamo.counters else 0


def kind(test: str, own: float, others: float, frames: int) -> str:
    for folder in ("npu", "browser"):
        if test.startswith(f"tests/{folder}/"):
            return {"npu": "simulator"}.get(folder, folder)
    if frames:
        return "compilation"
    return "processes" if others > own else "in this process"


class Seconds:
    """Measures in the processes that run tests, adds up in the one that reports."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.tests: dict[str, tuple[float, str]] = {}
        self.before = (0.0, 0.0, 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.before = (*processor_time(), compiled())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if call.when == "teardown":
            (own, others), frames = processor_time(), compiled()
            own, others = own - self.before[0], max(0.0, others - self.before[1])
            what = kind(item.nodeid, own, others, frames - self.before[2])
            report.user_properties.append(("seconds", (round(own + others, 3), what)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "seconds":
                self.tests[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        kinds: Counter[str] = Counter()
        for seconds, what in self.tests.values():
            kinds[what] += seconds
        parts = ", ".join(f"{what} {seconds:.0f}" for what, seconds in kinds.most_common())
        terminalreporter.write_line(f"seconds of processor time: {sum(kinds.values()):.0f} ({parts})")
        if self.file and not os.environ.get("PYTEST_XDIST_WORKER"):
            Path(self.file).write_text(json.dumps(self.tests, indent=0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", metavar="FILE", help="write the processor time of each test to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds(config.getoption("--seconds")), "seconds of tests")
