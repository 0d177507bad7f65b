"""TensorBoard, SwanLab and W&B, each optional: `--track tensorboard,swanlab,wandb`. The only importer of the three.

Machines of a cluster often have no network. So without a login SwanLab and W&B write into the run folder, and a line
says how to upload later. WANDB_MODE and SWANLAB_MODE are obeyed.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import netrc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from ascendchat.config import as_dict
from ascendchat.errors import UserError, nearest


class _Sink(Protocol):
    """A tracker: receives the metrics besides metrics.jsonl."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def check_track(track: tuple[str, ...]) -> None:
    """Refuse an unknown or missing package before the run starts."""
    for name in track:
        if name not in SINKS:
            raise UserError(f"--track {name} is not known; {nearest(name, list(SINKS))}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--track {name} needs a package that is not installed; type: pip install {name}")


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that can be plotted: numbers, and those inside mappings as outer/inner."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat.update({f"{name}/{inner}": number for inner, number in numbers(value).items()})
        elif isinstance(value, (bool, int, float)):
            flat[str(name)] = float(value)
    return flat


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, run_id: str, config: Any, resume_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"), flush_secs=10)
        # Tells TensorBoard to forget what an earlier session logged from this step on; a first session has none.
        start = 0 if resume_step is None else resume_step + 1
        self._writer.add_event(
            Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START))
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _logged_in(variable: str, file: Path, host: str) -> bool:
    """True if there is an API key in the environment, or a login stored by the package's own tool."""
    if os.environ.get(variable):
        return True
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _WandB:
    """RUN/wandb; one W&B run per run folder, continued on resume."""

    def __init__(self, folder: Path, run_id: str, config: Any, resume_step: int | None) -> None:
        import wandb

        host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
        file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        mode = os.environ.get("WANDB_MODE")
        self.notice = ""
        if not mode:
            mode = "online" if _logged_in("WANDB_API_KEY", file, host) else "offline"
            if mode == "offline":
                logs = folder / "wandb"
                self.notice = f"W&B: no login found, writing to {logs}; upload later: wandb sync {logs}/offline-run-*"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ascendchat"),
            name=os.environ.get("WANDB_NAME") or "-".join(folder.parts[-2:]),
            id=run_id,
            dir=str(folder),
            config=as_dict(config),
            mode=mode,  # type: ignore[arg-type]
            resume="allow" if mode == "online" else None,  # W&B cannot continue what it has not uploaded
            settings=wandb.Settings(console="off"),  # it would copy the progress bar, escape codes and all
        )
        # Our step is the axis: W&B's own refuses to go back, as a resumed run must.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class _SwanLab:
    """RUN/swanlab; one SwanLab run per run folder."""

    def __init__(self, folder: Path, run_id: str, config: Any, resume_step: int | None) -> None:
        import swanlab

        file = Path(os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab") / ".netrc"
        host = urlsplit(os.environ.get("SWANLAB_API_HOST") or "https://api.swanlab.cn").hostname or ""
        mode = os.environ.get("SWANLAB_MODE")
        logs = folder / "swanlab"
        logs.mkdir(exist_ok=True)
        self.notice = ""
        if not mode and not _logged_in("SWANLAB_API_KEY", file, host):
            mode = "offline"
            self.notice = f"SwanLab: no login found, writing to {logs}; upload later: swanlab sync {logs}/run-*"
        # the name of this argument changed between versions
        where = "log_dir" if "log_dir" in inspect.signature(swanlab.init).parameters else "logdir"
        self._swanlab = swanlab
        swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "ascendchat"),
            experiment_name="-".join(folder.parts[-2:]),
            config=as_dict(config),
            mode=mode or None,  # type: ignore[arg-type]
            **{where: str(logs)},  # type: ignore[arg-type]
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._swanlab.log(metrics, step=step)

    def close(self) -> None:
        self._swanlab.finish()


SINKS: dict[str, Callable[[Path, str, Any, int | None], _Sink]] = {
    "tensorboard": TensorBoard,
    "swanlab": _SwanLab,
    "wandb": _WandB,
}


class Sinks:
    """The trackers of one run. One that fails is reported once and dropped: training continues."""

    def __init__(
        self,
        track: tuple[str, ...],
        folder: Path,
        run_id: str,
        config: Any,
        resume_step: int | None,
        say: Callable[[str], None],
    ) -> None:
        check_track(track)
        self._say = say
        self._sinks: dict[str, _Sink] = {}
        for name in dict.fromkeys(track):
            self._try(name, lambda name=name: self._open(name, folder, run_id, config, resume_step))  # type: ignore[misc]

    def _open(self, name: str, folder: Path, run_id: str, config: Any, resume_step: int | None) -> None:
        # SwanLab takes over Ctrl-C; the training loop must keep it, to save a checkpoint first.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            sink = SINKS[name](folder, run_id, config, resume_step)
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)
        if notice := getattr(sink, "notice", ""):
            self._say(notice)
        self._sinks[name] = sink

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 (a tracker's network, quota or bug; reported, then dropped)
            self._sinks.pop(name, None)
            self._say(f"{name} failed and is dropped from this run: {type(error).__name__}: {error}")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        flat = {name: value for name, value in numbers(metrics).items() if not math.isinf(value)}
        for name, sink in list(self._sinks.items()):
            self._try(name, lambda sink=sink: sink.log(step, flat))  # type: ignore[misc]

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)
        self._sinks = {}
