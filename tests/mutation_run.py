"""Mutation testing: which mutants of lab/mutants.tsv does a test see?

    python tests/mutation_run.py run LIST COPY TREE RESULTS [--part I/N] [--place NAME] [--changed]
    python tests/mutation_run.py table LIST RESULTS...

Every process that runs at the same time has a TREE of its own, a checkout in which it puts one mutant after the other.
A mutant meets the tests that execute its line, fastest first, to the first failure or to SECONDS of processor time
(another limit: MUTANT_SECONDS in the environment, for those that are still alive).
With --changed it meets those of them that `make test-fast CHANGED=1` would run, had somebody written it.
COPY holds reached.txt (tests/mutants.py map) and seconds*.json (`pytest --seconds=FILE`). Under `python -m cannsim
run --` these are the tests of tests/npu, for the mutants that RESULTS has as alive.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import itertools
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import suite
from mutants import PLACES, Mutant, drawn

SECONDS = float(os.environ.get("MUTANT_SECONDS", "8"))
WARM = "setuptools torch torch._dynamo pyarrow.parquet httpx rich.progress tokenizers fastapi hypothesis"


def tests_of(file: str, copy: Path) -> Iterator[tuple[Mutant, list[str]]]:
    """Every mutant, and the fastest tests that execute its line, SECONDS in all."""
    parts = [json.loads(part.read_text()) for part in sorted(copy.glob("seconds*.json"))]
    seconds = {test: value[0] for part in parts for test, value in part.items()}
    wanted = [test for test in seconds if test.startswith("tests/npu/") == bool(os.environ.get("CANNSIM_HOME"))]
    of_file = {
        name: [*tests] for name, tests in itertools.groupby(sorted(wanted), lambda test: test.partition("::")[0])
    }
    reached: Any = collections.defaultdict(lambda: collections.defaultdict(set))  # number -> file -> (test, phase)
    for line in (copy / "reached.txt").read_text().splitlines():
        number, _, test = line.partition("\t")
        reached[number][test.partition("::")[0]].add(test.rpartition(" ")[::2])
    for mutant in drawn(file):
        groups = []
        for name in of_file.keys() & reached[mutant.number]:
            tests = reached[mutant.number][name]
            shared = len(tests) == 1 and next(iter(tests))[1] == "(setup)"  # by a fixture of the whole file
            groups.append(of_file[name] if shared else [test for test, _ in tests if test in seconds])
        if not any(groups):  # in a process without this environment: the files that reach the same place
            near = {name for other in drawn(file) if other.place == mutant.place for name in reached[other.number]}
            groups = [of_file[name] for name in near & of_file.keys()]
        every = sorted(itertools.chain(*groups), key=seconds.__getitem__)
        until = itertools.accumulate(seconds[test] + 0.01 for test in every)
        few = {test: number for number, (test, end) in enumerate(zip(every, until)) if end <= SECONDS or number < 3}
        groups = sorted(
            ([test for test in group if test in few] for group in groups), key=lambda g: min(map(few.get, g), default=0)
        )
        yield mutant, [test for group in groups for test in group]


class FirstFailure:
    """Runs the tests in the order of the list, and keeps the name of the first that fails."""

    def __init__(self, tests: list[str]) -> None:
        self.order, self.test = {test: number for number, test in enumerate(tests)}, ""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        items.sort(key=lambda item: self.order.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.test = self.test or (report.nodeid if report.failed else "")


@functools.cache
def touched(path: str) -> tuple[set[str], set[str]]:
    """Files of tests that `make test-fast CHANGED=1` runs where this file was changed, whole and without slow tests."""
    near, far = ({str(file.relative_to(suite.ROOT)) for file in files} for files in suite.touched([suite.ROOT / path]))
    return (near, far) if len(near) <= suite.MANY else (set(), near | far)


def by_file(tests: list[str]) -> list[list[str]]:
    """The tests of the first file, of the next three, and the rest: most mutants die before the rest is collected."""
    groups = [[*group] for _, group in itertools.groupby(tests, lambda test: test.partition("::")[0])]
    return [
        part for part in map(list, map(itertools.chain.from_iterable, (groups[:1], groups[1:4], groups[4:]))) if part
    ]


def first_failure(tests: list[str], marks: str, tree: str, log: Path) -> str:
    """The first of the tests that fails, in a forked process; empty where none does."""
    result = log.with_suffix(".result")
    result.write_text("timeout")
    if (child := os.fork()) == 0:
        os.setsid()
        os.chdir(tree)
        sys.modules["__main__"] = types.ModuleType("__main__")  # what spawned processes import again
        sys.path[:1] = [tree, f"{tree}/cannsim"]
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        first = FirstFailure(tests)
        code = pytest.main(["-x", "-n0", "-p", "no:cacheprovider", "-m", marks, *tests], plugins=[first])
        result.write_text(first.test or ("" if code in (0, 5) else f"pytest ended with {int(code)}"))
        os._exit(0)
    until = time.monotonic() + 120 + 6 * SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return result.read_text()


def run(file: str, copy: str, tree: str, results: str, part: str, place: str, changed: bool) -> None:
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=f"{tree}:{tree}/cannsim")
    if not os.environ.get("CANNSIM_HOME"):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in WARM.split():
        importlib.import_module(name)
    Path(results).touch()
    known = {row.split("\t")[0]: row.split("\t")[1] for row in Path(results).read_text().splitlines()}
    index, count = map(int, part.split("/"))
    for mutant, tests in [*tests_of(file, Path(copy))][index::count]:
        if place not in mutant.place or known.get(mutant.number, not tests):
            continue
        groups = [(tests, "")]
        if changed:
            groups = [
                ([test for test in tests if test.partition("::")[0] in files], marks)
                for files, marks in zip(touched(mutant.path), ("", "not slow"))
            ]
        groups = [(part, marks) for some, marks in groups for part in by_file(some)]
        path, began = Path(tree, mutant.path), time.time()
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        first, start, last, end = mutant.span
        lines[first - 1 : last] = [lines[first - 1][:start] + mutant.new.encode() + lines[last - 1][end:]]
        path.write_bytes(b"".join(lines))
        os.utime(path, (began + int(mutant.number),) * 2)  # else an older compiled file may pass for this one
        try:
            log = Path(f"{results}.log")
            killer = next(filter(None, (first_failure(some, marks, tree, log) for some, marks in groups)), "")
        finally:
            path.write_bytes(whole)
        with open(results, "a") as rows:
            rows.write(f"{mutant.number}\t{killer}\t{len(tests)}\t{time.time() - began:.1f}\n")


def table(file: str, results: list[str]) -> None:
    rows = [row.split("\t") for name in results for row in Path(name).read_text().splitlines()]
    killed = {row[0] for row in rows if row[1]}
    for place in [*PLACES, ""]:
        numbers = [mutant.number for mutant in drawn(file) if place in mutant.place]
        alive = [] if not place else [number for number in numbers if number not in killed]
        print(place or "all", len(numbers), len(killed & {*numbers}), " ".join(alive), sep="\t")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("list")
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--place", default="")
    parser.add_argument("--changed", action="store_true")
    given = parser.parse_args()
    if given.what == "run":
        run(given.list, *given.paths, given.part, given.place, given.changed)
    else:
        table(given.list, given.paths)
