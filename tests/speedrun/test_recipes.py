"""Recipes: all are valid and planned without their hardware; stages are chosen, skipped by content and shown."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stand_ins import write_stand_ins

from ascendchat import cli
from ascendchat.chips import find
from ascendchat.config import load_yaml, parse
from ascendchat.config.commands import PlanConfig, SpeedrunConfig
from ascendchat.config.train import PUBLISHED
from ascendchat.data.chat.render import has_reply
from ascendchat.data.fetch import fetch, folder_of
from ascendchat.data.fetch.sources import SETS
from ascendchat.data.mixture import parse_entry
from ascendchat.data.read import read_documents
from ascendchat.errors import UserError, home
from ascendchat.eval.chat import chosen_tasks
from ascendchat.eval.core_benchmark import load_bundle
from ascendchat.plan.goals import train_plan
from ascendchat.runs.run import run_folder
from ascendchat.speedrun import command as speedrun
from ascendchat.speedrun.estimate import estimates
from ascendchat.speedrun.progress_view import ProgressView, seconds_left
from ascendchat.speedrun.recipe import Recipe, expand_folders, recipe_files
from ascendchat.tasks.by_name import load

WANTED = """tiny-cpu d12-910b-8 d20-910b-8 d26-910b-8 d12-910b-4 d20-h100-8 d12-h200-1 zh-d12-h200-1 zh-d20-910b-8
    qwen-sft-910b-8 qwen-grpo-910b-8 310p-serve rl-npu""".split()


def folder_of_sets(folder: Path) -> str:
    """What the recipes call $SETS, with a little in it."""
    for name in ("pretrain/en/wiki_train_00.jsonl.xz", "sft/flan_cot/a.tsv.xz", "sft/mc_train/a.jsonl.xz"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(1000))
    return str(folder)


def own(folder: Path, text: str) -> str:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_stage_of_a_recipe_is_a_command_with_flags_that_exist() -> None:
    assert sorted(recipe_files()) == sorted(WANTED)
    for name, path in recipe_files().items():
        assert load_yaml(path)["about"], name
        recipe = speedrun.read_recipe(path)
        for command, settings in recipe.stages:
            speedrun.write_settings(recipe, command, settings)
            words = speedrun.stage_command(command, settings, recipe, SpeedrunConfig(name, sets="sets"))
            found, rest = cli.split_command(words[3:] if words[0] == "launch" else words)
            parse(cli._load("config.", cli.COMMANDS[found][0]), rest)


def test_every_recipe_is_planned_without_its_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = folder_of_sets(tmp_path)
    for name in WANTED:
        assert cli.main(["speedrun", name, "--dry-run", "--sets", sets]) == 0
        shown = capsys.readouterr().out
        recipe = speedrun.read_recipe(recipe_files()[name])
        stages = [command for command, _ in recipe.stages]
        assert re.findall(r"^ *\d+ (\S.*?) {2,}", shown, flags=re.M) == stages
        chip = find(recipe.chip or "H100")
        assert not recipe.chip or f" x {chip.name}, " in shown
        for command, forecast in zip(stages, estimates(recipe, chip, sets)):
            if command in ("base", "finetune", "serve") or (command == "rl" and name != "rl-npu"):
                assert 0 < (forecast.memory or 0) < chip.memory, (name, command)
                assert forecast.seconds or command == "serve", (name, command)
    assert not list(home().rglob("*")), "a plan writes nothing"


def test_the_data_of_every_recipe_is_read(tmp_path: Path) -> None:
    """From stand-ins in the published layout: fetched from a folder, and each entry of each stage has what it needs.
    The whole of each recipe: tests/invariant/test_recipe_chains.py."""
    sets = str(write_stand_ins(tmp_path / "sets"))
    recipes = [speedrun.read_recipe(path) for path in recipe_files().values()]
    stages = [stage for recipe in recipes for stage in recipe.stages]
    named = {name for command, settings in stages if command == "data fetch" for name in settings["names"]}
    for name in sorted(name for name in named if not name.startswith("models/")):
        fetch(name, source=sets)
    read, asked, texts = set[tuple[str, str]](), set[tuple[str, str]](), set[str]()
    for command, settings in stages:
        source = (
            expand_folders(settings.get("source") or "", sets)
            if command not in ("data prepare", "tokenizer train")
            else ""
        )
        entries = settings.get("data") or PUBLISHED.get(command) or (["gsm8k"] if command == "rl" else [])
        names = [expand_folders(parse_entry(entry).name, sets) for entry in entries if "$HOME" not in entry]
        if command in ("mid", "sft", "finetune"):
            read |= {(name, source) for name in names if name != "toyworld"}
        elif command in ("rl", "eval chat"):
            asked |= {(name, source) for name in (names if command == "rl" else chosen_tasks(settings["tasks"]))}
        elif command in ("data prepare", "tokenizer train"):
            texts |= {expand_folders(text, sets) for text in settings.get("source", []) if text != "toyworld"}
    for name, source in sorted(read):
        assert any(map(has_reply, load(name, "train", source))), name
    for name, source in sorted(asked):
        assert load(name, source=source).prompt(0), name
    for text in sorted(texts):
        assert len(list(read_documents([text if Path(text).parent.name else folder_of(text)]))) > 50, text
    assert len(load_bundle(folder_of("core"))) == len(load_bundle(tmp_path / "sets" / "eval" / "eval_bundle")) == 5


def test_a_plan_agrees_with_the_planner() -> None:
    recipe = speedrun.read_recipe(recipe_files()["d20-910b-8"])
    chip = find("Ascend910B3")
    base = dict(zip([command for command, _ in recipe.stages], estimates(recipe, chip, "")))["base"]
    plan = train_plan(PlanConfig(depth=20, devices=8), chip)
    assert base.seconds == pytest.approx(plan["time"]["hours"] * 3600)
    assert base.memory == plan["memory"]["total"]


def test_a_model_whose_depth_is_not_chosen_yet_is_not_said_to_be_too_large() -> None:
    """The usual depth of `base` needs 20 GiB; with `minutes` alone it takes one that fits."""
    recipe = Recipe("", (("base", {"minutes": 5}), ("sft", {"data": ["toyworld"]}), ("serve", {})))
    base, *_ = estimates(recipe, find("T4"), "")
    assert (base.seconds, base.memory, base.disk) == (300, None, None)
    named = Recipe("", (("base", {"minutes": 5, "depth": 4}),))
    assert estimates(named, find("T4"), "")[0].memory


def test_as_much_text_is_fetched_as_the_depth_needs() -> None:
    def shards(name: str) -> dict[str, int]:
        stages = speedrun.read_recipe(recipe_files()[name]).stages
        return {s["names"][0]: s["shards"] for c, s in stages if c == "data fetch" and "shards" in s}

    d12, d26, chinese = shards("d12-910b-8"), shards("d26-910b-8"), shards("zh-d20-910b-8")
    assert 1.32e9 < d12["climbmix"] * SETS["climbmix"].tokens * 1e6 < 1.6e9
    assert d26["climbmix"] > 8 * d12["climbmix"]
    parts = [chinese[name] * SETS[name].tokens for name in ("skypile", "climbmix")]
    assert parts[0] / sum(parts) == pytest.approx(2 / 3, abs=0.05)
    assert 5.22e3 < sum(parts) < 6.5e3


def test_a_recipe_can_be_like_another(tmp_path: Path) -> None:
    text = "like: d12-910b-8\nrun: mine\nsettings: {base: {depth: 6}, sft: {epochs: 2}}"
    recipe = speedrun.read_recipe(own(tmp_path, text))
    other = speedrun.read_recipe(recipe_files()["d12-910b-8"])
    assert (recipe.run, recipe.chip, recipe.devices) == ("mine", other.chip, other.devices)
    assert (recipe.settings_of("base"), recipe.settings_of("sft")) == ({"depth": 6}, {"epochs": 2})
    assert [command for command, _ in recipe.stages] == [command for command, _ in other.stages]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("like: nothing", "there is no recipe nothing"),
        ("like: PATH", "in a circle"),
        ("like: tiny-cpu\nsettings: {bse: {depth: 2}}", "did you mean base"),
        ("like: tiny-cpu\nsettings: [1]", "holds `name: value` lines"),
        ("like: tiny-cpu\nsettings: {base: 7}", "base holds `name: value` lines"),
        ("devices: 0\nstages: [{sft: {}}]", "from 1 on"),
    ],
)
def test_a_recipe_that_cannot_be_like_another_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = own(tmp_path, text.replace("PATH", str(tmp_path / "own.yaml")))
    with pytest.raises(UserError, match=re.escape(said)):
        speedrun.read_recipe(path)


class Calls:
    """Stands for the commands, which have tests of their own: keeps what was called, and leaves behind what each
    would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: list[list[str]] = []
        self.fails = self.saves_and_fails = ""  # the beginning of a command
        monkeypatch.setattr(speedrun, "run_command", self.call)
        monkeypatch.setattr(speedrun, "is_free", lambda port, host: True)  # whatever else runs on this machine

    @property
    def names(self) -> list[str]:
        return [words[0] if words[0] not in ("eval", "data") else " ".join(words[:2]) for words in self.words]

    @property
    def called(self) -> list[str]:
        """The stages as they were typed, without the report at the end."""
        return [" ".join(words) for words in self.words if words[0] != "report"]

    def call(self, words: list[str], screen: object = None) -> int:
        self.words.append(words)
        typed = " ".join(words)
        if self.fails and typed.startswith(self.fails):
            return 1
        run = words[words.index("--run") + 1] if "--run" in words else "r"
        made = {name: f"runs/{run}/{name}/latest" for name in ("base", "sft")} | {"finetune": f"runs/{run}/hf/latest"}
        made |= {"report": f"runs/{run}/report.html", "tokenizer": "tokenizer/x", "data": "data/prepared/manifest.json"}
        stage = words[3] if words[0] == "launch" else words[0]
        if stage in made:
            path = home() / made[stage]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(time.monotonic_ns()))
        return int(bool(self.saves_and_fails) and typed.startswith(self.saves_and_fails))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What stands for the commands."""
    return Calls(monkeypatch)


STAGES = """
run: r
stages:
  - data prepare: {{source: [{text}]}}
  - base: {{data: [$HOME/data/prepared]}}
  - sft: {{data: [{text}]}}
  - eval chat:
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe of four stages for the run `r`."""
    (tmp_path / "text.jsonl").write_text("{}\n")
    return own(tmp_path, STAGES.format(text=tmp_path / "text.jsonl"))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"from_stage": "sft"}, ["sft", "eval chat", "report"]),
        ({"from_stage": "eval"}, ["eval chat", "report"]),
        ({"only": ("sft", "data-prepare")}, ["data prepare", "sft"]),
    ],
)
def test_stages_are_chosen_by_name(recipe: str, calls: Calls, asked: dict[str, Any], expected: list[str]) -> None:
    assert speedrun.run(SpeedrunConfig(recipe, **asked)) == 0
    assert calls.names == expected
    speedrun.run(SpeedrunConfig(recipe, **asked))
    assert calls.names == expected, "what is done is not done again"
    speedrun.run(SpeedrunConfig(recipe, **asked, fresh=True))
    assert calls.names == expected * 2
    speedrun.run(SpeedrunConfig(recipe))
    assert {"data prepare", "base", "sft", "eval chat", "report"} == set(calls.names)


def test_a_stage_that_is_not_there_is_a_sentence(recipe: str, calls: Calls) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"from_stage": "bas"}, "did you mean base"),
        ({"only": ("mid",)}, "no stage 'mid'"),
        ({"only": ("base",), "from_stage": "sft"}, "exclude each other"),
    ]
    for asked, said in wrong:
        with pytest.raises(UserError, match=said):
            speedrun.run(SpeedrunConfig(recipe, **asked))
    assert calls.names == []


def test_inputs_are_known_by_content_and_not_by_time(recipe: str, calls: Calls, tmp_path: Path) -> None:
    speedrun.run(SpeedrunConfig(recipe))
    (tmp_path / "text.jsonl").touch()
    os.utime(tmp_path / "text.jsonl", ns=(1, 1))
    speedrun.run(SpeedrunConfig(recipe))
    assert len(calls.names) == 5
    (tmp_path / "text.jsonl").write_text("[]\n")  # as long as before
    speedrun.run(SpeedrunConfig(recipe))
    assert calls.names[5:] == ["data prepare", "base", "sft", "eval chat", "report"]


@pytest.mark.parametrize("named", ["chats=0.5", "chats/*.jsonl"])
def test_a_folder_counts_by_what_is_in_it(calls: Calls, tmp_path: Path, named: str) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("{}")
    path = own(tmp_path, f"run: r\nstages: [sft: {{data: ['{tmp_path}/{named}']}}]")
    speedrun.run(SpeedrunConfig(path))
    os.utime(tmp_path / "chats" / "a.jsonl", ns=(1, 1))
    speedrun.run(SpeedrunConfig(path))
    assert calls.names == ["sft", "report"]
    (tmp_path / "chats" / "b.jsonl").write_text("{}")
    speedrun.run(SpeedrunConfig(path))
    assert calls.names[2:] == ["sft", "report"]


def test_a_finetune_stage_continues_where_it_was(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = own(tmp_path, "run: r\nstages: [finetune: {start: m, data: [toyworld]}]")
    whole = calls.call
    monkeypatch.setattr(speedrun, "run_command", lambda words, screen: whole(words) or 1)
    assert speedrun.run(SpeedrunConfig(path)) == 1  # it saved something, then ended
    monkeypatch.setattr(speedrun, "run_command", calls.call)
    speedrun.run(SpeedrunConfig(path))
    assert ["never" in words for words in calls.words] == [True, False, False]


def test_a_recipe_for_a_chip_never_runs_on_another_kind_of_device(calls: Calls, tmp_path: Path) -> None:
    path = own(tmp_path, "run: r\nchip: Ascend910B3\ndevices: 8\nstages: [sft: {data: [toyworld]}]")
    speedrun.run(SpeedrunConfig(path))
    assert calls.words[0][:4] == ["launch", "--devices", "8", "sft"]
    assert calls.words[0][-4:-2] == ["--device-type", "npu"]
    speedrun.run(SpeedrunConfig(path, devices=1, device_type="cpu"))
    assert calls.words[2][0] == "sft"
    assert "cpu" in calls.words[2]


def test_the_report_is_made_at_the_end(recipe: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    speedrun.run(SpeedrunConfig(recipe))
    assert calls.words[-1] == ["report", "--run", "r"]
    shown = capsys.readouterr().out
    assert f"Report: {run_folder('r', 'report.html')}" in shown
    assert shown.index("Report: ") < shown.index("Talk to it: ascendchat chat --run r")


def test_without_matplotlib_there_is_a_line_and_no_report(
    recipe: str, calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert speedrun.run(SpeedrunConfig(recipe)) == 0
    assert "report" not in calls.names
    shown = capsys.readouterr().out
    assert "no report: pip install matplotlib, then ascendchat report --run r" in shown
    assert "Talk to it" in shown
    assert "Report:" not in shown


def test_a_server_is_never_done(calls: Calls, tmp_path: Path) -> None:
    path = own(tmp_path, "run: r\ndevices: 2\nstages: [serve: {checkpoint: m}]")
    speedrun.run(SpeedrunConfig(path))
    speedrun.run(SpeedrunConfig(path))
    assert calls.words == [["serve", "--checkpoint", "m", "--devices", "2"]] * 2


def test_settings_that_are_blocks_stand_in_a_file(calls: Calls, tmp_path: Path) -> None:
    block = "inference_engine: {type: vllm, vllm_config: {device: npu}}"
    for text in (block, block, block.replace("npu", "cpu")):
        speedrun.run(SpeedrunConfig(own(tmp_path, f"run: r\nstages: [base: {{}}, rl: {{{text}}}]")))
        (home() / "runs" / "r" / "rl").mkdir(exist_ok=True)
        (home() / "runs" / "r" / "rl" / "latest").touch()
    asked = [words for words in calls.words if words[0] == "rl"]
    assert len(asked) == 2
    found = load_yaml(asked[0][asked[0].index("--config") + 1])
    assert found == {"inference_engine": {"type": "vllm", "vllm_config": {"device": "cpu"}}}


def test_a_folder_of_sets_that_is_needed_is_asked_for(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCENDCHAT_SETS", raising=False)
    with pytest.raises(UserError, match="--sets DIR"):
        speedrun.run(SpeedrunConfig("d12-h200-1"))
    monkeypatch.setenv("ASCENDCHAT_SETS", "/somewhere")
    recipe = speedrun.read_recipe(recipe_files()["d12-h200-1"])
    words = speedrun.stage_command("sft", recipe.settings_of("sft") or {}, recipe, SpeedrunConfig())
    assert "/somewhere/eval" in words


def test_the_time_that_is_left_is_read_from_the_lines_of_a_stage(tmp_path: Path) -> None:
    assert seconds_left("base step 3/9 | loss 2.0 | ETA 1d 2:03:04") == ((24 + 2) * 60 + 3) * 60 + 4
    assert seconds_left("loss 2.0") is None
    screen = ProgressView("r", ["base", "sft", "rl"], tmp_path / "log", [50.0, 100.0, None])
    screen.begin(0, "ascendchat base")
    screen.take("[rank 0] base step 120/391 | loss 2.5000 | 9,000 tok/s | ETA 0:00:30\n")
    assert screen.numbers == "step 120/391 | loss 2.5000 | 9,000 tok/s | ETA 0:00:30"
    assert screen.remaining() == (30, 130, False)
    screen.end(0, "done", 40.0)
    screen.begin(1, "ascendchat sft")
    own_seconds, all_of_them, known = screen.remaining()
    assert own_seconds == pytest.approx(100, abs=30)
    assert (all_of_them, known) == (own_seconds, False)


def test_on_a_terminal_there_is_one_screen_and_a_log(tmp_path: Path) -> None:
    path = own(tmp_path, "run: r\nstages: [plan: {depth: 4, chip: H100}, plan: {depth: 200, chip: H100}]")
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "CI"}
    environment |= {"TERM": "xterm-256color", "ASCENDCHAT_HOME": str(tmp_path / "home"), "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ascendchat", "speedrun", path], env=environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(60) == 2, shown.decode()
    text = shown.decode()
    assert re.search(r"✓ +1 plan +done +0:\d\d:\d\d", text)
    assert re.search(r"✗ +2 plan +failed", text)
    assert re.search(r"r: stage \d of 2, 0:\d\d:\d\d so far", text)
    assert text.rstrip().endswith("mend it and run the same command: it continues where it was")
    log = (tmp_path / "home" / "runs" / "r" / "speedrun.log").read_text()
    assert "total parameters" in log, "what a stage prints is kept"
    assert "does not fit" in log
    assert "does not fit" in text[text.rindex("✗") :], "the end of what it printed is left on the terminal"


def test_what_is_not_known_is_not_shown_as_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows the model of `rl-npu`, which is that of the run, nor how long one serves."""
    assert cli.main(["speedrun", "rl-npu", "--dry-run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "rl", "?", "?", "?", "-"] in lines
    assert ["together", "?", "?", "?", "-"] in lines
    assert cli.main(["speedrun", "d20-910b-8", "--dry-run", "--only", "tokenizer,base"]) == 0
    assert "together         7.97 h + ?     58.78 GiB   34.02 GiB   -\n" in capsys.readouterr().out
