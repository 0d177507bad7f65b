"""Every collective in a world of 1 and of 3 real processes over Gloo. Each world starts once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import Host, run_ranks

from ascendchat.parallel import collectives

OPS = ("sum", "mean", "max", "min")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def value_of(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.5]) * (rank + 1)


def raised(kind: type[Exception], fn: Any, *args: Any) -> bool:
    try:
        fn(*args)
    except kind:
        return True
    return False


def every_collective(rank: int) -> dict[str, Any]:
    world = collectives.init(Host(), connect_timeout=60)
    size = world.size
    seen: dict[str, Any] = {"world": world}
    for dtype in DTYPES:
        for op in OPS:
            tensor = value_of(rank).to(dtype)
            collectives.all_reduce(tensor, op)
            seen[f"all_reduce {op} {dtype}"] = tensor.tolist()
            whole = torch.stack([value_of(rank) + 10 * part for part in range(size)]).to(dtype)
            before, part = whole.clone(), torch.empty(3, dtype=dtype)
            collectives.reduce_scatter(part, whole, op)
            seen[f"reduce_scatter {op} {dtype}"] = part.tolist()
            assert torch.equal(whole, before), "reduce_scatter changed its input"
        gathered = torch.empty(size, 3, dtype=dtype)
        collectives.all_gather(gathered, value_of(rank).to(dtype))
        seen[f"all_gather {dtype}"] = gathered.tolist()
    counts = torch.tensor([rank + 1, 100], dtype=torch.int32)
    collectives.all_reduce(counts)
    seen["integers"] = counts.tolist()
    seen["mean of integers refused"] = raised(TypeError, collectives.all_reduce, torch.tensor([1]), "mean")
    seen["unknown op refused"] = raised(ValueError, collectives.all_reduce, torch.tensor([1.0]), "median")
    seen["wrong size refused"] = raised(ValueError, collectives.all_gather, torch.empty(size * 3 + 1), torch.empty(3))
    columns = torch.zeros(3, 2)
    columns[:, 0] = value_of(rank)
    collectives.all_reduce(columns[:, 0])  # not contiguous: a view into a larger tensor
    seen["view"] = columns[:, 0].tolist()
    late, parts, all_parts = value_of(rank), torch.empty(3), torch.empty(size * 3)
    handles = [
        collectives.all_reduce(late, "mean", async_op=True),
        collectives.reduce_scatter(parts, value_of(rank).repeat(size), "mean", async_op=True),
        collectives.all_gather(all_parts, value_of(rank), async_op=True),
    ]
    for handle in handles + handles:  # waiting twice must not divide twice
        handle.wait()
    seen["async"] = (late.tolist(), parts.tolist(), all_parts.tolist())
    seen["objects"] = collectives.gather_objects({"rank": rank, "text": "x" * (rank * 1000)})
    seen["object"] = collectives.broadcast_object({"from": rank}, src=size - 1)
    collectives.barrier()
    collectives.teardown()
    collectives.teardown()
    seen["after teardown"] = (collectives.world().size, torch.distributed.is_initialized())
    return seen


@pytest.fixture(scope="module", params=[1, 3])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank has seen."""
    return run_ranks(every_collective, request.param, seconds=120)


def reduced(op: str, stack: torch.Tensor) -> torch.Tensor:
    return {"sum": stack.sum(0), "mean": stack.mean(0), "max": stack.amax(0), "min": stack.amin(0)}[op]


def test_each_rank_knows_its_place_until_the_world_is_torn_down(results: list[dict[str, Any]]) -> None:
    assert [r["world"].rank for r in results] == list(range(len(results)))
    assert {r["world"].size for r in results} == {len(results)}
    assert all(r["after teardown"] == (1, False) for r in results)


def test_reductions_round_only_once_and_leave_each_rank_its_part(results: list[dict[str, Any]]) -> None:
    for dtype, op in itertools.product(DTYPES, OPS):
        expected = reduced(op, torch.stack([value_of(r) for r in range(len(results))])).to(dtype).tolist()
        assert all(r[f"all_reduce {op} {dtype}"] == expected for r in results), (op, dtype)
        for rank, result in enumerate(results):
            stack = torch.stack([value_of(r) + 10 * rank for r in range(len(results))])
            assert result[f"reduce_scatter {op} {dtype}"] == reduced(op, stack).to(dtype).tolist(), (op, dtype)


def test_all_gather_keeps_the_order_of_ranks(results: list[dict[str, Any]]) -> None:
    for dtype in DTYPES:
        expected = [value_of(rank).to(dtype).tolist() for rank in range(len(results))]
        assert all(r[f"all_gather {dtype}"] == expected for r in results), dtype


def test_integers_are_summed_and_wrong_arguments_refused(results: list[dict[str, Any]]) -> None:
    size = len(results)
    assert all(r["integers"] == [size * (size + 1) // 2, 100 * size] for r in results)
    for what in ("mean of integers", "unknown op", "wrong size"):
        assert all(r[f"{what} refused"] for r in results), what


def test_views_that_are_not_contiguous_are_reduced_in_place(results: list[dict[str, Any]]) -> None:
    expected = sum(value_of(rank) for rank in range(len(results))).tolist()  # type: ignore[union-attr]
    assert all(r["view"] == expected for r in results)


def test_async_collectives_are_done_after_wait(results: list[dict[str, Any]]) -> None:
    stack = torch.stack([value_of(rank) for rank in range(len(results))])
    mean, everything = stack.mean(0).tolist(), stack.flatten().tolist()
    assert all(r["async"] == (mean, mean, everything) for r in results)


def test_objects_travel(results: list[dict[str, Any]]) -> None:
    expected = [{"rank": rank, "text": "x" * (rank * 1000)} for rank in range(len(results))]
    assert all(r["objects"] == expected and r["object"] == {"from": len(results) - 1} for r in results)
