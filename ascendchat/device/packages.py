"""Optional packages with kernels for newer NVIDIA GPUs: are they installed, can they be called, and if not, why."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ascendchat.device.accelerator import keep_compiled


@dataclass
class PackagedKernel:
    """One package. Its state is asked for once in a process, before a model is compiled with it."""

    name: str  # in the package index
    does: str  # for a sentence: "rows of training are read by"
    module: str
    calls: Mapping[str, set[str]]  # its functions, and the arguments given to them by name: other versions may differ
    cache: str  # environment variable that names the folder of its compiled kernels
    environment: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def version(self) -> str:
        """The installed version; "" without the package."""
        try:
            return version(self.name)
        except PackageNotFoundError:
            return ""

    @cached_property
    def functions(self) -> Any:
        """The imported module. It compiles its kernels when they are first used; they are kept like torch.compile's."""
        for variable, value in self.environment.items():
            os.environ.setdefault(variable, value)
        keep_compiled(self.cache, self.name)
        return import_module(self.module)

    @cached_property
    def fault(self) -> str | None:
        """Why its functions cannot be called as they are called here, or None."""
        try:
            taken = {name: set(inspect.signature(getattr(self.functions, name)).parameters) for name in self.calls}
        except Exception as error:  # noqa: BLE001 - its own, or of a compiler that it imports: of any kind
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        lacking = [f"{name} takes no {word}" for name in self.calls for word in sorted(self.calls[name] - taken[name])]
        return "; ".join(lacking) or None

    def refusal(self, device: torch.device, reason: str | None = None) -> str | None:
        """Why it does not run on a device, or None; `reason`: what else speaks against it there."""
        if not self.version or device.type != "cuda":
            return "it is not installed for this device"
        if (capability := torch.cuda.get_device_capability(device)) < (9, 0):
            return f"it is for compute capability 9.0 and newer, this is {'.'.join(map(str, capability))}"
        return reason or self.fault

    def notice(self, refusal: str | None) -> str | None:
        """The sentence that says whether the package is used; None where it is not installed."""
        if not self.version:
            return None
        if refusal is None:
            return f"{self.does} the package {self.name}"
        return f"the package {self.name} {self.version} is not used: {refusal}"
