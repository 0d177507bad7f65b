"""Run every stage of a recipe, in order, from text to a chat model: `ascendchat speedrun --recipe tiny-cpu`.

A stage is skipped when it was finished with the same settings, the same contents of its files and after the same
stages, and its result is still there. An interrupted stage continues, because every command does. A training stage with
other settings starts anew. Each stage is a command you could type yourself, and it is shown.

recipe.py reads recipes and compares them with this machine, stage_cache.py records finished stages, progress_view.py
shows the progress and the table at the end, estimate.py is `--dry-run`. No torch.
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
from ascendchat.speedrun.progress_view import ProgressView, summary
from ascendchat.speedrun.recipe import (
    ON_DEVICES,
    Recipe,
    Settings,
    devices_here,
    devices_wanted,
    expand_folders,
    find_recipe,
    flags_of,
    read_recipe,
    select_stages,
    shortage,
)
from ascendchat.speedrun.stage_cache import StageCache, lock_run

ENDLESS = ("serve", "rollout-server")  # run until they are stopped, and are never done
DEFAULT_OUTPUT = {"tokenizer train": "$HOME/tokenizer", "data prepare": "$HOME/data/prepared"}
RESUMED = "continues where it was"


def trained_stage(command: str) -> str:
    """The stage of a run that a command trains; "" of another."""
    return {"finetune": "hf"}.get(command, command if command in STAGES else "")


def stage_command(command: str, settings: Settings, recipe: Recipe, config: SpeedrunConfig) -> list[str]:
    """The command line of a stage. Settings that only a file can hold go into one of the run."""
    words = [*command.split(), *flags_of(settings, config.sets)]
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
    """Write the file for settings that no flag can give, if there are any."""
    if blocks := {name: value for name, value in settings.items() if isinstance(value, dict)}:
        path = settings_file(recipe, command)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(blocks))  # JSON is YAML


def outputs_of(command: str, settings: Settings, recipe: Recipe, sets: str = "") -> list[Path]:
    """List the files or folders that a finished stage leaves; none where its result is printed."""
    if stage := trained_stage(command):
        return [run_folder(recipe.run, stage) / "latest"]
    if command == "report":
        return [Path(expand_folders(str(settings.get("out") or run_folder(recipe.run, "report.html")), sets))]
    if command == "data fetch" and not settings.get("out"):
        return [folder_of(str(name)) for name in settings.get("names") or []]
    out = settings.get("out") or DEFAULT_OUTPUT.get(command)
    return [Path(expand_folders(str(out), sets))] if out else []


def inputs_of(settings: Settings, outputs: list[Path], sets: str) -> list[Path]:
    """List the files and folders that a stage reads, but those that it or an earlier stage has made."""
    values = [word for word in flags_of(settings, sets) if not word.startswith("--")]
    parts = [os.path.expanduser(part) for word in values for part in word.replace("=", ",").split(",") if part]
    paths = [Path(path) for part in parts for path in (sorted(glob.glob(part)) if "*" in part else [part])]
    return [path for path in paths if path not in outputs and path.exists()]


def identities(recipe: Recipe, config: SpeedrunConfig, cache: StageCache, upto: int, first: list[str]) -> list[str]:
    """Identities of the stages up to number `upto`; those of the first ones may be `known`."""
    identities = list(first)
    outputs: list[Path] = []
    for number, (command, settings) in enumerate(recipe.stages[: upto + 1]):
        outputs += outputs_of(command, settings, recipe, config.sets)
        if number >= len(first):
            words = stage_command(command, settings, recipe, config)
            words += [f"{name}: {value}" for name, value in settings.items() if isinstance(value, dict)]
            inputs = inputs_of(settings, outputs, config.sets)
            identities.append(cache.identity(identities[-1] if identities else "", words, inputs))
    return identities


def run(config: SpeedrunConfig) -> int:
    """Run `ascendchat speedrun`."""
    recipe = read_recipe(find_recipe(config.recipe))
    recipe = replace(recipe, run=config.run or recipe.run, devices=config.devices or recipe.devices)
    if recipe.chip and not config.device_type:
        config = replace(config, device_type=find(recipe.chip).device_type)
    wanted = select_stages(recipe, config.from_stage, config.only)
    log = run_folder(recipe.run, "speedrun.log")  # refuses a wrong name
    if config.serve and not any(trained_stage(command) for command, _ in recipe.stages):
        raise UserError(f"--serve: the recipe {config.recipe} trains no model; leave it out")
    if config.serve and not config.dry_run and not is_free(ServeConfig.port, ServeConfig.host):
        later = f"ascendchat serve --run {recipe.run} --port {ServeConfig.port + 1}"
        raise UserError(f"--serve: port {ServeConfig.port} is in use; leave --serve out, and afterwards: {later}")
    from ascendchat.speedrun.estimate import expected_seconds, show_estimate

    missing = ""
    if config.device_type and not config.devices and devices_wanted(recipe, wanted) > 1:
        here = devices_here(config.device_type)  # None: not a machine of this kind, which the stages say themselves
        missing = shortage(recipe, wanted, config.device_type, here) if here else ""
    if config.dry_run:  # also of a recipe for another machine
        return show_estimate(recipe, wanted, config.sets, missing)
    if missing:
        raise UserError(missing)
    check_sets(recipe, wanted, config.sets)
    names = [command for command, _ in recipe.stages]
    started = time.monotonic()
    with lock_run(recipe.run):
        cache = StageCache.open(recipe.run, fresh=config.fresh)
        with ProgressView(recipe.run, names, log, expected_seconds(recipe, config.sets)) as view:
            status = run_stages(recipe, wanted, config, cache, view)
    if status:
        stopped = status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
        print(f"{'stopped;' if stopped else 'mend it and'} run the same command: it {RESUMED}", flush=True)
        return status
    finished = sum(state in ("done", "skipped") for state in view.states)
    count = f"all {finished}" if finished == len(names) else f"{finished} of {len(names)}"
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
    """True if a stage of the run has been trained."""
    return any((run_folder(run, stage) / "latest").is_file() for stage in STAGES)


def check_sets(recipe: Recipe, wanted: list[bool], sets: str) -> None:
    """Check that every file of $SETS that a stage will read is there: said before the first stage, not hours later."""
    outputs: list[Path] = []
    for (command, settings), runs in zip(recipe.stages, wanted):
        outputs += outputs_of(command, settings, recipe, sets) if runs else []
        values = [item for value in settings.values() for item in (value if isinstance(value, list) else [value])]
        for value in (text for text in values if runs and isinstance(text, str) and "$SETS" in text):
            path = parse_entry(expand_folders(value, sets)).name
            if Path(path) not in outputs and not os.path.exists(path) and not glob.glob(path):
                raise UserError(f"{command} reads {path}, which is not there; name the folder that has it: --sets DIR")


def run_stages(
    recipe: Recipe, wanted: list[bool], config: SpeedrunConfig, cache: StageCache, view: ProgressView
) -> int:
    """Run the wanted stages that are not done; returns the status of the first that fails."""
    identities_so_far: list[str] = []
    for number, (command, settings) in enumerate(recipe.stages):
        shown = f"[{number + 1}/{len(recipe.stages)}]"
        identities_so_far = identities(recipe, config, cache, number, identities_so_far)
        identity = identities_so_far[-1]
        if not wanted[number]:
            view.end(number, "left out")
            continue
        if command == "report" and importlib.util.find_spec("matplotlib") is None:
            view.say(f"{shown} no report: pip install matplotlib, then ascendchat report --run {recipe.run}")
            view.end(number, "left out")
            continue
        words = stage_command(command, settings, recipe, config)
        if config.fresh:
            cache.forget(identity)
        was_begun = identity in cache.entries
        old_checkpoint = cache.entries[identity].get("old", -1) if was_begun else last_saved(recipe.run, command)
        if trained_stage(command) and old_checkpoint == last_saved(recipe.run, command):
            words += ["--resume", "never"]  # the checkpoints in the run folder come from other settings
        heading = f"{shown} ascendchat {shlex.join(words)}"
        missing = [path for path in outputs_of(command, settings, recipe, config.sets) if not path.exists()]
        seconds = cache.seconds(identity)
        if seconds is not None and missing:
            view.say(f"{shown} {missing[0]} is gone: this stage runs again")
        elif seconds is not None:
            view.say(f"{heading}\n      done before, in {seconds:.0f} s: skipped")
            view.end(number, "skipped", seconds)
            continue
        view.begin(number, heading)
        start = time.monotonic()
        write_settings(recipe, command, settings)
        cache.begin(identity, words, old_checkpoint, identities_so_far)
        status = run_command(words, view)
        if status:
            view.say(f"stage {number + 1} ended with status {status}")
            view.end(number, "failed")
            return status
        if command not in ENDLESS:
            cache.done(identity, words, time.monotonic() - start)
        view.end(number, "done", time.monotonic() - start)
    return 0


def last_saved(run: str, command: str) -> int:
    """Time of a stage's last checkpoint, in ns; 0 without any."""
    latest = run_folder(run, trained_stage(command) or "none") / "latest"
    return latest.stat().st_mtime_ns if latest.is_file() else 0


def run_command(words: list[str], view: ProgressView | None = None) -> int:
    """Run one command to its end. Ctrl-C reaches it from the terminal and SIGTERM is passed on: it saves, then ends.
    With a live view its lines go there, else it prints for itself."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    piped = view is not None and view.live
    if piped:
        environment["PYTHONIOENCODING"] = "utf-8:replace"  # read as such below, whatever the terminal's own is (GBK)
    child: subprocess.Popen[str] | None = None
    early_signals: list[int] = []  # received before there was a child

    def pass_on(number: int, frame: FrameType | None) -> None:
        if child is None:
            early_signals.append(number)
        elif number == signal.SIGTERM:
            child.terminate()

    # Before there is a child: a signal right behind its start would end this process alone. Handlers, unlike SIG_IGN,
    # are not inherited.
    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "ascendchat", *words],
            env=environment,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.STDOUT if piped else None,
            text=True,
            encoding="utf-8",
            errors="replace",
            close_fds=False,  # a stage keeps the lock of `lock_run` when this process is killed
        )
        for number in early_signals:
            child.send_signal(number)
        if piped and child.stdout is not None and view is not None:
            for line in child.stdout:
                view.take(line)
        status = child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
