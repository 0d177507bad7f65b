"""`ascendchat bench train --depth 12`: tokens per second, MFU, memory and where a step's time goes, on this device;
without a compiler, also launches, bytes and the speed that they allow.

Real optimizer steps on random tokens. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascendchat.config.train import BenchTrainConfig
from ascendchat.device import Device, Mark
from ascendchat.nn.fp8 import Fp8Ops
from ascendchat.runs.console import speed
from ascendchat.sizes import memory, schedule
from ascendchat.sizes.batch import Split, fit_split
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import TrainModel, build, optimizer_for, random_micro_batch
from ascendchat.train.run import training_context


class Bench:
    """A model, its optimizer and one batch of noise."""

    def __init__(self, train_model: TrainModel, split: Split, seed: int) -> None:
        self.train_model, self.split = train_model, split
        train_model.mean_over(split.total // split.devices)
        self.batch = random_micro_batch(train_model, split, seed)
        self.weight = torch.tensor(split.devices / split.total, device=train_model.place)
        self.optimizer = optimizer_for(train_model, schedule.rates(train_model.model.shape.dim, split.total))
        self.micro_batch()  # the first call compiles, or captures a graph, and leaves no useful gradients
        self.optimizer.zero_grad()

    def micro_batch(self) -> None:
        self.train_model.forward_backward(self.batch, self.weight, self.weight)

    def update(self) -> None:
        self.optimizer.step(lr_scale=0.01, momentum=0.9, matrix_decay=0.1)

    def step(self) -> tuple[Mark, Mark, Mark]:
        """Run one optimizer step; marks before, between and after."""
        device = self.train_model.device
        marks = [device.event()]
        for _ in range(self.split.accumulation):
            self.micro_batch()
        marks.append(device.event())
        self.update()
        marks.append(device.event())
        return marks[0], marks[1], marks[2]


def measure(bench: Bench, steps: int, device: Device) -> dict[str, Any]:
    """Time `steps` steps after two warm ones."""
    bench.step(), bench.step()
    device.synchronize()
    if not bench.train_model.captures(bench.split.rows):  # a replay allocates nothing: its peak is that of the capture
        device.reset_peak()
    marks = [bench.step() for _ in range(steps)]
    device.synchronize()
    shape, split = bench.train_model.model.shape, bench.split
    seconds = marks[-1][2].since(marks[0][0]) / 1e3
    pace = speed(split.total * steps, seconds, shape.train_flops_per_token, device.chip.peak, split.devices)
    known = bench.train_model.model.checkpoint_activations, bench.train_model.packaged
    predicted = memory.allocated(memory.training(shape, device.chip, split.devices, split.rows, *known))
    return {
        "tokens_per_second": round(pace.tokens_per_second),
        "mfu": None if pace.mfu is None else round(pace.mfu, 4),
        "step_ms": round(seconds * 1e3 / steps, 3),
        "forward_backward_ms": round(sum(b.since(a) for a, b, _ in marks) / steps, 3),
        "optimizer_ms": round(sum(c.since(b) for _, b, c in marks) / steps, 3),
        "memory_peak_gib": round(device.memory().peak / 2**30, 3),
        "memory_planned_gib": round(predicted / 2**30, 3),
    }


def roofline(bench: Bench, device: Device) -> dict[str, Any]:
    """Roofline of a step where nothing is compiled: launches of a micro-batch and of an optimizer step, bytes that all
    operators of a step move beside the products, and the most that the chip could do if moving them at its bandwidth
    and multiplying at its peak took turns. Empty for a chip whose peak is not known."""
    if device.compiles or not device.chip.peak:
        return {}
    with _Count() as micro_batch:
        bench.micro_batch()
    with _Count() as update:
        bench.update()
    shape, split = bench.train_model.model.shape, bench.split
    moved = split.accumulation * micro_batch.vector_bytes + update.vector_bytes
    multiplying = split.total / split.devices * shape.train_flops_per_token / device.chip.peak
    seconds = multiplying + moved / device.chip.bandwidth
    return {
        "launches_micro_batch": micro_batch.launches,
        "launches_optimizer": update.launches,
        "vector_gb": round(moved / 1e9, 6),
        "roofline_tokens_per_second": round(split.total / seconds),
        "roofline_mfu": round(multiplying / seconds, 4),
    }


def run(config: BenchTrainConfig) -> int:
    """Run `ascendchat bench train`."""
    with training_context(config) as here:
        shape = Shape.from_depth(
            config.depth,
            vocab=config.vocab_size,
            seq_len=config.max_seq_len,
            window_pattern=config.window_pattern,
            dim=config.dim,
            head_dim=config.head_dim,
        )
        train_model = build(config, shape, here)
        total, chip, checkpointing = config.total_batch_size or 2**19, here.device.chip, config.activation_checkpointing
        known: Any = {"checkpointing": checkpointing, "packaged": train_model.packaged}
        split = fit_split(shape, chip, here.world.size, total, rows=config.device_batch_size, **known)
        bench = Bench(train_model, split, config.seed)
        results = {**measure(bench, config.steps_to_time, here.device), **roofline(bench, here.device)}
        eight = isinstance(train_model.model.ops, Fp8Ops)  # not what was asked for, but what was timed
        facts = {"depth": config.depth, "chip": chip.name, "devices": here.world.size, "fp8": eight}
        facts |= {
            "window_pattern": config.window_pattern,
            "attention": train_model.kernel.name,
            "torch": torch.__version__,
        }
        facts |= {"rows": split.rows, "accumulation": split.accumulation, "total_batch": split.total}
        for name, value in results.items():
            here.say(f"{name:<26} {value}")
        here.say(json.dumps({**facts, **results}))
    return 0


# What eager code asks of a device: operators launched, and the bytes that they read and write.
#
#     with Count() as count:
#         loss.backward()
#     print(count.launches, count.vector_bytes)
#
# Every operator that reaches the device is seen, on any kind of device, those of the backward pass too. One operator is
# taken as one launch and one pass over its arguments, which is what it costs without a compiler; a library may launch
# more behind it, to copy an argument that is not contiguous. Compiled code is not seen.

PRODUCTS = ("mm", "bmm", "matmul", "linear", "attention")  # in the names of what the cube unit (tensor cores) does
ONLY_WRITES = ("zero_", "fill_", "copy_", "normal_", "uniform_")
LAUNCHES_NOTHING = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh", "is_pinned", "record_stream")


class _Count(TorchDispatchMode):
    """Counts operators and bytes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.vector_bytes = self.product_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if is_view(func._schema) or name.startswith(LAUNCHES_NOTHING):
            return found
        moved = sum(_moved(func._schema, name, args, kwargs or {}))
        made = [x for x, known in zip(_results(found), func._schema.returns) if known.alias_info is None]
        moved += sum(_bytes(x) for x in made)
        if moved:
            self.launches += 1
        if any(part in name for part in PRODUCTS):
            self.product_bytes += moved
        else:
            self.vector_bytes += moved
        return found


def is_view(schema: Any) -> bool:
    """True if an operator returns a view of its argument."""
    return any(known.alias_info is not None and not known.alias_info.is_write for known in schema.returns)


def _results(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _bytes(value: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(value) if isinstance(x, torch.Tensor))


def _moved(schema: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
    """Bytes moved for each argument: one changed in place is read and written, unless it only gets a value."""
    for i, known in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(known.name)
        changed = known.alias_info is not None and known.alias_info.is_write
        twice = changed and not known.is_out and not name.endswith(ONLY_WRITES)
        yield _bytes(value) * (2 if twice else 1)
