"""`ascendchat speedrun --recipe tiny-cpu`: every stage of a recipe, in order, from text to a chat model.

A stage is skipped when it was finished with the same settings, the same contents of its files and after the same
stages, and its result is still there. An interrupted stage continues, because every command does. A training stage with
other settings starts anew. Each stage is a command you could type yourself, and it is shown.

recipe.py reads recipes, recipe.py compares them with this machine, ledger.py knows what is done, screen.py shows where
the run is, forecast.py is `--dry-run`, screen.py the table at the end. No torch.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ascendchat.chips import find
from ascendchat.config.commands import SpeedrunConfig
from ascendchat.config.serve import ServeConfig
from ascendchat.config.train import STAGES
from ascendchat.data.fetch import folder_of
from ascendchat.data.mixture import parse_entry
from ascendchat.errors import UserError
from ascendchat.files import write_atomic
from ascendchat.processes import is_free
from ascendchat.runs.run import run_folder
from ascendchat.speedrun.ledger import Ledger, alone
from ascendchat.speedrun.recipe import (
    ON_DEVICES,
    Recipe,
    Settings,
    arguments,
    chosen,
    devices_here,
    devices_wanted,
    find_recipe,
    place,
    read_recipe,
    shortage,
)
from ascendchat.speedrun.screen import Screen, summary

ENDLESS = ("serve", "rollout-server")  # they run until they are stopped, and are never done
DEFAULT_OUTPUT = {"tokenizer train": "$HOME/tokenizer", "data prepare": "$HOME/data/prepared"}
RESUMED = "continues where it was"


def trained(command: str) -> str:
    """The stage of a run that a command trains; "" of another."""
    return {"finetune": "hf"}.get(command, command if command in STAGES else "")


def stage_command(command: str, settings: Settings, recipe: Recipe, config: SpeedrunConfig) -> list[str]:
    """What is typed for a stage. Settings that only a file can hold stand in one of the run."""
    words = [*command.split(), *arguments(settings, config.sets)]
    if any(isinstance(value, dict) for value in settings.values()):
        words += ["--config", str(settings_file(recipe, command))]
    device_type = ["--device-type", config.device_type] if config.device_type else []
    if command == "report":
        return [*words, "--run", recipe.run]
    if command == "serve":
        return [*words, *device_type, *(["--devices", str(recipe.devices)] if recipe.devices > 1 else [])]
    if command not in ON_DEVICES:
        return words
    words += ["--run", recipe.run, *device_type]
    return ["launch", "--devices", str(recipe.devices), *words] if recipe.devices > 1 else words


def settings_file(recipe: Recipe, command: str) -> Path:
    return run_folder(recipe.run, f"{command.replace(' ', '-')}-settings.yaml")


def write_settings(recipe: Recipe, command: str, settings: Settings) -> None:
    """The file for settings that no flag can give, if there are any."""
    if blocks := {name: value for name, value in settings.items() if isinstance(value, dict)}:
        path = settings_file(recipe, command)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(blocks))  # JSON is YAML


def outputs_of(command: str, settings: Settings, recipe: Recipe, sets: str = "") -> list[Path]:
    """The files or folders that a finished stage leaves behind; none where that is its printed result."""
    if stage := trained(command):
        return [run_folder(recipe.run, stage) / "latest"]
    if command == "report":
        return [Path(place(str(settings.get("out") or run_folder(recipe.run, "report.html")), sets))]
    if command == "data fetch" and not settings.get("out"):
        return [folder_of(str(name)) for name in settings.get("names") or []]
    made = settings.get("out") or DEFAULT_OUTPUT.get(command)
    return [Path(place(str(made), sets))] if made else []


def inputs_of(settings: Settings, made: list[Path], sets: str) -> list[Path]:
    """Files and folders that a stage reads, but those that it or a stage before it has made."""
    values = [word for word in arguments(settings, sets) if not word.startswith("--")]
    parts = [os.path.expanduser(part) for word in values for part in word.replace("=", ",").split(",") if part]
    paths = [Path(path) for part in parts for path in (sorted(glob.glob(part)) if "*" in part else [part])]
    return [path for path in paths if path not in made and path.exists()]


def identities(recipe: Recipe, config: SpeedrunConfig, ledger: Ledger, upto: int, known: list[str]) -> list[str]:
    """Those of the stages up to and with number `upto`, after the `known` ones of the first."""
    found = list(known)
    made: list[Path] = []
    for number, (command, settings) in enumerate(recipe.stages[: upto + 1]):
        made += outputs_of(command, settings, recipe, config.sets)
        if number >= len(known):
            words = stage_command(command, settings, recipe, config)
            words += [f"{name}: {value}" for name, value in settings.items() if isinstance(value, dict)]
            inputs = inputs_of(settings, made, config.sets)
            found.append(ledger.identity(found[-1] if found else "", words, inputs))
    return found


def run(config: SpeedrunConfig) -> int:
    """The command."""
    recipe = read_recipe(find_recipe(config.recipe))
    recipe = replace(recipe, run=config.run or recipe.run, devices=config.devices or recipe.devices)
    if recipe.chip and not config.device_type:
        config = replace(config, device_type=find(recipe.chip).device_type)
    wanted = chosen(recipe, config.from_stage, config.only)
    log = run_folder(recipe.run, "speedrun.log")  # refuses a wrong name
    if config.serve and not any(trained(command) for command, _ in recipe.stages):
        raise UserError(f"--serve: the recipe {config.recipe} trains no model; leave it out")
    if config.serve and not config.dry_run and not is_free(ServeConfig.port, ServeConfig.host):
        later = f"ascendchat serve --run {recipe.run} --port {ServeConfig.port + 1}"
        raise UserError(f"--serve: port {ServeConfig.port} is in use; leave --serve out, and afterwards: {later}")
    from ascendchat.speedrun.forecast import expected_seconds, show_forecast

    missing = ""
    if config.device_type and not config.devices and devices_wanted(recipe, wanted) > 1:
        here = devices_here(config.device_type)  # None: not a machine of this kind, which the stages say themselves
        missing = shortage(recipe, wanted, config.device_type, here) if here else ""
    if config.dry_run:  # also of a recipe for another machine
        return show_forecast(recipe, wanted, config.sets, missing)
    if missing:
        raise UserError(missing)
    check_sets(recipe, wanted, config.sets)
    names = [command for command, _ in recipe.stages]
    started = time.monotonic()
    with alone(recipe.run):
        ledger = Ledger.open(recipe.run, fresh=config.fresh)
        with Screen(recipe.run, names, log, expected_seconds(recipe, config.sets)) as screen:
            status = run_stages(recipe, wanted, config, ledger, screen)
    if status:
        stopped = status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        print(f"{'stopped;' if stopped else 'mend it and'} run the same command: it {RESUMED}", flush=True)
        return status
    ended = sum(state in ("done", "skipped") for state in screen.states)
    count = f"all {ended}" if ended == len(names) else f"{ended} of {len(names)}"
    if model := has_model(recipe.run):
        print(f"\n{summary(recipe.run)}")
    print(f"{count} stages done, {time.monotonic() - started:.0f} s in this session")
    if model:
        if "report" in names and outputs_of("report", {}, recipe)[0].is_file():
            print(f"Report: {outputs_of('report', {}, recipe)[0]}")
        print(f"Talk to it: ascendchat chat --run {recipe.run}")
        if config.serve:
            return run_command(stage_command("serve", {"run": recipe.run}, recipe, config))
        print(f"In a browser: ascendchat serve --run {recipe.run}, then open http://127.0.0.1:{ServeConfig.port}")
    elif config.serve:
        print("nothing is served: no stage that was run trains a model")
    return 0


def has_model(run: str) -> bool:
    """Whether a stage of the run has been trained."""
    return any((run_folder(run, stage) / "latest").is_file() for stage in STAGES)


def check_sets(recipe: Recipe, wanted: list[bool], sets: str) -> None:
    """Every file of $SETS that a stage will read is there: said before the first stage, not hours later."""
    made: list[Path] = []
    for (command, settings), runs in zip(recipe.stages, wanted):
        made += outputs_of(command, settings, recipe, sets) if runs else []
        values = [item for value in settings.values() for item in (value if isinstance(value, list) else [value])]
        for value in (text for text in values if runs and isinstance(text, str) and "$SETS" in text):
            path = parse_entry(place(value, sets)).name
            if Path(path) not in made and not os.path.exists(path) and not glob.glob(path):
                raise UserError(f"{command} reads {path}, which is not there; name the folder that has it: --sets DIR")


def run_stages(recipe: Recipe, wanted: list[bool], config: SpeedrunConfig, ledger: Ledger, screen: Screen) -> int:
    """Those that are wanted and not done; the status of the first that fails."""
    done: list[str] = []
    for number, (command, settings) in enumerate(recipe.stages):
        shown = f"[{number + 1}/{len(recipe.stages)}]"
        done = identities(recipe, config, ledger, number, done)
        identity = done[-1]
        if not wanted[number]:
            screen.end(number, "left out")
            continue
        if command == "report" and importlib.util.find_spec("matplotlib") is None:
            screen.say(f"{shown} no report: pip install matplotlib, then ascendchat report --run {recipe.run}")
            screen.end(number, "left out")
            continue
        words = stage_command(command, settings, recipe, config)
        if config.fresh:
            ledger.forget(identity)
        known = identity in ledger.known
        old = ledger.known[identity].get("old", -1) if known else last_saved(recipe.run, command)
        if trained(command) and old == last_saved(recipe.run, command):
            words += ["--resume", "never"]  # what lies in the run folder comes from other settings
        heading = f"{shown} ascendchat {shlex.join(words)}"
        gone = [path for path in outputs_of(command, settings, recipe, config.sets) if not path.exists()]
        before = ledger.seconds(identity)
        if before is not None and gone:
            screen.say(f"{shown} {gone[0]} is gone: this stage runs again")
        elif before is not None:
            screen.say(f"{heading}\n      done before, in {before:.0f} s: skipped")
            screen.end(number, "skipped", before)
            continue
        screen.begin(number, heading)
        begun = time.monotonic()
        write_settings(recipe, command, settings)
        ledger.begin(identity, words, old, done)
        status = run_command(words, screen)
        if status:
            screen.say(f"stage {number + 1} ended with status {status}")
            screen.end(number, "failed")
            return status
        if command not in ENDLESS:
            ledger.done(identity, words, time.monotonic() - begun)
        screen.end(number, "done", time.monotonic() - begun)
    return 0


def last_saved(run: str, command: str) -> int:
    """When the last checkpoint of a stage was written; 0 without any."""
    latest = run_folder(run, trained(command) or "none") / "latest"
    return latest.stat().st_mtime_ns if latest.is_file() else 0


def run_command(words: list[str], screen: Screen | None = None) -> int:
    """Run one command to its end. Ctrl-C reaches it from the terminal and SIGTERM is passed on: it saves, then ends.
    On a live screen its lines go there, else it prints for itself."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    piped = screen is not None and screen.live
    if piped:
        environment["PYTHONIOENCODING"] = "utf-8:replace"  # read as such below, whatever the terminal's own is (GBK)
    child: subprocess.Popen[str] | None = None
    early: list[int] = []  # signals that came while there was no child

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif number == signal.SIGTERM:
            child.terminate()

    # Before there is a child: a signal right behind its start would end this process alone. Handlers, unlike SIG_IGN,
    # are not inherited.
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "ascendchat", *words],
            env=environment,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            text=True,
            encoding="utf-8",
            errors="replace",
            close_fds=False,  # a stage keeps the lock of `alone` when this process is killed
        )
        for number in early:
            child.send_signal(number)
        if piped and child.stdout is not None and screen is not None:
            for line in child.stdout:
                screen.take(line)
        status = child.wait()
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    return status if status >= 0 else 128 - status
