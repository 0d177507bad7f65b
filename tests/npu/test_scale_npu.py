"""What a training step exchanges, counted by the simulated HCCL, is what `plan` counts with. docs/en/scale.md"""

from __future__ import annotations

CODE = """
import torch, cannsim
from ascendchat import dist
from ascendchat.device import pick
from ascendchat.nn.attention import KERNELS
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.plan import schedule
from ascendchat.plan.batch import COLLECTIVES
from ascendchat.plan.shape import Shape

SHAPE = Shape.from_depth(4, vocab=512, seq_len=64, dim=128, head_dim=32)
device = pick("npu", compiled=False)
world = dist.init(device)
model = GPT(SHAPE)
model.initialise(0)
model.to_compute(device.dtype).to(dist.place())
optimizer = MuonAdamW(groups(model, schedule.rates(SHAPE.dim, 2**15)), compute_dtype=device.dtype)
attend = dense(model, KERNELS["npu_fusion"])
for step in range(2):
    rows = torch.randint(0, 512, (1, 65)).to(dist.place())
    head_loss(model(rows[:, :-1], attend), model.head, rows[:, 1:], SHAPE.vocab).backward()
    cannsim.reset()
    optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.1)
calls = {name: found for name, found in cannsim.counters().items() if name.startswith("Hccl") and found[1]}
assert set(calls) == {"HcclReduceScatter", "HcclAllGather"}, calls
assert sum(count for count, _ in calls.values()) == COLLECTIVES, calls
# The simulator counts what a rank keeps of a reduction and what it gives to a gather: a share of each.
exchanged = sum(size for _, size in calls.values()) * world.size
assert abs(exchanged / ((4 + 2) * SHAPE.total_parameters) - 1) < 0.01, exchanged
dist.teardown()
"""


def test_a_step_exchanges_the_bytes_and_the_collectives_of_the_plan(on_npu) -> None:
    on_npu(CODE, 2, timeout=300)
