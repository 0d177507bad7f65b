"""Models too large for one device: weights, gradients and moments are shared out over devices (torch's FSDP2).

    mesh = mesh_over(place, together=8)               # 8 devices hold one copy; fewer than all of them: several (HSDP)
    share_out_weights(model, model.blocks, mesh, torch.bfloat16)
    optimizer = ShardedAdamW(model, adamw_groups(model, 1e-5), mesh)

A device holds its share of the weights that are trained in float32. A block is gathered in the compute dtype when it
runs, and its gradient is reduced in float32 as soon as it is there. Checkpoints are those of every other optimizer of
ours: each device saves its part under the names of the parameters, and any number of devices can read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from ascendchat.checkpoint import Shard
from ascendchat.errors import UserError
from ascendchat.nn.optim import TINY, Group, adamw_update
from ascendchat.parallel import collectives


def mesh_over(place: torch.device, together: int) -> DeviceMesh:
    """Arrange the devices of the job in rows of `together`; each row holds one copy of the weights."""
    size = collectives.world().size
    if size % together or together < 2:
        raise UserError(
            f"{together} devices cannot share the weights of a job with {size}; give a number above 1 that divides it"
        )
    if together == size:
        return init_device_mesh(place.type, (size,), mesh_dim_names=("share",))
    return init_device_mesh(place.type, (size // together, together), mesh_dim_names=("copy", "share"))


def share_out_weights(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool = False
) -> None:
    """Shard every block by itself, then the rest; trained weights become float32. The model may still be in host
    memory: one block at a time goes to the device. `offload`: the shards stay on the host."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for part in (*blocks, model):
        for parameter in part.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=place)
    if hasattr(model, "extend"):
        register_fsdp_forward_method(model, "extend")


def whole_weights(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gather weights in the compute dtype into the host memory of rank 0; empty on the others. Every rank calls it."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        here = tensor.to(collectives.place())  # from the host, if its share waits there
        whole = here.full_tensor() if isinstance(here, DTensor) else here
        if collectives.world().rank == 0:
            gathered[name] = whole.to("cpu", dtype if whole.is_floating_point() else None)
    return gathered


@dataclass
class _Share:
    """This device's part of one parameter, flat, and its state."""

    name: str
    parameter: nn.Parameter  # a DTensor: shared out by rows
    group: Group
    start: int  # of the flat parameter

    def __post_init__(self) -> None:
        self.first, self.second = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.count = torch.zeros((), dtype=torch.float32, device=self.weight.device)

    @property
    def weight(self) -> Tensor:
        return _local(self.parameter)

    @property
    def grad(self) -> Tensor | None:
        return None if self.parameter.grad is None else _local(self.parameter.grad)

    def state(self) -> Iterator[tuple[Shard, Tensor]]:
        stop = self.start + self.weight.numel()
        for kind, tensor in (("weight", self.weight), ("first", self.first), ("second", self.second)):
            yield Shard(self.name, kind, self.start, stop), tensor


def _local(tensor: Any) -> Tensor:
    flat: Tensor = tensor.detach().to_local().view(-1)
    return flat


class ShardedAdamW:
    """AdamW on the shares; see Optimizer in train/stage.py."""

    def __init__(self, model: nn.Module, groups: Iterable[Group], mesh: DeviceMesh, *, fused: bool = True) -> None:
        self.model, self.fused, self.steps_done = model, fused, 0
        self.copies = collectives.world().size // mesh.size(mesh.ndim - 1)
        self.saves = mesh.ndim == 1 or mesh.get_local_rank("copy") == 0  # every copy has the same
        rank, ranks = mesh.get_local_rank("share"), mesh.size(mesh.ndim - 1)
        self.shares = []
        for group in groups:
            for name, parameter in group.parameters:
                rows, row = parameter.size(0), math.prod(parameter.shape[1:])
                first = min(rank * -(-rows // ranks), rows)  # FSDP2 cuts as torch.chunk does
                self.shares.append(_Share(name, parameter, group, first * row))

    def gradients(self) -> list[Tensor]:
        return [grad for share in self.shares if (grad := share.grad) is not None]

    def zero_grad(self) -> None:
        for share in self.shares:
            share.parameter.grad = None

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
        """Update, like MuonAdamW.step, from gradients that are averaged already. `momentum` and `matrix_decay` are
        Muon's and not used."""
        gradients = self.gradients()
        if loss_scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / loss_scale)
        place = gradients[0].device if gradients else self.shares[0].weight.device
        squares = torch.zeros((), device=place)
        for norm in torch._foreach_norm(gradients) if gradients else ():
            squares += norm.square() / self.copies
        if clip is not None:
            whole = squares.to(collectives.place(), copy=True)
            collectives.all_reduce(whole, "sum")
            torch._foreach_mul_(gradients, (clip / whole.sqrt().clamp_min(TINY)).clamp(max=1.0).to(place))
        for share in self.shares:
            grad, group = share.grad, share.group
            if grad is None or not grad.numel():
                continue
            group.lr = group.initial_lr * lr_scale
            share.count.add_(1.0)
            adamw_update(
                share.weight,
                grad,
                share.first,
                share.second,
                share.count,
                lr=group.lr,
                betas=group.betas,
                decay=group.decay,
                eps=group.eps,
                fused=self.fused,
            )
        self.zero_grad()
        self.steps_done += 1
        return squares.sqrt().to(collectives.place())

    def shards(self) -> dict[str, Tensor]:
        """State that this rank saves, by shard."""
        if not self.saves:
            return {}
        return {shard.key(): tensor for share in self.shares for shard, tensor in share.state() if tensor.numel()}

    @torch.no_grad()
    def load(self, read: Callable[[Shard], Tensor], steps_done: int) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what a forward pass without a backward pass has left gathered would be run again
        for share in self.shares:
            for shard, tensor in share.state():
                if tensor.numel():
                    tensor.copy_(read(shard))
            share.count.fill_(float(steps_done))
        self.steps_done = steps_done
