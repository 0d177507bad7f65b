"""Every operator case agrees with the CPU, forward and backward, in every dtype it supports."""

from __future__ import annotations

from typing import Any

import op_cases
import op_cases_fused
import op_cases_older
import op_cases_tensor
import pytest
import torch
from op_cases import Case

import cannsim

CASES = [case for cases in (op_cases, op_cases_tensor, op_cases_fused, op_cases_older) for case in cases.CASES]
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
    limits = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found.float(), expected.detach().float(), **limits, msg=lambda text: f"{name}: {text}")


def run_on(
    case: Case, device: str, dtype: torch.dtype, spread: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients. The CPU computes in float32 on the inputs rounded to `dtype`. `spread`: the numbers of the
    inputs do not lie side by side."""
    leaves, arguments = [], []
    for value in case.inputs:
        if isinstance(value, torch.Tensor):
            floating = value.is_floating_point()
            value = value.to(dtype) if floating else value
            value = value.float() if floating and device == "cpu" else value
            value = value.to(device).clone()
            value = torch.stack([value, value], -1)[..., 0] if spread else value
            if floating and case.grad:
                value.requires_grad_()
                leaves.append(value)
        arguments.append(value)
    run = case.reference if device == "cpu" and case.reference else case.run
    outputs = flat(run(*arguments))
    if case.grad:
        backward(outputs)
    return outputs, [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_operator_agrees_with_cpu(case: Case) -> None:
    for name in case.dtypes:
        dtype, tolerance, what = getattr(torch, name), TOLERANCE[name] * case.loose, f"{case.name} in {name},"
        expected, expected_grads = run_on(case, "cpu", dtype)
        cannsim.reset()
        # Lists of tensors that are spread go one by one, and the older interface does not take them.
        spread = name == "bfloat16" and not any(word in case.launches for word in ("Foreach", "aclop/"))
        found, found_grads = run_on(case, "npu", dtype, spread)
        launched = cannsim.launches()
        assert (len(found), len(found_grads)) == (len(expected), len(expected_grads)), what
        for i, (f, e) in enumerate(zip(found, expected)):
            assert_close(f"{what} output {i}", f, e, tolerance)
        for i, (f, e) in enumerate(zip(found_grads, expected_grads)):
            assert_close(f"{what} gradient {i}", f, e, 2 * tolerance * max(1.0, float(e.abs().max())))
        wanted = [each if "/" in each else f"aclnn{each}" for each in (case.launches or case.name).split()]
        missing = [each for each in wanted if each not in launched]
        assert not missing, f"{what} {missing} did not run, these did: {sorted(launched)}"


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})
