"""Shared code of devices with a torch.NAME module: torch.npu and torch.cuda have the same functions; `api` is one.

npu.py and cuda.py hold what differs: how the device is found, compiling, graphs, overflow.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._functorch.config
import torch.compiler

from ascendchat.chips import KINDS, Chip, detected
from ascendchat.device import DeviceOptions, F, Memory, Scaling, choose_dtype
from ascendchat.errors import UserError, home
from ascendchat.version import __version__

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UPS = 3  # runs before a capture: allocator and libraries settle


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the collector off while a graph is captured: freeing an old graph would end the capture."""
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
    captures_training = fp8_kv_cache = False
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
        """Wait until the device has finished its queue."""
        self.api.synchronize()

    def responds(self) -> bool:
        """Let the device add random numbers, and check the sum on the host."""
        drawn = secrets.randbelow(2**16)
        try:
            total = torch.full((64,), float(drawn), device=self.type).add_(1.0).sum()
            return float(total.item()) == 64.0 * (drawn + 1)
        except RuntimeError:
            return False

    def software(self) -> dict[str, str]:
        """None besides torch."""
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
        """Give unused memory back to the driver."""
        gc.collect()
        self.api.empty_cache()

    def compile(self, fn: F, **options: Any) -> F:
        """torch.compile, or `fn` itself where compiling is off."""
        return compiled(fn, **options) if self.compiles else fn

    def graph(
        self, fn: Callable[..., Any], *static_inputs: torch.Tensor, updates: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        """Capture `fn` once and replay it; see Device.graph."""
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
        """There is no such package."""
        return None, None

    @property
    def scaling(self) -> Scaling:
        """fp16 needs its loss scaled."""
        needed = self.dtype == torch.float16
        return Scaling(needed, ("flag" if self.saturates else "inf") if needed else "none")

    def clear_overflow(self) -> None:
        """There is no flag: overflow is seen in the gradients."""

    def overflowed(self, grads: Sequence[torch.Tensor]) -> bool:
        """True if any gradient is inf or nan; one wait for all of them."""
        return bool(grads) and not bool(torch.stack([grad.isfinite().all() for grad in grads]).all())


def current_chip(api: Any, device_type: str) -> Chip:
    """Facts about the chip of this process. Its device is set first: asking about device 0 from every rank would make
    every rank hold memory there."""
    rank = os.environ.get("LOCAL_RANK", "0")
    api.set_device(int(rank) if rank.isdigit() and int(rank) < api.device_count() else 0)
    properties = api.get_device_properties(api.current_device())
    chip = detected(properties.name, device_type, int(properties.total_memory))
    real = {"including_emulation": False} if device_type == "cuda" else {}  # torch_npu 2.7.1 takes no argument
    return chip if chip.known else replace(chip, bf16=bool(api.is_bf16_supported(**real)))


def usable_types() -> str:
    """The device types of this machine, for sentences about one that is missing."""
    apis = {kind: getattr(torch, kind, None) for kind, row in KINDS.items() if not row.cann and kind != "cpu"}
    return ", ".join([*(kind for kind, api in apis.items() if api and api.is_available()), "cpu"])


# torch.compile with a cache on disk, for every device that compiles.

Compiled = TypeVar("Compiled")
AUTOGRAD_CACHE = "autograd_cache_allow_custom_autograd_functions"  # older versions of torch do not have it,
CACHE_TAG = "cache_key_tag"  # nor this
OPERATOR_PACKAGES = "nn", "device"  # our packages whose code torch's keys may not see
MIN_FREE = 2**30  # bytes that are free where something is kept; a model of depth 12 takes a tenth of it


def keep_compiled(variable: str, part: str) -> None:
    """Set `variable`, unless the user has, to a compile cache that survives a restart of the machine:
    $ASCENDCHAT_HOME/compiled. Not on several nodes, which share that folder and would wait for each other's locks, and
    not where compiling would fail because of it: then the cache stays under /tmp."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    one_node = ranks == os.environ.get("LOCAL_WORLD_SIZE", ranks)
    folder = home() / "compiled" / part
    if variable not in os.environ and one_node and is_usable(folder):
        os.environ[variable] = str(folder)


def is_usable(folder: Path) -> bool:
    """Make the folder and test that a compiler can work in it: it is ours alone, since what lies there is run; there is
    room; and torch can name it to the C++ compiler, whose command it splits as a shell does."""
    try:
        if shlex.split(str(folder)) != [str(folder)]:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**16))
        return folder.stat().st_uid == os.getuid() and shutil.disk_usage(folder).free >= MIN_FREE
    except (OSError, ValueError):  # read-only, full, a file of that name; a quotation that does not end
        return False


@cache
def operators_version() -> str:
    """Version of our operators: the release and a hash of their source."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(path for name in OPERATOR_PACKAGES for path in (package / name).glob("*.py")):
        digest.update(path.read_bytes())
    return f"ascendchat {__version__} {digest.hexdigest()[:16]}"


def compiled(fn: Compiled, **options: Any) -> Compiled:
    """torch.compile with a cache that later processes find.

    torch does not keep the gradients of functions that write theirs out themselves, unless told to: what they compute
    is part of the key. Depth 4 on a CPU, found again: 9 s instead of 24. Of an operator of ours only the name is part
    of the key: what another version made of it would be found, with the gradient that it had then.
    """
    keep_compiled("TORCHINDUCTOR_CACHE_DIR", "torch")
    if hasattr(torch._functorch.config, AUTOGRAD_CACHE):
        setattr(torch._functorch.config, AUTOGRAD_CACHE, True)
    config: Any = getattr(torch.compiler, "config", None)
    if not hasattr(config, CACHE_TAG):
        torch._functorch.config.enable_autograd_cache = False
    elif operators_version() not in (tag := getattr(config, CACHE_TAG)):
        setattr(config, CACHE_TAG, f"{tag} {operators_version()}".strip())
    return torch.compile(fn, **options)  # type: ignore[call-overload, no-any-return]


# Starts and stops the profilers of torch and torch_npu: `ascendchat base --profile 5`. Nothing is imported before.
#
# stop = trace(folder)     # Device.trace
# path = stop()            # the Chrome trace, in `folder`


def torch_trace(folder: Path, *activities: str) -> Callable[[], Path]:
    """torch's own profiler; `activities` are names of torch.profiler.ProfilerActivity."""
    profiler = importlib.import_module("torch.profiler")
    running = profiler.profile(activities=[getattr(profiler.ProfilerActivity, name) for name in activities])
    running.start()

    def stop() -> Path:
        running.stop()
        path = folder / "trace.json"
        running.export_chrome_trace(str(path))
        return path

    return stop


def ascend_trace(folder: Path) -> Callable[[], Path]:
    """torch_npu's profiler, which needs the msprof tool of CANN for the times of the device."""
    profiler = importlib.import_module("torch_npu").profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    level = profiler._ExperimentalConfig(profiler_level=profiler.ProfilerLevel.Level1)
    running = profiler.profile(
        activities=activities,
        experimental_config=level,
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
    )
    running.start()

    def stop() -> Path:
        running.stop()
        traces = sorted(folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))
        if not traces:
            raise UserError(
                f"torch_npu's profiler wrote no trace into {folder}; is the CANN toolkit installed, with msprof? "
                "`ascendchat doctor` looks; or train without --profile"
            )
        return traces[-1]

    return stop
