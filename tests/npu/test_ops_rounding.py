"""What the public kernels do and a CPU does not: where half precision is rounded, which formula, which random bits.

Found with the tests of op-plugin; the sources are those of hicann/ops-nn and ops-math, and of TBE before them.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_cases import randn

import cannsim

A, B, C = (randn(64, 64, seed=seed).half() for seed in (61, 62, 63))
TENTH = torch.tensor(0.1).half()  # what 0.1 is in float16


def stepwise(term: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Every operation on float16 tensors of the CPU rounds its result."""
    return A + term * value


@pytest.mark.parametrize(
    ("run", "expected", "launched"),
    [
        (lambda a, b, c: torch.addcmul(a, b, c, value=0.1), stepwise(B * C, TENTH), "aclnnAddcmul"),
        (lambda a, b, c: torch.addcdiv(a, b, c, value=0.1), stepwise(B / C, TENTH), "aclnnAddcdiv"),
        (lambda a, b, c: a.clone().addcdiv_(b, c, value=0.1), stepwise(B / C, TENTH), "aclnnInplaceAddcdiv"),
        (
            lambda a, b, c: torch._foreach_addcdiv([a], [b], [c], torch.tensor([0.1]).half())[0],
            stepwise(B / C, TENTH),
            "aclnnForeachAddcdivScalarList",
        ),
        (lambda a, b, c: torch._foreach_sub([a], [b], alpha=3)[0], A - B * 3, "aclnnForeachSubListV2"),
    ],
)
def test_float16_is_rounded_after_each_step(run, expected, launched) -> None:
    cannsim.reset()
    found = run(A.npu(), B.npu(), C.npu()).cpu()
    assert launched in cannsim.launches()
    assert torch.equal(found, expected)
    once = A.float() + (B.float() / C.float()) * 0.1
    assert not torch.equal(stepwise(B / C, TENTH), once.half()), "the inputs tell the two apart"


@pytest.mark.parametrize("name", ["addcdiv", "addcmul"])
def test_lists_with_one_scalar_are_rounded_once(name: str) -> None:
    found = getattr(torch, f"_foreach_{name}")([A.npu()], [B.npu()], [C.npu()], 0.1)[0].cpu()
    assert torch.equal(found, getattr(torch, name)(A.float(), B.float(), C.float(), value=0.1).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_lists_are_rounded_once(dtype: torch.dtype) -> None:
    """In float16 as on the CPU: once but for the last elements on x86, twice on Arm."""
    a, b = A.to(dtype), B.to(dtype)
    expected = (a.float() + 5 * b.float()).to(dtype)
    assert not torch.equal(a + b * 5, expected), "the inputs tell the two apart"
    found = torch._foreach_add([a.npu()], [b.npu()], alpha=5)[0].cpu()
    assert torch.equal(found, torch.add(a, b, alpha=5) if dtype == torch.float16 else expected)


def test_products_of_half_precision_are_rounded_once() -> None:
    x = randn(15, 16, seed=66).abs().half() + 0.5
    assert not torch.equal(x.prod(0), x.float().prod(0).half()), "the inputs tell the two apart"
    assert torch.equal(x.npu().prod(0).cpu(), x.float().prod(0).half())
    assert x.npu().prod().cpu() == x.float().prod().half()


def test_dropout_in_place_takes_the_mask_of_the_seed() -> None:
    x = randn(100, 100, seed=64).npu()
    torch.manual_seed(2)
    dropped = F.dropout(x, 0.3)
    torch.manual_seed(2)
    again = x.clone()
    F.dropout(again, 0.3, inplace=True)
    assert {"aclnnInplaceBernoulli", "aclnnDropoutGenMaskV2"} <= set(cannsim.launches())
    torch.testing.assert_close(again.cpu(), dropped.cpu())
    assert 0.25 < (again == 0).float().mean().item() < 0.35


def test_gelu_has_the_tanh_formula_unless_torch_npu_is_told_to_be_compatible(on_npu) -> None:
    """aclnnGelu, which torch_npu launches for either formula; use_compatible_impl makes it launch aclnnGeluV2."""
    program = """
        import torch, torch_npu, cannsim
        torch_npu.npu.use_compatible_impl({compatible})
        x = torch.linspace(-4, 4, 1001)
        there = x.npu().requires_grad_()
        torch.nn.functional.gelu(there).sum().backward()
        here = x.clone().requires_grad_()
        torch.nn.functional.gelu(here, approximate={formula!r}).sum().backward()
        assert {launched!r} in cannsim.launches()
        torch.testing.assert_close(torch.nn.functional.gelu(there).cpu(),
                                   torch.nn.functional.gelu(x, approximate={formula!r}), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-5, atol=1e-6)
    """
    on_npu(program.format(compatible=False, formula="tanh", launched="aclnnGelu"))
    on_npu(program.format(compatible=True, formula="none", launched="aclnnGeluV2"))


def test_layer_norm_is_the_fast_one_if_torch_npu_is_told_to_be_compatible(on_npu) -> None:
    on_npu(
        """
        import torch, torch_npu, cannsim
        torch_npu.npu.use_compatible_impl(True)
        x, weight, bias = torch.randn(4, 3, 8), torch.randn(3, 8), torch.randn(3, 8)
        there = [t.npu().requires_grad_() for t in (x, weight, bias)]
        here = [t.clone().requires_grad_() for t in (x, weight, bias)]
        results = [torch.nn.functional.layer_norm(a[0], (3, 8), a[1], a[2]) for a in (there, here)]
        for result in results:
            result.square().sum().backward()
        assert "aclnnFastLayerNorm" in cannsim.launches()
        torch.testing.assert_close(results[0].cpu(), results[1], rtol=1e-5, atol=1e-5)
        for found, expected in zip(there, here):
            torch.testing.assert_close(found.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-4)
        """
    )


def test_softshrink_refuses_a_negative_lambda_and_the_device_lives_on() -> None:
    x = randn(3, 3, seed=65).npu()
    with pytest.raises(RuntimeError, match="EZ1001"):
        F.softshrink(x, -1.0)
    torch.testing.assert_close(F.softshrink(x).cpu(), F.softshrink(x.cpu()))


def test_a_device_that_nobody_used_has_no_context(on_npu) -> None:
    """torch_npu asks for it when it is told to be compatible, and takes the stream of each device that has one."""
    on_npu(
        """
        import torch, torch_npu
        torch_npu.npu.use_compatible_impl(True)
        x = torch.ones(2, 3, device="npu").requires_grad_()
        active = torch_npu._C._npu_hasPrimaryContext
        assert (active(0), active(1)) == (True, False)
        (x * x).sum().backward()                        # ended the process before
        assert x.grad.tolist() == [[2.0] * 3] * 2
        torch.ones(1, device="npu:1").cpu()
        assert (active(0), active(1)) == (True, True)
        """,
        devices=2,
    )
