"""Every shipped recipe from its first stage to its last, at toy size, on stand-ins in the published layout."""

from __future__ import annotations

import multiprocessing
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stand_ins import write_stand_ins

from ascendchat.cli import main
from ascendchat.config.commands import SpeedrunConfig
from ascendchat.data import toyworld
from ascendchat.errors import home
from ascendchat.speedrun import command as speedrun
from ascendchat.speedrun.recipe import read_recipe, recipe_files

STEPS = {"num_iterations": 2, "save_every": 0, "eval_every": -1, "sample_every": 0, "device_batch_size": 2}
ROWS = {**STEPS, "total_batch_size": 128, "minutes": None, "fp8": None}
NARROW = {"depth": 1, "dim": 32, "head_dim": 16, "max_seq_len": 64, "num_iterations": 2}
SMALL: dict[str, dict[str, Any]] = {  # for each command, what makes it small; a null takes a setting away
    "tokenizer train": {"vocab_size": 300, "max_chars": None},
    "data prepare": {"workers": 1},
    "base": {**ROWS, **NARROW},
    "mid": {name: value for name, value in ROWS.items() if name not in ("minutes", "fp8")},
    "sft": {name: value for name, value in ROWS.items() if name not in ("minutes", "fp8")},
    "finetune": {**STEPS, "total_batch_size": 256, "max_seq_len": 64},
    "rl": {**STEPS, "num_iterations": 1, "prompts_per_step": 2, "samples": 2, "slots": 4, "max_new_tokens": 4}
    | {"rollout_devices": None, "inference_engine": None, "refill": 0},
    "eval base": {"max_per_task": 2, "tokens_per_batch": None},
    "eval chat": {"max_per_task": 1, "max_new_tokens": 4, "tokens_per_batch": None, "slots": 4},
}


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stand-ins; a small part of the embedded corpus; workers that are forked, not started anew."""
    told, read, talks = toyworld.documents, toyworld.texts, toyworld.chats
    monkeypatch.setattr(toyworld, "documents", lambda split: islice(told(split), 60))
    monkeypatch.setattr(toyworld, "texts", lambda: islice(read(), 300))
    monkeypatch.setattr(toyworld, "chats", lambda *given, **more: islice(talks(*given, **more), 50))
    forked = multiprocessing.get_context("fork")
    monkeypatch.setattr("ascendchat.data.prepare.multiprocessing.get_context", lambda way: forked)
    return write_stand_ins(tmp_path / "sets", models=True)


def small(name: str, sets: Path, run: str = "") -> Path:
    """A recipe that is like the shipped one, for one device that is here."""
    commands = {command for command, _ in read_recipe(recipe_files()[name]).stages}
    settings = {command: values for command, values in SMALL.items() if command in commands}
    if "data fetch" in commands:
        settings["data fetch"] = {"source": str(sets)}
    own = {"like": str(recipe_files()[name]), "chip": "", "devices": 1, "settings": settings}
    path = sets.parent / f"small-{name}.yaml"
    path.write_text(yaml.safe_dump({**own, "run": run} if run else own), encoding="utf-8")
    return path


def chain(name: str, sets: Path, run: str = "") -> list[str]:
    """Run every stage, as `speedrun` would type it, but in this process; which there were."""
    recipe, done = read_recipe(small(name, sets, run)), list[str]()
    config = SpeedrunConfig(name, sets=str(sets), device_type="cpu")
    for command, settings in recipe.stages:
        speedrun.write_settings(recipe, command, settings)
        if command == "serve":  # which runs until it is stopped: the same model answers one prompt
            words = ["eval", "chat", "--model", str(settings["checkpoint"]), "--tasks", "toy_arithmetic_en"]
            words += ["--device-type", "cpu", "--max-per-task", "1", "--max-new-tokens", "2"]
        else:
            words = speedrun.stage_command(command, settings, recipe, config)
        assert main(words) == 0, f"{name}: ascendchat {' '.join(words)}"
        done.append(command)
    return done


@pytest.mark.long(short="test_the_data_of_every_recipe_is_read")
@pytest.mark.parametrize("name", sorted(recipe_files()))
def test_a_recipe_runs_from_its_first_stage_to_its_last(name: str, sets: Path) -> None:
    if name == "rl-npu":  # it goes on from the last stage of a run
        chain("d12-910b-8", sets)
    assert chain(name, sets) == [command for command, _ in read_recipe(recipe_files()[name]).stages]
    if name not in ("310p-serve", "rl-npu"):
        assert list(home().rglob("report.html"))
