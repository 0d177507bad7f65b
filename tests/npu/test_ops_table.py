"""The table of operators is complete, signatures equal the public prototypes, and enough of them are executed.

python -m cannsim run -- pytest tests/npu/test_ops_table.py
"""

from __future__ import annotations

import subprocess
import sys

import op_cases_boxes
import op_cases_older
import test_ops_training as training

import cannsim
from cannsim import explain, operators_table


def test_the_command_prints_a_row_for_every_operator() -> None:
    command = [sys.executable, "-m", "cannsim", "operators"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    rows = [line.split(" | ")[0].removeprefix("| ") for line in printed.splitlines() if line.startswith("| aclnn")]
    assert rows == [o.name for o in operators_table.operators()]
    assert "| aclnnAdd | yes |" in printed, "executed operators are marked"
    assert printed.splitlines()[-1] == ", ".join(operators_table.older())


def test_explain_knows_every_operator_of_the_older_interface() -> None:
    assert set(operators_table.older()) == explain.older()
    assert "is simulated in src/ops/older" in explain.explain("EZ3002: Optype [Mish] of Ops kernel")


def test_every_operator_of_the_older_interface_has_a_case() -> None:
    cases = [*op_cases_older.CASES, *op_cases_boxes.CASES]
    named = {name for case in cases for name in case.launches.split() if name.startswith("aclop/")}
    assert {f"aclop/{name}" for name in operators_table.older()} == named


def test_every_signature_equals_its_public_prototype() -> None:
    public = operators_table.signatures()
    differ = [
        (o.name, o.types, public.get(o.name, ("no public prototype", ""))[0])
        for o in operators_table.operators()
        if o.types != public.get(o.name, ("", ""))[0]
    ]
    assert not differ


def test_every_public_prototype_in_the_list_is_simulated() -> None:
    names = {o.name for o in operators_table.operators()}
    assert names == set(operators_table.signatures())


def test_at_least_150_operators_are_executed() -> None:
    assert len(operators_table.executed() & {o.name for o in operators_table.operators()}) >= 150


def test_training_launches_only_operators_that_have_a_test() -> None:
    tested = operators_table.executed()
    cannsim.reset()
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        training.train("npu", training.adamw(**options), 2)
    untested = {name for name in cannsim.launches() if name.startswith("aclnn")} - tested
    assert not untested
