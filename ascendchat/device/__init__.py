"""The one seam between ascendchat and hardware: `pick()` returns the Device that everything else computes on.

    device = pick(config.device_type)     # NPU > CUDA > MPS > CPU, or what the user named
    where = device.bind(local_rank)       # a torch.device

A new kind of chip is one row of chips.KINDS and the file that it names, which has four functions:

    why_unusable(asked)      # why it cannot be used (one sentence, next step), or None
    names()                  # of the devices that torch sees, for `ascendchat doctor`
    open_device(options)     # its Device
    attention_kernels()      # its own attention kernels, best first (attention.py); () without any

torch is imported by `pick`, never by importing this module.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ascendchat.chips import KINDS, Chip
from ascendchat.config.language import translate
from ascendchat.device.env import load_problem, look, requested
from ascendchat.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

    from ascendchat.device.attention import Attention

__all__ = [
    "Device",
    "DeviceOptions",
    "Mark",
    "Memory",
    "Scaling",
    "attention_kernels",
    "choose_dtype",
    "describe",
    "pick",
]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Memory:
    """Bytes of the bound device: in use by tensors, the most that was in use since `reset_peak`, and in all."""

    used: int
    peak: int
    total: int


@dataclass(frozen=True)
class Scaling:
    """Loss scaling that fp16 needs. `overflow`: how `overflowed` notices it, by "inf" in the gradients or by a hardware
    "flag"."""

    needed: bool
    overflow: Literal["none", "inf", "flag"]


@dataclass(frozen=True)
class DeviceOptions:
    """Settings that the user may give; None leaves the choice to the chip."""

    dtype: str | None = None
    compiled: bool | None = None


class Mark(Protocol):
    """A moment on the device's own clock; setting one does not wait for the device."""

    def since(self, earlier: Any) -> float:
        """Milliseconds between two marks; waits until this one has passed."""


class Device(Protocol):
    """Interface to the hardware: nothing else in the code knows which chip it runs on."""

    type: str  # "npu" | "cuda" | "mps" | "cpu"
    collective: str  # backend of torch.distributed
    chip: Chip
    dtype: torch.dtype  # compute dtype this chip really supports
    pin: bool  # host memory can be pinned for asynchronous copies
    compiles: bool  # whether `compile` compiles
    triton: bool  # whether our own Triton kernels run here
    captures_training: bool  # whether a pass with its gradient can be captured (graph)
    fp8_kv_cache: bool  # whether keys and values can be kept in 8 bits

    def count(self) -> int:
        """Devices this process may use."""

    def bind(self, local_rank: int) -> torch.device:
        """Use this device from now on, in this thread. Every thread that touches an NPU must bind it first."""

    def seed(self, n: int) -> None:
        """Seed the generators of the host and of the device."""

    def synchronize(self) -> None:
        """Wait until the device has finished its queue."""

    def responds(self) -> bool:
        """Test that the device still computes: out of memory may leave one that does nothing, without an error."""

    def software(self) -> dict[str, str]:
        """Versions of what stands between torch and the chip, by name."""

    def event(self) -> Mark:
        """Mark this moment in the device's queue of work."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying a tensor to the host. The result waits for this copy alone, not for work queued behind it."""

    def memory(self) -> Memory:
        """Memory of the bound device."""

    def reset_peak(self) -> None:
        """Start a new peak."""

    def release(self) -> None:
        """Give unused memory back to the driver, reference cycles (an engine has some) included."""

    def compile(self, fn: F, **options: Any) -> F:
        """torch.compile where that is sound and wanted; `fn` itself elsewhere."""

    def graph(
        self, fn: Callable[..., Any], *static_inputs: torch.Tensor, updates: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        """Capture `fn(*static_inputs)` once and replay it on each call, without its launches; `fn` itself where the
        chip cannot. `fn` runs several times during the capture, its shapes must not change, and each replay overwrites
        the outputs of the one before. `updates` is called before each replay for the host arguments of the operators
        that have some: one dict for each operator, in their order."""

    def trace(self, folder: Path) -> Callable[[], Path]:
        """Start the profiler; the result stops it and returns the Chrome trace that it wrote into `folder`."""

    def operators(self) -> Any | None:
        """Fused operators of a transformer block (nn.gpt.Ops); None where plain torch is best."""

    def packaged_mlp(self, *sizes: int) -> tuple[Callable[..., torch.Tensor] | None, str | None]:
        """The MLP with its gradient (nn.gpt.Mlp) by an optional package, for layers of these sizes, or None; and a
        sentence for the user about the package, or None without one."""

    @property
    def scaling(self) -> Scaling:
        """Loss scaling for the compute dtype."""

    def clear_overflow(self) -> None:
        """Clear the overflow flag; call before each backward pass when scaling is needed."""

    def overflowed(self, grads: Sequence[torch.Tensor]) -> bool:
        """True if the backward pass overflowed on this device; waits for it."""


DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}


def choose_dtype(chip: Chip, requested_dtype: str | None = None) -> str:
    """ "bf16", "fp16" or "fp32": what was asked if the chip can, else the best for training on this chip."""
    kind = KINDS[chip.device_type]
    if not requested_dtype or requested_dtype == "auto":
        return ("bf16" if chip.bf16 else "fp16") if kind.half else "fp32"
    name = DTYPES.get(requested_dtype.lower())
    if name is None:
        raise UserError(f"{requested_dtype!r} is not a dtype; {nearest(requested_dtype, ['fp32', 'bf16', 'fp16'])}")
    if name == "bf16" and not chip.bf16 and not kind.emulates_bf16:
        instead = "fp16 (with loss scaling) or fp32" if kind.half else "fp32"
        raise UserError(f"{chip.name} has no bf16; use {instead}: ASCENDCHAT_DTYPE={instead.split()[0]}")
    if name == "fp16" and not kind.half:
        raise UserError(f"fp16 is not used on {kind.title}; use fp32: ASCENDCHAT_DTYPE=fp32")
    return name


def pick(device_type: str | None = None, *, dtype: str | None = None, compiled: bool | None = None) -> Device:
    """The device to compute on: the one named, or the first that is there of npu, cuda, mps, cpu.

    dtype and compiled win over $ASCENDCHAT_DTYPE and $ASCENDCHAT_COMPILE.
    """
    requested_type = requested(device_type)
    options = DeviceOptions(
        dtype or os.environ.get("ASCENDCHAT_DTYPE"), _compile_wanted() if compiled is None else compiled
    )
    _import_torch()
    for name in [requested_type] if requested_type else list(KINDS):
        module = importlib.import_module(KINDS[name].module)
        problem = module.why_unusable(requested_type is not None)
        if problem is None:
            device: Device = module.open_device(options)
            return device
        if not requested_type and _expected(name) and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"ascendchat: {translate(problem)}", file=sys.stderr)
    raise UserError(problem)


def attention_kernels(device_type: str) -> Sequence[Attention]:
    """The attention kernels that this type of device offers, best first; nn/attention.py chooses."""
    if device_type not in KINDS:  # tensors of another program
        return ()
    offered: Sequence[Attention] = importlib.import_module(KINDS[device_type].module).attention_kernels()
    return offered


def _expected(device_type: str) -> bool:
    """True if the machine looks as if it had this device: then a run on another one says so."""
    return "torch_npu" in sys.modules if KINDS[device_type].cann else look().has(device_type)


def _compile_wanted() -> bool | None:
    value = os.environ.get("ASCENDCHAT_COMPILE", "")
    if value not in ("", "0", "1"):
        raise UserError(f"ASCENDCHAT_COMPILE: {value!r} is not 0 or 1")
    return value == "1" if value else None


def _import_torch() -> None:
    """Import torch; when torch_npu, which torch loads by itself, makes that fail, say so in one sentence."""
    try:
        importlib.import_module("torch")
    except RuntimeError as error:
        if "torch_npu" not in str(error):
            raise
        raise UserError(load_problem(error, look())) from error
    except ImportError as error:
        raise UserError(f"PyTorch cannot be imported ({error}); `ascendchat doctor` says what to install") from error


def describe(device: Device) -> str:
    """One line for the start of a run: device, dtype, memory, how it computes."""
    chip = device.chip
    parts = [f"{device.type}: {chip.name}", str(device.dtype).removeprefix("torch."), f"{chip.memory / 2**30:.1f} GiB"]
    parts += [f"{device.count()} visible"] if KINDS[device.type].visible else []
    parts += ["compiled" if device.compiles else "eager", device.collective]
    return ", ".join(parts) + ("" if chip.known else f" ({chip.source})")
