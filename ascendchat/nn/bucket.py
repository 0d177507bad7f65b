"""Parameters that are updated alike, end to end in memory, and a rank's share of their state: the parts of nn/optim.py.

bucket = Bucket(group, dist.Team(rank, size))
bucket.update(...); bucket.publish()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ascendchat.nn.updates import EPS, adamw_update
from ascendchat.parallel import collectives

ALONE = collectives.Team(0, 1)
ALIGNED = 256  # elements: where a group may begin in a buffer of several


@dataclass
class Group:
    """Parameters that are updated alike. `matrix` groups hold stacks of equal matrices, the others anything."""

    name: str
    parameters: list[tuple[str, nn.Parameter]]
    lr: float
    matrix: bool = False
    lr_factors: list[float] = field(default_factory=list)  # per matrix
    betas: tuple[float, float] = (0.8, 0.95)
    decay: float = 0.0
    eps: float = EPS
    initial_lr: float = 0.0

    def __post_init__(self) -> None:
        self.initial_lr = self.initial_lr or self.lr


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of one state tensor of one parameter: what a rank saves, and how it is found again."""

    parameter: str
    kind: str  # "weight" (float32), "first", "second", "mean"
    start: int
    stop: int

    def key(self) -> str:
        return f"{self.parameter}|{self.kind}|{self.start}|{self.stop}"

    @classmethod
    def parse(cls, key: str) -> Shard:
        parameter, kind, start, stop = key.split("|")
        return cls(parameter, kind, int(start), int(stop))


class Room(NamedTuple):
    """Where the parameters of several buckets lie, and their weights in float32: one copy rounds all of them."""

    flat: Tensor
    weight: Tensor

    @classmethod
    def of(cls, groups: list[Group], dtype: torch.dtype) -> tuple[Room, list[Room]]:
        """For all these groups, and for each of them."""
        sizes = [sum(p.numel() for _, p in group.parameters) for group in groups]
        starts = list(itertools.accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        place = groups[0].parameters[0][1].device
        both = cls(torch.zeros(starts[-1], dtype=dtype, device=place), torch.zeros(starts[-1], device=place))
        parts = [cls(*(x[start : start + size] for x in both)) for start, size in zip(starts, sizes)]
        return both, parts


class Bucket:
    """One group in memory: parameters and float32 gradients end to end, and this rank's share of the state. `team`:
    who shares it out; `copies`: the ranks that have the same share in other teams; `room`: where to lie, if one rank
    owns everything."""

    def __init__(
        self, group: Group, team: collectives.Team, room: Room | None = None, copies: collectives.Team = ALONE
    ) -> None:
        self.group, self.team, self.copies, self.room = group, team, copies, room
        rank, size = team.rank, team.size
        self.rank = rank
        first = group.parameters[0][1]
        self.unit = (first.size(-2), first.size(-1)) if group.matrix else (1, 1)  # what is never cut in two
        unit = self.unit[0] * self.unit[1]
        self.used = sum(p.numel() for _, p in group.parameters)
        total = -(-self.used // (unit * size)) * unit * size  # padded so that every rank owns whole matrices
        self.share = total // size
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device) if room is None else room.flat
        self.grad = torch.zeros(total, dtype=torch.float32, device=first.device)
        self.place()
        own = slice(rank * self.share, (rank + 1) * self.share)
        self.own_grad = self.grad[own] if size == 1 else torch.empty_like(self.grad[own])
        self.own_flat = self.flat[own]
        if room is not None:
            self.weight = room.weight.copy_(self.own_flat)
        else:
            self.weight = self.own_flat if first.dtype == torch.float32 else self.own_flat.float()
        self.spare: Tensor | None = None
        self.state = {"first": torch.zeros_like(self.weight)}
        if group.matrix:
            rows = self.share // self.unit[1]
            self.state["second"] = torch.zeros(rows, dtype=torch.float32, device=first.device)
            factors = group.lr_factors + [1.0] * (total // unit - len(group.lr_factors))
            mine = factors[rank * self.share // unit : (rank + 1) * self.share // unit]
            self.factors = torch.tensor(mine, device=first.device).view(-1, 1, 1)
        else:
            self.state["second"] = torch.zeros_like(self.weight)

    def place(self) -> None:
        """Move the parameters into the buffer, and let their gradients be added up in float32."""
        offset = 0
        for _, parameter in self.group.parameters:
            stop = offset + parameter.numel()
            self.flat[offset:stop].copy_(parameter.data.view(-1))
            parameter.data = self.flat[offset:stop].view(parameter.shape)
            total = self.grad[offset:stop].view(parameter.shape)
            parameter.total = total  # type: ignore[attr-defined]  # operators may add to it themselves (device/npu_ops.py)
            if parameter.dtype == torch.float32:
                parameter.grad = total  # autograd adds in place
            else:
                parameter.register_post_accumulate_grad_hook(_add_to(total))
            offset = stop

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """This rank's state, cut at the borders of the parameters; padding belongs to none."""
        low, offset = self.rank * self.share, 0
        for name, parameter in self.group.parameters:
            start, stop = max(offset, low), min(offset + parameter.numel(), low + self.share)
            if start < stop:
                for kind, tensor in (("weight", self.weight), *self.state.items()):
                    step = self.weight.numel() // tensor.numel()  # parameter elements per element of the state
                    shard = Shard(name, kind, (start - offset) // step, (stop - offset) // step)
                    yield shard, tensor[(start - low) // step : (stop - low) // step]
            offset += parameter.numel()

    def update(
        self,
        muon: Callable[..., None],
        lr: float,
        momentum: Any,
        decay: Any,
        *,
        dtype: torch.dtype,
        fused: bool,
        count: Tensor,
    ) -> None:
        """One step; `count` (0-dim, on the device): its number, from 1. The parameters do not change yet."""
        if self.group.matrix:
            stack = (-1, *self.unit)
            muon(
                self.weight.view(stack),
                self.own_grad.view(stack),
                self.state["first"].view(stack),
                self.state["second"].view(-1, self.unit[0], 1),
                self.factors,
                lr=lr,
                momentum=momentum,
                decay=decay,
                beta2=0.9,
                dtype=dtype,
            )
        else:
            adamw_update(
                self.weight,
                self.own_grad,
                self.state["first"],
                self.state["second"],
                count,
                lr=lr,
                betas=self.group.betas,
                decay=self.group.decay,
                eps=self.group.eps,
                fused=fused,
            )

    def mean(self) -> Tensor:
        """The mean of some weights of this rank's share, from the first call on part of the state: in `spare`, if that
        was made (MuonAdamW.reserve_mean), else on the host."""
        if "mean" not in self.state:
            self.state["mean"] = torch.zeros_like(self.weight, device="cpu") if self.spare is None else self.spare
        return self.state["mean"]

    def publish(self) -> None:
        """Round the float32 weights into this rank's part of the parameters."""
        if self.weight is not self.own_flat:
            self.own_flat.copy_(self.weight)


def _add_to(total: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:  # else an operator has added it
            total.add_(parameter.grad)
            parameter.grad = None

    return hook
