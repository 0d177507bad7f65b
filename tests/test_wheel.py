"""What no test of a checkout sees: an installed wheel has every file, and every name in a table leads to something."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "ascendchat").rglob("*.py"))
NEEDS_OTHERS = {"ascendchat.owner"}  # a key of ASGI's scope, not a module

TABLES = """
import importlib
from ascendchat import cli
from ascendchat.speedrun import recipe

def there(place, prefix=""):
    module, name = place.split(":")
    assert callable(getattr(importlib.import_module(f"ascendchat.{prefix}{module}"), name)), place

for config, function, _ in cli.COMMANDS.values():
    there(config, "config.")
    there(function)
for config in recipe.COMMANDS.values():
    there(config, "config.")
"""
FILES = """
from ascendchat.config.language import CATALOGUE
from ascendchat.data.fetch.sources import SETS
from ascendchat.data.toyworld.texts import PHRASES
from ascendchat.device.env import known_harmful
from ascendchat.doctor.explain_rules import all_rules
from ascendchat.doctor.machine import faults
from ascendchat.models.export import CODE
from ascendchat.sandbox import INSIDE
from ascendchat.serve.app import WEB
from ascendchat.speedrun.recipe import recipe_files

assert CATALOGUE.is_file() and INSIDE.is_file()
assert SETS and PHRASES and known_harmful() and all_rules()[0] and faults()
assert (CODE / "modeling_ascendchat.py").is_file() and (WEB / "index.html").is_file()
assert "tiny-cpu" in recipe_files()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel holds, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "ascendchat"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ["pyproject.toml", "README.md", "LICENSE", *listed.stdout.split()]:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", capture_output=True, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    where = f"import ascendchat; assert ascendchat.__file__.startswith({str(installed)!r}), ascendchat.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", where + program], cwd=installed.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_every_file_of_the_package(installed: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "ascendchat"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in listed.stdout.split() if not (installed / name).is_file()] == []


def test_every_command_and_stage_of_the_tables_is_there(installed: Path) -> None:
    run(installed, TABLES)


def test_what_is_read_beside_a_module_is_beside_it(installed: Path) -> None:
    run(installed, FILES)


def test_every_module_that_a_text_names_exists(installed: Path) -> None:
    """`python -m ascendchat.serve.worker`, an extension for vLLM: strings that no import checks."""
    named = set()
    for path in (path for path in SOURCES if path.name != "old_paths.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.split(".")
                if words[0] == "ascendchat" and len(words) > 1 and all(word.isidentifier() for word in words):
                    named.add(node.value)
    missing = []
    for name in sorted(named - NEEDS_OTHERS):
        path = installed / name.replace(".", "/")
        around = path.parent.with_suffix(".py")
        if not (path.is_dir() or path.with_suffix(".py").is_file() or around.is_file()):
            missing.append(name)
    assert len(named) > 5
    assert missing == []
