"""cannsim is a package of its own: found by its installation, without a line of ascendchat, and built when needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cannsim

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(cannsim.ROOT.glob("*.py"))


def test_in_a_clone_the_installed_package_wins_over_the_folder_of_the_same_name() -> None:
    for code in ("import cannsim; print(cannsim.__file__)", "from cannsim import __main__ as m; print(m.__file__)"):
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()).parent.samefile(cannsim.ROOT)
    assert not (REPOSITORY / "cannsim" / "__init__.py").exists(), "the folder of the project is no package"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_it_imports_nothing_of_ascendchat_and_keeps_to_its_size(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] == "ascendchat"]
    assert ast.get_docstring(tree), "opens with what it is for"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
