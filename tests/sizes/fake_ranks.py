"""One rank's real step in a job of up to 1,024: torch's fake process group answers, nobody else is there.

    python tests/sizes/fake_ranks.py          # the table of docs/en/scale.md

What the rank hands to the group is counted at torch's dispatcher: calls and bytes, by collective and by size of group.
The bytes are those of the whole exchange as the rank sees it: all that is reduced and scattered, all that is gathered.
What arrives is nonsense (nobody sent it), so this says nothing about losses; and nothing waits, so times are those of
the host alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ascendchat.nn.attention import KERNELS
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, adamw_groups, groups
from ascendchat.nn.sharded import ShardedAdamW, mesh_over, share_out_weights
from ascendchat.parallel import collectives
from ascendchat.parallel.world import World
from ascendchat.sizes import schedule
from ascendchat.sizes.shape import Shape

SHAPE = Shape.from_depth(12, vocab=512, seq_len=64, dim=256, head_dim=64)
DTYPE = torch.bfloat16
RATES = {"lr_scale": 1.0, "momentum": 0.9, "matrix_decay": 0.1}
NAMES = {"_reduce_scatter_base_": "reduce-scatter", "_allgather_base_": "all-gather", "allreduce_": "all-reduce"}


@contextmanager
def rank_among(size: int, rank: int = 0) -> Iterator[None]:
    """This process is one rank of so many."""
    torch_dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    before = collectives._state
    collectives._state = collectives._State(World(rank, size, rank % 8, min(8, size)), torch.device("cpu"))
    try:
        yield
    finally:
        collectives._state = before
        torch_dist.destroy_process_group()


class Traffic(TorchDispatchMode):
    """(collective, size of the group) -> calls, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += 1
        name = func.name().split("::")[1]
        if func.namespace == "c10d" and name in NAMES:
            tensors = [arg for arg in (args[0] if name == "allreduce_" else args) if isinstance(arg, torch.Tensor)]
            group = torch_dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
            key = NAMES[name], group.size()
            self.calls[key] += 1
            self.bytes[key] += max(tensor.numel() * tensor.element_size() for tensor in tensors)
        elif func.namespace == "c10d":
            raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))


@dataclass
class Found:
    """What one rank did in one step."""

    traffic: Traffic
    memory: dict[str, int]  # bytes that this rank keeps, by the names of sizes/memory.py
    build_seconds: float  # model aside: groups, buffers
    step_seconds: float
    matrices: int = 0  # that this rank updates


def new_model(shape: Shape) -> GPT:
    torch.manual_seed(0)
    model = GPT(shape)
    model.initialise(0)
    model.to_compute(DTYPE)
    return model


def backward(model: GPT, shape: Shape) -> None:
    rows = torch.randint(0, shape.vocab, (1, shape.seq_len + 1))
    head_loss(model(rows[:, :-1], dense(model, KERNELS["sdpa"])), model.head, rows[:, 1:], shape.vocab).backward()


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def our_step(size: int, shape: Shape = SHAPE, rank: int = 0) -> Found:
    """Our sharded optimizer."""
    with rank_among(size, rank):
        model, began = new_model(shape), time.perf_counter()
        optimizer = MuonAdamW(groups(model, schedule.rates(shape.dim, 2**15)), compute_dtype=DTYPE)
        built, buckets = time.perf_counter(), optimizer.buckets
        backward(model, shape)
        start = time.perf_counter()
        with Traffic() as traffic:
            optimizer.step(**RATES)
        end = time.perf_counter()
    memory = {
        "weights": size_of(*(bucket.flat for bucket in buckets)),
        "masters": size_of(*(bucket.weight for bucket in buckets)),
        "gradients": size_of(*(x for bucket in buckets for x in (bucket.grad, bucket.own_grad))),
        "optimizer": size_of(*(x for bucket in buckets for x in bucket.state.values())),
    }
    own = [bucket.share // (bucket.unit[0] * bucket.unit[1]) for bucket in buckets if bucket.group.matrix]
    return Found(traffic, memory, built - began, end - start, sum(own))


def sharded_step(size: int, together: int, shape: Shape = SHAPE) -> Found:
    """FSDP2, or HSDP where fewer than all hold a copy: `finetune --shard`."""
    with rank_among(size):
        model, began = new_model(shape), time.perf_counter()
        mesh = mesh_over(torch.device("cpu"), together)
        share_out_weights(model, model.blocks, mesh, DTYPE)
        optimizer = ShardedAdamW(model, adamw_groups(model, 1e-3), mesh)
        built = time.perf_counter()
        with Traffic() as traffic:
            backward(model, shape)
            optimizer.step(**RATES)
        end = time.perf_counter()
        kept = [(share.weight, share.first, share.second) for share in optimizer.shares]
    memory = {
        "masters": size_of(*(weight for weight, _, _ in kept)),
        "optimizer": size_of(*(moment for _, *moments in kept for moment in moments)),
    }
    return Found(traffic, memory, built - began, end - built)


def row(found: Found, size: int) -> str:
    parts = [
        f"{found.traffic.calls[key]} {key[0]} among {key[1]}: {found.traffic.bytes[key]:,}"
        for key in sorted(found.traffic.calls)
    ]
    kept = ", ".join(f"{name} {size:,}" for name, size in found.memory.items())
    times = f"built in {found.build_seconds * 1e3:.0f} ms, step {found.step_seconds * 1e3:.0f} ms"
    return f"{size:>5} | {'; '.join(parts)} | {kept} | {found.matrices} | {found.traffic.launches} launches | {times}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    our_step(8)  # what is done once: imports, caches
    sharded_step(8, 4)
    for size in (8, 16, 32, 64, 128, 256, 512, 1024):
        print("ours ", row(our_step(size), size), flush=True)
    for size in (8, 64, 1024):
        print("HSDP ", row(sharded_step(size, min(8, size // 2)), size), flush=True)
        print("FSDP2", row(sharded_step(size, size), size), flush=True)
