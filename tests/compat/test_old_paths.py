"""Import paths of the last release still work, say where the module is now, and are the module itself."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from ascendchat.compat import old_paths


@pytest.mark.parametrize("name", sorted(set(old_paths.MOVED) - {"ascendchat.infer.vllm_worker"}))
def test_an_old_path_is_the_module_of_the_new_one_and_says_so(name: str) -> None:
    for old in (name, old_paths.PACKAGE):
        sys.modules.pop(old, None)
    new = importlib.import_module(old_paths.MOVED[name])
    with pytest.warns(FutureWarning, match=f"{name} is {old_paths.MOVED[name]} now"):
        assert importlib.import_module(name) is new
    assert new.__spec__ is not None
    assert new.__spec__.name == old_paths.MOVED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(name)  # said once


def test_other_names_of_old_packages_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ascendchat\.infer\.engine"):
        importlib.import_module("ascendchat.infer.engine")


def test_a_program_with_an_old_import_runs() -> None:
    program = "from ascendchat.infer.request import Request, Sampling; print(Request([1], Sampling()).prompt)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[1]\n"
    assert "ascendchat.engine.request now" in done.stderr
