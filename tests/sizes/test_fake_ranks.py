"""What one rank of 8 and of 1,024 hands to its process group and keeps is what `ascendchat plan` counts with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_ranks import DTYPE, SHAPE, our_step, sharded_step
from torch.utils._python_dispatch import TorchDispatchMode

from ascendchat.chips import find
from ascendchat.sizes import memory
from ascendchat.sizes.memory import elements, exchanged_elements, stacks, team_size

CHIP = find("Ascend910B3")
aten = torch.ops.aten
FORWARD, BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.baddbmm.default, FORWARD, BACKWARD}


class ProductsInFloat32(TorchDispatchMode):
    """A processor without bfloat16 takes 50 times as long for its products. What is counted here does not see it:
    the results are rounded to bfloat16, and the counting is above."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or args[0].dtype != DTYPE:
            return func(*args, **(kwargs or {}))
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        found = func(*wide, **(kwargs or {}))
        if func is FORWARD:
            return found[0].to(DTYPE), found[1]  # sums of exponentials stay in float32
        return tuple(x.to(DTYPE) for x in found) if func is BACKWARD else found.to(DTYPE)


@pytest.fixture(autouse=True)
def _products_in_float32() -> Iterator[None]:
    """The CPU computes the products of all tests here in float32, which is 50 times as fast."""
    with ProductsInFloat32():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 1024])
def test_a_rank_exchanges_and_keeps_what_the_plan_says(size: int, one_thread: None) -> None:
    found = our_step(size, rank=size // 2)
    reduced, gathered, between = exchanged_elements(SHAPE, size)
    counted = {
        name: sum(bytes for (kind, _), bytes in found.traffic.bytes.items() if kind == name)
        for name in ("reduce-scatter", "all-gather", "all-reduce")
    }
    # The plan forgets that each small group is padded to a multiple of the ranks.
    assert counted["reduce-scatter"] == pytest.approx(4 * reduced, rel=0.002)
    assert counted["all-gather"] == pytest.approx(2 * gathered, rel=0.002)
    assert counted["all-reduce"] == 4 * between
    plan = memory.training(SHAPE, CHIP, size, 1)
    for part, kept in found.memory.items():
        assert kept == pytest.approx(plan[part], rel=0.01), part
    assert (between > 0) == (size > team_size(stacks(SHAPE), size))
    assert sum(found.traffic.calls.values()) == 20 + (len(stacks(SHAPE)) if between else 0)


def test_more_ranks_than_matrices_do_not_multiply_the_exchange() -> None:
    """Whole matrices are padded to a multiple of those who share them: 24 on 1,024 devices would be sent as 1,024."""
    team = team_size(stacks(SHAPE), 1024)
    assert elements(stacks(SHAPE), 1024) > 30 * elements(stacks(SHAPE), 1)
    assert elements(stacks(SHAPE), team) < 1.4 * elements(stacks(SHAPE), 1)
    assert 1024 % team == 0


@pytest.mark.slow
def test_a_copy_of_eight_exchanges_the_same_whatever_the_number_of_copies(one_thread: None) -> None:
    few, many = sharded_step(16, 8), sharded_step(1024, 8)
    assert few.traffic.calls["all-gather", 8] == many.traffic.calls["all-gather", 8] == 2 * SHAPE.depth + 1
    for kind in ("all-gather", "reduce-scatter"):
        assert few.traffic.bytes[kind, 8] == many.traffic.bytes[kind, 8]
    assert few.traffic.bytes["all-reduce", 2] == many.traffic.bytes["all-reduce", 128]
    assert few.memory == many.memory
    assert many.traffic.launches == few.traffic.launches
