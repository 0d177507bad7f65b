"""Which statements of one module were executed, in whatever thread, also those that C++ started.

    seen = watch("ascendchat.device.npu", path)      # before its first import
    ...
    missed = statements(path) - seen

The module is compiled with a mark before every statement: a tracer (sys.settrace) would not see autograd's threads.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def _bodies(tree: ast.AST) -> list[list[ast.stmt]]:
    """All lists of statements."""
    found = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            part = getattr(node, name, None)
            if isinstance(part, list) and part and isinstance(part[0], ast.stmt):
                found.append(part)
    return found


def _marked(statement: ast.stmt) -> bool:
    """Not a docstring, and not what must stand first in its file."""
    words = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not words and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def statements(path: str | Path, *names: str) -> set[int]:
    """Line numbers of the statements of a file, or of its functions and classes of these names."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    if names:
        tree.body = [part for part in tree.body if getattr(part, "name", "") in names]
        assert len(tree.body) == len(names), f"{path} has not all of {names}"
    return {statement.lineno for body in _bodies(tree) for statement in body if _marked(statement)}


class Marker(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads the one module."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.seen: set[int] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        tree = ast.parse(Path(self.path).read_text(encoding="utf-8"))
        for body in _bodies(tree):
            with_marks: list[ast.stmt] = []
            for statement in body:
                if _marked(statement):
                    with_marks += ast.parse(f"__seen__({statement.lineno})").body
                with_marks.append(statement)
            body[:] = with_marks
        module.__dict__["__seen__"] = self.seen.add
        exec(compile(tree, self.path, "exec"), module.__dict__)


def watch(name: str, path: str | Path) -> set[int]:
    """From now on, the lines of that module that were executed."""
    assert name not in sys.modules, f"{name} is already imported"
    marker = Marker(name, str(path))
    sys.meta_path.insert(0, marker)
    return marker.seen
