"""A recipe runs its stages in order, skips what is done, and stops where one fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_recipes import Calls

from ascendchat.config.commands import SpeedrunConfig
from ascendchat.config.serve import ServeConfig
from ascendchat.errors import UserError, home
from ascendchat.processes import is_free
from ascendchat.runs.results import NewResults
from ascendchat.runs.run import run_folder
from ascendchat.speedrun import command
from ascendchat.speedrun.estimate import file_tokens
from ascendchat.speedrun.stage_cache import StageCache

ROOT = Path(__file__).resolve().parent.parent.parent

RECIPE = """
run: small
stages:
  - tokenizer train: {vocab_size: 600}
  - base: {depth: 2, fp8: false, data: [$HOME/data/a, $HOME/data/b]}
  - sft:
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe of three stages for the run `small`."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What stands for the commands."""
    return Calls(monkeypatch)


def test_stages_run_in_order_with_their_flags(recipe: str, commands: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(SpeedrunConfig(recipe)) == 0
    assert commands.called == [
        "tokenizer train --vocab-size 600",
        f"base --depth 2 --no-fp8 --data {home()}/data/a,{home()}/data/b --run small --resume never",
        "sft --run small --resume never",
    ]
    assert "ascendchat chat --run small" in capsys.readouterr().out


def test_devices_and_their_type_reach_the_training_stages_only(recipe: str, commands: Calls) -> None:
    assert command.run(SpeedrunConfig(recipe, device_type="npu", devices=2)) == 0
    assert commands.called[0] == "tokenizer train --vocab-size 600"
    assert commands.called[2] == "launch --devices 2 sft --run small --device-type npu --resume never"


def test_what_was_made_is_served_afterwards_if_that_is_wanted(
    recipe: str, commands: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(SpeedrunConfig(recipe, device_type="npu", devices=2, serve=True)) == 0
    assert commands.called[3:] == ["serve --run small --device-type npu --devices 2"]
    shown = capsys.readouterr().out
    assert "Talk to it" in shown
    assert "In a browser" not in shown
    commands.fails = "sft"
    assert command.run(SpeedrunConfig(recipe, serve=True, fresh=True)) == 1
    assert commands.called[-1].startswith("sft"), "no page of a model that was not made"
    without = tmp_path / "without.yaml"
    without.write_text("stages: [{tokenizer train: {vocab_size: 600}}]", encoding="utf-8")
    with pytest.raises(UserError, match="trains no model"):
        command.run(SpeedrunConfig(str(without), serve=True))


def test_a_page_that_cannot_be_served_is_known_before_the_training(
    recipe: str, commands: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.run(SpeedrunConfig(recipe, serve=True, only=("tokenizer train",))) == 0
    assert "nothing is served" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(command, "is_free", is_free)
        monkeypatch.setattr(ServeConfig, "port", taken.getsockname()[1])
        before = list(commands.called)
        with pytest.raises(UserError, match="is in use; leave --serve out"):
            command.run(SpeedrunConfig(recipe, serve=True))
        assert commands.called == before
    if sys.platform != "linux":  # others have no second address by themselves
        return
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        monkeypatch.setattr(ServeConfig, "port", elsewhere.getsockname()[1])
        assert command.run(SpeedrunConfig(recipe, serve=True)) == 0, "another address is not in the way"


def test_what_is_done_is_skipped_and_a_change_runs_all_that_follows(recipe: str, commands: Calls) -> None:
    command.run(SpeedrunConfig(recipe))
    command.run(SpeedrunConfig(recipe))
    assert len(commands.called) == 3
    Path(recipe).write_text(RECIPE.replace("depth: 2", "depth: 3"), encoding="utf-8")
    command.run(SpeedrunConfig(recipe))
    assert [line.split()[0] for line in commands.called[3:]] == ["base", "sft"]
    command.run(SpeedrunConfig(recipe, fresh=True))
    assert len(commands.called) == 8


def test_a_change_in_a_linked_folder_is_another_input(tmp_path: Path) -> None:
    for name in ("data", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "more").symlink_to(tmp_path / "there")
    ledger, seen = StageCache.open("small"), set()
    for text in ("a", "ab"):
        (tmp_path / "there" / "a.txt").write_text(text, encoding="utf-8")
        seen.add(ledger.identity("", ["base"], [tmp_path / "data"]))
    assert len(seen) == 2
    assert file_tokens(tmp_path / "data")


def test_a_failed_stage_ends_the_run_and_is_tried_again(recipe: str, commands: Calls) -> None:
    commands.fails = "base"
    assert command.run(SpeedrunConfig(recipe)) == 1
    assert len(commands.called) == 2
    commands.fails = ""
    assert command.run(SpeedrunConfig(recipe)) == 0
    assert [line.split()[0] for line in commands.called[2:]] == ["base", "sft"]


def test_a_stage_that_was_interrupted_continues_and_one_that_has_changed_starts_anew(
    recipe: str, commands: Calls
) -> None:
    latest = home() / "runs" / "small" / "sft" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("step_000007")  # of other settings
    commands.fails = "sft"
    command.run(SpeedrunConfig(recipe))
    command.run(SpeedrunConfig(recipe))  # the first try ended before it saved anything
    os.utime(latest, ns=(1, latest.stat().st_mtime_ns + 1))
    command.run(SpeedrunConfig(recipe))  # the second saved
    assert [line.endswith("--resume never") for line in commands.called[2:]] == [True, True, False]
    Path(recipe).write_text(RECIPE.replace("depth: 2", "depth: 3"), encoding="utf-8")
    command.run(SpeedrunConfig(recipe))
    assert [line.endswith("--resume never") for line in commands.called[5:]] == [True, True]


EARLY = """
import os, signal, subprocess, time
class Popen(subprocess.Popen):
    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        while not os.path.exists("ready"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.{name})  # before whoever starts it knows that it is there
subprocess.Popen = Popen
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "early"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_a_signal_lets_the_stage_save_before_both_end(tmp_path: Path, number: signal.Signals, early: bool) -> None:
    """The stage needs a while to save: it gets it."""
    package = tmp_path / "ascendchat"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.3)\n    open('saved', 'w').close()\n    sys.exit(130)\n"
        "signal.signal(signal.SIGINT, save)\nsignal.signal(signal.SIGTERM, save)\n"
        "open('ready', 'w').close()\ntime.sleep(300)\n"
    )
    start = "from ascendchat.speedrun.command import run_command; sys.exit(run_command([]))"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {start}"
    code = EARLY.format(name=number.name) + code if early else code
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    if early:
        pass  # it has come already
    elif number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to the whole group
    else:
        process.send_signal(number)
    assert process.wait(120) == 130
    assert (tmp_path / "saved").exists()


def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    texts = ["stages: []", "run: a", "stages: [3]", "stages: [{base: {}, sft: {}}]", "stagse: []", "stages: {base: {}}"]
    for text in [*texts, "stages: [{base: [1, 2]}]", "stages: [base]", "stages: 5"]:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError):
            command.read_recipe(str(path))


def test_recipes_are_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [command.find_recipe(name) for name in ("tiny-cpu", "tiny-cpu.yaml", "recipes/tiny-cpu.yaml")] == [
        ROOT / "ascendchat" / "recipes" / "tiny-cpu.yaml"
    ] * 3
    (tmp_path / "tiny-cpu").write_text("run: mine\nstages: [{sft: {}}]")
    assert command.read_recipe(command.find_recipe("tiny-cpu")).run == "mine"  # a file of one's own wins
    with pytest.raises(UserError, match=r"there is no recipe huge; .*tiny-cpu"):
        command.find_recipe("huge")


def test_a_name_that_leaves_the_home_is_refused_before_anything_is_written(recipe: str, commands: Calls) -> None:
    with pytest.raises(UserError, match="cannot name a run"):
        command.run(SpeedrunConfig(recipe, run="../../evil"))
    assert not commands.called
    assert not list(home().rglob("*"))
    assert not (home().parent / "evil").exists()


@pytest.mark.parametrize(("gone", "again"), [("runs/small/base", ["base"]), ("tokenizer", ["tokenizer"])])
def test_a_stage_whose_result_was_deleted_runs_again(recipe: str, commands: Calls, gone: str, again: list[str]) -> None:
    command.run(SpeedrunConfig(recipe))
    shutil.rmtree(home() / gone)
    command.run(SpeedrunConfig(recipe))
    assert [line.split()[0] for line in commands.called[3:]] == again


def test_settings_that_come_back_do_not_find_the_results_of_others(recipe: str, commands: Calls) -> None:
    other = RECIPE.replace("depth: 2", "depth: 3")
    for text in (RECIPE, other, RECIPE):
        Path(recipe).write_text(text, encoding="utf-8")
        command.run(SpeedrunConfig(recipe))
    assert [line.split()[0] for line in commands.called[3:]] == ["base", "sft", "base", "sft"]
    assert all(line.endswith("--resume never") for line in commands.called[3:])


def test_settings_that_come_back_after_an_interruption_start_anew(recipe: str, commands: Calls) -> None:
    commands.saves_and_fails = "base"
    for text in (RECIPE, RECIPE.replace("depth: 2", "depth: 3"), RECIPE):
        Path(recipe).write_text(text, encoding="utf-8")
        command.run(SpeedrunConfig(recipe))
    assert [line.endswith("--resume never") for line in commands.called[1:]] == [True, True, True]


def test_a_damaged_list_of_stages_is_a_sentence(recipe: str, commands: Calls) -> None:
    command.run(SpeedrunConfig(recipe))
    for content in ('{"x', "[1]", ""):
        (home() / "runs" / "small" / "speedrun.json").write_text(content)
        with pytest.raises(UserError, match="--fresh"):
            command.run(SpeedrunConfig(recipe))
    assert command.run(SpeedrunConfig(recipe, fresh=True)) == 0


def write_metrics(stage: str, rows: list[dict[str, float]]) -> None:
    folder = run_folder("small", stage)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_summary_shows_the_loss_of_training_and_the_reward_of_rl() -> None:
    write_metrics("sft", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "val_loss": 0.5}])
    rewards = [{"step": n, "loss": -0.01, "reward": n / 40} for n in range(1, 31)]
    write_metrics("rl", [*rewards, {"step": 30, "accuracy": 0.75}])
    _, sft, rl = command.summary("small").splitlines()
    assert sft.split() == ["sft", "2", "1.5000", "val_loss", "0.5000"]
    assert rl.split(maxsplit=3) == ["rl", "30", "-", "reward 0.1375 -> 0.6375, accuracy 0.7500"]


def test_the_summary_shows_the_reward_of_each_task_and_the_scores_of_each_stage() -> None:
    """Not every step asks questions of every task. The mean over a mixture says little of what was to be learnt."""
    hard = [{"step": n, "reward": 0.5, "reward_of_hard": n / 40} for n in range(1, 31)]
    easy = [{"reward_of_easy": 1.0} if n % 2 else {} for n in range(30)]
    write_metrics("rl", [{**a, **b} for a, b in zip(hard, easy)])
    for stage, accuracy in (("sft", 0.25), ("rl", 0.75)):
        about = {"evaluation": "chat", "model": stage, "step": 1, "settings": {}}
        result = {"accuracy": accuracy, "centred": accuracy, "rows": 8}
        NewResults(run_folder("small", stage), about).add("toy_problems", 8, 8, result, None)
    _, rl, _, heading, problems, *_ = command.summary("small").splitlines()
    assert rl.endswith("reward 0.5000 -> 0.5000 (hard 0.1375 -> 0.6375, easy 1.0000 -> 1.0000)")
    assert (heading.split(), problems.split()) == (["SFT", "RL"], ["toy_problems", "0.2500", "0.7500"])
