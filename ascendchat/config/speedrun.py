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
    "device for the training stages; by default the best one found"
    devices: int = option(1, also=("npus", "gpus"), least=1, most=1e4)
    "how many devices the training stages use; by default as many as the recipe names"
    fresh: bool = False
    "run every stage again, even those that are done"
