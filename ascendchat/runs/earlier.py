"""Earlier models of a stage, kept beside it while a new run trains: `ascendchat base --run NAME --resume never`.

The folder runs/NAME/base becomes runs/NAME/base.old (base.old.2, ...), whole: checkpoints, tokenizer, metrics. So
`ascendchat chat --checkpoint runs/NAME/base.old` talks to it as it is. It is deleted when the new run has passed its
last step or is finished, never before.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any


def earlier(folder: Path) -> list[Path]:
    """What was set aside for this stage folder, oldest first."""
    form = re.compile(re.escape(folder.name) + r"\.old(?:\.(\d+))?")
    numbered = [(int(m[1] or 1), path) for path in folder.parent.iterdir() if (m := form.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def last_step(folder: Path) -> int:
    """Of the checkpoints in a stage folder; 0 without any."""
    return max((int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdecimal()), default=0)


def set_aside(folder: Path) -> Path | None:
    """Give a stage folder that holds a model another name; None when it holds none. A run that was killed has perhaps
    no `latest` yet."""
    if not last_step(folder):
        return None
    names = itertools.chain([f"{folder.name}.old"], (f"{folder.name}.old.{n}" for n in itertools.count(2)))
    free = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(free)
    return free


def notice(folder: Path) -> str:
    """Where the earlier models are and how to get one back; empty when there are none."""
    models = earlier(folder)
    if not models:
        return ""
    names = ", ".join(str(path) for path in models)
    most = shlex.quote(str(max(models, key=last_step)))  # not a new run that was stopped soon
    here = shlex.quote(str(folder))
    return (
        f"the earlier model is kept in {names} until this run has passed it or is finished; "
        f"to get it back: rm -r {here} && mv {most} {here}"
    )


def this_launch() -> str:
    """Identity of the `ascendchat launch` that started this process; its restarts have the same; empty without one."""
    return os.environ.get("ASCENDCHAT_LAUNCH", "")


def begun_by_this_launch(folder: Path) -> bool:
    """Whether the run in a stage folder was begun by the launch that also started this process."""
    return bool(this_launch()) and read_facts(folder / "run.json").get("launch") == this_launch()


def read_facts(path: Path) -> dict[str, Any]:
    """A run.json; nothing where it is absent, or damaged by hand (it is then written anew)."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
