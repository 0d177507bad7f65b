"""`ascendchat rl`: a reward rises, a killed run ends in the same bytes, and a bad reward function stops nothing."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from warm_process import Popen, ServerPopen

from ascendchat.data.toyworld import work
from ascendchat.data.toyworld.world import toy_world
from ascendchat.record import read_metrics
from ascendchat.tasks.toy import ToyExam

STEPS = 12
REWARDS = '''
import os, time


def vowels(prompt, completion, **row):
    """Share of the letters that are vowels; sampling by chance gives about a third."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))


async def waited(prompt, completion, **row):
    assert row["task"].startswith("toy_") and isinstance(row["answer"], str)
    return vowels(prompt, completion)


async def twice(generator, row):
    """Two turns; some episodes raise."""
    talk = generator.talk(row["messages"])
    first = await talk.reply(max_tokens=8)
    if len(first.ids) < 2:
        raise RuntimeError("too short")
    talk.say("again")
    second = await talk.reply(max_tokens=12)
    return talk.trajectory(await generator.reward(second))


def moody(prompt, completion, **row):
    """Raises, hangs or dies for a fifth of the answers each."""
    mood = len(completion) % 15
    if mood == 0:
        raise RuntimeError("no mood")
    if mood == 1:
        os._exit(3)
    if mood == 2:
        time.sleep(3600)
    return vowels(prompt, completion)
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model that has learnt next to nothing, of the embedded world."""
    folder = tmp_path_factory.mktemp("rl")
    (folder / "judges.py").write_text(REWARDS, encoding="utf-8")
    finish(folder, ["tokenizer", "train", "--vocab-size", "320"])
    sizes = "--depth 2 --dim 64 --head-dim 16 --max-seq-len 96 --device-batch-size 8 --total-batch-size 768"
    finish(folder, ["base", *sizes.split(), "--run", "tiny", "--steps", "30", *COMMON, "--eval-every", "-1"])
    return folder


COMMON = ["--device-type", "cpu", "--sample-every", "0", "--log-every", "1"]


def start(home: Path, words: list[str], how: type[subprocess.Popen[str]] = Popen) -> subprocess.Popen[str]:
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "ascendchat", *words]
    out = subprocess.PIPE
    return how(command, env=environment, cwd=home, stdout=out, stderr=subprocess.STDOUT, text=True)


def finish(home: Path, words: list[str], status: int = 0, how: type[subprocess.Popen[str]] = Popen) -> str:
    output, _ = (process := start(home, words, how)).communicate()
    assert process.returncode == status, output
    return output


def rl(run: str, reward: str, *more: str, steps: int = STEPS) -> list[str]:
    sizes = "--data toy_arithmetic_en --prompts-per-step 4 --samples 8 --max-new-tokens 24 --device-batch-size 4"
    often = f"--steps {steps} --save-every 4 --eval-every -1 --lr-multiplier 0.3"
    words = ["rl", "--start", "tiny", "--run", run, "--reward", f"judges:{reward}", *sizes.split(), *often.split()]
    return [*words, *COMMON, *more]


def rows_of(home: Path, run: str) -> list[dict[str, float]]:
    return [row for row in read_metrics(home / "runs" / run / "rl") if "reward" in row]


@pytest.mark.slow
def test_the_reward_rises_and_everything_is_recorded(home: Path) -> None:
    finish(home, rl("rises", "vowels", steps=30))
    rows = rows_of(home, "rises")
    rewards = [row["reward"] for row in rows]
    assert len(rows) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert all(row["logprob_gap"] < 1e-5 for row in rows), "engine and trainer disagree"
    assert all(0 <= row["informative"] <= 1 and row["entropy"] > 0 for row in rows)
    assert all(0 <= row["pass@1"] <= row["pass@2"] <= row["pass@4"] <= row["pass@8"] <= 1 for row in rows)
    lines = (home / "runs/rises/rl/transcripts/step_000000-0.jsonl").read_text(encoding="utf-8").splitlines()
    said = [json.loads(line) for line in lines]
    assert len(said) == 4 * 8
    assert {"question", "answer", "reward", "tokens", "finish", "version"} <= set(said[0])


@pytest.mark.slow
def test_in_the_batch_invariant_mode_nothing_differs(home: Path) -> None:
    """Whole runs, with a temperature, at every step: the weights of the engine are those of the trainer."""
    finish(home, rl("exact", "vowels", "--batch-invariant", "--temperature", "0.7", steps=3))
    rows = rows_of(home, "exact")
    assert [(row["logprob_gap"], row["mismatch_kl"], row["max_ratio"]) for row in rows] == [(0.0, 0.0, 1.0)] * 3
    usual = ("--batch-invariant", "--compile")
    assert "--batch-invariant: a compiler would" in finish(home, rl("x", "vowels", *usual), status=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("cold", ["--temperature", "0.7"]),
        ("hot", ["--temperature", "1.3", "--top-k", "40"]),
        ("gspo", ["--preset", "gspo", "--correction", "truncate", "--kl", "0.05"]),
    ],
)
def test_engine_and_trainer_agree_on_what_is_drawn(home: Path, name: str, flags: list[str]) -> None:
    finish(home, rl(name, "vowels", *flags, steps=3))
    rows = rows_of(home, name)
    for row in rows:
        assert row["logprob_gap"] < 1e-5
        assert row["clip_fraction"] == row["masked_fraction"] == 0.0
        assert row["max_ratio"] == pytest.approx(1.0, abs=1e-4)
        assert row["entropy"] > 0
    if "--kl" in flags:
        assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6), "it begins at the reference"
        assert rows[-1]["kl"] > 1e-6


@pytest.mark.slow
def test_a_weak_chat_model_learns_to_ask_the_calculator_and_still_knows_its_name(home: Path) -> None:
    """SFT shows the calculator in every third reply to a sum, else "I do not know.", and who the assistant is; RL asks
    for both and has the tasks judge. (That abilities lose next to nothing takes a larger model: docs/log.md.)"""
    world, draw = toy_world(), random.Random(0)
    asked = [work.arithmetic(world, draw, "en", "train") for _ in range(4000)]
    replies = [question.content if i % 3 == 0 else "I do not know." for i, question in enumerate(asked)]
    talks = [[*question.prompt, {"role": "assistant", "content": reply}] for question, reply in zip(asked, replies)]
    known = ToyExam("identity", "en", "train")
    talks += [known.example(i % len(known)) for i in range(400)]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (home / "sums.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sizes = "--device-batch-size 8 --total-batch-size 768 --lr-multiplier 1 --steps 250 --eval-every -1"
    finish(home, ["sft", "--start", "tiny", "--run", "weak", "--data", "sums.jsonl", *sizes.split(), *COMMON])
    sizes = "--prompts-per-step 12 --samples 8 --max-new-tokens 40 --refill 0 --device-batch-size 8 --steps 20"
    often = "--data toy_arithmetic_en=0.8,toy_identity_en=0.2 --lr-multiplier 0.2 --eval-every -1"
    finish(home, ["rl", "--run", "weak", *sizes.split(), *often.split(), *COMMON])
    rows = rows_of(home, "weak")

    def mean(task: str, some: list[dict[str, float]]) -> float:
        rewards = [row[name] for row in some if (name := f"reward_of_toy_{task}_en") in row]
        return sum(rewards) / len(rewards)

    first, last = mean("arithmetic", rows[:3]), mean("arithmetic", rows[-5:])
    assert 0.1 < first < 0.6, rows
    assert last > first + 0.25, rows
    assert mean("identity", rows[:3]) > 0.9, rows
    assert mean("identity", rows[-5:]) > 0.75, rows


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_bytes(home: Path) -> None:
    finish(home, rl("whole", "waited"), how=subprocess.Popen)  # nothing in common with those that are killed
    chance, kills = random.Random(0), 0
    while kills < 3:
        process = start(home, rl("killed", "waited"))
        assert process.stdout is not None
        steps = chance.randint(1, 4)
        for line in process.stdout:
            steps -= " step " in line
            if not steps:
                break
        process.kill()
        process.wait()
        kills += 1
    finish(home, rl("killed", "waited"))
    for file in ("model.safetensors", "optim-0-of-1.safetensors"):
        whole, killed = (home / "runs" / run / "rl" / f"step_{STEPS:06d}" / file for run in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()
    assert [row["reward"] for row in rows_of(home, "whole")] == [row["reward"] for row in rows_of(home, "killed")]


@pytest.mark.slow
def test_a_killed_run_with_a_workflow_ends_in_the_same_bytes(home: Path) -> None:
    flow = "--workflow", "judges:twice"
    finish(home, rl("turns", "vowels=1,format=0.5", *flow, steps=6))
    process = start(home, rl("turns-killed", "vowels=1,format=0.5", *flow, steps=6))
    assert process.stdout is not None
    steps = 5  # the checkpoint of step 4 is there
    for line in process.stdout:
        steps -= " step " in line
        if not steps:
            break
    process.kill()
    process.wait()
    finish(home, rl("turns-killed", "vowels=1,format=0.5", *flow, steps=6))
    for file in ("model.safetensors", "optim-0-of-1.safetensors"):
        whole, killed = (home / "runs" / run / "rl" / "step_000006" / file for run in ("turns", "turns-killed"))
        assert whole.read_bytes() == killed.read_bytes()
    rows = rows_of(home, "turns")
    assert [row["reward"] for row in rows] == [row["reward"] for row in rows_of(home, "turns-killed")]
    assert all(row["logprob_gap"] < 1e-5 for row in rows), "engine and trainer disagree behind what was forced"
    assert sum(row["rejected"] for row in rows) > 0
    lines = (home / "runs/turns/rl/transcripts/step_000000-0.jsonl").read_text(encoding="utf-8").splitlines()
    assert all("[user] again" in json.loads(line)["answer"] for line in lines)


@pytest.mark.slow
def test_two_ranks_ask_and_learn_what_one_does(home: Path) -> None:
    finish(home, rl("one", "vowels", steps=3))
    finish(home, ["launch", "--devices", "2", *rl("two", "vowels", steps=3)], how=ServerPopen)
    one, two = rows_of(home, "one"), rows_of(home, "two")
    assert one[0]["reward"] == pytest.approx(two[0]["reward"], abs=1e-6), "the same answers"
    for mine, theirs in zip(one, two):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-3)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=0.02)
    assert len(list((home / "runs/two/rl/transcripts").iterdir())) == 3 * 2


@pytest.mark.slow
def test_a_reward_that_raises_hangs_or_dies_stops_nothing(home: Path) -> None:
    output = finish(home, rl("moody", "moody", "--reward-timeout", "3", steps=2))
    rows = rows_of(home, "moody")
    assert len(rows) == 2
    assert sum(row["unjudged"] for row in rows) > 0
    assert "judges:moody failed" in output


@pytest.mark.slow
def test_wrong_input_is_one_sentence(home: Path) -> None:
    assert "judges:nothing" in finish(home, rl("x", "nothing"), status=2)
    output = finish(home, [*rl("x", "vowels"), "--data", "smoltalk"], status=2)
    assert "Traceback" not in output
    for flag in (["--warm-start"], ["--total-batch-size", "768"]):
        assert f"{flag[0]} means nothing here" in finish(home, [*rl("x", "vowels"), *flag], status=2)


def test_rows_can_be_shorter_than_those_of_the_model(home: Path) -> None:
    finish(home, rl("short", "vowels", "--max-seq-len", "48", steps=1))
    state = json.loads((home / "runs" / "short" / "rl" / "step_000001" / "state.json").read_text(encoding="utf-8"))
    assert state["shape"]["seq_len"] == 48
