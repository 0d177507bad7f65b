"""torch.distributed for one process among many: joining the job, and collectives that do nothing when it is alone.

    world = collectives.init(device)             # `torchrun -m ascendchat base`, srun, `ascendchat launch`, or alone
    collectives.all_reduce(loss, "mean")
    collectives.teardown()                       # also at exit

A rank that never arrives is named within the connect timeout, before the first collective can hang.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist

from ascendchat.parallel.connect import end_hung_process, order_timeouts, rendezvous, warm_up
from ascendchat.parallel.world import World, read_world

OPS = {
    "sum": torch_dist.ReduceOp.SUM,
    "mean": torch_dist.ReduceOp.SUM,  # then divided: not every backend has an average
    "max": torch_dist.ReduceOp.MAX,
    "min": torch_dist.ReduceOp.MIN,
}
HALF = (torch.float16, torch.bfloat16)

# torch 2.13 gave these functions new names; the old ones warn.
_gather_into: Any = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_scatter_into: Any = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


class _Connects(Protocol):
    """The part of Device that is needed here."""

    @property
    def collective(self) -> str: ...
    def bind(self, local_rank: int) -> torch.device: ...


@dataclass(frozen=True)
class Team:
    """Some of the ranks: this one is number `rank` of `size`. Without a group: all of them, or this one alone."""

    rank: int
    size: int
    group: Any = None


@dataclass
class _State:
    world: World
    place: torch.device
    gloo: bool = False
    teams: dict[tuple[int, ...], Team] = field(default_factory=dict)
    timeout: timedelta | None = None  # of a collective; groups do not inherit that of all ranks


_state = _State(World(), torch.device("cpu"))


def world() -> World:
    """The place of this process; alone until `init` was called."""
    return _state.world


def place() -> torch.device:
    """The device of this process."""
    return _state.place


def team(ranks: Sequence[int]) -> Team:
    """These ranks, of which this must be one; each of them calls it, the others need not. Made once."""
    me, members = _state.world, tuple(ranks)
    if len(members) == me.size or len(members) == 1:
        return Team(members.index(me.rank), len(members))
    if members not in _state.teams:
        # Only the members meet: with 1,024 ranks, all of them would otherwise meet once for every team that there is.
        group = torch_dist.new_group(list(members), timeout=_state.timeout, use_local_synchronization=True)
        _state.teams[members] = Team(members.index(me.rank), len(members), group)
    return _state.teams[members]


def teams_of(size: int) -> tuple[Team, Team]:
    """The `size` neighbours of which this rank is one, and the ranks that have its place in all such teams."""
    me = _state.world
    first = me.rank // size * size
    return team(range(first, first + size)), team(range(me.rank % size, me.size, size))


def turns(count: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """[first, stop) of `count` rows, `size` at a time, and whether they are this rank's own. All ranks take part
    equally often, since weights may be shared out over them: one that has nothing left gets rows that do not count."""
    me = world()
    for begin in range(0, count, me.size * size):
        first = begin + me.rank * size
        own = first < count
        first = first if own else 0
        yield first, min(first + size, count), own


def init(device: _Connects, *, timeout: float = 1800.0, connect_timeout: float | None = None) -> World:
    """Bind this process to its device and join the job; with one process nothing is connected.

    All ranks must be here within `connect_timeout` seconds; a collective may take `timeout` seconds.
    """
    global _state
    if torch_dist.is_initialized():
        raise RuntimeError("collectives.init was called twice; call collectives.teardown first")
    me = read_world(os.environ)
    device_of_rank = device.bind(me.local_rank)
    wait: timedelta | None = None
    if me.size > 1:
        limits = order_timeouts(device.collective, timeout, connect_timeout, os.environ)
        os.environ.update(limits.variables)
        wait = timedelta(seconds=limits.group)
        if me.rank == 0:
            for note in limits.notes:
                print(f"ascendchat: {note}", file=sys.stderr, flush=True)
        atexit.register(teardown)
        store = rendezvous(me, limits.connect)
        watch = threading.Timer(limits.connect, end_hung_process, (me, limits.connect))
        watch.daemon = True
        watch.start()
        try:
            torch_dist.init_process_group(
                device.collective,
                store=torch_dist.PrefixStore("group", store),
                rank=me.rank,
                world_size=me.size,
                timeout=wait,
            )
            warm_up(me, device_of_rank)
            store.set(f"warm/{me.rank}", "1")
        except BaseException:
            teardown()
            raise
        finally:
            watch.cancel()
    _state = _State(me, device_of_rank, gloo=device.collective == "gloo", timeout=wait)
    return me


def teardown() -> None:
    """Leave the job. Safe to call twice, without `init`, and after an error; runs at exit."""
    global _state
    atexit.unregister(teardown)
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    _state = _State(World(), torch.device("cpu"))


def abandon() -> None:
    """Do not leave in order at exit. A rank that can take no further part must be gone before the others notice: what
    they then say is not the cause, and leaving may wait for them."""
    atexit.unregister(teardown)


class _Handle:
    """A collective under way; `wait` may be called any number of times."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)

    def wait(self) -> None:
        """Wait until it is done and its result is where it belongs."""
        while self._steps:
            self._steps.pop(0)()


def _started(work: Any, finish: Callable[[], object], async_op: bool) -> _Handle:
    handle = _Handle(work.wait, finish)
    if not async_op:
        handle.wait()
    return handle


def _finish(result: torch.Tensor, target: torch.Tensor, mean_of: int = 0) -> None:
    """Divide a mean, and copy what could not be made in place."""
    if mean_of:
        result.div_(mean_of)
    if result is not target:
        target.copy_(result)


def _check_op(tensor: torch.Tensor, op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op {op!r} is not one of {', '.join(OPS)}")
    if op == "mean" and not tensor.is_floating_point():
        raise TypeError(f"the mean of {tensor.dtype} would be rounded; reduce with sum, or convert to float32 first")


def _among(team: Team | None) -> Team:
    return team or Team(_state.world.rank, _state.world.size)


def _check_sizes(whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise ValueError(
            f"{tuple(whole.shape)} {whole.dtype} does not hold {size} times {tuple(part.shape)} {part.dtype}"
        )


def _addend(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is sent. Gloo adds 16-bit floats in float32: else it refuses them, or rounds at every hop."""
    if _state.gloo and tensor.dtype in HALF:
        return tensor.float()
    return tensor.contiguous()


def all_reduce(tensor: torch.Tensor, op: str = "sum", async_op: bool = False, among: Team | None = None) -> _Handle:
    """Reduce over all ranks, or those of a team, in place. op: sum, mean, max or min."""
    _check_op(tensor, op)
    team = _among(among)
    if team.size == 1:
        return _Handle()
    addend = _addend(tensor)
    work = torch_dist.all_reduce(addend, op=OPS[op], group=team.group, async_op=True)
    return _started(work, partial(_finish, addend, tensor, team.size if op == "mean" else 0), async_op)


def _copy_unless_same(output: torch.Tensor, input: torch.Tensor) -> None:
    """With one rank a collective is a copy, and nothing at all between two names of the same memory."""
    if output.data_ptr() != input.data_ptr():
        output.copy_(input.reshape(output.shape))


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, op: str = "sum", async_op: bool = False, among: Team | None = None
) -> _Handle:
    """Reduce `input` (size x output) over all ranks, or those of a team; each keeps its slice in `output`."""
    _check_op(input, op)
    team = _among(among)
    _check_sizes(input, output, team.size)
    if team.size == 1:
        _copy_unless_same(output, input)
        return _Handle()
    if _state.gloo:  # it has no reduce_scatter in every version that we support
        addend = _addend(input)
        addend = addend.clone() if addend is input else addend
        work = torch_dist.all_reduce(addend, op=OPS[op], group=team.group, async_op=True)
        result = addend.view(team.size, -1)[team.rank].view(output.shape)
    else:
        addend, result = input.contiguous(), output if output.is_contiguous() else torch.empty_like(output.contiguous())
        work = _scatter_into(result.view(-1), addend.view(-1), op=OPS[op], group=team.group, async_op=True)
    return _started(work, partial(_finish, result, output, team.size if op == "mean" else 0), async_op)


def all_gather(output: torch.Tensor, input: torch.Tensor, async_op: bool = False, among: Team | None = None) -> _Handle:
    """Collect the `input` of every rank, or those of a team, in rank order, in `output` (size x input)."""
    team = _among(among)
    _check_sizes(output, input, team.size)
    if team.size == 1:
        _copy_unless_same(output, input)
        return _Handle()
    result = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    work = _gather_into(result.view(-1), input.contiguous().view(-1), group=team.group, async_op=True)
    return _started(work, partial(_finish, result, output), async_op)


def broadcast(tensor: torch.Tensor, src: int = 0) -> None:
    """The tensor of rank `src` for all, in place."""
    if _state.world.size > 1:
        torch_dist.broadcast(tensor, src)


def barrier() -> None:
    """Wait until every rank is here."""
    if _state.world.size > 1:
        here = torch.ones(1, device=_state.place)
        torch_dist.all_reduce(here)
        here.item()  # device collectives are only queued: reading the value waits for it


def gather_objects(obj: Any) -> list[Any]:
    """The object of every rank, in rank order, on every rank. For small things: names, counts, metrics."""
    if _state.world.size == 1:
        return [obj]
    gathered: list[Any] = [None] * _state.world.size
    torch_dist.all_gather_object(gathered, obj)
    return gathered


def broadcast_object(obj: Any, src: int = 0) -> Any:
    """The object of rank `src`, on every rank."""
    if _state.world.size == 1:
        return obj
    held = [obj]
    torch_dist.broadcast_object_list(held, src, device=_state.place)
    return held[0]
