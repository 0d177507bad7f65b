"""A small GPT trained on the simulated NPU equals the CPU, in every queue mode and on several ranks.

python -m cannsim run -- pytest tests/npu/test_training.py -m ""
"""

from __future__ import annotations

import ast

import pytest

MODEL = """
import os, torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(F.rms_norm(x, (C,))).view(B, T, 3 * self.heads, C // self.heads)
        q, k, v = qkv.transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (C,)))).square())

class GPT(nn.Module):
    def __init__(self, vocabulary=64, width=32, heads=2, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(F.rms_norm(x, x.shape[-1:])).flatten(0, 1).float(), targets.flatten())

def batches(steps, size=8, length=16):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = (torch.randint(0, 64, (size, 1), generator=generator) + torch.arange(length + 1) * 3) % 64
        yield rows[:, :-1], rows[:, 1:].contiguous()
"""

SINGLE = (
    MODEL
    + """
def train(device, steps=50):
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens, targets in batches(steps):
        loss = model(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()

cpu, npu = train("cpu"), train("npu")
assert cpu[-1] < cpu[0] / 2, "the model must learn something"
assert (cpu - npu).abs().max() < 1e-4, (cpu - npu).abs().max()
import cannsim
assert cannsim.launches()["aclnnFlashAttentionScore"] == 2 * 50
"""
)


@pytest.mark.parametrize("queue", [0, 1, 2])
def test_a_gpt_trained_50_steps_equals_the_cpu_in_every_queue_mode(on_npu, queue):
    on_npu(SINGLE, TASK_QUEUE_ENABLE=queue, timeout=180)


RANKS = (
    MODEL
    + """
import torch.distributed as dist
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.npu.set_device(rank)
torch.manual_seed(0)
model = GPT().npu()
{wrap}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for tokens, targets in batches(10):
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    loss = model(tokens[part].npu(), targets[part].npu())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    if world > 1:
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
    losses.append(round(total.item(), 5))
print("losses", losses)
if world > 1:
    dist.destroy_process_group()
"""
)

WRAP = {
    "alone": "",
    "ddp": """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("hccl")
model = DistributedDataParallel(model, device_ids=[rank])
""",
    "fsdp2": """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("hccl")
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
""",
}


def losses_of(output: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if line.startswith("losses ")]
    return ast.literal_eval(line.removeprefix("losses "))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_data_parallel_training_equals_one_process(on_npu, how, ranks):
    (alone,) = on_npu(RANKS.replace("{wrap}", WRAP["alone"]))
    together = on_npu(RANKS.replace("{wrap}", WRAP[how]), ranks, timeout=180)
    wanted = losses_of(alone.output)
    for rank in together:
        assert losses_of(rank.output) == pytest.approx(wanted, abs=5e-5)
    assert wanted[-1] < wanted[0]
