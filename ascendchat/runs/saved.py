"""Where checkpoints are, as `--run`, `--stage` and `--checkpoint` name them: `ascendchat chat --run d12 --stage sft`.

folder = named_folder(run, stage, checkpoint)     # of a stage, or of one checkpoint
read_ahead(run, stage, checkpoint)                # its checksum, in a thread, while torch is imported
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ascendchat.config import MOST_NAMED, UserError, home, nearest
from ascendchat.config.stages import STAGES
from ascendchat.files import begin_sha256
from ascendchat.runs.run import run_folder

NAME = re.compile(r"step_(\d{6,})")
WEIGHTS = "model.safetensors"


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for path in folder.iterdir() if (m := NAME.fullmatch(path.name)))


def named_folder(run: str, stage: str | None, checkpoint: str) -> Path:
    """The folder that was named; else of the run and stage; else of whatever was written last."""
    if checkpoint:
        return Path(checkpoint)
    run = run or last_run(stage)
    return run_folder(run, stage or last_stage(run))


def last_run(stage: str | None = None) -> str:
    """The run that saved a checkpoint last."""
    saved = sorted((home() / "runs").glob(f"*/{stage or '*'}/latest"), key=lambda path: path.stat().st_mtime)
    saved = [path for path in saved if path.parent.name in STAGES]
    if not saved:
        raise UserError(
            f"no {f'{stage} model' if stage else 'model'} in {home() / 'runs'}; "
            "make one: ascendchat speedrun --recipe tiny-cpu"
        )
    return saved[-1].parent.parent.name


def last_stage(run: str) -> str:
    """The latest stage of a run that has a checkpoint."""
    there = [stage for stage in STAGES if checkpoints(run_folder(run, stage))]
    if not there:
        saved = [path.parent for path in (home() / "runs").glob("*/*/latest")]
        known = sorted({folder.parent.name for folder in saved if folder.name in STAGES})  # not base.old
        if len(known) > MOST_NAMED:
            raise UserError(f"the run {run!r} has no checkpoint; of those that have, {nearest(run, known)}")
        raise UserError(f"the run {run!r} has no checkpoint; runs that have: {', '.join(known) or 'none'}")
    return there[-1]


def read_ahead(run: str, stage: str | None, checkpoint: str) -> None:
    """Begin the checksum of the weights that will be asked for; what is wrong is said by who asks for them."""
    with contextlib.suppress(UserError, OSError, RuntimeError):  # the last: no thread more is allowed
        folder = named_folder(run, stage, checkpoint)
        if not NAME.fullmatch(folder.name) and (steps := checkpoints(folder)):
            folder /= f"step_{steps[-1]:06d}"
        if NAME.fullmatch(folder.name):  # nobody asks for that of a Hugging Face model
            begin_sha256(folder / WEIGHTS)
