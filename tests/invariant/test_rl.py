"""`ascendchat rl`: a reward rises, a killed run ends in the same bytes, and a bad reward function stops nothing."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import rl_runs as runs
import torch
from rl_runs import finish, kill_in, result, rows_of, run_here, transcripts, words
from warm_process import ServerPopen

from ascendchat.data.toyworld import exercises
from ascendchat.data.toyworld.world import toy_world
from ascendchat.errors import UserError
from ascendchat.rl.invariant import batch_invariant
from ascendchat.tasks.toy import ToyExam

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights, and functions that judge."""
    return runs.make_home(tmp_path_factory.mktemp("rl"), runs.talkative())


def test_the_reward_rises_and_everything_is_recorded(home: Path) -> None:
    run_here(home, words("rises", "--samples", "8", steps=8))
    rows = rows_of(home, "rises")
    rewards = [row["reward"] for row in rows]
    assert len(rows) == 8
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    assert all(row["logprob_gap"] < 1e-5 for row in rows), "engine and trainer disagree"
    assert all(0 <= row["informative"] <= 1 and row["entropy"] > 0 for row in rows)
    assert all(0 <= row["pass@1"] <= row["pass@2"] <= row["pass@4"] <= row["pass@8"] <= 1 for row in rows)
    assert not any(row["unjudged"] for row in rows)
    said = transcripts(home, "rises")
    assert len(said) == 8 * 4 * 8
    assert {"question", "answer", "reward", "tokens", "finish", "version"} <= set(said[0])


def test_in_the_batch_invariant_mode_nothing_differs(home: Path) -> None:
    """Whole runs, with a temperature, at every step: the weights of the engine are those of the trainer."""
    run_here(home, words("exact", "--batch-invariant", "--temperature", "0.7", steps=2))
    rows = rows_of(home, "exact")
    assert [(row["logprob_gap"], row["mismatch_kl"], row["max_ratio"]) for row in rows] == [(0.0, 0.0, 1.0)] * 2
    compiled = SimpleNamespace(type="cpu", dtype=torch.float32, compiles=True)
    with pytest.raises(UserError, match="--batch-invariant: a compiler would"):
        batch_invariant(SimpleNamespace(model=runs.talkative(), device=compiled))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("some", ["--temperature", "1.3", "--top-k", "40"]),
        ("gspo", ["--temperature", "0.7", "--preset", "gspo", "--correction", "truncate", "--kl", "0.05"]),
    ],
)
def test_engine_and_trainer_agree_on_what_is_drawn(home: Path, name: str, flags: list[str]) -> None:
    run_here(home, words(name, *flags, steps=2))
    rows = rows_of(home, name)
    for row in rows:
        assert row["logprob_gap"] < 1e-5
        assert row["clip_fraction"] == row["masked_fraction"] == 0.0
        assert row["max_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert row["entropy"] > 0
    if "--kl" in flags:
        assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6), "it begins at the reference"
        assert rows[-1]["kl"] > 1e-6


def test_a_killed_run_ends_in_the_same_bytes(home: Path) -> None:
    """Also in the middle of a batch that is trained in several updates."""
    flags = "--reward", "judges:waited", "--updates", "3", "--prompts-per-step", "6", "--save-every", "1"
    finish(home, words("whole", *flags), how=subprocess.Popen)  # has nothing in common with the one that is killed
    kill_in(home, words("killed", *flags), step=4)
    finish(home, words("killed", *flags))
    assert result(home, "whole", 6) == result(home, "killed", 6)
    rows, again = rows_of(home, "whole"), rows_of(home, "killed")
    assert [row["loss"] for row in rows] == [row["loss"] for row in again]
    assert ["reward" in row for row in rows] == [True, False, False] * 2
    assert all(row["logprob_gap"] < 1e-5 for row in rows), "the weights that answered are those of the batch"
    assert rows[0]["max_ratio"] < 1 + 1e-4 < rows[2]["max_ratio"], "and no longer those that are trained"


def test_a_run_with_a_workflow_that_is_resumed_ends_in_the_same_bytes(home: Path) -> None:
    flags = "--workflow", "judges:twice", "--reward", "judges:vowels=1,format=0.5", "--prompts-per-step", "2"
    command = words("turns", *flags, steps=4)
    run_here(home, command)
    whole, rows, said = result(home, "turns", 4), rows_of(home, "turns"), transcripts(home, "turns")
    shutil.rmtree(home / "runs/turns/rl/step_000004")
    run_here(home, command)
    assert result(home, "turns", 4) == whole
    assert [row["reward"] for row in rows_of(home, "turns")] == [row["reward"] for row in rows]
    assert transcripts(home, "turns") == said
    assert all(row["logprob_gap"] < 1e-5 for row in rows), "engine and trainer disagree behind what was forced"
    assert sum(row["rejected"] for row in rows) > 0
    assert all("[user] again" in line["answer"] for line in said)


def test_two_ranks_ask_and_learn_what_one_does(home: Path) -> None:
    run_here(home, words("one", steps=2))
    finish(home, ["launch", "--devices", "2", *words("two", steps=2)], how=ServerPopen)
    one, two = rows_of(home, "one"), rows_of(home, "two")
    assert one[0]["reward"] == pytest.approx(two[0]["reward"], abs=1e-6), "the same answers"
    for mine, theirs in zip(one, two, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-3)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=0.02)
    assert len(list((home / "runs/two/rl/transcripts").iterdir())) == 2 * 2


def test_a_reward_that_raises_hangs_or_dies_stops_nothing(home: Path) -> None:
    flags = "--reward", "judges:moody", "--reward-timeout", "2", "--prompts-per-step", "2"
    said = run_here(home, words("moody", *flags, steps=1))
    (row,) = rows_of(home, "moody")
    assert row["unjudged"] > 0
    assert "judges:moody failed" in said


def test_rows_can_be_shorter_than_those_of_the_model(home: Path) -> None:
    run_here(home, words("short", "--max-seq-len", "48", steps=1))
    state = json.loads((home / "runs/short/rl/step_000001/state.json").read_text(encoding="utf-8"))
    assert state["shape"]["seq_len"] == 48


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--reward", "judges:nothing"], "judges:nothing"),
        (["--data", "smoltalk"], "smoltalk"),
        (["--warm-start"], "--warm-start is not done here: RL starts from weights alone; leave it out"),
        (["--total-batch-size", "768"], "--total-batch-size is not done here: a step is --prompts-per-step times"),
        (["--rhythm", "stream"], "--rollout-mode stream generates while it trains: give the address of a server"),
    ],
)
def test_wrong_input_is_one_sentence(home: Path, flags: list[str], says: str) -> None:
    said = run_here(home, words("x", *flags), status=2)
    assert says in said
    assert "Traceback" not in said


@pytest.mark.long(short="test_the_reward_rises_and_everything_is_recorded")
def test_a_weak_chat_model_learns_to_ask_the_calculator_and_still_knows_its_name(tmp_path: Path) -> None:
    """SFT shows the calculator in every third reply to a sum, else "I do not know.", and who the assistant is; RL asks
    for both and has the tasks judge. (That abilities lose next to nothing takes a larger model: docs/log.md.)"""
    common = "--device-type cpu --sample-every 0 --log-every 1 --eval-every -1".split()
    finish(tmp_path, ["tokenizer", "train", "--vocab-size", "320"])
    sizes = "--depth 2 --dim 64 --head-dim 16 --max-seq-len 96 --device-batch-size 8 --total-batch-size 768"
    finish(tmp_path, ["base", *sizes.split(), "--run", "tiny", "--steps", "30", *common])
    world, draw = toy_world(), random.Random(0)
    asked = [exercises.arithmetic(world, draw, "en", "train") for _ in range(4000)]
    replies = [question.content if i % 3 == 0 else "I do not know." for i, question in enumerate(asked)]
    talks = [[*question.prompt, {"role": "assistant", "content": reply}] for question, reply in zip(asked, replies)]
    known = ToyExam("identity", "en", "train")
    talks += [known.example(i % len(known)) for i in range(400)]
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), encoding="utf-8")
    sizes = "--device-batch-size 8 --total-batch-size 768 --lr-multiplier 1 --steps 250"
    finish(tmp_path, ["sft", "--start", "tiny", "--run", "weak", "--data", "sums.jsonl", *sizes.split(), *common])
    sizes = "--prompts-per-step 12 --samples 8 --max-new-tokens 40 --refill 0 --device-batch-size 8 --steps 20"
    often = "--data toy_arithmetic_en=0.8,toy_identity_en=0.2 --lr-multiplier 0.2"
    finish(tmp_path, ["rl", "--run", "weak", *sizes.split(), *often.split(), *common])
    rows = rows_of(tmp_path, "weak")

    def mean(task: str, some: list[dict[str, float]]) -> float:
        rewards = [row[name] for row in some if (name := f"reward_of_toy_{task}_en") in row]
        return sum(rewards) / len(rewards)

    first, last = mean("arithmetic", rows[:3]), mean("arithmetic", rows[-5:])
    assert 0.1 < first < 0.6, rows
    assert last > first + 0.25, rows
    assert mean("identity", rows[:3]) > 0.9, rows
    assert mean("identity", rows[-5:]) > 0.75, rows
