"""The table of operators is complete, signatures equal the public prototypes, and enough of them are executed."""

from __future__ import annotations

import re
import subprocess
import sys

import op_cases_older
import pytest
from small_gpt import adamw, train

import cannsim
from cannsim import explain, operators_table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The lines that the command prints."""
    command = [sys.executable, "-m", "cannsim", "operators"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def executed(printed: list[str]) -> set[str]:
    """Operators that a test runs, by that table."""
    return {line.split(" | ")[0].removeprefix("| ") for line in printed if re.match(r"\| aclnn\w+ \| yes \|", line)}


def test_the_command_prints_a_row_for_every_operator(printed: list[str], executed: set[str]) -> None:
    rows = [line.split(" | ")[0].removeprefix("| ") for line in printed if line.startswith("| aclnn")]
    assert rows == [o.name for o in operators_table.operators()]
    assert "aclnnAdd" in executed, "executed operators are marked"
    assert printed[-1] == ", ".join(operators_table.older())


def test_explain_knows_every_operator_of_the_older_interface() -> None:
    assert set(operators_table.older()) == explain.older()
    assert "is simulated in src/ops/older" in explain.explain("EZ3002: Optype [Mish] of Ops kernel")


def test_every_operator_of_the_older_interface_has_a_case() -> None:
    named = {name for case in op_cases_older.CASES for name in case.launches.split() if name.startswith("aclop/")}
    assert {f"aclop/{name}" for name in operators_table.older()} == named


def test_operators_and_their_signatures_are_those_of_the_public_prototypes() -> None:
    public = {name: types for name, (types, _) in operators_table.signatures().items()}
    found = {o.name: o.types for o in operators_table.operators()}
    differ = [(name, found.get(name), public.get(name)) for name in sorted(found.keys() | public.keys())]
    assert not [each for each in differ if each[1] != each[2]]


def test_at_least_150_operators_are_executed(executed: set[str]) -> None:
    assert len(executed) >= 150


def test_training_launches_only_operators_that_have_a_test(executed: set[str]) -> None:
    cannsim.reset()
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        train("npu", adamw(**options), 2)
    assert not {name for name in cannsim.launches() if name.startswith("aclnn")} - executed
