"""pytest on simulated NPUs. Does nothing unless asked:

pytest --npu-devices 2                                 # the whole suite on a machine with two NPUs
pytest --npu-devices 2 --npu-chip Ascend910A --npu-memory-gb 1

@pytest.mark.npu(chip="Ascend910A", devices=4)         # this test on another machine, in a process of its own
def test_a(): ...

def test_b(npu_fault):                                 # alone in a process, which may break
    npu_fault("aclnnMatmul:1:507015")

def test_c(npu_ranks):                                 # processes that may hang or die
    first, second = npu_ranks("import torch ...", ranks=2, fault="HcclAllReduce:1:kill@1")
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import cannsim
from cannsim import __main__ as command
from cannsim import build

REPORTS = "CANNSIM_PYTEST_REPORTS"  # file to which a process of our own writes what its tests did
STARTED = "CANNSIM_PYTEST_MACHINE"  # the machine for which pytest was started over
HINT = "needs simulated NPUs: run pytest --npu-devices 1"
MACHINE = "npu(chip=..., devices=..., memory_gb=...)"


@dataclass(frozen=True)
class Machine:
    """What a test runs on. None: what cannsim has by default."""

    devices: int
    chip: str | None = None
    memory_gb: float | None = None

    @classmethod
    def asked(cls, options: Any) -> Machine | None:
        """That of the command line; None when nobody asked for NPUs."""
        if options.npu_devices is None:
            return None
        return cls(options.npu_devices, options.npu_chip, options.npu_memory_gb)

    def is_here(self) -> bool:
        """Whether this process runs on it."""
        wanted = cannsim.environment(**asdict(self))
        names = ("CANNSIM_DEVICES", "CANNSIM_CHIP", "CANNSIM_MEMORY_GB")
        return cannsim.active() and all(os.environ.get(name) == wanted.get(name) for name in names)

    def arguments(self) -> list[str]:
        chip = [f"--npu-chip={self.chip}"] if self.chip else []
        memory = [f"--npu-memory-gb={self.memory_gb}"] if self.memory_gb else []
        return [f"--npu-devices={self.devices}", *chip, *memory]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cannsim", "simulated Ascend NPUs")
    group.addoption("--npu-devices", type=command.device_count, metavar="N", help="run on N simulated NPUs")
    group.addoption("--npu-chip", type=command.chip_name, metavar="NAME", help="their chip (default Ascend910B3)")
    group.addoption(
        "--npu-memory-gb", type=command.gibibytes, metavar="GIB", help="memory of each (default the chip's)"
    )


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Before anything of the project is imported, and before output is captured: start over on the machine."""
    if machine := Machine.asked(early_config.known_args_namespace):
        _enter(machine)
    yield


def _enter(machine: Machine) -> None:
    """Return if this process runs on the machine; else run pytest there, as a child, and exit with its status."""
    worker, state = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CANNSIM_STATE")
    if worker and state and machine.is_here():  # NPUs of its own
        os.environ["CANNSIM_STATE"] = os.path.join(state, worker)
        os.makedirs(os.environ["CANNSIM_STATE"], exist_ok=True)
        return
    try:
        build.ensure()
    except build.CannotBuild as error:
        raise pytest.UsageError(f"cannsim: {error}") from None
    if machine.is_here():
        return
    if os.environ.get(STARTED) == str(machine):
        raise pytest.UsageError("cannsim: the variables of the simulated machine were lost on the way to pytest")
    os.environ[STARTED] = str(machine)
    raise SystemExit(command.run([sys.executable, *sys.orig_argv[1:]], **asdict(machine)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MACHINE}: runs on simulated NPUs, these if the machine is named (cannsim)")
    machine = Machine.asked(config.option)
    if path := os.environ.get(REPORTS):
        config.pluginmanager.register(Reporter(config, Path(path)), "cannsim-reporter")
    elif machine is not None:
        config.pluginmanager.register(OtherMachines(config, machine), "cannsim-machines")


class Reporter:
    """In a process of our own: passes on how its tests ended."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.path.open("a") as file:
            file.write(json.dumps(data, default=str) + "\n")


class OtherMachines:
    """Runs the tests that need another machine, or a process that may break, elsewhere."""

    def __init__(self, config: pytest.Config, machine: Machine) -> None:
        self.config, self.machine = config, machine
        self.reports: dict[str, list[pytest.TestReport]] = {}

    def needed(self, item: pytest.Item) -> Machine:
        mark = item.get_closest_marker("npu")
        if mark is None:
            return self.machine
        if mark.args or not set(mark.kwargs) <= {"chip", "devices", "memory_gb"}:
            raise pytest.UsageError(f"{item.nodeid}: the mark is {MACHINE}")
        return replace(self.machine, **mark.kwargs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Of xdist, before it starts a worker, which gets options and not the arguments that they came from."""
        node.workerinput["cannsim_arguments"] = self.given()

    def given(self) -> list[str]:
        """The arguments of this pytest, or of the one whose worker it is, without the paths."""
        if inherited := getattr(self.config, "workerinput", None):
            return list(inherited["cannsim_arguments"])
        paths = self.config.option.file_or_dir or []
        return [str(arg) for arg in self.config.invocation_params.args if arg not in paths]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:  # wrong marks are told before the first test
            if (chip := self.needed(item).chip) and chip not in command.chips():
                raise pytest.UsageError(f"{item.nodeid}: chip {chip} is not one of {', '.join(command.chips())}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        alone = "npu_fault" in getattr(item, "fixturenames", ())
        machine = self.needed(item)
        if machine == self.machine and not alone:
            return None
        if item.nodeid not in self.reports:
            together = [item]
            if not alone and not hasattr(self.config, "workerinput"):  # one process for all of a machine
                together = [other for other in item.session.items if self.needed(other) == machine]
                together = [other for other in together if "npu_fault" not in getattr(other, "fixturenames", ())]
            self.run(machine, together)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports.pop(item.nodeid):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def arguments(self, machine: Machine, items: list[pytest.Item], folder: str) -> list[str]:
        """Those of this pytest, with these tests instead of the given paths."""
        given = self.given() + machine.arguments()
        given += [f"--rootdir={self.config.rootpath}", f"--junitxml={folder}/junit.xml"]
        given += ["--maxfail=0"]  # whether to go on after a failure is decided here
        if self.config.option.basetemp:  # which a pytest empties: ours is in use
            given += [f"--basetemp={folder}/tmp"]
        if self.config.inipath:
            given += ["-c", str(self.config.inipath)]
        if self.config.pluginmanager.hasplugin("xdist"):
            given += ["-n0"]
        return [*given, *("::".join([str(item.path), *item.nodeid.split("::")[1:]]) for item in items)]

    def run(self, machine: Machine, items: list[pytest.Item]) -> None:
        """Run the items on the machine, and keep their reports."""
        with tempfile.TemporaryDirectory(prefix="cannsim-pytest-", ignore_cleanup_errors=True) as folder:
            reports = Path(folder, "reports.jsonl")
            arguments = [sys.executable, "-m", "pytest", *self.arguments(machine, items, folder)]
            state = os.path.join(folder, "state")
            os.mkdir(state)
            env = cannsim.environment(**asdict(machine), state=state) | {REPORTS: str(reports)}
            env.pop("PYTEST_XDIST_WORKER", None)
            started = time.monotonic()
            done = subprocess.run(
                arguments, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            lines = reports.read_text().splitlines() if reports.exists() else []
            for line in lines:
                data = json.loads(line)
                for name in ("location", "longrepr"):  # JSON has no tuples
                    data[name] = tuple(data[name]) if isinstance(data[name], list) else data[name]
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                self.reports.setdefault(report.nodeid, []).append(report)
            output = done.stdout.decode(errors="replace")
            lasted = time.monotonic() - started
            for item in items:
                if not any(report.when == "teardown" for report in self.reports.get(item.nodeid, [])):
                    self.reports.setdefault(item.nodeid, []).append(_died(item, done.returncode, output, lasted))


def _died(item: pytest.Item, status: int, output: str, seconds: float) -> pytest.TestReport:
    """The report of a test whose process ended before the test did."""
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    text = f"the process of this test ended early, with {how}:\n{output[-4000:]}"
    return pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call", duration=seconds
    )


@pytest.fixture
def npu_fault(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """npu_fault("aclnnMatmul:1:507015"): from now on the first matmul fails. The test has a process of its own."""
    if not cannsim.active() or request.config.option.npu_devices is None:
        pytest.skip(HINT)
    yield cannsim.set_faults
    cannsim.set_faults("")


@dataclass
class Rank:
    """How one process of `npu_ranks` ended."""

    status: str  # exit status, "signal SIGKILL" or "timeout"
    output: str  # stdout and stderr

    @property
    def ok(self) -> bool:
        return self.status == "0"


@pytest.fixture
def npu_ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[Rank]]:
    """npu_ranks(code, ranks=2, fault="", timeout=120, chip=..., devices=..., **variables): a program in many processes.

    They run on a fresh machine with an NPU for each, with RANK, WORLD_SIZE and the others set.
    """
    if not cannsim.active() or request.config.option.npu_devices is None:
        pytest.skip(HINT)

    def run(
        code: str,
        ranks: int = 2,
        *,
        fault: str = "",
        timeout: float = 120,
        chip: str | None = None,
        devices: int | None = None,
        memory_gb: float | None = None,
        **variables: object,
    ) -> list[Rank]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        state = folder / "state"
        state.mkdir()
        shared = cannsim.environment(devices=devices or ranks, chip=chip, memory_gb=memory_gb, state=str(state))
        shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        shared |= {"CANNSIM_FAULT": fault} | {name: str(value) for name, value in variables.items()}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        outputs = [(folder / f"rank{rank}.txt").open("w+b") for rank in range(ranks)]
        children = [
            subprocess.Popen(
                command,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            for rank, output in enumerate(outputs)
        ]
        end = time.monotonic() + timeout
        try:
            results = [_wait(child, end) for child in children]
        finally:  # also after Ctrl-C, which does not reach their sessions
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        texts = [Path(output.name).read_text(errors="replace") for output in outputs]
        for output in outputs:
            output.close()
        return [Rank(status, text) for status, text in zip(results, texts)]

    return run


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(child: subprocess.Popen[bytes], end: float) -> str:
    try:
        status = child.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return "timeout"
    return f"signal {signal.Signals(-status).name}" if status < 0 else str(status)
