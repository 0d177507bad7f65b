"""The operators of a block on the NPU (device/npu_ops.py): results and gradients are those of the plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cannsim
from ascendchat.device import pick
from ascendchat.device.npu_attention import can_cache, can_page
from ascendchat.device.npu_ops import EagerOps, NPUOps
from ascendchat.nn.gpt import Ops, PlainOps, rope_tables, shifted

ROWS, LENGTH, WIDTH, HEADS, KV_HEADS, DIM = 2, 5, 16, 4, 2, 8
MOST = 2.5  # of a gate
X, VALUES, QKV = (ROWS, LENGTH, WIDTH), (ROWS, LENGTH, KV_HEADS, DIM), (ROWS, LENGTH, HEADS + 2 * KV_HEADS, DIM)
FOLLOWS = torch.tensor([[0.0, 1, 1, 0, 1], [0, 1, 0, 1, 1]])  # documents that begin inside of the rows, too


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    """The first NPU."""
    pick("npu").bind(0)


def heads(ops: Ops, qkv: Tensor, share: Tensor, follows: Tensor | None = None) -> tuple[Tensor, ...]:
    """As in nn.gpt.Block."""
    cos, sin = (table.to(qkv) for table in rope_tables(qkv.size(1), DIM, ops.sin_sign))
    if ops.heads is not None:
        return ops.heads(qkv, share, (cos, sin), KV_HEADS, follows)
    qk, v = shifted(0, qkv, share, follows).split((HEADS + KV_HEADS, KV_HEADS), dim=-2)
    return *ops.rotary(ops.rms_norm(qk), cos, sin).split((HEADS, KV_HEADS), dim=-2), v


def two_mixes(ops: Ops, x: Tensor, first: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Two layers, so that the gradient of the first embedding goes from one to the other."""
    for weights in ops.mixing(residual, scale, x.dtype):
        x, first = ops.mix(x, first, weights)
    return x, first


CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {  # and the shapes of what they take
    "linear": (lambda ops, x, weight: ops.linear(x, weight), (X, (12, WIDTH))),
    "gate": (lambda ops, x, weight: ops.gate(x, weight), (X, (3, WIDTH))),
    "project": (lambda ops, x, weight, gate: ops.project(x, weight, gate), (X, (12, WIDTH), (3, 6))),
    "project without a gate": (lambda ops, x, weight: ops.project(x, weight, None)[0], (X, (12, WIDTH))),
    "smear": (lambda ops, x, gate, smear: ops.smear(x, gate, smear), (X, (1, 6), (1,))),
    "gated": (lambda ops, v, gate, value: ops.gated(v, gate, value, MOST), (VALUES, VALUES[:3], VALUES)),
    "mlp": (lambda ops, x, up, down: ops.mlp(x, up, down), (X, (20, WIDTH), (20, WIDTH))),
    "mix": (two_mixes, (X, X, (2,), (2,))),
    "add and norm": (lambda ops, x, y: ops.add_norm(x, y), (X, X)),
    "norm": (lambda ops, x: ops.rms_norm(x), (X,)),
    "heads": (heads, (QKV, (QKV[2], DIM))),
    "heads of documents": (lambda ops, qkv, share: heads(ops, qkv, share, FOLLOWS.to(qkv)), (QKV, (QKV[2], DIM))),
}


def run(ops: Ops, name: str, place: str, length: int = LENGTH) -> tuple[list[Tensor], list[Tensor], int]:
    """Results, gradients of a sum in which every number has another weight, and launches of both."""
    call, shapes = CALLS[name]
    draw = torch.Generator().manual_seed(1)
    sized = [(ROWS, length, *shape[2:]) if shape[:2] == (ROWS, LENGTH) else shape for shape in shapes]
    given = [torch.randn(*shape, generator=draw).to(place).requires_grad_() for shape in sized]
    cannsim.reset()
    found = call(ops, *given)
    found = [found] if isinstance(found, Tensor) else list(found)
    weights = [torch.linspace(-1, 2, x.numel()).reshape(x.shape).to(place) for x in found]
    torch.autograd.backward(found, weights)
    launched = sum(cannsim.launches().values())
    return [x.detach().cpu() for x in found], [x.grad.cpu() for x in given if x.grad is not None], launched


def assert_as_plain(ops: Ops, name: str, length: int = LENGTH) -> int:
    results, gradients, launched = run(ops, name, "npu", length)
    expected, expected_gradients, _ = run(PlainOps(), name, "cpu", length)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=2e-5)
    return launched


@pytest.mark.parametrize("name", CALLS)
def test_fused_and_written_out_operators_equal_the_plain_formulas(name: str) -> None:
    plain, written_out = assert_as_plain(NPUOps(), name), assert_as_plain(EagerOps(), name)
    if name in ("project", "smear", "gated", "mlp", "mix"):
        assert written_out < plain, "the gradients are written out for fewer launches"


def test_operators_take_rows_of_another_length_than_before() -> None:
    """What they keep is of the last length."""
    ops = EagerOps()
    for length in (LENGTH, 7, LENGTH):
        for name in ("smear", "heads"):
            assert_as_plain(ops, name, length)


@pytest.mark.parametrize("ops", [EagerOps, NPUOps])
def test_smear_without_gradients_is_the_same(ops: type[NPUOps]) -> None:
    x, gate, smear = (torch.randn(*shape, generator=torch.Generator().manual_seed(2)) for shape in CALLS["smear"][1])
    with torch.no_grad():
        found = ops().smear(x.npu(), gate.npu(), smear.npu()).cpu()
    torch.testing.assert_close(found, PlainOps().smear(x, gate, smear), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "project", "smear", "mlp", "heads", "heads of documents"])
def test_gradients_of_weights_are_added_to_the_totals_of_the_optimizer(name: str) -> None:
    call, shapes = CALLS[name]
    draw = torch.Generator().manual_seed(1)
    given = [torch.randn(*shape, generator=draw).npu().requires_grad_() for shape in shapes]
    weights = [x for x in given[1:] if x.dim() == 2]
    for weight in weights:
        weight.total = torch.ones_like(weight)
    found = call(EagerOps(), *given)
    found = [found] if isinstance(found, Tensor) else list(found)
    torch.autograd.backward(found, [torch.linspace(-1, 2, x.numel()).reshape(x.shape).npu() for x in found])
    expected = [x for x in run(PlainOps(), name, "cpu")[1] if x.dim() == 2]
    assert [weight.grad for weight in weights] == [None] * len(weights)
    for weight, gradient in zip(weights, expected):
        torch.testing.assert_close(weight.total.cpu(), 1 + gradient, rtol=1e-4, atol=2e-5)


def test_a_view_of_a_weight_adds_to_the_total_of_the_weight() -> None:
    """As a stack of matrices that is used as one matrix."""
    weight = torch.randn(3, 4, WIDTH).npu().requires_grad_()
    weight.total = torch.zeros_like(weight)
    x = torch.randn(*X).npu()
    EagerOps().linear(x, weight.flatten(0, 1)).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.total.cpu(), x.sum((0, 1)).cpu().expand(3, 4, WIDTH), rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_learn_get_no_gradient() -> None:
    for name in ("linear", "project", "smear", "mlp", "heads"):
        call, shapes = CALLS[name]
        x, *weights = (torch.randn(*shape).npu() for shape in shapes)
        found = call(EagerOps(), x.requires_grad_(), *weights)
        sum(each.sum() for each in ([found] if isinstance(found, Tensor) else found)).backward()
        assert x.grad is not None, name
        assert [weight.grad for weight in weights] == [None] * len(weights), name


def test_the_gradient_of_the_share_may_leave_the_range_of_float16() -> None:
    share = torch.zeros(QKV[2], DIM).npu().requires_grad_()
    v = heads(EagerOps(), torch.full(QKV, 250.0).half().npu(), share)[2]
    v.backward(torch.full_like(v, 300.0))
    taken = ROWS * (LENGTH - 1)
    assert share.grad[-KV_HEADS:].unique().tolist() == [taken * 75_000.0]


def test_an_eager_device_writes_gradients_out_and_a_compiling_one_does_not() -> None:
    """A compiler has to see plain formulas."""
    device = pick("npu")
    assert type(device.operators()) is EagerOps
    device.compiles = True  # type: ignore[misc]
    assert type(device.operators()) is NPUOps


def test_what_the_incremental_kernel_takes() -> None:
    def takes(dtype: torch.dtype = torch.float16, heads: int = 4, dim: int = 64, kv_heads: int = 1) -> bool:
        return can_cache(torch.empty(1, 1, heads, dim, dtype=dtype), kv_heads)

    assert [takes(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)] == [True, True, False]
    assert [takes(dim=dim) for dim in (16, 24, 512, 528)] == [True, False, True, False]
    assert [takes(heads=heads, kv_heads=4) for heads in (256, 260)] == [True, False]
    assert [takes(heads=heads) for heads in (64, 65)] == [True, False]
    assert [can_page(1, page) for page in (8, 16, 48, 512, 528)] == [False, True, True, True, False]
    assert [can_page(2, page) for page in (16, 128, 384, 640)] == [False, True, True, False]
