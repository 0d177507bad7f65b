"""Run other people's test suites on the simulated CANN, and sort what happens by cause.

    python -m cannsim suites op-plugin/test/test_base_ops --results results.jsonl

Each argument is a test file, or a folder whose files test_*.py are run; nothing is fetched. torch and torch_npu
are imported once per job, and every file runs in a process forked from there. After a test that fails, the rest
of its file goes on in a new process, because an NPU that reported an error answers nothing useful any more.
Results are appended to a file, one JSON line per test file, and files that it already holds are not run again.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cannsim
from cannsim import build
from cannsim.__main__ import chip_name, device_count
from cannsim.suites_causes import CAUSES, of_file

Row = dict[str, Any]  # {"file", "cause", "detail", "tests": [[test, cause, detail], ...], "seconds"}


def test_files(arguments: Iterable[str]) -> list[Path]:
    """The files named, and the test_*.py below the folders named."""
    found: list[Path] = []
    for argument in map(Path, arguments):
        found += sorted(argument.rglob("test_*.py")) if argument.is_dir() else [argument]
    return [path.resolve() for path in found]


def read(results: Path) -> dict[str, Row]:
    """The last result of each file; a line cut short by a stop is ignored."""
    rows: dict[str, Row] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["file"]] = row
    return rows


def disabled(path: Path | None) -> set[str]:
    """`test_name (__main__.TestClass)` as torch spells the tests that a project disables (DISABLED_TESTS_FILE)."""
    return set(json.loads(path.read_text())) if path else set()


def excused(row: Row, names: set[str]) -> Row:
    """Tests that fail and that their own project disables on NPUs count as skipped."""
    tests = []
    for test, cause, detail in row["tests"]:
        group, _, name = test.rpartition(".")
        if cause not in ("passed", "skipped") and f"{name} (__main__.{group.rpartition('.')[2]})" in names:
            cause, detail = "skipped", "disabled by its project"
        tests.append([test, cause, detail])
    cause, detail = of_file(tests)
    return {**row, "tests": tests, "cause": cause, "detail": detail}


class Job(threading.Thread):
    """One server (suites_server.py) on a simulated machine of its own, fed from the common list of files."""

    def __init__(self, files: collections.deque[Path], results: Path, lock: threading.Lock, options: Any) -> None:
        super().__init__(daemon=True)
        self.files, self.results, self.lock, self.options = files, results, lock, options

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="cannsim-", ignore_cleanup_errors=True) as state:
            env = cannsim.environment(devices=self.options.devices, chip=self.options.chip, state=state)
            env.setdefault("OMP_NUM_THREADS", "1")  # threads of OpenMP do not live through a fork
            if self.options.boxed:
                env["CANNSIM_BOXED"] = "1"
            command = [sys.executable, "-m", "cannsim.suites_server", str(self.options.timeout)]
            command += ["--fresh"] if self.options.fresh else []
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with subprocess.Popen(command, env=env, **pipes) as server:  # type: ignore[call-overload]
                while self.files:
                    self.one(server, self.files.popleft())

    def one(self, server: subprocess.Popen[str], path: Path) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{path}\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server ended at {path}; see its messages above")
        row = json.loads(answer)
        row["cause"], row["detail"] = of_file(row["tests"])
        with self.lock, open(self.results, "a") as file:
            file.write(json.dumps(row) + "\n")
            print(f"{row['cause']:9} {row['seconds']:6.1f} s  {path.name}  {row['detail']}", flush=True)


def table(rows: Iterable[Row]) -> str:
    """Markdown: per folder, how many files of each cause; then what is missing, by number of files."""
    folders: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    tests: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    missing: collections.Counter[str] = collections.Counter()
    for row in rows:
        folder = Path(row["file"]).parent.name
        folders[folder][row["cause"]] += 1
        tests[folder].update(cause for _, cause, _ in row["tests"])
        missing.update({detail for _, cause, detail in row["tests"] if cause == "missing"})
    lines = [f"| suite | files | {' | '.join(CAUSES)} |", "|---|---|" + "---|" * len(CAUSES)]
    for count, unit in ((folders, "files"), (tests, "tests")):
        for folder, causes in sorted(count.items()):
            cells = " | ".join(str(causes[cause]) for cause in CAUSES)
            lines.append(f"| {folder}, {unit} | {causes.total()} | {cells} |")
    lines += ["", *(f"- **{cause}**: {meaning}" for cause, meaning in CAUSES.items())]
    if missing:
        lines += ["", "Missing, with the number of files: " + ", ".join(f"{n} {c}" for n, c in missing.most_common())]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cannsim suites", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folders", nargs="+", help="test files, or folders of them")
    parser.add_argument("--results", type=Path, default=Path("suites.jsonl"), help="JSON lines (default suites.jsonl)")
    parser.add_argument("--jobs", type=int, default=1, help="files that run at the same time")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one test may take")
    parser.add_argument("--devices", type=device_count, default=2, help="NPUs of the simulated machine")
    parser.add_argument("--chip", type=chip_name, help="chip name")
    parser.add_argument("--boxed", action="store_true", help="run operators that are not simulated on the CPU")
    parser.add_argument("--fresh", action="store_true", help="import torch anew for each file")
    parser.add_argument("--disabled", type=Path, help="JSON file of tests that their project does not run on NPUs")
    parser.add_argument("--again", default="", help="causes, separated by commas, whose files are run once more")
    options = parser.parse_args(argv)
    files = test_files(options.folders)
    absent = [path for path in files if not path.exists()]
    if absent:
        print(f"cannsim: no such file: {absent[0]}; fetch the suite first", file=sys.stderr)
        return 2
    if not files:
        print(f"cannsim: no test_*.py in {', '.join(options.folders)}; name a folder that has some", file=sys.stderr)
        return 2
    try:
        names = disabled(options.disabled)
    except (OSError, ValueError) as error:
        print(f"cannsim: --disabled {options.disabled} cannot be read ({error}); name a JSON file", file=sys.stderr)
        return 2
    build.ensure()
    known, again = read(options.results), options.again.split(",")
    wanted = [path for path in files if str(path) not in known or known[str(path)]["cause"] in again]
    queue, lock = collections.deque(wanted), threading.Lock()
    jobs = [Job(queue, options.results, lock, options) for _ in range(min(options.jobs, len(wanted)))]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    rows = read(options.results)
    print(table(excused(rows[name], names) for name in sorted(map(str, files)) if name in rows))
    return os.EX_OK if all(str(path) in rows for path in files) else 1
