"""Every operator case agrees with the CPU, forward and backward, in every dtype it supports.

python -m cannsim run -- pytest tests/npu/test_ops_all.py
"""

from __future__ import annotations

from typing import Any

import op_cases
import op_cases_boxes
import op_cases_fused
import op_cases_more
import op_cases_older
import op_cases_tensor
import op_cases_vision
import pytest
import torch
from op_cases import Case

import cannsim

LISTS = [op_cases, op_cases_tensor, op_cases_fused, op_cases_more, op_cases_vision, op_cases_older, op_cases_boxes]
CASES = [case for cases in LISTS for case in cases.CASES]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of values of the order of 1


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)]


def backward(outputs: list[torch.Tensor]) -> None:
    """Gradients of a sum in which every element has another weight."""
    total: Any = 0
    for output in outputs:
        if output.requires_grad:
            weight = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
            total = total + (output.float() * weight.to(output.device)).sum()
    total.backward()


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    found = found.detach().cpu()
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, not {expected.shape}"
    if not expected.is_floating_point():
        assert torch.equal(found, expected.to(found.dtype)), f"{name}: {found} is not {expected}"
        return
    torch.testing.assert_close(found.float(), expected.detach().float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def run_on(case: Case, device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients. The CPU computes in float32 on the inputs rounded to `dtype`."""
    leaves, arguments = [], []
    for value in case.inputs:
        if isinstance(value, torch.Tensor):
            floating = value.is_floating_point()
            value = value.to(dtype) if floating else value
            value = value.float() if floating and device == "cpu" else value
            value = value.to(device).clone()
            if floating and case.grad:
                value.requires_grad_()
                leaves.append(value)
        arguments.append(value)
    run = case.reference if device == "cpu" and case.reference else case.run
    outputs = flat(run(*arguments))
    if case.grad:
        backward(outputs)
    return outputs, [leaf.grad for leaf in leaves if leaf.grad is not None]


def check(case: Case, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    expected, expected_grads = run_on(case, "cpu", dtype)
    cannsim.reset()
    found, found_grads = run_on(case, "npu", dtype)
    launched = cannsim.launches()
    tolerance = TOLERANCE[dtype_name] * case.loose
    assert len(found) == len(expected)
    for i, (f, e) in enumerate(zip(found, expected)):
        assert_close(f"{case.name} output {i}", f, e, tolerance)
    assert len(found_grads) == len(expected_grads)
    for i, (f, e) in enumerate(zip(found_grads, expected_grads)):
        assert_close(f"{case.name} gradient {i}", f, e, 2 * tolerance * max(1.0, float(e.abs().max())))
    wanted = [name if "/" in name else f"aclnn{name}" for name in case.launches.split()]
    missing = [name for name in wanted if name not in launched]
    assert not missing, f"{case.name}: {missing} did not run, these did: {sorted(launched)}"


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d}".replace(" ", "_")) for c in CASES for d in c.dtypes]
)
def test_operator_agrees_with_cpu(case: Case, dtype: str) -> None:
    check(case, dtype)


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})
