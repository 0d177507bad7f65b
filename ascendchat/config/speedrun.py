"""Config of `ascendchat speedrun`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config import option


@dataclass(frozen=True)
class SpeedrunConfig:
    """Run every stage of a recipe in order, from text to a chat model; finished stages are skipped."""

    recipe: str = option("tiny-cpu", words="each")
    "name of a recipe of the package, or a YAML file with stages of your own"
    run: str = ""
    "name of the run; by default that of the recipe"
    device_type: Literal["npu", "cuda", "mps", "cpu"] | None = None
    "device for the stages that compute; by default that of the recipe's chip, else the best one found"
    devices: int | None = option(None, also=("npus", "gpus"), least=1, most=1e4)
    "how many devices these stages use; by default as many as the recipe names"
    sets: str = ""
    "folder of text and sets that the recipe calls $SETS; by default $ASCENDCHAT_SETS"
    from_stage: str = option("", also=("from",))
    "begin at this stage, such as mid or eval: those before it are taken as they are"
    only: tuple[str, ...] = ()
    "run these stages only, such as base,mid"
    fresh: bool = False
    "run the stages again, even those that are done"
    serve: bool = False
    "afterwards serve the page and the API of the model, until Ctrl-C"
    dry_run: bool = False
    "show time, memory, disk and downloads of each stage, and end"
