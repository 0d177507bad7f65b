"""Recipes: YAML files with a list of commands and their settings, in ascendchat/recipes or of your own.

    about: one line that says what it makes
    like: d12-910b-8                   # another recipe, whose keys hold where this one has none
    run: d20                           # name of the run
    chip: Ascend910B3                  # for which it is made: its type of device is used, `--dry-run` plans for it
    devices: 8                         # of the stages that compute; `ascendchat launch` starts them
    settings: {base: {depth: 20}}      # added to the stages of `like`
    stages: [{base: {depth: 12, data: [$HOME/data/prepared]}}]
    model: {model_type: qwen2, ...}    # config.json of a model that is fetched, for plans before that

In values, $HOME is $ASCENDCHAT_HOME, $SETS the folder of `--sets`, and $SHARDS, of `data fetch`, as many files as the
token budget of `base` needs. No torch.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.chips import KINDS, find
from ascendchat.config import accept_all, load_yaml, spelling
from ascendchat.config.train import STAGES, USUAL_DEPTH, USUAL_ROW, BaseConfig
from ascendchat.data.fetch.sources import SETS
from ascendchat.data.mixture import parse_entry
from ascendchat.device.env import count_devices, look
from ascendchat.errors import UserError, home, nearest
from ascendchat.sizes.batch import default_token_budget
from ascendchat.sizes.shape import Shape

# Commands that may be stages, and their configs: those of cli.COMMANDS.
COMMANDS = {
    "doctor": "commands:DoctorConfig",
    "selftest": "commands:SelftestConfig",
    "plan": "commands:PlanConfig",
    "data fetch": "data:DataFetchConfig",
    "data prepare": "data:DataPrepareConfig",
    "data verify": "data:DataVerifyConfig",
    "tokenizer train": "data:TokenizerTrainConfig",
    "tokenizer eval": "data:TokenizerEvalConfig",
    "base": "train:BaseConfig",
    "mid": "train:MidConfig",
    "sft": "train:SftConfig",
    "finetune": "finetune:FinetuneConfig",
    "rl": "rl:RlConfig",
    "export": "generate:ExportConfig",
    "eval base": "generate:EvalBaseConfig",
    "eval chat": "generate:EvalChatConfig",
    "bench train": "train:BenchTrainConfig",
    "bench decode": "generate:BenchDecodeConfig",
    "report": "commands:ReportConfig",
    "serve": "serve:ServeConfig",
    "rollout-server": "rl:RolloutServerConfig",
}
KEYS = ("run", "about", "like", "chip", "devices", "settings", "stages", "model")
SPARE_TEXT = 1.1  # fetched text over the tokens of the run: sizes of shards are rough
Settings = dict[str, Any]
ON_DEVICES = (*STAGES, "finetune", "eval base", "eval chat")  # commands that run on the devices and know --run
USES_DEVICES = (*ON_DEVICES, "serve")  # commands that get the number of devices
SHAPE = ("dim", "head_dim", "kv_heads", "window_pattern")  # settings of `base` that Shape.from_depth takes


@dataclass(frozen=True)
class Recipe:
    """Content of a recipe file, merged with the recipes that it is like."""

    run: str
    stages: tuple[tuple[str, Settings], ...]
    about: str = ""
    chip: str = ""
    devices: int = 1
    model: Settings = field(default_factory=dict)

    def settings_of(self, command: str) -> Settings | None:
        """Settings of the first stage with this command."""
        return next((settings for name, settings in self.stages if name == command), None)

    def shape(self) -> Shape | None:
        """Shape of the model that `base` makes; None where `base` chooses the depth itself."""
        base = self.settings_of("base")
        if base is None or (base.get("minutes") and not base.get("depth")):
            return None
        vocab = (self.settings_of("tokenizer train") or {}).get("vocab_size") or 32768
        given = {name: base[name] for name in SHAPE if base.get(name)}
        seq_len = base.get("max_seq_len") or USUAL_ROW  # or less, with `minutes` on a slow chip
        return Shape.from_depth(base.get("depth") or USUAL_DEPTH, vocab=vocab, seq_len=seq_len, **given)

    def tokens(self) -> int:
        """Token budget of `base`; 0 without such a stage."""
        base, shape = self.settings_of("base"), self.shape()
        if base is None or shape is None:
            return 0
        ratio = base.get("target_param_data_ratio", BaseConfig.target_param_data_ratio)
        return int(base.get("tokens") or default_token_budget(shape, float(ratio)))


def recipe_files() -> dict[str, Path]:
    """The recipes of the package by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Find the file of that path, or the recipe of the package with that name."""
    if Path(name).is_file():
        return Path(name)
    shipped = recipe_files()
    if Path(name).stem in shipped and str(Path(name).parent) in (".", "recipes"):
        return shipped[Path(name).stem]
    raise UserError(f"there is no recipe {name}; give the path of a YAML file, or one of: {', '.join(shipped)}")


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe file, merged with the recipes that it is like."""
    merged = merge_recipes(Path(path), ())
    stages = tuple(fill_shards(parse_stages(path, merged.get("stages"), merged.get("settings"))))
    devices = merged.get("devices", 1)
    if not isinstance(devices, int) or devices < 1:
        raise UserError(f"{path}: devices is a whole number from 1 on, found {devices!r}")
    about, chip = str(merged.get("about") or ""), str(merged.get("chip") or "")
    if any(command in ON_DEVICES for command, _ in stages) and "report" not in dict(stages):
        stages = (*stages, ("report", {}))
    return Recipe(str(merged.get("run") or Path(path).stem), stages, about, chip, devices, merged.get("model") or {})


def merge_recipes(path: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    """Merge the keys of a file over those of the recipe that it is like; settings are merged stage by stage."""
    keys = load_yaml(path)
    unknown = set(keys) - set(KEYS)
    if unknown:
        raise UserError(f"{path}: unknown setting {sorted(unknown)[0]}; a recipe has {', '.join(KEYS)}")
    blocks = {key: keys.get(key) or {} for key in ("settings", "model")}
    blocks |= dict(blocks["settings"]) if isinstance(blocks["settings"], dict) else {}
    for key, block in blocks.items():
        if not isinstance(block or {}, dict):
            raise UserError(f"{path}: {key} holds `name: value` lines, found {block!r}")
    if "like" not in keys:
        return keys
    if path in before:
        raise UserError(f"{path}: recipes are like each other in a circle; leave one `like` out")
    beside = path.parent / str(keys["like"])  # a recipe and what it is like travel together
    other = merge_recipes(beside if beside.is_file() else find_recipe(str(keys["like"])), (*before, path))
    added = dict(other.get("settings") or {})
    for command, settings in (keys.get("settings") or {}).items():
        added[command] = {**(added.get(command) or {}), **(settings or {})}
    return {**other, **keys, "settings": added}


def parse_stages(path: str | Path, listed: Any, added: Any) -> list[tuple[str, Settings]]:
    """Parse the list `stages`, each with the settings that are added to its command; a value of null takes one away."""
    if not isinstance(listed or [], list):
        raise UserError(f"{path}: stages is a list of `- command: {{setting: value}}`, found {listed!r}")
    stages: list[tuple[str, Settings]] = []
    for entry in listed or []:
        if not isinstance(entry, dict) or len(entry) != 1:
            raise UserError(f"{path}: a stage is written `- command: {{setting: value}}`, found {entry!r}")
        ((command, settings),) = entry.items()
        if not isinstance(settings or {}, dict):
            raise UserError(f"{path}: the settings of {command} are written `name: value`, found {settings!r}")
        values = {**(settings or {}), **((added or {}).get(command) or {})}
        stages.append((str(command), check_settings(path, str(command), values)))
    if not stages:
        raise UserError(f"{path} has no stages")
    unused = [name for name in added or {} if name not in dict(stages)]
    if unused:
        raise UserError(f"{path}: settings of {unused[0]}, which is no stage; {nearest(unused[0], list(dict(stages)))}")
    return stages


def check_settings(path: str | Path, command: str, settings: Settings) -> Settings:
    """Convert the settings of a stage to the types of its command. A wrong name or value in the last stage is found
    before the first one starts, not after hours."""
    if command not in COMMANDS:
        raise UserError(f"{path}: {command!r} is no stage; {nearest(command, list(COMMANDS))}")
    module, name = COMMANDS[command].split(":")
    cls = getattr(importlib.import_module(f"ascendchat.config.{module}"), name)
    values = {str(name): value for name, value in settings.items() if value is not None}
    unchecked = {name: value for name, value in values.items() if name == "config" or value == "$SHARDS"}
    converted = accept_all(cls, {k: v for k, v in values.items() if k not in unchecked}, f"{path}: {command}")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in (converted | unchecked).items()}


def fill_shards(stages: list[tuple[str, Settings]]) -> list[tuple[str, Settings]]:
    """Replace $SHARDS by a number: the tokens that `base` takes from a set, divided by those of one file."""
    recipe = Recipe("", tuple(stages))
    base = recipe.settings_of("base") or {}
    entries = [parse_entry(str(entry)) for entry in base.get("data") or []]
    weights = {name: weight or 1.0 for name, weight in entries}
    filled = []
    for command, settings in stages:
        if command == "data fetch" and settings.get("shards") == "$SHARDS":
            name, *others = settings.get("names") or [""]  # each set has files of its own size
            if others or name not in SETS or not SETS[name].tokens:
                listed = ", ".join(name for name, dataset in SETS.items() if dataset.shards and dataset.tokens)
                raise UserError(
                    f"$SHARDS counts the files of one set, found names {settings.get('names')}; of: {listed}"
                )
            prepared = next((s for c, s in stages if c == "data prepare" and name in s.get("source", [])), {})
            share = weights.get(str(prepared.get("out")), 0.0) / sum(weights.values()) if weights else 1.0
            count = math.ceil(SPARE_TEXT * share * recipe.tokens() / (SETS[name].tokens * 1e6))
            settings = {**settings, "shards": count}
        filled.append((command, settings))
    return filled


def expand_folders(text: str, sets: str = "") -> str:
    """Replace $HOME and $SETS in a value by their folders."""
    if "$SETS" in text:
        folder = sets or os.environ.get("ASCENDCHAT_SETS", "")
        if not folder:
            raise UserError("this recipe reads text and sets from a folder; name it: --sets DIR")
        text = text.replace("$SETS", str(Path(folder).expanduser().absolute()))
    return text.replace("$HOME", str(home()))


def flags_of(settings: Settings, sets: str = "") -> list[str]:
    """Write settings as flags, but those that only a YAML file can hold."""
    flags: list[str] = []
    for name, value in settings.items():
        if value is None or isinstance(value, dict):
            continue
        if value is True:
            flags.append(spelling(name))
        elif value is False:
            flags.append(f"--no-{name.replace('_', '-')}")
        elif isinstance(value, list):
            flags += [spelling(name), ",".join(str(item) for item in value)]
        else:
            flags += [spelling(name), str(value)]
    return [expand_folders(flag, sets) for flag in flags]


def select_stages(recipe: Recipe, first: str, only: tuple[str, ...]) -> list[bool]:
    """Flag the stages to run: those from `first` on, or those that are named by command, or by its first word."""
    names = [command for command, _ in recipe.stages]

    def named(word: str) -> list[bool]:
        wanted = word.strip().replace("-", " ").replace("_", " ")
        plain = [name.replace("-", " ") for name in names]
        matches = [name == wanted or name.startswith(f"{wanted} ") for name in plain]
        if not any(matches):
            raise UserError(f"the recipe has no stage {word!r}; {nearest(wanted, list(dict.fromkeys(names)))}")
        return matches

    if first and only:
        raise UserError("--from and --only exclude each other; leave one out")
    if only:
        wanted = [named(word) for word in only]
        return [any(column) for column in zip(*wanted)]
    begin = named(first).index(True) if first else 0
    return [number >= begin for number in range(len(names))]


# The check that this machine has as many devices as a recipe is made for: done before its first stage. No torch.
#
# text = shortage(recipe, wanted, "cuda", here=4)     # "" where there are enough


def devices_here(device_type: str) -> int | None:
    """Number of visible devices of this type; None where there is none, or none that answers: the stages say why."""
    if not look().may_have(device_type):
        return None
    try:
        return count_devices(device_type)
    except UserError:
        return None


def rollout_devices_wanted(recipe: Recipe, wanted: list[bool]) -> int:
    """Number of devices that the wanted stages use for generating only."""
    stages = [settings for (_, settings), runs in zip(recipe.stages, wanted) if runs]
    return max((int(settings.get("rollout_devices") or 0) for settings in stages), default=0)


def devices_wanted(recipe: Recipe, wanted: list[bool]) -> int:
    """Number of devices that the wanted stages use; 0 where none of them computes on devices."""
    computing = any(runs and command in USES_DEVICES for (command, _), runs in zip(recipe.stages, wanted))
    return recipe.devices + rollout_devices_wanted(recipe, wanted) if computing else 0


def shortage(recipe: Recipe, wanted: list[bool], device_type: str, here: int) -> str:
    """The sentence about missing devices and what to do; "" where there are enough."""
    count, apart, kind = (
        devices_wanted(recipe, wanted),
        rollout_devices_wanted(recipe, wanted),
        KINDS[device_type].title,
    )
    if count <= here:
        return ""
    text = f"the recipe is made for {count} x {kind}, and this machine shows {here}"
    if here <= apart:
        return f"{text}; in a recipe of your own, lower devices and rollout_devices"
    if smaller := smaller_recipes(recipe, device_type, here):
        return f"{text}; give --devices {here - apart}, or take a recipe for fewer: {smaller[0]}"
    return f"{text}; give --devices {here - apart}"


def smaller_recipes(recipe: Recipe, device_type: str, here: int) -> list[str]:
    """List the recipes of the package from text to a chat model, as this one is, for at most so many devices;
    largest first."""
    if recipe.settings_of("base") is None:
        return []
    recipes = {name: read_recipe(path) for name, path in recipe_files().items()}
    fitting = [
        name
        for name, other in recipes.items()
        if other.settings_of("base") is not None
        and other.chip
        and find(other.chip).device_type == device_type
        and other.devices <= here
    ]
    return sorted(fitting, key=lambda name: -recipes[name].devices)
