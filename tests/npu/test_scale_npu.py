"""What a training step exchanges, counted by the simulated HCCL, is what `plan` counts with. docs/en/scale.md"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CODE = """
from measure_exchange import SHAPE, measure
from ascendchat.parallel import collectives
from ascendchat.device import pick
from ascendchat.sizes.batch import COLLECTIVES

world = collectives.init(pick("npu", compiled=False))
found = measure(0)
assert set(found) == {"HcclReduceScatter", "HcclAllGather"}, found
assert sum(calls for calls, _ in found.values()) == COLLECTIVES, found
# The simulator counts what a rank keeps of a reduction and what it gives to a gather: a share of each.
exchanged = sum(size for _, size in found.values()) * world.size
assert abs(exchanged / ((4 + 2) * SHAPE.total_parameters) - 1) < 0.01, exchanged
collectives.teardown()
"""


def test_a_step_exchanges_the_bytes_and_the_collectives_of_the_plan(on_npu: Callable[..., Any]) -> None:
    on_npu(CODE, 2, timeout=300)
