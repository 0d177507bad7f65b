"""Ascend NPUs, through torch_npu: `ascendchat base --device-type npu`.

Eager by default; ASCENDCHAT_COMPILE=1 compiles and needs triton-ascend. 910A and 310P have no bf16. Their fp16 does not
become inf but stays at its largest value, so only a hardware flag shows an overflow.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ascendchat.chips import KINDS
from ascendchat.device import DeviceOptions
from ascendchat.device.accelerator import Accelerator, ascend_trace, current_chip, usable_types
from ascendchat.device.attention import Attention
from ascendchat.device.cann import cann_version
from ascendchat.device.env import load_problem, look, torch_npu_missing, visible_problem
from ascendchat.device.npu_attention import NpuFusion, NpuSdpa
from ascendchat.device.npu_ops import EagerOps, NPUOps
from ascendchat.errors import UserError


def why_unusable(asked: bool) -> str | None:
    """Why no NPU can be used, or None. When none was asked for, only a torch_npu that torch loaded itself counts."""
    if not asked and "torch_npu" not in sys.modules:
        return "torch_npu is not loaded"
    if importlib.util.find_spec("torch_npu") is None:
        return torch_npu_missing(look())
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return load_problem(error, look())
    if torch.npu.is_available():  # type: ignore[attr-defined]
        return None
    variable = KINDS["npu"].visible
    listed = os.environ.get(variable)
    problem = visible_problem(listed) if listed is not None else None
    if listed is not None and problem:
        return f"no NPU can be used: {variable}={listed!r}, but {problem[0]}; write it like {variable}=0,1,2,3"
    nodes = len(look().nodes)
    return (
        f"no NPU answers (found: {nodes} device(s) in /dev/davinci*; usable: {usable_types()}); "
        "run: ascendchat doctor, or choose another device, for example --device-type cpu"
    )


def names() -> list[str]:
    """Names of the NPUs that torch sees; none where torch_npu is not loaded."""
    npu: Any = getattr(torch, "npu", None)
    return [npu.get_device_name(i) for i in range(npu.device_count())] if npu else []


def open_device(options: DeviceOptions) -> NPU:
    """The NPU of this process."""
    api: Any = torch.npu  # type: ignore[attr-defined]
    device = NPU(api, current_chip(api, "npu"), options)
    if device.chip.jit_default:  # else each new length of a row is compiled for minutes
        api.set_compile_mode(jit_compile=False)
    if options.compiled and not has_triton_ascend():
        raise UserError(
            "compiling on an NPU needs triton-ascend, which is not installed; pip install triton-ascend, or "
            "ASCENDCHAT_COMPILE=0"
        )
    device.compiles = bool(options.compiled)
    device.saturates = not api.utils.is_support_inf_nan()  # a setting too: INF_NAN_MODE_FORCE_DISABLE
    return device


def attention_kernels() -> Sequence[Attention]:
    """The fused kernel; and torch's own, which needs two changes here."""
    return NpuFusion(), NpuSdpa()


def has_triton_ascend() -> bool:
    """The compiler's back end for NPUs. The plain `triton` has the same module name, and none."""
    try:
        importlib.metadata.distribution("triton-ascend")
    except importlib.metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("triton") is not None


class NPU(Accelerator):
    """A Device on torch.npu."""

    type = "npu"
    graph_class = "NPUGraph"

    def graph(
        self, fn: Callable[..., Any], *static_inputs: torch.Tensor, updates: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        """Capture `fn`; with TASK_QUEUE_ENABLE=2, which training uses, torch_npu cannot, and `fn` itself is returned.

        Host arguments are updated on a stream of their own, and a replay waits there where it needs them. A replay
        that has not used its own yet would get those of the next: so two graphs take turns, and each is updated only
        when its last replay is over."""
        if self.chip.graphs and os.environ.get("TASK_QUEUE_ENABLE") == "2":
            print("ascendchat: no captured graphs with TASK_QUEUE_ENABLE=2; 1 decodes faster", file=sys.stderr)
            return fn
        if updates is None or not self.chip.graphs:
            return super().graph(fn, *static_inputs)
        if not hasattr(getattr(self.api, self.graph_class), "update"):
            print("ascendchat: no captured graphs: this torch_npu is too old to update them", file=sys.stderr)
            return fn
        turns = itertools.cycle([self._updated(fn, updates) for _ in range(2)])
        return lambda: next(turns)()

    def _updated(self, fn: Callable[..., Any], updates: Callable[[], Any]) -> Callable[[], Any]:
        captured, outputs = self.capture(fn, auto_dispatch_capture=True)
        over = self.api.Event()

        def replay() -> Any:
            over.synchronize()
            captured.update(cpu_update_input=updates())
            captured.replay()
            over.record()
            return outputs

        return replay

    def trace(self, folder: Path) -> Callable[[], Path]:
        """See Device.trace; torch_npu has a profiler of its own."""
        return ascend_trace(folder)

    def software(self) -> dict[str, str]:
        """torch_npu, and the CANN that it has loaded (older wheels cannot ask it: then that of its folder)."""
        ask = getattr(importlib.import_module("torch_npu.npu.utils"), "get_cann_version", None)
        cann = ask() if ask else cann_version(Path(os.environ.get("ASCEND_HOME_PATH", "")))
        return {"torch_npu": str(sys.modules["torch_npu"].__version__), "CANN": str(cann)}

    def operators(self) -> NPUOps | None:
        """Fused operators, because in eager mode every launch costs host time. On 910A and 310P they would be compiled
        for each new shape, so plain torch is used there."""
        if not self.chip.fused_attention:
            return None
        return NPUOps() if self.compiles else EagerOps()

    def clear_overflow(self) -> None:
        """Clear the hardware's flag on chips that saturate."""
        if self.scaling.overflow == "flag":
            self.api.utils.clear_npu_overflow_flag()

    def overflowed(self, grads: Sequence[torch.Tensor]) -> bool:
        """The hardware's flag on chips that saturate; inf and nan elsewhere."""
        if self.scaling.overflow == "flag":
            return bool(self.api.utils.get_npu_overflow_flag())
        return super().overflowed(grads)
