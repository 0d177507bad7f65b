"""The CPU: `ascendchat base --device-type cpu`. fp32 and eager by default: compiling was measured to gain nothing."""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ascendchat.chips import KINDS, this_cpu
from ascendchat.device import DeviceOptions, F, Memory, Scaling, choose_dtype
from ascendchat.device.accelerator import compiled, torch_trace
from ascendchat.device.attention import Attention


def why_unusable(asked: bool) -> str | None:
    """A CPU is always there."""
    return None


def names() -> list[str]:
    """The one CPU."""
    return [platform.machine()]


def open_device(options: DeviceOptions) -> CPU:
    """The CPU of this machine."""
    return CPU(options)


def attention_kernels() -> Sequence[Attention]:
    """The generic ones are enough."""
    return ()


def prefer_plain_products() -> None:
    """Turn off oneDNN, for a process that multiplies few rows at a time in fp32, as in decoding. On ARM torch gives
    products of more than a dozen rows to oneDNN, whose preparation costs more: on a Neoverse N1 (16, 128) x (128, 384)
    takes 750 us instead of 90, (16, 768) x (768, 768) 1800 instead of 830; from 256 rows on there is no difference."""
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(_enabled=False)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks: else it hands them back to the kernel, and the next step waits for each page
    anew: 14,000 faults in a step of 1.6 M parameters and 2,048 tokens, 2,000 with this. `CPU.release` gives back."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; older versions take no more than 32 MiB
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


class _ClockMark:
    """A moment: work on the CPU is done when its call returns."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def since(self, earlier: _ClockMark) -> float:
        """Milliseconds since an earlier mark."""
        return (self.seconds - earlier.seconds) * 1e3


class CPU:
    """A Device on the host itself."""

    type = "cpu"
    collective = KINDS["cpu"].collective
    pin = False
    triton = False
    captures_training = False
    fp8_kv_cache = True

    def __init__(self, options: DeviceOptions) -> None:
        self.chip = this_cpu()
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[choose_dtype(self.chip, options.dtype)]
        self.compiles = bool(options.compiled)
        keep_freed_memory()

    def count(self) -> int:
        """All processes share the one CPU."""
        return 1

    def bind(self, local_rank: int) -> torch.device:
        """Every rank has the same CPU."""
        return torch.device("cpu")

    def seed(self, n: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(n)

    def synchronize(self) -> None:
        """Nothing to wait for: calls return when their work is done."""

    def responds(self) -> bool:
        """Always."""
        return True

    def software(self) -> dict[str, str]:
        """None besides torch."""
        return {}

    def event(self) -> _ClockMark:
        """Mark this moment."""
        return _ClockMark()

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A copy made at once."""
        copy = tensor.clone()
        return lambda: copy

    def memory(self) -> Memory:
        """Resident memory of this process, from the kernel."""
        status = Path("/proc/self/status")
        if status.is_file():
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            used, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))  # shown in KiB
            return Memory(used, peak, self.chip.memory)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Memory(peak, peak, self.chip.memory)

    def reset_peak(self) -> None:
        """Start a new peak where the kernel offers that (Linux); elsewhere the peak is that of the whole process."""
        clear = Path("/proc/self/clear_refs")
        if clear.exists():
            clear.write_text("5")  # resets VmHWM, see proc(5)

    def release(self) -> None:
        """Give freed memory back to the kernel, as far as glibc has it: torch for ARM has another allocator."""
        gc.collect()
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)

    def compile(self, fn: F, **options: Any) -> F:
        """torch.compile when asked for."""
        return compiled(fn, **options) if self.compiles else fn

    def graph(
        self, fn: Callable[..., Any], *static_inputs: torch.Tensor, updates: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        """A CPU has no launches to save."""
        return fn

    def trace(self, folder: Path) -> Callable[[], Path]:
        """Operators of the host; see Device.trace."""
        return torch_trace(folder, "CPU")

    def operators(self) -> Any | None:
        """Plain torch."""
        return None

    def packaged_mlp(self, *sizes: int) -> tuple[Callable[..., torch.Tensor] | None, str | None]:
        """There is no such package."""
        return None, None

    @property
    def scaling(self) -> Scaling:
        """No fp16 here."""
        return Scaling(needed=False, overflow="none")

    def clear_overflow(self) -> None:
        """There is no flag."""

    def overflowed(self, grads: Sequence[torch.Tensor]) -> bool:
        """True if any gradient is inf or nan."""
        return any(not bool(grad.isfinite().all()) for grad in grads)
