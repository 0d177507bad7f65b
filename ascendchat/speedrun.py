"""`ascendchat speedrun --recipe tiny-cpu`: every stage of a recipe, in order, from text to a chat model.

A recipe is a YAML file with a `run` name and a list of `stages`; each stage is one command with its settings. The
recipes of the package are in ascendchat/recipes. A stage is skipped when it was finished with the same settings, the
same files and after the same stages, and its result is still there. An interrupted stage continues, because every
command does. A training stage with other settings starts anew. Each stage is a command you could type yourself, and
it is shown. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascendchat import __version__
from ascendchat.config import UserError, home, load_yaml, spelling
from ascendchat.config.speedrun import SpeedrunConfig
from ascendchat.config.stages import STAGES
from ascendchat.eval.stages import stage_table, table_lines
from ascendchat.files import write_atomic
from ascendchat.record import read_metrics, run_folder
from ascendchat.record.earlier import read_facts

ON_DEVICES = (*STAGES, "finetune", "eval base", "eval chat")  # commands that run on the devices and know --run
REWARD_OF = "reward_of_"  # before the name of a task, in metrics of RL
RESUMED = "continues where it was"


def find_recipe(name: str) -> Path:
    """The file of that path, or the recipe of the package with that name."""
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}
    if Path(name).stem in shipped and str(Path(name).parent) in (".", "recipes"):
        return shipped[Path(name).stem]
    raise UserError(f"there is no recipe {name}; give the path of a YAML file, or one of: {', '.join(shipped)}")


def read_recipe(path: str | Path) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Run name and stages of a recipe file."""
    recipe = load_yaml(path)
    unknown = set(recipe) - {"run", "about", "devices", "stages", "next"}
    if unknown:
        raise UserError(
            f"{path}: unknown setting {sorted(unknown)[0]}; a recipe has run, about, devices, stages and next"
        )
    stages: list[tuple[str, dict[str, Any]]] = []
    listed = recipe.get("stages") or []
    if not isinstance(listed, list):
        raise UserError(f"{path}: stages is a list of `- command: {{setting: value}}`, found {listed!r}")
    for entry in listed:
        if not isinstance(entry, dict) or len(entry) != 1:
            raise UserError(f"{path}: a stage is written `- command: {{setting: value}}`, found {entry!r}")
        ((command, settings),) = entry.items()
        if not isinstance(settings or {}, dict):
            raise UserError(f"{path}: the settings of {command} are written `name: value`, found {settings!r}")
        stages.append((str(command), {str(name): value for name, value in (settings or {}).items()}))
    if not stages:
        raise UserError(f"{path} has no stages")
    return str(recipe.get("run") or Path(path).stem), stages


def devices_of(path: str | Path, asked: int) -> int:
    """On how many devices training stages run: as the flag says, else as the recipe says."""
    count = load_yaml(path).get("devices", 1)
    if not isinstance(count, int) or count < 1:
        raise UserError(f"{path}: devices is a whole number from 1 on, found {count!r}")
    return asked if asked > 1 else count


def arguments(settings: dict[str, Any]) -> list[str]:
    """Settings as flags. `$HOME` inside a value is $ASCENDCHAT_HOME."""
    flags: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        if value is True:
            flags.append(spelling(name))
        elif value is False:
            flags.append(f"--no-{name.replace('_', '-')}")
        elif isinstance(value, list):
            flags += [spelling(name), ",".join(str(item) for item in value)]
        else:
            flags += [spelling(name), str(value)]
    return [flag.replace("$HOME", str(home())) for flag in flags]


def stage_command(command: str, settings: dict[str, Any], run: str, config: SpeedrunConfig) -> list[str]:
    """What is typed for a stage."""
    words = [*command.split(), *arguments(settings)]
    if command not in ON_DEVICES:
        return words
    words += ["--run", run]
    if config.device_type:
        words += ["--device-type", config.device_type]
    if config.devices > 1:
        return ["launch", "--devices", str(config.devices), *words]
    return words


def stamp(before: str, words: list[str]) -> str:
    """Identity of a stage: its command, the files that it names, all stages before it, the version of the program."""
    named = [Path(part) for word in words for part in word.replace("=", ",").split(",")]
    files = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in named if path.is_file()]
    return hashlib.sha256("\0".join([before, __version__, *words, *files]).encode()).hexdigest()[:16]


def stage_identities(stages: list[tuple[str, dict[str, Any]]], run: str, config: SpeedrunConfig) -> list[str]:
    """The identity of every stage, with the files that it names as they are now."""
    stamps = [""]
    for command, settings in stages:
        stamps.append(stamp(stamps[-1], stage_command(command, settings, run, config)))
    return stamps[1:]


def run(config: SpeedrunConfig) -> int:
    """The command."""
    recipe = find_recipe(config.recipe)
    name, stages = read_recipe(recipe)
    name, config = config.run or name, replace(config, devices=devices_of(recipe, config.devices))
    ledger = run_folder(name, "speedrun.json")
    known: dict[str, Any] = {} if config.fresh else read_facts(ledger)
    if ledger.is_file() and not config.fresh and not known:
        raise UserError(f"{ledger} is damaged: nobody knows which stages are done; --fresh runs all of them again")
    started, before = time.monotonic(), ""
    for number, (command, settings) in enumerate(stages, 1):
        words = stage_command(command, settings, name, config)
        identity = stamp(before, words)
        old = known[identity].get("old", -1) if identity in known else last_saved(name, command)
        if command in STAGES and old == last_saved(name, command):
            words += ["--resume", "never"]  # what lies in the run folder comes from other settings
        heading = f"[{number}/{len(stages)}] ascendchat {' '.join(words)}"
        before = identity
        made = output_of(command, settings, name)
        if "seconds" in known.get(identity, {}) and made is not None and not made.exists():
            print(f"[{number}/{len(stages)}] {made} is gone: this stage runs again", flush=True)
            del known[identity]["seconds"]
        if "seconds" in known.get(identity, {}):
            print(f"{heading}\n      done before, in {known[identity]['seconds']:.0f} s: skipped", flush=True)
            continue
        print(heading, flush=True)
        begun = time.monotonic()
        current = stage_identities(stages, name, config)  # what other settings left is overwritten now
        known = {stage: known[stage] for stage in current if stage in known}
        note(ledger, known, identity, {"command": " ".join(words), "old": old})
        status = run_command(words)
        if status:
            print(
                f"stage {number} ended with status {status}; mend it and run the same command: it {RESUMED}", flush=True
            )
            return status
        note(ledger, known, identity, {"command": " ".join(words), "seconds": time.monotonic() - begun})
    print(f"\n{summary(name)}\nall {len(stages)} stages done, {time.monotonic() - started:.0f} s in this session")
    print(f"Talk to it: ascendchat chat --run {name}")
    print(f"In a browser: ascendchat serve --run {name}, then open http://127.0.0.1:8000")
    return 0


def output_of(command: str, settings: dict[str, Any], run: str) -> Path | None:
    """The file or folder that a finished stage leaves behind; None where that is its printed result."""
    if command in STAGES:
        return run_folder(run, command) / "latest"
    defaults = {"tokenizer train": "$HOME/tokenizer", "data prepare": "$HOME/data/prepared"}
    made = settings.get("out") or defaults.get(command)
    return Path(str(made).replace("$HOME", str(home()))) if made else None


def last_saved(run: str, stage: str) -> int:
    """When the last checkpoint of a stage was written; 0 without any."""
    latest = run_folder(run, stage) / "latest"
    return latest.stat().st_mtime_ns if latest.is_file() else 0


def run_command(words: list[str]) -> int:
    """Run one command to its end. Ctrl-C reaches it from the terminal and SIGTERM is passed on: it saves, then ends."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen([sys.executable, "-m", "ascendchat", *words], env=environment)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
    }
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def note(ledger: Path, known: dict[str, Any], identity: str, entry: dict[str, Any]) -> None:
    """Write down that a stage has begun, or, with its `seconds`, that it is done."""
    known[identity] = entry
    ledger.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(ledger, json.dumps(known, indent=1))


def summary(run: str) -> str:
    """One line per trained stage: steps, last loss, last validation; of RL, whose loss says nothing, the reward. Then
    what each stage scored in examinations."""
    lines = [f"{'stage':<8} {'steps':>7} {'train loss':>11}  validation"]
    for stage in STAGES:
        path = run_folder(run, stage) / "metrics.jsonl"
        if not path.is_file():
            continue
        rows = read_metrics(path)
        losses = [row["loss"] for row in rows if "loss" in row]
        rewards = [row["reward"] for row in rows if "reward" in row]
        scores = [{k: v for k, v in row.items() if k.startswith(("bpb", "val", "accuracy"))} for row in rows]
        last: dict[str, Any] = next((score for score in reversed(scores) if score), {})
        shown = [f"{name} {value:.4f}" for name, value in last.items()]
        if rewards:
            shown.insert(0, f"reward {rise(rewards)}{by_task(rows)}")
        loss = "-" if rewards else f"{mean(losses[-20:]):.4f}"
        lines.append(f"{stage:<8} {rows[-1]['step'] if rows else 0:>7} {loss:>11}  {', '.join(shown)}")
    examined = stage_table(run)
    return "\n".join([*lines, *(["", *table_lines(examined)] if examined else [])])


def by_task(rows: Sequence[dict[str, Any]]) -> str:
    """How the reward of each task rose, in brackets; nothing where RL had one only."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(REWARD_OF))
    shown = [f"{name.removeprefix(REWARD_OF)} {rise([row[name] for row in rows if name in row])}" for name in names]
    return f" ({', '.join(shown)})" if shown else ""


def rise(values: Sequence[float]) -> str:
    """From the first ten steps to the last ten."""
    return f"{mean(values[:10]):.4f} -> {mean(values[-10:]):.4f}"


def mean(values: Sequence[float]) -> float:
    """Not a number without any."""
    return sum(values) / len(values) if values else float("nan")
