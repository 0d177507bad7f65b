"""Weights shared out over simulated NPUs (FSDP2 over HCCL), in one copy or two: losses as on the CPU."""

from __future__ import annotations

import pytest

CODE = """
import os, torch, cannsim
from ascendchat.parallel import collectives
from ascendchat.device import pick
from ascendchat.nn.attention import kernels
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, adamw_groups
from ascendchat.nn.sharded import ShardedAdamW, mesh_over, share_out_weights, whole_weights
from ascendchat.sizes.shape import Shape
from ascendchat.train.loop import LossScale

SHAPE = Shape.from_depth(2, vocab=61, seq_len=24, dim=32, head_dim=16)

def train(place, kernel, first, last, optimizer_of):
    model = GPT(SHAPE)
    model.initialise(0)
    optimizer = optimizer_of(model)
    attend, losses = dense(model, kernels("npu")[kernel]), []
    for step in range(3):
        rows = torch.randint(0, 61, (8, 25), generator=torch.Generator().manual_seed(step % 2))[first:last].to(place)
        loss = head_loss(model(rows[:, :-1], attend), model.head, rows[:, 1:], SHAPE.vocab)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step(lr_scale=1.0, clip=0.2)
    return model, torch.stack(losses)

whole, expected = train(
    "cpu", "sdpa", 0, 8, lambda model: MuonAdamW(adamw_groups(model, 1e-2), compute_dtype=torch.float32)
)
device = pick("npu", dtype="fp32", compiled=False)
world = collectives.init(device)
place, mine = collectives.place(), 8 // world.size

def sharded(model):
    mesh = mesh_over(place, int(os.environ["TOGETHER"]))
    share_out_weights(model, model.blocks, mesh, torch.float32, offload=bool(int(os.environ["OFFLOAD"])))
    return ShardedAdamW(model, adamw_groups(model, 1e-2), mesh)

model, losses = train(place, "npu_fusion", world.rank * mine, (world.rank + 1) * mine, sharded)
collectives.all_reduce(losses, "mean")
assert expected[-1] < expected[1] - 0.02, expected
assert (losses.cpu() - expected).abs().max() < 1e-4, (losses, expected)
half = LossScale(pick("npu", dtype="fp16", compiled=False))
assert not half.overflowed(0, [torch.zeros(2)])  # --offload: gradients on the host
assert half.overflowed(1, [torch.full((2,), torch.inf)])
saved = whole_weights(model.state_dict(), torch.float32)
assert set(saved) == (set(whole.state_dict()) if world.rank == 0 else set())
for name, weight in saved.items():
    assert (weight - whole.state_dict()[name]).abs().max() < 1e-3, name
assert any("FlashAttention" in name for name in cannsim.launches())
collectives.teardown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "together", "offload"), [(2, 2, 1), (4, 2, 0)])
def test_shares_on_simulated_npus_train_and_are_saved_like_a_cpu(
    on_npu, ranks: int, together: int, offload: int
) -> None:
    on_npu(CODE, ranks, TOGETHER=together, OFFLOAD=offload, timeout=300)
