"""Apple GPUs: `ascendchat base --device-type mps`. fp32 and eager by default; bf16 with ASCENDCHAT_DTYPE=bf16."""

from __future__ import annotations

import gc
import platform
import subprocess
from collections.abc import Callable, Sequence

import torch

from ascendchat.chips import KINDS, detected
from ascendchat.device import DeviceOptions, Memory, choose_dtype
from ascendchat.device.accelerator import TORCH_DTYPES, EventMark
from ascendchat.device.attention import Attention
from ascendchat.device.cpu import CPU
from ascendchat.errors import UserError


def why_unusable(asked: bool) -> str | None:
    """Why no Apple GPU can be used, or None."""
    if torch.backends.mps.is_available():
        return None
    why = "macOS 14 or later is needed" if torch.backends.mps.is_built() else "this torch is built without MPS"
    return f"no Apple GPU can be used: {why}; choose another device, for example --device-type cpu"


def names() -> list[str]:
    """The one GPU of a Mac, by the name of its processor family."""
    return [platform.machine()] if torch.backends.mps.is_available() else []


def open_device(options: DeviceOptions) -> _MPS:
    """The GPU of this Mac."""
    if options.compiled:
        raise UserError("compiling is not supported on an Apple GPU; ASCENDCHAT_COMPILE=0")
    return _MPS(options)


def attention_kernels() -> Sequence[Attention]:
    """The generic ones are enough."""
    return ()


class _MPS(CPU):
    """A Device on torch.mps; what has no counterpart on a GPU of a Mac is as on a CPU."""

    type = "mps"
    collective = KINDS["mps"].collective
    fp8_kv_cache = False

    def __init__(self, options: DeviceOptions) -> None:
        name = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True)
        self.chip = detected(name.stdout.strip(), "mps", int(torch.mps.recommended_max_memory()))
        self.dtype = TORCH_DTYPES[choose_dtype(self.chip, options.dtype)]
        self.compiles, self.peak = False, 0

    def bind(self, local_rank: int) -> torch.device:
        """Every rank has the same GPU."""
        return torch.device("mps")

    def seed(self, n: int) -> None:
        """Seed the generators of the host and of the GPU."""
        torch.manual_seed(n)
        torch.mps.manual_seed(n)

    def synchronize(self) -> None:
        """Wait until the GPU has done all it was given."""
        torch.mps.synchronize()

    def event(self) -> EventMark:  # type: ignore[override]
        """Mark this moment in the GPU's queue of work."""
        return EventMark(torch.mps.event)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copied at once, which waits for all work so far: there is no pinned memory here."""
        copy = tensor.cpu()
        return lambda: copy

    def memory(self) -> Memory:
        """Bytes held by tensors. torch.mps keeps no peak: it is the most seen by calls of this function."""
        used = int(torch.mps.current_allocated_memory())
        self.peak = max(self.peak, used)
        return Memory(used, self.peak, self.chip.memory)

    def reset_peak(self) -> None:
        """Start a new peak."""
        self.peak = 0

    def release(self) -> None:
        """Give unused memory back to the system."""
        gc.collect()
        torch.mps.empty_cache()
