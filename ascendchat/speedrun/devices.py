"""Whether this machine has as many devices as a recipe is made for: said before its first stage. No torch.

text = shortage(recipe, wanted, "cuda", here=4)     # "" where there are enough
"""

from __future__ import annotations

from ascendchat.chips import KINDS, find
from ascendchat.config import UserError
from ascendchat.device.env import look
from ascendchat.launch.command import count_devices
from ascendchat.speedrun.recipe import USES_DEVICES, Recipe, read_recipe, recipe_files


def devices_here(device_type: str) -> int | None:
    """Visible devices of this type; None where there is none, or none that answers: the stages say why."""
    if not look().may_have(device_type):
        return None
    try:
        return count_devices(device_type)
    except UserError:
        return None


def for_rollouts(recipe: Recipe, wanted: list[bool]) -> int:
    """Devices that the wanted stages use for generating only."""
    stages = [settings for (_, settings), runs in zip(recipe.stages, wanted) if runs]
    return max((int(settings.get("rollout_devices") or 0) for settings in stages), default=0)


def devices_wanted(recipe: Recipe, wanted: list[bool]) -> int:
    """By the wanted stages; 0 where none of them computes on devices."""
    computing = any(runs and command in USES_DEVICES for (command, _), runs in zip(recipe.stages, wanted))
    return recipe.devices + for_rollouts(recipe, wanted) if computing else 0


def shortage(recipe: Recipe, wanted: list[bool], device_type: str, here: int) -> str:
    """What is missing and what to do, in one sentence; "" where nothing is."""
    count, apart, kind = devices_wanted(recipe, wanted), for_rollouts(recipe, wanted), KINDS[device_type].title
    if count <= here:
        return ""
    found = f"the recipe is made for {count} x {kind}, and this machine shows {here}"
    if here <= apart:
        return f"{found}; in a recipe of your own, lower devices and rollout_devices"
    if smaller := smaller_recipes(recipe, device_type, here):
        return f"{found}; give --devices {here - apart}, or take a recipe for fewer: {smaller[0]}"
    return f"{found}; give --devices {here - apart}"


def smaller_recipes(recipe: Recipe, device_type: str, here: int) -> list[str]:
    """Recipes of the package from text to a chat model, as this one is, for that many devices or fewer; those that use
    most of them first."""
    if recipe.settings_of("base") is None:
        return []
    known = {name: read_recipe(path) for name, path in recipe_files().items()}
    fitting = [
        name
        for name, other in known.items()
        if other.settings_of("base") is not None
        and other.chip
        and find(other.chip).device_type == device_type
        and other.devices <= here
    ]
    return sorted(fitting, key=lambda name: -known[name].devices)
