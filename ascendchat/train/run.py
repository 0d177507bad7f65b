"""Trains a Stage in a run folder; every training command ends here.

with training_context(config) as here:                                  # train/pretrain.py, train/chat.py
    saved = to_continue(run_folder(name, "base"), config.resume)
    return train_stage(stage, here, config, folder, saved, ...)  # the exit status
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ascendchat.checkpoint import Checkpoint
from ascendchat.config.train import StepConfig, TrainConfig
from ascendchat.device import pick
from ascendchat.errors import UserError
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context, joined
from ascendchat.runs.run import open_run, read_metrics, run_folder
from ascendchat.runs.trackers import check_track
from ascendchat.train.loop import Options, fit
from ascendchat.train.stage import Stage

_Config = TypeVar("_Config", bound=TrainConfig)


@contextmanager
def training_context(config: StepConfig, dtype: str | None = None) -> Iterator[Context]:
    """The context of a training command; a chip that is made for inference is refused. `dtype` wins over that of the
    device. A name and trackers that cannot be had are refused before anything is prepared."""
    if isinstance(config, TrainConfig):  # `bench train` has no run
        if config.run:
            run_folder(config.run, "")
        check_track(config.track)
    device = pick(config.device_type, dtype=dtype, compiled=config.compile)
    if not device.chip.trains:
        raise UserError(
            f"{device.chip.name} is an inference product: CANN lists no gradients of embeddings and attention for it; "
            "train on another device (--device-type) or machine, copy the run here, and talk to it: ascendchat chat"
        )
    with joined(device) as here:
        yield here


def with_attend(config: _Config, saved: Checkpoint | None, usual: Literal["row", "document"]) -> _Config:
    """Fill in --attend: as given, else as in the run that resumes (`row` in runs older than the flag), else `usual`,
    the default of the stage."""
    before = saved.settings.get("attend", "row") if saved else usual
    return replace(config, attend=config.attend or before)


def check_same(saved: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other settings; the error names the first that differs."""
    for name, value in identity.items():
        if saved.state.get(name) != value:
            raise UserError(
                f"{saved.folder} was written with {name} {saved.state.get(name)}, this command has {value}; "
                f"give the same settings, another --run NAME, or --resume never"
            )


def unseen(folder: Path, options: Options, last: int, here: Context) -> bool:
    """True if the run was killed after it had saved a checkpoint and before the evaluation that was due: metrics.jsonl,
    which the main process has, holds the loss of that step and nothing more."""
    if not options.start or not any(options.due(options.start, last)[1:]):
        return False
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if here.main and metrics.is_file() else []
    last_rows = [row for row in rows if row["step"] == options.start]
    return bool(collectives.broadcast_object(bool(last_rows) and all("loss" in row for row in last_rows)))


def train_stage(
    stage: Stage,
    here: Context,
    config: TrainConfig,
    folder: Path,
    saved: Checkpoint | None,
    *,
    title: str,
    facts: Mapping[str, Any],
    add_files: Callable[[Path], None],
    benchmark_every: int = 0,
) -> int:
    """Continue from the checkpoint `saved`, or begin; train to the end or a signal; the exit status of the command.

    `facts` go to run.json; `add_files` writes what the model needs beside its weights, on rank 0.
    """
    with closing(stage):
        if saved:
            check_same(saved, stage.identity())
            stage.load(saved)
        options = Options.of(config, saved, benchmark_every)
        options = replace(options, unseen=unseen(folder, options, stage.steps, here))
        if options.start >= stage.steps and not options.unseen:
            here.say(f"{folder} is finished: {options.start} steps; --resume never starts anew")
            return 0
        here.say(stage.summary() + (f"; continuing after step {options.start}" if options.start else ""))
        about = {"chip": here.device.chip.name, "software": here.device.software(), "world": here.world.size, **facts}
        step = options.start or None
        with open_run(folder, config, facts=about, resume_step=step, track=config.track, main=here.main) as record:
            if here.main:
                add_files(folder)
            result = fit(stage, here.device, record, options, title=title)
            if result.stopped_by and result.step < stage.steps:
                record.close("stopped")
    return 128 + result.stopped_by if result.stopped_by else 0
