"""The table of simulated operators: whether a test runs each, what it checks, where its signature comes from.

    cannsim operators          # runs this file on the simulated CANN and prints Markdown

The operators, parameters and checks are read from the library itself (the OP lines of src/ops), the
executed ones by running the operator cases of tests/npu and from the names that its operator tests demand; an
installed package has no tests, and its table no such column.
"""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TESTS = ROOT.parent.parent / "tests" / "npu"  # in a clone only

# Parameter types of the OP lines -> words of signatures.txt.
WORDS = {
    **dict.fromkeys(("In", "Out", "OptIn", "OptOut"), "tensor"),
    **dict.fromkeys(("InList", "OutList", "OptInList"), "tensors"),
    **dict.fromkeys(("Num", "OptNum"), "scalar"),
    **dict.fromkeys(("Ints", "OptInts"), "ints"),
    "NumList": "scalars",
    "Bools": "bools",
    "Floats": "floats",
    "Text": "text",
    "aclDataType": "dtype",
    "int64_t": "int64",
    "uint64_t": "uint64",
    "int8_t": "int8",
    **{name: name for name in ("int", "bool", "float", "double")},
}


@dataclass(frozen=True)
class Operator:
    name: str  # aclnnAdd
    types: str  # "tensor tensor scalar tensor"
    checks: tuple[str, ...]
    family: str  # the file that defines it, without .cpp


def calls(text: str) -> tuple[str, ...]:
    """The outermost calls of a check list: "(dtype(a, kReal), rank(b, 1, 2))" -> ("dtype(a, kReal)", ...)."""
    parts, depth, word = [], 0, ""
    for letter in text.strip()[1:-1]:
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            parts.append(word.strip())
            word = ""
        else:
            word += letter
    return tuple(part for part in (*parts, word.strip()) if part)


def _told(function: str) -> str:
    """What a function of the built library says about it."""
    import torch  # noqa: F401  libopapi.so needs the libraries of torch

    from cannsim import build

    tell = getattr(ctypes.CDLL(str(build.home() / "lib64" / "libopapi.so")), function)
    tell.restype = ctypes.c_char_p
    text: bytes = tell()
    return text.decode()


def older() -> list[str]:
    """Every OLDER line: operators of the interface before aclnn."""
    return _told("cannsimOlderOperators").split()


def operators() -> list[Operator]:
    """Every OP line of the built library."""
    rows = []
    for line in _told("cannsimOperators").splitlines():
        name, parameters, checks, file = line.split("\t")
        types = [WORDS[parameter.split()[0]] for parameter in parameters.strip("()").split(", ")]
        rows.append(Operator(name, " ".join(types), calls(checks), file.removesuffix(".cpp")))
    return sorted(rows, key=lambda o: (o.family, o.name))


def signatures() -> dict[str, tuple[str, str]]:
    """Operator -> (types, source) of the public prototypes."""
    lines = (ROOT / "signatures.txt").read_text().splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {name: (types, source) for name, types, source in rows}


def executed() -> set[str]:
    """Operators launched by the cases of tests/npu, and those that its operator tests demand by name."""
    import cannsim

    sys.path.insert(0, str(TESTS))
    import test_ops_all
    import torch

    cannsim.reset()
    for case in test_ops_all.CASES:
        test_ops_all.run_on(case, "npu", getattr(torch, case.dtypes[0]))
    files = [*TESTS.glob("test_ops_*.py"), TESTS / "test_attention_npu.py"]
    named = {name for file in files for name in re.findall(r'"(aclnn[A-Z]\w+)"', file.read_text())}
    return {name for name in cannsim.launches() if name.startswith("aclnn")} | named


def summary(check: str) -> str:
    """A check without its message texts: require(x > 0, "...") -> x > 0."""
    if check.startswith("require("):
        return check[len("require(") :].split(', "')[0].strip()
    return check


def render() -> str:
    """The table, in Markdown."""
    run, public, rows = executed() if TESTS.is_dir() else None, signatures(), operators()
    columns = ["operator", *(["executed"] if run is not None else []), "checked", "signature"]
    lines = [
        "# Simulated operators",
        "",
        f"{len(rows)} operators, {sum(bool(o.checks) for o in rows)} with checks of their own. The parameter types of",
        "all equal those of `signatures.txt`, whose source the last column names. Every operator also refuses a null",
        "required argument (161001) and bfloat16 on a chip without it (161002).",
    ]
    if run is not None:
        lines += [f"*executed* ({sum(o.name in run for o in rows)}): a test runs it and compares it with the CPU."]
    for family in sorted({o.family for o in rows}):
        lines += ["", f"## {family}.cpp", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for o in (o for o in rows if o.family == family):
            checks = "; ".join(summary(c) for c in o.checks).replace("|", "\\|")
            source = public[o.name][1] if o.name in public else "not public"
            ran = [] if run is None else ["yes" if o.name in run else ""]
            lines.append(f"| {' | '.join([o.name, *ran, checks, source])} |")
    lines += ["", "## Older interface (aclopCompileAndExecute)", "", ", ".join(older())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
