"""Starts and stops the profilers of torch and torch_npu: `ascendchat base --profile 5`. Nothing is imported before.

stop = trace(folder)     # Device.trace
path = stop()            # the Chrome trace, in `folder`
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from ascendchat.config import UserError


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
        found = sorted(folder.glob("*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json"))
        if not found:
            raise UserError(
                f"torch_npu's profiler wrote no trace into {folder}; is the CANN toolkit installed, with msprof? "
                "`ascendchat doctor` looks; or train without --profile"
            )
        return found[-1]

    return stop
