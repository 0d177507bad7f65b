"""What is wrong with a recipe, its files or its run is said before the first stage; one process works on a run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_recipes import STAGES, Calls, own

from ascendchat import cli
from ascendchat.chips import find
from ascendchat.config.commands import SpeedrunConfig
from ascendchat.errors import UserError
from ascendchat.speedrun import command as speedrun
from ascendchat.speedrun import stage_cache
from ascendchat.speedrun.estimate import estimates
from ascendchat.speedrun.progress_view import ProgressView
from ascendchat.speedrun.recipe import COMMANDS
from ascendchat.speedrun.stage_cache import lock_run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What stands for the commands."""
    return Calls(monkeypatch)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe of four stages for the run `r`."""
    (tmp_path / "text.jsonl").write_text("{}\n")
    return own(tmp_path, STAGES.format(text=tmp_path / "text.jsonl"))


def test_the_commands_of_recipes_are_those_of_the_program() -> None:
    assert all(cli.COMMANDS[command][0] == config for command, config in COMMANDS.items())


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("bsae: {}", "'bsae' is no stage; did you mean base"),
        ("eval chat: {taskz: [toy]}", "unknown setting taskz; did you mean tasks"),
        ("sft: {epochs: many}", "epochs: 'many' is not a number"),
        ("speedrun: {recipe: tiny-cpu}", "is no stage"),
        ("data fetch: {names: [gsm8k, arc], shards: $SHARDS}", "of one set"),
        ("data fetch: {names: chinese-fineweb-edu, shards: $SHARDS}", "of one set"),  # nobody knows its tokens
    ],
)
def test_a_mistake_in_the_last_stage_is_found_before_the_first(
    calls: Calls, tmp_path: Path, stage: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        speedrun.run(SpeedrunConfig(own(tmp_path, f"stages: [{{doctor: }}, {{{stage}}}]")))
    assert calls.words == []


def test_one_value_stands_for_a_list_of_one_and_large_numbers_may_be_short(calls: Calls, tmp_path: Path) -> None:
    """YAML reads 1e9 as text. The letters of a path are not paths: the first of /data is the whole file system."""
    text = "stages: [{data prepare: {source: /data/text}}, {base: {tokens: 1e9, data: $HOME/data/prepared}}]"
    recipe = speedrun.read_recipe(own(tmp_path, text))
    assert recipe.stages[0][1]["source"] == ["/data/text"]
    assert recipe.tokens() == 10**9
    assert [forecast.seconds is not None for forecast in estimates(recipe, find("H100"), "")] == [False, True, True]


def test_files_of_sets_that_are_missing_are_named_before_the_first_stage(calls: Calls, tmp_path: Path) -> None:
    text = "stages: [{data prepare: {source: ['$SETS/a*.txt'], out: $SETS/made}}, {base: {data: [$SETS/made=2]}},"
    recipe = own(tmp_path, f"run: r\n{text} {{sft: {{data: [$SETS/b.jsonl=0.5]}}}}]")
    (tmp_path / "a1.txt").touch()
    config = SpeedrunConfig(recipe, sets=str(tmp_path))
    with pytest.raises(UserError, match=rf"sft reads {tmp_path}/b.jsonl, which is not there"):
        speedrun.run(config)
    assert calls.words == []
    (tmp_path / "b.jsonl").touch()
    speedrun.run(config)
    assert calls.names == ["data prepare", "base", "sft", "report"]


def test_two_at_once_on_one_run_are_refused(recipe: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_cache, "LOCK_PATIENCE", 0.0)
    with lock_run("r"), pytest.raises(UserError, match=r"works on the run r; .*--run NAME"):
        speedrun.run(SpeedrunConfig(recipe))
    assert calls.words == []
    assert speedrun.run(SpeedrunConfig(recipe)) == 0


def test_a_stage_that_is_left_behind_keeps_the_run_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill -9` ends `ascendchat speedrun` and not the stage that trains."""
    monkeypatch.setattr(stage_cache, "LOCK_PATIENCE", 0.0)
    start = subprocess.Popen
    started: list[subprocess.Popen[str]] = []

    def left_behind(words: list[str], **more: Any) -> SimpleNamespace:
        started.append(start([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, **more))
        return SimpleNamespace(wait=lambda: 0, terminate=lambda: None)

    with lock_run("r"), monkeypatch.context() as patched:
        patched.setattr(speedrun.subprocess, "Popen", left_behind)
        speedrun.run_command(["base"])
    try:
        with pytest.raises(UserError, match="or a stage that it started"), lock_run("r"):
            pass
    finally:
        started[0].communicate("\n")
    with lock_run("r"):
        pass


def test_the_end_says_what_was_done_and_offers_no_model_that_is_not_there(
    recipe: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    speedrun.run(SpeedrunConfig(recipe, only=("data",)))
    said = capsys.readouterr().out
    assert "1 of 5 stages done" in said
    assert "Talk to it" not in said
    speedrun.run(SpeedrunConfig(recipe))
    assert re.search(r"all 5 stages done.*Talk to it", capsys.readouterr().out, re.DOTALL)


def test_a_command_that_is_shown_can_be_typed(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my texts"
    folder.mkdir()
    speedrun.run(SpeedrunConfig(own(tmp_path, f"stages: [{{data prepare: {{source: '{folder}'}}}}]")))
    assert f"ascendchat data prepare --source '{folder}'" in capsys.readouterr().out


def test_the_lines_of_a_stage_are_read_as_it_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Chinese console may have another encoding than UTF-8."""
    monkeypatch.setenv("PYTHONIOENCODING", "gbk")
    monkeypatch.setenv("LC_ALL", "zh_CN.GBK")
    screen = ProgressView("r", ["help"], tmp_path / "log", [None])
    screen.live = True
    assert speedrun.run_command(["help", "setup"], screen) == 0
    assert "用法" in "\n".join(screen.tail)


def test_a_recipe_is_like_the_file_beside_it_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "first.yaml").write_text("stages: [{base: {depth: 3}}]")
    path = own(tmp_path / "mine", "like: first.yaml\nrun: second")
    monkeypatch.chdir(tmp_path)
    assert speedrun.read_recipe(path).settings_of("base") == {"depth": 3}
