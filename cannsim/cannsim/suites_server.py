"""Runs test files in forked processes: started by suites.py in the environment of cannsim, one per job.

    python -m cannsim.suites_server SECONDS [--fresh]

Reads a path per line, answers with a JSON line {"file", "tests": [[test, cause, detail], ...], "seconds"}.
--fresh: torch and torch_npu are not imported ahead, for files that set variables which these read when imported.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from pathlib import Path
from typing import Any

from cannsim import suites_ranks
from cannsim.suites_causes import of_text

PR_SET_CHILD_SUBREAPER = 36  # of Linux' prctl


def wait_for_devices() -> None:
    """Raises what an operator that the test started ended with, if the test has not seen it.

    torch_npu's second thread empties its queue just before it says that an operator failed, so who waits for an empty
    queue in that moment (`.cpu()` does) hears nothing. The event is one more task: when it is over, that was said. It
    is never over where the test itself has seen the failure, hence the limit.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "npu") or not torch.npu.is_initialized():
        return
    deadline = time.monotonic() + 0.2
    event = torch.npu.current_stream().record_event()
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    torch.npu.synchronize()


class Reporter(unittest.TestResult):
    """Writes [event, test, text, assertion] lines to a pipe while the tests run."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self.pipe, self.failfast = pipe, True

    def tell(self, event: str, test: Any, text: str = "", assertion: bool = False) -> None:
        os.write(self.pipe, (json.dumps([event, test.id(), text[-3000:], assertion]) + "\n").encode())

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        sys.stdout.flush()
        sys.stderr.flush()
        self.tell("start", test, str(os.fstat(2).st_size))  # where in the log it begins, before it prints anything

    def addSuccess(self, test: Any) -> None:
        try:
            wait_for_devices()
        except RuntimeError as error:  # an operator failed that the test did not wait for, or not long enough
            if "FORCE STOP" not in str(error):  # else the test itself has stopped the device
                self.fail(test, sys.exc_info())
                return
        self.tell("passed", test)

    def addSkip(self, test: Any, reason: str) -> None:
        self.tell("skipped", test, reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.tell("passed", test)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.tell("passed", test)

    def fail(self, test: Any, err: Any) -> None:
        text = "".join(traceback.format_exception(*err))
        self.tell("failed", test, text, issubclass(err[0], AssertionError))
        self.stop()

    addError = addFailure = fail  # type: ignore[assignment]

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err:
            self.fail(test, err)


def children() -> list[int]:
    """The processes of the test, also those whose parents ended: this process inherits them (see main)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def end_children() -> None:
    while left := children():
        for process in left:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def flatten(suite: Any) -> list[Any]:
    return [test for part in suite for test in (flatten(part) if isinstance(part, unittest.TestSuite) else [part])]


def prepared(node: ast.stmt) -> bool:
    """A statement that prepares the tests (a seed, a switch of torch_npu); others run them or belong to a command."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return node.value.func.attr not in ("run_tests", "main", "run")
    return isinstance(node, ast.Assign | ast.Import | ast.ImportFrom)


def start_as_main(module: types.ModuleType, path: Path) -> None:
    """What the file does before its tests when it is started as a program, as its authors do."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            body = list(itertools.takewhile(prepared, node.body))
            exec(compile(ast.Module(body, []), str(path), "exec"), module.__dict__)


def child(path: Path, done: set[str], pipe: int, log: str) -> None:
    """In the forked process: load the file and run those of its tests that are not done; stops at a failure."""
    os.setsid()
    suites_ranks.end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if "torch" in sys.modules:
        suites_ranks.install(pipe)
    os.chdir(path.parent)
    sys.argv = [str(path)]
    sys.path[:0] = [str(path.parent), str(path.parent.parent)]
    sys.modules.pop(path.stem, None)
    reporter = Reporter(pipe)
    try:
        module = importlib.import_module(path.stem)
        start_as_main(module, path)
        tests = flatten(unittest.TestLoader().loadTestsFromModule(module))
    except unittest.SkipTest as skip:
        reporter.addSkip(types.SimpleNamespace(id=lambda: "import"), str(skip))
    except BaseException:  # noqa: BLE001  (also sys.exit: all of it is a result)
        reporter.fail(types.SimpleNamespace(id=lambda: "import"), sys.exc_info())
        return
    else:
        if not tests:
            nothing = AssertionError("no unittest tests in this file")
            reporter.fail(types.SimpleNamespace(id=lambda: "import"), (type(nothing), nothing, None))
            return
        unittest.TestSuite(test for test in tests if test.id() not in done).run(reporter)
        if reporter.shouldStop:
            return
    os.write(pipe, b'["end", "", "", false]\n')


class File:
    """The results of one test file, gathered over the processes that it took."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self.timeout = path, timeout
        self.tests: dict[str, tuple[str, str]] = {}
        self.ended = False
        self.running = ""
        self.offset = 0  # where in its log the running test begins

    def listen(self, pipe: int, log: Path) -> str:
        """Take in what the process reports until it closes the pipe or a test takes too long; says which."""
        rest, deadline = b"", time.monotonic() + self.timeout
        while True:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return "hangs"
            piece = os.read(pipe, 65536)
            if not piece:
                return "dies"
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                event, test, text, assertion = json.loads(line)
                deadline = time.monotonic() + self.timeout
                if event == "end":
                    self.ended = True
                elif event == "start":
                    self.running, self.offset = test, int(text)
                elif event == "failed":
                    printed = log.read_bytes()[self.offset :].decode(errors="replace")
                    failed = assertion or "AssertionError" in text  # of another process, too
                    self.tests[test] = of_text(printed[-20000:] + text, failed)
                    self.running = ""
                else:
                    self.tests[test] = (event, text[:100] if event == "skipped" else "")
                    self.running = ""

    def run_once(self, log: Path) -> None:
        reading, writing = os.pipe()
        self.offset = 0
        process = os.fork()
        if process == 0:
            try:
                os.close(reading)
                child(self.path, set(self.tests), writing, str(log))
            finally:
                os._exit(0)
        os.close(writing)
        why = self.listen(reading, log)
        os.close(reading)
        end_children()
        if self.running or (why == "hangs" and not self.ended):
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]  # of a rank that ended
            found = of_text(log.read_bytes()[self.offset :].decode(errors="replace")[-20000:] if lines else "", False)
            # torch_npu ends the process at an operator that is missing in its second thread
            outcome = found if why == "dies" and found[0] == "missing" else (why, "".join((errors or lines)[-1:])[:160])
            self.tests[self.running or "import"] = outcome
            self.running = ""

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="cannsim-suite-") as folder:
            for number in range(10_000):
                before = len(self.tests)
                self.run_once(Path(folder, f"{number}.log"))
                if self.ended or len(self.tests) == before or "import" in self.tests:
                    return


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    suites_ranks.provide_expecttest()
    if "--fresh" not in sys.argv[2:]:
        suites_ranks.import_torch()
    for line in sys.stdin:
        start = time.monotonic()
        file = File(Path(line.strip()), float(sys.argv[1]))
        file.run()
        tests = [[test, *outcome] for test, outcome in file.tests.items()]
        seconds = round(time.monotonic() - start, 1)
        answers.write(json.dumps({"file": str(file.path), "tests": tests, "seconds": seconds}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
