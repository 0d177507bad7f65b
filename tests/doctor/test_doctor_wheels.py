"""Which wheels `ascendchat doctor` asks for, and which it only misses."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_doctor import WHEELS, laptop, told

from ascendchat.doctor import checks, checks_system
from ascendchat.doctor.probe import Probe


def test_missing_and_broken_wheels_are_told_apart(tmp_path: Path) -> None:
    broken = Probe({**WHEELS.values, "tiktoken": None, "pyarrow": "!libarrow.so: wrong ELF class"})
    told(checks_system.wheels(laptop(tmp_path, wheels=broken)), "fail", "missing: tiktoken", "wrong ELF class")
    broken = Probe({**WHEELS.values, "regex": None})  # every tokenizer needs it
    told(checks_system.wheels(laptop(tmp_path, wheels=broken)), "fail", "missing: regex", "pip install regex")
    fallback = Probe({**WHEELS.values, "rustbpe": None})
    told(checks_system.wheels(laptop(tmp_path, wheels=fallback)), "warn", "pip install rustbpe")


@pytest.mark.parametrize(("name", "use"), [("zstandard", ".zst"), ("pyarrow", ".parquet"), ("httpx", "data fetch")])
def test_a_wheel_that_only_some_files_need_stops_nobody(tmp_path: Path, name: str, use: str) -> None:
    """The first stage of a recipe is the doctor: what the recipe does not need must not end it."""
    for state in (None, "!wrong ELF class"):
        machine = laptop(tmp_path, wheels=Probe({**WHEELS.values, name: state}))
        check = checks_system.wheels(machine)
        told(check, "warn", name, f"not possible without: {use}")
        assert not any(c.status == "fail" for c in checks.run_checks(machine))
