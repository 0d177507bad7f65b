"""Muon for matrices, AdamW for the rest (updates.py): one sharded optimizer for 1 to N devices.

    optimizer = MuonAdamW(groups(model, rates), compute_dtype=torch.bfloat16)
    optimizer.step(lr_scale=0.5, momentum=0.95, matrix_decay=0.1)

Parameters of one group live end to end in one buffer, and so do their float32 gradients. A step is: reduce-scatter the
gradients, each rank updates its share of the float32 weights, all-gather the result in the compute dtype straight into
the parameters. On one device the collectives are no-ops and the path is the same. No step reads a value back from the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ascendchat.nn.bucket import ALONE, Bucket, Room
from ascendchat.nn.bucket import Group as Group
from ascendchat.nn.bucket import Shard as Shard
from ascendchat.nn.gpt import GPT
from ascendchat.nn.updates import TINY, muon_update, muon_update_in_few_launches
from ascendchat.parallel import collectives
from ascendchat.sizes.share import team_size

# The true gradient of the per-layer scalars is zero at the first step, since every layer is then the identity: what
# arrives is rounding noise of about 1e-9, which Adam would blow up to a full step, another one on every device.
SCALAR_EPS = 1e-8


def groups(model: GPT, rates: dict[str, float]) -> list[Group]:
    """The recipe's groups: matrices by shape for Muon; tables, head, scalars and gates for AdamW."""
    stacks: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.matrices():
        stacks.setdefault((parameter.size(-2), parameter.size(-1)), []).append((name, parameter))
    result = []
    for (rows, cols), members in stacks.items():
        factors: list[float] = []
        for name, parameter in members:
            out, into = (cols, rows) if name.endswith(".down") else (rows, cols)  # `down` is stored transposed
            factors += [math.sqrt(max(1.0, out / into))] * (parameter.numel() // (rows * cols))
        result.append(Group(f"matrices_{rows}x{cols}", members, rates["matrices"], True, factors))
    every = dict(model.named_parameters())
    values = [(name, parameter) for name, parameter in every.items() if name.startswith("values.")]
    gates = [(name, parameter) for name, parameter in every.items() if name.endswith((".gate", "smear_gate"))]
    shifts = [(name, parameter) for name, parameter in every.items() if name.endswith(".shift")]
    rest = [
        Group("head", [("head", model.head)], rates["head"], betas=(0.8, 0.96), decay=0.01),
        Group(
            "embedding", [("embed.weight", every["embed.weight"])], rates["embedding"], betas=(0.8, 0.995), decay=0.001
        ),
        Group("value_embeddings", values, rates["value_embeddings"], betas=(0.8, 0.995), decay=0.01),
        Group("residual", [("residual", model.residual)], rates["residual_scalars"], decay=0.05, eps=SCALAR_EPS),
        Group("first", [("first", model.first)], rates["skip_scalars"], betas=(0.96, 0.95), eps=SCALAR_EPS),
        Group("scalars", [("smear", model.smear), ("backout", model.backout)], rates["smear_backout"], eps=SCALAR_EPS),
        Group("shifts", shifts, rates["shifts"], eps=SCALAR_EPS),
        Group("gates", gates, rates["matrices"]),
    ]
    return result + [group for group in rest if group.parameters]


def adamw_groups(model: nn.Module, lr: float, decay: float = 0.01) -> list[Group]:
    """AdamW for all weights of another model; norms and biases do not decay. A weight that is tied counts once."""
    known = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts = {
        "matrices": [(name, parameter) for name, parameter in known if parameter.dim() > 1],
        "vectors": [(name, parameter) for name, parameter in known if parameter.dim() <= 1],
    }
    decays = {"matrices": decay, "vectors": 0.0}
    return [
        Group(name, members, lr, betas=(0.9, 0.999), decay=decays[name], eps=1e-8)
        for name, members in parts.items()
        if members
    ]


def muon_groups(model: nn.Module, lr: float, matrix_lr: float, decay: float = 0.0) -> list[Group]:
    """Muon for the matrices inside the layers of another model, AdamW for the rest: tables, head, norms, biases."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.add(id(getattr(model, "head", None)))
    stacks: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in tables:
            stacks.setdefault((parameter.size(0), parameter.size(1)), []).append((name, parameter))
    made = [
        Group(f"matrices_{out}x{into}", members, matrix_lr, True, [math.sqrt(max(1.0, out / into))] * len(members))
        for (out, into), members in stacks.items()
    ]
    taken = {name for group in made for name, _ in group.parameters}
    rest = adamw_groups(model, lr, decay)
    for group in rest:
        group.parameters = [(name, parameter) for name, parameter in group.parameters if name not in taken]
    return made + [group for group in rest if group.parameters]


def _stacks(groups: Iterable[Group]) -> dict[tuple[int, int], int]:
    """(rows, columns) -> matrices."""
    found: dict[tuple[int, int], int] = {}
    for group in groups:
        if group.matrix:
            rows, cols = group.parameters[0][1].shape[-2:]
            found[rows, cols] = found.get((rows, cols), 0) + sum(p.numel() for _, p in group.parameters) // (
                rows * cols
            )
    return found


class MuonAdamW:
    """All buckets; `step` may be called on any number of ranks, each with its own gradients. `fused`: the device has
    AdamW as one operator. `few_launches`: an operation on it costs more than the pass over its arguments."""

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        compute_dtype: torch.dtype,
        compile: Callable[..., Any] | None = None,
        fused: bool = True,
        few_launches: bool = False,
    ) -> None:
        world = collectives.world()
        self.compute_dtype, self.fused, self.steps_done = compute_dtype, fused, 0
        groups = list(groups)
        self.count = torch.zeros((), dtype=torch.float32, device=groups[0].parameters[0][1].device)
        rounded = [g for g in groups if g.parameters[0][1].dtype == compute_dtype != torch.float32]
        self.room: Room | None = None
        rooms: list[Room] = []
        if rounded and world.size == 1:
            self.room, rooms = Room.of(rounded, compute_dtype)
        known = {id(group): room for group, room in zip(rounded, rooms)}
        # Matrices are shared out whole, in teams that are small enough for that (sizes/share.py); the rest among all.
        everyone, alone = collectives.Team(world.rank, world.size), ALONE
        team, copies = collectives.teams_of(team_size(_stacks(groups), world.size))
        self.buckets = [
            Bucket(group, team, known.get(id(group)), copies)
            if group.matrix
            else Bucket(group, everyone, known.get(id(group)), alone)
            for group in groups
        ]
        self._muon = compile(muon_update) if compile else muon_update_in_few_launches if few_launches else muon_update
        # A compiler would compile anew for every new float; a 0-dim tensor on the host is a variable to it.
        self._number: Callable[[float], Any] = torch.tensor if compile else float

    def gradients(self) -> list[Tensor]:
        """All gradients of this rank, one tensor per group."""
        return [bucket.grad for bucket in self.buckets]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        torch._foreach_zero_(self.gradients())

    @torch.no_grad()
    def step(
        self,
        *,
        lr_scale: float,
        momentum: float = 0.9,
        matrix_decay: float = 0.0,
        loss_scale: float = 1.0,
        clip: float | None = None,
    ) -> Tensor:
        """Average the gradients over the ranks, update, and share the result; then forget the gradients.

        Returns the norm of this rank's share of the averaged gradient, on the device. `clip` is the largest norm of the
        whole gradient that goes into the update.
        """
        arriving, norm = self._averaged_gradients(loss_scale), None
        if clip is not None:
            arriving = iter(list(arriving))
            norm = self._norm()
            self._clip(norm, clip)
        gathers = []
        self.count.add_(1.0)
        for bucket in arriving:
            bucket.group.lr = bucket.group.initial_lr * lr_scale
            lr = self._number(bucket.group.lr) if bucket.group.matrix else bucket.group.lr
            rates = lr, self._number(momentum), self._number(matrix_decay)
            bucket.update(self._muon, *rates, dtype=self.compute_dtype, fused=self.fused, count=self.count)
            if bucket.room is None:
                bucket.publish()
            gathers.append(collectives.all_gather(bucket.flat, bucket.own_flat, async_op=True, among=bucket.team))
        if self.room is not None:
            self.room.flat.copy_(self.room.weight)
        for gather in gathers:
            gather.wait()
        norm = self._norm() if norm is None else norm
        self.zero_grad()
        self.steps_done += 1
        return norm

    def _averaged_gradients(self, loss_scale: float) -> Iterator[Bucket]:
        """Each bucket as its gradient arrives, so that one is updated while the others are under way."""
        reductions = [
            collectives.reduce_scatter(b.own_grad, b.grad, op="mean", async_op=True, among=b.team) for b in self.buckets
        ]
        for bucket, reduction in zip(self.buckets, reductions):
            reduction.wait()
            collectives.all_reduce(bucket.own_grad, "mean", among=bucket.copies)
            if loss_scale != 1.0:
                bucket.own_grad.mul_(1.0 / loss_scale)
            yield bucket

    def _norm(self) -> Tensor:
        """Of this rank's share of the gradient; no update changes that. What several teams have counts once."""
        norms = torch.stack(torch._foreach_norm([b.own_grad for b in self.buckets]))
        if any(b.copies.size > 1 for b in self.buckets):
            norms /= torch.tensor([math.sqrt(b.copies.size) for b in self.buckets], device=norms.device)
        return torch.linalg.vector_norm(norms)

    def _clip(self, norm: Tensor, clip: float) -> None:
        """Scale the gradient down to that norm over all ranks."""
        squares = norm.square()
        collectives.all_reduce(squares, "sum")
        torch._foreach_mul_([b.own_grad for b in self.buckets], (clip / squares.sqrt().clamp_min(TINY)).clamp(max=1.0))

    def reserve_mean(self, wanted: bool) -> None:
        """Have room on the device, four bytes a parameter, for the mean of the last weights, which is else on the host.
        Asked for in the dry run, so that a want of memory shows there and not when most of a run is over. A mean that
        was loaded before goes where it is wanted."""
        for bucket in self.buckets:
            if wanted != (bucket.spare is not None):
                bucket.spare = torch.zeros_like(bucket.weight) if wanted else None
                if (mean := bucket.state.pop("mean", None)) is not None:
                    bucket.mean().copy_(mean)

    @torch.no_grad()
    def average(self, count: int, *, last: bool) -> None:
        """Take the weights into their mean as the `count`-th, from 1 on; the last time they become that mean."""
        for bucket in self.buckets:
            mean = bucket.mean()
            mean.lerp_(bucket.weight.to(mean.device), 1.0 / count)
            if last:
                bucket.weight.copy_(mean)
                bucket.publish()
                collectives.all_gather(bucket.flat, bucket.own_flat, among=bucket.team)

    def shards(self) -> dict[str, Tensor]:
        """This rank's state by shard, ready to be saved; what all teams have is saved by the first."""
        mine = [bucket for bucket in self.buckets if bucket.copies.rank == 0]
        return {shard.key(): tensor for bucket in mine for shard, tensor in bucket.shards()}

    @torch.no_grad()
    def load(self, read: Callable[[Shard], Tensor], steps_done: int, *, averaging: bool = False) -> None:
        """Fill this rank's state from whatever ranks saved it, and the parameters of all ranks with it; `averaging`:
        the mean of the weights is already part of the state."""
        for bucket in self.buckets:
            if averaging:
                bucket.mean()
            for shard, tensor in bucket.shards():
                tensor.copy_(read(shard))
            bucket.publish()
            collectives.all_gather(bucket.flat, bucket.own_flat, among=bucket.team)
        self.count.fill_(float(steps_done))
        self.steps_done = steps_done
