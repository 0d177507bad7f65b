"""`make test-npu NPU=VERSION`: its versions are those of the nightly workflow, and wheels of the table of pairs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ascendchat.device.cann import PAIRS, UNPAIRED

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="torch_npu has wheels for Linux only")


def versions() -> list[str]:
    (found,) = re.findall(r"^NPU_VERSIONS := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    return list(found.split())


def test_a_missing_version_is_asked_for() -> None:
    done = subprocess.run(["make", "-n", "test-npu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "name the wheel, for example `make test-npu NPU=2.7.1`" in done.stderr
    assert all(version in done.stderr for version in versions())


def test_all_of_them_are_tested_every_night_and_in_the_table_of_pairs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    assert "make test-long" in [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    (recipe,) = re.findall(r"^test-long:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    assert re.search(r"for version in \$\(NPU_VERSIONS\); do \$\(MAKE\) .*test-npu NPU=\$\$version", recipe)
    known = {*UNPAIRED, *(wheel for wheels in PAIRS.values() for wheel in wheels)}
    assert set(versions()) <= known


def test_libraries_for_another_wheel_are_named_by_a_variable(tmp_path: Path) -> None:
    code = "import cannsim; print(cannsim.environment()['LD_LIBRARY_PATH'].split(':')[0])"
    environment = {**os.environ, "CANNSIM_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "lib64")
