"""What NPU and CUDA devices share: torch.npu and torch.cuda have the same functions, `api` is one of the two.

npu.py and cuda.py hold what differs: how the device is found, compiling, graphs, overflow.
"""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ascendchat.chips import KINDS, Chip, detected
from ascendchat.config import UserError
from ascendchat.device import DeviceOptions, F, Memory, Scaling, choose_dtype
from ascendchat.device.compiling import compiled
from ascendchat.device.trace import torch_trace

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UPS = 3  # runs before a capture: allocator and libraries settle


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While a graph is captured: an old graph that is found to be garbage then, and freed, ends the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class EventMark:
    """A recorded event of the device's current stream."""

    def __init__(self, api: Any) -> None:
        self.recorded = api.Event(enable_timing=True)
        self.recorded.record()

    def since(self, earlier: EventMark) -> float:
        """Milliseconds since an earlier mark."""
        self.recorded.synchronize()
        return float(earlier.recorded.elapsed_time(self.recorded))


class Accelerator:
    """A Device on top of torch.npu or torch.cuda."""

    type: str
    pin = True
    compiles = False
    triton = False
    records_training = narrow_cache = False
    saturates = False  # fp16 overflow shows only in a hardware flag
    graph_class: str  # name of the captured graph's class in `api`

    def __init__(self, api: Any, chip: Chip, options: DeviceOptions) -> None:
        self.api = api
        self.chip = chip
        self.options = options
        self.collective = KINDS[self.type].collective
        self.dtype = TORCH_DTYPES[choose_dtype(chip, options.dtype)]

    def count(self) -> int:
        """Devices this process may use."""
        return int(self.api.device_count())

    def bind(self, local_rank: int) -> torch.device:
        """Use this device from now on, in this thread."""
        if not 0 <= local_rank < self.count():
            variable = KINDS[self.type].visible
            listed = os.environ.get(variable)
            raise UserError(
                f"local rank {local_rank} has no {KINDS[self.type].title}: {self.count()} visible"
                f"{f' ({variable}={listed})' if listed else ''}; start no more processes per node than that"
            )
        self.api.set_device(local_rank)
        return torch.device(self.type, local_rank)

    def seed(self, n: int) -> None:
        """Seed the generators of the host and of all devices."""
        torch.manual_seed(n)
        self.api.manual_seed_all(n)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self.api.synchronize()

    def responds(self) -> bool:
        """A number that nobody could know in advance, and a sum of it that the host checks."""
        drawn = secrets.randbelow(2**16)
        try:
            total = torch.full((64,), float(drawn), device=self.type).add_(1.0).sum()
            return float(total.item()) == 64.0 * (drawn + 1)
        except RuntimeError:
            return False

    def software(self) -> dict[str, str]:
        """Nothing that torch does not bring."""
        return {}

    def event(self) -> EventMark:
        """Mark this moment in the device's queue of work."""
        return EventMark(self.api)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying a tensor to the host; see Device.fetch."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        copied = self.api.Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def memory(self) -> Memory:
        """Bytes held by tensors on the bound device."""
        return Memory(self.api.memory_allocated(), self.api.max_memory_allocated(), self.chip.memory)

    def reset_peak(self) -> None:
        """Start a new peak."""
        self.api.reset_peak_memory_stats()

    def release(self) -> None:
        """Give memory that nobody uses back to the driver; see Device.release."""
        gc.collect()
        self.api.empty_cache()

    def compile(self, fn: F, **options: Any) -> F:
        """torch.compile, or `fn` itself where compiling is off."""
        return compiled(fn, **options) if self.compiles else fn

    def graph(
        self, fn: Callable[..., Any], *static_inputs: torch.Tensor, updates: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        """Record `fn` once and replay it; see Device.graph."""
        if not self.chip.graphs:
            return fn
        assert updates is None, "no operator here has arguments on the host"
        captured, outputs = self.capture(fn, *static_inputs)

        def replay(*inputs: torch.Tensor) -> Any:
            for static, new in zip(static_inputs, inputs, strict=True):
                if new is not static:
                    static.copy_(new)
            captured.replay()
            return outputs

        return replay

    def capture(self, fn: Callable[..., Any], *static_inputs: torch.Tensor, **options: Any) -> tuple[Any, Any]:
        """A graph of `fn` and the outputs that each of its replays writes.

        It runs first on the stream that is to replay it: once another one had been used, a step of 88 kernels took 4 %
        longer on an H200.
        """
        for _ in range(WARM_UPS):
            fn(*static_inputs)
        captured = getattr(self.api, self.graph_class)()
        with no_garbage_collection(), self.api.graph(captured, **options):
            outputs = fn(*static_inputs)
        return captured, outputs

    def trace(self, folder: Path) -> Callable[[], Path]:
        """Operators of the host and kernels of the device; see Device.trace."""
        return torch_trace(folder, "CPU", self.type.upper())

    def operators(self) -> Any | None:
        """Plain torch."""
        return None

    def packaged_mlp(self, *sizes: int) -> tuple[Callable[..., torch.Tensor] | None, str | None]:
        """No package is known."""
        return None, None

    @property
    def scaling(self) -> Scaling:
        """fp16 needs its loss scaled."""
        needed = self.dtype == torch.float16
        return Scaling(needed, ("flag" if self.saturates else "inf") if needed else "none")

    def clear_overflow(self) -> None:
        """Nothing to forget: overflow is seen in the gradients themselves."""

    def overflowed(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether any gradient is inf or nan: one wait for all of them."""
        return bool(grads) and not bool(torch.stack([grad.isfinite().all() for grad in grads]).all())


def current_chip(api: Any, device_type: str) -> Chip:
    """The chip of this process's device. The device is chosen first: asking about device 0 from every rank would make
    every rank hold memory there."""
    rank = os.environ.get("LOCAL_RANK", "0")
    api.set_device(int(rank) if rank.isdigit() and int(rank) < api.device_count() else 0)
    properties = api.get_device_properties(api.current_device())
    chip = detected(properties.name, device_type, int(properties.total_memory))
    real = {"including_emulation": False} if device_type == "cuda" else {}  # torch_npu 2.7.1 takes no argument
    return chip if chip.known else replace(chip, bf16=bool(api.is_bf16_supported(**real)))


def usable_types() -> str:
    """The device types that are there, for sentences about one that is not."""
    there = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()]
    return ", ".join([*there, "cpu"])
