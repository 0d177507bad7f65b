"""Mutants of the product: one operator, number or condition changed, in the places where a silent error costs most.

    python tests/mutants.py draw LIST          # 34 in each of the 18 places, by a fixed seed
    python tests/mutants.py map LIST COPY      # probes into COPY, a checkout: tests run there write COPY/reached.txt

tests/mutation_run.py runs them.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PER_PLACE = 34
PLACES = {
    "loss": "nn/loss nn/logprobs nn/preference",
    "optimizers": "nn/optim",
    "attention choice": "nn/attention device/attention",
    "packing": "data/corpus data/chat/rows data/chat/pairs",
    "templates": "models/jinja_template data/chat/render",
    "checkpoint": "checkpoint files",
    "sampling": "engine/sampling",
    "prefix cache": "engine/prefix engine/cache",
    "scheduler": "engine/engine engine/batch_state",
    "grpo": "rl/grpo",
    "rewards": "rl/rewards sandbox/process",
    "plan memory": "sizes/memory",
    "data reading": "data/read data/chat/tables data/chat/formats",
    "guard": "serve/guard",
    "sandbox": "sandbox/program sandbox/inside sandbox/seccomp",
    "launch": "launch/torchrun launch/rank processes",
    "NPU operators": "device/npu_ops device/npu_attention device/npu",
    "export": "models/export",
}
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*", ast.And: "or", ast.Or: "and", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
PROBE = """import os
seen = set()
def reach(number):
    key = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if key not in seen:
        seen.add(key)
        try: file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError: return
        os.write(file, ("%s\\t%s\\n" % key).encode())
        os.close(file)
reach._dynamo_marked_constant = True  # torch.compile calls it while it traces
"""
IMPORT = """try:
    import sys; sys.path.append({tree!r})
    from reached_by import reach as _reach
except ImportError: _reach = lambda _: None"""
Span = tuple[int, int, int, int]  # line and column in bytes, of the first and behind the last character


class Mutant(NamedTuple):
    number: str
    place: str
    path: str
    span: Span
    new: str


def mutations(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """What one node of the tree can become: the node to replace and its new text."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"{ast.unparse(node.left)} {SWAPS[type(node.ops[0])]} {ast.unparse(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, f"({ast.unparse(node.left)}) {SWAPS[type(node.op)]} ({ast.unparse(node.right)})"
    elif isinstance(node, ast.BoolOp):
        yield node, f" {SWAPS[type(node.op)]} ".join(f"({ast.unparse(value)})" for value in node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield node, repr(not node.value if type(node.value) is bool else node.value + 1)
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        yield node, {"min": "max", "max": "min"}[node.id]
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and isinstance(
        node.test, (ast.Name, ast.Attribute, ast.Call)
    ):
        yield node.test, f"not {ast.unparse(node.test)}"
    elif isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
        yield node, f"{ast.unparse(node.target)} {SWAPS[type(node.op)]}= {ast.unparse(node.value)}"
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, "pass"


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs when a function is called: no annotations, defaults, decorators, or parts of formatted texts."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args", "decorator_list") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from inside(child)


def span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def candidates(path: Path) -> list[tuple[int, int, int, int, str]]:
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = (change for function in functions for node in inside(function) for change in mutations(node))
    return sorted({(*span(old), new) for old, new in found})


def draw(file: str) -> None:
    rows = ["number\tplace\tpath\tline\tcolumn\tlast\tend\tnew"]
    for place, names in PLACES.items():
        paths = [f"ascendchat/{name}.py" for name in names.split()]
        every = [(path, *mutant) for path in paths for mutant in candidates(ROOT / path)]
        chosen = sorted(random.Random(f"38 {place}").sample(every, min(PER_PLACE, len(every))))
        rows += ["\t".join(map(str, (len(rows) + number, place, *row))) for number, row in enumerate(chosen)]
        print(f"{place}: {len(chosen)} of {len(every)}")
    Path(file).write_text("\n".join(rows) + "\n")


def drawn(file: str) -> list[Mutant]:
    rows = [row.split("\t") for row in Path(file).read_text().splitlines()[1:]]
    return [Mutant(*row[:3], tuple(map(int, row[3:7])), row[7]) for row in rows]  # type: ignore[arg-type]


class Probes(ast.NodeTransformer):
    """Calls reach(number) before each statement, and each part of one, that a mutant replaces."""

    def __init__(self, mutants: list[Mutant]) -> None:
        self.mutants = mutants

    def visit(self, node: Any) -> Any:
        self.generic_visit(node)
        for mutant in self.mutants if hasattr(node, "end_lineno") else ():
            statement = mutant.new == "pass" or isinstance(ast.parse(mutant.new).body[0], ast.AugAssign)
            if mutant.span == span(node) and isinstance(node, ast.stmt if statement else ast.expr):
                call: Any = ast.parse(f"_reach({mutant.number})").body[0]
                if statement:
                    return [call, node]
                node = ast.copy_location(ast.BoolOp(ast.Or(), [call.value, node]), node)
        return node


def probe(file: str, tree: str) -> None:
    Path(tree, "reached_by.py").write_text(PROBE.format(path=str(Path(tree, "reached.txt"))))
    for name in {mutant.path for mutant in drawn(file)}:
        path = Path(tree, name)
        probes = Probes([mutant for mutant in drawn(file) if mutant.path == name])
        lines = ast.unparse(ast.fix_missing_locations(probes.visit(ast.parse(path.read_text())))).splitlines()
        first = 1 + max(i for i, line in enumerate(lines) if line.startswith("from __future__"))
        path.write_text("\n".join([*lines[:first], IMPORT.format(tree=tree), *lines[first:]]))


if __name__ == "__main__":
    {"draw": draw, "map": probe}[sys.argv[1]](*sys.argv[2:])
