"""Muon (NorMuon) for matrices, AdamW for the rest: one sharded optimizer for 1 to N devices.

    optimizer = MuonAdamW(groups(model, rates), compute_dtype=torch.bfloat16)
    optimizer.step(lr_scale=0.5, momentum=0.95, matrix_decay=0.1)

Parameters of one group live end to end in one buffer, and so do their float32 gradients. A step is: reduce-scatter the
gradients, each rank updates its share of the float32 weights, all-gather the result in the compute dtype straight into
the parameters. On one device the collectives are no-ops and the path is the same. No step reads a value back from the
device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ascendchat.checkpoint import Shard
from ascendchat.nn.gpt import GPT
from ascendchat.parallel import collectives
from ascendchat.sizes.memory import team_size

# Five steps of a polynomial that drives all singular values to 1 (Polar Express, fitted to bf16). The first takes
# matrices of norm 1 by 1 / ROOM: rounded to 16 bits, a singular value of 1 may come out above it.
ROOM = 1.01
POLAR = (
    (8.1566 / ROOM, -22.4833 / ROOM**3, 15.8788 / ROOM**5),
    (4.0429, -2.8089, 0.5000),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
)
TINY = 1e-20  # divides zeros; the squares of smaller numbers are no longer in float32
MIN_ROW_NORM = 1e-5  # of the size of its matrix: a row that is nearly zero is not blown up to the size of the others
EPS = 1e-10

# The true gradient of the per-layer scalars is zero at the first step, since every layer is then the identity: what
# arrives is rounding noise of about 1e-9, which Adam would blow up to a full step, another one on every device.
SCALAR_EPS = 1e-8


# ---- one step, by pure functions of tensors, in place --------------------------------------------


def orthogonalise(g: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, rows, cols) float32 -> nearest semi-orthogonal matrices, scaled to ‖·‖_F = √min(rows, cols), float32.

    The products are in `dtype`. What is rounded to it has size 1 whatever the size of g: in float16 numbers below 6e-8
    are gone. A matrix of zeros stays one.
    """
    rows = g.norm(dim=-1, keepdim=True)  # equal rows first: a better start for the polynomial
    floor = rows.norm(dim=-2, keepdim=True).mul_(MIN_ROW_NORM).clamp_min_(TINY)
    g = g / torch.maximum(rows, floor)
    x = polar((g / g.norm(dim=(-2, -1), keepdim=True).clamp_min_(TINY)).to(dtype))
    size, x = math.sqrt(min(x.size(-2), x.size(-1))), x.float()
    return x / x.norm(dim=(-2, -1), keepdim=True).mul_(1.0 / size).clamp_min_(TINY)


def polar(x: Tensor) -> Tensor:
    """(n, rows, cols) of norm 1 or less -> singular values near 1."""
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR:
        if tall:
            gram = x.mT @ x
            x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
        else:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def equalise(update: Tensor, second: Tensor, beta2: float) -> Tensor:
    """NorMuon: divide each row by a running estimate of its size, then restore the norm of the whole update.

    update (n, rows, cols) float32; second (n, rows, 1) is updated in place.
    """
    mean_square = update.square().mean(dim=-1, keepdim=True)
    second.lerp_(mean_square, 1.0 - beta2)
    step = second.clamp_min(EPS).rsqrt()
    before = mean_square.sum(dim=-2, keepdim=True)
    after = (mean_square * step.square()).sum(dim=-2, keepdim=True)
    return update * (step * (before / after.clamp_min(EPS)).sqrt())


def muon_update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    factor: Tensor,
    *,
    lr: float | Tensor,
    momentum: float | Tensor,
    decay: float | Tensor,
    beta2: float,
    dtype: torch.dtype,
) -> None:
    """One step for a stack of matrices (n, rows, cols), all float32, in place; `factor` (n, 1, 1) scales the rate."""
    first.lerp_(grad, 1.0 - momentum)
    update = orthogonalise(grad.lerp(first, momentum), dtype)  # Nesterov
    update = equalise(update, second, beta2)
    agrees = (update * weight >= 0).to(weight.dtype)  # cautious: decay only where it agrees with the update
    weight.sub_((update + weight * agrees * decay) * (factor * lr))


def muon_update_in_few_launches(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    factor: Tensor,
    *,
    lr: float,
    momentum: float,
    decay: float,
    beta2: float,
    dtype: torch.dtype,
) -> None:
    """`muon_update` for chips without a compiler, where each operation is a launch and a pass over its arguments.

    What only scales rows or matrices is done to the sizes of the rows (n, rows, 1), and reaches the weights with the
    last operation. The matrices are divided by √rows, which is their norm when every row has size 1: only where some
    rows are nearly zero does that differ from `orthogonalise`, by a factor that the polynomial makes up for.
    """
    rows, cols = weight.shape[1:]
    tiny, zero, least = constants(weight.device)
    first.lerp_(grad, 1.0 - momentum)
    g = grad.lerp(first, momentum)
    sizes = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    floor = torch.addcmul(tiny, torch.linalg.vector_norm(sizes, dim=-2, keepdim=True), least)
    x = polar(torch.addcdiv(zero, g, torch.maximum(sizes, floor), value=rows**-0.5).to(dtype))
    sizes = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    share = sizes / torch.linalg.vector_norm(sizes, dim=-2, keepdim=True).clamp_min_(TINY)
    most = min(rows, cols)  # the squared norm of the update
    second.mul_(beta2).addcmul_(share, share, value=(1.0 - beta2) * most / cols)
    step = second.clamp_min(EPS).rsqrt_()
    norm = torch.linalg.vector_norm(sizes * step, dim=-2, keepdim=True)
    decays = torch.ops.aten.threshold_backward(weight, x * weight, -TINY)  # 0 where the update has another sign
    weight.addcmul_(decays, factor, value=-lr * decay)
    weight.addcmul_(x, step / torch.addcdiv(tiny, norm, factor), value=-lr * math.sqrt(most))


@cache
def constants(place: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """TINY, 0 and MIN_ROW_NORM, (1,) each: sums and products with them take no launch of their own."""
    tiny, zero, least = torch.tensor([[TINY], [0.0], [MIN_ROW_NORM]], device=place)
    return tiny, zero, least


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    count: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    decay: float,
    eps: float = EPS,
    fused: bool = True,
) -> None:
    """One AdamW step for a flat float32 tensor, in place, as one fused launch. `count` (0-dim): which step, from 1."""
    if not fused:
        first.lerp_(grad, 1.0 - betas[0])
        second.mul_(betas[1]).addcmul_(grad, grad, value=1.0 - betas[1])
        size = (second / (1.0 - betas[1] ** count)).sqrt_().add_(eps)
        weight.mul_(1.0 - lr * decay).sub_(first / size * (lr / (1.0 - betas[0] ** count)))
        return
    torch._fused_adamw_(
        [weight],
        [grad],
        [first],
        [second],
        [],
        [count],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


# ---- which parameters are updated how ---------------------------------------------------------------


def groups(model: GPT, rates: dict[str, float]) -> list[Group]:
    """Parameter groups of our own model: matrices by shape for Muon; tables, head, scalars and gates for AdamW."""
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
    """Parameter groups of another model, all for AdamW; norms and biases do not decay. A tied weight counts once."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts = {
        "matrices": [(name, parameter) for name, parameter in trained if parameter.dim() > 1],
        "vectors": [(name, parameter) for name, parameter in trained if parameter.dim() <= 1],
    }
    decays = {"matrices": decay, "vectors": 0.0}
    return [
        Group(name, members, lr, betas=(0.9, 0.999), decay=decays[name], eps=1e-8)
        for name, members in parts.items()
        if members
    ]


def muon_groups(model: nn.Module, lr: float, matrix_lr: float, decay: float = 0.0) -> list[Group]:
    """Parameter groups of another model: Muon for the matrices inside its layers, AdamW for tables, head, norms and
    biases."""
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
    """Number of matrices by (rows, columns)."""
    stacks: dict[tuple[int, int], int] = {}
    for group in groups:
        if group.matrix:
            rows, cols = group.parameters[0][1].shape[-2:]
            stacks[rows, cols] = stacks.get((rows, cols), 0) + sum(p.numel() for _, p in group.parameters) // (
                rows * cols
            )
    return stacks


class MuonAdamW:
    """Updates all buckets; each rank brings its own gradients and owns a share of the state (ZeRO-1 style).

    `fused`: the device has AdamW as one operator. `few_launches`: a launch costs more there than its pass over the
    arguments.
    """

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
        self.room: _Room | None = None
        rooms: list[_Room] = []
        if rounded and world.size == 1:
            self.room, rooms = _Room.of(rounded, compute_dtype)
        room_of = {id(group): room for group, room in zip(rounded, rooms)}
        # Matrices are shared out whole, in teams that are small enough for that (sizes/memory.py); the rest among all.
        everyone, alone = collectives.Team(world.rank, world.size), ALONE
        team, copies = collectives.teams_of(team_size(_stacks(groups), world.size))
        self.buckets = [
            Bucket(group, team, room_of.get(id(group)), copies)
            if group.matrix
            else Bucket(group, everyone, room_of.get(id(group)), alone)
            for group in groups
        ]
        self._muon = compile(muon_update) if compile else muon_update_in_few_launches if few_launches else muon_update
        # A compiler would compile anew for every new float; a 0-dim tensor on the host is a variable to it.
        self._number: Callable[[float], Any] = torch.tensor if compile else float

    def gradients(self) -> list[Tensor]:
        """Gradients of this rank, one tensor per group."""
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
        """Yield each bucket as its averaged gradient arrives: one is updated while the others are under way."""
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
        """Norm of this rank's share of the gradient, before or after an update. A share that several teams have counts
        once."""
        norms = torch.stack(torch._foreach_norm([b.own_grad for b in self.buckets]))
        if any(b.copies.size > 1 for b in self.buckets):
            norms /= torch.tensor([math.sqrt(b.copies.size) for b in self.buckets], device=norms.device)
        return torch.linalg.vector_norm(norms)

    def _clip(self, norm: Tensor, clip: float) -> None:
        """Scale the gradient down to that norm over all ranks."""
        squares = norm.square()
        collectives.all_reduce(squares, "sum")
        torch._foreach_mul_([b.own_grad for b in self.buckets], (clip / squares.sqrt().clamp_min(TINY)).clamp(max=1.0))

    @torch.no_grad()
    def average(self, count: int, *, last: bool) -> None:
        """Weight averaging: the weights enter their mean as the `count`-th snapshot, from 1 on; after the last one they
        become that mean."""
        for bucket in self.buckets:
            mean = bucket.mean()
            mean.lerp_(bucket.weight.cpu(), 1.0 / count)
            if last:
                bucket.weight.copy_(mean)
                bucket.publish()
                collectives.all_gather(bucket.flat, bucket.own_flat, among=bucket.team)

    def shards(self) -> dict[str, Tensor]:
        """This rank's state by shard, ready to be saved; state that all teams have is saved by the first."""
        mine = [bucket for bucket in self.buckets if bucket.copies.rank == 0]
        return {shard.key(): tensor for bucket in mine for shard, tensor in bucket.shards()}

    @torch.no_grad()
    def load(self, read: Callable[[Shard], Tensor], steps_done: int, *, averaging: bool = False) -> None:
        """Fill this rank's state from whatever ranks saved it, and the parameters of all ranks with it; `averaging`:
        the mean of the weights is part of the state already."""
        for bucket in self.buckets:
            if averaging:
                bucket.mean()
            for shard, tensor in bucket.shards():
                tensor.copy_(read(shard))
            bucket.publish()
            collectives.all_gather(bucket.flat, bucket.own_flat, among=bucket.team)
        self.count.fill_(float(steps_done))
        self.steps_done = steps_done


# ---- one group in memory ------------------------------------------------------------------------------

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


class _Room(NamedTuple):
    """Memory of the parameters of several buckets and of their float32 weights: one copy rounds all of them."""

    flat: Tensor
    weight: Tensor

    @classmethod
    def of(cls, groups: list[Group], dtype: torch.dtype) -> tuple[_Room, list[_Room]]:
        """One for all groups together, and its part for each of them."""
        sizes = [sum(p.numel() for _, p in group.parameters) for group in groups]
        starts = list(itertools.accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        place = groups[0].parameters[0][1].device
        both = cls(torch.zeros(starts[-1], dtype=dtype, device=place), torch.zeros(starts[-1], device=place))
        parts = [cls(*(x[start : start + size] for x in both)) for start, size in zip(starts, sizes)]
        return both, parts


class Bucket:
    """One group in memory: parameters and float32 gradients end to end, and this rank's share of the state. `team`: the
    ranks that share it out; `copies`: those with the same share in other teams; `room`: memory to lie in, if one rank
    owns everything."""

    def __init__(
        self, group: Group, team: collectives.Team, room: _Room | None = None, copies: collectives.Team = ALONE
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
        """Yield this rank's state, cut at the borders of the parameters; padding belongs to none."""
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
        """Update the float32 weights; `publish` rounds them into the parameters. `count` (0-dim, on the device): number
        of the step, from 1."""
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
        """The averaged weights of this rank's share, part of the state from the first call on. They lie on the host:
        about eight snapshots of a run do not pay for four bytes a parameter of the device."""
        if "mean" not in self.state:
            self.state["mean"] = torch.zeros_like(self.weight, device="cpu")
        return self.state["mean"]

    def publish(self) -> None:
        """Round the float32 weights into this rank's share of the parameters."""
        if self.weight is not self.own_flat:
            self.own_flat.copy_(self.weight)


def _add_to(total: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:  # else an operator has added it
            total.add_(parameter.grad)
            parameter.grad = None

    return hook
