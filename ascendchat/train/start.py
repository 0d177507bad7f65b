"""The checkpoint that `ascendchat mid` and `ascendchat sft` start from: `--start RUN` or `--start FOLDER`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ascendchat.checkpoint import Checkpoint, Damaged, newest, verify
from ascendchat.config import UserError, home
from ascendchat.config.stages import STAGES, StageName
from ascendchat.config.train import ChatTrainConfig
from ascendchat.models.folder import Folder, refuse_ours
from ascendchat.nn.optim import Shard
from ascendchat.runs.run import run_folder


def starting_point(config: ChatTrainConfig, stage: StageName, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to start from: a folder, a run (its last earlier stage), or this run's own earlier stage."""
    named = config.start
    if named and (Path(named) / "config.json").is_file():
        refuse_ours(Folder(Path(named)))
        raise UserError(
            f"{named} is a Hugging Face model, which `ascendchat {stage}` does not train; finetune and rl do"
        )
    if named and Path(named).is_dir():
        folders = [Path(named)]
    else:
        runs = [named or config.run] if named or config.run else _runs()
        folders = [run_folder(run, earlier) for run in runs for earlier in STAGES[stage].starts_from]
    for folder in folders:
        if (folder / "manifest.json").is_file():
            try:
                return verify(folder)
            except Damaged as damage:
                raise UserError(f"{damage}; name another checkpoint with --start") from None
        found = newest(folder, say=say)
        if found is not None:
            return found
    tried = ", ".join(str(folder) for folder in folders) or str(home() / "runs")
    raise UserError(f"no checkpoint to start from in {tried}; train one first: `ascendchat base --run NAME`")


def _runs() -> list[str]:
    """Runs with a base model, the newest first."""
    saved = (home() / "runs").glob("*/base/latest")
    return [path.parent.parent.name for path in sorted(saved, key=lambda path: -path.stat().st_mtime)]


def only_weights(read: Callable[[Shard], Tensor]) -> Callable[[Shard], Tensor]:
    """Weights from the checkpoint, moments from zero."""
    return lambda shard: read(shard) if shard.kind == "weight" else torch.zeros(shard.stop - shard.start)
