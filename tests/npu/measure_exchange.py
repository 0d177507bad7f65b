"""Collectives and bytes of a training step on simulated NPUs, for docs/en/scale.md: our optimizer, and HSDP in copies.

python -m cannsim run --devices 8 -- torchrun --standalone --nproc_per_node=8 tests/npu/measure_exchange.py
"""

from __future__ import annotations

import torch

import cannsim
from ascendchat.device import pick
from ascendchat.nn.attention import kernels
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, adamw_groups, groups
from ascendchat.nn.sharded import ShardedAdamW, mesh_over, share_out_weights
from ascendchat.parallel import collectives
from ascendchat.sizes import schedule
from ascendchat.sizes.shape import Shape

SHAPE = Shape.from_depth(4, vocab=512, seq_len=64, dim=128, head_dim=32)
STEPS = 2  # that are counted, after one that is not


def measure(together: int) -> dict[str, tuple[float, float]]:
    """(calls, bytes) of each collective in a step of this rank; `together` devices hold a copy, 0: each has all."""
    device, place = pick("npu", compiled=False), collectives.place()
    model = GPT(SHAPE)
    model.initialise(0)
    model.to_compute(device.dtype)
    optimizer: MuonAdamW | ShardedAdamW
    if together:
        mesh = mesh_over(place, together)
        share_out_weights(model, model.blocks, mesh, device.dtype, offload=False)
        optimizer = ShardedAdamW(model, adamw_groups(model, 1e-3), mesh)
    else:
        model.to(place)
        optimizer = MuonAdamW(groups(model, schedule.rates(SHAPE.dim, 2**15)), compute_dtype=device.dtype)
    rates = {"lr_scale": 1.0} if together else {"lr_scale": 1.0, "momentum": 0.9, "matrix_decay": 0.1}
    attend = dense(model, kernels("npu")["npu_fusion"])
    for step in range(1 + STEPS):
        if step == 1:
            cannsim.reset()
        rows = torch.randint(0, SHAPE.vocab, (1, SHAPE.seq_len + 1)).to(place)
        head_loss(model(rows[:, :-1], attend), model.head, rows[:, 1:], SHAPE.vocab).backward()
        optimizer.step(**rates)
    found = {name: both for name, both in cannsim.counters().items() if name.startswith("Hccl") and both[1]}
    return {name: (calls / STEPS, size / STEPS) for name, (calls, size) in found.items()}


if __name__ == "__main__":
    collectives.init(pick("npu", compiled=False))
    for together in (0, collectives.world().size // 2):
        exchanged = measure(together)
        if collectives.world().rank == 0:
            print(
                f"{SHAPE.total_parameters} parameters, {together or 'all'} on a device or group: {exchanged}",
                flush=True,
            )
    collectives.teardown()
