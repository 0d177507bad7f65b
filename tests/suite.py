"""What `make test` runs: the parts of the suite in turn, and what each took.

python tests/suite.py [FLAGS OF PYTEST...]               # make test; --cards: also on the NPUs of this machine
python tests/suite.py --long [FLAGS...]                  # the long tests, of make test-long
python tests/suite.py --changed [REVISION] [FLAGS...]    # make test-fast CHANGED=1: tests of what changed since HEAD
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
NPU = TESTS / "npu"
RULES = TESTS / "test_architecture.py"
SIMULATOR = ["-m", "cannsim", "run", "--devices", "4", "--", sys.executable] if sys.platform == "linux" else []
MANY = 15  # files of tests that import what changed, above which their slow tests would take more than three minutes
BUDGET: dict[str, int] = json.loads((TESTS / "budget.json").read_text())  # seconds of processor time of each part


def processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(part: str, words: list[str], simulated: bool, budget: int | None) -> tuple[bool, str]:
    """Run pytest on one part of the suite: whether it passed, and what it took."""
    began, used = time.monotonic(), processor_seconds()
    command = [sys.executable, *(SIMULATOR if simulated else []), "-m", "pytest", *words]
    status = subprocess.run(command, cwd=ROOT).returncode
    seconds = processor_seconds() - used
    took = f"{part}: {seconds:.0f} s of processor time, {time.monotonic() - began:.0f} s by the clock"
    if budget and seconds > 1.1 * budget:
        took += f"\nwarning: that is more than a tenth over its {budget} s in tests/budget.json"
    return status in (0, 5), took  # 5: the part has no such tests


def on_cards() -> list[str]:
    """The command that tests the NPUs of this machine; those of tests/npu are simulated everywhere."""
    return [sys.executable, "-m", "ascendchat", "selftest", "--device-type", "npu", "--quick"]


def module(path: Path) -> str:
    """The name by which Python knows a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported(path: Path) -> set[str]:
    """Names that a file imports; `from a import b` may name the module a.b, so both are in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("ascendchat."):
            names.add(node.value)  # as monkeypatch and `python -m` name them
    return names


def changed_files(revision: str) -> list[Path]:
    """Files that differ from the revision, new ones included."""
    git = ["git", "-C", str(ROOT)]
    differing = subprocess.run([*git, "diff", "--name-only", revision], check=True, capture_output=True, text=True)
    new = subprocess.run([*git, "ls-files", "--others", "--exclude-standard"], capture_output=True, text=True)
    return [ROOT / name for name in (differing.stdout + new.stdout).splitlines()]


def users(names: set[str]) -> set[str]:
    """Modules, and those of the same package that import one of them, directly or through others of it."""
    found = set(names)
    for name in names:
        package, new = ROOT.joinpath(*name.split(".")[:2]), {name}  # rooms inside a package are not layered
        while new and package.is_dir() and package.parent.name == "ascendchat":
            new = {module(path) for path in package.rglob("*.py") if imported(path) & new} - found
            found |= new
    return found


def touched(changed: list[Path]) -> tuple[list[Path], list[Path]]:
    """Files of tests that changed, or that import a changed module or helper; and those that import its users."""
    changed = [path for path in changed if path.suffix == ".py"]
    names = {path.stem if path.is_relative_to(TESTS) else module(path) for path in changed}
    packages = {name.rpartition(".")[0] for name in names} - {"", "ascendchat"}
    every, wide = sorted(TESTS.rglob("test_*.py")), users(names) | packages
    near = [path for path in every if path in changed or path == RULES or imported(path) & names]
    return near, [path for path in every if path not in near and imported(path) & wide]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--changed", nargs="?", const="HEAD", metavar="REVISION")
    parser.add_argument("--cards", action="store_true")
    given, flags = parser.parse_known_args()
    marks = f"{'' if given.long else 'not '}long and not vllm and not exports and not docs"
    parts = [("tests", [TESTS], marks, False), ("tests/npu on cannsim", [NPU], marks, True)]
    if given.changed:
        near, far = touched(changed_files(given.changed))
        quick = f"{marks} and not slow"
        parts = [
            (name, [path for path in files if path.is_relative_to(NPU) == simulated], chosen, simulated)
            for files, what, chosen in ((near, "", quick if len(near) > MANY else marks), (far, " further away", quick))
            for name, simulated in ((f"tests{what}", False), (f"tests/npu on cannsim{what}", True))
        ]
    whole = not (flags or given.long or given.changed)
    results = []
    for part, files, chosen, simulated in parts:
        if files and (SIMULATOR or not simulated):
            words = ["-m", chosen, *([] if simulated else [f"--ignore={NPU}"]), *map(str, files), *flags]
            results.append(run(part, words, simulated, BUDGET[part] if whole else None))
    if given.cards:
        passed = subprocess.run(on_cards(), cwd=ROOT).returncode == 0
        results.append((passed, f"selftest on the NPUs of this machine: {'passed' if passed else 'FAILED'}"))
    print(*(took for _, took in results), sep="\n")
    sys.exit(not all(passed for passed, _ in results))
