"""A recipe runs its stages in order, skips what is done, and stops where one fails."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ascendchat import cli, speedrun
from ascendchat.config import UserError, load_yaml, parse
from ascendchat.config.speedrun import SpeedrunConfig

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

RECIPE = """
run: small
stages:
  - tokenizer train: {vocab_size: 600}
  - base: {depth: 2, fp8: false, data: [$HOME/data/a, $HOME/data/b]}
  - sft:
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


class Commands:
    """Stands for the commands themselves: they have their own tests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        self.fails = ""
        monkeypatch.setattr(speedrun.subprocess, "run", self.run)

    def run(self, words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        line = " ".join(words[3:])
        self.called.append(line)
        return subprocess.CompletedProcess(words, 1 if self.fails and line.startswith(self.fails) else 0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(monkeypatch)


def test_stages_run_in_order_with_their_flags(
    recipe: str, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert speedrun.run(SpeedrunConfig(recipe)) == 0
    home = str(speedrun.home())
    assert commands.called == [
        "tokenizer train --vocab-size 600",
        f"base --depth 2 --no-fp8 --data {home}/data/a,{home}/data/b --run small",
        "sft --run small",
    ]
    assert "ascendchat chat --run small" in capsys.readouterr().out


def test_devices_and_their_type_reach_the_training_stages_only(recipe: str, commands: Commands) -> None:
    assert speedrun.run(SpeedrunConfig(recipe, device_type="npu", devices=2)) == 0
    assert commands.called[0] == "tokenizer train --vocab-size 600"
    assert commands.called[2] == "launch --devices 2 sft --run small --device-type npu"


def test_what_is_done_is_skipped_and_a_change_runs_all_that_follows(recipe: str, commands: Commands) -> None:
    speedrun.run(SpeedrunConfig(recipe))
    speedrun.run(SpeedrunConfig(recipe))
    assert len(commands.called) == 3
    Path(recipe).write_text(RECIPE.replace("depth: 2", "depth: 3"), encoding="utf-8")
    speedrun.run(SpeedrunConfig(recipe))
    assert [line.split()[0] for line in commands.called[3:]] == ["base", "sft"]
    speedrun.run(SpeedrunConfig(recipe, fresh=True))
    assert len(commands.called) == 8


def test_a_failed_stage_ends_the_run_and_is_tried_again(recipe: str, commands: Commands) -> None:
    commands.fails = "base"
    assert speedrun.run(SpeedrunConfig(recipe)) == 1
    assert len(commands.called) == 2
    commands.fails = ""
    assert speedrun.run(SpeedrunConfig(recipe)) == 0
    assert [line.split()[0] for line in commands.called[2:]] == ["base", "sft"]


@pytest.mark.parametrize("text", ["stages: []", "run: a", "stages: [3]", "stages: [{base: {}, sft: {}}]", "stagse: []"])
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        speedrun.read_recipe(str(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_shipped_recipe_is_made_of_valid_commands(path: Path) -> None:
    name, stages = speedrun.read_recipe(str(path))
    assert load_yaml(path)["about"]
    for command, settings in stages:
        words = speedrun.command_line(command, settings, name, SpeedrunConfig(str(path)))
        found, rest = cli.find(words)
        parse(cli._load("config.", cli.COMMANDS[found][0]), rest)


def test_recipes_are_shipped() -> None:
    assert RECIPES
