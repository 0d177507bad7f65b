"""Which definitions of the package differ between two commits: python lab/same_definitions.py OLD NEW

Imports, docstrings and comments do not count. Prints the changed lines of each definition that has a counterpart in the
other commit, and the head of each that has none: a move that changes nothing prints renamed modules and names only.
"""

from __future__ import annotations

import ast
import collections
import difflib
import subprocess
import sys


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def definitions(commit: str) -> collections.Counter[str]:
    """The text of every statement at the top of a file, as often as it occurs."""
    found: collections.Counter[str] = collections.Counter()
    for file in git("ls-tree", "-r", "--name-only", commit, "ascendchat").split():
        if not file.endswith(".py"):
            continue
        tree = ast.parse(git("show", f"{commit}:{file}"))
        for node in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, name, None), list):
                    setattr(node, name, [statement for statement in block if counts(statement)])
        found.update(ast.unparse(node) for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node).split(":")[0])
    return found


def counts(statement: ast.stmt) -> bool:
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not text and not isinstance(statement, (ast.Import, ast.ImportFrom))


if __name__ == "__main__":
    old, new = map(definitions, sys.argv[1:])
    left = list(new - old)
    for gone in old - new:
        if not (like := difflib.get_close_matches(gone, left, 1, 0.6)):
            print("GONE", gone[:100])
            continue
        left.remove(like[0])
        changes = difflib.unified_diff(gone.splitlines(), like[0].splitlines(), lineterm="", n=0)
        print(*(line for line in changes if not line.startswith(("---", "+++", "@@"))), sep="\n")
    print(*(f"NEW {text[:100]}" for text in left), sep="\n")
    print(sum((old & new).values()), "definitions are the same")
